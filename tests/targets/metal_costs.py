"""Estimates the cost of the suites' kernels on an Apple GPU by the static model (kernel_costs.py). Nothing is run.

    PYTHONPATH=tests python -m targets.metal_costs --cases 300 --json results/metal-costs.json
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from flambeau.bench.cliff_cases import draw
from flambeau.bench.models import SUITE, without_dropout
from flambeau.capture.decompositions import table
from flambeau.capture.kept_whole import whole_operators
from flambeau.codegen.simt.metal import SHAPE, Metal
from flambeau.ir.program import Program
from flambeau.pipeline import Options, interpret, lowered
from flambeau.results_file import write_results
from flambeau.schedule.plan import schedule
from flambeau.torch_compat.aot import min_cut_rematerialization_partition
from targets.kernel_costs import program_costs

MOST, SERIAL = 1.5, 64  # multiple of the bytes that must move; elements that one work-item reduces serially
Programs = list[tuple[str, Program]]


def programs(name: str, run: Callable[[Callable[..., Any]], Any]) -> Programs:
    """The graphs that are captured while run(compile) runs, as programs for Metal."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return interpret(gm)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, inference_compiler=keep, decompositions=table(False),
                           partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True)
    torch._dynamo.reset()
    with whole_operators(False):
        run(lambda f, **options: torch.compile(f, backend=backend, **options))
    out = []
    for gm in found:
        graph = lowered(gm, Options(target="metal-emulator"))[2].graph
        out.append((name, schedule(graph, graph.capabilities)))
    return out


def cliffs(seed: int) -> Programs:
    """The programs of a random case of the benchmark `cliffs`, in sizes for GPUs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        case = draw(seed, "cuda")

        def run(compile: Callable[..., Any]) -> None:
            inputs = [t.detach().requires_grad_(case.gradient and t.is_floating_point()) for t in case.tensors("cpu")]
            results = compile(case.function, dynamic=case.dynamic)(*inputs)
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            if wanted := [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]:
                torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])

        return programs(f"{seed}: {case}", run)


def models(name: str, size: str = "tiny") -> Programs:
    """The programs of a training step of a model of the benchmarks."""
    model = SUITE[name]
    config = {k: n for k, n in model.sizes[size].items() if k != "batch"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = without_dropout(model.create(**config))
        *inputs, target = model.draw(config, 2)
        return programs(name, lambda compile: model.loss(compile(module)(*inputs), target).backward())


def row(name: str, found: Programs) -> dict[str, Any]:
    all_costs = [(kernel, cost) for _, program in found for kernel, cost in program_costs(program, Metal, SHAPE)]
    return {"name": name, "kernels": len(all_costs), "ratio": round(max((c.ratio for _, c in all_costs), default=1), 3),
            "serial": max((c.alone for _, c in all_costs), default=0),
            "beyond": [f"{', '.join(k.origins)}: {c}, {c.alone} in a row" for k, c in all_costs
                       if c.ratio > MOST or c.alone > SERIAL]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="of the first case; drawn if none is given")
    parser.add_argument("--size", default="small", help="of the models")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    rows = []
    todo = [*((name, lambda name=name: models(name, args.size)) for name in SUITE),
            *((f"case {k}", lambda k=k: cliffs(k)) for k in range(seed, seed + args.cases))]
    for name, make in todo:
        try:
            rows.append(row(name, make()))
        except Exception as error:  # torch cannot trace a case without data
            rows.append({**row(name, []), "untraced": str(error)[:200]})
        for line in rows[-1]["beyond"]:
            print(name, line, flush=True)
        if len(rows) % 20 == 0 or len(rows) == len(todo):
            kernels = sum(r["kernels"] for r in rows)
            write_results(args.json, "metal costs", rows, {
                "seed": seed, "kernels": kernels, "beyond": sum(len(r["beyond"]) for r in rows),
                "untraced": sum("untraced" in r for r in rows), "worst": max(r["ratio"] for r in rows),
                "serial": max(r["serial"] for r in rows)})
            print(len(rows), kernels, flush=True)


if __name__ == "__main__":
    main()

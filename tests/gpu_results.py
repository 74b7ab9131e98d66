"""Random cases on a GPU: results against float64, and kernels against the same ones without ptxas's optimizations.

    python tests/gpu_results.py --cases 150 --seed 7 --limit 75 --json gpu-results.json

Rounding explains a few values that are far from float64's, at borders of a clamp for example, if eager has about as
many. Nothing explains that a kernel has other bits when ptxas does not optimize it, except a fault of that compiler.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.bench.cliff_cases import Case, draw
from flambeau.bench.parts import Talk, run
from flambeau.results_file import write_results

FAR = 0.02  # of the largest value: what half precision may lose in a sum
MOST = 1 << 24  # elements of an input, since float64 needs eight bytes for each of several copies
INDEXED = ("pooling", "resize")  # families with most index arithmetic: they are half of the cases
PLAIN = "DISABLE_PTXAS_OPT"  # Triton's variable


def chosen(first: int, count: int, size: str) -> Iterator[int]:
    """Yields the seeds of cases without products, as libraries compute those."""
    others, seed = 0, first - 1
    for _ in range(count):
        while True:
            case = draw(seed := seed + 1, size)
            if case.family in ("product", "convolution") or max(math.prod(i.shape) for i in case.inputs) > MOST:
                continue
            if case.family in INDEXED or others <= (seed - first) // 16:
                break
        others += case.family not in INDEXED
        yield seed


def results(case: Case, call: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype | None = None
            ) -> list[Tensor]:
    """The results, and the gradients if the case has them, for inputs converted to a dtype."""
    given = [t.detach().to(dtype if dtype and t.is_floating_point() else t.dtype) for t in inputs]
    for t in given:
        t.requires_grad_(case.gradient and t.is_floating_point())
    out = call(*given)
    found = [out] if isinstance(out, Tensor) else list(out)
    if case.gradient:
        found = [t for t in found if t.requires_grad]
        source = torch.Generator(inputs[0].device).manual_seed(case.seed)
        grads = [torch.empty(t.shape, device=t.device).normal_(generator=source).to(inputs[0].dtype).to(t.dtype)
                 for t in found]
        leaves = [t for t in given if t.requires_grad]
        found += [t for t in torch.autograd.grad(found, leaves, grads, allow_unused=True) if t is not None]
    return [t.detach() for t in found]


def judged(ours: Sequence[Tensor], eager: Sequence[Tensor], true: Sequence[Tensor]) -> str:
    """What is wrong with our results; empty if nothing is, or no more than with eager's."""
    for k, (a, b, t) in enumerate(zip(ours, eager, true, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {k} is {a.dtype}{list(a.shape)}, eager's {b.dtype}{list(b.shape)}"
        if not a.is_floating_point():
            far, theirs = a != b, -1
        else:
            exact = t.double().nan_to_num(0, 0, 0)
            limit = FAR * exact.abs().max().clamp_min(1e-30)
            far, other = ((x.double().nan_to_num(0, 0, 0) - exact).abs() > limit for x in (a, b))
            theirs = int(other.sum())
        if (count := int(far.sum())) > 2 * theirs + 2:
            where = far.nonzero()[:3].tolist()
            values = [(float(a[*i]), float(b[*i]), float(t[*i])) for i in where]
            return (f"result {k} has {count} wrong values, eager's {max(theirs, 0)}: at {where} (ours, eager, float64) "
                    f"{values}")
    return ""


def bits(t: Tensor) -> int:
    """A number that depends on every bit of a tensor, and where it is."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    flat = t.contiguous().view(words).reshape(-1).long()
    return int(((flat + 12345) * (torch.arange(flat.numel(), device=t.device) * 2654435761 + 97)).sum())


def part(talk: Talk, seeds: Sequence[int], size: str, device: str, plain: bool) -> None:
    """Runs some cases in a process of its own. `plain`: kernels are not optimized by ptxas, and only give bits."""
    if plain:
        os.environ[PLAIN] = "1"

    def one(seed: int) -> None:
        case = draw(seed, size)
        inputs = case.tensors(device)
        torch.compiler.reset()
        compiled = torch.compile(lambda *args: case.function(*args), backend="flambeau", dynamic=case.dynamic or None)
        ours, again = (results(case, compiled, inputs) for _ in range(2))
        told: dict[str, Any] = {"plain" if plain else "bits": list(map(bits, ours)),
                                "repeats": list(map(bits, ours)) == list(map(bits, again))}
        if not plain:
            eager = results(case, case.function, inputs)
            told["wrong"] = judged(ours, eager, results(case, case.function, inputs, torch.float64))
        talk.tell(rows={seed: told})
        if device == "cuda":
            torch.cuda.empty_cache()  # other processes need it

    for seed in seeds:
        talk.attempt(f"case {seed}", lambda seed=seed: one(seed))  # type: ignore[misc]


def faults(rows: dict[int, dict[str, Any]]) -> list[str]:
    """A line for each case with wrong results, or with other bits without optimization."""
    lines = []
    for seed, row in sorted(rows.items()):
        if row.get("wrong"):
            lines.append(f"{seed} {row['name']}: {row['wrong']}")
        if row.get("repeats") and {"bits", "plain"} <= row.keys() and row["bits"] != row["plain"]:
            lines.append(f"{seed} {row['name']}: other bits without optimization")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="cuda")
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--limit", type=float, default=75)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds = list(chosen(args.seed, args.cases, args.size))
    rows = {seed: {"seed": seed, "name": str(draw(seed, args.size))} for seed in seeds}
    half = max(1, args.jobs // 2)
    parts = {f"{'plain ' if plain else ''}{k}": {"seeds": seeds[k::half], "size": args.size, "device": args.device,
                                                "plain": plain} for k in range(half) for plain in (False, True)}
    for name, told in run("gpu_results", parts, args.jobs, args.limit, args.limit - 5, {"FLAMBEAU_JOBS": "2"}):
        for seed, more in told.get("rows", {}).items():
            row = rows[int(seed)]
            row["repeats"] = more.pop("repeats") and row.get("repeats", True)
            row |= more
        for what, why in told.get("errors", {}).items():
            print(name, what, why[:200], flush=True)
    found = faults(rows)
    done = sum("bits" in row for row in rows.values())
    both = sum({"bits", "plain"} <= row.keys() for row in rows.values())
    if args.json:
        write_results(args.json, "gpu-results", list(rows.values()),
                      {"cases": done, "also without optimization": both, "faults": found}, args.device)
    print(*found, f"{done} cases, {both} also without optimization; {len(found)} faults", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

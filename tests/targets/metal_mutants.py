"""Plants faults into Metal sources, one at a time, and tests whether the checker or the emulator finds them.

    PYTHONPATH=tests python -m targets.metal_mutants --json results/metal-faults.json     # 60 of each kind, by a seed

A source is run with several inputs: sizes that its groups divide and sizes that they do not, memory that is aligned for
wide accesses and memory one element further, values whose extremes lie at the edges, values many of which are equal.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from flambeau import pipeline
from flambeau.config import config
from flambeau.errors import Error
from flambeau.results_file import write_results
from flambeau.runtime.executor import write
from flambeau.targets.metal.checker import check

NAME = "metal-emulator"
Inputs: TypeAlias = tuple[torch.Tensor, ...]
Draw: TypeAlias = Callable[[], Inputs]


def numbers(*shape: int) -> torch.Tensor:
    """Values far from zero, so that every rounding matters. The extremes of most lines lie at their ends, those of some
    anywhere."""
    x = torch.randn(shape) + 1000
    for d in range(x.ndim):
        line = x.movedim(d, 0)
        line[0].view(-1)[::2] += 100
        line[-1].view(-1)[::3] += 200
        line[line.shape[0] // 2].view(-1)[::5] -= 300
        if x.ndim == 2:
            others = torch.arange(1, line.shape[1], 7)
            line[torch.randint(len(line), others.shape), others] += 300
    return x


def whole(*shape: int) -> torch.Tensor:
    """Integers, whose sums do not depend on the order. None is 0, and the last is not 1, so that each one affects sums
    and products."""
    x = torch.randint(1, 4, shape).float()
    x.view(-1)[-1] = 3
    return x


def bytes_with_ends(*shape: int) -> torch.Tensor:
    """Bytes of which the first and the last are the largest."""
    x = torch.randint(-90, 90, shape, dtype=torch.int8)
    x.view(-1)[0] = x.view(-1)[-1] = 100
    return x


def places(count: int, size: int) -> torch.Tensor:
    i = torch.randint(size, (count,))
    i[0], i[-1] = size - 1, 0
    return i


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x / 100, 1)


def bags(i: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(i, w, at, mode="sum")


def join(mode: str) -> Callable[..., torch.Tensor]:
    def f(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(9, x.shape[1], dtype=x.dtype).index_reduce(0, i, x, mode)

    return f


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.var(1), x.argmax(1)


# The programs: function, inputs, and whether one source serves all inputs.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Draw, ...], bool]] = {
    "softmax of rows": (softmax, (lambda: (numbers(5, 302),), lambda: (numbers(4, 1024),)), False),
    "softmax of long rows": (softmax, (lambda: (numbers(3, 70001),), lambda: (numbers(2, 69632),)), False),
    "softmax of any rows": (softmax, (lambda: (numbers(3, 4097),), lambda: (numbers(2, 13059),),
                                      lambda: (numbers(5, 8704),)), True),
    "softmax of short rows": (lambda x: torch.softmax(x / 100, 1), (lambda: (numbers(300, 9),),), False),
    "moments": (moments, (lambda: (numbers(9, 2051),), lambda: (numbers(3, 2048),)), False),
    "scan of rows": (lambda x: x.cumsum(1), (lambda: (numbers(3, 3001),), lambda: (numbers(2, 4096),)), False),
    "scan of columns": (lambda x: x.cumsum(0), (lambda: (numbers(300, 70),), lambda: (numbers(256, 64),)), False),
    "scan of any rows": (lambda x: x.cumsum(1), (lambda: (numbers(3, 9001),), lambda: (numbers(2, 20483),),
                                                   lambda: (numbers(2, 8192),)), True),
    "transposition": (lambda x: x.t().contiguous() * 2, (lambda: (numbers(130, 150),), lambda: (numbers(128, 192),)),
                      False),
    "map": (lambda x, y: torch.sigmoid(x / 1000) * y,
            (lambda: (numbers(20003), numbers(20003)), lambda: (numbers(16384), numbers(16384))), False),
    "map of any size": (lambda x, y: x * y, (lambda: (numbers(16385), numbers(16385)),
                                             lambda: (numbers(20480), numbers(20480))), True),
    "product": (lambda x, y: torch.relu(x @ y), (lambda: (numbers(70, 40), numbers(40, 66)),
                                                 lambda: (numbers(128, 32), numbers(32, 64))), False),
    "product of integers": (lambda x, y: x @ y, (lambda: (torch.randint(9, (70, 40)), torch.randint(9, (40, 66))),
                                                 lambda: (torch.randint(9, (64, 32)), torch.randint(9, (32, 64)))),
                            False),
    "sums that meet": (lambda i, x: torch.zeros(9, 40).index_add(0, i, x), (lambda: (places(50, 9), whole(50, 40)),
                                                                            lambda: (places(64, 9), whole(64, 40))),
                       False),
    "products that meet": (join("prod"), (lambda: (places(50, 9), whole(50, 40)),), False),
    "halves that meet": (join("prod"), (lambda: (places(50, 9), whole(50, 41).bfloat16()),), False),
    "bytes that meet": (join("amax"), (lambda: (places(50, 9), bytes_with_ends(50, 41)),),
                        False),
    "long integers that meet": (lambda i, x: torch.zeros(9, 40, dtype=torch.int64).index_add(0, i, x),
                                (lambda: (places(50, 9), torch.randint(-(2**62), 2**62, (50, 40))),), False),
    "gather": (lambda x, i: x[i] + 1, (lambda: (numbers(50, 40), places(70, 50) - 50),
                                       lambda: (numbers(50, 64), places(64, 50))), False),
    "columns": (lambda x: x.sum(0), (lambda: (numbers(200, 5001),), lambda: (numbers(256, 4096),)), False),
    "columns of any size": (lambda x: (x.amax(0), x.sum(0)), (lambda: (numbers(130, 4100),),
                                                              lambda: (numbers(128, 4096),)), True),
    "softmax of columns": (lambda x: torch.softmax(x / 100, 0), (lambda: (numbers(100, 5001),),), False),
    "bags": (bags, (lambda: (places(200, 50), numbers(50, 70), torch.tensor([0, 3, 3, 10, 150, 199])),
                    lambda: (places(64, 50), numbers(50, 64), torch.tensor([0, 13, 32, 51]))), False),
}

# The kinds of faults: patterns to look for, and their replacements.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "dropped barrier": ((r"threadgroup_barrier\([^;]*\);", ";"),
                        (r"mem_flags::mem_(threadgroup|device)", "mem_flags::mem_none")),
    "wrong address space": ((r"(?<=<)device(?= (const )?\w+\*>)", "threadgroup"),
                            (r"\bthreadgroup (?=\w+ \w+\[)", ""), (r"device (?=\w+\* p)", "constant "),
                            (r"device const (?=\w+\* p)", ""), (r"device (?=atomic)", "threadgroup ")),
    "threadgroup memory too large": ((r"(?<=threadgroup )(\w+) (\w+)\[\d+\]", r"\1 \2[33000]"),),
    "missing thread limit": ((r"\[\[max_total_threads_per_threadgroup\(\d+\)\]\]", ""),
                             (r"max_total_threads_per_threadgroup\(\d+\)", "max_total_threads_per_threadgroup(16)"),
                             (r"max_total_threads_per_threadgroup\(\d+\)", "max_total_threads_per_threadgroup(2048)")),
    "wrong simd width": ((r"/ 32\b", "/ 64"), (r"/ 32\b", "/ 16"), (r"% 32\b", "% 16"), (r"% 32\b", "% 64"),
                         *((r"int h = 16;", f"int h = {other};") for other in (32, 8, 4)),
                         (r"(?<=; h >= )\d+(?=; h /= 2)", "2")),
    "off-by-one bound": ((r"(?<=[\w)]) < (?=[\w(])", " <= "), (r"(?<=[\w)]) < (?=[\w(])", " + 1 < "),
                         (r"(?<=[\w)]) <= (?=[\w(])", " < "), (r"(?<= = )0(?=; \w+ <)", "1"),
                         (r" - 1\)(?=\))", ")"), (r" - 1\)(?=\))", " - 2)"), (r"(?<=\bp\d\[)(?=\()", "1 + ")),
    "half atomic": ((r"atomic_float\b", "atomic<half>"), (r"atomic_uint\b", "atomic<half>"),
                    (r"atomic_uint\b", "atomic_ulong"), (r"atomic_int\b", "atomic_half"),
                    (r"_odd \* \d+u", "_odd"), (r" & ~\(\w+ << \w+\)", "")),
}


@dataclass(frozen=True)
class Mutant:
    program: str
    shape: int  # position of the program's inputs
    kernel: int
    kind: str
    text: str
    change: str
    probe: str = ""

    def __str__(self) -> str:
        return f"{self.program} {self.shape}, {self.kind}: {self.change}"


@cache
def made(program: str, shape: int) -> tuple[Any, tuple[Inputs, ...], list[torch.Tensor]]:
    """The compiled graph of a program, its inputs, and its results."""
    seen: list[Any] = []
    f, draws, any_size = PROGRAMS[program]
    torch.manual_seed(0)
    used = draws if any_size else draws[shape: shape + 1]
    pipeline.OBSERVERS.append(seen.append)
    try:
        torch._dynamo.reset()
        with config.override(graph_cache=False):
            torch.compile(f, backend="flambeau", options={"target": NAME}, dynamic=any_size)(*used[0]())
    finally:
        pipeline.OBSERVERS.remove(seen.append)
    every = tuple(tuple(map(change, draw())) for draw in used for change in (torch.clone, beside, backward, coarse))
    return seen[0], every, run(seen[0], seen[0].texts, every)


def beside(t: torch.Tensor) -> torch.Tensor:
    """The same values, one element after an address that is aligned for wide accesses."""
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


def coarse(t: torch.Tensor) -> torch.Tensor:
    """Rounds values so that many are equal, and ties must be decided."""
    return (t / 100).round() * 100 if t.dtype is torch.float32 and t.abs().max() > 100 else t


def backward(t: torch.Tensor) -> torch.Tensor:
    """Reverses the values; lists of indices stay unchanged."""
    return t.flip([*range(t.ndim)]) if t.ndim > 1 or t.is_floating_point() else t


def run(graph: Any, texts: list[Any], every: tuple[Inputs, ...]) -> list[torch.Tensor]:
    call = write(graph.program, NAME, texts, torch.device("cpu")).load()
    return [t.clone() for inputs in every for t in call(arguments(graph, inputs))]


def arguments(graph: Any, inputs: Inputs) -> list[Any]:
    """The inputs in the order of the captured graph, which is that of their use, with its symbolic sizes among them."""
    nodes = [n.meta["val"] for n in graph.gm.graph.nodes if n.op == "placeholder"]
    left, given, sizes = list(inputs), {}, {}
    for k, val in enumerate(nodes):
        if isinstance(val, torch.Tensor):
            at = next(j for j, t in enumerate(left) if t.dtype is val.dtype and t.ndim == val.ndim)
            given[k] = left.pop(at)
            sizes.update(zip(map(str, val.shape), given[k].shape, strict=True))
    return [given[k] if k in given else sizes[str(val)] for k, val in enumerate(nodes)]


def every_text() -> Iterator[tuple[str, int, int, str]]:
    for program, (_, draws, any_size) in PROGRAMS.items():
        for shape in range(1 if any_size else len(draws)):
            for k, source in enumerate(made(program, shape)[0].texts):
                yield program, shape, k, source.text


@cache
def candidates(kind: str) -> list[Mutant]:
    """All mutants of a kind, from all places in all sources."""
    out = {}
    for program, shape, k, text in every_text():
        for pattern, new in KINDS[kind]:
            for one in re.finditer(pattern, text):
                changed = one.expand(new) if "\\" in new else new
                start, end = text.rfind("\n", 0, one.start()) + 1, text.find("\n", one.end())
                after = text[: one.start()] + changed + text[one.end():]
                line = f"{text[start: one.start()].strip()}⟦{one[0]} → {changed}⟧{text[one.end(): end]}"
                test = probe(text, one.start(), one.end(), changed)
                out.setdefault(after, Mutant(program, shape, k, kind, after, line, test))
    return list(out.values())


def drawn(kind: str, count: int, seed: int) -> list[Mutant]:
    found = candidates(kind)
    return random.Random(f"{seed} {kind}").sample(found, min(count, len(found)))


def caught(m: Mutant) -> str:
    """The problem by which a mutant was found; empty if it was not found."""
    if problems := check(m.text):
        return f"checker: {problems[0]}"
    graph, inputs, wanted = made(m.program, m.shape)
    texts = [replace(t, text=m.text) if k == m.kernel else t for k, t in enumerate(graph.texts)]
    try:
        ours = run(graph, texts, inputs)
    except (Error, IndexError) as error:
        return f"emulator: {error}"
    same = all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    return "" if same else "emulator: other results"


def changes_nothing(m: Mutant) -> bool:
    """Whether the change affects no thread's value in any of the runs. If a source is for one size, and its threads
    decide only by their numbers, then the change is no fault."""
    return bool(m.probe) and caught(replace(m, text=m.probe)) == ""


def probe(text: str, start: int, end: int, new: str) -> str:
    """The original source, with an access far outside of a buffer wherever the change would give a comparison another
    value, or reach another address. Empty for other changes."""
    old, trap = text[start:end], "p0[-1000000000]"
    if old.strip() in ("<", "<="):
        left, right = start - len(operand(text[:start][::-1], ")]", "([")), end + len(operand(text[end:], "([", ")]"))
        a, b = text[left:start], text[end:right]
        return f"{text[:left]}((({a}{old}{b}) != ({a}{new}{b}) ? {trap} == 0 : {a}{old}{b})){text[right:]}"
    return text[:start] + f"0 * (int){trap} + " + text[end:] if not old else ""


def operand(text: str, opens: str, closes: str) -> str:
    """The part of a source line that belongs to one side of a comparison."""
    depth = 0
    for k, c in enumerate(text):
        depth += (c in opens) - (c in closes)
        if depth < 0 or (not depth and c in ";&|?="):
            return text[:k].rstrip() if c in "&|?=" else text[:k]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--each", type=int, default=60, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    total, how, missed, harmless = Counter(), Counter(), [], 0
    for kind in KINDS:
        for m in drawn(kind, args.each, args.seed):
            by = caught(m)
            if not by and changes_nothing(m):
                harmless += 1
                continue
            total[kind] += 1
            how[by.partition(":")[0] or "nobody"] += 1
            if not by:
                missed.append({k: v for k, v in asdict(m).items() if k not in ("text", "probe")})
                print(f"MISSED {m}", flush=True)
        print(kind, total[kind], f"of {len(candidates(kind))};", dict(how), flush=True)
        found = total.total() - len(missed)
        write_results(args.json, "metal faults", missed, {
            "seed": args.seed, "planted": dict(total), "found": found, "rate": round(found / total.total(), 4),
            "no change at all": harmless, "by": dict(how)})


if __name__ == "__main__":
    main()

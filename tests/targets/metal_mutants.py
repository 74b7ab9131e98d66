"""Faults planted into Metal texts, one at a time: does the checker or the emulator find each of them?

    PYTHONPATH=tests python -m targets.metal_mutants       # all of them, and what was missed
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch

from flambeau import pipeline
from flambeau.config import config
from flambeau.errors import Error
from flambeau.runtime.executor import write
from flambeau.targets.metal.checker import check

NAME = "metal-emulator"
Inputs: TypeAlias = tuple[torch.Tensor, ...]
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], Inputs]]] = {
    "softmax of short rows": (lambda x: torch.softmax(x, 1), lambda: (torch.randn(5, 302),)),
    "softmax of long rows": (lambda x: torch.softmax(x, 1), lambda: (torch.randn(3, 9001),)),
    "variance and place": (lambda x: (x.var(1), x.argmax(1)), lambda: (torch.randn(9, 2051),)),
    "scan of rows": (lambda x: x.cumsum(1), lambda: (torch.randn(3, 3001),)),
    "scan of columns": (lambda x: x.cumprod(0), lambda: (1 + torch.rand(300, 70) / 100,)),
    "transposition": (lambda x: x.t().contiguous() * 2, lambda: (torch.randn(130, 150),)),
    "map": (lambda x, y: torch.sigmoid(x) * y, lambda: (torch.randn(20003), torch.randn(20003))),
    "product": (lambda x, y: torch.relu(x @ y), lambda: (torch.randn(70, 40), torch.randn(40, 66))),
    "product of integers": (lambda x, y: x @ y, lambda: (torch.randint(9, (70, 40)), torch.randint(9, (40, 66)))),
    "sums that meet": (lambda i, x: torch.zeros(9, 40).index_add(0, i, x),
                       lambda: (torch.randint(9, (50,)), torch.randn(50, 40))),
    "products that meet": (lambda i, x: torch.ones(9, 40).index_reduce(0, i, x, "prod"),
                           lambda: (torch.randint(9, (50,)), torch.randint(1, 3, (50, 40)).float())),
    "gather": (lambda x, i: x[i] + 1, lambda: (torch.randn(50, 40), torch.randint(50, (70,)))),
    "columns": (lambda x: x.sum(0), lambda: (torch.randn(300, 70),)),
}

# A kind of fault: what is looked for, and what stands there instead.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "dropped barrier": ((r"threadgroup_barrier\([^;]*\);", ";"),
                        (r"mem_flags::mem_threadgroup", "mem_flags::mem_none")),
    "wrong address space": ((r"(?<=<)device(?= (const )?\w+\*>)", "threadgroup"),
                            (r"\bthreadgroup (?=\w+ \w+\[)", ""), (r"device (?=\w+\* p)", "constant "),
                            (r"device const (?=\w+\* p)", "")),
    "threadgroup memory too large": ((r"(?<=threadgroup float )(\w+)\[\d+\]", r"\1[8200]"),),
    "missing thread limit": ((r"\[\[max_total_threads_per_threadgroup\(\d+\)\]\]", ""),
                             (r"max_total_threads_per_threadgroup\(\d+\)", "max_total_threads_per_threadgroup(16)"),
                             (r"max_total_threads_per_threadgroup\(\d+\)", "max_total_threads_per_threadgroup(2048)")),
    "wrong simd width": ((r"/ 32\b", "/ 64"), (r"% 32\b", "% 16"), (r"int h = 16;", "int h = 8;"),
                         (r"int h = 16;", "int h = 32;"), (r"int h = 16;", "int h = 4;")),
    "off-by-one bound": ((r"(?<=\w) < (?=\d+\) \{)", " <= "), (r"(?<=\w) < (?=\d+; )", " <= "),
                         (r"<= (?=\d+\))", "<= 1 + "), (r" - 1\)\)", "))"), (r"(?<=\w\[)\(", "(1 + "),
                         (r"int k0 = 0;", "int k0 = 1;")),
    "half atomic": ((r"atomic_float\b", "atomic<half>"), (r"atomic_uint\b", "atomic<half>"),
                    (r"atomic_uint\b", "atomic_ulong")),
}


# Faults that nothing shows, and why.
UNSEEN = {
    "variance and place, wrong simd width": "a correction that is zero but for rounding",
    "product, off-by-one bound": "one matrix too many is set to zero, behind an array of a thread",
}
# Changes after which a kernel still does the same: not faults.
HARMLESS = {
    r"for \(int (k0|at\d+) = .*  =>  .*\(\?=.d\+; \) ->  <= $": "its steps jump over it, or fill a row's padding",
    r"for \(int h = 1; h < \d+; h \*= 4.*  =>  .* <= $": "no thread is so far from the first",
    r"for \(int st\d+ = 0; st\d+ < \d+; \+\+st\d+.*  =>  .* <= $": "what is behind is skipped",
    r"if \(q\d+ < \d+\) .*  =>  .* <= $": "one beyond is the last one again, not stored; a maximum stays",
    r"- 1\)\);   =>   .*": "the same: what is computed of it is not stored",
}


@dataclass(frozen=True)
class Mutant:
    program: str
    kernel: int
    kind: str
    place: int
    text: str
    line: str  # what was changed

    @property
    def name(self) -> str:
        return f"{self.program}, {self.kind} {self.place}"


@cache
def made(program: str) -> tuple[Any, tuple[Inputs, ...], list[torch.Tensor]]:
    """The compiled graph, its inputs, and what it gives."""
    seen: list[Any] = []
    pipeline.OBSERVERS.append(seen.append)
    try:
        torch.manual_seed(0)
        f, draw = PROGRAMS[program]
        inputs = draw()
        torch._dynamo.reset()
        with config.override(graph_cache=False):
            torch.compile(f, backend="flambeau", options={"target": NAME}, dynamic=False)(*inputs)
    finally:
        pipeline.OBSERVERS.remove(seen.append)
    graph = seen[0]
    both = (inputs, tuple(map(beside, draw())))
    return graph, both, run(graph, graph.texts, both)


def beside(t: torch.Tensor) -> torch.Tensor:
    """The same values one element behind where wide accesses may begin."""
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


def run(graph: Any, texts: list[Any], both: tuple[Inputs, ...]) -> list[torch.Tensor]:
    call = write(graph.program, NAME, texts, torch.device("cpu")).load()
    return [t.clone() for inputs in both for t in call([*inputs])]


def mutants(program: str, most: int = 4) -> Iterator[Mutant]:
    """Of each kind of fault, some places of each text."""
    graph = made(program)[0]
    for k, source in enumerate(graph.texts):
        for kind, changes in KINDS.items():
            place = 0
            for pattern, new in changes:
                found = list(re.finditer(pattern, source.text))
                for one in found[:: max(len(found) // most, 1)][:most]:
                    changed = one.expand(new) if "\\" in new else new
                    text = source.text[: one.start()] + changed + source.text[one.end():]
                    start = source.text.rfind("\n", 0, one.start()) + 1
                    line = source.text[start: source.text.find("\n", one.end())].strip()
                    yield Mutant(program, k, kind, place, text, f"{line}   =>   {pattern} -> {new}")
                    place += 1


def caught(m: Mutant) -> str:
    """By what; nothing if it was not."""
    if problems := check(m.text):
        return f"checker: {problems[0]}"
    graph, inputs, wanted = made(m.program)
    texts = [replace(t, text=m.text) if k == m.kernel else t for k, t in enumerate(graph.texts)]
    try:
        ours = run(graph, texts, inputs)
    except (Error, IndexError) as error:
        return f"emulator: {error}"
    same = all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    return "" if same else "emulator: other results"


def harmless(m: Mutant) -> str:
    """Why a change that nobody notices changes nothing."""
    return next((why for pattern, why in HARMLESS.items() if re.search(pattern, m.line)), "")


def main() -> None:
    total, missed, same = 0, [], Counter()
    for program in PROGRAMS:
        for m in mutants(program):
            total += 1
            how = caught(m)
            if not how and (why := harmless(m)):
                total -= 1
                same[why] += 1
            elif not how:
                missed.append(m)
                print(f"MISSED {m.name}\n    {m.line[:240]}", flush=True)
    print(f"{total} faults, {total - len(missed)} found ({(total - len(missed)) / total:.1%})")
    print(f"beside them {sum(same.values())} changes that are none: {dict(same)}")
    if "--texts" in sys.argv:
        for m in missed:
            print(m.name, m.text)


if __name__ == "__main__":
    main()

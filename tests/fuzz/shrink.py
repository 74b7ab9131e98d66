"""Smaller programs with the same finding: fewer results, lines and inputs, plain layouts, small sizes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .draw import trimmed
from .program import Program, Sizes, without

_CALLED = re.compile(r"\.(\w+)\(|(\w*\[)|([+*/&|^<>@%-]|==|!=)")


def signature(kind: str, program: Program) -> str:
    """The key that findings are grouped by: the kind, and the operators of the program."""
    names: set[str] = set()
    for step in program.steps:
        text = step.text.split("=", 1)[1] if step.makes else step.text
        for method, index, sign in _CALLED.findall(text):
            names.add(method or ("[]" if index else sign))
    return f"{kind}: {' '.join(sorted(names - {'-'})) or 'nothing'}"


def smaller(program: Program) -> Iterator[Program]:
    """Smaller candidates of a program, those that remove most first."""
    if len(program.sizes) > 1:
        for sizes in program.sizes:
            yield replace(program, sizes=(sizes,))
    for name in dict.fromkeys(program.results):
        if len(program.results) > 1:
            yield replace(program, results=(name,))
    if len(program.results) > 2:
        for k in range(len(program.results)):
            yield replace(program, results=tuple(r for j, r in enumerate(program.results) if j != k))
    if program.grad:
        yield replace(program, grad=False)
    for k in reversed(range(len(program.steps))):
        step = program.steps[k]
        for instead in (None, *(n for n in step.reads if n[0] in "av")):
            if (found := without(program, k, instead)) is not None:
                yield found
    if program.dynamic and len(program.sizes) == 1:
        yield replace(program, dynamic=False)
    if program.numerics != "fast":
        yield replace(program, numerics="fast")
    for k, i in enumerate(program.inputs):
        plain = tuple(str(s) for s in i.shape)
        if i.of is not None:
            yield _with(program, k, of=None, layout="", memory=plain)
        elif i.layout:
            yield _with(program, k, layout="", memory=plain)
    for size in sorted({s for i in program.inputs for s in i.shape if isinstance(s, int) and s > 1}, reverse=True):
        for less in (1, 2, size - 1):
            if less < size:
                yield _resized(program, size, less)
    if program.dynamic and len(program.sizes) == 1:
        yield replace(program, sizes=(Sizes({n: max(2, v // 2) for n, v in program.sizes[0].items()}),))


def _with(program: Program, k: int, **changes: object) -> Program:
    inputs = list(program.inputs)
    inputs[k] = replace(inputs[k], **changes)  # type: ignore[arg-type]
    return replace(program, inputs=tuple(inputs))


def _resized(program: Program, size: int, less: int) -> Program:
    inputs = tuple(i if i.layout else replace(
        i, shape=tuple(less if s == size else s for s in i.shape),
        memory=tuple(str(less) if s == str(size) else s for s in i.memory)) for i in program.inputs)
    return replace(program, inputs=inputs)


def shrink(program: Program, still: Callable[[Program], bool], seconds: float = 120.0, tries: int = 60) -> Program:
    """The smallest program found by removing one thing at a time while `still` holds."""
    end = time.monotonic() + seconds
    seen = {program}
    again = True
    while again:
        again = False
        for candidate in smaller(program):
            candidate = trimmed(candidate)
            key = replace(candidate)
            if key in seen:
                continue
            seen.add(key)
            if time.monotonic() > end or tries <= 0:
                return program
            try:  # skip candidates whose arguments cannot be made, before anything is compiled
                candidate.call(candidate.sizes[0])
            except Exception:
                continue
            tries -= 1
            if still(candidate):
                program, again = candidate, True
                break
    return program

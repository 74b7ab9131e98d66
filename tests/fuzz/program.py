"""A random program: inputs with their layouts, lines of Python, results. All of it is text, and can be printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = {"torch": torch, "F": F}
_NARROW = re.compile(r"torch\.(float32|bfloat16|float16)\b")
_WORD = re.compile(r"\b[avi]\d+\b|\bn\d\b")

Size = int | str  # a number, or the name of a symbolic size


class Sizes(dict[str, int]):
    """The values of symbolic sizes. They do not change once they are drawn, so that programs are hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


@contextmanager
def single_precision() -> Iterator[None]:
    """Makes float32 the default dtype inside a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def wide(text: str) -> str:
    """The same source text in double precision."""
    return _NARROW.sub("torch.float64", text)


@dataclass(frozen=True)
class Input:
    """An input. `numbers` makes memory of the sizes `memory`; `layout` makes a view of it, such as ".transpose(0, 1)".

    `of` names an earlier input whose memory this one shares; only its layout is its own.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    numbers: str  # an expression, with SHAPE in place of the sizes
    memory: tuple[str, ...]
    layout: str = ""
    grad: bool = False
    of: str | None = None

    def base(self, is_wide: bool = False) -> str:
        sizes = f"({', '.join(self.memory)}{',' if len(self.memory) == 1 else ''})"
        text = f"{self.numbers.replace('SHAPE', sizes)}.to({self.dtype})"
        return f"{text}.to(torch.float64)" if is_wide and self.dtype in FLOATS else text


@dataclass(frozen=True)
class Step:
    """One line of a program. `rule` says whether its result is exact: see `Tracker`."""

    text: str
    name: str  # the kind of line, for grouping
    makes: tuple[str, ...] = ()
    writes: str | None = None
    rule: str = "round"
    needs: str = ""  # "exact": operands must be exact; "kink": they must be exact if gradients are compared

    @property
    def reads(self) -> list[str]:
        right = self.text.split("=", 1)[1] if self.makes else self.text
        return list(dict.fromkeys(_WORD.findall(right)))


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    numbers: tuple[str, ...]  # symbolic sizes that are also arguments
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    sizes: tuple[Sizes, ...] = (Sizes(),)  # one call for each element
    dynamic: bool = False
    numerics: str = "fast"
    grad: bool = False
    seed: int = -1

    @property
    def arguments(self) -> list[str]:
        return [i.name for i in self.inputs] + list(self.numbers)

    def source(self, is_wide: bool = False) -> str:
        lines = [f"def program({', '.join(self.arguments)}):", *(f"    {s.text}" for s in self.steps)]
        text = "\n".join([*lines, f"    return {', '.join(self.results)}{',' if len(self.results) == 1 else ''}", ""])
        return wide(text) if is_wide else text

    def function(self, is_wide: bool = False) -> Callable[..., Any]:
        scope: dict[str, Any] = dict(NAMES)
        exec(compile(self.source(is_wide), f"<program {self.seed}>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]

    def call(self, sizes: Mapping[str, int], device: str = "cpu", is_wide: bool = False) -> list[Any]:
        """Makes fresh arguments, with the same numbers in any precision."""
        scope: dict[str, Any] = {**NAMES, **sizes}
        bases: dict[str, Tensor] = {}
        made: list[Any] = []
        for i in self.inputs:
            if i.of is None:
                with single_precision():  # in double precision torch draws other numbers
                    base = eval(i.base(is_wide), scope)
                bases[i.name] = base.to(device)
            base = bases[i.of or i.name]
            t = eval(f"base{i.layout}", {**scope, "base": base})
            if i.grad and self.grad and t.is_floating_point():
                t = t.detach().requires_grad_()
            made.append(t)
        return made + [sizes[n] for n in self.numbers]

    def text(self, target: str = "cpu") -> str:
        """The source of a stand-alone test."""
        names = {i.of or i.name for i in self.inputs}
        lines = ["import torch", "import torch.nn.functional as F", "", "", self.source(), ""]
        for sizes in self.sizes:
            lines.append("def arguments():")
            used = {w for i in self.inputs for m in (*i.memory, i.layout) for w in _WORD.findall(m)} | {*self.numbers}
            lines += [f"    {n} = {v}" for n, v in sizes.items() if n in used]
            there = '.to("flambeau")' if target == "device" else ""
            lines += [f"    {i.name}_base = {i.base()}{there}" for i in self.inputs if i.name in names and i.of is None]
            shown = [f"{i.of or i.name}_base{i.layout}" + (
                ".detach().requires_grad_()" if i.grad and self.grad and i.dtype in FLOATS else "")
                for i in self.inputs]
            lines += [f"    return [{', '.join([*shown, *self.numbers])}]", "", ""]
        options = {"numerics": self.numerics} if self.numerics != "fast" else {}
        if target not in ("cpu", "device"):
            options["target"] = target
        extra = (", dynamic=True" if self.dynamic else "") + (f", options={options}" if options else "")
        return "\n".join([*lines, f'compiled = torch.compile(program, backend="flambeau"{extra})'])


@dataclass
class Tracker:
    """Runs a program line by line and knows which memory holds exact values: moved, chosen or whole numbers.

    Exact values must be equal in every bit; only they may be compared, or rounded to whole numbers. The rules of a
    step's result: "move" (exact if all operands are), "exact" (always), "round" (never, except for whole numbers).
    """

    env: dict[str, Any] = field(default_factory=dict)
    exact: dict[int, bool] = field(default_factory=dict)  # by storage: whether its values are exact
    kept: list[Tensor] = field(default_factory=list)  # keeps storages alive, so that their addresses are not reused

    def is_exact(self, name: str) -> bool:
        value = self.env.get(name)
        if not isinstance(value, Tensor):
            return True
        return self.exact.get(value.untyped_storage()._cdata, True)

    def allowed(self, step: Step, grad: bool) -> bool:
        if step.needs == "exact" or (step.needs == "kink" and grad):
            return all(self.is_exact(n) for n in step.reads)
        return True

    def run(self, step: Step) -> None:
        known = step.rule == "exact" or (step.rule == "move" and all(self.is_exact(n) for n in step.reads))
        exec(step.text, dict(NAMES), self.env)
        for name in step.makes:
            value = self.env[name]
            if not isinstance(value, Tensor):
                raise TypeError(name)
            self.kept.append(value)
            key = value.untyped_storage()._cdata
            if key not in self.exact:
                self.exact[key] = known or not (value.is_floating_point() or value.is_complex())
        if step.writes:
            target = self.env[step.writes]
            key = target.untyped_storage()._cdata
            self.exact[key] = self.exact.get(key, True) and (known or not target.is_floating_point())


def tracked(program: Program, sizes: Mapping[str, int]) -> Tracker:
    """Runs the program in eager. Raises eager's errors, and ValueError for a step whose operands must be exact and are
    not."""
    tracker = Tracker(dict(zip(program.arguments, program.call(sizes), strict=True)))
    for step in program.steps:
        if not tracker.allowed(step, program.grad):
            raise ValueError(f"inexact operands of {step.name}")
        tracker.run(step)
    return tracker


def without(program: Program, k: int, instead: str | None) -> Program | None:
    """The program without step k, with the value `instead` in place of its result. None if there is no replacement for
    a result that is used."""
    step = program.steps[k]
    steps = [s for j, s in enumerate(program.steps) if j != k]
    results = list(program.results)
    for name in step.makes:
        later = any(name in s.reads or s.writes == name for s in steps[k:])
        if not later and name not in results:
            continue
        if instead is None:
            return None
        swap = re.compile(rf"\b{name}\b")
        steps[k:] = [replace(s, text=swap.sub(instead, s.text), writes=instead if s.writes == name else s.writes)
                     for s in steps[k:]]
        results = [instead if r == name else r for r in results]
    return replace(program, steps=tuple(steps), results=tuple(results))


def written(inputs: Sequence[str | tuple[str, str]], *lines: str, results: str, exact: bool = False, **options: Any
            ) -> Program:
    """A program written by hand. `inputs`: expressions for the inputs a0, a1, ..., each alone or with a layout.

    `exact`: no line rounds, so that results have eager's bits.
    """
    made: list[Input] = []
    sizes = options.get("sizes", (Sizes(),))
    for k, given in enumerate(inputs):
        numbers, layout = given if isinstance(given, tuple) else (given, "")
        value = eval(numbers, {**NAMES, **sizes[0]})
        made.append(Input(f"a{k}", tuple(value.shape), value.dtype, numbers, (), layout, grad=True))
    steps = []
    for line in lines:
        left = re.match(r"([\w, ]+) = ", line)
        makes = tuple(n.strip() for n in left[1].split(",")) if left else ()
        target = None if left and not re.search(r"\w_\(", line) else line.split("=")[-1 if left else 0]
        names = _WORD.findall(target) if target else []
        name = "casts" if re.search(r"\.(to|float|double|type)\(", line) else "line"
        steps.append(Step(line, name, makes, names[0] if names else None, "move" if exact else "round"))
    return Program(tuple(made), options.pop("numbers", ()), tuple(steps), tuple(n.strip() for n in results.split(",")),
                   **options)

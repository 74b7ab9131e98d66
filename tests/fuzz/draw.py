"""Draws a program from a seed: each line is run in eager as it is drawn, and dropped if eager refuses it.

A program with symbolic sizes is run at all of its sizes. The kinds of lines are defined in kinds.py and kinds_*.py.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .program import FLOATS, Input, Program, Size, Sizes, Step, Tracker

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
          torch.bool)
SIZES = (0, *(1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 12) * 2, 17, 33)
MOST = 3000  # elements of a value
LARGEST = 2000.0  # magnitude of floating-point values: within float16, with room for a product


@dataclass(frozen=True)
class Kind:
    """One kind of line. `make` gets the drawing, a value's name and the value. It returns None if the value does not
    fit."""

    make: Callable[[Draw, str, Tensor], str | None]
    weight: float
    rule: str
    needs: str = ""
    writes: bool = False


KINDS: list[Kind] = []
ERRORS: list[Kind] = []


def kind(weight: float = 1.0, rule: str = "round", needs: str = "", writes: bool = False
         ) -> Callable[[Callable[[Draw, str, Tensor], str | None]], Callable[[Draw, str, Tensor], str | None]]:
    def register(make: Callable[[Draw, str, Tensor], str | None]) -> Callable[[Draw, str, Tensor], str | None]:
        KINDS.append(Kind(make, weight, rule, needs, writes))
        return make

    return register


def error(make: Callable[[Draw, str, Tensor], str | None]) -> Callable[[Draw, str, Tensor], str | None]:
    """Registers a kind of line that eager refuses, used as the last line of a program. At some sizes it may succeed."""
    ERRORS.append(Kind(make, 1.0, "round"))
    return make


class Draw:
    def __init__(self, seed: int, grads: bool = True, numerics: float = 0.15) -> None:
        self.r = random.Random(seed)
        self.dynamic = self.r.random() < 0.25
        self.grad = grads and self.r.random() < 0.2
        self.only_exact = not self.grad and self.r.random() < 0.3  # only moves, choices and whole numbers
        self.numerics = "eager" if self.r.random() < numerics else "fast"
        self.fails = not self.grad and self.r.random() < 0.06
        self.odd = self.r.random() < 0.12  # some floats are NaN or infinite
        self.seed = seed
        self.count = 0
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.sizes = self._sizes()
        self.numbers = [n for n in ("n0", "n1") if self.dynamic and self.r.random() < 0.6]
        for _ in range(self.r.choice((1, 1, 2, 2, 2, 3))):
            self._input()
        if self.r.random() < 0.12:
            self._alias()
        self.trackers: list[Tracker] = []
        self._restart()

    # ---- inputs ------------------------------------------------------------------------------------------

    def _sizes(self) -> tuple[Sizes, ...]:
        if not self.dynamic:
            return (Sizes(),)
        r = self.r
        # The program is traced with the first sizes. torch specialises on sizes 0 and 1, so they come later.
        first = {n: r.choice((2, 3, 4, 5, 7, 9, 20)) for n in ("n0", "n1")}
        second = {n: r.choice((2, 3, 4, 6, 8, 11)) for n in ("n0", "n1")}
        out = [Sizes(first), Sizes(second)]
        if r.random() < 0.4:
            out.append(Sizes({n: r.choice((0, 1, 1, 2, 5)) for n in ("n0", "n1")}))
        return tuple(out)

    def _input(self) -> None:
        r = self.r
        # Inputs often repeat the dtype and shape of an earlier one, otherwise few values would fit together.
        if self.inputs and r.random() < 0.5:
            like = r.choice(self.inputs)
            shape, dtype = like.shape, like.dtype if r.random() < 0.6 else r.choice(DTYPES)
        else:
            rank = r.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))
            drawn: list[Size] = []
            for _ in range(rank):
                drawn.append(r.choice(("n0", "n0", "n1")) if self.dynamic and r.random() < 0.5 else r.choice(SIZES))
            shape = tuple(drawn)
            dtype = torch.float32 if r.random() < 0.4 else r.choice(DTYPES)
        seed = len(self.inputs)
        base, layout = self._layout(shape)
        numbers = self.numbers_of(dtype, seed)
        self.inputs.append(Input(f"a{seed}", shape, dtype, numbers, tuple(base), layout, grad=r.random() < 0.8))

    def numbers_of(self, dtype: torch.dtype, seed: int, bound: str | None = None) -> str:
        g = f"generator=torch.Generator().manual_seed({seed})"
        if bound is not None:
            return f"torch.randint({bound}, SHAPE, {g})"
        if dtype in FLOATS:
            if self.odd and self.r.random() < 0.7:
                return self.r.choice((f"torch.randint(-1, 9, SHAPE, {g}).log()",  # NaN, -inf
                                      f"-torch.randint(0, 9, SHAPE, {g}).log()"))  # inf
            # Some inputs have ties and zeros, as small whole numbers, which are exact in every dtype.
            if self.r.random() < 0.3:
                return f"torch.randint(-3, 4, SHAPE, {g})"
            return f"torch.randn(SHAPE, {g})"
        if dtype == torch.bool:
            return f"torch.randint(0, 2, SHAPE, {g})"
        low = 0 if dtype == torch.uint8 else -5
        return f"torch.randint({low}, 9, SHAPE, {g})"

    def _layout(self, shape: tuple[Size, ...]) -> tuple[list[str], str]:
        """The sizes of the memory, and the expression that makes a view of it the input."""
        r, rank = self.r, len(shape)
        base = [str(s) for s in shape]
        choice = r.random()
        if choice < 0.45 or not rank:
            return base, ""
        d = r.randrange(rank)
        if choice < 0.6 and rank > 1:
            e = r.choice([k for k in range(rank) if k != d])
            base[d], base[e] = base[e], base[d]
            return base, f".transpose({d}, {e})"
        if choice < 0.7 and rank == 4:
            return base, ".contiguous(memory_format=torch.channels_last)"
        if choice < 0.82:  # a slice with a step
            step = r.choice((2, 2, 3))
            base[d] = f"{base[d]} * {step}"
            return base, f"[{':, ' * d}::{step}]"
        if choice < 0.9:  # an offset at the start, and a gap at the end
            before, after = r.choice((0, 1, 3)), r.choice((1, 2))
            size = base[d]
            base[d] = f"{size} + {before + after}"
            return base, f".narrow({d}, {before}, {size})"
        if choice < 0.96:
            base[d] = "1"
            return base, f".expand({', '.join(str(s) for s in shape)})"
        if isinstance(shape[d], int) and shape[d] and rank == 1:  # elements that overlap
            return [f"{shape[d]} + 2"], f".unfold(0, 3, 1).select(1, {r.randrange(3)})"
        return base, ""

    def _alias(self) -> None:
        """Adds an input that shares the memory of another one: overlapping it, or next to it."""
        at = self.r.randrange(len(self.inputs))
        like = self.inputs[at]
        if not like.shape or like.dtype not in DTYPES:
            return
        before = ""
        if self.r.random() < 0.4:
            half = self.r.randrange(2)
            before = f".select(0, {1 - half})"
            like = replace(like, memory=("2", *like.memory), layout=f".select(0, {half}){like.layout}")
        layout = before + self.inputs[at].layout + self.r.choice((
            "", "[1:]", "[:1]", "[::2]", ".select(0, 0)", ".transpose(0, -1)", ".unsqueeze(0)"))
        probe = Input(f"a{len(self.inputs)}", like.shape, like.dtype, like.numbers, like.memory, layout, of=like.name)
        inputs = [*self.inputs[:at], like, *self.inputs[at + 1:], probe]
        candidate = replace(self.program(), inputs=tuple(inputs))
        try:
            for s in self.sizes:
                candidate.call(s)
        except Exception:
            return
        self.inputs = inputs

    def index(self, shape: list[str], bound: str, distinct: bool = False) -> str:
        """Adds an input of whole numbers below `bound`, and returns its name."""
        number = len(self.inputs) + len(self._new_inputs)
        numbers = self.numbers_of(torch.int64, number, f"0, {bound}")
        if distinct:
            numbers = f"torch.randperm({bound}, generator=torch.Generator().manual_seed({number}))[:{shape[0]}].clone()"
        dtype = torch.int32 if self.r.random() < 0.1 and not distinct else torch.int64
        made = Input(f"i{number}", tuple(shape), dtype, numbers, tuple(shape))
        self._new_inputs.append(made)
        return made.name

    # ---- what kinds ask for ------------------------------------------------------------------------------

    @property
    def values(self) -> dict[str, Tensor]:
        """The tensors at the first sizes, by name."""
        return {n: v for n, v in self.trackers[0].env.items() if isinstance(v, Tensor) and n[0] in "av"}

    def dim(self, t: Tensor) -> int:
        d = self.r.randrange(t.dim())
        return d if self.r.random() < 0.7 else d - t.dim()

    def size(self, x: str, t: Tensor, d: int) -> str:
        """The size of a dimension, as a number or as an expression."""
        return f"{x}.shape[{d}]" if self.dynamic and self.r.random() < 0.8 else str(t.shape[d])

    def bound(self, x: str, t: Tensor, d: int) -> str:
        """A random bound for a slice of a dimension, as a number or an expression."""
        n = t.shape[d]
        if self.dynamic and self.r.random() < 0.5:
            whole = self.r.choice([f"{x}.shape[{d}]", *self.numbers])
            return self.r.choice((f"{whole} // 2", f"{whole} - 1", f"{whole} // 3", f"{whole} - 2", whole,
                                  f"-({whole} // 2)"))
        return str(self.r.randint(-n, n))

    def other(self, fits: Callable[[Tensor], bool] = lambda t: True) -> str | None:
        found = [n for n, v in self.values.items() if fits(v)]
        return self.r.choice(found) if found else None

    def broadcastable(self, t: Tensor) -> str | None:
        return self.other(lambda v: all(m == n or 1 in (m, n) for m, n in
                                        zip(reversed(t.shape), reversed(v.shape), strict=False)))

    def scalar(self) -> str:
        return self.r.choice(("2", "3", "-1", "0.5", "1.25", "True", "0", "-2.5", "7"))

    def number_of(self, t: Tensor) -> str:
        """A number that this dtype holds exactly."""
        if t.dtype == torch.bool:
            return self.r.choice(("True", "False"))
        return self.r.choice(("2", "0", "1", "3") + (("-1.5", "0.25") if t.dtype in FLOATS else ()))

    def dtype(self) -> str:
        return str(self.r.choice(DTYPES))

    # ---- lines -------------------------------------------------------------------------------------------

    def program(self) -> Program:
        return Program(tuple(self.inputs), tuple(self.numbers), tuple(self.steps), (), self.sizes, self.dynamic,
                       self.numerics, self.grad, self.seed)

    def _restart(self) -> None:
        """Runs all lines again, from fresh inputs."""
        program = self.program()
        self.trackers = [Tracker(dict(zip(program.arguments, program.call(s), strict=True))) for s in self.sizes]
        for step in self.steps:
            for t in self.trackers:
                t.run(step)

    def _try(self, step: Step) -> bool:
        program = self.program()
        for t, sizes in zip(self.trackers, self.sizes, strict=True):
            for new in self._new_inputs:
                alone = replace(program, inputs=(new,), numbers=())
                t.env[new.name] = alone.call(sizes)[0]
            if not t.allowed(step, self.grad):
                return False
            t.run(step)
            for name in (*step.makes, *((step.writes,) if step.writes else ())):
                if not reasonable(t.env[name], self.odd) or (self.only_exact and not t.is_exact(name)):
                    return False
        return True

    def line(self, kinds: list[Kind]) -> bool:
        """Draws one more line. Returns whether it was added."""
        chosen = self.r.choices(kinds, [k.weight for k in kinds])[0]
        if self.only_exact and chosen.rule == "round":
            return False
        names = list(self.values)
        # Prefer newer values, so that programs grow deep rather than wide.
        x = self.r.choices(names, [1 + 2 * k for k in range(len(names))])[0]
        self._new_inputs: list[Input] = []
        try:
            text = chosen.make(self, x, self.values[x])
        except IndexError:  # the value has another rank at other sizes
            return False
        if text is None:
            return False
        target, makes = x if chosen.writes else None, ()
        if not (chosen.writes and (" = " in text or self.r.random() < 0.7)):
            makes = (f"v{self.count}",)
            text = f"{makes[0]} = {text}"
        step = Step(text, chosen.make.__name__, makes, target, chosen.rule, chosen.needs)
        before = list(self.steps)
        try:
            done = self._try(step)
        except Exception:
            done = False
        if done:
            self.count += 1
            self.inputs += self._new_inputs
            self.steps.append(step)
        elif chosen.writes or step.makes:
            self.steps = before
            for t in self.trackers:
                for name in (*step.makes, *(i.name for i in self._new_inputs)):
                    t.env.pop(name, None)
            if chosen.writes:  # it may have written before it failed
                self._restart()
        return done


def reasonable(t: Tensor, odd: bool) -> bool:
    if t.numel() > MOST or t.dim() > 5 or t.dtype.is_complex:
        return False
    v = t.detach()
    if not v.numel():
        return True
    if v.is_floating_point():
        kept = v[v.isfinite()] if odd else v  # a value of only NaN shows nothing
        return bool(kept.isfinite().all()) and kept.numel() > 0 and float(kept.abs().max()) < LARGEST
    return v.dtype == torch.bool or bool((v.to(torch.int64).abs() < 1 << 40).all())


def draw(seed: int, longest: int = 8, grads: bool = True, numerics: float = 0.15) -> Program:
    """Draws the program of a seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        d = Draw(seed, grads, numerics)
        length = d.r.randint(1, longest)
        for _ in range(length * 12):
            if len(d.steps) >= length:
                break
            d.line(KINDS)
        if d.fails:
            program = _with_error(d)
            if program is not None:
                return program
        return _with_results(d)


def _with_error(d: Draw) -> Program | None:
    for _ in range(8):
        chosen = d.r.choice(ERRORS)
        x = d.r.choice(list(d.values))
        d._new_inputs = []
        text = chosen.make(d, x, d.values[x])
        if text is None:
            continue
        step = Step(f"v{d.count} = {text}", chosen.make.__name__, (f"v{d.count}",), None, chosen.rule)
        program = replace(d.program(), inputs=(*d.inputs, *d._new_inputs), steps=(*d.steps, step),
                          results=(f"v{d.count}",))
        try:
            program.function()(*program.call(program.sizes[0]))
        except Exception:
            return program
    return None


def _with_results(d: Draw) -> Program:
    """Chooses the results: mostly values that no line reads, some intermediate values and inputs, and repetitions."""
    names = list(d.values)
    made = [n for n in names if n[0] == "v"]
    read = {n for s in d.steps for n in s.reads}
    results = [n for n in made if n not in read and d.r.random() < 0.8]
    for _ in range(d.r.choice((0, 0, 1, 1, 2))):
        results.append(d.r.choice(made if made and d.r.random() < 0.85 else names))
    d.r.shuffle(results)
    return trimmed(replace(d.program(), results=tuple(results or [names[-1]])))


def trimmed(program: Program) -> Program:
    """The program without lines and inputs that nothing reads."""
    steps: list[Step] = []
    needed = set(program.results)
    for s in reversed(program.steps):
        if s.writes or needed & set(s.makes):
            steps.append(s)
            needed.update(s.reads)
    kept = [i for i in program.inputs if i.name in needed or any(o.of == i.name and o.name in needed
                                                               for o in program.inputs)]
    return replace(program, steps=tuple(reversed(steps)), inputs=tuple(kept or program.inputs[:1]),
                   numbers=tuple(n for n in program.numbers if n in needed))

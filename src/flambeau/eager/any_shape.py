"""One program for calls of many shapes: sizes are symbols when it is compiled, and are read at run time.

The calls of a class differ only in sizes of at least two, and in what follows from those. Operator, dtypes, ranks,
memory order and gaps, sizes of zero and one, numbers and options are the same. The assumptions about sizes that torch
and the lowerings made while a program was compiled are its guards. A call whose sizes do not meet them gets another
program, and a class with many of those is left to programs of fixed shapes.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from flambeau.capture.eager_strides import contiguous
from flambeau.codegen.source import host_text
from flambeau.config import config
from flambeau.errors import UnsupportedError
from flambeau.ir.index import as_index
from flambeau.ops import LOWERINGS
from flambeau.ops.facts import facts
from flambeau.runtime.launch_plan import Layout, Maker, Run
from flambeau.targets.background import Pool, fork_safe
from flambeau.torch_compat.dispatch import untraced
from flambeau.torch_compat.fake import ConstantSource, quiet_traces
from flambeau.torch_compat.fx import PythonPrinter
from flambeau.torch_compat.ops import OpOverload

from .kept_programs import Kept, PlainProgram
from .one_call import (
    Arguments,
    Number,
    OtherShapes,
    Range,
    TensorLike,
    build,
    graph_of,
    is_number,
    layouts,
    plain,
)
from .operator_forms import OperatorForm
from .refusal import Numbers, taken

log = logging.getLogger(__name__)

MOST_CLASSES = 1024  # classes whose programs are kept, the most recently used
MOST_PROGRAMS = 4  # programs of a class: more show that its kernels depend on the sizes

# Arguments that are sizes. Other integers (strides of windows, groups) are part of a kernel's text.
SIZES = {"C", "HxW", "N", "input_size", "input_sizes", "normalized_shape", "output_size", "size", "sizes"}

FIXED: dict[str, str] = {}  # operators that needed a program for a fixed shape, and why


def is_size(op: OpOverload, name: str) -> bool:
    return name in SIZES or facts(op).keeps_shape and name in ("start", "end")


def is_open(x: Any) -> bool:
    """Whether a size argument becomes a symbol. Zero and one are part of the class."""
    return isinstance(x, int) and x > 1


# ---- classes -----------------------------------------------------------------------------------------------

Rule = int | tuple[int]  # a stride: a number, or (the dimension that it is packed after,), where -1 is unknown
OPEN = (-1,)


def in_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions from the smallest stride up; among equal strides, dimensions of one element come first."""
    return sorted(range(len(shape)), key=lambda d: (strides[d], shape[d] != 1, -d))


def stride_rules(op: OpOverload, shape: Sequence[int], strides: Sequence[int]) -> tuple[Rule, ...]:
    """How each stride follows from the sizes: packed after the next inner dimension in memory, or left open. For matrix
    products, it only matters which dimension is contiguous."""
    rules: list[Rule] = [0] * len(shape)
    before, expected = -1, 1
    for d in in_memory(shape, strides):
        if strides[d] == 0:
            continue
        if strides[d] == expected and before >= 0:
            rules[d] = OPEN if facts(op).contracts else (before,)
        else:
            rules[d] = 1 if strides[d] == 1 else OPEN
        before, expected = d, strides[d] * max(shape[d], 1)
    return tuple(rules)


MOST_LOOPS = 5  # of elementwise calls; calls with fewer loops are padded with loops of one element


@dataclass(frozen=True)
class Loops:
    """An elementwise call reduced to its memory accesses. The number and order of dimensions no longer matter, nor
    which of them have one element; sizes of one are like others."""

    args: Arguments
    layout: Layout  # of its results, if it returns any


def as_loops(op: OpOverload, args: Arguments, any_layout: bool) -> Loops | None:
    """The call as a single row if all tensors are contiguous and of one shape (tensors without dimensions are numbers).
    With `any_layout` also as loops over what is written, from the widest stride to the narrowest."""
    if not facts(op).elementwise or facts(op).random or any(isinstance(x, (list, tuple)) for x in args):
        return None
    tensors = [x for x in args if isinstance(x, TensorLike)]
    shaped = [x for x in tensors if x.shape] or tensors
    # A tensor without dimensions hardly affects type promotion beside others, but alone it counts like a CPU scalar.
    if any(0 in x.shape for x in tensors) or not shaped or not shaped[0].shape and any(
            isinstance(x, Number) for x in args):
        return None
    if len({x.shape for x in shaped}) == 1 and all(x.strides == contiguous(x.shape) for x in tensors):
        shape = shaped[0].shape
        row = {x.same: replace(x, shape=(math.prod(shape),), strides=(1,)) for x in shaped}
        return Loops(_replaced(args, row), (shape, contiguous(shape)))
    written = [x for a, x in zip(op._schema.arguments, args, strict=True) if a.is_write]
    if not any_layout or len({(x.shape, x.strides) for x in written}) != 1 or any(x.overlaps for x in written):
        return None
    shape, strides = written[0].shape, written[0].strides
    if not all(_fits(x.shape, shape) for x in shaped):
        return None
    nest = [(shape[d], *(_step(x, d - len(shape)) for x in shaped))
            for d in sorted(range(len(shape)), key=lambda d: -strides[d]) if shape[d] > 1]
    merged: list[tuple[int, ...]] = []
    for size, *steps in nest:
        if merged and all(a == size * b for a, b in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    if len(merged) > MOST_LOOPS:
        return None
    if len(merged) != 1 or any(step != 1 for step in merged[0][1:]):
        merged = [(1,) * (len(shaped) + 1)] * (MOST_LOOPS - len(merged)) + merged
    made = {x.same: replace(x, shape=tuple(row[0] for row in merged), strides=tuple(row[k + 1] for row in merged))
            for k, x in enumerate(shaped)}
    return Loops(_replaced(args, made), (None, None))


def _replaced(args: Arguments, made: dict[int, TensorLike]) -> Arguments:
    return tuple(made.get(x.same, x) if isinstance(x, TensorLike) else x for x in args)


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) <= len(whole) and all(n in (1, m) for n, m in zip(shape[::-1], whole[::-1], strict=False))


def _step(x: TensorLike, d: int) -> int:
    """The stride of a tensor along a dimension, counted from the last; 0 where it is broadcast."""
    return 0 if -d > len(x.shape) or x.shape[d] == 1 else x.strides[d]


class Shapes:
    """The class of a call, its numbers, and the sizes in which it differs from other calls of its class."""

    def __init__(self, op: OpOverload, args: Arguments, any_layout: bool) -> None:
        self.loops = as_loops(op, args, any_layout)
        self.op, self.args = op, args if self.loops is None else self.loops.args
        self.values: list[int] = []
        self.hints: list[int] = []  # the example value of each while a program is traced
        self.same: list[int] = []  # for each value, the index of the first value that it shares a symbol with
        self.numbers: list[Any] = []
        self.empty = False  # a tensor has no elements: little to compile, and special rules for strides
        self.packed = True
        self._places: dict[int, tuple[list[int], list[int | None], Hashable]] = {}  # of a tensor's values
        self._last: dict[int, dict[int, int]] = {}  # by dimension from the last, and size
        self.key: Hashable = tuple(self._of(x, str(a.type), is_size(op, a.name))
                                   for a, x in zip(op._schema.arguments, self.args, strict=True))

    @property
    def is_row(self) -> bool:
        return self.loops is not None and self.packed

    @property
    def identity(self) -> Hashable:
        """Together with the class, everything that a program for a single shape depends on."""
        return tuple(self.values), None if self.loops is None else self.loops.layout

    def _of(self, x: Any, kind: str, size: bool) -> Hashable:
        if isinstance(x, (list, tuple)):
            return tuple(self._of(y, "", size) for y in x)
        if isinstance(x, TensorLike):
            if x.same not in self._places:
                self._places[x.same] = self._tensor(x)
            return x.same, self._places[x.same][2]
        if size and is_open(x):
            self._value(x)
            return "size"
        if is_number(x, kind):
            self.numbers.append(plain(x))
            return "number", type(plain(x)), x.dtype if isinstance(x, Number) else None
        return type(x), str(x) if isinstance(x, float) else x  # 0.0 and -0.0 are equal

    def _value(self, x: int, same: int | None = None, hint: int = 0) -> int:
        self.same.append(len(self.values) if same is None else same)
        self.hints.append(hint or x)
        self.values.append(x)
        return len(self.values) - 1

    def _tensor(self, x: TensorLike) -> tuple[list[int], list[int | None], Hashable]:
        self.empty |= 0 in x.shape
        self.packed &= x.strides == contiguous(x.shape)
        rules = self._rules(x)
        sizes = [self._size(n, len(x.shape) - d) for d, n in enumerate(x.shape)]
        hints = self._wide(sizes) if self.loops is not None and sizes else [0] * len(sizes)
        strides = [self._value(n, hint=hint) if rule == OPEN else None
                   for n, rule, hint in zip(x.strides, rules, hints, strict=True)]
        return sizes, strides, (x.dtype, x.device, rules, x.overlaps)

    def _wide(self, sizes: Sequence[int]) -> list[int]:
        """Example strides with gaps, different from each other and from the sizes: strides of loops are arbitrary."""
        gap, strides = len(self._places) + 2, [len(self._places) + 2]
        for at in reversed(sizes[1:]):
            strides.insert(0, strides[0] * self.hints[at] + gap)
        return strides

    def _rules(self, x: TensorLike) -> tuple[Rule, ...]:
        if self.loops is None or not x.shape:
            return stride_rules(self.op, x.shape, x.strides)
        return (*(OPEN,) * (len(x.shape) - 1), 1 if x.strides[-1] == 1 else OPEN)

    def _size(self, n: int, from_last: int) -> int:
        """The place of a size's value. For elementwise operators, equal sizes in one dimension share a symbol, as they
        are broadcast to one another. They also do for operators that trust their caller: with independent sizes, their
        kernels would be asked for strides of shapes that do not fit together."""
        if not facts(self.op).elementwise and facts(self.op).checks:
            return self._value(n)
        seen = self._last.setdefault(from_last, {})
        at = self._value(n, seen.get(n), max(n, 2) if self.loops is not None else 0)
        seen.setdefault(n, at)
        return at

    def symbolic(self, symbols: Sequence[Any]) -> Arguments:
        """The arguments with symbols in place of the values."""
        made: dict[int, TensorLike] = {}
        used = {at for sizes, strides, _ in self._places.values() for at in (*sizes, *strides)}
        sizes = iter([symbol for at, symbol in enumerate(symbols) if at not in used])

        def changed(x: Any, size: bool) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(changed(y, size) for y in x)
            if isinstance(x, TensorLike):
                return made.setdefault(x.same, self._with(x, symbols))
            return next(sizes) if size and is_open(x) else x

        return tuple(changed(x, is_size(self.op, a.name))
                     for a, x in zip(self.op._schema.arguments, self.args, strict=True))

    def _with(self, x: TensorLike, symbols: Sequence[Any]) -> TensorLike:
        sizes, opened, _ = self._places[x.same]
        shape = [symbols[at] for at in sizes]
        strides: list[Any] = [rule if at is None else symbols[at]
                              for rule, at in zip(self._rules(x), opened, strict=True)]
        for d in in_memory(x.shape, x.strides):
            if isinstance(strides[d], tuple):
                before = strides[d][0]
                strides[d] = strides[before] * shape[before]
        return replace(x, shape=tuple(shape), strides=tuple(strides))


# ---- programs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassProgram:
    """A program for the calls of a class whose sizes meet its guards."""

    at: Maker | None  # takes numbers for the symbols; None: an output must be resized first
    names: tuple[str, ...]  # one for each value of a call
    holds: Callable[..., bool]  # the guards, over a call's values
    ranges: Callable[..., Any]  # accepted indices; or, if an output must be resized, the shapes
    results: Callable[..., Any]  # shapes and strides of the results
    taken: tuple[Numbers, ...]  # for each number that is an argument, the interval that eager accepts

    @staticmethod
    def of(p: PlainProgram) -> ClassProgram:
        holds, ranges, results = (function(p.names, text) for text in (p.holds, p.ranges, p.results))
        at = None if p.package is None else p.package.maker()
        return ClassProgram(at, p.names, holds, ranges, results, p.taken)

    def takes(self, form: OperatorForm, shapes: Shapes) -> bool:
        if not self.holds(*shapes.values):
            return False
        if 1 not in shapes.values or shapes.loops is not None or form.written:
            return True
        # Eager has special rules for dimensions of one element: where their strides come from, and whether they stay.
        return list(self.results(*shapes.values)) == layouts(graph_of(form, shapes.args))

    def served(self, shapes: Shapes) -> tuple[Run, tuple[Range, ...]]:
        given = self.ranges(*shapes.values)
        if self.at is None:
            raise OtherShapes(list(given))
        layout: Layout = (None, None) if shapes.loops is None else shapes.loops.layout
        return self.at(dict(zip(self.names, shapes.values, strict=True)), layout), given


@dataclass
class CallClass:
    """A class of calls, which differ only in sizes and numbers, with its programs."""

    numbers: list[Any]  # of the first call
    changed: int = 0  # bits: the positions at which other numbers were seen
    # By the lifted numbers (as bits) and the others: the programs, or the reason why each shape needs its own.
    programs: dict[Hashable, list[ClassProgram] | str] = field(default_factory=dict)

    def lifting(self, numbers: list[Any]) -> int:
        """The numbers that change from call to call, as bits; 0 if there is a program for exactly these numbers."""
        if (0, str(numbers)) in self.programs:
            return 0
        for k, (x, y) in enumerate(zip(numbers, self.numbers, strict=True)):
            self.changed |= int(str(x) != str(y)) << k
        return self.changed


Served = tuple[Run, tuple[Range, ...], tuple[Numbers, ...], int, bool]  # lifted numbers, whether for many shapes


class Programs:
    """All programs of one entry point, by classes of calls: for many shapes, and for single shapes."""

    def __init__(self, into_any: bool = True, most_fixed: float = math.inf,
                 apart: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.into_any = into_any  # whether outputs may have any layout, dtype or size, as in `build`
        self.most_fixed = most_fixed  # programs for single shapes that each form may have
        self.apart = apart  # a context for compiling in threads other than the caller's
        self._fixed: Counter[OperatorForm] = Counter()
        self._classes: OrderedDict[Hashable, CallClass] = OrderedDict()
        self._hot: OrderedDict[Hashable, Future[Run | None]] = OrderedDict()
        self._lock = fork_safe(threading.RLock())

    def is_new(self, form: OperatorForm, args: Arguments) -> bool:
        """Whether this is the first call of its class."""
        shapes = Shapes(form.op, args, self.into_any)
        key = class_key(form, shapes)
        with self._lock:
            known = key in self._classes
            self._class(key, shapes)
            return not known

    def serving(self, form: OperatorForm, args: Arguments, lift: int) -> Served:
        """The program for such calls. UnsupportedError says why there is none, OtherShapes how to resize outputs."""
        shapes = Shapes(form.op, args, self.into_any)
        why = ""
        if not shapes.empty and shapes.values:
            found = self._class(class_key(form, shapes), shapes)
            with self._lock:
                changing = 0 if lift else found.lifting(shapes.numbers)
            for bits in (changing, lift) if changing else (lift,):
                program = self._program(form, shapes, found, bits)
                if isinstance(program, str):
                    why = program
                elif bits == lift or all(
                        takes(program.taken, k, x) for k, x in enumerate(shapes.numbers) if bits >> k & 1):
                    return *program.served(shapes), program.taken, bits, True
        numbers = taken(form.op, args, lift) if lift else ()
        if self._fixed[form] >= self.most_fixed:
            raise UnsupportedError(f"{self.most_fixed} kernels were built already")
        made = build(form, args, lift, self.into_any)
        self._fixed[form] += 1
        if why:
            FIXED.setdefault(form.name, why)
        return made.run, made.ranges, numbers, lift, False

    def _class(self, key: Hashable, shapes: Shapes) -> CallClass:
        with self._lock:
            found = self._classes.setdefault(key, CallClass(shapes.numbers))
            self._classes.move_to_end(key)
            if len(self._classes) > MOST_CLASSES:
                self._classes.popitem(last=False)
            return found

    def _program(self, form: OperatorForm, shapes: Shapes, found: CallClass, lift: int) -> ClassProgram | str:
        key = lift, str(shapes.numbers if not lift else [x for k, x in enumerate(shapes.numbers) if not lift >> k & 1])
        kept = Kept((form.op, shapes.loops is not None, shapes.key, self.into_any, *key), form, shapes.args)
        if key not in found.programs:  # look for programs of an earlier process
            there = [ClassProgram.of(p) for p in kept.load()]
            with self._lock:
                found.programs.setdefault(key, there)
        programs = found.programs[key]
        if isinstance(programs, str):
            return programs
        for known in tuple(programs):
            if known.takes(form, shapes):
                return known
        # Without the lock, because another thread that compiles something may get here.
        program: ClassProgram | str
        try:
            if len(programs) == MOST_PROGRAMS:
                raise UnsupportedError(f"{MOST_PROGRAMS} programs for many shapes were for few")
            with quiet_traces():
                plain_program = made(form, shapes, lift, self.into_any)
            program = ClassProgram.of(plain_program)
            if not program.holds(*shapes.values):
                return "its sizes do not fit together"  # a program for this one shape raises the proper error
            kept.store(plain_program, len(programs))
        except Exception as error:  # a program for this one shape may work, or raise the proper error
            program = error.message if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
        with self._lock:
            if isinstance(program, str):
                found.programs[key] = program
            else:
                programs.append(program)
        return program

    def hot(self, form: OperatorForm, args: Arguments, lift: int, wait: bool) -> Run | None:
        """A program for the exact shape of a frequent call: started in the background, and returned once `wait` is set.
        Rows run equally fast at any length, so they only get a program for the call's numbers."""
        if torch.are_deterministic_algorithms_enabled():  # it might add in another order than the program used so far
            return None
        shapes = Shapes(form.op, args, self.into_any)
        if shapes.is_row and (lift or not shapes.numbers):
            return None
        key = class_key(form, shapes), lift, str((shapes.numbers, shapes.identity))
        if not wait:
            self._hot[key] = WORKER.submit(contextvars.copy_context().run, self._own, form, args, shapes, lift)
            if len(self._hot) > MOST_CLASSES:
                self._hot.popitem(last=False)
            return None
        begun = self._hot.pop(key, None)
        # If it has not finished, it may wait for a lock that this thread holds, so compile here.
        return begun.result() if begun is not None and begun.done() else self._own(form, args, shapes, lift)

    @untraced
    def _own(self, form: OperatorForm, args: Arguments, shapes: Shapes, lift: int) -> Run | None:
        try:
            with torch.no_grad(), self.apart():
                if not shapes.is_row:
                    return build(form, args, lift, self.into_any).run
                program = self._program(form, shapes, self._class(class_key(form, shapes), shapes), 0)
                return None if isinstance(program, str) else program.served(shapes)[0]
        except Exception as error:  # the present program stays in use
            log.debug("%s has no program for one shape: %s", form.name, error)
            return None


# One compilation at a time, in a thread without its callers' modes and guards.
WORKER = Pool(1, "shapes")


def class_key(form: OperatorForm, shapes: Shapes) -> Hashable:
    return (form.op, config.variant(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            shapes.loops is not None, shapes.key)


def takes(intervals: Sequence[Numbers], number: int, x: Any) -> bool:
    return any(k == number and least <= x <= most for k, _, least, most in intervals)


def made(form: OperatorForm, shapes: Shapes, lift: int, into_any: bool) -> PlainProgram:
    env = ShapeEnv()
    sizes: list[Any] = []
    names: list[str] = []
    guards: list[str] = []
    whole = form.functional in LOWERINGS or facts(form.functional).library  # the formula also covers sizes of one
    for k, (n, same) in enumerate(zip(shapes.values, shapes.same, strict=True)):
        names.append(f"n{k}")
        if same < k:
            sizes.append(sizes[same])
            guards.append(f"n{k} == {names[same]}")
        elif n < 2 and shapes.loops is None:
            sizes.append(n)
            guards.append(f"n{k} == {n}")
        else:
            symbol = env.create_symbol(shapes.hints[k], ConstantSource(f"n{k}"), DimDynamic.DYNAMIC)
            sizes.append(env.create_symintnode(symbol, hint=shapes.hints[k]))
            names[k] = symbol.name
            guards += [] if whole else [f"{symbol.name} > 1"]
    package, results = None, []
    try:
        made = build(form, shapes.symbolic(sizes), lift, into_any, env, shapes.loops is not None)
        package, results = made.package, [[text(n) for n in row] for row in made.results]
        told = [[str(which), *(host_text(as_index(n)) for n in bounds)] for which, *bounds in made.ranges]
    except OtherShapes as other:
        told = [[text(n) for n in shape] for shape in other.shapes]
    # Loops over what is written work for any layout: only the equalities of shared symbols must hold.
    free = shapes.loops is not None and not results
    guards += [text(guard.expr) for guard in env.guards if not free or guard.expr.is_Equality]
    for s, bounds in () if free else env.var_to_range.items():
        guards += [f"{text(bounds.lower)} <= {s.name}"] if bounds.lower.is_Integer and bounds.lower > 2 else []
        guards += [f"{s.name} <= {text(bounds.upper)}"] if bounds.upper.is_Integer else []
    numbers = taken(form.op, shapes.args, lift) if lift else ()
    holds = " and ".join(f"({guard})" for guard in guards) or "True"
    return PlainProgram(package, tuple(names), holds, rows(told), rows(results), numbers)


def text(x: Any) -> str:
    """An expression over symbols as Python text."""
    printed: str = PythonPrinter().doprint(x.node.expr if isinstance(x, torch.SymInt) else x)
    return printed


def rows(texts: list[list[str]]) -> str:
    return f"({''.join('(' + ''.join(f'{n}, ' for n in row) + '), ' for row in texts)})"


def function(names: Sequence[str], body: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"math": math}
    exec(f"def of({', '.join(names)}): return {body}", scope)
    of: Callable[..., Any] = scope["of"]
    return of

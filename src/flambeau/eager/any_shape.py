"""One program for calls of many shapes: their sizes are symbols while it is made, and read from the tensors at the run.

Calls of a class differ in nothing but sizes from two on, and in what follows from those: operator, dtypes, ranks, order
and gaps of memory, sizes of zero and one, numbers and options are the same. What torch and the lowerings assumed about
the sizes while a program was made are its guards. A call whose sizes do not meet them gets a program of its own, and
a class with many of those is left to programs of fixed shapes.
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
from flambeau.ops.facts import facts
from flambeau.runtime.launch_plan import Run
from flambeau.targets.background import Pool, fork_safe
from flambeau.torch_compat.dispatch import untraced
from flambeau.torch_compat.fake import ConstantSource
from flambeau.torch_compat.fx import PythonPrinter
from flambeau.torch_compat.ops import OpOverload

from .one_call import (
    Arguments,
    Number,
    OtherShapes,
    Range,
    TensorLike,
    build,
    is_number,
    plain,
)
from .operator_forms import Form
from .refusal import Numbers, taken

log = logging.getLogger(__name__)

MOST_CLASSES = 1024  # whose programs are kept, those in use
MOST_PROGRAMS = 4  # of a class: more show that its kernels depend on the sizes
PATIENCE = 2  # kinds of numbers that get programs of their own

# Arguments that say how large something is; others (steps of windows, groups) are part of a kernel's text.
SIZES = {"C", "HxW", "N", "input_size", "input_sizes", "normalized_shape", "output_size", "size", "sizes"}

FIXED: dict[str, str] = {}  # operators that had to be made for a fixed shape, and why


def is_size(op: OpOverload, name: str) -> bool:
    return name in SIZES or facts(op).keeps_shape and name in ("start", "end")


def is_open(x: Any) -> bool:
    """Sizes of zero and one are part of a class: loops, broadcasts and strides depend on them."""
    return isinstance(x, int) and x > 1


# ---- classes -----------------------------------------------------------------------------------------------

Rule = int | tuple[int]  # a stride: a number; or that behind a dimension, of which -1 is none that is known


def in_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions from the one whose elements are nearest to each other; those of one element before others."""
    return sorted(range(len(shape)), key=lambda d: (strides[d], shape[d] != 1, -d))


def stride_rules(shape: Sequence[int], strides: Sequence[int]) -> tuple[Rule, ...]:
    """How each stride follows from sizes: packed behind the dimension before it in memory, or left open, (-1,)."""
    rules: list[Rule] = [0] * len(shape)
    before, expected = -1, 1
    for d in in_memory(shape, strides):
        if strides[d] == 0:
            continue
        if strides[d] == expected and before >= 0:
            rules[d] = (before,)
        else:
            rules[d] = 1 if strides[d] == 1 else (-1,)
        before, expected = d, strides[d] * max(shape[d], 1)
    return tuple(rules)


def common_shape(op: OpOverload, args: Arguments) -> tuple[int, ...] | None:
    """Of the contiguous tensors of an elementwise operator, where they have one: how many dimensions they have does not
    matter to it, nor which sizes are one. Tensors without dimensions are numbers."""
    if not facts(op).elementwise:
        return None
    shapes = {x.shape for x in args if isinstance(x, TensorLike) and x.shape}
    rows = all(x.strides == contiguous(x.shape) for x in args if isinstance(x, TensorLike))
    return shapes.pop() if len(shapes) == 1 and rows else None


def in_a_row(args: Arguments) -> Arguments:
    return tuple(replace(x, shape=(math.prod(x.shape),), strides=(1,)) if isinstance(x, TensorLike) and x.shape else x
                 for x in args)


class Shapes:
    """The class of a call, its numbers, and the sizes that tell it from others of its class."""

    def __init__(self, op: OpOverload, args: Arguments) -> None:
        self.shape = common_shape(op, args)
        self.op, self.args = op, args if self.shape is None else in_a_row(args)
        self.values: list[int] = []
        self.extra: list[int] = []  # those that are arguments, and no sizes of tensors
        self.numbers: list[Any] = []
        self.empty = False  # a tensor has no elements: there is little to compile, and strides have rules of their own
        self._places: dict[int, tuple[list[int | None], list[int | None], Hashable]] = {}  # of tensors among the values
        self._last: dict[int, dict[int, int]] = {}  # by dimensions, counted from the last, and sizes
        self.key: Hashable = tuple(self._of(x, str(a.type), is_size(op, a.name))
                                   for a, x in zip(op._schema.arguments, self.args, strict=True))

    @property
    def identity(self) -> Hashable:
        """What a program for one shape is made for, beside the class."""
        return tuple(self.values), self.shape

    def _of(self, x: Any, kind: str, size: bool) -> Hashable:
        if isinstance(x, (list, tuple)):
            return tuple(self._of(y, "", size) for y in x)
        if isinstance(x, TensorLike):
            if x.same not in self._places:
                self._places[x.same] = self._tensor(x)
            return x.same, self._places[x.same][2]
        if size and is_open(x):
            self.extra.append(x)
            self._value(x)
            return "size"
        if is_number(x, kind):
            self.numbers.append(plain(x))
            return "number", type(plain(x)), x.dtype if isinstance(x, Number) else None
        return type(x), str(x) if isinstance(x, float) else x  # 0.0 and -0.0 are equal

    def _value(self, x: int) -> int:
        self.values.append(x)
        return len(self.values) - 1

    def _tensor(self, x: TensorLike) -> tuple[list[int | None], list[int | None], Hashable]:
        rules = stride_rules(x.shape, x.strides)
        self.empty |= 0 in x.shape
        sizes = [self._size(n, len(x.shape) - d) if n > 1 else None for d, n in enumerate(x.shape)]
        strides = [self._value(n) if rule == (-1,) else None for n, rule in zip(x.strides, rules, strict=True)]
        shape = tuple(n if at is None else (at,) for n, at in zip(x.shape, sizes, strict=True))
        return sizes, strides, (x.dtype, x.device, shape, rules, x.overlaps)

    def _size(self, n: int, from_last: int) -> int:
        """Those that elementwise operators broadcast to one another are one; so are those of operators that trust their
        caller, whose kernels would be asked for strides at sizes that do not fit together."""
        if not facts(self.op).elementwise and facts(self.op).checks:
            return self._value(n)
        seen = self._last.setdefault(from_last, {})
        if n not in seen:
            seen[n] = self._value(n)
        return seen[n]

    def symbolic(self, symbols: Sequence[Any]) -> Arguments:
        """The call with symbols in the place of its values."""
        made: dict[int, TensorLike] = {}
        sizes = iter([symbol for symbol, used in zip(symbols, self._used(), strict=True) if not used])

        def changed(x: Any, size: bool) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(changed(y, size) for y in x)
            if isinstance(x, TensorLike):
                return made.setdefault(x.same, self._with(x, symbols))
            return next(sizes) if size and is_open(x) else x

        return tuple(changed(x, is_size(self.op, a.name))
                     for a, x in zip(self.op._schema.arguments, self.args, strict=True))

    def _used(self) -> list[bool]:
        """Which values are of tensors."""
        used = {at for sizes, strides, _ in self._places.values() for at in (*sizes, *strides)}
        return [k in used for k in range(len(self.values))]

    def _with(self, x: TensorLike, symbols: Sequence[Any]) -> TensorLike:
        sizes, opened, _ = self._places[x.same]
        shape = [n if at is None else symbols[at] for n, at in zip(x.shape, sizes, strict=True)]
        rules = stride_rules(x.shape, x.strides)
        strides: list[Any] = [rule if at is None else symbols[at] for rule, at in zip(rules, opened, strict=True)]
        for d in in_memory(x.shape, x.strides):
            if isinstance(strides[d], tuple):
                before = strides[d][0]
                strides[d] = strides[before] * (shape[before] if x.shape[before] else 1)
        return replace(x, shape=tuple(shape), strides=tuple(strides))


# ---- programs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassProgram:
    """What serves the calls of a class whose sizes meet its guards."""

    run: Run | None
    holds: Callable[..., bool]  # of the values of a call
    ranges: Callable[..., Any]  # of indices; of a call that is to resize what it writes to, the shapes

    def served(self, shapes: Shapes) -> tuple[Run, tuple[Range, ...]]:
        given = self.ranges(*shapes.values)
        if self.run is None:
            raise OtherShapes(list(given))
        run, extra, shape = self.run, shapes.extra, shapes.shape
        if shape is not None and len(shape) > 1:
            return lambda args: [t.view(shape) for t in run([
                x.view(-1) if isinstance(x, torch.Tensor) and x.dim() else x for x in args])], given
        return (lambda args: run(args + extra)) if extra else run, given


@dataclass
class CallClass:
    """Calls that differ in sizes and numbers alone."""

    first: Hashable  # the sizes of the first of them
    numbers: list[Any]  # and its numbers
    changed: int = 0  # at which positions other numbers were seen, as bits
    kinds: set[str] = field(default_factory=set)  # of numbers that have programs of their own
    # By the numbers that are arguments, as bits, and the others: programs, or why one is made for each shape
    programs: dict[Hashable, list[ClassProgram] | str] = field(default_factory=dict)
    taken: dict[int, tuple[Numbers, ...]] = field(default_factory=dict)  # by the same bits

    def __post_init__(self) -> None:
        self.kinds.add(str(self.numbers))

    def lifting(self, numbers: list[Any]) -> int:
        """The numbers that change from call to call, as bits; none while few were seen."""
        text = str(numbers)
        if text in self.kinds:
            return 0
        for k, (x, y) in enumerate(zip(numbers, self.numbers, strict=True)):
            self.changed |= int(str(x) != str(y)) << k
        if len(self.kinds) < PATIENCE:
            self.kinds.add(text)
            return 0
        return self.changed


Served = tuple[Run, tuple[Range, ...], tuple[Numbers, ...], int, bool]  # lifted, whether for many shapes


class Programs:
    """The programs of a door, by classes of calls. Both those for many shapes and those for one."""

    def __init__(self, into_any: bool = True, most_fixed: float = math.inf,
                 apart: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.into_any = into_any  # as `build` has it
        self.most_fixed = most_fixed  # programs for one shape of a form
        self.apart = apart  # within which others than the callers' threads compile
        self._fixed: Counter[Form] = Counter()
        self._many: set[Form] = set()  # that have programs for many shapes
        self._classes: OrderedDict[Hashable, CallClass] = OrderedDict()
        self._hot: OrderedDict[Hashable, Future[Run | None]] = OrderedDict()
        self._lock = fork_safe(threading.RLock())

    def is_new(self, form: Form, args: Arguments) -> bool:
        """Whether this is the first call of its class."""
        shapes = Shapes(form.op, args)
        key = class_key(form, shapes)
        with self._lock:
            known = key in self._classes
            self._class(key, shapes)
            return not known

    def serving(self, form: Form, args: Arguments, lift: int) -> Served:
        """What serves such calls. UnsupportedError says why there is nothing, OtherShapes what is to be resized."""
        shapes = Shapes(form.op, args)
        found = None if shapes.empty or not shapes.values else self._class(class_key(form, shapes), shapes)
        why = ""
        # The first shape of a class may be its only one, unless the operator had many in other classes. By the wish for
        # results that depend on nothing but their arguments, all have programs of one kind.
        if found is not None and (found.first != shapes.identity or form in self._many
                                  or torch.are_deterministic_algorithms_enabled()):
            with self._lock:
                changing = 0 if lift else found.lifting(shapes.numbers)
            for bits in (changing, lift) if changing else (lift,):
                program = self._program(form, shapes, found, bits)
                if isinstance(program, str):
                    why = program
                elif bits == lift or all(
                        takes(found.taken[bits], k, x) for k, x in enumerate(shapes.numbers) if bits >> k & 1):
                    return *program.served(shapes), found.taken[bits], bits, True
        numbers = taken(form.op, args, lift) if lift else ()
        if self._fixed[form] >= self.most_fixed:
            raise UnsupportedError(f"{self.most_fixed} kernels were built already")
        run, ranges, _ = build(form, args, lift, self.into_any)
        self._fixed[form] += 1
        if why:
            FIXED.setdefault(form.name, why)
        return run, ranges, numbers, lift, False

    def _class(self, key: Hashable, shapes: Shapes) -> CallClass:
        with self._lock:
            found = self._classes.setdefault(key, CallClass(shapes.identity, shapes.numbers))
            self._classes.move_to_end(key)
            if len(self._classes) > MOST_CLASSES:
                self._classes.popitem(last=False)
            return found

    def _program(self, form: Form, shapes: Shapes, found: CallClass, lift: int) -> ClassProgram | str:
        key = lift, str([x for k, x in enumerate(shapes.numbers) if not lift >> k & 1])
        with self._lock:
            programs = found.programs.setdefault(key, [])
            if isinstance(programs, str):
                return programs
            for known in programs:
                if known.holds(*shapes.values):
                    return known
        # Without the lock: another thread, in which something is compiled, may come here.
        program: ClassProgram | str
        try:
            if len(programs) == MOST_PROGRAMS:
                raise UnsupportedError(f"{MOST_PROGRAMS} programs for many shapes were for few")
            program = made(form, shapes, lift, self.into_any)
            if not program.holds(*shapes.values):
                return "its sizes do not fit together"  # one for this shape says what is wrong
            intervals = taken(form.op, shapes.args, lift) if lift else ()
        except Exception as error:  # one for this shape may do, or say what is wrong
            program = error.message if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
        with self._lock:
            if isinstance(program, str):
                found.programs[key] = program
            else:
                found.taken.setdefault(lift, intervals)
                programs.append(program)
                self._many.add(form)
        return program

    def hot(self, form: Form, args: Arguments, lift: int, wait: bool) -> Run | None:
        """A program for one shape that many calls have: begun in the background, and there once somebody waits."""
        if torch.are_deterministic_algorithms_enabled():  # it may add in another order than the one that served so far
            return None
        shapes = Shapes(form.op, args)
        key = class_key(form, shapes), lift, str((shapes.numbers, shapes.identity))
        if not wait:
            self._hot[key] = WORKER.submit(contextvars.copy_context().run, self._for_one_shape, form, args, lift)
            if len(self._hot) > MOST_CLASSES:
                self._hot.popitem(last=False)
            return None
        begun = self._hot.pop(key, None)
        # One that is not there yet may wait for a lock that this thread holds.
        return begun.result() if begun is not None and begun.done() else self._for_one_shape(form, args, lift)

    @untraced
    def _for_one_shape(self, form: Form, args: Arguments, lift: int) -> Run | None:
        try:
            with torch.no_grad(), self.apart():
                return build(form, args, lift, self.into_any).run
        except Exception as error:  # what serves goes on serving
            log.debug("%s has no program for one shape: %s", form.name, error)
            return None


# One after another, in a thread that has none of its callers' modes and guards.
WORKER = Pool(1, "shapes")


def class_key(form: Form, shapes: Shapes) -> Hashable:
    return (form.op, config.variant(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            shapes.key)


def takes(intervals: Sequence[Numbers], number: int, x: Any) -> bool:
    return any(k == number and least <= x <= most for k, _, least, most in intervals)


def made(form: Form, shapes: Shapes, lift: int, into_any: bool) -> ClassProgram:
    env = ShapeEnv()
    symbols = [env.create_symbol(n, ConstantSource(f"n{k}"), DimDynamic.DYNAMIC) for k, n in enumerate(shapes.values)]
    sizes = [env.create_symintnode(s, hint=n) for s, n in zip(symbols, shapes.values, strict=True)]
    run: Run | None = None
    try:
        run, ranges, guards = build(form, shapes.symbolic(sizes), lift, into_any, env)
        told = [[str(which), host_text(as_index(low)), host_text(as_index(high))] for which, low, high in ranges]
    except OtherShapes as other:
        told, guards = [[text(n) for n in shape] for shape in other.shapes], []
    guards += [text(guard.expr) for guard in env.guards]
    for s in symbols:
        bounds = env.var_to_range[s]
        guards += [f"{text(bounds.lower)} <= {s.name}"] if bounds.lower.is_Integer and bounds.lower > 2 else []
        guards += [f"{s.name} <= {text(bounds.upper)}"] if bounds.upper.is_Integer else []
    names = ", ".join(s.name for s in symbols)
    rows = "".join(f"({''.join(x + ', ' for x in row)}), " for row in told)
    return ClassProgram(run, function(names, " and ".join(guards) or "True"), function(names, f"({rows})"))


def text(x: Any) -> str:
    """An expression of symbols in Python."""
    printed: str = PythonPrinter().doprint(x.node.expr if isinstance(x, torch.SymInt) else x)
    return printed


def function(names: str, body: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"math": math}
    exec(f"def of({names}): return {body}", scope)
    of: Callable[..., Any] = scope["of"]
    return of

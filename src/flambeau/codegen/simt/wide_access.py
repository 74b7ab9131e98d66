"""Wide accesses on GPUs: a work-item loads several elements, then computes, then stores them.

Memory latency is long, so bandwidth depends on how many accesses are in flight at once. Adjacent elements are one
access of 16 bytes if the strides allow it and the offsets of the tensors do, which the kernel tests. Otherwise the
elements of a work-item are a group's width apart, so that adjacent elements belong to adjacent work-items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr, loads, walk
from flambeau.ir.index import ONE, ZERO, Dyn, Index, Sym, is_positive, volume
from flambeau.ir.lines import is_line
from flambeau.ir.program import Kernel, LoopKernel
from flambeau.ir.tuning import POINTS

from ..dialect import UNROLLED, Dialect
from ..writer import Scope
from .dialect import Shape
from .points import PointLoops, Points


class Several(Points):
    """Work-items with several elements of `flat`, `number` in all; a work-item's own are counted from 0 to `each`."""

    each = 1
    lanes = 1  # adjacent elements
    lined = False  # whether these can be one access
    runs = False  # whether they belong to one work-item even without wide accesses
    flat: tuple[Sym, ...] = ()
    around: frozenset[Sym] = frozenset()  # variables that are the same for all of a work-item's elements
    number: Index = ONE
    me = "me"
    part: tuple[int, int] | None = None  # the range of a work-item's elements that is processed now
    backward = False  # whether elements count downward: lines are reversed when they are loaded or stored
    address: dict[str, Index]

    def __init__(self, dialect: Dialect, kernel: Kernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        self.fetched: dict[Expr, str] = {}  # arrays with elements that were loaded
        self.kept: dict[str, str] = {}  # arrays with elements to be stored

    # ---- the choice of accesses ------------------------------------------------------------------------

    def ahead(self, exprs: Sequence[Expr]) -> list[Expr]:
        """The reads that can be made before anything is computed."""
        inside = set(self.flat)
        known = inside | set(self.sizes) | self.around
        found = []
        for e in loads(*exprs):
            address: Index = e.attr[1][0]
            places = [a.expr for a in address.atoms() if isinstance(a, Dyn)]
            computed = any(x.op in ("local", "fold", "raw") for x in walk(*places))
            if not e.args and not computed and address.symbols() & inside and address.symbols() <= known:
                found.append(e)
        return found

    def choose_lanes(self, exprs: Sequence[Expr], stores: Iterable[tuple[str, Index]]) -> None:
        v = self.flat[-1]
        reads = self.ahead(exprs)
        lines = [(e.dtype, a) for e in reads if (a := e.attr[1][0]).coefficient(v) is not ZERO]
        lines += [(self.dtypes[name], a) for name, a in stores]
        others = [e for e in loads(*exprs) if e not in reads]
        if self.d.bounded:
            return  # accesses to several elements cannot be checked
        if any(e.attr[1][0].coefficient(v) is ONE for e in others):
            return  # computed addresses: neighbouring work-items should access neighbouring elements
        lanes = POINTS.access_bytes // max((dtype.itemsize for dtype, _ in lines), default=POINTS.access_bytes)
        while lanes > 1:
            rows = len(self.flat) == 1 or v.size.is_const and v.size.const % lanes == 0
            if rows and all(is_line(a, v, lanes) for _, a in lines):
                self.lanes, self.lined = lanes, True
                return
            lanes //= 2

    def look(self, reads: Sequence[Expr], stores: Iterable[str]) -> None:
        """Writes the test whether the offsets of all tensors allow wide accesses."""
        if not self.lined:
            return
        names = [e.attr[0] for e in reads if is_line(e.attr[1][0], self.flat[-1], self.lanes)] + [*stores]
        pointers = sorted({[*self.short].index(name) for name in names}, key=str)
        self.line(f"const bool wide = {self.d.aligned(pointers, self.lanes)};")

    # ---- elements --------------------------------------------------------------------------------------

    def place(self, s: str, base: str) -> str:
        """The position of a work-item's element among all elements."""
        apart = f"{s} * {self.group} + {self.me}"
        if self.lanes == 1:
            return f"{base} + {apart}"
        beside = f"({s} / {self.lanes} * {self.group} + {self.me}) * {self.lanes} + {s} % {self.lanes}"
        return f"{base} + ({beside})" if self.runs else f"{base} + (wide ? {beside} : {apart})"

    def begin(self) -> str:
        """The first of the elements that are processed part by part; `end` is the end of all."""
        return "0"

    def end(self) -> str:
        return self.index(self.number)

    def at_once(self) -> int:
        """The number of elements that a group holds at once."""
        return self.each * self.group

    def is_whole(self) -> bool:
        """Whether no group has elements beyond the end."""
        return self.number.is_const and self.number.const % self.at_once() == 0

    def bind(self, at: str) -> None:
        self.decompose(at, self.flat)

    @contextmanager
    def element(self, s: str, base: str, beyond: str) -> Iterator[Scope]:
        """The scope of one element; beyond the end nothing is done ("skip"), or the last element is used again
        ("clamp")."""
        at, text, guard = self.fresh("q"), self.place(s, base), "{"
        if not self.is_whole():
            if beyond == "clamp":
                end = f"({self.d.long})({self.end()} - 1)"
                text = self.d.minimum.format(f"({self.d.long})({text})", end)
                if base == "0" and not is_positive(self.number):
                    guard = f"if ({self.end()} > 0) {{"  # there may be no last one
            else:
                guard = f"if ({at} < {self.end()}) {{"
        self.line(f"const {self.d.long} {at} = {text};")
        with self.scope(guard, self.flat) as scope:
            self.bind(at)
            for e, array in self.fetched.items():
                scope.known[e] = self.as_value(f"{array}[{s}]", e.dtype)
            yield scope

    @contextmanager
    def every(self, step: int = 1, end: int = 0, start: int = 0) -> Iterator[str]:
        s = self.fresh("st")
        advance = f"++{s}" if step == 1 else f"{s} += {step}"
        first, last = (start, end or self.each) if end or start else self.part or (0, self.each)
        with self.scope(f"for (int {s} = {first}; {s} < {last}; {advance}) {{", how=UNROLLED):
            yield s

    def in_parts(self, wanted: bool) -> Iterator[None]:
        """Loops over a work-item's elements in parts, if they need not all be loaded at once."""
        step = max(self.lanes, POINTS.part) if wanted else self.each
        for first in range(0, self.each, step):
            self.part = (first, min(first + step, self.each))
            yield
        self.part = None

    def array(self, dtype: DType, prefix: str) -> str:
        name = self.fresh(prefix)
        self.line(f"{self.d.stored[dtype]} {name}[{self.each}];")
        return name

    # ---- memory ----------------------------------------------------------------------------------------

    def fetch(self, reads: Sequence[Expr], base: str) -> None:
        """Loads all elements of these reads into arrays."""
        for e in reads:
            self.fetched.pop(e, None)
        arrays = {e: self.array(e.dtype, "r") for e in reads}
        lines = [e for e in reads if self.lined and is_line(e.attr[1][0], self.flat[-1], self.lanes)]

        def wide(s: str) -> None:
            for e in lines:
                self.line(self.d.read_line(*self.line_at(e.attr[0], e.attr[1][0]), f"{arrays[e]} + {s}", self.backward))

        def one(s: str, which: Sequence[Expr]) -> None:
            for e in which:
                self.line(f"{arrays[e]}[{s}] = {self.value(e)};")

        if lines:
            self.transfer(base, "clamp", wide, lambda s: one(s, lines))
            self.fetched.update({e: arrays[e] for e in lines})
        if len(lines) < len(reads):
            with self.every() as s, self.element(s, base, "clamp"):
                one(s, [e for e in reads if e not in lines])
            self.fetched.update(arrays)

    def flush(self, names: Sequence[str], base: str) -> None:
        """Stores all elements of these results from their arrays."""

        def wide(s: str) -> None:
            for name in names:
                place = self.line_at(name, self.address[name])
                self.line(self.d.write_line(*place, f"{self.kept[name]} + {s}", self.backward))

        def one(s: str) -> None:
            for name in names:
                self.store(name, self.address[name], f"{self.kept[name]}[{s}]")

        if names:
            self.transfer(base, "skip", wide, one)

    def line_at(self, name: str, address: Index) -> tuple[str, int, str]:
        """The type, number and address of adjacent elements."""
        return self.d.stored[self.dtypes[name]], self.lanes, f"{self.short[name]} + {self.index(address)}"

    def transfer(self, base: str, beyond: str, wide: Callable[[str], None], one: Callable[[str], None]) -> None:
        """Accesses all elements: by wide accesses where possible, otherwise one by one."""
        if not self.lined:
            with self.every() as s, self.element(s, base, beyond):
                one(s)
            return
        with self.every(self.lanes) as s:
            at, j = self.fresh("q"), self.fresh("j")
            self.line(f"const {self.d.long} {at} = {self.place(s, base)};")
            inside = "" if self.is_whole() else f" && {at} + {self.lanes} <= {self.end()}"
            with self.scope(f"if (wide{inside}) {{", self.flat):
                self.bind(f"{at} + {self.lanes - 1}" if self.backward else at)
                wide(s)
            with self.scope("else {"), self.scope(f"for (int {j} = {s}; {j} < {s} + {self.lanes}; ++{j}) {{",
                                                  how=UNROLLED), self.element(j, base, beyond):
                one(j)


class StreamedPoints(Several, PointLoops):
    """A map of many points: each work-item computes several."""

    def __init__(self, dialect: Dialect, kernel: LoopKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        self.flat = kernel.outer
        self.number = volume(kernel.outer)
        exprs = kernel.everything()
        self.choose_lanes(exprs, kernel.stores)
        self.reads = self.ahead(exprs)
        widest = max((self.dtypes[name].itemsize for name, _ in kernel.accesses()), default=POINTS.access_bytes)
        self.each = max(self.lanes, POINTS.access_bytes // widest)

    def write(self) -> None:
        chunk, long = self.at_once(), self.d.long
        start = self.first_point(self.flat, chunk)
        self.line(f"const {long} {self.me} = {self.d.lane}, base = {start};")
        self.look(self.reads, self.address)
        self.fetch(self.reads, "base")
        self.kept = {name: self.array(self.dtypes[name], "w") for name in self.address}
        with self.every() as s, self.element(s, "base", "clamp"):
            self.current = s
            for stage in self.k.stages:
                self.stage(stage)
        self.flush([*self.address], "base")

    def is_whole(self) -> bool:
        return self.bands is None and super().is_whole()

    def end(self) -> str:
        return self.until

    def keep(self, name: str, level: str, text: str) -> None:
        self.line(f"{self.kept[name]}[{self.current}] = {text};")

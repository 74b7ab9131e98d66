"""OpenCL on GPUs: a row is the work of one group, whose work-items read what lies side by side.

A reduction leaves a state with each work-item; these are joined in local memory, halves onto halves. A scan goes
through its row a group's width at a time, each in a tree, and carries what the elements before it came to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flambeau.ir.dtypes import DType
from flambeau.ir.index import ONE, Index, Sym, product
from flambeau.ir.nodes import Combine
from flambeau.ir.program import Item, Kernel, LoopKernel, ScanKernel

from .cfamily import Dialect, Scope
from .opencl import Draft, Shape
from .opencl_points import SHORT, PointLoops, Points
from .scan import ScanWriter

LEAST = 32  # work-items of a group
FEW = 4096  # rows that would leave a GPU idle if each were one work-item's
BARRIER = "barrier(CLK_LOCAL_MEM_FENCE);"


def is_row(k: LoopKernel) -> bool:
    """Whether what is contiguous is reduced, and long enough for a group."""
    length = product(v.extent for v in k.inner if v.extent is not None)
    return k.vector in k.inner and k.bounds is None and not (length.is_const and length.const <= SHORT)


def is_scanned_row(k: ScanKernel) -> bool:
    assert k.axis.extent is not None
    if k.axis.extent.is_const and k.axis.extent.const <= SHORT:
        return False
    rows = product(v.extent for v in k.outer if v.extent is not None)
    return any(a.coefficient(k.axis) is ONE for _, a in k.stores) or (rows.is_const and rows.const < FEW)


def group_for(length: Index, most: int) -> int:
    """The least power of two that covers a row."""
    wanted = most if not length.is_const else max(LEAST, 1 << max(length.const - 1, 0).bit_length())
    return 1 << (min(wanted, most).bit_length() - 1)


class Rows(Points):
    """A group for each point of some variables."""

    group = 1
    me = "me"

    def __init__(self, dialect: Dialect, kernel: Kernel) -> None:
        super().__init__(dialect, kernel)
        self._arrays: dict[tuple[str, int], str] = {}

    @contextmanager
    def groups(self, vars: Sequence[Sym]) -> Iterator[Scope]:
        self.total = product(v.extent for v in vars if v.extent is not None) * self.group
        row = self.fresh("row")
        self.line(f"const int {self.me} = get_local_id(0);")
        self.line(f"const {self.d.long} {row} = get_group_id(0);")
        with self.scope("{", vars) as s:
            self.decompose(row, vars)
            yield s

    def shared(self, dtypes: Sequence[DType]) -> list[str]:
        """Arrays in local memory, one element for each work-item; who comes later gets the same ones again."""
        kinds = [self.d.stored[dtype] for dtype in dtypes]
        keys = [(kind, kinds[:k].count(kind)) for k, kind in enumerate(kinds)]
        for key in keys:
            if key not in self._arrays:
                self._arrays[key] = self.fresh("r")
                # The function's own scope is the only one where they may stand.
                self.scopes[0].lines.append(f"__local {key[0]} {self._arrays[key]}[{self.group}];")
        return [self._arrays[key] for key in keys]

    def put(self, arrays: Sequence[str], values: Sequence[str]) -> None:
        for array, value in zip(arrays, values, strict=True):
            self.line(f"{array}[{self.me}] = {value};")
        self.line(BARRIER)

    def draft(self, shape: Shape) -> Draft:
        return Draft(self, self.total, self.group)


class RowLoops(Rows, PointLoops):
    def __init__(self, dialect: Dialect, kernel: LoopKernel, most: int) -> None:
        super().__init__(dialect, kernel)
        self.group = group_for(self.row_length(), most)

    def write(self) -> None:
        for name in sorted(self.k.scratch):
            kind = self.d.stored[self.dtype_of[name]]
            self.line(f"__local {kind} {self.scratch(name)}[{self.index(self.row_length())}];")
        with self.groups(self.k.outer):
            for stage in self.k.stages:
                self.stage(stage)

    def stage(self, stage: Sequence[Item]) -> None:
        if stage[0].level == "outer" and stage[0].combine is None:
            for i in stage:
                self.map_item(i)
            return
        reductions = [i for i in stage if i.combine is not None]
        states = self.declare(reductions)
        at, end = self.fresh("q"), self.index(self.row_length())
        header = f"for ({self.d.long} {at} = {self.me}; {at} < {end}; {at} += {self.group}) {{"
        # A work-item meets the same points in every stage: what it stored, it may read again.
        with self.scope(header, self.k.inner):
            self.decompose(at, self.k.inner)
            self.body(stage, states)
        for i in reductions:
            assert i.combine is not None
            joined = self.joined(i.combine, [states[n] for n in i.names])
            states.update(zip(i.names, joined, strict=True))
        self.finish(reductions, states)

    def joined(self, c: Combine, states: Sequence[str]) -> list[str]:
        """All work-items' states in one, known to each of them."""
        arrays = self.shared(c.dtypes)
        self.put(arrays, states)
        with self.scope(f"for (int h = {self.group // 2}; h > 0; h /= 2) {{"):
            with self.scope(f"if ({self.me} < h) {{"):
                self.combine_into(c, [f"{a}[{self.me}]" for a in arrays], [f"{a}[{self.me} + h]" for a in arrays])
            self.line(BARRIER)
        names = []
        for array, dtype in zip(arrays, c.dtypes, strict=True):
            names.append(self.fresh("v"))
            self.line(f"const {self.d.types[dtype]} {names[-1]} = {array}[0];")
        self.line(BARRIER)
        return names

    def keep(self, name: str, level: str, text: str) -> None:
        if level == "full":
            super().keep(name, level, text)
            return
        with self.scope(f"if ({self.me} == 0) {{"):
            super().keep(name, level, text)


class RowScan(Rows, ScanWriter):
    def __init__(self, dialect: Dialect, kernel: ScanKernel, most: int) -> None:
        super().__init__(dialect, kernel)
        assert kernel.axis.extent is not None
        self.group = group_for(kernel.axis.extent, most)
        self.every = kernel.combine.needed([*self.stored.values()], stretches=True)

    def write(self) -> None:
        k = self.k
        n = self.extent(k.axis)
        with self.groups(k.outer):
            carry = self.declare(self.every)
            arrays = self.shared([k.combine.left[j].dtype for j in self.every])
            first, at = self.fresh("q"), self.fresh("q")
            with self.scope(f"for ({self.d.long} {first} = 0; {first} < {n}; {first} += {self.group}) {{", (k.axis,)):
                self.line(f"const {self.d.long} {at} = {first} + {self.me};")
                self.put(arrays, self.elements(at, n))
                self.tree(arrays)
                self.store_running(arrays, carry, at, n)
                self.line(BARRIER)
                last = self.joined(carry, [f"{a}[{self.group - 1}]" for a in arrays])
                for j, text in zip(self.every, last, strict=True):
                    self.line(f"{carry[j]} = {text};")
                self.line(BARRIER)

    def elements(self, at: str, n: str) -> list[str]:
        """The values to be combined; beyond the end of the row the identity."""
        k = self.k
        names = []
        for j in self.every:
            e = k.combine.identity[j]
            names.append(self.fresh("e"))
            self.line(f"{self.d.types[e.dtype]} {names[-1]} = {self.d.constant(e.attr, e.dtype)};")
        with self.scope(f"if ({at} < {n}) {{", (k.axis,)):
            self.bind_axis(at, n)
            for name, j in zip(names, self.every, strict=True):
                self.line(f"{name} = {self.value(k.exprs[j])};")
        return names

    def bind_axis(self, at: str, n: str) -> None:
        place = f"{n} - 1 - {at}" if self.k.reverse else at
        self.line(f"const {self.d.long} {self.sym(self.k.axis)} = {place};")

    def joined(self, left: dict[int, str], right: Sequence[str]) -> list[str]:
        count = len(self.k.combine.left)
        rights = dict(zip(self.every, right, strict=True))
        return self.combined(self.k.combine, [left.get(j, "0") for j in range(count)],
                             [rights.get(j, "0") for j in range(count)], self.every)

    def tree(self, arrays: Sequence[str]) -> None:
        """Each element joined with those 1, 2, 4, ... before it."""
        own = []
        for a, j in zip(arrays, self.every, strict=True):
            own.append(self.fresh("o"))
            self.line(f"{self.d.types[self.k.combine.left[j].dtype]} {own[-1]} = {a}[{self.me}];")
        with self.scope(f"for (int h = 1; h < {self.group}; h *= 2) {{"):
            with self.scope(f"if ({self.me} >= h) {{"):
                before = {j: f"{a}[{self.me} - h]" for a, j in zip(arrays, self.every, strict=True)}
                for name, text in zip(own, self.joined(before, own), strict=True):
                    self.line(f"{name} = {text};")
            self.line(BARRIER)
            self.put(arrays, own)

    def store_running(self, arrays: Sequence[str], carry: dict[int, str], at: str, n: str) -> None:
        with self.scope(f"if ({at} < {n}) {{", (self.k.axis,)):
            self.bind_axis(at, n)
            now = self.joined(carry, [f"{a}[{self.me}]" for a in arrays])
            running = self.running(dict(zip(self.every, now, strict=True)))
            for name in self.stored:
                self.store(name, self.address[name], self.finished(name, running))

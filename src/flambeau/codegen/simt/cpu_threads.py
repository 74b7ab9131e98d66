"""OpenCL on CPUs: a work-item is a thread, with the loops of the C++ kernels.

Where C++ divides a loop nest among OpenMP's threads, here each work-item takes its share of it. Work-items do not wait
for each other, so the steps of one C++ kernel become several launches: a scatter's start and its writes, or the pieces
of a reduction with few results (`schedule/split_reductions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from flambeau.ir.index import Sym
from flambeau.ir.program import Item

from ..c.columns import ColumnWriter
from ..c.contractions.blocks import Blocks
from ..c.maps import MapWriter
from ..c.nest import NestWriter
from ..c.rows import RowWriter
from ..c.scans import ScanWriter
from ..c.scatters import ScatterWriter
from ..dialect import TEAM, Shares, Steps
from ..writer import Scope
from .dialect import LaunchDraft, SimtWriter

SHARES = "4 * units"  # several work-items per core, because they may take different times
EACH = "units"  # where every work-item skips the points that belong to others


class Threads(SimtWriter, NestWriter):
    items = "1"

    @contextmanager
    def nest(self, vars: Sequence[Sym], how: Steps | None = None, *blocks: tuple[Sym, str, str]) -> Iterator[Scope]:
        loops = [(v, *self.ranges.get(v, ("0", self.extent(v), v))[:2], "1") for v in vars]
        loops += [(v, "0", limit, step) for v, limit, step in blocks]
        if not how or not loops:
            with super().nest(vars, None, *blocks) as s:
                yield s
            return
        self.items = SHARES
        bound = {v for v, *_ in loops} | {self.ranges[v][2] for v in vars if v in self.ranges}
        counts = [trips(lo, hi, step) for _, lo, hi, step in loops]
        total, at, end = (self.fresh(x) for x in ("all", "at", "end"))
        self.line(f"const {self.d.long} {total} = {' * '.join(counts)};")
        self.line(f"const {self.d.long} {end} = {total} * ({self.d.thread} + 1) / {self.d.threads};")
        header = f"for ({self.d.long} {at} = {total} * {self.d.thread} / {self.d.threads}; {at} < {end}; ++{at}) {{"
        with self.scope(header, bound) as s:
            rest = at
            for k, ((v, lo, _, step), count) in enumerate(zip(reversed(loops), reversed(counts), strict=True)):
                last = k == len(loops) - 1
                place = rest if last else f"{rest} % ({count})"
                place = place if step == "1" else f"({place}) * {step}"
                self.line(f"const {self.d.long} {self.sym(v)} = {place if lo == '0' else f'{lo} + {place}'};")
                if not last:
                    rest, before = self.fresh("q"), rest
                    self.line(f"const {self.d.long} {rest} = {before} / ({count});")
            yield s

    @contextmanager
    def scope(self, header: str, vars: Iterable[Sym] = (), footer: str = "}", how: Steps | None = None,
              counted: bool = False) -> Iterator[Scope]:
        if how is TEAM or isinstance(how, Shares):
            self.items, how = EACH, None
        with super().scope(header, vars, footer, how, counted) as s:
            yield s

    def draft(self) -> LaunchDraft:
        return LaunchDraft(self, self.items)


def trips(lo: str, hi: str, step: str) -> str:
    span = hi if lo == "0" else f"({hi} - {lo})"
    return span if step == "1" else f"(({span} + {step} - 1) / {step})"


class ThreadMap(Threads, MapWriter):
    def settled(self, items: list[Item], v: Sym) -> list[Item]:
        return items  # every work-item would have to look at all of them


class ThreadRows(Threads, RowWriter):
    pass


class ThreadColumns(Threads, ColumnWriter):
    pass


class ThreadScan(Threads, ScanWriter):
    pass


class ThreadScatter(Threads, ScatterWriter):
    begins = False  # whether the target must be filled before

    def start(self) -> None:
        self.begins = self.k.init is not None


class ThreadStart(Threads, ScatterWriter):
    pass


LOOPS: dict[str, type[ThreadMap | ThreadRows | ThreadColumns]] = {
    **dict.fromkeys(("points", "lines", "chunks", "tiles", "flat tiles"), ThreadMap),
    "rows": ThreadRows, "columns": ThreadColumns}


class ThreadBlocks(SimtWriter, Blocks):
    """Contractions: each work-item computes some blocks."""

    def write(self) -> LaunchDraft:
        self.blocks()
        return LaunchDraft(self, "1" if self.small else SHARES, before=tuple(self.tile()))

"""Loop kernels in Triton: maps over a tile, reductions along one more axis, and segments.

A map gives each variable its own axis until the tile is full, so that no flat index is divided. A reduction adds an
axis for all its inner points. Rows that fit are held whole, so that softmax reads memory once. Longer rows are
processed in pieces that are combined lane by lane, and across lanes once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from flambeau.ir.expr import Expr, cast, loads, walk
from flambeau.ir.index import ONE, Index, Op, Sym, as_index, ceildiv, unflat, volume
from flambeau.ir.lines import is_line
from flambeau.ir.program import AnySize, Item, LoopKernel, exprs_of, reductions_of, sites_of
from flambeau.ir.tuning import BLOCKS, UNSCALED, Scale

from ..dialect import Pipelined
from ..stages import StageWriter
from .blocks import WIDE, BlockWriter, PartDraft, count_text, padded_read, power, spans, width_of
from .flat_maps import are_short_lines, as_lines, is_line_of_lines, long_lines
from .gathered_rows import rows_of
from .polyphase import Phases, compact, halved, overlapping, spelled, written_out
from .row_ends import ended, is_wide
from .short_rows import rows_written_out


def stages_for(k: AnySize, exprs: Iterable[Expr], blocks: Sequence[int], scale: Scale, line: Sym | None,
               programs: int) -> int:
    """Returns the number of pipeline stages: pieces in flight at once, with a buffer in shared memory for each load.

    Triton lays out tiles of several axes in shared memory so that lanes wait for one bank, unless a thread reads
    several contiguous elements of a line: such tiles are loaded to registers (one stage). So are all tiles if the
    programs of a processor together have enough bytes in flight even when each waits for its own loads.
    """
    reads = {e for e in walk(*exprs) if e.op == "load"}
    # For a size known only at run time, the compiler only knows whether it is a multiple of 16.
    sizes = {s: as_index(n if n % BLOCKS.access_most == 0 else 1) for s, n in k.typical}
    wide = line is not None and all(is_line(e.attr[1][0].subs(sizes), line, BLOCKS.access) for e in reads
                                    if line in e.symbols())
    if len(blocks) > 1 and not wide:
        return 1
    piece = sum(e.dtype.itemsize * math.prod(blocks) for e in reads)
    if piece * min(programs // BLOCKS.processors, BLOCKS.resident) >= BLOCKS.under_way:
        return max(1, scale.staged(1))
    return min(scale.staged(BLOCKS.stages), 1 + BLOCKS.shared_bytes // piece) if piece else 1


Carries = dict[str, list[str]]  # the values that a loop carries for each reduction, by the reduction's first name


class LoopBlocks(StageWriter[Carries], BlockWriter):
    def __init__(self, k: LoopKernel, scale: Scale = UNSCALED) -> None:
        self.scale = scale
        lanes, self.guards = shared_lanes(k)
        self.shares = lanes is not k
        self.k = self.formed(lanes)
        # Phases guard their stores themselves, and lanes that are not an axis of the tile share nothing.
        if self.guards and not self.guards.keys() <= self.map_tile().keys():
            self.guards, self.shares, self.k = {}, False, self.formed(k)
        k = self.k
        exprs = k.everything()
        # A segment covers only some points of its axis: the number of points is not the product of all sizes.
        points = k.outer if k.bounds is not None else (*k.outer, *k.inner)
        super().__init__(k.params, k.sizes, width_of(k, exprs, k.stores, k.outer, points))
        self.sites = sites_of(k)
        self.address = dict(k.stores)
        self.gathered = k.vector if self.rows else None
        self.inner = volume(k.inner)
        self.line_axis: int | None = None  # the axis of lines, if a row has several and its pieces are tiles of lines
        self.line_parts = "1"  # the number of parts of a line, each as long as the tile's axis
        self.programs = BLOCKS.enough_programs
        self.end: Index | None = None  # the end of the row, if it is not its length
        self.segment = ("", "", "")  # a segment's start, its length, and the length of the longest one
        self.state_dtypes = k.dtype_of()

    def formed(self, k: LoopKernel) -> LoopKernel:
        """Returns the kernel with gathered rows or written-out phases, where it has any; sets `rows` and `phases`."""
        self.rows = rows_of(k)
        k = self.rows.kernel if self.rows else k
        self.phases = rows_written_out(k) if k.inner else None
        if self.phases is None:
            k = side_by_side(k) if k.inner else spelled(k)
            self.phases = written_out(k)
            if self.phases and are_short_lines(self.phases.kernel) and is_line_of_lines(k):
                self.phases = None
        self.apart = self.phases is not None and not self.phases.rows  # few points for each thread
        k = self.phases.kernel if self.phases else k
        if k.tile is not None and not self.phases:
            k = long_lines(k)
        self.points = points_of(k) if self.phases and not self.phases.neighbours else 1
        if k.inner or k.tile is not None or self.rows or self.apart or self.shares:
            return k
        k = as_lines(k, BLOCKS.threads * per_thread(k.everything()))
        self.phases = replace(self.phases, kernel=k) if self.phases else None
        return k

    def render(self) -> PartDraft:
        k = self.k
        if not k.inner:
            blocks = self.map_tile()
            grid = self.tile(k.outer, blocks)
            for v, limit in self.guards.items():
                axis = self.axes[v]
                self.masks[axis] = self.value(limit)
            if self.phases:
                wide = not self.apart and per_thread(k.everything()) >= BLOCKS.access
                self.branched(self.all_inside() if wide else None, k.outer, self.full(),
                              partial(self.elements_together, self.phases))
            else:
                self.branched(self.all_inside(), k.outer, self.full(), self.stages)
            if self.rows:
                return PartDraft(self, grid, self.rows.warps)
            warps = min(BLOCKS.threads // BLOCKS.warp, self.elements() // BLOCKS.map_warp)
            if self.apart:
                warps = self.elements() // (BLOCKS.warp * self.points)
            return PartDraft(self, grid, max(1, warps))
        length, whole = self.row_length()
        blocks = spans(k, k.outer, self.rows_side_by_side(length))
        self.programs = programs_of(k, k.outer, blocks)
        if not blocks:
            self.k, self.end = ended(k)
        # Programs that share cache lines without having them in one tile run at the same time.
        across = [v for v in k.outer if v not in blocks and any(at.coefficient(v) is ONE for _, at in k.accesses())]
        grid = self.tile([*(v for v in k.outer if v not in across), *across], blocks, length)
        if k.bounds is not None:
            self.open_segment()
            self.all_stages()
            warps = min(BLOCKS.segment_warps, self.elements() // length // BLOCKS.segment_warp)
            return PartDraft(self, grid, max(1, warps))
        if whole:
            self.whole_row()
        else:
            self.all_stages()
        values = sum(k.vector in at.symbols() and not at.symbols().isdisjoint(k.inner)
                     and not at.symbols().isdisjoint(k.outer) for _, at in dict.fromkeys(k.accesses()))
        if self.line_axis is not None and k.is_crossed():
            values *= 2  # each is held twice, in the order of its memory and in that of the tile
        if whole and k.vector in k.outer and (k.scratch or k.reads_again()):
            return PartDraft(self, grid, warps_of_columns(k, self.elements()))
        warps = warps_for(self.elements(), self.programs, values)
        if values == 1 and k.vector in k.outer and not whole:  # columns of wide elements: fewer of them for each thread
            read = max((p.dtype.itemsize for p in k.params if not p.written), default=1)
            warps = max(warps, min(BLOCKS.most_warps, self.elements() * read // (BLOCKS.warp * BLOCKS.column_read)))
        return PartDraft(self, grid, warps)

    # ---- the tile --------------------------------------------------------------------------------------

    def elements(self) -> int:
        return math.prod(self.blocks)

    def tile(self, vars: Sequence[Sym], blocks: dict[Sym, int], row: int | None = None) -> str:
        """Opens the tile. The variable that is contiguous in memory is its last axis: where Triton cannot tell, it puts
        lanes along that one."""
        self.blocks = list(blocks.values())
        if row:
            self.row = 0 if self.k.vector in self.k.outer and self.k.bounds is None else len(blocks)
            self.blocks.insert(self.row, row)
            if (line := self.line_length(row)) is not None:
                self.blocks[self.row:self.row + 1] = [row // line, line]
                self.line_axis = self.row + 1
        return self.open_tile(vars, blocks)

    def line_length(self, piece: int) -> int | None:
        """Returns the lanes along a line of a row that is processed in pieces, or None if lines would leave too many
        lanes idle. With lines, only their numbers are divided to find their places, not the position of each element.
        """
        k = self.k
        if k.form.name != "rows in pieces" or k.vector is not k.inner[-1] or len(k.inner) < 2:
            return None
        size = k.about(k.inner[-1].size, piece)
        lanes = min(piece, power(size))
        if k.is_crossed():  # tiles are narrow enough to cover memory sectors across lines, too
            across = k.about(volume(k.inner[:-1]), BLOCKS.transpose_side)
            lanes = min(lanes, max(BLOCKS.warp, piece // min(BLOCKS.transpose_side, power(across))))
        while lanes > BLOCKS.warp and -(-size // lanes) * lanes * 100 > size * BLOCKS.lanes:
            lanes //= 2
        return lanes if lanes >= BLOCKS.warp else None

    def row_axes(self) -> frozenset[int]:
        """The axes that are reduced."""
        return frozenset(a for a in (self.row, self.line_axis) if a is not None)

    def map_tile(self) -> dict[Sym, int]:
        k = self.k
        if self.rows:
            return self.rows.blocks
        if k.tile is not None and k.vector is not None:
            return self.transposed(k.tile, k.vector)
        exprs = k.everything()
        across = crossed(k) if self.apart and self.points > 1 else None
        if across is not None:
            return self.transposed(across, k.outer[-1])
        windows = BLOCKS.neighbour_threads if self.phases and self.phases.neighbours else BLOCKS.window_threads
        each = per_thread(exprs) // (2 if self.reads_apart() else 1)
        room = self.scale.sized(windows * self.points if self.apart else BLOCKS.threads * max(1, each))
        near = overlapping(exprs, k.outer) if self.apart else []
        return compact(k.outer, near, room) if len(near) > 1 else spans(k, k.outer, room)

    def reads_apart(self) -> bool:
        """Whether some read has each element in a memory sector of its own: then adjacent threads should read adjacent
        elements, so that a warp's accesses are to few lines."""
        last = self.k.outer[-1] if self.k.outer else None
        reads = loads(*self.k.everything()) if last is not None else []
        steps = [(e.attr[1][0].coefficient(last), e.dtype.itemsize) for e in reads]
        return any(c is not None and c.is_const and abs(c.const) * size >= BLOCKS.sector for c, size in steps)

    def transposed(self, *pair: Sym) -> dict[Sym, int]:
        """Square tiles: smaller ones where there are few tiles, where a point has several results, and where registers
        could not hold what is read. Where some of it is the same along a third variable, small tiles lie on top of one
        another."""
        k, few = self.k, BLOCKS.transpose_few
        reads = [e for e in set(loads(*k.everything())) if {*pair} <= e.symbols()]
        deep = [v for v in k.outer if v not in pair and 0 < sum(v in e.symbols() for e in reads) < len(reads)]
        layers = {v: min(BLOCKS.layers, power(k.about(v.size, BLOCKS.layers))) for v in deep[-1:]}
        shapes = [(few, layers)] if layers and not self.apart else [] if self.apart else [(BLOCKS.transpose_side, {})]
        for side, above in [*shapes, (few, dict[Sym, int]())]:
            blocks = {v: above.get(v) or min(side, power(k.about(v.size, side)))
                      for v in k.outer if v in (*pair, *above)}
            if self.apart:  # what a point writes is a tile by itself
                blocks[pair[0]] = max(1, blocks[pair[0]] // 2)
                return self.stretched(blocks, pair[-1])
            for v in pair:  # the other one may be short
                most = BLOCKS.tile * blocks[v] // math.prod(blocks[w] for w in pair)
                blocks[v] = max(blocks[v], min(most, power(k.about(v.size, most))))
            read = sum(e.dtype.itemsize * math.prod(b for v, b in blocks.items() if v in e.symbols()) for e in reads)
            if programs_of(k, k.outer, blocks) >= BLOCKS.enough_tiles \
                    and read <= BLOCKS.threads * BLOCKS.transposed_bytes:
                break
        return self.stretched(blocks, pair[-1])

    def stretched(self, blocks: dict[Sym, int], v: Sym) -> dict[Sym, int]:
        """The tile with as many elements as the scale asks for: more along one variable, or fewer along the others."""
        elements = math.prod(blocks.values())
        more, less = self.scale.sized(elements) // elements, elements // self.scale.sized(elements)
        return {w: b * max(more, 1) if w is v else max(1, b // max(less, 1)) for w, b in blocks.items()}

    def row_length(self) -> tuple[int, bool]:
        """Returns the elements of the reduced axis in one tile, and whether that is the whole row."""
        k = self.k
        if k.form.name == "segments":
            parts = max(len(i.names) for i in reductions_of(k.items))
            return max(2, BLOCKS.segment_items // parts), False
        if k.form.name == "whole rows":
            return power(self.inner.const), True
        piece = self.scale.sized(BLOCKS.piece // k.form.width)
        if k.vector in k.outer and k.about(volume(k.outer), BLOCKS.processors) <= BLOCKS.columns:
            piece *= BLOCKS.columns // k.form.width  # few programs have a processor each, and more in flight
        return min(piece, power(k.about(self.inner, piece))), False

    def rows_side_by_side(self, length: int) -> int:
        if self.k.bounds is not None:
            return self.scale.sized(BLOCKS.segment_elements)
        rows = self.scale.sized(BLOCKS.tile) // length
        return max(self.k.form.width, rows)

    def all_inside(self) -> str | None:
        """Returns the condition that the whole tile is inside, if accesses are wider then (contiguous and aligned);
        else None."""
        k = self.k
        if not self.masks or self.rows or k.tile is not None:
            return None
        last = k.outer[-1]
        if last.size.is_const and last.size.const % BLOCKS.access_most == 0 and not self.guards:
            return None
        accessed = [a for e in walk(*k.everything()) if e.op == "load" for a in e.attr[1]] + [a for _, a in k.stores]
        if not any(is_line(a, last, BLOCKS.access) for a in accessed):
            return None
        ends: dict[Sym, Index] = {}
        for v, axis in self.axes.items():
            end = Sym(f"{v.name}e", v.size)
            self.line(f"{self.sym(end)} = {self.places[v]} * {self.blocks[axis]} + {self.blocks[axis] - 1}")
            ends[v] = as_index(end)
        holds = [self.value(limit.subs(ends)) for limit in self.guards.values()]
        return " and ".join(holds or [f"{self.index(end)} < {self.index(v.size)}" for v, end in ends.items()
                                      if self.axes[v] in self.masks])

    # ---- stages ----------------------------------------------------------------------------------------

    def all_stages(self) -> None:
        for items in self.k.stages:
            self.stage(items)

    def stages(self) -> list[str]:
        """Writes all stages over one tile that holds the whole row, so that each reduction is complete immediately."""
        for items in self.k.stages:
            self.body(items, {})
        return []

    def outer_axes(self) -> frozenset[int]:
        return self.full() - self.row_axes()

    def map_item(self, item: Item) -> None:
        text = self.keep_value(item.names[0], item.exprs[0])
        if item.names[0] in self.address:
            self.keep(item.names[0], item.level, text)

    def take(self, i: Item, states: Carries) -> None:
        """Reduces the tile: accumulates it lane by lane, or finishes the reduction if the tile is the whole row."""
        assert self.row is not None
        values = self.operands(i.joins, i.exprs, self.row_axes())
        if not states:
            self.finish_item(i, self.reduced(i.joins, values, self.row))
            return
        if self.k.bounds is not None:  # in the order of the items, because the first of equal items may be the result
            values = self.reduced(i.joins, values, self.row)
        self.assign(states[i.names[0]], self.combined(i.joins, states[i.names[0]], values))

    def finish(self, reductions: Sequence[Item], states: Carries) -> None:
        """Combines the lanes; variables along the reduced axis go out of scope."""
        for axis in self.row_axes():
            self.masks.pop(axis, None)
        for v in self.k.inner:
            self.axes.pop(v, None)
        for i in reductions:
            self.finish_item(i, self.together(i, states))

    def together(self, i: Item, states: Carries) -> list[str]:
        """Combines the accumulated values across lanes, once."""
        carried = states[i.names[0]]
        return carried if self.k.bounds is not None else self.reduced(i.joins, carried, *self.row_axes())

    def finish_item(self, i: Item, values: Sequence[str]) -> None:
        for name, text in zip(i.names, values, strict=True):
            self.local_axes[name] = self.outer_axes()
            self.become(name, text)

    def become(self, name: str, text: str) -> None:
        self.scopes[-1].locals[name] = text
        if name in self.address:
            local = Expr("local", self.state_dtypes[name], (), name)
            self.keep(name, "outer", self.value(cast(local, self.dtypes[name])))

    def keep(self, name: str, level: str, text: str) -> None:
        axes, address = self.full() if level == "full" else self.outer_axes(), self.address[name]
        axes = axes - (self.row_axes() - self.index_axes(address))
        self.store(name, address, text, axes)

    def elements_together(self, p: Phases) -> list[str]:
        """Writes all loads, then what is computed from them; stores come last, since loads are not moved past them."""
        everything = list(walk(*self.k.everything()))
        padded = {read for e in everything if (read := padded_read(e)) is not None}
        for e in everything:
            read = e if e.op == "load" and e not in padded else padded_read(e)
            if read is not None and not any(x.op in ("load", "local") for x in walk(read) if x is not read):
                self.value(e)
        for i in self.k.items:
            self.keep_value(i.names[0], i.exprs[0])
        full = self.full()
        for names in p.joined:
            texts = [self.scopes[-1].locals[n] for n in names]
            place = self.pointer(p.buffers[names[0]], self.address[names[0]], full)
            holds = self.inside(full, *(self.value(p.holds[n]) for n in names if n in p.holds))
            if len(names) > 1:
                each = ", ".join([":"] * len(self.blocks) + ["None"])
                step = f"tl.arange(0, {len(names)})[{', '.join(['None'] * len(self.blocks) + [':'])}]"
                place, holds = f"({place})[{each}] + {step}", f"({holds})[{each}]" if holds else ""
                texts = [self.interleaved([self.spread(t, full) for t in texts])]
            self.line(f"tl.store({place}, {texts[0]}{f', {holds}' if holds else ''})")
        return []

    def interleaved(self, texts: Sequence[str]) -> str:
        """Interleaves two or four blocks along one more axis."""
        if len(texts) == 2:
            return f"tl.join({texts[0]}, {texts[1]})"
        shape = ", ".join(map(str, (*self.blocks, len(texts))))
        return f"tl.reshape(tl.join({self.interleaved(texts[0::2])}, {self.interleaved(texts[1::2])}), ({shape}))"

    def emit(self, e: Expr) -> tuple[int, str]:
        if e.op == "local" and self.local(e.attr) is None and e.attr in self.address:
            # Stored in an earlier stage: read it again.
            return self.emit(Expr("load", e.dtype, (), (e.attr, (self.address[e.attr],))))
        return super().emit(e)

    # ---- rows ------------------------------------------------------------------------------------------

    def open_row(self, first: str, end: str) -> str:
        """Defines the lanes of the row from `first` on, masked by `end` if given; returns the position of each."""
        assert self.row is not None
        flat = self.fresh("q")
        self.line(f"{flat} = {first + ' + ' if first else ''}{self.arange(self.row)}")
        self.axes.update(dict.fromkeys(self.k.inner, self.row))
        if end:
            self.masks[self.row] = self.fresh("m")
            self.line(f"{self.masks[self.row]} = {flat} < {end}")
        return flat

    def whole_row(self) -> None:
        assert self.row is not None
        block, count = self.blocks[self.row], self.inner if self.end is None else self.end
        exact = count.is_const and count.const == block
        end = "" if exact else self.index(count)
        self.decompose(self.open_row("", end), self.k.inner)
        inside = f"{end} == {block}" if self.end is not None and self.inner.const == block and is_wide(self.k) else None
        self.branched(inside, self.k.inner, (self.row,), self.stages)

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> Carries:
        if self.k.bounds is None and items is not self.k.stages[0]:
            self.line("tl.debug_barrier()")  # other threads now read what an earlier pass stored
        axes = self.full() if self.k.bounds is None else self.outer_axes()
        return {i.names[0]: self.start(i.joins, axes) for i in reductions}

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: Carries) -> None:
        (self.in_segment if self.k.bounds is not None else self.in_pieces)(items, states)

    def in_pieces(self, items: Sequence[Item], states: Carries) -> None:
        assert self.row is not None
        k, length = self.k, self.blocks[self.row]
        count, lanes = self.inner if self.end is None else self.end, 0
        if self.line_axis is not None:
            lanes = self.blocks[self.line_axis]
            count = volume(k.inner[:-1]) * ceildiv(k.inner[-1].size, lanes)
        exact, end = count.is_const and count.const % length == 0, self.index(count)
        first = Sym(f"base{k.stages.index(tuple(items))}", count)
        ahead = Pipelined(stages_for(k, exprs_of(items), self.blocks, self.scale, k.vector, self.programs))

        def piece(mask: str) -> None:
            at = self.open_row(self.sym(first), mask)
            self.decompose(self.open_line(at, lanes) if lanes else at, k.inner[:-1] if lanes else k.inner)
            self.body(items, states)

        # All pieces but the last are whole. They get code of their own without masks where accesses are wider then.
        peeled = not exact and not lanes and is_wide(k) and self.blocks == [length]
        if peeled:
            end = self.fresh("whole")
            self.line(f"{end} = {self.index(count)} // {length} * {length}")
        with self.loop(first, "0", end, str(length), how=ahead) as s:
            s.vars.update(k.inner)
            piece("" if exact or peeled else end)
        if peeled:
            with self.scope(f"if {end} < {self.index(count)}:", k.inner, footer=""):
                self.line(f"{self.sym(first)} = {end}")
                piece(self.index(count))
                self.masks.pop(self.row)

    def open_line(self, at: str, lanes: int) -> str:
        """Defines the lanes of a line, or of a part of one (`at` counts these); returns the position of each line among
        all lines."""
        assert self.line_axis is not None
        v = self.k.inner[-1]
        self.axes[v] = self.line_axis
        parts = self.line_parts = count_text(v.size, lanes, self.index)
        first = ""
        if parts != "1":
            before, at = at, self.fresh("q")
            if self.k.is_crossed():  # neighbouring lines share loads: they come first
                others = self.index(volume(self.k.inner[:-1]))
                first = f"({before} // {others}) * {lanes} + "
                self.line(f"{at} = {before} % {others}")
            else:
                first = f"({before} % {parts}) * {lanes} + "
                self.line(f"{at} = {before} // {parts}")
        self.line(f"{self.sym(v)} = {first}{self.arange(self.line_axis)}")
        if not (v.size.is_const and v.size.const % lanes == 0):
            self.masks[self.line_axis] = self.fresh("m")
            self.line(f"{self.masks[self.line_axis]} = {self.sym(v)} < {self.index(v.size)}")
        return at

    def open_segment(self) -> None:
        """Loads the segment of each outer point: its points are from lo to hi."""
        k = self.k
        assert k.bounds is not None
        lo, hi = (self.fresh("lo"), self.fresh("n"))
        axes = self.axes_of(*k.bounds)
        self.line(f"{lo} = {self.whole(self.value(k.bounds[0]))}")
        self.line(f"{hi} = {self.whole(self.value(k.bounds[1]))} - {lo}")
        most = hi
        if axes:
            holds = self.inside(axes)
            most = f"tl.max({f'tl.where({holds}, {hi}, 0)' if holds else hi})"
        self.segment = (lo, hi, most)

    def in_segment(self, items: Sequence[Item], states: Carries) -> None:
        k, (lo, hi, most) = self.k, self.segment
        step = Sym(self.fresh("step"), as_index(1))
        with self.loop(step, "0", most, str(self.blocks[-1])) as s:
            s.vars.update(k.inner)
            at = self.open_row(self.sym(step), hi)
            self.line(f"{self.sym(k.inner[0])} = {lo} + {at}")
            self.body(items, states)

    def whole(self, text: str) -> str:
        return text if self.width is WIDE else f"tl.cast({text}, {self.width.kind})"

    def axes_of(self, *exprs: Expr) -> frozenset[int]:
        axes = super().axes_of(*exprs)
        if self.k.bounds is not None and self.row in axes:  # where a lane is depends on the start of its segment
            tied = {self.axes[s] for b in self.k.bounds for s in b.symbols() if s in self.axes}
            axes = axes | tied
        if self.line_axis in axes and self.line_parts != "1":  # the part of a line differs from row to row
            axes = axes | self.row_axes()
        return axes


def side_by_side(k: LoopKernel) -> LoopKernel:
    """Merges the columns of a reduction into one variable if a block of the last one would leave too many lanes
    idle."""
    if k.vector not in k.outer or k.bounds is not None or len(k.outer) < 2:
        return k
    blocks = spans(k, k.outer, k.form.width)
    sizes = {v: k.about(v.size, block) for v, block in blocks.items()}
    lanes = math.prod(-(-sizes[v] // block) * block for v, block in blocks.items())
    if lanes * 100 <= math.prod(sizes.values()) * BLOCKS.lanes:
        return k
    joint = Sym("".join(v.name for v in k.outer), volume(k.outer))
    places = unflat(as_index(joint), [v.size for v in k.outer])
    return replace(k.rewritten(lambda x: x, dict(zip(k.outer, places, strict=True))), outer=(joint,), vector=joint)


def per_thread(exprs: Iterable[Expr]) -> int:
    """Elements for each thread: fewer, the more each of them reads, so that all values fit in registers."""
    reads = 0.0
    for e in walk(*exprs):
        if e.op == "load":
            reads += bool(e.symbols()) * (0.5 if e.dtype.itemsize <= 2 else 1)
        elif e.op == "fold":
            steps = 1
            for _, lo, hi in e.attr.loops:
                steps *= max(hi.const - lo.const, 1) if lo.is_const and hi.is_const else 1
            reads += (steps - 1) * sum(x.op == "load" for x in walk(*e.args[len(e.attr.carries):])) \
                if e.attr.which == 0 else 0
    if not reads:
        return BLOCKS.thread_draws
    return next((n for n in (8, 4, 2) if n * reads <= BLOCKS.held_reads), 1)


def crossed(k: LoopKernel) -> Sym | None:
    """Returns a variable along which all loads are contiguous while the last variable is strided, or None."""
    *others, last = k.outer
    reads = [e.attr[1][0] for e in walk(*k.everything()) if e.op == "load" and last in e.attr[1][0].symbols()]
    known = [v for v in others if reads and all(a.coefficient(v) is ONE and a.coefficient(last) not in (None, ONE)
                                                for a in reads) and k.about(v.size, BLOCKS.access_most) > 1]
    return known[-1] if known else None


def points_of(k: LoopKernel) -> int:
    """Points for each thread, each of which computes several elements."""
    values = len(k.stores) + sum(e.op == "load" for e in walk(*k.everything()))
    return next((n for n in (4, 2) if n * values <= BLOCKS.held_reads), 1)


def shared_lanes(k: LoopKernel) -> tuple[LoopKernel, dict[Sym, Expr]]:
    """Splits a variable of which `v % 4` is used into v // 4 and v % 4, two axes of the tile, so that what depends on v
    // 4 alone is computed once for four lanes. Also returns the condition for being inside where its size is no
    multiple."""
    if k.inner or k.tile is not None:
        return k, {}
    for e in walk(*k.everything()):
        for a in (a for i in e.own_indices() for a in i.atoms()):
            if not isinstance(a, Op) or a.kind != "mod" or not a.b.is_const:
                continue
            v, n = a.a.atom(), a.b.const
            if isinstance(v, Sym) and v in k.outer and n & (n - 1) == 0 and n <= BLOCKS.shared_lanes \
                    and v.size.is_const and v.size.const > n:
                new, low, limit = halved(k, v, n)
                new = replace(new, vector=low if k.vector is v else k.vector)
                return new, {} if limit is None else {low: limit}
    return k, {}


def warps_for(elements: int, programs: int = BLOCKS.enough_programs, values: int = 1) -> int:
    """Warps for a program that reduces so many elements, with so many programs in all. `values`: the loads and stores
    for each element."""
    each = BLOCKS.thread if programs >= BLOCKS.enough_programs else BLOCKS.thread_few
    while each > BLOCKS.access and each * values > BLOCKS.held_values:
        each //= 2
    return max(1, min(BLOCKS.most_warps, elements // (BLOCKS.warp * each)))


def warps_of_columns(k: LoopKernel, elements: int) -> int:
    """Warps for a program that holds columns: the fewer warps share a column, the fewer results they exchange."""
    moved = sum(p.dtype.itemsize for p in k.params for name, at in dict.fromkeys(k.accesses())
                if name == p.name and not at.symbols().isdisjoint(k.inner))
    each = max(BLOCKS.access, min(BLOCKS.column_thread, BLOCKS.column_bytes // max(moved, 1)))
    return max(1, min(BLOCKS.most_warps, elements // (BLOCKS.warp * (1 << (each.bit_length() - 1)))))


def programs_of(k: AnySize, vars: Iterable[Sym], blocks: dict[Sym, int]) -> int:
    """The approximate number of programs."""
    return math.prod(-(-k.about(v.size, BLOCKS.enough_programs * blocks.get(v, 1)) // blocks.get(v, 1)) for v in vars)


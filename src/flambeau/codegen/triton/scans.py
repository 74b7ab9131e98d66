"""Scans in Triton: each program scans a tile, and passes its carry to the next.

If there are enough programs without cutting the axis, one program walks all pieces of its rows. Otherwise each piece
has a program of its own, in a single pass over memory: a piece publishes its own total immediately, looks back over the
totals and prefixes of the pieces before it, and publishes its prefix ("decoupled look-back"). Programs take their
number from a counter, so that the programs it waits for are already running. Where a program finds the first prefix
depends on the speed of the others, and so does rounding; single rows, and `ordered` scans, look for it at fixed places.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import cast, cost_of, loads
from flambeau.ir.index import ONE, Index, Sym, as_index
from flambeau.ir.lines import is_line
from flambeau.ir.nodes import Combine, Level
from flambeau.ir.program import ScanKernel, sites_of
from flambeau.ir.tuning import BLOCKS, Scale

from ..dialect import Pipelined
from .blocks import BlockWriter, PartDraft, count_text, power, spans, width_of
from .loops import stages_for

COMMUTATIVE = frozenset(("sum", "prod", "min", "max", "logsumexp"))


def in_columns(k: ScanKernel) -> ScanKernel:
    """Merges the last kept variables if a tile of columns would leave too many lanes idle."""
    blocks = spans(k, k.outer, BLOCKS.scan_columns)
    sizes = {v: k.about(v.size, block) for v, block in blocks.items()}
    lanes = math.prod(-(-sizes[v] // block) * block for v, block in blocks.items())
    if len(blocks) < 2 or lanes * 100 <= math.prod(sizes.values()) * BLOCKS.lanes:
        return k
    a, b = k.outer[-2:]
    both = Sym(f"{a.name}{b.name}", a.size * b.size)
    mapping = {a: as_index(both) // b.size, b: as_index(both) % b.size}
    return in_columns(replace(k, outer=(*k.outer[:-2], both), vector=both if k.vector in (a, b) else k.vector,
                              exprs=tuple(e.subs(mapping) for e in k.exprs),
                              stores=tuple((name, at.subs(mapping)) for name, at in k.stores)))


class ScanBlocks(BlockWriter):
    def __init__(self, k: ScanKernel, scale: Scale) -> None:
        self.scale = scale
        k = in_columns(k) if k.form.name != "rows" else k
        super().__init__(k.params, k.sizes, width_of(k, k.exprs, k.stores, k.outer, (*k.outer, k.axis)))
        self.k = k
        self.sites = sites_of(k)
        self.addresses = dict(k.stores)
        self.inside_text: str | None = None  # the condition that the current piece is whole
        self.length: Index = k.axis.size

    def render(self) -> PartDraft:
        k = self.k
        rows = k.form.name == "rows"
        outer = list(k.outer)
        if not rows:  # the contiguous variable goes last, so that it becomes the tile's axis
            side = next((v for v in outer if any(a.coefficient(v) is ONE for a in self.addresses.values())), outer[-1])
            outer.remove(side)
            outer.append(side)
        self.apart = self.is_apart(rows)
        row = BLOCKS.scan_piece if self.apart and rows else BLOCKS.scan_row
        most = self.scale.sized(row if rows else BLOCKS.scan_piece // BLOCKS.scan_columns)
        length = k.about(self.length, most + 1)
        if not rows and most < length <= 4 * most and self.programs(outer, {outer[-1]: BLOCKS.scan_columns}) \
                < BLOCKS.enough_tiles:
            most *= 2  # fewer columns for each program, and fewer pieces one after the other
        piece = min(max(2, power(length)), most)
        blocks = spans(k, outer, max(1, self.scale.sized(BLOCKS.scan_piece) // piece))
        cut = not self.length.is_const or length > piece
        self.expensive = cost_of(k.combine.result) > BLOCKS.scan_combine
        enough = BLOCKS.scan_programs * (BLOCKS.scan_expensive if self.expensive else 1)
        look_back = length > piece and self.programs(outer, blocks) < enough
        if look_back and rows:
            piece = min(piece, self.scale.sized(BLOCKS.scan_alone >> (len(k.combine.left) - 1).bit_length()))
            blocks = spans(k, outer, 1)
        elif look_back and not self.expensive:
            # Pieces wait for one another: limit the number of pieces in a row.
            piece = min(BLOCKS.scan_longest, max(piece, power(-(-length // BLOCKS.scan_in_a_row))))
        elif self.expensive and not look_back and not rows and length >= piece == most:
            piece, cut = piece // 2, True  # the more lanes a scan joins, the more often it combines
        self.blocks = [*blocks.values(), piece]
        self.row: int = len(blocks)
        return self.looking_back(outer, blocks) if look_back else self.walking(outer, blocks, cut)

    def warps(self, elements: int) -> int:
        """Warps for a tile: a thread scans as many elements as its registers hold, which costs least."""
        k = self.k
        columns = k.form.name != "rows"
        if self.apart or columns and len(k.combine.dtypes) > 1:  # more threads have more accesses in flight
            each = BLOCKS.scan_thread_column if columns else BLOCKS.scan_thread_apart
            return max(1, min(BLOCKS.most_warps, elements // (BLOCKS.warp * each)))
        each = BLOCKS.scan_thread // power(sum(-(-d.itemsize // 4) for d in k.combine.dtypes))
        return max(1, min(BLOCKS.most_warps, elements // (BLOCKS.warp * each)))

    def is_apart(self, rows: bool) -> bool:
        """Whether each element needs an access of its own, so that many must be in flight: strides are unaligned, or
        rows that are too long to be held begin at unaligned addresses."""
        k, sizes = self.k, {s: as_index(n) for s, n in self.k.typical}
        steps = [a.coefficient(k.axis) for a in self.addresses.values()]
        if any(c is not ONE and c is not None and c.is_const and c.const % BLOCKS.access for c in steps):
            return True
        read = [a for e in loads(*k.exprs) for a in e.attr[1] if k.axis in a.symbols()]
        return rows and k.about(self.length, 0) > BLOCKS.scan_alone and not all(
            is_line(a.subs(sizes), k.axis, BLOCKS.access) for a in (*read, *self.addresses.values()))

    def programs(self, outer: list[Sym], blocks: dict[Sym, int]) -> int:
        """The number of programs if the axis is not cut; run-time sizes count as large."""
        n = 1
        for v in outer:
            n *= -(-self.k.about(v.size, BLOCKS.scan_programs * blocks.get(v, 1)) // blocks.get(v, 1))
        return n

    # ---- one piece -------------------------------------------------------------------------------------

    def piece(self, first: str) -> list[str]:
        """Scans the piece that starts at `first`, without its carry; returns the names of the results."""
        k = self.k
        lane = self.arange(self.row)
        self.axes[k.axis] = self.row
        self.line(f"lane = {lane}")
        self.line(f"{self.sym(k.axis)} = {first + ' + ' if first else ''}lane")
        if not (self.length.is_const and self.length.const % self.blocks[self.row] == 0):
            self.masks[self.row] = self.fresh("m")
            self.line(f"{self.masks[self.row]} = {self.sym(k.axis)} < {self.index(self.length)}")
        self.inside_text = self.all_inside(first)
        values = self.branched(self.inside_text, (k.axis,), (self.row,),
                               lambda: self.operands(k.combine, k.exprs, (self.row,)))
        options = f", reverse={k.reverse}"
        if k.combine.level is None:
            return self.over("tl.associative_scan", k.combine, values, self.row, options)
        return self.on_one_level(k.combine, k.combine.level, values, options)

    def on_one_level(self, c: Combine, level: Level, values: list[str], options: str) -> list[str]:
        """Scans a tile as a plain sum if all its elements are of about one magnitude; a join costs several times an
        addition."""
        keep = ", keep_dims=True" if len(self.blocks) > 1 else ""
        given = dict(zip(c.left, values, strict=True))
        self.line(f"top = tl.max({self.applied(level.size, given)}, {self.row}{keep})")
        given[level.top] = "top"
        self.line(f"level = tl.min(tl.where({self.applied(level.holds, given)}, 1, 0)) > 0")
        names = [self.fresh("r") for _ in values]
        with self.scope("if level:", footer=""):
            self.line(f"total = tl.associative_scan({self.applied(level.scaled, given)}, {self.row}, fl.plus{options})")
            given = {level.total: "total", level.top: "top"}
            self.assign(names, (self.spread(self.applied(e, given), self.full()) for e in level.result))
        with self.scope("else:", footer=""):
            self.assign(names, self.over("tl.associative_scan", c, values, self.row, options))
        return names

    def put_after(self, before: list[str], scanned: list[str]) -> None:
        """Combines the scanned piece with its carry and stores it."""
        c, level = self.k.combine, self.k.combine.level
        if level is None:
            self.put(self.combined(c, before, scanned))
            return
        with self.scope("if level:", footer=""):  # the carry is brought to that magnitude once, for all elements
            own = {left: "top" if e is level.top else text
                   for left, e, text in zip(c.left, level.result, scanned, strict=True)}
            earlier = dict(zip(c.left, before, strict=True))
            both = self.fresh("top")
            self.line(f"{both} = tl.maximum({self.applied(level.size, earlier)}, top)")
            parts = [self.applied(level.scaled, {**given, level.top: both}) for given in (own, earlier)]
            total = self.fresh("total")
            self.line(f"{total} = {' + '.join(parts)}")
            self.put([self.applied(e, {level.total: total, level.top: both}) for e in level.result])
        with self.scope("else:", footer=""):
            self.put(self.combined(c, before, scanned))

    def totals(self, scanned: list[str], first: str) -> list[str]:
        """Returns the last value of the piece, in the order of the scan. It is extracted instead of reduced again: a
        reduction may change the order, which not every combine allows."""
        size = self.blocks[self.row]
        last = "0" if self.k.reverse else str(size - 1)
        if not self.k.reverse and self.row in self.masks:
            last = f"tl.minimum({self.index(self.length)} - {first or '0'}, {size}) - 1"
        at = self.fresh("at")
        self.line(f"{at} = lane == {last}")
        return self.picked(scanned, at, self.row)

    def picked(self, texts: list[str], at: str, axis: int) -> list[str]:
        """Extracts the values at one place, as a sum with zeros. Floats are summed as bits, since -0.0 is no sum of
        zeros."""
        keep = ", keep_dims=True" if len(self.blocks) > 1 else ""
        names = []
        for text, dtype in zip(texts, self.k.combine.dtypes, strict=True):
            here, back = (f"{text}.to(tl.int{8 * dtype.itemsize}, bitcast=True)", f".to({self.d.types[dtype]}, "
                          "bitcast=True)") if is_float(dtype) else (text, "")
            names.append(self.fresh("t"))
            self.line(f"{names[-1]} = tl.sum(tl.where({at}, {here}, 0), {axis}{keep}){back}")
        return names

    def all_inside(self, first: str) -> str | None:
        """Returns the condition that the whole piece is inside, if accesses are wider then; else None."""
        k = self.k
        even = self.length.is_const and self.length.const % BLOCKS.access_most == 0
        if not first or self.row not in self.masks or even:
            return None
        read = [a for e in loads(*k.exprs) for a in e.attr[1]]
        if not all(is_line(a, k.axis, BLOCKS.access) for a in (*read, *self.addresses.values())):
            return None
        return f"{first} + {self.blocks[self.row]} <= {self.index(self.length)}"

    def put(self, values: list[str]) -> None:
        self.branched(self.inside_text, (self.k.axis,), (self.row,), lambda: self.put_once(values))

    def put_once(self, values: list[str]) -> list[str]:
        given = dict(zip(self.k.combine.left, values, strict=True))
        for name, e in zip(self.k.names, self.k.finish, strict=True):
            if name in self.addresses:
                kept = self.applied(cast(e, self.dtypes[name]), given)  # may be narrower
                self.store(name, self.addresses[name], kept, self.full())
        return []

    def outside(self) -> frozenset[int]:
        """The axes other than the scanned one."""
        return frozenset(range(self.row))

    # ---- one program for a row ---------------------------------------------------------------------------

    def walking(self, outer: list[Sym], blocks: dict[Sym, int], cut: bool) -> PartDraft:
        grid = self.open_tile(outer, blocks)
        size = self.blocks[self.row]
        if not cut:
            self.put(self.piece(""))
        else:
            carry = self.start(self.k.combine, self.outside())
            step = Sym("step", self.length)
            count = count_text(self.length, size, self.index)
            line = self.k.axis if self.k.form.name == "rows" else outer[-1]
            ahead = stages_for(self.k, self.k.exprs, self.blocks, self.scale, line, 0)
            with self.loop(step, "0", count, how=Pipelined(ahead)) as s:
                s.vars.add(self.k.axis)
                self.line(f"first = {self.place(self.sym(step), count)} * {size}")
                scanned = self.piece("first")
                totals = self.totals(scanned, "first")
                self.put_after(carry, scanned)
                self.assign(carry, self.combined(self.k.combine, carry, totals))
        return PartDraft(self, grid, self.warps(math.prod(self.blocks)))

    def place(self, step: str, count: str) -> str:
        return f"({count} - 1 - {step})" if self.k.reverse else step

    # ---- a program for each piece ------------------------------------------------------------------------

    def looking_back(self, outer: list[Sym], blocks: dict[Sym, int]) -> PartDraft:
        """Writes the single-pass scan. Its workspace holds a counter, then the states of all pieces."""
        k, size = self.k, self.blocks[self.row]
        lanes = math.prod(blocks.values())
        sizes = [(v.size, blocks.get(v, 1)) for v in outer]
        self.line(f"strips = {' * '.join(count_text(n, b, self.index) for n, b in sizes) or '1'}")
        self.line(f"pieces = {count_text(self.length, size, self.index)}")
        self.line("counter = work.to(tl.pointer_type(tl.int32))")
        self.line('ticket = tl.atomic_add(counter, 1, sem="relaxed")')
        self.line("strip = ticket % strips")
        self.line("step = ticket // strips")
        self.open_tile(outer, blocks, "strip")
        self.line(f"first = {self.place('step', 'pieces')} * {size}")
        scanned = self.piece("first")
        totals = self.totals(scanned, "first")
        state = State(self, lanes)
        before = self.start(k.combine, self.outside())
        if k.ordered or lanes == 1:  # only the pieces of a single row wait for one another: they look at many at once
            self.look_in_groups(before, totals, state)
        else:
            with self.scope("if step > 0:", footer=""):
                state.publish(totals, 1)
            self.look_single(before, state)
            state.publish(self.combined(k.combine, before, totals), 2)
        self.put_after(before, scanned)
        strips = " * ".join(count_text(n, b, self.host) for n, b in sizes) or "1"
        total = f"{strips} * {count_text(self.length, size, self.host)}"
        return PartDraft(self, total, self.warps(size * lanes), f"32 + {total} * {8 * lanes * state.count}")

    def side(self) -> str:
        """The position of each row of the tile among the tile's rows."""
        out, step = [], 1
        for axis in range(self.row - 1, -1, -1):
            out.append(f"{self.arange(axis)} * {step}" if step > 1 else self.arange(axis))
            step *= self.blocks[axis]
        return " + ".join(out) or "0"

    def look_single(self, before: list[str], state: State) -> None:
        """Looks back one predecessor at a time: with many strips the machine is busy meanwhile."""
        self.line("back = step - 1")
        with self.scope("while back >= 0:", footer=""):
            state.poll("back", "")
            with self.scope("while flag == 0:", footer=""):
                state.poll("back", "")
            self.assign(before, self.combined(self.k.combine, state.values(), before))
            self.line("back = tl.where(flag == 2, -1, back - 1)")

    def look_in_groups(self, before: list[str], totals: list[str], state: State) -> None:
        """Looks back in groups that the numbers of the pieces determine: the last piece of a group publishes its
        prefix, the others only their totals. So a prefix is always combined from the same parts, whichever was ready
        first."""
        c, group = self.k.combine, BLOCKS.scan_window if state.lanes == 1 else BLOCKS.scan_group
        self.line(f"begin = step // {group} * {group}")
        with self.scope(f"if step - begin < {group - 1}:", footer=""):
            state.publish(totals, 1)
        if state.lanes == 1:
            self.line(f"near = begin - 1 + tl.arange(0, {BLOCKS.scan_window})")
            self.line("there = (near >= 0) & (near < step)")
            state.poll("near", "there")
            with self.scope("while tl.max(tl.where(there & (flag == 0), 1, 0)) > 0:", footer=""):
                state.poll("near", "there")
            values = []
            # The flags are known to be set by now, but Triton crashes on a loop whose results are not all used.
            for text, identity in zip(state.values(), self.identity(c), strict=True):
                values.append(self.fresh("p"))
                self.line(f"{values[-1]} = tl.where(there & (flag > 0), {text}, {identity})")
            self.assign(before, self.combined(c, self.joined(values), before))
        else:
            self.line("back = step - 1")
            with self.scope("while back >= tl.maximum(begin - 1, 0):", footer=""):
                state.poll("back", "")
                with self.scope("while flag == 0:", footer=""):
                    state.poll("back", "")
                self.assign(before, self.combined(c, state.values(), before))
                self.line("back = tl.where(flag > 0, back - 1, back)")
        with self.scope(f"if step - begin == {group - 1}:", footer=""):
            state.publish(self.combined(c, before, totals), 2)

    def joined(self, values: list[str]) -> list[str]:
        """Combines all values of a window in order: by a reduction if the order does not matter, else as the last of a
        scan."""
        c = self.k.combine
        if c.name in COMMUTATIVE:
            return self.reduced(c, values, 0)
        last = f"tl.arange(0, {BLOCKS.scan_window}) == {BLOCKS.scan_window - 1}"
        return self.picked(self.over("tl.associative_scan", c, values, 0), last, 0)


class State:
    """What a piece publishes: its total (flag 1), later its prefix (flag 2).

    Every 32 bits of it are stored in one word with their flag, so that both are written and read at once. A reader that
    finds different flags reads again. So no access has to wait for another.
    """

    def __init__(self, w: ScanBlocks, lanes: int) -> None:
        self.w, self.lanes, self.side = w, lanes, w.side()
        self.parts = [max(1, d.itemsize // 4) for d in w.k.combine.dtypes]
        self.count = sum(self.parts)
        self.words = [w.fresh("w") for _ in range(self.count)]
        w.line(f"states = (work + 16).to(tl.pointer_type(tl.uint64)) + (strip * pieces) * {lanes * self.count}")

    def publish(self, values: list[str], flag: int) -> None:
        n = 0
        for text, dtype, parts in zip(values, self.w.k.combine.dtypes, self.parts, strict=True):
            bits = f"{text}.to(tl.uint{max(32, 8 * dtype.itemsize)}, bitcast=True)" if dtype.itemsize >= 4 \
                else f"{text}.to(tl.uint32)"
            for part in range(parts):
                half = bits if parts == 1 else f"({bits} >> {32 * part}).to(tl.uint32)"
                word = f"{half}.to(tl.uint64) | (tl.full((), {flag}, tl.uint64) << 32)"
                # A single word is exchanged atomically, which overtakes all stores that are still in flight.
                self.w.line(f"tl.store({self.place('step', n)}, {word})" if self.lanes > 1 else
                            f"tl.atomic_xchg({self.place('step', n)}, {word}, sem=\"relaxed\")")
                n += 1

    def place(self, piece: str, n: int) -> str:
        return f"states + ({piece} * {self.count} + {n}) * {self.lanes} + {self.side}"

    def poll(self, piece: str, there: str) -> None:
        """Reads the words; `flag` is zero unless they all belong together."""
        for n, word in enumerate(self.words):
            self.w.line(f"{word} = tl.load({self.place(piece, n)}{', ' + there if there else ''}, volatile=True)")
        flags = [f"({word} >> 32)" for word in self.words]
        self.w.line(f"flag = {flags[0]}.to(tl.int32)")
        for other in flags[1:]:
            self.w.line(f"flag = tl.where({flags[0]} == {other}, flag, 0)")
        if self.lanes > 1:
            self.w.line("flag = tl.where(tl.min(flag) == tl.max(flag), tl.min(flag), 0)")

    def values(self) -> list[str]:
        out, words = [], iter(self.words)
        for dtype, parts in zip(self.w.k.combine.dtypes, self.parts, strict=True):
            bits = f"{next(words)}.to(tl.uint32)"
            if parts == 2:
                bits = f"({bits}.to(tl.uint64) | ({next(words)}.to(tl.uint32).to(tl.uint64) << 32))"
            kind = self.w.d.types[dtype]
            out.append(self.w.fresh("p"))
            self.w.line(f"{out[-1]} = {bits}.to({kind}{', bitcast=True' if dtype.itemsize >= 4 else ''})")
        return out

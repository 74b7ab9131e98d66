"""Scans in Triton: each program scans a tile; carries go from piece to piece.

Where there are programs enough without cutting the axis, one program walks all pieces of its rows. Otherwise each
piece has a program of its own, in a single pass over memory: a piece publishes its own total at once, looks back over
the totals and prefixes of those before it, and publishes its prefix ("decoupled look-back"). Programs take their
number from a counter, so that whoever a program waits for is already running.
"""

from __future__ import annotations

from flambeau.ir.expr import Expr, cast, rewrite
from flambeau.ir.index import ONE, Index, Sym
from flambeau.ir.program import ScanKernel

from .triton import BlockWriter, Draft, count_text, host_text, is_wide, power
from .triton_loops import spans

PIECE = 4096  # elements of a tile
ROW = 16384  # elements of a row that is scanned in one piece
COLUMNS = 32  # columns side by side where they are what is contiguous
PROGRAMS = 200  # enough to fill a GPU, where each has several pieces on their way
STAGES = 4
PER_THREAD = 16  # elements: what a thread scans by itself costs least
WINDOW = 128  # predecessors that are read at once
COMMUTATIVE = frozenset(("sum", "prod", "min", "max", "logsumexp"))


def write_scan(k: ScanKernel) -> list[Draft]:
    return [ScanBlocks(k).render()]


class ScanBlocks(BlockWriter):
    def __init__(self, k: ScanKernel) -> None:
        super().__init__(k.params, is_wide(k.exprs, [a for _, a in k.stores], (*k.outer, k.axis)))
        self.k = k
        self.addresses = dict(k.stores)
        assert k.axis.extent is not None
        self.length: Index = k.axis.extent

    def render(self) -> Draft:
        k = self.k
        rows = all(a.coefficient(k.axis) is ONE for a in self.addresses.values()) or not k.outer
        outer = list(k.outer)
        if not rows:  # what is contiguous goes last, so that it becomes the tile's axis
            side = next((v for v in outer if any(a.coefficient(v) is ONE for a in self.addresses.values())), outer[-1])
            outer.remove(side)
            outer.append(side)
        most = ROW if rows else PIECE // COLUMNS
        piece = min(power(self.length.const), most) if self.length.is_const else most
        blocks = spans(outer, max(1, PIECE // piece))
        cut = self.length.const > piece if self.length.is_const else True
        look_back = cut and self.programs(outer, blocks) < PROGRAMS
        if look_back and rows:
            piece = min(piece, 2 * PIECE)
            blocks = spans(outer, 1)
        self.blocks = [*blocks.values(), piece]
        self.row = len(blocks)
        return self.looking_back(outer, blocks) if look_back else self.walking(outer, blocks, cut)

    def programs(self, outer: list[Sym], blocks: dict[Sym, int]) -> int:
        """How many programs there are if the axis is not cut; sizes of the run count as large."""
        n = 1
        for v in outer:
            assert v.extent is not None
            n *= -(-v.extent.const // blocks.get(v, 1)) if v.extent.is_const else PROGRAMS
        return n

    # ---- one piece -------------------------------------------------------------------------------------

    def piece(self, first: str) -> list[str]:
        """The scan of the piece that starts at `first`, by itself."""
        k = self.k
        lane = self.arange(self.row)
        self.axes[k.axis] = self.row
        self.line(f"lane = {lane}")
        self.line(f"{self.sym(k.axis)} = {first + ' + ' if first else ''}lane")
        if not (self.length.is_const and self.length.const % self.blocks[self.row] == 0):
            self.masks[self.row] = self.fresh("m")
            self.line(f"{self.masks[self.row]} = {self.sym(k.axis)} < {self.index(self.length)}")
        full = frozenset(range(len(self.blocks)))
        values = []
        holds = self.inside([self.row])
        for e, identity in zip(k.exprs, self.identity(k.combine), strict=True):
            text = self.spread(self.value(e), full)
            values.append(self.fresh("v"))
            self.line(f"{values[-1]} = {f'tl.where({holds}, {text}, {identity})' if holds else text}")
        names = [self.fresh("s") for _ in values]
        what = values[0] if len(values) == 1 else f"({', '.join(values)})"
        self.line(f"{', '.join(names)} = tl.associative_scan({what}, {self.row}, {self.combine(k.combine)}, "
                  f"reverse={k.reverse})")
        return names

    def totals(self, scanned: list[str], first: str) -> list[str]:
        """The last of the piece, in the order of the scan. Taken out of it rather than reduced once more: a reduction
        may change the order, which not every combine can bear."""
        size = self.blocks[self.row]
        last = "0" if self.k.reverse else str(size - 1)
        if not self.k.reverse and self.row in self.masks:
            last = f"tl.minimum({self.index(self.length)} - {first or '0'}, {size}) - 1"
        at = self.fresh("at")
        self.line(f"{at} = lane == {last}")
        return [self.picked(s, at, self.row) for s in scanned]

    def picked(self, text: str, at: str, axis: int) -> str:
        name = self.fresh("t")
        keep = ", keep_dims=True" if len(self.blocks) > 1 else ""
        self.line(f"{name} = tl.sum(tl.where({at}, {text}, tl.zeros_like({text})), {axis}{keep})")
        return name

    def put(self, values: list[str]) -> None:
        k = self.k
        full = frozenset(range(len(self.blocks)))
        running = {}
        for c, text in zip(k.combine.left, values, strict=True):
            running[c] = Expr("raw", c.dtype, (), self.fresh("x"))
            self.scopes[-1].known[running[c]] = text
        for name, e in zip(k.names, k.finish, strict=True):
            if name not in self.addresses:
                continue
            kept = self.value(cast(rewrite(e, lambda x: running.get(x, x)), self.dtypes[name]))  # may be narrower
            place = f"{self.short[name]} + {self.index(self.addresses[name])}"
            if self.index_axes(self.addresses[name]) != full:
                place = self.spread(f"({place})", full)
            holds = self.inside(full)
            self.line(f"tl.store({place}, {kept}{f', {holds}' if holds else ''})")

    def start(self) -> list[str]:
        """The identity for every row of the tile."""
        names = []
        shape = self.shape(frozenset(range(self.row))) if self.row else "()"
        for e in self.k.combine.identity:
            names.append(self.fresh("c"))
            self.line(f"{names[-1]} = {self.d.constant(e.attr, e.dtype).replace('()', shape, 1)}")
        return names

    # ---- one program for a row ---------------------------------------------------------------------------

    def walking(self, outer: list[Sym], blocks: dict[Sym, int], cut: bool) -> Draft:
        grid = self.open_tile(outer, blocks)
        size = self.blocks[self.row]
        if not cut:
            self.put(self.piece(""))
        else:
            carry = self.start()
            step = Sym("step", self.length)
            count = count_text(self.length, size, self.index)
            with self.loop(step, "0", count, pragma=f"num_stages={STAGES}") as s:
                s.vars.add(self.k.axis)
                self.line(f"first = {self.place(self.sym(step), count)} * {size}")
                scanned = self.piece("first")
                totals = self.totals(scanned, "first")
                self.put(self.combined(self.k.combine, carry, scanned))
                for slot, new in zip(carry, self.combined(self.k.combine, carry, totals), strict=True):
                    self.line(f"{slot} = {new}")
        elements = size
        for b in blocks.values():
            elements *= b
        return Draft(self, grid, scan_warps(elements))

    def place(self, step: str, count: str) -> str:
        return f"({count} - 1 - {step})" if self.k.reverse else step

    # ---- a program for each piece ------------------------------------------------------------------------

    def looking_back(self, outer: list[Sym], blocks: dict[Sym, int]) -> Draft:
        """Workspace: a counter, then the state of every piece, strip by strip.

        A state is a flag (1: the piece's total is there, 2: its prefix is) and the values. One value of 32 bits
        stands in one word with its flag; otherwise there is an array of flags, and two of values, totals and prefixes,
        for every component (8 bytes for each value, whatever its dtype)."""
        k, size = self.k, self.blocks[self.row]
        lanes = 1
        for b in blocks.values():
            lanes *= b
        packed = lanes == 1 and len(k.combine.left) == 1 and k.combine.dtypes[0].itemsize == 4
        sizes = [(v.extent, blocks.get(v, 1)) for v in outer if v.extent is not None]
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
        state: PackedState | WideState = PackedState(self) if packed else WideState(self, lanes)
        with self.scope("if step > 0:", footer=""):
            state.publish(totals, 1)
        before = self.start()
        if lanes == 1:
            self.look_wide(before, state)
        else:
            assert isinstance(state, WideState)
            self.look_single(before, state)
        state.publish(self.combined(k.combine, before, totals), 2)
        self.put(self.combined(k.combine, before, scanned))
        strips = " * ".join(count_text(n, b, host_text) for n, b in sizes) or "1"
        total = f"{strips} * {count_text(self.length, size, host_text)}"
        each = 8 if packed else 4 + 16 * len(k.combine.left) * lanes
        return Draft(self, total, scan_warps(size * lanes), f"32 + {total} * {each}")

    def side(self) -> str:
        """The position of each row of the tile among the tile's rows."""
        out, step = [], 1
        for axis in range(self.row - 1, -1, -1):
            out.append(f"{self.arange(axis)} * {step}" if step > 1 else self.arange(axis))
            step *= self.blocks[axis]
        return " + ".join(out) or "0"

    def look_single(self, before: list[str], state: WideState) -> None:
        """One predecessor at a time: many strips keep the machine busy meanwhile."""
        self.line("back = step - 1")
        with self.scope("while back >= 0:", footer=""):
            self.line("flag = tl.load(flags + back, volatile=True)")
            with self.scope("while flag == 0:", footer=""):
                self.line("flag = tl.load(flags + back, volatile=True)")
            self.line("tl.debug_barrier()")
            values = state.read("back", "flag == 2", "")
            for slot, new in zip(before, self.combined(self.k.combine, values, before), strict=True):
                self.line(f"{slot} = {new}")
            self.line("back = tl.where(flag == 2, -1, back - 1)")

    def look_wide(self, before: list[str], state: PackedState | WideState) -> None:
        """A window of predecessors at once: a single row's pieces wait for one another alone."""
        c = self.k.combine
        self.line("back = step")
        with self.scope("while back > 0:", footer=""):
            self.line(f"near = back - {WINDOW} + tl.arange(0, {WINDOW})")
            self.line("there = near >= 0")
            state.poll("near", "there")
            # The nearest prefix, and nothing still missing after it.
            self.line("prefix = tl.max(tl.where(there & (flag == 2), near, -1))")
            with self.scope("while tl.max(tl.where(there & (near > prefix) & (flag == 0), 1, 0)) > 0:", footer=""):
                state.poll("near", "there")
                self.line("prefix = tl.max(tl.where(there & (flag == 2), near, -1))")
            self.line("needed = there & (near >= prefix)")
            values = []
            for text, identity in zip(state.read("near", "near == prefix", "needed"), self.identity(c), strict=True):
                values.append(self.fresh("p"))
                self.line(f"{values[-1]} = tl.where(needed, {text}, {identity})")
            joined = self.joined(values)
            for slot, new in zip(before, self.combined(c, joined, before), strict=True):
                self.line(f"{slot} = {new}")
            self.line(f"back = tl.where(prefix >= 0, 0, back - {WINDOW})")

    def joined(self, values: list[str]) -> list[str]:
        """All of a window, in order: a reduction where the order does not matter, else the last of a scan."""
        c = self.k.combine
        what = values[0] if len(values) == 1 else f"({', '.join(values)})"
        names = [self.fresh("s") for _ in values]
        if c.name in COMMUTATIVE:
            self.line(f"{', '.join(names)} = tl.reduce({what}, 0, {self.combine(c)})")
            return names
        self.line(f"{', '.join(names)} = tl.associative_scan({what}, 0, {self.combine(c)})")
        out = []
        for s in names:
            out.append(self.fresh("t"))
            self.line(f"{out[-1]} = tl.sum(tl.where(tl.arange(0, {WINDOW}) == {WINDOW - 1}, {s}, "
                      f"tl.zeros_like({s})), 0)")
        return out


class PackedState:
    """Flag and value of a piece in one word, written and read at once: no order of accesses to take care of."""

    def __init__(self, w: ScanBlocks) -> None:
        self.w = w
        self.kind = w.d.types[w.k.combine.dtypes[0]]
        w.line("states = (work + 16).to(tl.pointer_type(tl.uint64)) + strip * pieces")

    def publish(self, values: list[str], flag: int) -> None:
        bits = f"{values[0]}.to(tl.uint32, bitcast=True).to(tl.uint64)"
        self.w.line(f"word = {bits} | (tl.full((), {flag}, tl.uint64) << 32)")
        self.w.line('tl.atomic_xchg(states + step, word, sem="relaxed")')

    def poll(self, near: str, there: str) -> None:
        self.w.line(f"word = tl.load(states + {near}, {there}, volatile=True)")
        self.w.line("flag = (word >> 32).to(tl.int32)")

    def read(self, near: str, prefix: str, needed: str) -> list[str]:
        return [f"word.to(tl.uint32).to({self.kind}, bitcast=True)"]


class WideState:
    """Flags, and behind them totals and prefixes of every component; a flag follows its values."""

    def __init__(self, w: ScanBlocks, lanes: int) -> None:
        self.w, self.lanes, self.side = w, lanes, w.side()
        w.line("flags = counter + 4 + strip * pieces")
        w.line("state = work + 16 + (strips * pieces + strips * pieces % 2) * 4")
        self.arrays: list[tuple[str, str]] = []
        for n, dtype in enumerate(w.k.combine.dtypes):
            names = (w.fresh("w"), w.fresh("w"))
            for what, name in enumerate(names):
                offset = f"tl.cast(strips * pieces * {lanes}, tl.int64) * {8 * (2 * n + what)}"
                w.line(f"{name} = (state + {offset}).to(tl.pointer_type({w.d.types[dtype]})) "
                       f"+ strip * pieces * {lanes}")
            self.arrays.append(names)

    def publish(self, values: list[str], flag: int) -> None:
        for names, text in zip(self.arrays, values, strict=True):
            self.w.line(f"tl.store({names[flag - 1]} + step * {self.lanes} + {self.side}, {text})")
        self.w.line("tl.debug_barrier()")
        self.w.line(f'tl.atomic_xchg(flags + step, {flag}, sem="release")')

    def poll(self, near: str, there: str) -> None:
        self.w.line(f"flag = tl.load(flags + {near}, {there}, volatile=True)")

    def read(self, near: str, prefix: str, needed: str) -> list[str]:
        """Past the first-level cache, which does not see what other processors write."""
        if needed:
            self.w.line("tl.debug_barrier()")
        out = []
        for totals, prefixes in self.arrays:
            out.append(self.w.fresh("p"))
            self.w.line(f"chosen = tl.where({prefix}, {prefixes}, {totals})")
            self.w.line(f"{out[-1]} = tl.load(chosen + {near} * {self.lanes} + {self.side}"
                        f"{', ' + needed if needed else ''}, cache_modifier=\".cg\")")
        return out


def scan_warps(elements: int) -> int:
    return max(1, min(16, elements // (32 * PER_THREAD)))

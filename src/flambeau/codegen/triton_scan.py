"""Scans in Triton: each program scans a tile; carries go from piece to piece.

Where there are programs enough without cutting the axis, one program walks all pieces of its rows. Otherwise each
piece has a program of its own, in a single pass over memory: a piece publishes its own total at once, looks back over
the totals and prefixes of those before it, and publishes its prefix ("decoupled look-back"). Programs take their
number from a counter, so that whoever a program waits for is already running.
"""

from __future__ import annotations

from flambeau.ir.cost import cost_of
from flambeau.ir.expr import Expr, cast, rewrite
from flambeau.ir.index import ONE, Index, Sym
from flambeau.ir.program import ScanKernel

from .triton import BlockWriter, Draft, count_text, host_text, is_wide, power
from .triton_loops import spans

PIECE = 2048  # elements of a tile of columns
ALONE = 8192  # elements of a piece of a single row
ROW = 16384  # elements of a row that is scanned in one piece
COLUMNS = 32  # columns side by side where they are what is contiguous
PROGRAMS = 200  # enough to fill a GPU, where each has several pieces on their way
STAGES = 4
PER_THREAD = 64  # elements of 32 bits
DEAR = 10  # operations of a combine above which it, and not memory, takes the time
WINDOW = 128  # predecessors that are read at once
COMMUTATIVE = frozenset(("sum", "prod", "min", "max", "scaled_sum"))


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
        piece = min(max(2, power(self.length.const)), most) if self.length.is_const else most
        blocks = spans(outer, max(1, PIECE // piece))
        cut = self.length.const > piece if self.length.is_const else True
        self.dear = cost_of(k.combine.result) > DEAR
        look_back = cut and self.programs(outer, blocks) < PROGRAMS * (8 if self.dear else 1)
        if look_back and rows:
            piece = min(piece, ALONE)
            blocks = spans(outer, 1)
        self.blocks = [*blocks.values(), piece]
        self.row = len(blocks)
        return self.looking_back(outer, blocks) if look_back else self.walking(outer, blocks, cut)

    def warps(self, elements: int, alone: bool) -> int:
        """What a thread scans by itself costs least, as far as its registers hold it; with the state of others to
        look at they hold less."""
        small = all(d.itemsize <= 4 for d in self.k.combine.dtypes)
        each = PER_THREAD if small and (alone or not self.dear) else PER_THREAD // 2
        return max(1, min(16, elements // (32 * each)))

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
        return Draft(self, grid, self.warps(elements, True))

    def place(self, step: str, count: str) -> str:
        return f"({count} - 1 - {step})" if self.k.reverse else step

    # ---- a program for each piece ------------------------------------------------------------------------

    def looking_back(self, outer: list[Sym], blocks: dict[Sym, int]) -> Draft:
        """Workspace: a counter, then the states of all pieces."""
        k, size = self.k, self.blocks[self.row]
        lanes = 1
        for b in blocks.values():
            lanes *= b
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
        state = State(self, lanes)
        with self.scope("if step > 0:", footer=""):
            state.publish(totals, 1)
        before = self.start()
        if lanes == 1:
            self.look_wide(before, state)
        else:
            self.look_single(before, state)
        state.publish(self.combined(k.combine, before, totals), 2)
        self.put(self.combined(k.combine, before, scanned))
        strips = " * ".join(count_text(n, b, host_text) for n, b in sizes) or "1"
        total = f"{strips} * {count_text(self.length, size, host_text)}"
        return Draft(self, total, self.warps(size * lanes, False), f"32 + {total} * {8 * lanes * state.count}")

    def side(self) -> str:
        """The position of each row of the tile among the tile's rows."""
        out, step = [], 1
        for axis in range(self.row - 1, -1, -1):
            out.append(f"{self.arange(axis)} * {step}" if step > 1 else self.arange(axis))
            step *= self.blocks[axis]
        return " + ".join(out) or "0"

    def look_single(self, before: list[str], state: State) -> None:
        """One predecessor at a time: many strips keep the machine busy meanwhile."""
        self.line("back = step - 1")
        with self.scope("while back >= 0:", footer=""):
            state.poll("back", "")
            with self.scope("while flag == 0:", footer=""):
                state.poll("back", "")
            for slot, new in zip(before, self.combined(self.k.combine, state.values(), before), strict=True):
                self.line(f"{slot} = {new}")
            self.line("back = tl.where(flag == 2, -1, back - 1)")

    def look_wide(self, before: list[str], state: State) -> None:
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
            values = []
            for text, identity in zip(state.values(), self.identity(c), strict=True):
                values.append(self.fresh("p"))
                self.line(f"{values[-1]} = tl.where(there & (near >= prefix), {text}, {identity})")
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


class State:
    """What a piece tells the others: its total (flag 1), later its prefix (flag 2).

    Every 32 bits of it stand in a word with their flag, which is written and read at once; whoever reads words whose
    flags differ reads again. So no access has to wait for another."""

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
                # One word alone goes at once past everything that is still on its way.
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

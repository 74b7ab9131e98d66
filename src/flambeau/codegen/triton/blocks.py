"""Writes expressions on blocks in Triton, with the same walker as for C.

A kernel's variables become the axes of a tile: `x = pid * 256 + tl.arange(0, 256)[None, :]`. An expression has the
shape of the axes it depends on and broadcasts against the others by itself. Only loop carries, operands of a reduction
and stored values are expanded to the full shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from flambeau.ir.build import simple_combine
from flambeau.ir.dtypes import DType, is_float
from flambeau.ir.expr import Expr, Fold, cast, index_value, masked, rewrite, walk, where
from flambeau.ir.faults import LOW, head
from flambeau.ir.index import WORD, Dyn, Index, Sym, as_index, largest, volume
from flambeau.ir.lines import is_line
from flambeau.ir.nodes import Combine
from flambeau.ir.program import AnySize, AttentionKernel, Kernel, Param
from flambeau.ir.tuning import BLOCKS

from ..dialect import Pipelined, Steps
from ..source import TensorMap, host_text
from ..writer import Scope, Writer
from .dialect import NARROW, TRITON, Triton


class Width(NamedTuple):
    """The type of a kernel's indices: 32 bits, 64 bits, or the dtype of a size
    argument if run-time sizes decide."""

    kind: str
    holds: str = ""  # a Python condition on the sizes under which they are narrow, if the sizes decide


NARROWED, WIDE = Width("tl.int32"), Width("tl.int64")


class BlockWriter(Writer):
    """Renders expressions over the axes of a tile."""

    d: Triton

    def __init__(self, params: Sequence[Param], sizes: Sequence[Sym], width: Width, part: int = 0) -> None:
        super().__init__(TRITON)
        self.sizes = {s: f"n{k}" for k, s in enumerate(sizes)}  # with the host's names
        self.short = {p.name: f"p{k}" for k, p in enumerate(params)}
        self.dtypes = {p.name: p.dtype for p in params}
        self.width = width
        self.part = part
        self.blocks: list[int] = []  # size of each axis of the tile
        self.axes: dict[Sym, int] = {}  # variable -> axis
        self.masks: dict[int, str] = {}  # axis -> condition for being inside its range
        self.gathered: Sym | None = None  # the variable along which rows at computed places are read
        self.places: dict[Sym, str] = {}  # variable -> number of the block that this program has along it
        self.local_axes: dict[str, frozenset[int]] = {}
        self.row: int | None = None  # the axis that is reduced or scanned
        self.loop_axes: frozenset[int] = frozenset()  # axes of the carries of the loop being written
        self.helpers: list[str] = []  # text of functions next to the kernel
        self._combines: dict[Combine, str] = {}

    # ---- text ------------------------------------------------------------------------------------------

    def define(self, s: Scope, kind: str, name: str, text: str) -> None:
        s.lines.append(f"{name} = {text}")

    def variable(self, dtype: DType, name: str, text: str) -> None:
        self.line(f"{name} = {text}")

    @contextmanager
    def loop(self, var: Sym, lo: str, hi: str, step: str = "1", how: Steps | None = None) -> Iterator[Scope]:
        """Writes a loop. Triton has a range of its own for pipelined loops, whose loads begin some iterations ahead."""
        by = "" if step == "1" else f", {step}"
        stages = f", num_stages={how.stages}" if isinstance(how, Pipelined) else ""
        what = f"{'tl.' if stages else ''}range({lo}, {hi}{by}{stages})"
        with self.scope(f"for {self.sym(var)} in {what}:", (var,), footer="") as s:
            yield s

    # ---- shapes ----------------------------------------------------------------------------------------

    def axes_of(self, *exprs: Expr) -> frozenset[int]:
        """The axes of the tile that the values vary along."""
        out: set[int] = set()
        for e in walk(*exprs):
            if e.op == "local":
                out |= self.local_axes[e.attr]
            elif e.op == "carry":
                out |= self.loop_axes
            else:
                for i in e.own_indices():
                    out |= {self.axes[s] for s in i.symbols() if s in self.axes}
        return frozenset(out)

    def index_axes(self, i: Index) -> frozenset[int]:
        return self.axes_of(Expr("index", torch.int64, (), i))

    def shape(self, axes: Iterable[int]) -> str:
        there = set(axes)
        return "[" + ", ".join(str(b) if k in there else "1" for k, b in enumerate(self.blocks)) + "]"

    def spread(self, text: str, axes: frozenset[int]) -> str:
        """Broadcasts a value to the shape of these axes."""
        return f"tl.broadcast_to({text}, {self.shape(axes)})" if axes else text

    def arange(self, axis: int) -> str:
        if self.blocks[axis] == 1:
            return "0"
        place = ", ".join(":" if k == axis else "None" for k in range(len(self.blocks)))
        text = f"tl.arange(0, {self.blocks[axis]})" + (f"[{place}]" if len(self.blocks) > 1 else "")
        return text if self.width is NARROWED else f"{text}.to({self.width.kind})"

    def inside(self, axes: Iterable[int], *more: str) -> str:
        """The condition that all of these axes are in their range and that everything in `more` holds."""
        return " & ".join([*more, *(self.masks[k] for k in sorted(axes) if k in self.masks)])

    # ---- indices ---------------------------------------------------------------------------------------

    def _atom(self, a: object) -> tuple[int, str]:
        if not isinstance(a, Dyn):
            return super()._atom(a)
        depth, text = self.emit(a.expr)
        if self.width is WIDE:
            return depth, text
        key = Index((((a,), 1),), 0)
        if (found := self.innermost("indices", key)) is not None:
            return found
        name = self.fresh("i")
        self.define(self.scopes[depth], "", name, f"tl.cast({text}, {self.width.kind})")
        self.scopes[depth].indices[key] = name
        return depth, name

    # ---- expressions -----------------------------------------------------------------------------------

    def _text(self, e: Expr, args: list[str]) -> str:
        if e.op == "index":
            return f"tl.cast({self.index(e.attr)}, tl.int64)"
        if e.op == "load":
            buffer, (address,) = e.attr
            return self.load(buffer, address, e.args)
        if e.op == "where":
            return f"tl.where({', '.join(args)})"
        if e.op == "div" and is_power(e.args[1]):
            return f"{args[0]} * {self.d.constant(1 / e.args[1].attr, e.dtype)}"
        if e.op == "philox":
            return f"fl.philox({', '.join(args)}, {e.attr})"
        return super()._text(e, args)

    def _narrowed(self, text: str, dtype: DType) -> str:
        return text  # blocks keep their dtype

    def emit(self, e: Expr) -> tuple[int, str]:
        read = padded_read(e)
        if read is None or self.lookup(e) is not None or self.lookup(read) is not None:
            return super().emit(e)
        if read is not e.args[1]:  # a cast follows the load
            return super().emit(cast(where(e.args[0], read, 0), e.dtype))
        buffer, (address,) = read.attr
        depth = max(self.emit(e.args[0])[0], self.index_depth(address))
        name = self.fresh()
        self.define(self.scopes[depth], "", name,
                    self.load(buffer, address, e.args[:1], self.d.constant(e.args[2].attr, e.dtype)))
        self.scopes[depth].known[e] = name
        return depth, name

    def load(self, buffer: str, address: Index, mask: Sequence[Expr], other: str = "") -> str:
        wanted = self.axes_of(Expr("index", torch.int64, (), address), *mask)
        pointer = self.pointer(buffer, address, wanted)
        masks, self.masks = self.masks, self.read_masks(address)
        holds = self.inside(wanted, *(self.value(m) for m in mask))
        self.masks = masks
        return f"tl.load({pointer}{f', {holds}' if holds else ''}{f', {other}' if other and holds else ''})"

    def read_masks(self, address: Index) -> dict[int, str]:
        """Relaxes the mask of rows that are aligned for wide accesses: they are read to the end of the last access. The
        elements beyond the row's end are dropped, and lie in the same 16 bytes as valid ones."""
        v = self.gathered
        if v is None or self.axes.get(v) not in self.masks or not is_line(address, v, BLOCKS.access):
            return self.masks
        whole = -(-v.size.const // BLOCKS.access) * BLOCKS.access
        return {**self.masks, self.axes[v]: f"({self.sym(v)} < {whole})"}

    def branched(self, inside: str | None, vars: Iterable[Sym], free: Iterable[int], write: Callable[[], list[str]]
                 ) -> list[str]:
        """Writes the code twice: for where `inside` holds, without the masks of the axes `free`, and for elsewhere.
        Under a mask that may end anywhere, memory is accessed element by element."""
        if inside is None:
            return write()
        masks, names, dropped = self.masks, None, frozenset(free)
        for header, axes in ((f"if {inside}:", masks.keys() - dropped), ("else:", masks.keys())):
            self.masks = {k: masks[k] for k in axes}
            with self.scope(header, vars, footer=""):
                texts = write()
                names = names or [self.fresh("b") for _ in texts]
                self.assign(names, texts)
        return names or []

    def pointer(self, buffer: str, address: Index, axes: frozenset[int]) -> str:
        """The pointer of an access, in the shape of these axes."""
        # The addresses of a window's elements differ only in a constant, which fits in the instruction; the rest is
        # shared.
        offset = f" + {address.const}" if address.const and not address.is_const else ""
        text = f"{self.short[buffer]} + {self.index(address - address.const if offset else address)}{offset}"
        return text if self.index_axes(address) == axes else self.spread(f"({text})", axes)

    def store(self, buffer: str, address: Index, text: str, axes: frozenset[int], *more: str) -> None:
        """Stores where all of these axes are in their range and everything in `more` holds."""
        holds = self.inside(axes, *more)
        self.line(f"tl.store({self.pointer(buffer, address, axes)}, {text}{f', {holds}' if holds else ''})")

    def full(self) -> frozenset[int]:
        return frozenset(range(len(self.blocks)))

    def _reported(self, e: Expr, args: list[str], s: Scope) -> str:
        s.checks = True
        axes = self.axes_of(e)
        if e.op == "require":
            self._report(s, axes, str(head(e.attr)), f"~{args[1]}")
            s.known[e] = args[0]
            return args[0]
        ok, name = self.fresh("ok"), self.fresh()
        s.lines.append(f"{ok} = ({args[0]} >= 0) & ({args[0]} < {self.index(e.attr.size)})")
        self._report(s, axes, f"{self.sites[e.attr]} | ({args[0]} & {LOW})", f"~{ok}", *args[1:])
        s.lines.append(f"{name} = tl.where({ok}, {args[0]}, 0)")
        s.known[e] = name
        return name

    def _report(self, s: Scope, axes: frozenset[int], fault: str, *when: str) -> None:
        wrong = self.inside(axes, *when)
        place = self.spread("bad", axes)
        s.lines.append(f"tl.store({place}, {fault}, {wrong})")

    # ---- small loops inside expressions ------------------------------------------------------------------

    def _fold(self, e: Expr) -> tuple[int, str]:
        f: Fold = e.attr
        if f.steps <= self.unroll:
            return super()._fold(e)
        n = len(f.carries)
        inits, updates = e.args[:n], list(e.args[n:])
        bounds = [Expr("index", torch.int64, (), i) for _, lo, hi in f.loops for i in (lo, hi)]
        before, self.loop_axes = self.loop_axes, frozenset()
        axes = self.axes_of(*e.args, *bounds) | (before if any(x.op == "carry" for x in walk(*inits)) else frozenset())
        self.loop_axes = axes
        # If the range differs from lane to lane, the loop covers all ranges, and each lane takes part while it is
        # inside its own.
        ends: list[tuple[str, str]] = []
        for var, lo, hi in f.loops:
            limits = []
            for end, least in ((lo, True), (hi, False)):
                own = self.index_axes(end)
                text = self.index(end)
                if own:
                    holds = self.inside(own)
                    worst = NARROW - 1 if least else 0
                    text = f"tl.where({holds}, {text}, {worst})" if holds else text
                    text = f"tl.{'min' if least else 'max'}({text})"
                    v = index_value(var)
                    side = v >= index_value(end) if least else v < index_value(end)
                    updates = [where(side, masked(u, side), c) for u, c in zip(updates, f.carries, strict=True)]
                limits.append(text)
            ends.append((limits[0], limits[1]))
        out = self._looped(e, inits, updates, ends)
        self.loop_axes = before
        return out

    def shaped(self, text: str) -> str:
        return self.spread(text, self.loop_axes)

    def keep_value(self, name: str, e: Expr) -> str:
        """Computes an expression and keeps it as the local of this name; returns its text."""
        text = self.value(e)
        self.local_axes[name] = self.axes_of(e)
        self.scopes[-1].locals[name] = text
        return text

    # ---- combines --------------------------------------------------------------------------------------

    def combine(self, c: Combine) -> str:
        """Returns the name of a function of left and right components, for tl.reduce and tl.associative_scan."""
        if c not in self._combines:
            name = self._combines[c] = f"combine{self.part}_{len(self._combines)}"
            w = BlockWriter((), (), self.width)
            left, right = [f"a{k}" for k in range(len(c.left))], [f"b{k}" for k in range(len(c.right))]
            w.scopes[0].known.update(zip((*c.left, *c.right), (*left, *right), strict=True))
            results = [w.value(e) for e in c.result]
            body = [*w.scopes[0].lines, f"return {', '.join(results)}"]
            self.functions |= w.functions
            head = f"def {name}({', '.join((*left, *right))}):"
            self.helpers += ["@triton.jit", head, *("    " + x for x in body), ""]
        return self._combines[c]

    def combined(self, c: Combine, left: Sequence[str], right: Sequence[str]) -> list[str]:
        names = [self.fresh("c") for _ in left]
        self.line(f"{', '.join(names)} = {self.combine(c)}({', '.join((*left, *right))})")
        return names

    def reduced(self, c: Combine, values: Sequence[str], *axes: int) -> list[str]:
        """Reduces values along these axes, the first axis first: a thread has most of its elements along that one, and
        lanes lie along the last. The results are scalars if the tile has no other axes."""
        if c.level is not None:  # the maximum first: joining pairs costs several times as much
            given = dict(zip(c.left, values, strict=True))
            size, total = c.level.size, c.level.total
            given[c.level.top], = self.reduced(simple_combine("max", size.dtype), [self.applied(size, given)], *axes)
            scaled = [self.applied(c.level.scaled, given)]
            given[total], = self.reduced(simple_combine("sum", total.dtype), scaled, *axes)
            return [self.applied(e, given) for e in c.level.result]
        keep = ", keep_dims=True" if len(self.blocks) > len(axes) else ""
        for gone, axis in enumerate(sorted(axes)):
            values = self.over("tl.reduce", c, values, axis if keep else axis - gone, keep)
        return list(values)

    def over(self, function: str, c: Combine, values: Sequence[str], axis: int | None, options: str = ""
             ) -> list[str]:
        """Writes a reduction or scan of all components together."""
        names = [self.fresh("r") for _ in values]
        what = values[0] if len(values) == 1 else f"({', '.join(values)})"
        self.line(f"{', '.join(names)} = {function}({what}, {axis}, {self.combine(c)}{options})")
        return names

    def applied(self, e: Expr, given: dict[Expr, str]) -> str:
        """Returns the text of an expression over carries, given the text of each carry."""
        raw = {carry: Expr("raw", carry.dtype, (), self.fresh("x")) for carry in given}
        self.scopes[-1].known.update((raw[carry], text) for carry, text in given.items())
        return self.value(rewrite(e, lambda x: raw.get(x, x)))

    def operands(self, c: Combine, exprs: Sequence[Expr], row: Iterable[int]) -> list[str]:
        """Returns the operands of a combine in the full shape. Beyond the end of the row, along its axes, they are the
        identity."""
        holds = self.inside(row)
        names = []
        for e, identity in zip(exprs, self.identity(c), strict=True):
            text = self.spread(self.value(e), self.full())
            names.append(self.fresh("v"))
            self.line(f"{names[-1]} = {f'tl.where({holds}, {text}, {identity})' if holds else text}")
        return names

    def identity(self, c: Combine) -> list[str]:
        return [self.d.constant(e.attr, e.dtype) for e in c.identity]

    def start(self, c: Combine, axes: frozenset[int]) -> list[str]:
        """Defines variables that hold the identity, in the shape of these axes; returns their names."""
        names = [self.fresh("st") for _ in c.identity]
        for name, e in zip(names, c.identity, strict=True):
            self.line(f"{name} = {self.d.constant(e.attr, e.dtype, self.shape(axes) if axes else '()')}")
        return names

    def host(self, i: Index) -> str:
        """The text by which the host computes an index over run-time sizes."""
        return host_text(i, self.sizes)

    # ---- the tile --------------------------------------------------------------------------------------

    def open_tile(self, vars: Sequence[Sym], blocks: dict[Sym, int], pid: str = "tl.program_id(0)") -> str:
        """Divides the points of `vars` among programs: writes the tile's axes and their masks, and returns the grid as
        a text.

        A variable with a block is an axis of the tile; the others are scalars, with one value for each program.
        """
        grid: list[str] = []
        here = "pid"
        self.line(f"{here} = {pid}" + ("" if self.width is NARROWED else f".to({self.width.kind})"))
        first = int(self.row == 0)
        self.axes.update((v, first + at) for at, v in enumerate(v for v in vars if v in blocks))
        for v in reversed(vars):
            size, block = v.size, blocks.get(v, 1)
            count = count_text(size, block, self.index)
            name = self.sym(v)
            last = v is vars[0]
            at = self.places[v] = here if last else "0" if count == "1" else f"({here} % {count})"
            if v in blocks:
                axis = self.axes[v]
                start = "" if at == "0" else f"{at} * {block} + "
                self.line(f"{name} = {start}{self.arange(axis)}")
                if not (size.is_const and size.const % block == 0):
                    self.masks[axis] = self.fresh("m")
                    self.line(f"{self.masks[axis]} = {name} < {self.index(size)}")
            else:
                self.line(f"{name} = {at}")
            if not last and count != "1":
                here, before = self.fresh("pid"), here
                self.line(f"{here} = {before} // {count}")
            grid.append(count_text(size, block, self.host))
        return " * ".join(reversed(grid)) if grid else "1"


def padded_read(e: Expr) -> Expr | None:
    """Returns the load of an expression that is a masked load with a constant where the mask does not hold; else
    None."""
    if e.op != "where" or e.args[2].op != "const":
        return None
    read = e.args[1].args[0] if e.args[1].op == "cast" and e.args[2].attr == 0 else e.args[1]
    return read if read.op == "load" and read.args == e.args[:1] else None


def count_text(size: Index, block: int, text: Callable[[Index], str]) -> str:
    """The text for the number of blocks that cover a size."""
    if size.is_const:
        return str(-(-size.const // block))
    return f"({text(size)})" if block == 1 else f"(({text(size)} + {block - 1}) // {block})"


def is_power(e: Expr) -> bool:
    """Whether this is a power of two: dividing by it is exactly multiplying by its inverse."""
    return e.op == "const" and is_float(e.dtype) and abs(math.frexp(e.attr)[0]) == 0.5 and 2**-14 < abs(e.attr) < 2**14


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def spans(k: AnySize, vars: Sequence[Sym], room: int) -> dict[Sym, int]:
    """Returns tile axes for the innermost variables, until the tile has `room` elements."""
    out: dict[Sym, int] = {}
    for v in reversed(vars):
        block = min(room, power(k.about(v.size, room)))
        if block > 1:
            out[v] = block
            room //= block
    return {v: out[v] for v in vars if v in out}


def width_of(k: Kernel | AttentionKernel, exprs: Iterable[Expr], stores: Iterable[tuple[str, Index]],
             *nests: Sequence[Sym]) -> Width:
    """Returns the index width of a kernel that computes these expressions and stores over these loop nests."""
    everything = list(walk(*exprs))
    accesses = [*((e.attr[0], a) for e in everything if e.op == "load" for a in e.attr[1]), *stores]
    inside = [i for e in everything if e.op != "load" for i in e.own_indices()]
    points = [n for vars in nests for n in (volume(vars), *(v.size for v in vars))]
    leaving = [i for i in (*accesses, *((None, i) for i in (*inside, *points))) if i[1].can_leave(NARROW)]
    if not leaving:
        return NARROWED
    names = {s: f"n{n}" for n, s in enumerate(k.sizes)}
    size = next((names[s] for s in k.sizes if not s.name.startswith(WORD)), None)
    reach = {p.name: p.reach for p in k.params}
    windows: dict[Sym, Index] = {}  # variables of folds -> variables of a known extent
    for v, _, end in (x for e in everything if e.op == "fold" for x in e.attr.loops):
        most = largest(end.subs(windows)) if v.extent is None else None
        windows |= {} if most is None else {v: as_index(Sym(v.name, most))}
    holds: dict[str, None] = {}
    for buffer, index in dict.fromkeys(leaving):
        most, *ends = (largest(i.subs(windows)) for i in index.on_the_way())
        # Sums that overflow wrap back: where an element is accessed, its address is inside the buffer.
        for end in (reach.get(buffer) if most is None and buffer else most, *ends):
            if size is None or end is None or end.is_const and end.const >= NARROW or not end.symbols() <= names.keys():
                return WIDE
            if not end.is_const:
                holds[f"{host_text(end, names)} < {NARROW}"] = None
    return Width(f"{size}.dtype", " and ".join(holds))


class PartDraft:
    """One launch of a kernel: the writer with its text, and how it is launched."""

    def __init__(self, writer: BlockWriter, grid: str, warps: int, workspace: str = "", stages: int | None = None,
                 maps: tuple[TensorMap, ...] = (), waits: bool = False, signals: bool = False, fills: bool = False
                 ) -> None:
        self.writer, self.grid, self.warps, self.workspace = writer, grid, warps, workspace
        self.stages, self.maps = stages, maps
        self.waits, self.signals = waits, signals
        self.fills = fills  # it initializes what is read of its workspace, which needs no zeros

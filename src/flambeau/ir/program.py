"""The output of the scheduler: kernels as loop nests, and the Program that runs them, as plain data.

In a kernel every read is `load(buffer, (address,))` with one linear element address, or `local(name)`, a value that the
same kernel computed. A loop kernel walks `outer` (its parallel points) and, inside, `inner` (the points of its
reductions). Its stages follow each other for every outer point, so that a stage may use the results of the stages
before it (softmax: max; sum; map).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from .attention import Attention
from .dtypes import DType
from .expr import Expr, loads, rewrite, walk
from .faults import Bound, heads
from .index import ONE, ZERO, Dyn, Index, Sym, about, flat, walks_as_one
from .nodes import Combine, Host, Value


@dataclass(frozen=True)
class Param:
    """A pointer argument of a kernel."""

    name: str
    dtype: DType
    written: bool
    aliased: bool = False  # shares memory with another argument
    reach: Index | None = None  # the elements that it spans, if data decide which of them are accessed


@dataclass(frozen=True)
class Item:
    """One computation inside a stage: a map (no combine, one expression) or a reduction.

    level "outer": once per outer point; "full": at every inner point.
    """

    names: tuple[str, ...]
    level: str
    exprs: tuple[Expr, ...]
    combine: Combine | None = None

    @property
    def joins(self) -> Combine:
        """The combine of a reduction."""
        assert self.combine is not None, f"{self.names} are not reduced"
        return self.combine

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes of the values of its names."""
        return self.combine.dtypes if self.combine else (self.exprs[0].dtype,)


def exprs_of(items: Iterable[Item]) -> list[Expr]:
    return [e for i in items for e in i.exprs]


def reductions_of(items: Iterable[Item]) -> list[Item]:
    return [i for i in items if i.combine is not None]


def identities_of(reductions: Iterable[Item]) -> list[tuple[str, Expr]]:
    """Returns the names of all components with the identities that their states start from."""
    return [(name, e) for i in reductions for name, e in zip(i.names, i.joins.identity, strict=True)]


@dataclass(frozen=True)
class Form:
    """The form of a kernel's loops: a name that the writers for its machine know, and the number of columns side by
    side if that is part of the form."""

    name: str = ""
    width: int = 0


class AnySize:
    """A kernel that may be for any size."""

    typical: tuple[tuple[Sym, int], ...]  # values of run-time sizes when the graph was captured

    def about(self, size: Index, unknown: int) -> int:
        return about(size, dict(self.typical), unknown)


@dataclass(frozen=True)
class LoopKernel(AnySize):
    outer: tuple[Sym, ...]
    inner: tuple[Sym, ...]
    vector: Sym | None  # the variable that vectorises; in outer or in inner
    stages: tuple[tuple[Item, ...], ...]
    stores: tuple[tuple[str, Index], ...]  # name, address
    scratch: frozenset[str]  # full-level values kept in a row of fast memory, by inner position
    params: tuple[Param, ...]
    sizes: tuple[Sym, ...]  # run-time sizes, passed as integers
    bounds: tuple[Expr, Expr] | None = None  # a segment's first and last-plus-one inner index
    tile: Sym | None = None  # a second contiguous variable: the two are walked in square tiles
    origins: tuple[str, ...] = ()
    form: Form = Form()
    typical: tuple[tuple[Sym, int], ...] = ()

    @property
    def items(self) -> list[Item]:
        return [i for stage in self.stages for i in stage]

    def dtype_of(self) -> dict[str, DType]:
        """The dtype of each name, in the order of definition."""
        return {n: d for i in self.items for n, d in zip(i.names, i.dtypes, strict=True)}

    def everything(self) -> list[Expr]:
        """Returns all expressions."""
        return [*exprs_of(self.items), *(self.bounds or ())]

    def accesses(self) -> list[tuple[str, Index]]:
        """Returns all loads and stores, as buffer and address."""
        return [*((e.attr[0], e.attr[1][0]) for e in loads(*exprs_of(self.items))), *self.stores]

    def places(self) -> list[Index]:
        """Returns all indices: those of loads and stores, and those that expressions compute with."""
        return [*(i for e in walk(*self.everything()) for i in e.own_indices()), *(at for _, at in self.stores)]

    def rewritten(self, fn: Callable[[Expr], Expr], mapping: Mapping[Sym, Index] | None = None) -> LoopKernel:
        """Returns the kernel with `fn` applied to the expressions of its items, and symbols replaced in these and in
        store addresses."""
        memo: dict[Expr, Expr] = {}
        stages = tuple(tuple(replace(i, exprs=tuple(rewrite(e, fn, mapping, memo) for e in i.exprs)) for i in stage)
                       for stage in self.stages)
        return replace(self, stages=stages, stores=tuple((name, at.subs(mapping or {})) for name, at in self.stores))

    def read_back(self, stage: Iterable[Item]) -> set[str]:
        """Returns the names stored at inner points by earlier stages that this stage reads."""
        items = list(stage)
        made = {n for i in items for n in i.names}
        stored = {name for name, at in self.stores if name not in made and at.symbols() & {*self.inner}}
        return {e.attr for e in walk(*exprs_of(items)) if e.op == "local"} & stored

    def reads_again(self) -> bool:
        """Whether values at inner points are loaded, or read back, by more than one stage."""
        reads = [e for stage in self.stages for e in loads(*exprs_of(stage)) if e.attr[1][0].symbols() & {*self.inner}]
        return len({*reads}) < len(reads) or any(map(self.read_back, self.stages))

    def is_crossed(self) -> bool:
        """Whether some accesses are contiguous along another variable of a row than the vector variable."""
        return any(at.coefficient(v) is ONE for _, at in self.accesses() if self.vector in at.symbols()
                   for v in self.inner if v is not self.vector)

    def across_rows(self) -> list[str]:
        """Returns the buffers that are contiguous across rows: consecutive rows share their cache lines."""
        v, last = self.vector, self.outer[-1] if self.outer else None
        return [] if v is None or last is None else [
            name for name, at in self.accesses()
            if at.symbols() & {*self.inner} and at.coefficient(last) is ONE and at.coefficient(v) not in (ONE, ZERO)]

    def point_reads(self, masked: bool = False) -> list[Expr]:
        """Returns a map's loads whose addresses depend only on the point, and not on data. `masked`: also
        those under a mask that depends only on the point."""
        return [e for e in loads(*exprs_of(self.items))
                if (not e.args or masked and all(x.op not in ("load", "local", "fold", "raw") for x in walk(*e.args)))
                and (at := e.attr[1][0]).symbols() <= {*self.outer, *self.sizes}
                and not any(isinstance(a, Dyn) for a in at.atoms())]

    def transposed_reads(self, masked: bool = False) -> list[Expr]:
        """Returns those of `point_reads` that are contiguous along the second variable of a map's tiles, and not along
        the first."""
        return [] if self.tile is None or self.vector is None else [
            e for e in self.point_reads(masked)
            if (at := e.attr[1][0]).coefficient(self.tile) is ONE and at.coefficient(self.vector) not in (ONE, ZERO)]

    def reads_apart(self) -> list[Expr]:
        """Returns those of `point_reads` that cannot walk the two variables of a map's tiles as one."""
        t, v = self.tile, self.vector
        return [] if t is None or v is None else [
            e for e in self.point_reads() if not walks_as_one(e.attr[1][0], t, v)]

    def inner_position(self) -> Index:
        """The position of an inner point among all of them."""
        return flat(self.inner)


@dataclass(frozen=True)
class ScanKernel(AnySize):
    outer: tuple[Sym, ...]
    axis: Sym
    vector: Sym | None  # an outer variable to vectorise over, or None when the axis is contiguous
    combine: Combine
    exprs: tuple[Expr, ...]
    finish: tuple[Expr, ...]  # the values stored under each name, over the combine's left components
    names: tuple[str, ...]
    stores: tuple[tuple[str, Index], ...]
    reverse: bool
    params: tuple[Param, ...]
    sizes: tuple[Sym, ...]
    origins: tuple[str, ...] = ()
    ordered: bool = False  # parts are combined in a fixed order, whichever is ready first
    form: Form = Form()
    typical: tuple[tuple[Sym, int], ...] = ()

    def column(self, enough: int) -> Sym | None:
        """Returns an outer variable along which all results are contiguous, or some load is: the longest, where
        `enough` elements count as long enough. None if there is none."""
        crossing = [e.attr[1][0] for e in loads(*self.exprs) if e.attr[1][0].coefficient(self.axis) not in (ONE, ZERO)]
        found = [*(v for v in self.outer if all(a.coefficient(v) is ONE for _, a in self.stores)),
                 *(v for v in self.outer for a in crossing if a.coefficient(v) is ONE)]
        return max(found, key=lambda v: min(self.about(v.size, enough), enough), default=None)

    def everything(self) -> list[Expr]:
        return [*self.exprs, *self.finish]


@dataclass(frozen=True)
class ScatterKernel(AnySize):
    out_vars: tuple[Sym, ...]
    init: Expr | None  # None: the target already holds its start
    init_address: Index
    vars: tuple[Sym, ...]
    free: frozenset[Sym]  # variables that index the target directly: parallel without conflict
    address: Index
    owner: Index | None  # the part of the target index that decides which worker owns it, in [0, owners)
    owners: Index | None
    value: Expr
    mode: str
    mask: Expr | None
    name: str
    params: tuple[Param, ...]
    sizes: tuple[Sym, ...]
    origins: tuple[str, ...] = ()
    unique: bool = False  # no two points write the same element
    typical: tuple[tuple[Sym, int], ...] = ()

    @property
    def stores(self) -> tuple[tuple[str, Index], ...]:
        return (self.name, self.address), (self.name, self.init_address)

    def everything(self) -> list[Expr]:
        places = [a.expr for a in self.address.atoms() if isinstance(a, Dyn)]
        return [e for e in (self.init, self.value, self.mask, *places) if e is not None]


@dataclass(frozen=True)
class RaggedRole:
    """The side that is in parts (rows, columns or depth): see `nodes.Ragged`."""

    along: str  # "rows", "columns" or "depth"
    part: Sym
    ends: Expr


class Product(NamedTuple):
    """A further sum over the same points, which shares a factor with the first."""

    name: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class TileReduction:
    """A reduction of each tile's results along rows, columns or both: those with a step between slots. A slot holds the
    partial result of a tile, or the identity. `addresses`: the first slot of each component."""

    item: Item
    rows: Index | None
    columns: Index | None
    addresses: tuple[Index, ...]


@dataclass(frozen=True)
class ContractKernel(AnySize):
    """The sum of left * right over `depth` for every point of batch, rows and columns, and then `items`, one by one.

    `left` does not depend on the columns and `right` not on the rows. Variables that are contiguous in memory are
    columns, as far as there are any.
    """

    batch: tuple[Sym, ...]
    rows: tuple[Sym, ...]
    columns: tuple[Sym, ...]
    depth: tuple[Sym, ...]
    left: Expr
    right: Expr
    name: str  # the name of the sum, a local in the items
    items: tuple[Item, ...]
    stores: tuple[tuple[str, Index], ...]
    params: tuple[Param, ...]
    sizes: tuple[Sym, ...]
    origins: tuple[str, ...] = ()
    typical: tuple[tuple[Sym, int], ...] = ()
    tf32: bool = False  # factors in float32 may be rounded to what tensor cores take
    ragged: RaggedRole | None = None
    shares: bool = False  # programs may share the steps of all tiles, and leave sums to each other
    # the number of elements after which sums are added in float32, since tensor cores keep fewer digits; 0: never
    promoted: int = 0
    more: tuple[Product, ...] = ()
    reductions: tuple[TileReduction, ...] = ()

    @property
    def products(self) -> tuple[Product, ...]:
        return Product(self.name, self.left, self.right), *self.more

    def factors(self) -> list[Expr]:
        return [e for p in self.products for e in p[1:]]

    def everything(self) -> list[Expr]:
        return [*self.factors(), *exprs_of(self.items), *exprs_of(r.item for r in self.reductions),
                *(() if self.ragged is None else (self.ragged.ends,))]


@dataclass(frozen=True)
class Limit:
    """A limit of attention's mask: column `step` * row + `offset`. The offset is the same for all rows."""

    step: int  # 0 or 1
    offset: Index


@dataclass(frozen=True)
class AttentionKernel(AnySize):
    """A kernel of attention, in which loads of `node` have addresses. By its role it computes

        out       the result and the logarithms of the rows' sums, a block of rows at a time
        queries   the gradient of queries, a block of rows at a time
        keys      the gradients of keys, values and captured tensors, a block of columns at a time

    The mask is `column < limit` for all of `below`, `column >= limit` for all of `since`, and `rest`.
    """

    role: str
    node: Attention
    below: tuple[Limit, ...]
    since: tuple[Limit, ...]
    rest: Expr | None
    stores: tuple[tuple[str, Index], ...]
    # buffers that start as zero: their elements' variables and addresses
    cleared: tuple[tuple[str, tuple[Sym, ...], Index], ...]
    params: tuple[Param, ...]
    sizes: tuple[Sym, ...]
    typical: tuple[tuple[Sym, int], ...] = ()

    @property
    def origins(self) -> tuple[str, ...]:
        return self.node.origins

    def everything(self) -> list[Expr]:
        return list(self.node.exprs())


CHUNK = 4096  # the most elements of a row in one block of a table


@dataclass(frozen=True)
class TableKernel:
    """A map or a reduction of each row of a table: one launch for any number of tensors of any sizes.

    The table has a column of addresses for each pointer of `body` (which reads and writes at its one variable, or at a
    single place), then one of lengths. `blocks` has the work of each program: a row, and the first of up to CHUNK
    elements. A reduction gives one value for each block, next to those of the row's other blocks. The sizes are 2n + 1
    for n rows and for n blocks, because no code is specialized for an odd number, so that one kernel serves all; then
    the numbers that `body` computes with.
    """

    body: LoopKernel

    @property
    def sizes(self) -> tuple[Sym, ...]:
        return Sym("rows2"), Sym("count2"), *self.body.sizes

    @property
    def origins(self) -> tuple[str, ...]:
        return self.body.origins

    params: ClassVar[tuple[Param, ...]] = (Param("table", torch.int64, False), Param("blocks", torch.int64, False))

    @property
    def columns(self) -> tuple[Param, ...]:
        """The pointers whose addresses are in the table."""
        return self.body.params

    def steps(self) -> dict[str, int]:
        """Returns the number of a row's elements after which a block's pointer moves by one: one, or a whole block if a
        block has one value. Pointers that are not listed are at the same place for every block."""
        along = {name for name, at in self.body.accesses() if at.symbols()}
        return {p.name: 1 if p.name in along else CHUNK for p in self.columns
                if p.name in along or (self.body.inner and p.written)}


Kernel = LoopKernel | ScanKernel | ScatterKernel | ContractKernel
AnyKernel = Kernel | AttentionKernel | TableKernel


def sites_of(kernel: Kernel | AttentionKernel) -> dict[Bound, int]:
    """Returns everything that its indices are checked against, and the numbers under which it reports faults."""
    return heads(e.attr for e in walk(*kernel.everything()) if e.op == "check")


@dataclass(frozen=True)
class BufferPlan:
    """The memory of a buffer: an input, a fresh output, a place in the arena, or another buffer's memory.

    A "list" is an input with one tensor for each row of a table: it is given as their addresses.
    """

    name: str
    dtype: DType
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    place: str  # "input" | "list" | "output" | "arena" | "alloc" | "seed" | "extern" | "over"
    offset: int = 0  # bytes, in the arena
    over: str = ""  # the buffer whose memory it takes over


@dataclass(frozen=True)
class Launch:
    kernel: int  # position in Program.kernels
    args: tuple[str, ...]  # for a table: the buffers of one column after the other
    origins: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()  # the lengths of rows, for a table
    numbers: tuple[Sym, ...] = ()  # for a table: the numbers that all rows compute with
    stream: int = 0


@dataclass(frozen=True)
class Call:
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]
    outputs: tuple[int, ...] | None
    kind: str = "extern"
    origin: str = ""
    out: Any = None  # writes into the planned buffer of names[0] instead of returning a fresh one
    aliases: bool = False  # its result may share memory with an argument
    stream: int = 0


@dataclass(frozen=True)
class Copy:
    """dst[...] = src: a mutated input whose new value could not be written in place, or a tensor fetched from the
    host."""

    dst: str
    src: Value
    stream: int = 0
    fetches: bool = False


@dataclass(frozen=True)
class Fresh:
    """Allocates a buffer here, on this stream, although another stream writes to it first."""

    buffer: str
    stream: int = 0


# ---- streams ---------------------------------------------------------------------------------------------
#
# Stream 0 is the caller's current stream, found at each run; the others are in `Program.streams`. The host enqueues the
# steps on their streams in order, and a stream runs its steps in that order. Between streams nothing is ordered but by
# events, and by the host where it waits. `place`: the caller's own event, by its position among the objects that a run
# is given.


@dataclass(frozen=True)
class Record:
    """Records an event, which completes when all work enqueued on the stream before it has run. Each event has one
    Record."""

    event: int
    stream: int = 0
    place: int | None = None  # the caller may wait for it later, outside of this program


@dataclass(frozen=True)
class Wait:
    """Makes work enqueued on the stream from here on wait for the event. None: an event that was recorded before the
    run."""

    event: int | None
    stream: int = 0
    place: int | None = None


@dataclass(frozen=True)
class Synchronize:
    """Makes the host wait: for an event, for a stream, or for the whole device."""

    event: int | None = None
    stream: int | None = None
    place: int | None = None


@dataclass(frozen=True)
class Keep:
    """Tells the allocator that a stream uses a buffer: its memory is not reused before that stream is done."""

    buffer: str
    stream: int = 0


@dataclass(frozen=True)
class StreamNumbers:
    """A result that holds the numbers of these streams, by which a backward finds the streams of its forward."""

    streams: tuple[int, ...]


@dataclass(frozen=True)
class Fence:
    """Orders work on stream 0, or on streams of its own, with the caller's streams and events: it runs after all work
    they have so far, and before any that they get later."""

    # by their positions among the call's objects; of a backward: by their positions in the ticket
    streams: tuple[int, ...]
    before: tuple[int, ...] = ()  # events to wait for first
    after: tuple[int, ...] = ()  # events to record afterwards
    ticket: int | None = None  # the argument that holds the numbers of the streams
    numbers: int | None = None  # the result that receives them


Work = Launch | Call | Copy | Fresh
WORK = (Launch, Call, Copy, Fresh)  # steps that use memory
Step = Work | Record | Wait | Synchronize | Keep


def buffers_read(step: Step) -> set[str]:
    if isinstance(step, Launch):
        return set(step.args)
    if isinstance(step, Copy):
        return {step.dst, step.src.buffer}
    if isinstance(step, Call):
        return {v.buffer for v in values_in((step.args, step.kwargs))}
    return {step.buffer} if isinstance(step, (Keep, Fresh)) else set()


def values_in(x: object) -> Iterable[Value]:
    if isinstance(x, Value):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from values_in(y)


@dataclass(frozen=True)
class Program:
    """The steps in order, and all that the executor needs to run them. Equal programs do the same.

    It is called with a list of arguments: tensors, and numbers. `numbers` says how Python finds the numbers of a run;
    each reaches kernels as a word of 64 bits among their sizes.
    """

    inputs: tuple[str, ...]
    arguments: tuple[str, ...]  # at each position the input, or the name by which `numbers` refers to it
    numbers: tuple[tuple[Sym, Host], ...]
    kernels: tuple[AnyKernel, ...]
    steps: tuple[Step, ...]
    buffers: tuple[BufferPlan, ...]
    outputs: tuple[Any, ...]  # Value, Index, Host, StreamNumbers, number or None
    seeds: tuple[str, ...] = ()
    arena_bytes: int = 0
    frees: tuple[tuple[str, ...], ...] = ()  # for each step, the buffers that are dead after it
    notes: tuple[str, ...] = ()  # what was materialised and why
    # streams from 1 on, by their positions among the objects of a call; below zero: streams of its own
    streams: tuple[int, ...] = ()
    arriving: tuple[str, ...] = ()  # inputs that are ready on stream 0; others are ready wherever they are read
    leaving: tuple[str, ...] = ()  # buffers that have to be ready on stream 0 at the end
    ticket: str = ""  # of a backward: the argument that holds the numbers of its streams, as its forward saved them

    @cached_property
    def places(self) -> dict[str, BufferPlan]:
        """The buffers by name."""
        return {b.name: b for b in self.buffers}

    def __str__(self) -> str:
        """Prints every field, one line for each of its parts; sets are sorted."""
        parts = ((f.name, getattr(self, f.name)) for f in fields(self))
        text = "\n".join(f"{name}: {x}" for name, found in parts for x in (found if type(found) is tuple else (found,)))
        return re.sub(r"frozenset\(\{([^{}]*)\}\)", lambda m: f"{{{', '.join(sorted(m[1].split(', ')))}}}", text)

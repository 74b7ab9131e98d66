"""The loop language: values, the eight node kinds, and the graph that holds them.

A `Value` is a shape, a dtype and a map from its index to the index of a buffer; a view is another map
onto the same buffer and costs nothing. A node computes one or more buffers. No node owns memory: whether
a buffer becomes memory is the scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, ClassVar

import torch

from .capabilities import Capabilities
from .dtypes import DType
from .expr import Expr, held, load, loads, restart_names, walk
from .index import (
    ONE,
    ZERO,
    Atom,
    Dyn,
    Index,
    IndexLike,
    Op,
    Sym,
    as_index,
    from_atom,
    is_positive,
    offset_of,
    product,
)
from .numerics import FAST, Policy

Shape = tuple[Index, ...]


def dim_vars(shape: Sequence[IndexLike], prefix: str = "d") -> tuple[Sym, ...]:
    return tuple(Sym(f"{prefix}{i}", n) for i, n in enumerate(shape))


def as_indices(vars: Iterable[Sym]) -> tuple[Index, ...]:
    """Returns the variables as indices; a variable that can only be zero becomes zero.

    One whose range may be empty stays: a load that depends on it must stay in the loop that may never run.
    """
    return tuple(ZERO if v.hi == 0 and is_positive(v.size) else as_index(v) for v in vars)


def narrow(size: Index) -> DType:
    """The dtype for positions below a size: int32 if they fit, as wide as a float, which keeps vector lanes alike and
    halves the traffic."""
    top = size.bounds()[1]
    return torch.int32 if top is not None and top < 2**31 else torch.int64


def contiguous_strides(shape: Sequence[Index]) -> tuple[Index, ...]:
    out: list[Index] = []
    step = as_index(1)
    for n in reversed(shape):
        out.append(step)
        step = step * n
    return tuple(reversed(out))


@dataclass
class Buffer:
    """A named array. The node says how it is computed, the schedule where it is stored."""

    name: str
    shape: Shape
    dtype: DType
    strides: tuple[Index, ...] | None = None  # None: the schedule is free to choose
    alone: bool = False  # a call accesses all of the memory that it lies in

    @property
    def numel(self) -> Index:
        return product(self.shape)

    def place(self, index: Sequence[Index]) -> Index:
        """The address of an element. Strides of torch have max(1, n) for sizes n: where there is an element, that is
        n."""
        assert self.strides is not None, f"buffer {self.name} has no layout yet"
        return offset_of(index, [self._step(s) for s in self.strides])

    def _step(self, stride: Index) -> Index:
        if not any(isinstance(a, Op) and a.kind == "max" for a in stride.atoms()):
            return stride
        some = {product(sizes) for k in range(1, len(self.shape) + 1) for sizes in combinations(self.shape, k)}

        def positive(a: Atom) -> Index:
            size = (a.b if a.a is ONE else a.a) if isinstance(a, Op) and a.kind == "max" and ONE in (a.a, a.b) else None
            return from_atom(a) if size not in some else size

        return sum((product(map(positive, mono)) * coef for mono, coef in stride.terms), as_index(stride.const))


@dataclass(frozen=True)
class Value:
    """A lazy array: element i is element `index(i)` of `buffer`."""

    buffer: str
    shape: Shape
    dtype: DType
    index: tuple[Index, ...]  # over dim_vars(shape)
    number: bool = False  # a Python number known only at run time: promotes as a number, not as a tensor
    host: bool = False  # a scalar on the host next to tensors of a device
    strides: tuple[Index, ...] | None = None  # of a result: the index does not tell them for dimensions of size one
    offset: Index | None = None  # of a result without elements, where the index does not tell it
    # of a result: the number of equal results before it that are other objects, such as views of one tensor
    twin: int = 0

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Index:
        return product(self.shape)

    def at(self, where: Sequence[IndexLike]) -> tuple[Index, ...]:
        mapping = {v: as_index(i) for v, i in zip(dim_vars(self.shape), where, strict=True)}
        return tuple(i.subs(mapping) for i in self.index)

    def load(self, where: Sequence[IndexLike], mask: Expr | None = None) -> Expr:
        return held(load(self.buffer, self.at(where), self.dtype, mask), map(as_index, where))

    def view(self, shape: Sequence[IndexLike], fn: Callable[[tuple[Index, ...]], Sequence[IndexLike]]) -> Value:
        """The value of `shape` whose element i is element fn(i) of this one."""
        new = tuple(as_index(n) for n in shape)
        return Value(self.buffer, new, self.dtype, self.at(fn(as_indices(dim_vars(new)))))

    def is_whole(self, buffer: Buffer) -> bool:
        """Whether element i is element i of the buffer."""
        return self.shape == buffer.shape and self.index == as_indices(dim_vars(self.shape))


@dataclass(frozen=True)
class Host:
    """A number that Python computes when the program runs: an argument that is no tensor, a tensor's size, or a number
    computed from others."""

    text: str
    needs: frozenset[str] = frozenset()  # the numbers and buffers that it uses


@dataclass(frozen=True)
class Level:
    """A shortcut for elements of about one magnitude: they are scaled to the largest one and then just added."""

    top: Expr  # a carry: the largest magnitude
    total: Expr  # a carry: a sum at that scale
    size: Expr  # the magnitude of an element (over `left` of the combine)
    holds: Expr  # whether an element is near enough to the largest (over `left` and `top`)
    scaled: Expr  # an element at the common scale (over `left` and `top`)
    result: tuple[Expr, ...]  # a sum as components (over `total` and `top`)


@dataclass(frozen=True)
class Combine:
    """An associative combine of tuples, written as expressions over two sets of carries."""

    name: str
    left: tuple[Expr, ...]
    right: tuple[Expr, ...]
    result: tuple[Expr, ...]
    identity: tuple[Expr, ...]
    level: Level | None = None

    @property
    def dtypes(self) -> tuple[DType, ...]:
        return tuple(c.dtype for c in self.left)

    def needed(self, finish: Sequence[Expr], stretches: bool = False) -> list[int]:
        """Returns the components whose running values these expressions (over `left`) need, directly or through each
        other. `stretches`: also if whole runs of elements are combined, not just single elements."""
        places = {e: k for k, e in enumerate(self.left)}
        if stretches:
            places |= {e: k for k, e in enumerate(self.right)}
        found: set[int] = set()
        todo = [*finish]
        while todo:
            new = {places[e] for e in walk(todo.pop()) if e in places} - found
            found |= new
            todo += [self.result[k] for k in new]
        return sorted(found)

    def chained(self, components: Sequence[int]) -> list[int]:
        """Returns those components for which each step depends on the one before."""
        return [k for k in components if any(e in self.left for e in walk(self.result[k]))]


@dataclass(frozen=True)
class Node:
    """The common part of all nodes: the buffers it computes, the operator it came from, and those inlined into it."""

    kind: ClassVar[str] = "node"
    names: tuple[str, ...]
    origin: str = field(default="", kw_only=True)
    inlined: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(o for o in (*self.inlined, self.origin) if o))

    def exprs(self) -> tuple[Expr, ...]:
        return ()

    def reads(self) -> set[str]:
        return {e.attr[0] for e in loads(*self.exprs())}


@dataclass(frozen=True)
class Pointwise(Node):
    """names[0][i] = body(i) for i in vars. `laid`: stored in memory, in this order, for the sake of its readers."""

    kind: ClassVar[str] = "pointwise"
    vars: tuple[Sym, ...]
    body: Expr
    laid: bool = False

    def exprs(self) -> tuple[Expr, ...]:
        return (self.body,)


@dataclass(frozen=True)
class Reduce(Node):
    """names[k][kept vars] = the k-th component of inputs combined over the vars in `axes`."""

    kind: ClassVar[str] = "reduce"
    vars: tuple[Sym, ...]
    axes: frozenset[int]
    combine: Combine
    inputs: tuple[Expr, ...]

    def exprs(self) -> tuple[Expr, ...]:
        return self.inputs

    @property
    def kept(self) -> tuple[Sym, ...]:
        return tuple(v for i, v in enumerate(self.vars) if i not in self.axes)

    @property
    def reduced(self) -> tuple[Sym, ...]:
        return tuple(v for i, v in enumerate(self.vars) if i in self.axes)


@dataclass(frozen=True)
class Segment(Reduce):
    """A Reduce over one axis whose variable runs from `lo` to `hi`, read from memory (a bag's items)."""

    kind: ClassVar[str] = "segment"
    lo: Expr
    hi: Expr

    def exprs(self) -> tuple[Expr, ...]:
        return (*self.inputs, self.lo, self.hi)


@dataclass(frozen=True)
class Ragged:
    """A contraction's variable in parts, one for each value of `part`. A part ends at `ends` (an expression over
    `part`) and begins where the one before ends. Points beyond the last end are not computed.

    `part` is either a variable of its own that factors depend on, or a kept variable, if the depth is in parts.
    """

    var: Sym
    part: Sym
    ends: Expr


@dataclass(frozen=True)
class Contract(Reduce):
    """A Reduce that sums products of two factors: matrix products and convolutions. Most often, each factor has
    variables that the other one does not depend on, so that both are read repeatedly and kept in tiles. If there are
    two sums, they share a factor.

    Pointwise computations on its result are fused into its kernel, and so are those that compute its factors.
    """

    kind: ClassVar[str] = "contract"
    tf32: bool = field(default=False, kw_only=True)  # factors in float32 may be rounded to what tensor cores take
    # If not 0: sums of so many elements are added in the dtype of the sum, since tensor cores keep fewer digits in sums
    # of small floats. 0: tensor cores may sum everything.
    promoted: int = field(default=0, kw_only=True)
    ragged: Ragged | None = field(default=None, kw_only=True)

    def exprs(self) -> tuple[Expr, ...]:
        return self.inputs if self.ragged is None else (*self.inputs, self.ragged.ends)

    @property
    def factors(self) -> tuple[Expr, Expr] | None:
        """The factors of the first sum; None if one of them turned out to be a constant."""
        e = self.inputs[0]
        return (e.args[0], e.args[1]) if e.op == "mul" else None

    @property
    def is_tiled(self) -> bool:
        """Whether each factor has variables of its own, and there is anything to sum; else it is an ordinary Reduce."""
        if self.factors is None:
            return False
        left, right = (e.symbols() for e in self.factors)
        real = {v for v in self.vars if v.extent is not ONE}
        kept = real.difference(self.reduced)
        return bool(kept & left - right and kept & right - left and real.intersection(self.reduced))


@dataclass(frozen=True)
class Partial(Reduce):
    """A Reduce of a contraction's results, computed in its kernel. Along a reduced variable, the results have one value
    for each group of points, whose size the kernel chooses. `plain`: the same as a kernel of its own."""

    kind: ClassVar[str] = "partial"
    plain: Reduce


def unscaled(factor: Expr) -> tuple[Expr, Expr | None]:
    """Returns the value that a machine multiplies for a factor, before it is widened, and its scale (or None)."""
    core, scale = factor.args if factor.op == "mul" and factor.args[0].op == "cast" else (factor, None)
    return (core.args[0] if core.op == "cast" else core), scale


@dataclass(frozen=True)
class Scan(Node):
    """names[k][i] = finish[k] of inputs combined over vars[axis] from the start up to i.

    `finish` is written over the combine's left components; most often it is just these.
    """

    kind: ClassVar[str] = "scan"
    vars: tuple[Sym, ...]
    axis: int
    combine: Combine
    inputs: tuple[Expr, ...]
    reverse: bool
    finish: tuple[Expr, ...]

    def exprs(self) -> tuple[Expr, ...]:
        return self.inputs


@dataclass(frozen=True)
class Scatter(Node):
    """names[0] starts as init(out_vars); then, in order of vars, its element `target` becomes value, or is combined
    with it.

    `mode` is set, add, mul, min or max. If there is a `mask`, only the points where it holds take part. `unique`: no
    two of these share a target. `covers`: every element is written, so that its initial value does not matter.
    """

    kind: ClassVar[str] = "scatter"
    out_vars: tuple[Sym, ...]
    init: Expr
    vars: tuple[Sym, ...]
    target: tuple[Index, ...]
    value: Expr
    mode: str
    mask: Expr | None = None
    unique: bool = False
    covers: bool = False

    def exprs(self) -> tuple[Expr, ...]:
        inside = tuple(a.expr for t in self.target for a in t.atoms() if isinstance(a, Dyn))
        return (self.init, self.value, *inside, *(() if self.mask is None else (self.mask,)))


@dataclass(frozen=True)
class Extern(Node):
    """names = target(*args, **kwargs), called unchanged; args hold Values, Indices and plain data."""

    kind: ClassVar[str] = "extern"
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[int, ...] | None = None  # positions of the names in the returned tuple; None: one tensor
    out: Any = None  # the overload that writes its single result into given memory
    effect: bool = False  # it does more than its schema says, and runs even if its result is never read

    def values(self) -> list[Value]:
        out: list[Value] = []

        def visit(x: Any) -> None:
            if isinstance(x, Value):
                out.append(x)
            elif isinstance(x, (list, tuple)):
                for y in x:
                    visit(y)

        visit(self.args)
        visit([v for _, v in self.kwargs])
        return out

    def reads(self) -> set[str]:
        return {v.buffer for v in self.values()}


@dataclass(frozen=True)
class Sort(Extern):
    """A stable sort where a machine has a library for it (see `Capabilities.sorts`; otherwise ir/sort.py)."""

    kind: ClassVar[str] = "sort"


@dataclass(frozen=True)
class Library(Extern):
    """matmul, convolution, attention where a machine has a library for them (see `Capabilities.contracts`)."""

    kind: ClassVar[str] = "library"


class Send(Extern):
    """A tensor that is copied to the host, to be fetched later; its device memory is free afterwards."""

    kind: ClassVar[str] = "send"


class Fetch(Extern):
    """A sent tensor, copied back to the device."""

    kind: ClassVar[str] = "fetch"


@dataclass(frozen=True)
class Turn:
    """A switch to another stream from a node on; `steps` of the program come first."""

    at: int  # the number of nodes before it
    stream: int
    steps: tuple[Any, ...] = ()


@dataclass
class Graph:
    """Values and nodes in the order of creation; verified, without memory yet."""

    inputs: list[str] = field(default_factory=list)
    # as in Program, including numbers; [] if there are only the inputs
    arguments: list[str] = field(default_factory=list)
    numbers: dict[Sym, Host] = field(default_factory=dict)
    typical: dict[Sym, int] = field(default_factory=dict)  # sizes at capture
    nodes: list[Node] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)  # Value, Index, number or None
    mutations: list[tuple[str, Value]] = field(default_factory=list)  # input buffer <- value, at the end
    seeds: list[str] = field(default_factory=list)  # int64 scalars that each run draws anew
    donated: set[str] = field(default_factory=set)  # inputs that only this run needs
    equal: dict[tuple[Index, Index], None] = field(default_factory=dict)  # sizes that lowerings take to be equal
    origin: str = ""
    # where its tensors are: ATen's kernels save different tensors for gradients on different devices
    device: str = "cpu"
    capabilities: Capabilities = Capabilities("any")  # of the target machine; a lowering may choose a form by it
    policy: Policy = FAST  # where results may differ from eager's; lowerings choose by it, too
    own: frozenset[str] = frozenset()  # operators that become kernels although a library has them
    turns: list[Turn] = field(default_factory=list)  # switches of streams; none: all work is on the caller's
    streams: list[int] = field(default_factory=list)  # these four as in Program
    arriving: list[str] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    ticket: str = ""

    def __post_init__(self) -> None:
        restart_names()

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def new_name(self) -> str:
        return f"b{len(self.buffers)}"

    def add_buffer(self, shape: Sequence[Index], dtype: DType, name: str | None = None,
                   strides: tuple[Index, ...] | None = None) -> Buffer:
        buffer = Buffer(name or self.new_name(), tuple(shape), dtype, strides)
        self.buffers[buffer.name] = buffer
        return buffer

    def add_input(self, shape: Sequence[IndexLike], dtype: DType, strides: Sequence[IndexLike] | None = None) -> Value:
        sizes = tuple(as_index(n) for n in shape)
        laid = contiguous_strides(sizes) if strides is None else tuple(as_index(s) for s in strides)
        buffer = self.add_buffer(sizes, dtype, f"in{len(self.inputs)}", laid)
        self.inputs.append(buffer.name)
        return self.whole(buffer.name)

    def agree(self, a: Sequence[Index], b: Sequence[Index]) -> bool:
        """Whether two shapes may be equal. Sizes unknown before the run are noted in `equal`, to be checked then."""
        pairs = [(m, n) for m, n in zip(a, b, strict=True) if m is not n]
        self.equal |= dict.fromkeys(pairs)
        return not any(m.is_const and n.is_const for m, n in pairs)

    def add(self, node: Node) -> tuple[Value, ...]:
        self.nodes.append(node)
        return tuple(self.whole(n) for n in node.names)

    def whole(self, name: str) -> Value:
        b = self.buffers[name]
        return Value(name, b.shape, b.dtype, as_indices(dim_vars(b.shape)))

    def __str__(self) -> str:
        lines = [f"{n}: {_typed(self.buffers[n])}" for n in self.inputs]
        lines += [f"{', '.join(n.names)}: {_typed(self.buffers[n.names[0]]) if n.names else ''} = {describe(n)}"
                  f"{'  # ' + n.origin if n.origin else ''}" for n in self.nodes]
        lines += [f"{name} <- {v.buffer}" for name, v in self.mutations]
        lines.append("return " + ", ".join(o.buffer if isinstance(o, Value) else str(o) for o in self.outputs))
        return "\n".join(lines)


def _typed(b: Buffer) -> str:
    return f"{str(b.dtype).removeprefix('torch.')}[{', '.join(map(str, b.shape))}]"


def describe(n: Node) -> str:
    if isinstance(n, Pointwise):
        return f"pointwise {n.body!r}"
    if isinstance(n, Segment):
        return f"segment {n.combine.name} {n.inputs!r} from {n.lo!r} to {n.hi!r}"
    if isinstance(n, Reduce):
        return f"reduce {n.combine.name} over {list(n.reduced)} {n.inputs!r}"
    if isinstance(n, Scan):
        return f"scan {n.combine.name} along d{n.axis}{' reversed' if n.reverse else ''} {n.inputs!r}"
    if isinstance(n, Scatter):
        return f"scatter {n.mode} {n.value!r} at {n.target!r}, from {n.init!r}"
    if not isinstance(n, Extern):
        return f"{n.kind} {n.exprs()!r}"
    return f"{n.kind} {n.target}({', '.join(x.buffer if isinstance(x, Value) else repr(x) for x in n.args)})"

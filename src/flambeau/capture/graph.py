"""Turns a captured ATen graph into a Graph: each operator by its lowering, or as a call of ATen."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from flambeau.errors import GuessedShapeError, UnsupportedError
from flambeau.ir import build
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import FP8, SUPPORTED, is_float
from flambeau.ir.expr import const, walk
from flambeau.ir.index import Sym
from flambeau.ir.nodes import Buffer, Extern, Fetch, Graph, Host, Library, Node, Scan, Scatter, Send, Value
from flambeau.ir.numerics import FAST, Policy
from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import facts, is_exact
from flambeau.ops.formulas import NotAnExpression
from flambeau.ops.registry import HIGHER, OutOfRange, load_at
from flambeau.runtime.launch_plan import DONATED, Held
from flambeau.runtime.operator_calls import random_state, read_here, run_and_save, run_with
from flambeau.runtime.placement import CPU, flat, movable
from flambeau.runtime.streams.host_copies import fetch, send
from flambeau.torch_compat.fake import FakeScriptObject
from flambeau.torch_compat.ops import OpOverload
from flambeau.torch_compat.streams import NUMBERS

from . import random_replay
from .eager_dtypes import eager_has_kernel
from .in_place_forms import in_place_form
from .other_devices import Elsewhere
from .storage import Storage, dense, is_view, writes_twice
from .stream_turns import StreamTurns, is_streamed, saved_streams
from .symbols import Symbols

aten = torch.ops.aten


@dataclass(frozen=True)
class RunNumber:
    """A number argument that is passed at run time as the bits of a 64-bit word."""

    dtype: torch.dtype  # for a float, the word holds a double
    number: bool  # in type promotion, it counts as a Python number


@dataclass
class Captured:
    graph: Graph
    symbols: Symbols
    externs: dict[str, int] = field(default_factory=dict)  # operators without a lowering, counted
    choices: list[str] = field(default_factory=list)  # for each product, whose kernel was chosen and why


def capture(gm: fx.GraphModule, caps: Capabilities, exclude: frozenset[str] = frozenset(),
            device: torch.device = CPU, policy: Policy = FAST, own: frozenset[str] = frozenset()) -> Captured:
    """Lower every node of gm. Nodes named in `exclude`, or not on `device`, become calls of ATen; so do products that a
    library supports, unless they are named in `own`."""
    ops_loaded()
    c = Captured(Graph(capabilities=caps, device=device.type, policy=policy, own=own), Symbols())
    Lowering(gm, c, exclude, device).run()
    return c


class Lowering:
    def __init__(self, gm: fx.GraphModule, c: Captured, exclude: frozenset[str], device: torch.device) -> None:
        self.gm, self.c, self.g = gm, c, c.graph
        self.exclude, self.device = exclude, device
        self.elsewhere = Elsewhere(device)
        self.env: dict[fx.Node, Any] = {}
        self.storage = Storage(self)
        self.done: set[fx.Node] = set()  # nodes covered by an earlier call
        self.scanned: set[str] = set()
        self.looked_at = 0  # number of nodes that `scanned` covers
        self.composite: list[tuple[Any, Host]] = []  # sizes that are more than one symbol, and where they can be read
        self.turns: StreamTurns | None = None

    def run(self) -> None:
        self.g.typical = self.c.symbols.typical  # lowerings use them for decisions
        self.turns = turns = StreamTurns(self.gm, self.g) if is_streamed(self.gm) else None
        for n in self.gm.graph.nodes if turns is None else turns.nodes(self.gm.graph):
            if n.op == "placeholder":
                self.placeholder(n, f"_{len(self.g.arguments)}")
            elif n.op == "get_attr":
                self.env[n] = self.attribute(n)
            elif n.target is saved_streams:
                pass  # at the output, when all streams are known
            elif n.op == "call_function":
                if turns is not None and n.target is not operator.getitem:
                    self.only_here(n)
                    turns.enter(n)
                with build.building(self.g, n.name):
                    self.env[n] = self.call(n)
            elif n.op == "output":
                made = len(self.g.nodes)
                if turns is not None:
                    self.env.update((m, turns.saved(m.args[0])) for m in n.all_input_nodes if m.target is saved_streams)
                self.output(n)
                if turns is not None:
                    if len(self.g.nodes) > made:
                        raise UnsupportedError("a result that is laid out anew, in a function that uses streams")
                    turns.end()
            else:
                raise UnsupportedError(f"{n.op} {n.target} in a captured graph")
        self.solve_sizes()
        self.g.numbers |= self.c.symbols.hosts

    # ---- inputs and outputs ----------------------------------------------------------------------------

    def placeholder(self, n: fx.Node, name: str) -> None:
        """Add an argument. `name`: its name, unless it is a tensor."""
        val = n.meta.get("val")
        self.g.arguments.append(name)
        if NUMBERS in n.meta:
            assert self.turns is not None
            self.turns.take_saved(n.meta[NUMBERS], name)
        elif isinstance(val, torch.Tensor):
            v = self.add_tensor(val)
            self.elsewhere.note(v, val)
            self.g.arguments[-1] = v.buffer
            if n.meta.get(DONATED):
                self.g.donated.add(v.buffer)
            self.env[n] = v
            self.bind_sizes(v, val)
        elif isinstance(val, RunNumber):
            self.env[n] = self.run_number(val, name)
        elif isinstance(val, (torch.SymInt, torch.SymFloat)):
            self.env[n] = self.c.symbols.index(val) if isinstance(val, torch.SymInt) else self.c.symbols.host(val)
            self.bind(val, Host(name), force=True)
        elif val is None or isinstance(val, (int, float, bool)):
            self.env[n] = val
        elif isinstance(val, FakeScriptObject):  # e.g. a process mesh: passed unchanged to operators and results
            self.env[n] = Host(name)
        else:
            raise UnsupportedError(f"argument {n.name} of type {type(val).__name__} in a captured graph")

    def run_number(self, val: RunNumber, name: str) -> Value:
        if is_float(val.dtype) and torch.float64 not in self.g.capabilities.dtypes:
            raise UnsupportedError("numbers of the run are doubles, which the device does not have")
        with build.building(self.g, "number"):
            return replace(build.run_number(Host(name), val.dtype), number=val.number, host=True)

    def only_here(self, n: fx.Node) -> None:
        """Refuse a node on another device: streams only order work on their own device."""
        for t in flat(n.meta.get("val")):
            if isinstance(t, torch.Tensor) and t.device != self.device:
                raise UnsupportedError(f"{n.target} on {t.device}, in a function that uses streams of {self.device}")

    def add_tensor(self, val: torch.Tensor) -> Value:
        to = self.c.symbols.index
        return self.g.add_input([to(s) for s in val.shape], val.dtype, [to(s) for s in val.stride()])

    def bind_sizes(self, v: Value, t: torch.Tensor) -> None:
        for k, size in enumerate(t.shape):
            self.bind(size, Host(f"{v.buffer}.shape[{k}]", frozenset((v.buffer,))))
        for k, stride in enumerate(t.stride()):
            if isinstance(stride, torch.SymInt) and stride.node.expr.is_Symbol:
                self.bind(stride, Host(f"{v.buffer}.stride({k})", frozenset((v.buffer,))))

    def bind(self, size: Any, source: Host, force: bool = False) -> None:
        if not isinstance(size, (torch.SymInt, torch.SymFloat)):
            return
        if not size.node.expr.is_Symbol:
            self.composite.append((size, source))
            return
        s = self.c.symbols.symbol(size.node.expr, size.node.shape_env)
        if force or s not in self.g.numbers:
            self.g.numbers[s] = source

    def solve_sizes(self) -> None:
        """Solve for missing size symbols: a backward graph may be given s + 1 but never s itself."""
        for k, (size, source) in enumerate(self.composite):
            found = self.c.symbols.solve(size, f"part{k}", self.g.numbers)
            if found is not None:
                self.g.numbers |= {Sym(f"part{k}"): source, found[0]: found[1]}

    def attribute(self, n: fx.Node) -> Any:
        held = operator.attrgetter(str(n.target))(self.gm)
        if isinstance(held, fx.GraphModule):
            return Function(self, held)
        return self.constant(held) if isinstance(held, torch.Tensor) else held

    def constant(self, t: torch.Tensor) -> Value:
        """A tensor held by the graph: small ones become numbers in the kernels' text, others the result of a call."""
        number = t.item() if t.numel() == 1 and t.dtype in SUPPORTED else None
        with build.building(self.g):
            if number is not None and t.device == self.device:
                return build.pointwise([int(s) for s in t.shape], lambda _: const(number, t.dtype))
            held, = build.extern(Held(t), (), {}, [(t.shape, t.dtype, t.stride())])
        assert held is not None
        self.storage.borrowed.add(held.buffer)
        self.elsewhere.note(held, t)
        if number is not None and movable(t):
            self.elsewhere.note_number(held, number)
        return held

    def output(self, n: fx.Node) -> None:
        results = n.args[0]
        assert isinstance(results, (list, tuple))
        outs: list[Any] = []
        made: dict[fx.Node, Value] = {}
        alike: dict[Value, int] = {}
        for given in n.all_input_nodes:
            if isinstance(self.env[given], Value):
                self.storage.lay_out(given)
        for r in results:
            if isinstance(r, fx.Node) and r.target is aten.copy_.default:
                r = r.args[0]  # copy_ returns the input that it wrote to
            v = self.env[r] if isinstance(r, fx.Node) else r
            if isinstance(v, Value) and isinstance(r, fx.Node):
                if r not in made:
                    v = self.storage.result(r)
                    made[r] = replace(v, twin=alike.setdefault(v, 0))
                    alike[v] += 1
                v = made[r]
            outs.append(v)
        self.g.outputs = outs

    # ---- calls -----------------------------------------------------------------------------------------

    def call(self, n: fx.Node) -> Any:
        target = n.target
        val = n.meta.get("val")
        if target is operator.getitem:
            seq, k = n.args
            return self.env[seq][k]  # type: ignore[index]
        if target is aten._local_scalar_dense.default:
            self.read_number(n)
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            return self.c.symbols.index(val) if isinstance(val, torch.SymInt) else val
        if isinstance(val, (torch.SymFloat, torch.SymBool)):
            return self.c.symbols.host(val)
        if isinstance(val, (float, bool)):
            return val
        if target in HIGHER and (rule := facts(target).keeps_less) is not None:
            n.args = rule(None, *n.args)
        args, kwargs = self.arguments(n)
        if n in self.done:
            return args[0]
        if target is aten.copy_.default:
            return self.mutate(args[0], args[1], negated=n.args[0].meta["val"].is_neg())  # type: ignore[union-attr]
        if target in (send, fetch):
            kind = Send if target is send else Fetch
            made = build.extern(target, args, kwargs, self.metas(target, [val]), False, kind)
            self.bind_results(made, [val])
            return made[0]
        if target in (random_replay.RUN_AND_SAVE, random_replay.RUN_WITH):
            return self.replayed(n, args, kwargs)
        if facts(target).same and self.elsewhere.is_constant(args[0]):
            return args[0]  # nothing writes to it, and it is copied before it is returned
        if facts(target).reads_memory:
            args = self.in_memory(n, args)
        if writes_twice(n):
            return self.storage.called(n)
        # A copy of an argument's whole storage would have to copy the buffer's other content too.
        nothing = self.device.type == "cpu" and computes_nothing(n) and not facts(target).copies_storage
        if isinstance(target, OpOverload) and n.name not in self.exclude and not nothing and self.lowerable(n, target):
            before = len(self.g.nodes)
            out = self.lowered(target, self.readable(args), self.readable(kwargs))
            if out is not NotImplemented and self.computable(self.g.nodes[before:]) and all(self.agreed()):
                return self.settle(n, out)
            del self.g.nodes[before:]
            self.g.equal.clear()
        if target in HIGHER and n.name not in self.exclude and self.takes_functions(n):
            before = len(self.g.nodes)
            out = HIGHER[target](*self.readable(args), **self.readable(kwargs))
            if out is not NotImplemented and self.computable(self.g.nodes[before:]) and all(self.agreed()):
                return self.settle_all(n, out)
            del self.g.nodes[before:]
            self.g.equal.clear()
        # Eager's kernels choose their summation order by strides too, and some read overlapping inputs wrongly
        # (median). Library products in fast numerics take the strides as they are.
        if self.g.policy.exact or not facts(target).library:
            args, kwargs = fx.node.map_aggregate((n.args, n.kwargs), self.storage.passed)
        if (apart := self.without_last_step(n, args)) is not None:
            args, step = apart
            return self.settle(n, step(self.extern(n, args, kwargs, counted=not nothing)))
        return self.extern(n, args, kwargs, counted=not nothing)

    def without_last_step(self, n: fx.Node, args: Sequence[Any]) -> Any:
        """The arguments of a library call without its last step, and that step, if it can fuse with what follows
        instead of being a separate kernel; else None."""
        last = facts(n.target).last_step
        if last is None or self.g.policy.exact or not self.g.capabilities.waits_for_memory:
            return None
        taken_in = any(u.target in LOWERINGS and not facts(u.target).library for u in n.users)
        return last(*args) if taken_in else None

    def arguments(self, n: fx.Node) -> tuple[Any, Any]:
        return fx.node.map_aggregate(n.args, self.lookup), fx.node.map_aggregate(n.kwargs, self.lookup)

    def in_memory(self, n: fx.Node, args: Any) -> Any:
        """The arguments of an operator that looks at the memory of its first argument."""
        x = n.args[0]
        if not isinstance(x, fx.Node):
            return args
        schema = n.target._schema.arguments  # type: ignore[union-attr]
        # With explicit strides it may read beyond its argument's elements, even if it passes no storage offset.
        beyond = any(a.name == "storage_offset" for a in schema)
        return (self.storage.from_start(x) if beyond else self.storage.strided(x), *args[1:])

    def agreed(self) -> list[bool | None]:
        """For each pair of sizes that a lowering assumed to be equal, whether they are equal."""
        pairs, self.g.equal = self.g.equal, {}
        return [self.c.symbols.same(a, b) for a, b in pairs]

    def computable(self, nodes: Sequence[Node]) -> bool:
        """Whether the machine supports everything that the nodes need."""
        caps = self.g.capabilities
        lacking = caps.missing | caps.inexact if self.g.policy.exact else caps.missing
        lacks = bool(lacking) or caps.dtypes != SUPPORTED
        for node in nodes:
            inside = [e for e in walk(*node.exprs()) if not (caps.reads_doubles and build.is_word(e))] if lacks else []
            if any(e.op in lacking or e.dtype not in caps.dtypes for e in inside):
                return False
            if isinstance(node, Scatter) and node.mode != "set" and not caps.joins(node.mode, node.value.dtype):
                return False
        return True

    def readable(self, args: Any) -> Any:
        """Make run-time numbers and CPU scalars in the arguments readable for kernels."""

        def value(x: Any) -> Any:
            if not isinstance(x, Host):
                return self.elsewhere.brought(x)
            return replace(build.run_number(Host(f"word({x.text})", x.needs), torch.float64), number=True)

        return fx.node.map_aggregate(args, value)

    def lookup(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.env[x]
        if isinstance(x, torch.SymInt):
            return self.c.symbols.index(x)
        if isinstance(x, (torch.SymFloat, torch.SymBool)):
            return self.c.symbols.host(x)
        return x

    def lowered(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Apply the operator's lowering to these arguments; NotImplemented if ATen has to be called."""
        try:
            return LOWERINGS[target](*args, **kwargs) if target in LOWERINGS else NotImplemented
        except OutOfRange:  # ATen raises the error when it runs
            return NotImplemented

    def lowerable(self, n: fx.Node, target: OpOverload) -> bool:
        if target not in LOWERINGS:
            return False
        if (needs := facts(target).needs) is not None and not getattr(self.g.capabilities, needs):
            return False
        given, made = ([t for x in values for t in flat(x) if isinstance(t, torch.Tensor)]
                       for values in ([a.meta.get("val") for a in n.all_input_nodes], [n.meta.get("val")]))
        if self.g.policy.exact and not is_exact(target, self.g.policy.kernels, {t.dtype for t in (*given, *made)}):
            return False
        dtypes = SUPPORTED
        if is_view(target) or facts(target).takes_fp8:
            dtypes |= self.g.capabilities.dtypes & FP8
        return all(supported(t, dtypes) and (t.device == self.device or movable(t)) for t in given) and all(
            supported(t, dtypes) and t.device == self.device for t in made) and eager_has_kernel(
                target, n.args, n.kwargs, self.device)

    def takes_functions(self, n: fx.Node) -> bool:
        """Whether a higher-order operator may be lowered; not in exact numerics, where its parts must round alike."""
        known = [t for a in (n, *n.all_input_nodes) for t in flat(a.meta.get("val")) if isinstance(t, torch.Tensor)]
        return not self.g.policy.exact and all(
            supported(t, SUPPORTED) and t.device == self.device for t in known)

    def settle_all(self, n: fx.Node, out: Sequence[Any]) -> list[Any]:
        """`settle` for several results, some of which are lists."""
        made = []
        for v, m in zip(out, n.meta["val"], strict=True):
            part = fx.Node(n.graph, n.name, n.op, n.target, (), {})
            part.meta["val"] = m
            made.append(self.settle(part, v) if v is not None else None)
        return made

    def settle(self, n: fx.Node, out: Any) -> Any:
        """Check a lowering's results against torch's metadata, and take over its memory order."""
        val = n.meta.get("val")
        values = list(out) if isinstance(out, (list, tuple)) else [out]
        metas = list(val) if isinstance(val, (list, tuple)) else [val]
        if len(values) != len(metas):
            raise AssertionError(f"lowering of {n.target} returns {len(values)} values, torch says {len(metas)}")
        for k, (v, m) in enumerate(zip(values, metas, strict=True)):
            if not isinstance(v, Value) or not isinstance(m, torch.Tensor):
                continue
            shape = tuple(self.c.symbols.index(s) for s in m.shape)
            if v.dtype is not m.dtype or len(shape) != len(v.shape) or not self.g.agree(
                    shape, v.shape) or False in self.agreed():
                raise AssertionError(f"lowering of {n.target} gives {v.dtype}{list(v.shape)}, "
                                     f"torch says {m.dtype}{list(shape)}")
            b = self.g.buffers[v.buffer]
            strides = tuple(self.c.symbols.index(s) for s in m.stride())
            if b.strides is None and v.is_whole(b) and dense(shape, strides):
                b.strides = strides
            # Use numbers for sizes that a guard fixes, because lowerings broadcast by them.
            known = tuple(a if a.is_const else b for a, b in zip(shape, v.shape, strict=True))
            if known != v.shape:
                values[k] = v.view(known, lambda i: i)
        return values if isinstance(out, (list, tuple)) else values[0]

    def mutate(self, dst: Value, src: Value, negated: bool) -> Value:
        """Copy a value into an input. `negated`: the input's memory holds the negatives of its values."""
        if dst.buffer not in self.g.inputs:
            raise UnsupportedError("copy_ into something that is not an input of the graph")
        b = self.g.buffers[dst.buffer]
        if not dst.is_whole(b):
            raise UnsupportedError("copy_ into a part of an input")
        if dst in self.elsewhere or src in self.elsewhere or dst.dtype not in SUPPORTED:  # torch copies it
            if dst.shape != src.shape or dst.dtype is not src.dtype:
                raise UnsupportedError("a copy_ that is not a kernel, and a cast or a broadcast as well")
            self.g.mutations.append((dst.buffer, src))
            return src
        if not negated and self.can_write_to(b, src):
            self.g.mutations.append((dst.buffer, src))
            return src
        with build.building(self.g, "copy_"):
            new = build.pointwise(dst.shape, lambda i: -load_at(src, i) if negated else load_at(src, i), dst.dtype)
        # With the strides of the target, gaps included, the kernel can write to the target directly.
        self.g.buffers[new.buffer].strides = b.strides
        self.g.mutations.append((dst.buffer, new))
        return new

    def can_write_to(self, target: Buffer, v: Value) -> bool:
        """Whether the scan or scatter that makes a value can write to `target`. These would not fuse with a copy."""
        b = self.g.buffers[v.buffer]
        return (v.buffer in self.by_scans() and all(v.buffer != other.buffer for _, other in self.g.mutations)
                and v.is_whole(b) and b.shape == target.shape and b.dtype is target.dtype
                and b.strides == target.strides)

    def by_scans(self) -> set[str]:
        """The names of values made by scans and scatters."""
        new, self.looked_at = self.g.nodes[self.looked_at:], len(self.g.nodes)
        self.scanned.update(name for n in new if isinstance(n, (Scan, Scatter)) for name in n.names)
        return self.scanned

    def extern(self, n: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], counted: bool = True) -> Any:
        target: Any = n.target
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda x: x.gm if isinstance(x, Function) else x)
        form = in_place_form(n)
        if form is not None:
            target = form.op
            self.done.update(form.done)
        written = () if form is None else form.written
        library = facts(target).library and not self.g.capabilities.contracts
        kind = Library if library else Extern
        if kind is Extern and counted:
            self.c.externs[str(target)] = self.c.externs.get(str(target), 0) + 1
        val: Any = n.meta.get("val")
        several = isinstance(val, (list, tuple))
        if has_guessed_shape(target, val if several else [val]):
            raise GuessedShapeError(f"torch has no rule for the shape of {target}")
        metas = self.metas(target, val if several else [val])
        if several:  # unused results may be absent at run time, whatever torch's shape rule says
            taken = {u.args[1] for u in n.users if u.target is operator.getitem}
            metas = [m if k in taken or len(taken) < len(n.users) else None for k, m in enumerate(metas)]
            metas = metas[:len(metas) - len(written)]
        out = facts(target).out if not several and val is not None and not kwargs and is_float(val.dtype) \
            and all(isinstance(s, int) for s in val.shape) and val.is_contiguous() \
            and val.device == self.device else None
        made = build.extern(target, tuple(args), dict(kwargs), metas, several, kind, out, n.is_impure())
        self.bind_results(made, val[:len(made)] if several else [val])
        if is_view(target):
            self.storage.borrowed.update(v.buffer for v in made if v is not None)
        if several:
            return [*made, *(args[k] for k in written)]
        return made[0] if made else None

    def metas(self, target: Any, vals: Sequence[Any]) -> list[Any]:
        """(shape, dtype, strides) of each tensor that a call returns. Integers need none: they follow from sizes, and
        the node that extracts one has its value."""
        to = self.c.symbols.index
        for m in vals:
            if m is not None and not isinstance(m, (torch.Tensor, torch.SymInt, int)):
                raise UnsupportedError(f"{target} returns a {type(m).__name__}")
        return [([to(n) for n in m.shape], m.dtype, [to(n) for n in m.stride()]) if isinstance(m, torch.Tensor)
                else None for m in vals]

    def bind_results(self, made: Sequence[Value | None], vals: Sequence[Any]) -> None:
        for v, m in zip(made, vals, strict=True):
            if isinstance(m, torch.Tensor) and v is not None:
                self.elsewhere.note(v, m)
                self.bind_sizes(v, m)

    def read_number(self, n: fx.Node) -> None:
        """Read a number of data: its symbol becomes the number in a value, which is in memory from here on."""
        x: fx.Node = n.args[0]  # type: ignore[assignment]
        held, = build.extern(read_here, (self.env[x],), {}, self.metas(n.target, [x.meta["val"]]))
        assert held is not None
        val, found = n.meta["val"], Host(f"{held.buffer}.item()", frozenset((held.buffer,)))
        if isinstance(val, torch.SymBool):  # torch compares an integer with one
            for s in val.node.expr.free_symbols:
                self.g.numbers[self.c.symbols.symbol(s, val.node.shape_env)] = replace(found, text=f"int({found.text})")
        self.bind(val, found)

    def replayed(self, n: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a random operator that the forward runs and the backward repeats."""
        val = random_replay.results(n)
        several = isinstance(val, (list, tuple))
        vals = list(val) if several else [val]
        save = n.target is random_replay.RUN_AND_SAVE
        state = [u.meta["val"] for u in n.users if save and u.args[1] == 0]
        # The size of the state is a symbol of its own, which only appears in the node that extracts the state.
        device = vals[0].device
        before = state[:1] or ([random_state(device)] if save else [])
        op = str(n.args[0 if save else 1])
        self.c.externs[op] = self.c.externs.get(op, 0) + 1
        run = run_and_save if save else run_with
        made = build.extern(run, (device, *args), dict(kwargs), self.metas(op, [*before, *vals]), True)
        self.bind_results(made, [*before, *vals])
        out = list(made[len(before):]) if several else made[-1]
        return [made[0], out] if save else out


class Function:
    """A subgraph as a function of values: it is lowered where it is called."""

    def __init__(self, outside: Lowering, gm: fx.GraphModule) -> None:
        self.outside, self.gm = outside, gm

    def __call__(self, *values: Any) -> list[Any]:
        """Lower the body for these values; returns its results. Raises NotAnExpression for anything else than
        expressions."""
        inside = Lowering(self.gm, self.outside.c, frozenset(), self.outside.device)
        given = iter(values)
        for n in self.gm.graph.nodes:
            if n.op == "placeholder":
                inside.env[n] = next(given)
            elif n.op == "get_attr":
                inside.env[n] = inside.attribute(n)
            elif n.op == "output":
                found, = n.args
                return [inside.lookup(x) for x in (found if isinstance(found, (list, tuple)) else (found,))]
            else:
                inside.env[n] = self.called(inside, n)
        raise UnsupportedError("a function without results")

    def called(self, inside: Lowering, n: fx.Node) -> Any:
        val, (args, kwargs) = n.meta.get("val"), inside.arguments(n)
        if n.target is operator.getitem:
            return args[0][args[1]]
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            return inside.c.symbols.index(val) if isinstance(val, torch.SymInt) else val
        out = inside.lowered(n.target, inside.readable(args), inside.readable(kwargs))
        if out is NotImplemented:
            raise NotAnExpression
        return out


def has_guessed_shape(op: Any, vals: Sequence[Any]) -> bool:
    """Whether torch guessed the result's shape by running the operator on zeros, unaware that data decides it."""
    sizes = [n for t in vals if isinstance(t, torch.Tensor) for n in t.shape]
    return facts(op).guessed and all(isinstance(n, int) for n in sizes)


def computes_nothing(n: fx.Node) -> bool:
    """Whether there are no elements to compute, or none to compute from, for all run-time sizes. Eager's kernel is then
    called, since some check their indices regardless."""
    of = n.args[0].meta.get("val") if n.args and isinstance(n.args[0], fx.Node) else None
    made, given = ([any(isinstance(m, int) and m == 0 for m in t.shape) for t in found if isinstance(t, torch.Tensor)]
                   for found in (flat(n.meta.get("val")), (of,)))
    return not is_view(n.target) and (any(given) or (all(made) and bool(made)))  # in a list, some may have elements


def supported(t: torch.Tensor, dtypes: Set[torch.dtype]) -> bool:
    """Whether kernels can read it: a negated view (a conjugate's imaginary part) holds negated values."""
    return t.dtype in dtypes and t.layout is torch.strided and not t.is_quantized and not t.is_neg()

"""Builds a graph of one eager operator call, and the program for calls like it.

The graph contains the functional operator, and at the end a copy into the arguments that the form writes to. Composite
operators, torch's or ours, are decomposed first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from flambeau.capture.decompositions import table
from flambeau.capture.eager_strides import settle_strides, settled
from flambeau.capture.graph import Captured, RunNumber
from flambeau.capture.size_samples import SizeSamples
from flambeau.capture.storage import is_view
from flambeau.config import config
from flambeau.errors import CompileError, UnsupportedError
from flambeau.ir.expr import cast, index_value, walk, where
from flambeau.ir.index import ZERO, Dyn
from flambeau.ir.lines import is_dense, overlapping
from flambeau.ir.program import Call, Copy
from flambeau.ops import LOWERINGS
from flambeau.ops.facts import facts
from flambeau.pipeline import Options, compiled
from flambeau.runtime.executor import Known, write
from flambeau.runtime.launch_plan import LaunchPlan, Run
from flambeau.runtime.placement import flat
from flambeau.targets.base import Target, get_target
from flambeau.torch_compat.fake import FakeTensorMode, unset_fake_temporarily
from flambeau.torch_compat.fx import LazyGraphModule
from flambeau.torch_compat.ops import OpOverload

from .call_recorder import CallRecorder
from .operator_forms import OperatorForm

aten = torch.ops.aten

Arguments = tuple[Any, ...]


# ---- arguments -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorLike:
    """The properties of a tensor that a program depends on, without its memory."""

    shape: tuple[Any, ...]  # ints, or SymInts in a program for many shapes
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    overlaps: bool
    same: int  # index of the first argument that is the same tensor; the gate's key says no more

    @property
    def is_dense(self) -> bool:
        return is_dense(self.shape, self.strides)

    def fake(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Number:
    """A scalar tensor on the CPU."""

    value: bool | int | float
    dtype: torch.dtype

    def fake(self) -> torch.Tensor:
        return torch.empty((), dtype=self.dtype, device="cpu")


def described(args: Arguments, same: Iterable[int] | None = None, numbers: bool = False) -> Arguments:
    """The arguments of a call with descriptions in place of tensors; `numbers`: CPU scalars are described by value.

    `same`: for each tensor, the index of the first one that is the same object; by default all are different.
    """
    which = count() if same is None else iter(same)

    def describe(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(describe(y) for y in x)
        if not isinstance(x, torch.Tensor):
            return x
        if numbers and x.is_cpu and x.dim() == 0:
            return Number(x.item(), x.dtype)
        shape, strides = tuple(x.shape), x.stride()
        return TensorLike(shape, strides, x.dtype, x.device, overlapping(shape, strides), next(which))

    return tuple(describe(x) for x in args)


def is_number(x: Any, kind: str) -> bool:
    """Whether an argument is one of a call's numbers, as the gate counts them; `kind`: its type in the schema."""
    return isinstance(x, Number) or (isinstance(x, (int, float)) and (
        kind == "number" and not isinstance(x, bool) or kind in ("Tensor", "Optional[Tensor]")))


def plain(x: Any) -> bool | int | float:
    return x.value if isinstance(x, Number) else x


def map_numbers(op: OpOverload, args: Arguments, change: Callable[[int, Any], Any]) -> Arguments:
    """The call with each number replaced by `change(position, value)`."""
    position = count()

    def mapped(x: Any, kind: str) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(mapped(y, "") for y in x)
        return change(next(position), x) if is_number(x, kind) else x

    return tuple(mapped(x, str(a.type)) for a, x in zip(op._schema.arguments, args, strict=True))


def numbers_of(op: OpOverload, args: Arguments) -> list[Any]:
    found: list[Any] = []
    map_numbers(op, args, lambda k, x: found.append(x))
    return found


# ---- programs --------------------------------------------------------------------------------------------


class OtherShapes(Exception):
    """Raised if outputs must first be resized: holds the new sizes of each, followed by the strides after a resize."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes


# The index of a tensor of the call, and the smallest and largest value it may contain: ints or symbolic expressions.
Range = tuple[int, Any, Any]


class Built(NamedTuple):
    run: Run  # takes the tensors of a call as a list, in order, and returns the results
    ranges: tuple[Range, ...]  # accepted values of the tensors that are used as indices
    package: LaunchPlan  # for calls with symbols: its maker takes numbers in their place
    results: list[tuple[Any, ...]]  # shapes and strides


def build(form: OperatorForm, args: Arguments, lift: int = 0, into_any: bool = False, env: Any = None,
          layout: bool = False) -> Built:
    """Build the program for such calls.

    `into_any`: also accept outputs with gaps or another dtype, or that must be resized (OtherShapes). Numbers of the
    call with a bit in `lift` are passed after the tensors, as 64-bit words; after them come the arguments that are
    symbols of the shape environment `env`. `layout`: the layout of the results is passed later. Raises UnsupportedError
    with the reason if there is no program.
    """
    graph = graph_of(form, args, lift, into_any, env)
    if env is not None:
        at_least_one(env)
    made = compiled(graph, Options(config.numerics))
    if made.captured.externs or any(
            isinstance(s, Call) and isinstance(s.target, OpOverload) for s in made.program.steps):
        raise not_lowered(made.captured, get_target(made.package.target))
    if form.op is aten.copy_.default and any(isinstance(s, Copy) for s in made.program.steps):
        raise UnsupportedError("the copy cannot be made in one step")  # otherwise it would call this operator again
    for kernel in (made.build.wait() if made.build is not None else {}).values():
        if isinstance(kernel, CompileError):
            raise kernel
    package = made.package
    if env is not None:
        given = sum(n.op == "placeholder" and not isinstance(n.meta["val"], torch.SymInt) for n in graph.graph.nodes)
        known = Known(frozenset(s.name for s in env.var_to_range), given, layout)
        package = write(made.program, package.target, made.texts, package.device, known=known)
    return Built(made.finish(), accepted(made.captured), package, layouts(graph))


def layouts(graph: fx.GraphModule) -> list[tuple[Any, ...]]:
    """The sizes of each result, followed by its strides."""
    results = next(n for n in reversed(graph.graph.nodes) if n.op == "output").args[0]
    return [(*n.meta["val"].shape, *n.meta["val"].stride()) for n in results if n is not None]


def at_least_one(env: Any) -> None:
    """Extend the range of symbols, which torch traces as at least two, down to one. Loops for larger sizes are right
    for one too, unless something in them was dropped because the size is at least two."""
    for s, bounds in env.var_to_range.items():
        if bounds.lower == 2:
            env.var_to_range[s] = type(bounds)(1, bounds.upper)


def not_lowered(captured: Captured, target: Target) -> UnsupportedError:
    graph = captured.graph
    if lacking := {b.dtype for b in graph.buffers.values()} - graph.capabilities.dtypes:
        return UnsupportedError("the device does not have a dtype", dtypes=sorted(map(str, lacking)),
                                target=target.machine())
    return UnsupportedError("this call has no lowering")


def accepted(captured: Captured) -> tuple[Range, ...]:
    """The accepted values of those tensors that are used as indices."""
    position = {name: k for k, name in enumerate(captured.graph.arguments)}
    found: dict[Range, None] = {}
    for e in walk(*(e for node in captured.graph.nodes for e in node.exprs())):
        if e.op != "check":
            continue
        size = e.attr.size
        if size is ZERO:
            raise UnsupportedError("what it indexes has no elements")  # eager then raises the proper error
        loads = [x for x in walk(e.args[0]) if x.op == "load"]
        if len(loads) != 1 or len(e.args) > 1 or loads[0].attr[0] not in position or any(
                isinstance(a, Dyn) for a in size.atoms()):
            continue
        which, at = position[loads[0].attr[0]], cast(loads[0], torch.int64)
        if e.args[0] is at:
            found[which, ZERO, size - 1] = None
        elif e.args[0] is where(at < 0, at + index_value(size), at):
            found[which, -size, size - 1] = None
    return tuple((which, *(b.const if b.is_const else b for b in bounds)) for which, *bounds in found)


def graph_of(form: OperatorForm, args: Arguments, lift: int = 0, into_any: bool = False, env: Any = None
             ) -> fx.GraphModule:
    with FakeTensorMode(shape_env=env):
        return _Graph(form, args, lift, into_any).made()


class _Graph:
    def __init__(self, form: OperatorForm, args: Arguments, lift: int, into_any: bool) -> None:
        self.form, self.args, self.lift, self.into_any = form, args, lift, into_any
        self.count = 0  # numbers so far, in the gate's order
        self.graph = fx.Graph()
        self.held: dict[str, torch.Tensor] = {}
        self.same: dict[int, fx.Node] = {}
        self.numbers: list[tuple[Any, RunNumber]] = []
        self.whole: tuple[Any, Any] | None = None  # the arguments of a call that is decomposed

    def made(self) -> fx.GraphModule:
        form, schema = self.form, self.form.op._schema.arguments
        nodes = [self.placeholder(x, str(a.type)) for a, x in zip(schema, self.args, strict=True)]
        nodes = [fx.node.map_aggregate(x, self.number) for x in nodes]
        nodes = [fx.node.map_aggregate(x, self.size) for x in nodes]
        given = {schema[k].name: nodes[k] for k in form.inputs if "Generator" not in str(schema[k].type)}
        by_name = {schema[k].name for k in form.inputs if schema[k].kwarg_only}
        targets = [node for k in form.written for node in flat(nodes[k])]
        if form.factory:
            like = targets[0].meta["val"]
            given |= {"dtype": like.dtype, "device": like.device}
            by_name |= {"dtype", "device"}
        elif self.into_any and targets and "dtype" in given and given["dtype"] is None:  # sums are computed in it
            given["dtype"] = targets[0].meta["val"].dtype
        results = self.call(tuple(x for name, x in given.items() if name not in by_name),
                            {name: x for name, x in given.items() if name in by_name})
        settle_strides(self.graph)
        self.lay_out(results)
        if facts(form.op).keeps_shape and self.into_any:
            results = [self.shaped(result, target.meta["val"].shape)
                       for result, target in zip(results, targets, strict=True)]
        if targets:
            self.check([x for k in form.written for x in flat(self.args[k])], results)
            for target, result in zip(targets, results, strict=True):
                node = self.graph.call_function(aten.copy_.default, (target, result))
                node.meta["val"] = target.meta["val"]
        self.graph.output([] if targets else results)
        return LazyGraphModule(self.held, self.graph)  # its Python code is not needed, and some names are invalid in it

    def shaped(self, result: fx.Node, shape: torch.Size) -> fx.Node:
        """Reshape the result to this shape, if it has the same number of elements."""
        val = result.meta["val"]
        if val.shape == shape or val.numel() != shape.numel():
            return result
        node = self.graph.call_function(aten.view.default, (result, list(shape)))
        node.meta["val"] = val.view(shape)
        return node

    def placeholder(self, x: Any, kind: str) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(self.placeholder(y, "") for y in x)
        if isinstance(x, TensorLike):
            node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
            node.meta["val"] = x.fake()
            return self.same.setdefault(x.same, node)
        lifted = self.is_lifted(x, kind)
        if isinstance(x, Number):
            if lifted:
                return self.later(x, RunNumber(x.dtype, False))
            name = f"number{len(self.held)}"
            with unset_fake_temporarily():
                self.held[name] = torch.scalar_tensor(x.value, dtype=x.dtype, device="cpu")
            node = self.graph.get_attr(name)
            node.meta["val"] = x.fake()
            return node
        return self.later(x, RunNumber(torch.int64 if isinstance(x, int) else torch.float64, True)) if lifted else x

    def is_lifted(self, x: Any, kind: str) -> bool:
        if not is_number(x, kind):
            return False
        self.count += 1
        lifted = bool(self.lift >> (self.count - 1) & 1)
        if lifted and isinstance(plain(x), bool):
            raise UnsupportedError("a truth value is part of a program")
        return lifted

    def later(self, x: Any, kind: RunNumber) -> RunNumber:
        """Defer a number's placeholder, because numbers come after tensors."""
        self.numbers.append((x, kind))
        return kind

    def number(self, x: Any) -> Any:
        if not isinstance(x, RunNumber):
            return x
        given, kind = self.numbers.pop(0)
        assert kind is x
        node = self.graph.placeholder(f"n{len(self.graph.nodes)}")
        node.meta["val"] = kind
        node.meta["example"] = given.fake() if isinstance(given, Number) else given
        return node

    def size(self, x: Any) -> Any:
        """Make a placeholder for a size argument; these come last."""
        if not isinstance(x, torch.SymInt):
            return x
        node = self.graph.placeholder(f"size{len(self.graph.nodes)}")
        node.meta["val"] = x
        return node

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """One node per result; None for a result that is not a tensor."""
        functional: Any = self.form.functional
        examples: Any = fx.node.map_arg((args, kwargs), lambda n: n.meta.get("example", n.meta["val"]))
        if functional not in LOWERINGS and not facts(functional).library:
            return self.taken_apart(functional, args, kwargs, examples)
        call = self.graph.call_function(functional, args, kwargs)
        val = call.meta["val"] = functional(*examples[0], **examples[1])
        if not isinstance(val, (list, tuple)):
            return [call]
        return [part(self.graph, call, k) for k in range(len(val))]

    def taken_apart(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                    examples: Any) -> list[Any]:
        if self.lift:
            raise UnsupportedError("its numbers are part of what it is made of")
        recorder = CallRecorder(self.graph, table(False))
        fx.node.map_arg((args, kwargs), lambda n: recorder.add(n.meta["val"], n))
        with recorder:
            made = function(*examples[0], **examples[1])
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        self.whole = (args, kwargs)
        return [None if x is None else recorder.node(x) for x in made]

    def lay_out(self, results: list[Any]) -> None:
        """Give a decomposed call's results the layout of eager's operator, not that of the decomposition's last one."""
        if self.whole is None or self.form.written or is_view(self.form.op):
            return
        said = [None if r is None else r.meta["val"] for r in results]
        with self.graph.inserting_after():
            call = self.graph.call_function(self.form.op, *self.whole)
        call.meta["val"] = said
        laid = settled(call, said, SizeSamples(self.graph))
        self.graph.erase_node(call)
        for r, val in zip(results, laid, strict=True):
            if r is not None and isinstance(r.target, OpOverload) and not is_view(r.target):
                r.meta["val"] = val

    def check(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        """Check that the outputs can hold the results. Torch resizes and casts where necessary."""
        made = [r.meta["val"] for r in results]
        if len(given) != len(made) or not all(isinstance(x, TensorLike) for x in given):
            raise UnsupportedError("what it writes to is not there")
        if any(x.shape != tuple(t.shape) for x, t in zip(given, made, strict=True)):
            if facts(self.form.op).keeps_shape and any(0 not in x.shape for x in given):
                raise UnsupportedError("eager resizes it with words of its own")
            if self.into_any and all(self.form.op._schema.arguments[k].is_out for k in self.form.written):
                raise OtherShapes([(*t.shape, *t.stride()) for t in made])
            raise UnsupportedError("what it writes to has another shape")
        if not all(x.dtype is t.dtype or self.into_any and torch.can_cast(t.dtype, x.dtype)
                   for x, t in zip(given, made, strict=True)):
            raise UnsupportedError("what it writes to has another dtype")
        if len({x.same for x in given}) < len(given) or any(
                x.overlaps or not self.into_any and not x.is_dense for x in given):
            raise UnsupportedError("what it writes to is not plain memory")


def part(graph: fx.Graph, call: fx.Node, k: int) -> fx.Node | None:
    if call.meta["val"][k] is None:
        return None
    node = graph.call_function(operator.getitem, (call, k))
    node.meta["val"] = call.meta["val"][k]
    return node

"""Facts about the nodes of Dynamo's graph that are needed to cut it: values, memory, modes, writes."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from flambeau.capture.stream_turns import MARK
from flambeau.ops.facts import SPACES, facts, named, overloads_named
from flambeau.ops.facts import name_of as operator_name
from flambeau.torch_compat import pytree
from flambeau.torch_compat.autograd import enter_autocast, exit_autocast, log_api_usage_once, set_grad_enabled
from flambeau.torch_compat.fake import FakeTensor
from flambeau.torch_compat.fx import PURE_MODULES
from flambeau.torch_compat.ops import HigherOrderOperator, OpOverload, OpOverloadPacket

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)  # values between pieces are fake tensors
ENTER, EXIT = enter_autocast, exit_autocast
GRADIENTS = set_grad_enabled
ALSO = (log_api_usage_once,)
BODIES = ("tag_activation_checkpoint", "wrap", "autograd_function_apply")
# Python's in-place operators: iadd for +=, and so on.
INPLACE = (*(name for name in dir(operator) if name[0] == "i" and f"__{name[1:]}__" in dir(operator)), "setitem",
           "delitem")


class Refused(Exception):
    """The reason why a graph is not cut."""


# ---- values ------------------------------------------------------------------------------------------------


def value(n: fx.Node) -> Any:
    return n.meta.get("example_value")


def held_by(gm: fx.GraphModule, n: fx.Node) -> Any:
    return operator.attrgetter(str(n.target))(gm)


def subgraph(gm: fx.GraphModule, n: fx.Node) -> fx.GraphModule | None:
    if n.op != "get_attr":
        return None
    found = held_by(gm, n)
    return found if isinstance(found, fx.GraphModule) else None


def is_number(x: Any) -> bool:
    """Whether a value is a number or a tuple of numbers, symbolic or not."""
    return all(map(is_number, x)) if isinstance(x, tuple) else isinstance(x, (*SYMBOLIC, int, float))


def storage(x: Any) -> int | None:
    """An identifier of the memory that a tensor lies in; None if it has no strided storage."""
    return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) and x.layout is torch.strided else None


# Meta keys of nodes inlined from a subgraph (subgraphs.py); the instances of a subgraph share their fake tensors.
INSTANCE, MEMORY = "flambeau_instance", "flambeau_memory"


def memory(n: fx.Node) -> Any:
    """An identifier of the memory that a node's value lies in."""
    return n.meta[MEMORY] if MEMORY in n.meta else storage(value(n))


def size_in_bytes(t: torch.Tensor) -> float:
    return float(math.prod(s if isinstance(s, int) else s.node.hint for s in t.shape)) * t.dtype.itemsize


def number(s: Any) -> Any:
    if not isinstance(s, SYMBOLIC):
        return s
    if not s.node.has_hint():
        raise Refused("a size that only data decides")
    return s.node.expr


def value_key(x: Any) -> Any:
    """All that is known of a value, in hashable form. A value of unknown kind equals only itself."""
    if isinstance(x, torch.Tensor):
        if x.layout is not torch.strided:
            return id(x)
        sizes, strides = tuple(map(number, x.shape)), tuple(map(number, x.stride()))
        return (sizes, strides, number(x.storage_offset()), x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg(),
                x.is_inference())
    return frozen(x, id)


def frozen(x: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """Arguments in a hashable form, in which 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(x, fx.Node):
        return of_node(x)
    if isinstance(x, torch.Tensor):
        return value_key(x)
    if isinstance(x, (list, tuple)):
        return (type(x), *[frozen(y, of_node) for y in x])
    if isinstance(x, dict):
        return (dict, *[(k, frozen(y, of_node)) for k, y in x.items()])
    if isinstance(x, slice):
        return (slice, *[frozen(y, of_node) for y in (x.start, x.stop, x.step)])
    if isinstance(x, SYMBOLIC):
        return type(x), number(x)
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    if x is None or isinstance(x, (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return type(x), x
    return id(x)


# ---- operators ---------------------------------------------------------------------------------------------


def name_of(n: fx.Node) -> str:
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))


def namespace(f: Any) -> str | None:
    """The namespace of an operator; None for any other function."""
    if isinstance(f, OpOverloadPacket):
        return f._qualified_op_name.partition("::")[0]
    return f.namespace if isinstance(f, OpOverload) else None


def is_heavy(n: fx.Node) -> bool:
    """Whether the node calls a library, across which no kernel can fuse."""
    return named(operator_name(n.target) if isinstance(n.target, OpOverload) else name_of(n)).contracts


def operators_in(gm: fx.GraphModule, n: fx.Node) -> float:
    """The number of operators to compile for a node, those in its subgraphs included."""
    if n.target is operator.getitem:
        return 0.25
    bodies = [b for x in n.all_input_nodes if (b := subgraph(gm, x)) is not None]
    return 1.0 + sum(operators_in(b, m) for b in bodies for m in b.graph.nodes if m.op.startswith("call"))


def check_plain(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Raise Refused for a graph that may depend on more than its values and their order."""
    for x in inputs:
        if not isinstance(x, (*SYMBOLIC, int, float)) and type(x) not in TENSORS:
            raise Refused(f"an input is a {type(x).__name__}")
    for n in gm.graph.nodes:
        if n.op == "placeholder" and isinstance(value(n), torch.Tensor) and type(value(n)) not in TENSORS:
            raise Refused(f"{n.name} is a {type(value(n)).__name__}")
        if n.op == "call_module":
            raise Refused(f"it calls the module {n.target}")
        if n.op == "call_method" and named(str(n.target)).stateful:
            raise Refused(f"it calls {n.target}")
        if n.op == "call_function":
            check_function(gm, n)
        if MARK in (n.meta.get("custom") or {}):
            raise Refused("it changes streams")


def check_function(gm: fx.GraphModule, n: fx.Node) -> None:
    f: Any = n.target
    if isinstance(f, HigherOrderOperator):
        if f.name() not in BODIES:
            raise Refused(f"it calls {f.name()}")
        for x in n.all_input_nodes:
            if (body := subgraph(gm, x)) is not None:
                check_plain(body, ())
    elif (space := namespace(f)) is not None:
        if space not in SPACES and not facts(f).known:
            raise Refused(f"it calls {f}, whose effects are unknown")
    elif not is_state(n) and f not in ALSO and getattr(f, "__module__", None) not in PURE_MODULES:
        raise Refused(f"it calls {getattr(f, '__module__', '')}.{name_of(n)}, whose effects are unknown")


def mutated(gm: fx.GraphModule, n: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose memory a node writes to."""
    first = [a for a in n.args[:1] if isinstance(a, fx.Node)]
    name = name_of(n)
    if isinstance(n.target, OpOverload):
        for argument, x in zip(n.target._schema.arguments, n.args):
            if argument.is_write:
                yield from nodes_in(x)
    elif (name.endswith("_") and not name.endswith("__")) or name in INPLACE or name in INPLACE_METHODS:
        yield from first
    elif written := named(name).writes:
        yield from (x for argument in written for x in nodes_in(argument_named(n, argument)))
    elif argument_named(n, "inplace"):
        yield from first
    yield from nodes_in(n.kwargs.get("out"))
    bodies = [b for x in n.all_input_nodes if (b := subgraph(gm, x)) is not None]
    if any(list(mutated(b, m)) for b in bodies for m in b.graph.nodes if m.op.startswith("call")):
        yield from (x for x in n.all_input_nodes if isinstance(value(x), torch.Tensor))


INPLACE_METHODS = tuple(f"__{name}__" for name in INPLACE)


def nodes_in(x: Any) -> list[fx.Node]:
    return [y for y in pytree.tree_leaves(x) if isinstance(y, fx.Node)]


def argument_named(n: fx.Node, name: str) -> Any:
    """The value that a call passes for this argument; None if it passes none, or the function has no such argument."""
    names = parameters(n.target)
    at = names.index(name) if name in names else len(n.args)
    return n.args[at] if at < len(n.args) else n.kwargs.get(name)


@cache
def parameters(f: Any) -> tuple[str, ...]:
    """The parameter names of a torch function: from its Python signature, or from the operator's schema."""
    if getattr(f, "__module__", None) == "torch.nn.functional":
        try:
            return tuple(inspect.signature(f).parameters)
        except ValueError:  # a builtin
            return ()
    return tuple(a.name for op in overloads_named((getattr(f, "__name__", ""),))[:1] for a in op._schema.arguments)


# ---- modes -------------------------------------------------------------------------------------------------


def is_state(n: fx.Node) -> bool:
    return n.op == "call_function" and n.target in (ENTER, EXIT, GRADIENTS)


def ambient_states(graph: fx.Graph) -> dict[fx.Node, tuple[tuple[Any, ...], bool | None]]:
    """For each node the autocast modes around it, outermost first, and the grad mode (None: the caller's)."""
    entered: list[fx.Node] = []
    gradients: bool | None = None
    out = {}
    for n in graph.nodes:
        if n.op == "call_function" and n.target is ENTER:
            entered.append(n)
        elif n.op == "call_function" and n.target is EXIT:
            entered.remove(n.args[0])
        elif n.op == "call_function" and n.target is GRADIENTS:
            wanted = n.args[0]
            gradients = None if wanted == torch.is_grad_enabled() else bool(wanted)
        elif n.op == "output" and (entered or gradients is not None):
            raise Refused("it leaves modes changed")
        else:
            out[n] = tuple(e.args for e in entered), gradients
    return out

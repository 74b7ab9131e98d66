"""Splits the joint graph into forward and backward: merges equal calls, then uses torch's minimal cut.

Torch's cut could merge equal calls itself, but would import all of Inductor, which takes longer than most cuts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from flambeau.capture.eager_strides import layout, settle_strides, share_memory
from flambeau.capture.stream_turns import mark_of
from flambeau.ir.tuning import Tuning
from flambeau.ops.facts import LOWERINGS, facts
from flambeau.runtime.launch_plan import DONATED
from flambeau.runtime.streams.host_copies import fetch
from flambeau.torch_compat.aot import config, min_cut_rematerialization_partition, must_recompute
from flambeau.torch_compat.ops import OpOverload
from flambeau.torch_compat.patches import CUT

from .offload import Offload, keep_elsewhere
from .padded_products import call, pad_products, size_of
from .user_streams import save_streams


def partition(joint: fx.GraphModule, *args: Any, settle: bool = False, exact: bool = False,
              tuning: Tuning | None = None, offload: Offload | None = None, **kwargs: Any
              ) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph. `settle`: correct strides where torch's metadata differs from eager; `exact`: equal
    eager's bits; `tuning`: of a library whose products may be padded; `offload`: how much less the device keeps."""
    if not exact:
        take_apart(joint.graph)
    skip_detached(joint.graph)
    merge_equal(joint.graph)
    keep_less(joint.graph)
    keep_compared(joint.graph)
    copy_again(joint.graph)
    compute_again(joint.graph)
    settle_strides(joint.graph, names_only=not settle or share_memory(joint.graph), hold=settle)
    pad_products(joint.graph, tuning)
    results = kwargs["num_fwd_outputs"]

    def cut(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        with config.patch(cse=False), CUT.applied(*fused()):
            return min_cut_rematerialization_partition(gm, *args, **kwargs)

    if offload is None or any(mark_of(n) for n in joint.graph.nodes):
        forward, backward = cut(joint)
    else:
        forward, backward = keep_elsewhere(joint, cut, results, offload)
    mark_donated(forward.graph, backward.graph)
    save_streams(forward, backward, results)
    return forward, backward


def skip_detached(graph: fx.Graph) -> None:
    """Remove `detach`: gradients are traced already, and the cut would save detached values instead of recomputing."""
    *_, output = graph.nodes
    for n in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        if output not in n.users:
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)


def fused() -> tuple[list[OpOverload], list[OpOverload]]:
    """Two lists for torch's cut: operators whose kernels fuse the maps before them, and the maps themselves."""
    return [op for op in LOWERINGS if facts(op).fuses], [op for op in LOWERINGS if facts(op).is_map]


def take_apart(graph: fx.Graph) -> None:
    """Decompose operators whose result, if saved for a gradient, is larger than what it is made of (`Facts.apart`)."""
    for n in list(graph.nodes):
        rule = facts(n.target).apart if n.op == "call_function" else None
        if rule is not None and n.meta["val"].dim() and all(m != 0 for m in n.meta["val"].shape):
            with graph.inserting_before(n):
                made = rule(call, *n.args, **n.kwargs)
                if layout(made.meta["val"]) != layout(n.meta["val"]):
                    made = call(torch.ops.aten.clone.default, made, memory_format=torch.contiguous_format)
            if layout(made.meta["val"]) == layout(n.meta["val"]):
                n.replace_all_uses_with(made)
                graph.erase_node(n)


def keep_less(graph: fx.Graph) -> None:
    """Rewrite gradients so that they read fewer tensors, or tensors that are saved anyway (`Facts.keeps_less`)."""

    def find(op: Any, *args: Any) -> fx.Node | None:
        return next((n for n in graph.find_nodes(op="call_function", target=op) if n.args == args), None)

    for n in graph.nodes:
        if (rule := facts(n.target).keeps_less) is not None:
            n.args = rule(find, *n.args)


def keep_compared(graph: fx.Graph) -> None:
    """Save values that a gradient compares for equality (such as a maximum's): recomputed ones might differ in bits."""
    for n in graph.nodes:
        if facts(n.target).asks_equality:
            for x in n.all_input_nodes:
                while x.op == "call_function" and getattr(x.target, "is_view", False):
                    x = x.all_input_nodes[0]
                if x.op == "call_function" and not must_recompute(x):
                    x.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def copy_again(graph: fx.Graph) -> None:
    """Recompute an argument's copy in another memory order for the gradient: saving it would store the data twice."""
    for n in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        x = n.args[0]
        if isinstance(x, fx.Node) and x.op == "placeholder" and "memory_format" in n.kwargs and not must_save(n):
            n.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def compute_again(graph: fx.Graph) -> None:
    """Do not save an argument that a backward kernel computes itself (`Facts.computes`), if maps make it from smaller
    tensors. A mask made of rows and columns then takes no memory."""
    for n in graph.nodes:
        place = facts(n.target).computes if n.op == "call_function" else None
        given = None if place is None else n.args[place]
        if not isinstance(given, fx.Node):
            continue
        way, ends, todo = dict[fx.Node, None](), dict[fx.Node, None](), [given]
        while todo:
            x = todo.pop()
            if x in way or x in ends:
                continue
            if is_map(x):
                way[x] = None
                todo += x.all_input_nodes
            else:
                ends[x] = None
        tensors = [x for x in ends if isinstance(x.meta.get("val"), torch.Tensor)]
        if sum(map(size_of, tensors)) < size_of(given):
            for x in way:
                x.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def is_map(n: fx.Node) -> bool:
    """Whether each result element depends on one element of each argument (or none), and recomputing is allowed."""
    op = n.target
    if not isinstance(op, OpOverload) or must_save(n) or facts(op).random or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags or facts(op).view or facts(op).is_map or not n.all_input_nodes


def must_save(n: fx.Node) -> bool:
    return n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def merge_equal(graph: fx.Graph) -> None:
    *_, output = graph.nodes
    # Returned values are not merged, because two results of eager share no memory.
    returned = {s for n in output.all_input_nodes for s in storages(n)}
    seen: dict[Any, fx.Node] = {}
    for n in graph.nodes:
        if n.op != "call_function" or facts(n.target).undefined:
            continue
        if isinstance(n.target, OpOverload):
            if n.target._schema.is_mutable:
                return  # later calls may read other contents
            if facts(n.target).random or facts(n.target).shaped_by_data:
                continue  # equal-looking calls differ: each has its own random numbers, or its own size
        elif getattr(n.target, "__module__", None) not in (operator.__name__, "_operator"):
            continue
        if not returned.isdisjoint(storages(n)):
            continue
        # Equal calls on two streams are computed on both, so that neither stream waits for the other.
        first = seen.setdefault((n.target, frozen(n.args), frozen(n.kwargs), (mark_of(n) or (0, 0))[1]), n)
        if first is not n:
            n.replace_all_uses_with(first)
            graph.erase_node(n)


def mark_donated(forward: fx.Graph, backward: fx.Graph) -> None:
    """Mark tensors that the forward makes only for its backward, and that share no memory with its other results."""
    *_, output = forward.nodes
    makers = [(n.name, maker_of(n)) for n in output.args[0] if isinstance(n, fx.Node)]
    returned = Counter(maker for _, maker in makers)
    own = {name for name, maker in makers if maker is not None and returned[maker] == 1}
    for n in backward.find_nodes(op="placeholder"):
        n.meta[DONATED] = n.name in own and not any(u.target is fetch for u in n.users)


def maker_of(n: fx.Node) -> fx.Node | None:
    """The call that allocated the memory of n; None if it is an input's or unknown. All results of one call count as
    one, since they might share memory."""
    while n.op == "call_function":
        op = n.target
        if isinstance(op, OpOverload) and not facts(op).view and all(
                r.alias_info is None for r in op._schema.returns):
            return n
        if not n.args or not (op is operator.getitem or isinstance(op, OpOverload)):
            return None
        n = n.args[0]  # type: ignore[assignment]
    return None


def storages(n: fx.Node) -> Iterator[int]:
    val = n.meta.get("val")
    if isinstance(val, torch.Tensor) and val.layout is torch.strided:
        yield val.untyped_storage()._cdata


def frozen(x: Any) -> Any:
    """Arguments in a hashable form, in which 1, 1.0 and True differ."""
    if isinstance(x, fx.Node):
        return x
    if isinstance(x, (list, tuple)):
        return (type(x), *map(frozen, x))
    if isinstance(x, dict):
        return (dict, *((k, frozen(v)) for k, v in x.items()))
    if isinstance(x, slice):
        return (slice, frozen(x.start), frozen(x.stop), frozen(x.step))
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(x), x.node.expr)
    return (type(x), x)

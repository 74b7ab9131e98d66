"""Strides that eager's results have where torch's metadata says others.

AOTAutograd traces with rules for shapes and strides that stand beside the kernels, and some disagree with the kernels.
What a captured graph says is what we promise to the caller, so it is put right here, from the node that is wrong to the
results. Sizes that are symbols stay as torch has them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .devices import flat
from .storage import is_view, view_root

aten = torch.ops.aten
Strides = tuple[int, ...]
# Their result's shape is a new symbol each time.
NEW_SIZES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def like_add(_: torch.Tensor, x: Any, y: Any, **options: Any) -> Strides:
    """As every elementwise kernel lays out what two operands come to."""
    return torch.add(x, y).stride()


def suggested(result: torch.Tensor, x: torch.Tensor, *rest: Any) -> Strides:
    """Channels last if they are so in the first argument, else contiguous."""
    channels = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    last = channels is not None and not x.is_contiguous() and x.is_contiguous(memory_format=channels)
    return torch.empty_like(result, memory_format=channels if last else torch.contiguous_format).stride()


def rolled(_: torch.Tensor, x: torch.Tensor, shifts: Any, dims: Any = ()) -> Strides:
    """The CPU's kernel joins two parts, along one dimension after the other."""
    if x.numel() == 0:
        return x.clone().stride()
    if not dims:
        return x.contiguous().stride()
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x.stride()


def viewed(_: torch.Tensor, x: torch.Tensor, size: Any) -> Strides:
    """ATen's rule gives dimensions of size one other strides than the rule of tracing."""
    return x.view(size).stride()


def expanded(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    return result.stride() if x.dim() else (0,) * result.dim()


def contiguous(result: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    return torch.empty(result.shape, device="meta").stride()


def kept_if_empty(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    """An array without elements counts as dense, whatever its strides are."""
    kept = result.numel() == 0 and options.get("memory_format", torch.preserve_format) is torch.preserve_format
    return x.stride() if kept and x.shape == result.shape else result.stride()


Rule = Callable[..., Strides]  # of the first result, of which it is given what torch says, and the arguments
RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.copysign.Tensor, aten.floor_divide.default, aten.div.Tensor_mode, aten.logaddexp.default,
                     aten.logaddexp2.default, aten.logical_and.default, aten.logical_or.default,
                     aten.logical_xor.default, aten.heaviside.default), like_add),
    **dict.fromkeys((aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit.no_stats,
                     aten._native_batch_norm_legit_functional.default, aten.native_batch_norm.default,
                     aten.max_pool3d_with_indices.default, aten.max_unpool2d.default), suggested),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), viewed),
    **dict.fromkeys((aten.flip.default, aten.hardtanh.default, aten.frexp.Tensor, aten.fill.Scalar,
                     aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
                     aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
                     aten.randint_like.low_dtype), kept_if_empty),
    aten.roll.default: rolled,
    aten.expand.default: expanded,
    aten.normal.Tensor_Tensor: contiguous,
}


def settle_strides(graph: fx.Graph) -> None:
    """Put eager's strides into the metadata of a graph whose tensors are on the CPU."""
    changed: set[fx.Node] = set()
    for n in graph.nodes:
        val = n.meta.get("val")
        if n.op != "call_function" or val is None:
            continue
        if n.target is operator.getitem:
            new = n.args[0].meta["val"][n.args[1]] if n.args[0] in changed else val
        elif isinstance(n.target, torch._ops.OpOverload) and not NEW_SIZES & set(n.target.tags):
            new = traced(n) if changed.intersection(n.all_input_nodes) else val
            new = ruled(n, new) if n.target in RULES else new
        else:
            continue
        if new is not val and layout(new) != layout(val):
            n.meta["val"] = new
            changed.add(n)


def share_memory(graph: fx.Graph) -> bool:
    """Whether two results do. With gradients AOTAutograd makes the view of a result anew, outside of the graph, with
    strides that it has traced."""
    *_, output = graph.nodes
    roots = [view_root(n) for n in output.all_input_nodes]
    return len(set(roots)) < len(roots)


def layout(val: Any) -> list[Any]:
    return [(t.shape, t.stride()) for t in flat(val) if isinstance(t, torch.Tensor)]


def traced(n: fx.Node) -> Any:
    """What torch's rule says of its arguments as they are now."""
    val = n.meta["val"]
    mode = next((t.fake_mode for t in flat(val) if isinstance(t, FakeTensor)), None)
    if mode is None:
        return val
    args, named = fx.node.map_aggregate((n.args, n.kwargs), lambda x: x.meta["val"] if isinstance(x, fx.Node) else x)
    try:
        with mode:
            new = n.target(*args, **named)  # type: ignore[operator]
    except (RuntimeError, ValueError):  # a view that needs a copy of what lies so; ours needs none
        return val
    return new if [t.shape for t in flat(new) if isinstance(t, torch.Tensor)] == [
        t.shape for t in flat(val) if isinstance(t, torch.Tensor)] else val


def ruled(n: fx.Node, val: Any) -> Any:
    """The same with the first result as eager's kernel makes it, where sizes are known."""
    first, *rest = val if isinstance(val, (list, tuple)) else [val]
    args, named = fx.node.map_aggregate((n.args, n.kwargs), plain)
    tensors = [first, *(a.meta["val"] for a in n.all_input_nodes)]
    if any(not isinstance(t, FakeTensor) or t.device.type != "cpu" or t.layout is not torch.strided or not all(
            isinstance(s, int) for s in (*t.shape, *t.stride())) for t in tensors):
        return val
    try:
        with unset_fake_temporarily(), no_python_dispatcher():  # ATen's own code, not the rules in its place
            strides = RULES[n.target](bare(first), *args, **named)
    except (RuntimeError, ValueError):
        return val
    if strides == first.stride():
        return val
    with first.fake_mode:
        new = first.as_strided(first.shape, strides) if is_view(n.target) else torch.empty_strided(
            first.shape, strides, dtype=first.dtype, device=first.device)
    return [new, *rest] if isinstance(val, (list, tuple)) else new


def plain(x: Any) -> Any:
    return bare(x.meta["val"]) if isinstance(x, fx.Node) else x


def bare(t: Any) -> Any:
    """Of its shape and strides, and nothing else: ATen's own code computes with those of the meta device."""
    if not isinstance(t, torch.Tensor) or not all(isinstance(s, int) for s in (*t.shape, *t.stride())):
        return t
    with unset_fake_temporarily():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

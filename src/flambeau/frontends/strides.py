"""Strides that eager's results have where torch's metadata says others.

AOTAutograd traces with rules for shapes and strides that stand beside the kernels, and some disagree with the kernels.
What a captured graph says is what we promise to the caller, so it is put right here, from the node that is wrong to the
results. Sizes that are symbols stay as torch has them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from flambeau.ops import LOWERINGS

from .devices import flat
from .storage import is_view, view_root

aten = torch.ops.aten
Strides = tuple[int, ...]
# Their result's shape is a new symbol each time.
NEW_SIZES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


# ---- ATen's rules -------------------------------------------------------------------------------------------


def order(shape: Sequence[int], operands: Sequence[Strides]) -> list[int]:
    """Dimensions from the fastest to the slowest, as the loops of elementwise kernels (TensorIterator) order them."""

    def swaps(a: int, b: int) -> int:
        for strides in operands:
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] != strides[b]:
                return 1 if strides[a] > strides[b] else -1
            if shape[a] > shape[b]:
                return 1
        return 0

    out = list(range(len(shape)))[::-1]
    for k in range(1, len(out)):
        at = k
        for other in range(k - 1, -1, -1):
            found = swaps(out[other], out[at])
            if found > 0:
                out[other], out[at] = out[at], out[other]
                at = other
            elif found < 0:
                break
    return out


def packed(shape: Sequence[int], dims: Sequence[int]) -> Strides:
    """Of an array that is dense in this order of dimensions."""
    out, step = [0] * len(shape), 1
    for d in dims:
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def contiguous(shape: Sequence[int]) -> Strides:
    return packed(shape, range(len(shape))[::-1])


def is_dense(t: torch.Tensor) -> bool:
    """What ATen calls non-overlapping and dense: an array without elements is, whatever its strides."""
    if t.is_contiguous():
        return True
    real = sorted((d for d in range(t.dim()) if t.shape[d] > 1), key=t.stride)
    dense = packed([t.shape[d] for d in real], range(len(real)))
    return [t.stride(d) for d in real] == list(dense)


def preserved(t: torch.Tensor) -> Strides:
    """Of a copy that keeps the order of memory."""
    return t.stride() if is_dense(t) else packed(t.shape, order(t.shape, [t.stride()]))


def suggested(t: torch.Tensor) -> torch.memory_format:
    """Channels last where strides grow so, else contiguous."""
    dims = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(t.dim())
    if dims is None or t.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for d in dims:
        if t.shape[d] == 0 or t.stride(d) < least or d == 0 and least == t.stride(1):
            return torch.contiguous_format
        least = t.stride(d) * t.shape[d]
    return torch.channels_last if t.dim() == 4 else torch.channels_last_3d


def elementwise(result: torch.Tensor, *operands: Any) -> Strides:
    """As TensorIterator lays out what it makes of these operands; numbers are arrays without dimensions to it."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    common = torch.result_type(*(operands if len(operands) == 2 else (tensors[0], tensors[-1])))
    shape = result.shape
    # Operands of another dtype are copied to the common one first.
    strides = [t.stride() if t.dtype is common else preserved(t) for t in tensors]
    if len(tensors) == len(operands) and all(t.shape == shape for t in tensors):
        laid = [t.as_strided(t.shape, s) for t, s in zip(tensors, strides, strict=True)]
        if all(t.is_contiguous() for t in laid):
            return contiguous(shape)
        if len(shape) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in laid):
            return torch.empty_like(result, memory_format=torch.channels_last).stride()
        if all(is_dense(t) and t.stride() == strides[0] for t in laid):
            return strides[0]
    return packed(shape, order(shape, [
        (0,) * (len(shape) - t.dim()) + tuple(0 if m == 1 and n != 1 else k for m, n, k in zip(
            t.shape, shape[len(shape) - t.dim():], s, strict=True)) for t, s in zip(tensors, strides, strict=True)]))


# ---- by operator --------------------------------------------------------------------------------------------
#
# A rule is given the first result as torch has it, and the arguments, all on the meta device.

Rule = Callable[..., Strides]


def as_preserved(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    kept = options.get("memory_format") in (None, torch.preserve_format) and x.shape == result.shape
    return preserved(x) if kept else result.stride()


def as_suggested(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    return torch.empty_like(result, memory_format=suggested(x)).stride()


def as_pooled(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    last = torch.channels_last_3d
    if x.dim() == 5:
        return as_suggested(result, x)
    return torch.empty_like(result[None], memory_format=last).stride()[1:] if x[None].is_contiguous(
        memory_format=last) else contiguous(result.shape)


def as_normalised(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    return contiguous(x.shape) if x.is_contiguous() else as_suggested(result, x)


def as_contiguous(result: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    return contiguous(result.shape)


def rolled(_: torch.Tensor, x: torch.Tensor, shifts: Any, dims: Any = ()) -> Strides:
    """The CPU's kernel joins two parts, along one dimension after the other."""
    if x.numel() == 0:
        return x.clone().stride()
    if not dims:
        return contiguous(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x.stride()


def viewed(_: torch.Tensor, x: torch.Tensor, size: Any) -> Strides:
    """ATen's rule gives dimensions of size one other strides than the rule of tracing."""
    return x.view(size).stride()


def expanded(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    return result.stride() if x.dim() else (0,) * result.dim()


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit.no_stats,
                     aten._native_batch_norm_legit_functional.default, aten.native_batch_norm.default), as_normalised),
    **dict.fromkeys((aten.native_group_norm.default, aten.max_unpool2d.default, aten.reflection_pad3d.default,
                     aten.replication_pad3d.default, aten.upsample_nearest2d.default,
                     aten._upsample_nearest_exact2d.default, aten.upsample_bilinear2d.default,
                     aten.upsample_bicubic2d.default), as_suggested),
    aten.max_pool3d_with_indices.default: as_pooled,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), viewed),
    **dict.fromkeys((aten.flip.default, aten.hardtanh.default, aten.frexp.Tensor, aten.fill.Scalar,
                     aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
                     aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
                     aten.randint_like.low_dtype), as_preserved),
    **dict.fromkeys((aten.normal.Tensor_Tensor, aten.im2col.default, aten.log_sigmoid_forward.default,
                     aten.tril.default, aten.triu.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
                    as_contiguous),
    **dict.fromkeys((aten.deg2rad.default, aten.rad2deg.default), lambda result, x: elementwise(result, x, 1.0)),
    aten.roll.default: rolled,
    aten.expand.default: expanded,
}
# How many operands elementwise kernels have: of what is no plain formula here, or has a number inside of the kernel.
OPERANDS = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode), 2),
    **dict.fromkeys((aten.addcmul.default, aten.addcdiv.default), 3),
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.celu.default), 1),
    aten.lerp.Scalar: 2, aten.where.self: 3,
}


def rule_of(op: Any) -> Rule | None:
    """For an operator that is lowered by a formula, that of elementwise kernels."""
    if op in RULES:
        return RULES[op]
    count = OPERANDS.get(op) or getattr(LOWERINGS.get(op), "operands", None)
    if count is None:
        return None
    return lambda result, *args, **named: elementwise(result, *(a for a in args[:count] if a is not None))


def settle_strides(graph: fx.Graph) -> None:
    """Put eager's strides into the metadata of a graph whose tensors are on the CPU, or on the device that does as the
    CPU does."""
    changed: set[fx.Node] = set()
    for n in graph.nodes:
        val = n.meta.get("val")
        if n.op != "call_function" or val is None:
            continue
        if n.target is operator.getitem:
            new = n.args[0].meta["val"][n.args[1]] if n.args[0] in changed else val
        elif isinstance(n.target, torch._ops.OpOverload) and not NEW_SIZES & set(n.target.tags):
            new = traced(n) if changed.intersection(n.all_input_nodes) else val
            rule = rule_of(n.target)
            new = ruled(n, new, rule) if rule is not None else new
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


def ruled(n: fx.Node, val: Any, rule: Rule) -> Any:
    """The same with the first result as eager's kernel makes it, where sizes are known."""
    first, *rest = val if isinstance(val, (list, tuple)) else [val]
    args, named = fx.node.map_aggregate((n.args, n.kwargs), plain)
    tensors = [first, *(a.meta["val"] for a in n.all_input_nodes)]
    here = ("cpu", torch._C._get_privateuse1_backend_name())
    if any(not isinstance(t, FakeTensor) or t.device.type not in here or t.layout is not torch.strided or not all(
            isinstance(s, int) for s in (*t.shape, *t.stride())) for t in tensors):
        return val
    try:
        with unset_fake_temporarily(), no_python_dispatcher():  # ATen's own code, not the rules in its place
            strides = rule(bare(first), *args, **named)
    except (RuntimeError, ValueError):
        return val
    if strides == first.stride():
        return val
    with first.fake_mode:
        # Several results of one shape lie alike: a maximum and its place.
        new = [t if t.shape != first.shape else t.as_strided(t.shape, strides) if is_view(n.target) else
               torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device) for t in (first, *rest)]
    return new if isinstance(val, (list, tuple)) else new[0]


def plain(x: Any) -> Any:
    return bare(x.meta["val"]) if isinstance(x, fx.Node) else x


def bare(t: Any) -> Any:
    """Of its shape and strides, and nothing else: ATen's own code computes with those of the meta device."""
    if not isinstance(t, torch.Tensor) or not all(isinstance(s, int) for s in (*t.shape, *t.stride())):
        return t
    with unset_fake_temporarily():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

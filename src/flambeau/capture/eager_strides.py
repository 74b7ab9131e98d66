"""Corrects the metadata of captured graphs where torch's strides differ from those of eager's results.

AOTAutograd traces with rules for shapes and strides that are separate from the kernels, and some disagree with them.
The metadata of a captured graph is what we promise to the caller, so it is corrected here, from the wrong node on to
the results. If it is fast, eager's kernel itself is run once on zeros. Otherwise, and for views, rules decide. For
symbolic sizes, both are evaluated at some sample numbers (`size_samples.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.fx as fx

from flambeau.ir.lines import reach
from flambeau.ops import LOWERINGS
from flambeau.ops.facts import facts
from flambeau.runtime.memory_layout import dense
from flambeau.runtime.placement import CPU, flat
from flambeau.torch_compat.device import backend_name
from flambeau.torch_compat.dispatch import no_python_dispatcher
from flambeau.torch_compat.fake import FakeTensor, unset_fake_temporarily
from flambeau.torch_compat.ops import OpOverload

from .eager_dtypes import attempt
from .size_samples import SizeSamples
from .storage import is_view, view_root

aten = torch.ops.aten
Strides = tuple[int, ...]


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


def packed(shape: Sequence[int], dims: Sequence[int], least: int = 1) -> Strides:
    """The strides of a dense array with this order of dimensions; `least`: the size of an empty dimension."""
    out, step = [0] * len(shape), 1
    for d in dims:
        out[d] = step
        step *= max(shape[d], least)
    return tuple(out)


def contiguous(shape: Sequence[int]) -> Strides:
    return packed(shape, range(len(shape))[::-1])


def preserved(t: torch.Tensor) -> Strides:
    """The strides of a copy that preserves the memory format."""
    return t.stride() if dense(t) else packed(t.shape, order(t.shape, [t.stride()]))


def suggested(t: torch.Tensor) -> torch.memory_format:
    """Channels last if the strides are in that order, else contiguous (ATen's suggest_memory_format)."""
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
    """The strides that TensorIterator gives a result of these operands; it treats numbers as 0-dim tensors."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    common = torch.result_type(*(operands if len(operands) == 2 else (tensors[0], tensors[-1])))
    shape = result.shape
    # Operands of another dtype are first copied to the common dtype.
    strides = [t.stride() if t.dtype is common else preserved(t) for t in tensors]
    if len(tensors) == len(operands) and all(t.shape == shape for t in tensors):
        laid = [t.as_strided(t.shape, s) for t, s in zip(tensors, strides, strict=True)]
        if all(t.is_contiguous() for t in laid):
            return contiguous(shape)
        if len(shape) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in laid):
            return torch.empty_like(result, memory_format=torch.channels_last).stride()
        if all(dense(t) and t.stride() == strides[0] for t in laid):
            return strides[0]
    dims = order(shape, [
        (0,) * (len(shape) - t.dim()) + tuple(0 if m == 1 and n != 1 else k for m, n, k in zip(
            t.shape, shape[len(shape) - t.dim():], s, strict=True)) for t, s in zip(tensors, strides, strict=True)])
    return contiguous(shape) if dims == [*range(len(shape))][::-1] else packed(shape, dims, least=0)


# ---- rules by operator --------------------------------------------------------------------------------------
#
# A rule takes the first result as torch describes it, and the arguments, all on the meta device.

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


def as_convolved(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Strides:
    """Channels last if the image or the weight is; torch's own rule does this only for the CPU."""
    last = x.dim() == 4 and torch.channels_last in (suggested(x), suggested(weight))
    return torch.empty_like(result, memory_format=torch.channels_last).stride() if last else result.stride()


def as_contiguous(result: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    return contiguous(result.shape)


def rolled(_: torch.Tensor, x: torch.Tensor, shifts: Any, dims: Any = ()) -> Strides:
    """The strides from the CPU's kernel, which concatenates two parts along one dimension after the other."""
    if not dims:
        return contiguous(x.shape)
    if x.numel() == 0:
        return preserved(x)
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x.stride()


def copied_storage(result: torch.Tensor, x: torch.Tensor, *rest: Any, **options: Any) -> Strides:
    """The input's strides, because eager copies the whole storage, unless the input is expanded."""
    return preserved(x) if any(m > 1 and s == 0 for m, s in zip(x.shape, x.stride(), strict=True)) else x.stride()


# By the name in `Facts.strides`.
RULES: dict[str, Rule] = {
    "preserved": as_preserved, "suggested": as_suggested, "pooled": as_pooled, "normalised": as_normalised,
    "contiguous": as_contiguous, "rolled": rolled, "convolved": as_convolved, "copied storage": copied_storage,
    "with a number": lambda result, x: elementwise(result, x, 1.0),
}


def rule_of(op: Any) -> Asked | None:
    """The rule of an operator: for a lowered formula, that of elementwise kernels; for a view, ATen's own code."""
    if is_view(op):
        return None if op is aten.as_strided.default else as_viewed
    known = facts(op)
    if known.strides:
        return as_made(RULES[known.strides])
    count = known.operands or getattr(LOWERINGS.get(op), "operands", None)
    if count is None:
        return None
    return as_made(lambda result, *args, **named: elementwise(result, *(a for a in args[:count] if a is not None)))


# Elements of all tensors of a call, up to which eager is run: that takes less time than tracing the call.
FEW = 1 << 14


def rules_of(op: OpOverload) -> list[Asked]:
    """The rules to try in order: eager's kernel (except for views, and operators that draw or write), then the rule."""
    runs = op.namespace == "aten" and not is_view(op) and not facts(op).random and all(
        a.alias_info is None for a in op._schema.arguments)
    return [asked for asked in (as_run if runs else None, rule_of(op)) if asked is not None]


# The layout of a result at one sample: strides, and the offset of a view from its argument.
Place = tuple[Strides, int]
Asked = Callable[[fx.Node, Sequence[torch.Tensor], SizeSamples, int], list[Place]]


def as_made(rule: Rule) -> Asked:
    """Apply a rule for the first result. Other results of the same shape share its layout (a maximum and its index)."""

    def asked(n: fx.Node, made: Sequence[torch.Tensor], samples: SizeSamples, k: int) -> list[Place]:
        args, named = arguments(n, samples, k)
        first, *rest = (bare(t, samples, k) for t in made)
        strides = rule(first, *args, **named)
        return [(strides if t.shape == first.shape else t.stride(), 0) for t in (first, *rest)]

    return asked


def as_run(n: fx.Node, made: Sequence[torch.Tensor], samples: SizeSamples, k: int) -> list[Place]:
    """Run eager's kernel, and take the strides of its results."""
    op: Any = n.target
    args, named = arguments(n, samples, k)
    said = [bare(t, samples, k) for t in made]
    every = [*tensors_in([*args, *named.values()]), *said]
    places = tensors_in([*args, *named.values()])[1:]
    beyond = not facts(op).checks and any(t.numel() == 0 for t in every) and any(t.numel() for t in places)
    if beyond or sum(reach(t.shape, t.stride()) for t in every) > FEW:
        raise ValueError("too large, or places beyond what is there")
    new = tensors_in(attempt(op, args, named, on_cpu))
    if [t.shape for t in new] != [t.shape for t in said]:
        raise ValueError("other results")
    return [(t.stride(), 0) for t in new]


def on_cpu(x: Any) -> Any:
    """Convert an argument to a CPU argument, with zeros as data."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(on_cpu, x))
    if isinstance(x, torch.Tensor):
        zeros = torch.zeros(reach(x.shape, x.stride()), dtype=x.dtype)
        return zeros.as_strided(x.shape, x.stride())
    return CPU if isinstance(x, torch.device) else x


def as_viewed(n: fx.Node, made: Sequence[torch.Tensor], samples: SizeSamples, k: int) -> list[Place]:
    """Run ATen's code for views on a tensor that has only a shape and strides."""
    args, named = arguments(n, samples, k)
    new = tensors_in(n.target(*args, **named))  # type: ignore[operator]
    base = args[0]  # it may be a number: the conjugate of a factor that is a number
    if not isinstance(base, torch.Tensor) or len(new) != len(made) or any(t.dtype is not base.dtype for t in new):
        raise ValueError("other elements")
    return [(t.stride(), int(t.storage_offset())) for t in new]


def settle_strides(graph: fx.Graph, names_only: bool = False, hold: bool = False) -> None:
    """Put eager's strides into the metadata of a graph with tensors on the CPU, or on our device, which follows the
    CPU. `names_only`: only in dimensions of size one, if others rely on the layout of the graph's results. `hold`: if
    eager's strides cannot be expressed in symbols because sizes are zero or one here, guard on these sizes; other sizes
    are then captured again."""
    samples = SizeSamples(graph, hold)
    changed: set[fx.Node] = set()
    for n in graph.nodes:
        val = n.meta.get("val")
        if n.op != "call_function" or val is None:
            continue
        if n.target is operator.getitem:
            new = n.args[0].meta["val"][n.args[1]] if n.args[0] in changed else val
        elif isinstance(n.target, OpOverload) and not has_new_sizes(val):
            new = settled(n, traced(n) if changed.intersection(n.all_input_nodes) else val, samples)
        else:
            continue
        if new is not val and layout(new) != layout(val) and not (names_only and moved(new, val)):
            if any(t is held for t in tensors_in(new) for held in samples.held):
                samples.hold(t for v in (new, *(a.meta["val"] for a in n.all_input_nodes)) for t in tensors_in(v))
            n.meta["val"] = new
            changed.add(n)


def share_memory(graph: fx.Graph) -> bool:
    """Whether two results share memory. With gradients, AOTAutograd recreates the view of a result outside of the
    graph, with the strides that it traced."""
    *_, output = graph.nodes
    roots = [view_root(n) for n in output.all_input_nodes]
    return len(set(roots)) < len(roots)


def has_new_sizes(val: Any) -> bool:
    """Whether data determines its shape: tracing it again would give new symbols each time."""
    return any(isinstance(m, torch.SymInt) and m.node.hint is None for t in tensors_in(val) for m in t.shape)


def tensors_in(val: Any) -> list[torch.Tensor]:
    return [t for t in flat(val) if isinstance(t, torch.Tensor)]


def layout(val: Any) -> list[tuple[list[Any], list[Any], Any]]:
    """Shapes, strides and offsets in a form that compares without guarding on symbols."""

    def text(x: Any) -> Any:
        return x.node.expr if isinstance(x, torch.SymInt) else x

    return [([*map(text, t.shape)], [*map(text, t.stride())], text(t.storage_offset())) for t in tensors_in(val)]


def moved(new: Any, val: Any) -> bool:
    """Whether any element has a different address."""
    return any(at != was or any(n != 1 and a != b for n, a, b in zip(shape, strides, before, strict=True))
               for (shape, strides, at), (_, before, was) in zip(layout(new), layout(val), strict=True)
               if 0 not in shape)


def traced(n: fx.Node) -> Any:
    """The result of torch's rule for the node's present arguments."""
    val = n.meta["val"]
    mode = next((t.fake_mode for t in flat(val) if isinstance(t, FakeTensor)), None)
    if mode is None:
        return val
    args, named = fx.node.map_arg((n.args, n.kwargs), example)
    try:
        with mode:
            new = n.target(*args, **named)  # type: ignore[operator]
    except (RuntimeError, ValueError):  # torch's rule would need a copy for this view; our view does not
        return val
    return new if [t.shape for t in tensors_in(new)] == [t.shape for t in tensors_in(val)] else val


def settled(n: fx.Node, val: Any, samples: SizeSamples) -> Any:
    """The result of eager's kernel for the node's present arguments, if it differs from torch's rule."""
    rules = rules_of(n.target)  # type: ignore[arg-type]
    made = tensors_in(val)
    given = [t for a in n.all_input_nodes for t in tensors_in(a.meta["val"])]
    here = ("cpu", backend_name())
    if not rules or not made or any(
            not isinstance(t, FakeTensor) or t.device.type not in here or t.layout is not torch.strided
            for t in (*made, *given)):
        return val
    for rule in rules:
        try:
            with unset_fake_temporarily(), no_python_dispatcher():  # ATen's own code, not rules that replace it
                asked = [rule(n, made, samples, 0)]
                with suppress(ValueError) if samples.may_hold else nullcontext():
                    asked += [rule(n, made, samples, k) for k in range(1, len(samples))]
            new = [placed(t, [a[j] for a in asked], given, samples, is_view(n.target)) for j, t in enumerate(made)]
            break
        except (RuntimeError, ValueError, TypeError, IndexError):  # an error of eager will come from the call itself
            pass
    else:
        return val
    if all(a is b for a, b in zip(new, made, strict=True)):
        return val
    left = iter(new)
    return [next(left) if isinstance(t, torch.Tensor) else t for t in val] if isinstance(val, (list, tuple)) else new[0]


def placed(t: torch.Tensor, wanted: Sequence[Place], given: Sequence[torch.Tensor], samples: SizeSamples, view: bool
           ) -> torch.Tensor:
    """A tensor like t with the wanted layout at each sample; t itself if it has it already, or if no layout for all
    sizes is known. If sizes may be held, a layout for the first sample suffices."""
    start = given[0].storage_offset() if view else 0
    behind = t.storage_offset() - start if view else 0
    have = [(tuple(samples.value(s, k) for s in t.stride()), samples.value(behind, k)) for k in range(len(wanted))]
    if have == list(wanted):
        return t
    written = samples.written([w for w, _ in wanted], (t.stride(), *(x.stride() for x in given)), t.shape) if len(
        wanted) == len(samples) else None
    offset = t.storage_offset() if [a for _, a in have] == [a for _, a in wanted] else start + wanted[0][1]
    known = written is not None and not (
        view and any(samples.value(offset - start, k) != a for k, (_, a) in enumerate(wanted)))
    if not known and (not samples.may_hold or have[0] == wanted[0]):
        return t
    strides: Sequence[Any] = written if written is not None and known else wanted[0][0]
    offset = offset if known else start + wanted[0][1]
    mode = t.fake_mode  # type: ignore[attr-defined]
    with mode, mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext():
        new = t.as_strided(t.shape, strides, offset) if view else torch.empty_strided(
            t.shape, strides, dtype=t.dtype, device=t.device)
    if not known:
        samples.held.append(new)
    return new


def arguments(n: fx.Node, samples: SizeSamples, k: int) -> Any:
    """A node's arguments, positional and by name, at the numbers of sample k."""
    return fx.node.map_aggregate((n.args, n.kwargs), lambda x: plain(x, samples, k))


def example(n: fx.Node) -> Any:
    """What stands for a node's result when its users are asked for strides; for a run-time number, some number."""
    return n.meta.get("example", n.meta["val"])


def plain(x: Any, samples: SizeSamples, k: int) -> Any:
    """An argument at the numbers of sample k."""
    if isinstance(x, fx.Node):
        x = example(x)
    if isinstance(x, (torch.SymFloat, torch.SymBool)):
        return x.node.hint  # no layout depends on it, and asking for its value would add a guard
    return bare(x, samples, k) if isinstance(x, torch.Tensor) else samples.value(x, k) if isinstance(
        x, torch.SymInt) else x


def bare(t: torch.Tensor, samples: SizeSamples, k: int) -> torch.Tensor:
    """A meta tensor with the same shape and strides at sample k, so that ATen's own code can compute with them."""
    shape, strides = ([samples.value(s, k) for s in x] for x in (t.shape, t.stride()))
    with unset_fake_temporarily():
        return torch.empty_strided(shape, strides, dtype=t.dtype, device="meta")

"""A fast path from a call to its compiled graph, and through autograd.

AOTAutograd's wrappers handle everything a graph may do: change its inputs, return views of them, pass sizes, random
states and tensor subclasses to its backward. Most graphs just read tensors and return new ones. Those get the wrappers
of this file, which save half of the Python time of a call and its backward (some 150 us when kernels have just streamed
through the caches). Every other graph, and every unusual call of these graphs (a second derivative, a gradient with
another layout), takes AOTAutograd's path: our autograd function is a subclass of AOTAutograd's. Dynamo's own part of a
call is shortened by dropping the marks that it sets for profilers, and the layers that torch.compile puts around a
function and around a graph (`torch_compat/short_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from flambeau.torch_compat import patches
from flambeau.torch_compat.aot import (
    BackwardState,
    OutputType,
    RuntimeWrapper,
    ViewAndMutationMeta,
    mark_dynamic,
    without_serializer,
)
from flambeau.torch_compat.autograd import (
    apply_directly,
    call_directly,
    current_transform,
    deterministic_algorithms,
    saved_tensors_hooks,
    set_grad_enabled,
)
from flambeau.torch_compat.dynamo import innermost_fn, skip_code
from flambeau.torch_compat.short_calls import unwatched, watch

from .regions.nodes import namespace

NATIVE = ("aten", "prim", "prims")


@contextmanager
def lean_wrappers(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """While active, AOTAutograd puts our wrappers around plain graphs, whether newly compiled or from its cache."""
    if not ordinary(gm, inputs):
        yield
        return

    def post_compile(full: Callable[..., Any], self: RuntimeWrapper, compiled: Callable[..., Any], aot_config: Any, *,
                     runtime_metadata: ViewAndMutationMeta) -> Callable[..., Any]:
        meta = runtime_metadata
        if self.disable_amp or not returns_new_tensors(meta):
            return full(self, compiled, aot_config, runtime_metadata=meta)
        if not self.trace_joint:
            return inference(compiled, meta)
        function = getattr(compiled, "__self__", None)  # `compiled` is CompiledFunction.apply
        if self.indices_of_inps_to_detach or not isinstance(function, type) or not carries_tensors(function, meta):
            return full(self, compiled, aot_config, runtime_metadata=meta)
        return training(function, meta)

    with patches.WRAPPERS.applied(post_compile):
        yield


def short_way(compiled: Callable[..., Any], first: Sequence[Any] = ()) -> Callable[..., Any] | None:
    """A function that does nothing but call our wrapper with `first` and its arguments in one list; None if AOTAutograd
    put other wrappers around it."""
    inner = innermost_fn(compiled)
    run = without_serializer(getattr(inner, "__wrapped__", inner))
    return unwatched(run, first) if getattr(run, "ours", None) is run else None  # wrappers copy attributes


def ours(run: Callable[..., Any]) -> Callable[..., Any]:
    run._boxed_call = True  # type: ignore[attr-defined]
    run.ours = run  # type: ignore[attr-defined]
    return run


# ---- which graphs are plain ------------------------------------------------------------------------------


def ordinary(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph has no foreign operators (AOTAutograd watches their first call) and no saved-tensor hooks."""
    operators = (n.target for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
    foreign = any(space not in NATIVE for t in operators if (space := namespace(t)) is not None)
    hooked = saved_tensors_hooks(True) is not None
    return not foreign and not hooked and not any(isinstance(x, BackwardState) for x in inputs)


def returns_new_tensors(m: ViewAndMutationMeta) -> bool:
    """Whether all results are new tensors, and inputs and the grad mode are left unchanged."""
    changed = m.num_mutated_inp_runtime_indices or m.mutated_graph_handled_indices_seen_by_autograd
    return not (changed or m.num_intermediate_bases or m.grad_enabled_mutation is not None
                or m.is_rng_op_functionalized or (m.dynamic_outputs and mark_dynamic is None)) and all(
        o.output_type is OutputType.non_alias and issubclass(o.raw_type, torch.Tensor) for o in m.output_info)


def carries_tensors(function: Any, m: ViewAndMutationMeta) -> bool:
    """Whether forward passes only numbers, and tensors of known layouts, to backward."""
    other = (function.maybe_subclass_metadata, m.num_opaque_objects_saved_for_bw, m.tokens, m.num_backward_tokens,
             m.num_graphsafe_rng_states, m.indices_of_inputs_that_requires_grad_with_mutations_in_bw)
    return not any(other) and all(getattr(t, "memory_format", None) is not None for t in m.subclass_tangent_meta)


# ---- the wrappers ----------------------------------------------------------------------------------------


def marked(run: Callable[..., Any], m: ViewAndMutationMeta) -> Callable[..., Any]:
    """`run`, followed by marks on the dynamic sizes of the results."""
    dims = [(k, o.dynamic_dims) for k, o in enumerate(m.output_info) if o.dynamic_dims]

    def mark(*args: Any) -> Any:
        outs = run(*args)
        for k, which in dims:
            mark_dynamic(outs[k], which)  # type: ignore[misc]
        return outs

    return mark if dims else run


def inference(compiled: Callable[..., Any], m: ViewAndMutationMeta) -> Callable[[list[Any]], Any]:
    call = marked(without_serializer(compiled), m)

    def run(args: list[Any]) -> Any:
        if not torch.is_grad_enabled():
            return call(args)
        # ATen operators called directly would record autograd nodes if an input requires gradients.
        set_grad_enabled(False)
        try:
            return call(args)
        finally:
            set_grad_enabled(True)

    return ours(run)


def training(function: Any, m: ViewAndMutationMeta) -> Callable[[list[Any]], Any]:
    made = autograd_function(function, m)
    apply, full = marked(apply_directly(made), m), marked(made.apply, m)

    def run(args: list[Any]) -> Any:
        if torch.is_grad_enabled():
            return (apply if current_transform() is None else full)(*args)
        with torch.enable_grad():  # the graph was traced with gradients on: the function enables them itself
            return full(*args)

    return ours(run)


def autograd_function(full: Any, m: ViewAndMutationMeta) -> Any:
    """A subclass of AOTAutograd's autograd function with a short path for the common call."""
    count = m.num_forward_returns
    checked = m.tensors_saved_for_backwards_with_vc_check_slice
    unchecked = m.tensors_saved_for_backwards_no_vc_check_slice
    constant = [k for k, o in enumerate(m.output_info) if not o.requires_grad]
    tangents = [k for k, o in enumerate(m.output_info) if getattr(o, "requires_grad_for_backward", o.requires_grad)]
    layouts = [t.memory_format for t in m.subclass_tangent_meta]  # strides, or a memory format for symbolic sizes
    expected = [(k, t.stride, t.memory_format) for k, t in zip(tangents, layouts, strict=True)]  # type: ignore[union-attr]
    symints = m.symints_saved_for_backwards_slice
    boxed = getattr(full, "boxed_grads_call", False)  # gradients come as one list that the backward empties
    known: tuple[Any, Any] = None, None  # the compiled backward, and the function in its wrapper

    def detached(tensors: list[Tensor]) -> list[Tensor]:
        for k, x in enumerate(tensors):
            if x._is_view():
                tensors[k] = x.detach()
        return tensors

    class CompiledFunction(full):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outs = full.compiled_fw(list(args))
            ctx.save_for_backward(*detached(outs[checked]))
            ctx._tensors_no_vc_check = detached(outs[unchecked])
            ctx.symints, ctx.opaque_objects = outs[symints], ()
            if constant:
                ctx.mark_non_differentiable(*[outs[k] for k in constant])
            ctx._materialize_non_diff_grads = False
            return tuple(outs[:count])

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            nonlocal known
            grads: Any = given[0] if boxed else given
            compiled = full.compiled_bw
            if (compiled is None or torch.is_grad_enabled() or current_transform() is not None
                    or (m.deterministic is False and deterministic_algorithms()) or m.bw_donated_idxs):
                return full.backward(ctx, *given)
            args = [*ctx.symints, *ctx.saved_tensors, *ctx._tensors_no_vc_check]
            for k, stride, order in expected:
                g = grads[k]
                if type(g) is not torch.Tensor or not (
                        g.stride() == stride if order is None else g.is_contiguous(memory_format=order)):
                    return full.backward(ctx, *given)
                args.append(g)
            if boxed:
                grads.clear()
            ctx.maybe_clear_saved_tensors()
            if compiled is not known[0]:
                known = compiled, innermost_fn(compiled)
            before = watch(None)
            try:
                return tuple(known[1](args))
            finally:
                watch(before)

    call_directly(CompiledFunction)
    # Keep Dynamo out of this frame if a compiled function calls backward(), as none of our frames is below it.
    skip_code(CompiledFunction.backward.__code__)
    return CompiledFunction

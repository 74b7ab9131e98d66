"""AOTAutograd: forward and backward graphs, the wrappers around compiled graphs, and its disk cache."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config, partitioners
from torch._functorch._aot_autograd import (
    aot_autograd_result,
    autograd_cache,
    descriptors,
    functional_utils,
    runtime_wrappers,
    schemas,
)
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper, SerializableCompiledFunction
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._functorch.aot_autograd import AOT_COUNTER, SerializableAOTDispatchCompiler, aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition, must_recompute
from torch.fx.experimental._backward_state import BackwardState

__all__ = ["AOT_COUNTER", "AOTAutogradCache", "BackwardState", "OutputType", "RuntimeWrapper",
           "SerializableAOTDispatchCompiler", "ViewAndMutationMeta", "VIEW_SEQUENCE",
           "aot_autograd", "aot_autograd_result", "aot_function", "autograd_cache", "by_own_memory", "check_cacheable",
           "config",
           "descriptors", "functionalization", "mark_dynamic", "min_cut_rematerialization_partition",
           "must_recompute", "partitioners", "runtime_wrappers", "saved_output", "schemas",
           "without_serializer"]

# Tells the next graph which sizes of a result are dynamic. It has another name from 2.12 on.
mark_dynamic = getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices",
                       getattr(runtime_wrappers, "maybe_mark_dynamic_helper", None))
check_cacheable = autograd_cache.check_cacheable
# The views from which functionalization recreates results out of an input or each other. None if a release lacks these
# classes: entries with such views then cannot be written.
functionalization = getattr(torch._C, "_functionalization", None)
VIEW_SEQUENCE = getattr(functional_utils, "ViewMetaSequence", None)


def without_serializer(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function without the object that AOTAutograd puts around it if its cache is on."""
    return run.compiled_fn if isinstance(run, SerializableCompiledFunction) else run


def saved_output(output: Any, position: int) -> None:
    """Describe one more result of a forward's graph, at this position: a tensor that is saved for its backward."""
    descs = list(output.meta.get("desc") or ())
    if descs:
        descs.insert(position, descriptors.SavedForBackwardsAOTOutput(len(descs)))
        output.meta["desc"] = descs


def by_own_memory(full: Callable[..., Any], meta: Any, inner: Any, *args: Any, **named: Any) -> Any:
    """AOTAutograd's metadata of results after inputs that overlap were merged (wraps `create_synthetic_base_metadata`).

    `inner` maps each input to its new number, or to a pair if it is recreated from the merged memory. A view of such an
    input is recreated from the merged memory by its strides: torch would replay the input's view operations on it, and
    could read beyond lists of parts. Numbers of intermediates and of results are kept: torch would mistake them for
    numbers of inputs.
    """
    of_inputs = (OutputType.alias_of_input, OutputType.is_input)
    own = {k: o.base_idx for k, o in enumerate(meta.output_info) if o.output_type not in of_inputs}
    given = copy(meta)
    given.output_info = [
        replace(o, base_idx=None) if k in own else
        replace(o, view_meta_sequence=None) if isinstance(inner[o.base_idx], tuple) else o
        for k, o in enumerate(meta.output_info)]
    new, *rest = full(given, inner, *args, **named)
    for k, number in own.items():
        new.output_info[k] = replace(new.output_info[k], base_idx=number)
    return new, *rest

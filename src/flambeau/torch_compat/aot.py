"""AOTAutograd: forward and backward graphs, the wrappers around compiled ones, and its cache of those on disk."""

from __future__ import annotations

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
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._functorch.aot_autograd import AOT_COUNTER, SerializableAOTDispatchCompiler, aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition, must_recompute
from torch.fx.experimental._backward_state import BackwardState

__all__ = ["AOT_COUNTER", "AOTAutogradCache", "BackwardState", "OutputType", "RuntimeWrapper",
           "SerializableAOTDispatchCompiler", "ViewAndMutationMeta", "VIEW_SEQUENCE",
           "aot_autograd", "aot_autograd_result", "aot_function", "autograd_cache", "check_cacheable", "config",
           "descriptors", "functionalization", "mark_dynamic", "min_cut_rematerialization_partition",
           "must_recompute", "partitioners", "schemas"]

# Tells the next graph which sizes of a result may change. Its name is another from 2.12 on.
mark_dynamic = getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices",
                       getattr(runtime_wrappers, "maybe_mark_dynamic_helper", None))
check_cacheable = autograd_cache.check_cacheable
# Views that functionalization found, by which results are made of an input or of each other. None where a release has
# no such classes: then entries with such views cannot be written.
functionalization = getattr(torch._C, "_functionalization", None)
VIEW_SEQUENCE = getattr(functional_utils, "ViewMetaSequence", None)

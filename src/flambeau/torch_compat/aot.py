"""AOTAutograd: forward and backward graphs, the wrappers around compiled ones, and its cache of those on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

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
from torch._ops import OpOverload
from torch.fx.experimental._backward_state import BackwardState
from torch.utils._ordered_set import OrderedSet

__all__ = ["AOT_COUNTER", "AOTAutogradCache", "BackwardState", "OutputType", "RuntimeWrapper",
           "SerializableAOTDispatchCompiler", "ViewAndMutationMeta", "VIEW_SEQUENCE",
           "aot_autograd", "aot_autograd_result", "aot_function", "autograd_cache", "check_cacheable", "config",
           "descriptors", "fused_with", "functionalization", "mark_dynamic", "min_cut_rematerialization_partition",
           "must_recompute", "schemas"]

# Tells the next graph which sizes of a result may change. Its name is another from 2.12 on.
mark_dynamic = getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices",
                       getattr(runtime_wrappers, "maybe_mark_dynamic_helper", None))
check_cacheable = autograd_cache.check_cacheable
# Views that functionalization found, by which results are made of an input or of each other. None where a release has
# no such classes: then entries with such views cannot be written.
functionalization = getattr(torch._C, "_functionalization", None)
VIEW_SEQUENCE = getattr(functional_utils, "ViewMetaSequence", None)


@contextmanager
def fused_with(fusing: Iterable[OpOverload], maps: Iterable[OpOverload]) -> Iterator[None]:
    """Torch's cut knows the operators that Inductor is left with after its decompositions: of others it thinks that
    they read all they take from memory. Within, these count too. All releases; there is no hook for it."""
    usual, known = partitioners.get_default_op_list, partitioners.get_default_op_list()
    again = OrderedSet([*known.recomputable_ops, *(op.overloadpacket for op in maps)])
    taken = OrderedSet([*known.fusible_ops, *again, *(op.overloadpacket for op in fusing)])
    partitioners.get_default_op_list = lambda: replace(known, fusible_ops=taken, recomputable_ops=again)
    try:
        yield
    finally:
        partitioners.get_default_op_list = usual

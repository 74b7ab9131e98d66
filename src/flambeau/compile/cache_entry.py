"""Encodes a compiled graph as plain data for the disk cache. Lists the parts of torch's entry to keep, and their types.

An entry keeps what torch's wrappers around a compiled function depend on. It omits data used only for logs, the record
of where Dynamo found its inputs, and wrappers that have nothing to do. All private torch classes that an entry consists
of are listed here, and nowhere else.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx.graph_module import reduce_graph_module

from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.runtime.plain_data import Attributes, Codec, Malformed, Record, Unwritable
from flambeau.runtime.plain_program import FUNCTIONS, RECORDS, names
from flambeau.torch_compat.aot import VIEW_SEQUENCE, aot_autograd_result, descriptors, functionalization, schemas
from flambeau.torch_compat.dispatch import disable_current_modes
from flambeau.torch_compat.fake import FunctionalTensor

TYPES = (torch.Tensor, FunctionalTensor, nn.Parameter, int, float, bool, type(None), torch.SymInt)
LOGGED = dict.fromkeys(("aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str", "min_cut_info_str"))
# (module, class, fields that are written as a fixed value instead, attributes that are set after construction). Not
# every torch version has all of these.
TORCHS: tuple[tuple[ModuleType, str, dict[str, Any], tuple[str, ...]], ...] = (
    (aot_autograd_result, "BundledAOTAutogradResult", {**LOGGED, "dispatch_wrappers": []}, ()),
    (aot_autograd_result, "BundledCompiledForward", {}, ()),
    (aot_autograd_result, "BundledCompiledBackward", {}, ()),
    (schemas, "ViewAndMutationMeta", {"traced_tangents": []}, ("output_types", "dynamic_saved_tensors_idxs")),
    (schemas, "InputAliasInfo", {}, ()),
    (schemas, "OutputAliasInfo", {}, ()),
    (schemas, "MemoryFormatMeta", {}, ()),
    (schemas, "PlainTensorMeta", {}, ()),
    (schemas, "CacheableAOTConfig", {"aot_autograd_arg_pos_to_source": None}, ()),
    (schemas, "AOTConfig", {"aot_autograd_arg_pos_to_source": None, "cache_info": None}, ()),
)


def encode(entry: Any) -> bytes:
    """Encode an entry of torch's cache with our packages in it. Unwritable for a type that is not in the table."""
    for wrapper in entry.dispatch_wrappers:
        if getattr(wrapper, "needs_post_compile", True):
            raise Unwritable(f"it needs the wrapper {type(wrapper).__name__}")
    with disable_current_modes():  # the modes of a trace in progress, because the tensors here are real
        return codec().encode(entry)


def decode(data: bytes) -> Any:
    """Decode an entry. Raises Malformed if the data is not one."""
    with disable_current_modes():
        made = codec().decode(data)
    if type(made) is not aot_autograd_result.BundledAOTAutogradResult:
        raise Malformed(f"it is a {type(made).__name__}")
    return made


@cache
def codec() -> Codec:
    from .disk_cache import Stored

    torchs = [Record(kind, instead, after) for module, name, instead, after in TORCHS
              if (kind := getattr(module, name, None)) is not None]
    # Descriptions of inputs and results, used in messages.
    described = [Record(kind) for kind in vars(descriptors).values()
                 if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    own = [Attributes(Stored, package=LaunchPlan), BackwardModule()]
    return Codec([*RECORDS, *own, *torchs, *described, *views()], enums=[schemas.OutputType],
                 values=names(*FUNCTIONS, *TYPES))


class BackwardModule(Attributes):
    """The backward graph, which compiled autograd traces again: stored as Python source and the tensors it holds."""

    def __init__(self) -> None:
        super().__init__(aot_autograd_result.SerializedGraphModule, imports=str, code=str,
                         tensors=dict[str, torch.Tensor])

    def values(self, x: Any) -> list[Any]:
        body, imports = x.args
        if x.fn is not reduce_graph_module or body["_modules"] or body["_parameters"]:
            raise Unwritable("the backward graph holds modules")
        return [imports, body["_code"], body["_buffers"]]

    def new(self, *values: Any) -> Any:
        imports, code, tensors = values
        made: Any = object.__new__(self.kind)
        made.fn = reduce_graph_module
        made.args = {**vars(nn.Module()), "_code": code, "_buffers": tensors}, imports
        return made


# ---- view sequences: how results are recreated as views of inputs or of each other -------------------------


def views() -> list[Record]:
    if functionalization is None or VIEW_SEQUENCE is None:
        return []
    kinds = [kind for kind in vars(functionalization).values() if isinstance(kind, type) and hasattr(kind, "as_tuple")]
    return [ViewSequence(VIEW_SEQUENCE), *(ViewStep(kind, functionalization.InverseReturnMode) for kind in kinds)]


class ViewSequence(Attributes):
    """A view sequence without its metadata, which torch uses only to compare traces."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind, sequence=list[Any])

    def new(self, *values: Any) -> Any:
        made: Any = object.__new__(self.kind)
        made.sequence, made.metadata = *values, None
        return made


class ViewStep(Attributes):
    """One view step, stored as the argument tuple of its native class, whose constructor checks the element types."""

    def __init__(self, kind: type, mode: Any) -> None:
        super().__init__(kind, parts=tuple[Any, ...])
        self.mode = mode

    def values(self, x: Any) -> list[Any]:
        return [tuple(int(y) if isinstance(y, self.mode) else y for y in x.as_tuple())]

    def new(self, *values: Any) -> Any:
        (reapply, symbolic, mode, *rest), = values
        return self.kind((reapply, symbolic, self.mode(mode), *rest))

"""What a program says about being recorded: the arguments that it writes to, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from flambeau.ir.nodes import Value
from flambeau.ir.program import Call, Copy, Program, TableKernel
from flambeau.torch_compat.ops import HigherOrderOperator, OpOverload

from .placement import flat

ALLOWED = ("aten", "prims", "flambeau")  # other operators may do anything, and a capture that fails is costly
SIZED_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# They read on the host what the device computed, and no tag says so.
WAITS = ("item", "_local_scalar_dense", "is_nonzero", "equal", "_assert_async", "multinomial", "histc", "bincount",
         "segment_reduce", "ctc_loss", "_ctc_loss", "ormqr", "geqrf", "lu_unpack", "record_stream")
WAITS_PREFIX = ("linalg_", "_linalg_", "unique", "_unique", "masked_select", "nonzero")


@dataclass(frozen=True)
class Recordable:
    """What of a program matters here; plain data that goes along with its package."""

    label: str
    steps: int
    written: tuple[int, ...]  # positions of the arguments that it writes to
    obstacle: str = ""  # why it cannot be recorded
    backward: bool = False


def recordable(p: Program, gm: fx.GraphModule, positions: list[int], device: torch.device) -> Recordable:
    names = [name for s in p.steps for name in getattr(s, "origins", (getattr(s, "origin", "copy"),)) if name]
    label = f"{names[0]} ... {names[-1]}" if len(names) > 1 else "".join(names)
    where = dict(zip(p.inputs, positions, strict=True))
    written = sorted({where[name] for name in writes(p) if name in where})
    count = len(p.steps)
    backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in gm.graph.nodes)
    return Recordable(f"{label} ({count} steps)", count, tuple(written), next(obstacles(p, gm, device), ""), backward)


def writes(p: Program) -> Iterator[str]:
    """The buffers that its steps write to."""
    for s in p.steps:
        if isinstance(s, Copy):
            yield s.dst
        elif isinstance(s, Call):
            schema = getattr(s.target, "_schema", None)
            given = dict(s.kwargs)
            for k, a in enumerate(schema.arguments if schema is not None else ()):
                if a.is_write:
                    value = s.args[k] if k < len(s.args) else given.get(a.name)
                    yield from (v.buffer for v in flat(value) if isinstance(v, Value))
        else:
            kernel = p.kernels[s.kernel]
            params = kernel.columns if isinstance(kernel, TableKernel) else kernel.params
            rows = len(s.args) // len(params) if isinstance(kernel, TableKernel) else 1
            for k, param in enumerate(params):
                if param.written:
                    yield from s.args[k * rows : (k + 1) * rows]


def obstacles(p: Program, gm: fx.GraphModule, device: torch.device) -> Iterator[str]:
    """Why a program is not recorded."""
    if not p.steps:
        yield "nothing is launched"
    for s in p.steps:
        if isinstance(s, Call):
            op = s.target
            if isinstance(op, HigherOrderOperator):
                yield f"{op.name()} runs on the host"
            elif isinstance(op, OpOverload):
                name = op._schema.name.partition("::")[2]
                if op.namespace not in ALLOWED:
                    yield f"{op} is an operator from outside of torch"
                elif SIZED_BY_DATA & set(op.tags) or name in WAITS or name.startswith(WAITS_PREFIX):
                    yield f"{op} makes the host wait for data"
                elif any(v.dtype is torch.bool for v in flat(s.args) if isinstance(v, Value)) and "index" in name:
                    yield f"{op} by a mask makes the host wait for data"
    for n in gm.graph.nodes:
        constant = n.op in ("placeholder", "get_attr", "output") or "lift_fresh" in str(n.target)
        for val in flat(n.meta.get("val")) if not constant else ():
            if isinstance(val, torch.Tensor) and val.device != device:
                yield f"{n.target} runs on {val.device}"

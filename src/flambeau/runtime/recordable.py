"""Whether a program can be recorded as a CUDA graph: the arguments it writes to, and what prevents it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from flambeau.ir.nodes import Value
from flambeau.ir.program import Call, Copy, Launch, Program, Synchronize
from flambeau.ops.facts import facts
from flambeau.schedule.streams.order import accesses
from flambeau.torch_compat.ops import HigherOrderOperator, OpOverload
from flambeau.torch_compat.streams import NUMBERS

from .operator_calls import read_here
from .placement import flat
from .streams.host_copies import send

MASKS = (torch.bool, torch.uint8)

@dataclass(frozen=True)
class Recordable:
    """The facts about a program that matter for recording, as plain data stored with its package."""

    label: str
    steps: int
    written: tuple[int, ...]  # positions of the arguments that the program writes to
    obstacle: str = ""  # why it cannot be recorded
    backward: bool = False


def recordable(p: Program, gm: fx.GraphModule, device: torch.device) -> Recordable:
    names = [name for s in p.steps if isinstance(s, (Launch, Call, Copy))
             for name in getattr(s, "origins", (getattr(s, "origin", "copy"),)) if name]
    label = f"{names[0]} ... {names[-1]}" if len(names) > 1 else "".join(names)
    where = {name: p.arguments.index(name) for name in p.inputs}
    written = sorted({where[name] for name in writes(p) if name in where})
    count = len(p.steps)
    backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in gm.graph.nodes)
    return Recordable(f"{label} ({count} steps)", count, tuple(written), next(obstacles(p, gm, device), ""), backward)


def writes(p: Program) -> Iterator[str]:
    """The buffers that a program's steps write to."""
    for s in p.steps:
        yield from (name for name, written in accesses(s, p.kernels).items() if written)


def obstacles(p: Program, gm: fx.GraphModule, device: torch.device) -> Iterator[str]:
    """The reasons why a program cannot be recorded."""
    if not p.steps:
        yield "nothing is launched"
    if any(isinstance(s, Synchronize) for s in p.steps):
        yield "it waits for the device"
    for s in p.steps:
        if isinstance(s, Call):
            op = s.target
            if op is read_here:
                yield "the host reads a number of data"
            elif isinstance(op, HigherOrderOperator):
                yield f"{op.name()} runs on the host"
            elif isinstance(op, OpOverload):
                if not facts(op).known:  # its effects are unknown, and a failed capture is costly
                    yield f"{op} is an operator from outside of torch"
                elif facts(op).waits:
                    yield f"{op} makes the host wait for data"
                elif facts(op).masks and any(v.dtype in MASKS for v in flat(s.args[1:2]) if isinstance(v, Value)):
                    yield f"{op} by a mask makes the host wait for data"
    for n in gm.graph.nodes:
        constant = (n.op in ("placeholder", "get_attr", "output") or "lift_fresh" in str(n.target)
                    or NUMBERS in n.meta or n.target is send)
        for val in flat(n.meta.get("val")) if not constant else ():
            if isinstance(val, torch.Tensor) and val.device != device:
                yield f"{n.target} runs on {val.device}"

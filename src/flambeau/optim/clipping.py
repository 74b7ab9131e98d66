"""Gradient clipping by norm: one pass over all tensors for the norm, and one to scale.

The norm of all tensors is combined from those of fixed blocks. It does not matter which thread or program computes
which block, so results do not vary between runs.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.ir.build import simple_combine
from flambeau.ir.dtypes import DType, opmath
from flambeau.ir.expr import Expr, cast, load
from flambeau.ir.index import ONE, ZERO, as_index
from flambeau.ir.nodes import Value, as_indices, dim_vars
from flambeau.ir.numerics import wants_bits
from flambeau.ir.program import BufferPlan, Item, Launch, LoopKernel, Param, Program, TableKernel
from flambeau.ir.scalar import abs_
from flambeau.pipeline import LOCK
from flambeau.runtime.address_tables import counts_of, words
from flambeau.runtime.memory_layout import dense
from flambeau.runtime.tensor_lists import Watch
from flambeau.runtime.watchers import BOUND
from flambeau.schedule.tensor_tables import PLACE
from flambeau.targets.base import Run, Target
from flambeau.torch_compat.ops import foreach_mul_

from .multi_tensor import DECLINED, ListFunction, check_plain
from .row_kernels import Declined, built, target_of

MOST_PLANS = 4  # for each number of tensors
# For each order: what is accumulated for an element, how these are combined, and the norm from the blocks' results.
ORDERS: dict[float, tuple[Callable[[Expr], Expr], str, Callable[[torch.Tensor], torch.Tensor]]] = {
    1.0: (abs_, "sum", torch.sum),
    2.0: (lambda x: x * x, "sum", lambda t: t.sum().sqrt()),
    math.inf: (abs_, "max", torch.amax),
}


def total_norm(original: Callable[..., torch.Tensor], options: tuple[str | None, str], tensors: Any,
               norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None) -> torch.Tensor:
    """torch.nn.utils.get_total_norm."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    try:
        if not tensors or error_if_nonfinite or float(norm_type) not in ORDERS:
            raise Declined("nothing to norm, an order without a kernel, or a check of the result")
        if wants_bits(options[1]):
            raise Declined("eager adds up in another order")
        return norm_of(tensors, float(norm_type), options[0])
    except Declined as reason:
        DECLINED[f"get_total_norm: {reason}"] += 1
        return original(tensors, norm_type, error_if_nonfinite, foreach)


@dataclass
class NormGroup:
    """Tensors of one device and dtype, and the program for their blocks."""

    dtype: DType
    members: torch.Tensor
    partial: Run  # computes a value for each block


@dataclass(eq=False)
class Plan:
    """The programs for tensors with these dtypes, sizes and layouts."""

    watch: Watch
    groups: list[NormGroup]
    compute: DType
    result: DType
    stale: bool = False  # its programs were bound before the watchers changed

    def __post_init__(self) -> None:
        BOUND.add(self)

    def bind_again(self) -> None:
        self.stale = True


_PLANS: dict[tuple[Any, ...], list[Plan]] = {}
_ALONE = threading.Lock()  # held from the check of the addresses until the launch


def norm_of(tensors: list[torch.Tensor], order: float, wanted: str | None) -> torch.Tensor:
    device = tensors[0].device
    with _ALONE:
        plans = _PLANS.setdefault((len(tensors), order, wanted), [])
        plan = next((p for p in plans if not p.stale and p.watch.check([tensors])), None)
        if plan is None:
            plan = planned(tensors, order, wanted)
            plans[:] = [plan, *[p for p in plans if not p.stale][: MOST_PLANS - 1]]
        found = [g.partial([plan.watch.addresses[g.members]])[0] for g in plan.groups]
        every = torch.cat([t.to(device, plan.compute) for t in found])
    norm = ORDERS[order][2](every) if len(every) else torch.zeros((), dtype=plan.compute, device=device)
    return norm.to(plan.result)


def planned(tensors: list[torch.Tensor], order: float, wanted: str | None) -> Plan:
    members: dict[tuple[torch.device, DType], list[int]] = {}
    for k, t in enumerate(tensors):
        check_plain("tensors", t)
        if not dense(t):
            raise Declined("tensors with gaps")
        members.setdefault((t.device, t.dtype), []).append(k)
    groups = [NormGroup(dtype, words(mine), norms(target_of(device, wanted), device, dtype, order,
                                                  tuple(tensors[k].numel() for k in mine)))
              for (device, dtype), mine in members.items()]
    result = functools.reduce(torch.promote_types, (g.dtype for g in groups))
    compute = functools.reduce(torch.promote_types, (opmath(g.dtype) for g in groups))
    return Plan(Watch([tensors]), groups, compute, result)


def norms(target: Target, device: torch.device, dtype: DType, order: float, lengths: tuple[int, ...]) -> Run:
    """A program that takes addresses of tensors with these lengths, and returns one value for each of their blocks."""
    each, join, _ = ORDERS[order]
    compute = opmath(dtype)
    with LOCK:
        value = each(cast(load("r0", (as_index(PLACE),), dtype), compute))
        body = LoopKernel((), (PLACE,), PLACE, ((Item(("r1",), "full", (value,), simple_combine(join, compute)),),),
                          (("r1", ZERO),), frozenset(), (Param("r0", dtype, False), Param("r1", compute, True)), ())
        shape = (as_index(sum(counts_of(lengths))),)
        steps = (Launch(0, ("in0", "b0"), ("norm",), lengths),) if any(lengths) else ()
        buffers = BufferPlan("in0", dtype, (), (), "list"), BufferPlan("b0", compute, shape, (ONE,), "output")
        result = Value("b0", shape, compute, as_indices(dim_vars(shape)))
        p = Program(("in0",), ("in0",), (), (TableKernel(body),), steps, buffers, (result,), frees=((),) * len(steps))
        return built(p, target, device)


def scaled(params: list[torch.Tensor], factor: torch.Tensor) -> None:
    foreach_mul_(params, factor)


SCALED = ListFunction(scaled, __name__)


def clip_with_norm(original: Callable[..., None], options: tuple[str | None, str], parameters: Any, max_norm: float,
                   total_norm: torch.Tensor, foreach: bool | None = None) -> None:
    """torch.nn.utils.clip_grads_with_norm_."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if len({g.device for g in grads}) > 1:
        return original(parameters, max_norm, total_norm, foreach)
    factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    SCALED((grads, factor), {}, options)
    return None

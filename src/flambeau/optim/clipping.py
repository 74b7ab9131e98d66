"""Clipping of gradients by their norm: one pass along a table for the norm, and one to scale.

The norm of all tensors together is that of the blocks that they are cut into: which thread or program takes which block
decides nothing, so results do not depend on the run.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from flambeau.errors import CompileError
from flambeau.ir.build import simple_combine
from flambeau.ir.dtypes import DType, opmath
from flambeau.ir.expr import Expr, cast, load
from flambeau.ir.index import ZERO, as_index
from flambeau.ir.numerics import wants_bits
from flambeau.ir.program import CHUNK, Item, LoopKernel, Param, TableKernel
from flambeau.ir.scalar import abs_
from flambeau.pipeline import LOCK
from flambeau.runtime.address_tables import PointerTable, sizes_of, start
from flambeau.runtime.memory_layout import dense
from flambeau.runtime.tensor_lists import Watch
from flambeau.schedule.tensor_tables import PLACE
from flambeau.targets.base import Launch, get_target
from flambeau.torch_compat.ops import foreach_mul_

from .multi_tensor import DECLINED, ListFunction, check_plain
from .row_kernels import Declined, target_name

MOST_PLANS = 4  # for tensors of one number
# Order of the norm: how an element joins, what joins them, and the norm of what comes out.
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
    """Tensors of one device and dtype."""

    device: torch.device
    dtype: DType
    members: torch.Tensor
    before: torch.Tensor  # blocks of earlier members
    table: PointerTable
    launch: Launch

    def partial(self, addresses: torch.Tensor) -> torch.Tensor:
        """What each block comes to."""
        blocks = self.table.blocks
        with self.table.mirror.target.on(self.device):
            out = torch.empty(len(blocks), dtype=opmath(self.dtype), device=self.device)
            results = out.data_ptr() + self.before * out.itemsize
            memory, at, where = self.table.send(torch.cat((addresses[self.members], results)))
            if len(out):
                start(self.launch, (at, where), sizes_of(len(self.members), blocks))
        del memory  # the kernel is done with it, or its queue will be before anybody else writes there
        return out


@dataclass
class Plan:
    """The norm of tensors with these dtypes, sizes and layouts."""

    watch: Watch
    groups: list[NormGroup]
    compute: DType
    result: DType


_PLANS: dict[tuple[Any, ...], list[Plan]] = {}
_ALONE = threading.Lock()  # between a look at addresses and the launch


def norm_of(tensors: list[torch.Tensor], order: float, wanted: str | None) -> torch.Tensor:
    device = tensors[0].device
    with _ALONE:
        plans = _PLANS.setdefault((len(tensors), order, wanted), [])
        plan = next((p for p in plans if p.watch.check([tensors])), None)
        if plan is None:
            plan = planned(tensors, order, wanted)
            plans[:] = [plan, *plans[: MOST_PLANS - 1]]
        every = torch.cat([g.partial(plan.watch.addresses).to(device, plan.compute) for g in plan.groups])
    norm = ORDERS[order][2](every) if len(every) else torch.zeros((), dtype=plan.compute, device=device)
    return norm.to(plan.result)


def planned(tensors: list[torch.Tensor], order: float, wanted: str | None) -> Plan:
    members: dict[tuple[torch.device, DType], list[int]] = {}
    for k, t in enumerate(tensors):
        check_plain("tensors", t)
        if not dense(t):
            raise Declined("tensors with gaps")
        members.setdefault((t.device, t.dtype), []).append(k)
    groups = []
    for (device, dtype), mine in members.items():
        target = get_target(target_name(device, wanted))
        table = PointerTable(target, device, [(k, 0) for k in range(len(mine))], [tensors[k].numel() for k in mine])
        which = torch.tensor(mine, device="cpu")
        blocks = -(table.lengths // -CHUNK)
        groups.append(NormGroup(device, dtype, which, blocks.cumsum(0) - blocks, table,
                            kernel_of(target.name, dtype, order)))
    result = functools.reduce(torch.promote_types, (g.dtype for g in groups))
    compute = functools.reduce(torch.promote_types, (opmath(g.dtype) for g in groups))
    return Plan(Watch([tensors]), groups, compute, result)


@cache
def kernel_of(name: str, dtype: DType, order: float) -> Launch:
    target = get_target(name)
    if not target.capabilities().tables:
        raise Declined(f"the target {name} has no tables")
    each, join, _ = ORDERS[order]
    compute = opmath(dtype)
    with LOCK:
        value = each(cast(load("r0", (as_index(PLACE),), dtype), compute))
        body = LoopKernel((), (PLACE,), PLACE, ((Item(("r1",), "full", (value,), simple_combine(join, compute)),),),
                          (("r1", ZERO),), frozenset(), (Param("r0", dtype, False), Param("r1", compute, True)), ())
        launch = target.build([target.render(TableKernel(body), "norm")]).wait()["norm"]
    if isinstance(launch, CompileError):
        raise Declined(f"a kernel did not build: {launch}")
    return launch


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

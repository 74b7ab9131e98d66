"""Keeps operators whole during capture that torch would decompose before it asks any table.

Some operators have Python kernels of torch below autograd that write them as many small ones (upsampling becomes
a dozen gathers, and its gradient as many scatters). Within `whole_operators` those kernels are put aside for what we
lower, and others stand in their place where an operator says so (`Facts.traced`): the forms of upsampling with a list
of scale factors call the plain operator.

In exact numerics all of those kernels are put aside: eager does not use them (its dropout on a CPU is another). And
gradients for which eager looks at the data, which nobody can who traces, are calls that look when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import SPACES, facts, named, overloads_named, overloads_with
from flambeau.torch_compat import patches
from flambeau.torch_compat.dispatch import AutoDispatchBelowAutograd, DispatchKey
from flambeau.torch_compat.ops import OpOverload, OpOverloadPacket

from .eager_dtypes import taken_apart

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def below_autograd(op: OpOverload) -> Callable[..., Any]:
    """The operator itself, where torch has written its gradient as that of a formula."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel


@cache
def with_formula() -> tuple[OpOverload, ...]:
    """The operators for which torch has such kernels, but for those that round nothing."""
    aten = torch.ops.aten
    packets = (getattr(aten, name) for name in dir(aten) if not named(name).unrounded)
    every = (getattr(p, o) for p in packets if isinstance(p, OpOverloadPacket) for o in p.overloads())
    return tuple(op for op in every if any(k in op.py_kernels for k in KEYS))


def of_other_libraries() -> dict[OpOverload, Callable[..., Any]]:
    """Operators that write what one that we lower returns into its first argument. Torch traces its own without side
    effects; those of others it would wrap, and nobody could look inside."""
    return {form: partial(_written, op) for op in LOWERINGS if op.namespace not in SPACES
            for form in overloads_named(facts(op).in_place)
            if [(a.name, str(a.type)) for a in form._schema.arguments] == [
                (a.name, str(a.type)) for a in op._schema.arguments]}


def _written(op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x.copy_(op(x, *args, **kwargs))


@contextmanager
def whole_operators(exact: bool = False) -> Iterator[None]:
    ops_loaded()
    wanted: dict[OpOverload, dict[Any, Any]] = {
        op: {} for op in (with_formula() if exact else LOWERINGS) if any(k in op.py_kernels for k in KEYS)}
    for op in () if exact else overloads_with("traced_by_formula"):
        formula = op.py_kernels[DispatchKey.Autograd]
        wanted[op] = {DispatchKey.Autograd: taken_apart(op, formula, below_autograd(op))}
    traced = overloads_with("traced") | of_other_libraries()
    wanted |= {op: dict.fromkeys(KEYS, kernel) for op, kernel in traced.items()}
    wanted |= {op: {DispatchKey.Meta: shape} for op, shape in overloads_with("traced_shape").items() if shape}
    if exact:
        wanted |= {op: {DispatchKey.Autograd: kernel} for op, kernel in overloads_with("traced_exactly").items()}
    aside = dict.fromkeys(KEYS, patches.MISSING)
    with patches.KERNELS.applied({op: aside | kernels for op, kernels in wanted.items()}):
        yield

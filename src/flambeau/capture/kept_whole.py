"""Keeps operators whole during capture that torch would decompose before it asks any table.

For some operators, torch has Python kernels below autograd that decompose them into many small operators (upsampling
becomes a dozen gathers, and its gradient as many scatters). `whole_operators` disables those kernels for operators that
have a lowering, and installs others where an operator asks for it (`Facts.traced`): the forms of upsampling with a list
of scale factors call the plain operator.

In exact numerics all those kernels are disabled, because eager does not use them (its dropout on a CPU is different).
Gradients for which eager looks at the data, which a trace cannot do, become calls that look at it when they run.
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
    """Call the operator itself, if torch defines its gradient through a decomposition."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel


@cache
def with_formula() -> tuple[OpOverload, ...]:
    """The operators for which torch has such kernels, except for those that never round."""
    aten = torch.ops.aten
    packets = (getattr(aten, name) for name in dir(aten) if not named(name).unrounded)
    every = (getattr(p, o) for p in packets if isinstance(p, OpOverloadPacket) for o in p.overloads())
    return tuple(op for op in every if any(k in op.py_kernels for k in KEYS))


def of_other_libraries() -> dict[OpOverload, Callable[..., Any]]:
    """In-place forms of operators from other libraries that have a lowering, each as a copy of the functional result.
    Torch functionalizes its own operators, but would wrap these opaquely."""
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

"""Registers the operators of the device: all lowerings, in every form in which PyTorch calls them.

A gate (device_gate.cpp) stands before each operator. The first call of a kind asks this file for a program; what there
is none for goes on to the kernel that PyTorch or fallback.py has.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from flambeau.capture.decompositions import table
from flambeau.eager.any_shape import Programs, Served
from flambeau.eager.gate import watched
from flambeau.eager.one_call import OtherShapes, described
from flambeau.eager.operator_forms import PLACES, OperatorForm, forms
from flambeau.eager.refusal import refusal
from flambeau.errors import CompileError, UnsupportedError
from flambeau.native.build import load_native
from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import SPACES, facts, name_of, overloads_with
from flambeau.runtime.launch_plan import Run
from flambeau.torch_compat.dispatch import (
    DisableAutocast,
    disable_current_modes,
    has_kernel,
    has_kernel_for_key,
    untraced,
)
from flambeau.torch_compat.ops import OpOverload

from .fallback import REASONS
from .random_state import with_generator

log = logging.getLogger(__name__)


class DeviceGates(Protocol):
    """The extension module."""

    def start(self, ask: Any, hot: Any, with_generator: Any) -> None: ...

    def watch(self, changed: int, here: Callable[[], int]) -> None: ...

    def open(self, name: str, overload: str) -> int:
        """A gate before an operator, for the rest of the process."""

    def entries(self, gate: int) -> int:
        """How many kinds of calls it knows."""


PROGRAMS = Programs()
_FORMS: list[OperatorForm] = []  # by the numbers of their gates


@cache
def load() -> DeviceGates:
    return load_native("device_gate", "the gates of the device's operators")


def open_gates() -> None:
    gates = load()
    gates.start(ask, hot, with_generator)
    gates.watch(*watched())
    for form in device_forms():
        overload = form.op._overloadname
        number = gates.open(form.op._schema.name, "" if overload == "default" else overload)
        assert number == len(_FORMS)
        _FORMS.append(form)


@untraced
def ask(gate: int, args: tuple[Any, ...], same: tuple[int, ...], lift: int
        ) -> tuple[*Served, bool] | list[tuple[int, ...]] | None:
    """What serves calls like this one: a program; shapes that what it writes to should have first; or None.

    `same`: for each tensor the first that it is one with. `lift`: which numbers of the call are arguments of the
    program, as bits.
    """
    form = _FORMS[gate]
    try:
        with disable_current_modes(), torch.no_grad(), DisableAutocast():
            if (most := facts(form.op).parts) and any(isinstance(a, (list, tuple)) and len(a) > most for a in args):
                return None
            call = described(args, same, numbers=True)
            if error := refusal(form.op, call):
                REASONS[form.op.name()] = f"the CPU refuses it: {error}"
                return None  # the fallback's kernel says so, in eager's words
            return *PROGRAMS.serving(form, call, lift), True
    except OtherShapes as other:
        return other.shapes
    except Exception as error:  # whatever is wrong with the compiler, the operator works
        reason = error.message if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
        REASONS[form.op.name()] = "; ".join(filter(None, (reason, *getattr(error, "dtypes", ()),
                                                          getattr(error, "target", None))))
        if isinstance(error, CompileError):
            warnings.warn(f"flambeau: a kernel of {form.name} did not build, and the CPU computes it. Please report "
                          f"this with the following text.\n{error}", RuntimeWarning, stacklevel=2)
        log.debug("%s has no program: %s", form.name, reason)
        return None


@untraced
def hot(gate: int, args: tuple[Any, ...], same: tuple[int, ...], lift: int, wait: bool) -> Run | None:
    """A program for a shape that many calls have."""
    with disable_current_modes(), torch.no_grad(), DisableAutocast():
        return PROGRAMS.hot(_FORMS[gate], described(args, same, numbers=True), lift, wait)


# ---- forms -----------------------------------------------------------------------------------------------


def device_forms() -> list[OperatorForm]:
    """Every operator that has a backend's kernels and of which we know what it computes."""
    ops_loaded()
    functional = {op for op in (*LOWERINGS, *overloads_with("library"), *table(False))
                  if not op._schema.is_mutable and (op.namespace == "aten" or op.namespace not in SPACES)}
    names = sorted(map(name_of, functional))
    found = {form.op: form for name in names for form in forms(name, functional)}
    for op, compute in overloads_with("instead").items():
        if op not in found or not isinstance(compute, OpOverload):
            found[op] = OperatorForm(op, compute, "", ())
    return [form for op, form in found.items() if _is_kernel(op)]


def _is_kernel(op: OpOverload) -> bool:
    """Whether a backend may have a kernel of its own for it: it makes tensors, of no others, and is no view."""
    schema = op._schema
    if not all("Tensor" in str(r.type) for r in schema.returns):
        return False
    if any(a.name in PLACES for a in schema.arguments) or {torch.Tag.generated, torch.Tag.inplace_view} & {*op.tags}:
        return False
    # What copies a storage, PyTorch makes of other operators: gaps and offset included, it lies as eager's does.
    if schema.name.startswith("aten::_foreach") or facts(op).copies_storage or facts(op).view:
        return False
    has = has_kernel_for_key
    return has_kernel(op.name()) and (
        has(op.name(), "PrivateUse1") or not has(op.name(), "CompositeImplicitAutograd"))

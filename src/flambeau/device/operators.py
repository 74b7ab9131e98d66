"""Registers the operators of the device: all lowerings, in every form in which PyTorch calls them.

A gate (device_gate.cpp) is in front of each operator. The first call of a kind asks this file for a program. If there
is none, calls go on to the kernel of PyTorch or fallback.py.
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
        """Put a gate in front of an operator, for the rest of the process."""

    def entries(self, gate: int) -> int:
        """The number of kinds of calls that a gate has seen."""


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
    """The way to serve calls like this one: a program; shapes to which outputs must be resized first; or None.

    `same`: for each tensor, the index of the first one that is the same object. `lift`: which numbers of the call are
    arguments of the program, as bits.
    """
    form = _FORMS[gate]
    try:
        with disable_current_modes(), torch.no_grad(), DisableAutocast():
            if (most := facts(form.op).parts) and any(isinstance(a, (list, tuple)) and len(a) > most for a in args):
                return None
            call = described(args, same, numbers=True)
            if error := refusal(form.op, call):
                REASONS[form.op.name()] = f"the CPU refuses it: {error}"
                return None  # the fallback then raises eager's error
            return *PROGRAMS.serving(form, call, lift), True
    except OtherShapes as other:
        return other.shapes
    except Exception as error:  # whatever is wrong with the compiler, the operator must work
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
    """A program for the exact shape of a frequent call."""
    with disable_current_modes(), torch.no_grad(), DisableAutocast():
        return PROGRAMS.hot(_FORMS[gate], described(args, same, numbers=True), lift, wait)


# ---- forms -----------------------------------------------------------------------------------------------


def device_forms() -> list[OperatorForm]:
    """The forms of all operators that a backend implements and whose function is known here."""
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
    """Whether a backend may implement it: it returns tensors, takes no device or dtype placement, and is not a view."""
    schema = op._schema
    if not all("Tensor" in str(r.type) for r in schema.returns):
        return False
    if any(a.name in PLACES for a in schema.arguments) or {torch.Tag.generated, torch.Tag.inplace_view} & {*op.tags}:
        return False
    # Operators that copy a whole storage are composed by PyTorch: results then have eager's gaps and offsets.
    if schema.name.startswith("aten::_foreach") or facts(op).copies_storage or facts(op).view:
        return False
    has = has_kernel_for_key
    return has_kernel(op.name()) and (
        has(op.name(), "PrivateUse1") or not has(op.name(), "CompositeImplicitAutograd"))

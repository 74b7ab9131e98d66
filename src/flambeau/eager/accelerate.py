"""`flambeau.accelerate`: replaces eager operators with our kernels, where these are faster.

    flambeau.accelerate("cuda")                 # from here on; .undo() ends it
    with flambeau.accelerate("cpu", only="cumsum"):
        ...
    print(*flambeau.accelerated(), sep="\\n")    # what was replaced, and how often it was used

Native code (a gate, gate.cpp) is registered for each operator at the backend's dispatch key, below autograd and
autocast. Small calls go straight to torch. For a larger call the gate looks for a program, as on the device
(any_shape.py). The first call of a class runs torch's kernel. The second asks this file for a program and waits for it.
A table of the target (`Target.wins`) gives the size from which our kernels are faster. Nothing is timed at run time, so
the same calls give the same bits in every process.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from flambeau.config import config
from flambeau.errors import OptionError, UnsupportedError
from flambeau.ops.facts import facts
from flambeau.optim.eager_steps import EagerSteps
from flambeau.runtime.launch_plan import Run, word
from flambeau.runtime.placement import flat, target_of
from flambeau.runtime.watchers import look_on
from flambeau.targets.background import Closing, closing, fork_safe
from flambeau.torch_compat.dispatch import (
    DisableAutocast,
    disable_current_modes,
    has_kernel_for_key,
    key_for_device,
    untraced,
)

from .any_shape import Programs, Served
from .gate import Gates, load_gates
from .one_call import Arguments, described, numbers_of
from .operator_forms import OperatorForm, wanted
from .refusal import refusal

log = logging.getLogger(__name__)

MOST_KERNELS = 64  # kernels for single shapes, per form of an operator; without a limit, it might compile for ever
UNTRIED = 1 << 15  # elements; the size limit of operators that are only replaced if `only` names them


# ---- what users call -----------------------------------------------------------------------------------


def accelerate(device: str | torch.device = "cuda", only: str | Iterable[str] | None = None,
               exclude: str | Iterable[str] | None = None, *, wait: bool = False) -> Acceleration:
    """Replace eager operators of a device type with our kernels.

    Returns an object with `undo()`, which is also a context manager. `only` and `exclude` name operators ("cumsum") or
    groups ("max pooling"). `wait`: compile at the first call of a class instead of the second. Without `only`, steps of
    torch's optimizers and gradient clipping also run on our kernels.
    """
    kind = torch.device(device)
    if kind.index is not None:
        raise OptionError(f"operators are replaced on all devices of a type, not only on {kind}",
                          hint=f"accelerate({kind.type!r})")
    target = target_of(kind, config.target)
    if target is None:
        raise UnsupportedError(f"there is no target for tensors on {kind}")
    forms = wanted(target.wins, only, exclude, UNTRIED)
    key = key_for_device(kind.type)
    usable = {form: size for form, size in forms.items() if has_kernel(form, key)}
    look_on()
    native = load_gates()  # before anything is replaced, because it may fail
    native.start(ask, hot, None)
    steps = EagerSteps(kind.type) if only is None and target.capabilities().tables else None
    return Acceleration(native, kind.type, key, usable, wait, steps)


def accelerated() -> list[Replaced]:
    """The operators that are currently replaced, with counts of calls. The most used come first."""
    with _LOCK:
        rows = [gate.row() for gate in _GATES.values() if gate.holders]
    return sorted(rows, key=lambda row: (-row.ours, -row.original, row.operator))


@dataclass(frozen=True)
class Replaced:
    """One replaced operator, and its calls since it was replaced."""

    operator: str
    device: str
    group: str
    elements: int  # smaller calls always go to torch
    ours: int  # calls that ran our kernels
    original: int  # calls that ran torch's kernels
    kernels: int  # number of classes of calls with a kernel of ours
    apart: int  # classes that stay with torch, because its results have other strides
    refused: dict[str, int] = field(default_factory=dict)  # why classes have no kernel of ours, with counts

    def __str__(self) -> str:
        text = f"{self.operator} ({self.device}, from {self.elements} elements): {self.ours} calls ours, " \
               f"{self.original} torch's; {self.kernels} kernels"
        parts = [f"{self.apart} laid out in another way"] if self.apart else []
        return "; ".join([text, *parts, *(f"{count} not built: {why}" for why, count in self.refused.items())])


class Acceleration:
    """The result of one `accelerate`: `undo()` ends it, and so does the end of a `with` block."""

    def __init__(self, native: Gates, device: str, key: str, forms: dict[OperatorForm, int], wait: bool,
                 steps: EagerSteps | None = None) -> None:
        self.device = device
        self._steps = steps
        self._gates: list[_Gate] = []
        with _LOCK:
            try:
                for form, elements in forms.items():
                    gate = _GATES.get((device, form)) or _Gate(native, device, key, form)
                    _GATES[device, form] = _NUMBERED[gate.number] = gate
                    gate.hold(self, elements, wait)
                    self._gates.append(gate)
            except BaseException:
                self.undo()
                raise

    def undo(self) -> None:
        """Restore torch's own kernels. Further calls do nothing."""
        if self._steps is not None:
            self._steps.undo()
        with _LOCK:
            gates, self._gates = self._gates, []
            for gate in gates:
                gate.release(self)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Acceleration of {len(self._gates)} operators on {self.device}>"


def has_kernel(form: OperatorForm, key: str) -> bool:
    """Whether the operator has a kernel of its own at this key, rather than being composed of others above it."""
    return any(has_kernel_for_key(form.op.name(), k)
               for k in (key, "CompositeExplicitAutograd"))


# ---- gates ---------------------------------------------------------------------------------------------

_LOCK = fork_safe(threading.RLock())
_GATES: dict[tuple[str, OperatorForm], _Gate] = {}
_NUMBERED: dict[int, _Gate] = {}


@contextmanager
def _aside() -> Iterator[None]:
    """Let calls of this thread bypass all gates."""
    native = load_gates()
    before = native.aside(True)
    try:
        yield
    finally:
        native.aside(before)


PROGRAMS = Programs(into_any=False, most_fixed=MOST_KERNELS, apart=_aside)


class _Gate:
    """The gate in front of one form of an operator. It is never destroyed: the next `accelerate` reuses its kernels."""

    def __init__(self, native: Gates, device: str, key: str, form: OperatorForm) -> None:
        self.native, self.device, self.form = native, device, form
        overload = form.op._overloadname
        self.number = native.make(form.op._schema.name, "" if overload == "default" else overload, key, device)
        self.holders: dict[Acceleration, tuple[int, bool]] = {}
        self.refused: Counter[str] = Counter()
        self.before = (0, 0)  # counts of calls from earlier uses

    def hold(self, holder: Acceleration, elements: int, wait: bool) -> None:
        if not self.holders:
            self.before = self.native.usage(self.number)[:2]
        self.open(elements, wait)
        self.holders[holder] = elements, wait

    def release(self, holder: Acceleration) -> None:
        del self.holders[holder]
        if self.holders:  # the most recent holder's settings apply
            self.open(*list(self.holders.values())[-1])
        else:
            self.native.close(self.number)

    def open(self, elements: int, wait: bool) -> None:
        # Calls of one program must not switch between random generators.
        self.random = facts(self.form.op).random
        self.now = wait or self.random
        capturing = getattr(torch.get_device_module(self.device), "is_current_stream_capturing", None)
        self.native.open(self.number, elements, self.form.measured(), capturing)

    def ask(self, args: Arguments, same: tuple[int, ...], lift: int) -> tuple[*Served, bool] | bool | None:
        """A program for such calls, and whether to use it; None: torch serves them; False: the next call asks again."""
        call = described(args, same)
        if closing() or PROGRAMS.is_new(self.form, call) and not self.now:
            return False
        try:
            if refusal(self.form.op, call):
                return None  # torch's kernel raises the error
            served = PROGRAMS.serving(self.form, call, lift)
            run, _, _, lifted, _ = served
            return *served, self.lies_alike(call, args, run, lifted)
        except Closing:
            return False
        except Exception as error:  # whatever is wrong with the compiler, torch's kernel stays in use
            reason = error.message if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
            self.refused[reason] += 1
            level = logging.INFO if isinstance(error, UnsupportedError) else logging.WARNING
            log.log(level, "%s stays with torch: %s", self.form.name, reason)
            return None

    def lies_alike(self, call: Arguments, args: Arguments, run: Run, lifted: int) -> bool:
        """Whether our results have the layout of torch's, which must not depend on who computes them. Operators from
        outside of torch are not called to find out, since they may do anything: they declare their layout
        themselves."""
        if self.form.written or self.random or self.form.op.namespace != "aten":
            return True
        numbers = [word(x) if isinstance(x, float) else x for k, x in enumerate(numbers_of(self.form.op, call))
                   if lifted >> k & 1]
        ours = run([*(t for t in flat(args) if isinstance(t, torch.Tensor)), *numbers])
        schema = self.form.op._schema.arguments
        named = {a.name: x for a, x in zip(schema, args, strict=True) if a.kwarg_only}
        return layout(ours) == layout(self.form.op(*args[:len(args) - len(named)], **named))

    def hot(self, args: Arguments, same: tuple[int, ...], lift: int, wait: bool) -> Run | None:
        call = described(args, same)
        run = PROGRAMS.hot(self.form, call, lift, wait)
        return run if run is not None and self.lies_alike(call, args, run, lift) else None

    def row(self) -> Replaced:
        ours, original, programs, serving = self.native.usage(self.number)
        elements, _ = list(self.holders.values())[-1]
        return Replaced(self.form.name, self.device, self.form.group, elements, ours - self.before[0],
                        original - self.before[1], serving, programs - serving, dict(self.refused))


def layout(results: Any) -> list[Any]:
    """Dtypes, shapes and strides of tensors, without the meaningless strides of dimensions of one element."""
    return [(t.dtype, t.shape, [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1])
            for t in flat(results) if isinstance(t, torch.Tensor)]


@untraced
def ask(gate: int, args: Arguments, same: tuple[int, ...], lift: int) -> tuple[*Served, bool] | bool | None:
    with disable_current_modes(), torch.no_grad(), DisableAutocast():
        return _NUMBERED[gate].ask(args, same, lift)


@untraced
def hot(gate: int, args: Arguments, same: tuple[int, ...], lift: int, wait: bool) -> Run | None:
    with disable_current_modes(), torch.no_grad(), DisableAutocast():
        return _NUMBERED[gate].hot(args, same, lift, wait)


@atexit.register
def _close_all() -> None:
    """Close all gates: at the end of the interpreter, other threads may go on calling, but without Python."""
    with _LOCK:
        for gate in _GATES.values():
            if gate.holders:
                gate.native.close(gate.number)

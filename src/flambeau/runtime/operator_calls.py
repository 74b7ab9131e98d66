"""Operator calls in programs, with the arguments that are known at compile time converted once.

When called from Python, torch parses every argument of every call, which costs the host more time than the operator
itself needs to reach its kernel; views of arguments are separate calls. A `Prepared` call takes only its tensors
(calls.cpp). Until that extension is compiled in the background, or if it cannot be, torch's Python functions are used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flambeau.native.build import Background
from flambeau.torch_compat.ops import HigherOrderOperator, OpOverload

TENSOR = ...  # stands for a tensor that is passed at each call
# The Python types that a schema argument accepts, by the name of its type.
CONSTANTS: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "number": (int, float), "bool": (bool,), "str": (str,)}


# ---- operators by name -----------------------------------------------------------------------------------


def is_operator(x: object) -> bool:
    return isinstance(x, (OpOverload, HigherOrderOperator))


def operator_path(op: Any) -> str:
    """The path of an operator under torch.ops, such as "aten.mm.out"."""
    return f"higher_order.{op.name()}" if isinstance(op, HigherOrderOperator) else str(op)


def operator_named(path: str) -> Any:
    return operator.attrgetter(path)(torch.ops)


# ---- prepared calls --------------------------------------------------------------------------------------


class Strided(NamedTuple):
    """A strided view of a tensor that is passed at each call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    within: bool  # the offset counts from the tensor's first element, not from its storage

    def of(self, t: torch.Tensor) -> torch.Tensor:
        return t.as_strided(self.shape, self.strides, self.offset + (t.storage_offset() if self.within else 0))


@dataclass(frozen=True)
class Prepared:
    operator: str  # under torch.ops
    args: tuple[Any, ...]  # for every argument of the schema, in order
    outputs: tuple[int, ...] | None  # which results are returned; None: the only one, not in a tuple

    def native(self, module: Any, op: OpOverload) -> Callable[..., Any]:
        return module.make(op._schema.name, op._schema.overload_name, self.args, self.outputs)

    def python(self, op: OpOverload) -> Callable[..., Any]:
        names = [a.name for a in op._schema.arguments if a.kwarg_only]
        first = len(self.args) - len(names)

        def call(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            args = [next(given) if a is TENSOR else a.of(next(given)) if isinstance(a, Strided) else a
                    for a in self.args]
            made = op(*args[:first], **dict(zip(names, args[first:], strict=True)))
            return made if self.outputs is None else tuple(made[k] for k in self.outputs)

        return call


def by_schema(op: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[int] | None
              ) -> list[tuple[Any, Any]] | None:
    """The arguments of a call in schema order, each with its type; None if one is missing, or if a result to be
    returned is not a tensor."""
    schema = op._schema
    returned = [str(r.type) for r in schema.returns]
    single = outputs is None and returned != ["Tensor"]
    if single or any(returned[k:k + 1] != ["Tensor"] for k in outputs or ()) or len(args) > len(schema.arguments):
        return None
    out = []
    for k, a in enumerate(schema.arguments):
        if k < len(args):
            x = args[k]
        elif a.name in kwargs:
            x = kwargs[a.name]
        elif a.has_default_value():
            x = a.default_value
        else:
            return None
        out.append((x, a.type))
    return out


def is_constant(x: Any, kind: str) -> bool:
    """Whether x can be stored as a constant of this schema type."""
    if kind.startswith("Optional["):
        return x is None or is_constant(x, kind[9:-1])
    if kind.startswith("List["):
        return isinstance(x, list) and kind[5:-1] in CONSTANTS and all(is_constant(y, kind[5:-1]) for y in x)
    return x is None if kind == "Tensor" else isinstance(x, CONSTANTS.get(kind, ()))


# ---- random operators that the backward runs again (capture/random_replay.py) ----------------------------


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's random generator, as a CPU tensor."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_random_state(new: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(new)
    else:
        torch.get_device_module(device).set_rng_state(new, device)


def run_and_save(device: torch.device, op: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Run a random operator; returns the generator state before it, then the results."""
    before = random_state(device)
    return (before, *_several(op(*args, **kwargs)))


def run_with(device: torch.device, before: torch.Tensor, op: Any, *args: Any,
             **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Run a random operator from a saved generator state; the generator then continues as if nothing had been drawn."""
    now = random_state(device)
    set_random_state(before, device)
    try:
        return _several(op(*args, **kwargs))
    finally:
        set_random_state(now, device)


def read_here(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself: at this step of a program the host waits for it, and reads its number."""
    return x


def _several(x: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x) if isinstance(x, Sequence) else (x,)


EXTENSION = Background("calls", "the calls of operators", lambda module: module.open(torch.Tensor), seconds=4,
                       without="calls of operators spend more time in Python")

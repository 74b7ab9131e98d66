"""Flattens the nested arguments of a model into inputs, and nests its flat results again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from .arguments import is_array, shown, unlike
from .client import PackageError
from .index import Port


def paths(name: str, x: Any) -> list[tuple[str, Any]]:
    """The leaves of nested lists, tuples and dictionaries, each with its path: ("x.0.key", value)."""
    if isinstance(x, Mapping):
        inside: Any = x.items()
    elif isinstance(x, list | tuple):
        inside = zip(getattr(x, "_fields", range(len(x))), x)
    else:
        return [(name, x)]
    return [found for k, y in inside for found in paths(f"{name}.{k}", y)]


class Arguments:
    """Maps the arguments of a method to its flat inputs. Tensors stand where they stood when the package was exported.
    Other values given then are fixed in the package; a call may repeat them, but not change them."""

    def __init__(self, method: str, inputs: Sequence[Port], said: Any) -> None:
        self.method, self.inputs = method, inputs
        self.names = [p.name for p in inputs]
        # Before format 1.4 packages held only the names of the inputs.
        self.parameters: list[str] | None = said["parameters"] if isinstance(said, dict) else None
        self.fixed: dict[str, Any] = dict(said["fixed"]) if isinstance(said, dict) else {}

    def ordered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if self.parameters is None:
            args = [x for x in args if any(is_array(y) for _, y in paths("", x))]
        # If all arguments are arrays, they are the inputs in order, however they were nested at export.
        flat = self.parameters is None or all(map(is_array, args))
        parameters = self.names if flat else self.parameters or []
        if len(args) > len(parameters):
            raise self.miscounted(len(args))
        given = dict(zip(parameters, args))
        if twice := [name for name in kwargs if name in given]:
            raise PackageError(f"method {self.method!r}: input {twice[0]!r} is given twice")
        given |= kwargs
        leaves = dict(found for name, x in given.items() for found in paths(name, x))
        found = []
        for port in self.inputs:
            if port.name not in leaves:
                if port.name in given or any(name.startswith(f"{port.name}.") for name in leaves):
                    raise unlike(port, given.get(port.name, leaves))  # a container where an array is expected
                raise PackageError(f"method {self.method!r}: input {port.name!r} is missing: expected {port.type}")
            x = leaves.pop(port.name)
            found.append(np.asarray(x) if isinstance(x, np.generic) else x)  # NumPy reductions return scalars
        for name, x in leaves.items():
            if name not in self.fixed and (self.parameters is not None or is_array(x)):
                raise PackageError(f"method {self.method!r} has no input {name!r}: its inputs are {self.listed()}")
            known = self.fixed.get(name, x)
            if known is not x and (is_array(x) or known != x) and str(known) != str(x):
                raise PackageError(f"argument {name!r} is {known!r} in the package, got "
                                   f"{shown(x) if is_array(x) else repr(x)}")
        return found

    def listed(self) -> str:
        return ", ".join(f"{p.name} ({p.type})" for p in self.inputs) or "none"

    def miscounted(self, count: int) -> PackageError:
        return PackageError(f"method {self.method!r} takes {len(self.names)} inputs, got {count}: "
                            f"they are {self.listed()}")


def nesting(structure: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that nests flat results as the traced function returned them."""
    (kind, inside), = structure.items()
    if kind == "output":
        return itemgetter(inside)
    if kind == "number":
        return lambda results: results[inside].item()
    if kind in ("dict", "pairs"):  # dictionaries with keys other than strings are lists of pairs
        named = {k: nesting(v) for k, v in (inside.items() if kind == "dict" else inside)}
        return lambda results: {k: of(results) for k, of in named.items()}
    if kind in ("tuple", "list"):
        made, each = tuple if kind == "tuple" else list, [nesting(x) for x in inside]
        return lambda results: made(of(results) for of in each)
    return lambda results: inside

"""Arguments as a model has them become inputs, one after the other; results become what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from .arguments import is_array, shown, unlike
from .client import PackageError
from .index import Port


def paths(name: str, x: Any) -> list[tuple[str, Any]]:
    """What is inside lists, tuples and dictionaries, by where it is."""
    if isinstance(x, Mapping):
        inside: Any = x.items()
    elif isinstance(x, list | tuple):
        inside = zip(getattr(x, "_fields", range(len(x))), x)
    else:
        return [(name, x)]
    return [found for k, y in inside for found in paths(f"{name}.{k}", y)]


class Arguments:
    """Arguments of a method as its inputs, one after the other. Tensors have the places that they had when the package
    was made; what else was given then is part of it, and may be given again."""

    def __init__(self, method: str, inputs: Sequence[Port], said: Any) -> None:
        self.method, self.inputs = method, inputs
        self.names = [p.name for p in inputs]
        # Before format 1.4 only the names of the inputs were known.
        self.parameters: list[str] | None = said["parameters"] if isinstance(said, dict) else None
        self.fixed: dict[str, Any] = dict(said["fixed"]) if isinstance(said, dict) else {}

    def ordered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if self.parameters is None:
            args = [x for x in args if any(is_array(y) for _, y in paths("", x))]
        # Arrays alone are the inputs, wherever they were.
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
                    raise unlike(port, given.get(port.name, leaves))  # what has others inside
                raise PackageError(f"method {self.method!r}: input {port.name!r} is missing: expected {port.type}")
            x = leaves.pop(port.name)
            found.append(np.asarray(x) if isinstance(x, np.generic) else x)  # NumPy's sums are no arrays
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
    """What puts results, one after the other, where the function had them."""
    (kind, inside), = structure.items()
    if kind == "output":
        return itemgetter(inside)
    if kind == "number":
        return lambda results: results[inside].item()
    if kind in ("dict", "pairs"):  # keys that are no texts come in pairs
        named = {k: nesting(v) for k, v in (inside.items() if kind == "dict" else inside)}
        return lambda results: {k: of(results) for k, of in named.items()}
    if kind in ("tuple", "list"):
        made, each = tuple if kind == "tuple" else list, [nesting(x) for x in inside]
        return lambda results: made(of(results) for of in each)
    return lambda results: inside

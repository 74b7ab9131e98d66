"""Repeats a call with copies of its parameters, buffers and inputs, also in float64. The originals do not change.

    twin = Twin(function, args)          # or Twin(function, args, wide=True)
    outputs = twin.call()
    twin.leaves                          # name -> the copy of a tensor that wants a gradient

The modules, tensors, and objects containing them that a function refers to are found through its closure, its defaults
and the globals it names. In a wide twin, floating-point tensors are float64, and so are all tensors that the function
casts or creates, whatever dtype it asks for.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flambeau.errors import UnsupportedError
from flambeau.runtime.memory_layout import copied
from flambeau.torch_compat import pytree

NARROW = (torch.float16, torch.bfloat16, torch.float32)
CASTS = {torch.Tensor.float: torch.Tensor.double, torch.Tensor.half: torch.Tensor.double,
         torch.Tensor.bfloat16: torch.Tensor.double}


class InDouble(TorchFunctionMode):
    """Replaces floating-point dtypes that code asks for by float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.view and any(isinstance(a, torch.dtype) for a in args):
            raise UnsupportedError("the bits of a number are read, and those of float64 are others", operator="view")
        args, kwargs = pytree.tree_map(lambda x: torch.float64 if isinstance(x, torch.dtype) and x in NARROW else x,
                                       (args, kwargs or {}))
        return CASTS.get(func, func)(*args, **kwargs)


class Twin:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], wide: bool = False) -> None:
        self.wide = wide
        self.memo: dict[int, Any] = {}
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []  # other than those in inputs and modules
        self.function = self.value(function, "")
        outside = len(self.tensors)
        self.args = self.value(args, "input ")
        del self.tensors[outside:]  # inputs get names of their own

    def call(self) -> Any:
        with in_double() if self.wide else nullcontext():
            return self.function(*self.args)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in self.held().items() if t.requires_grad and t.is_leaf}

    def held(self) -> dict[str, torch.Tensor]:
        """Everything that the call can read or change, by name."""
        leaves, _ = pytree.tree_flatten_with_path(self.args)
        out = {f"input {pytree.keystr(path).replace('[', '', 1).replace(']', '', 1)}": t for path, t in leaves
               if isinstance(t, torch.Tensor)}
        for prefix, module in self.modules:
            for name, t in [*module.named_parameters(), *module.named_buffers()]:
                out.setdefault(prefix + name, t)
        out.update(self.tensors)
        seen: set[int] = set()
        return {name: t for name, t in out.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]

    # ---- copies ----------------------------------------------------------------------------------------

    def value(self, x: Any, name: str) -> Any:
        """The same value with modules and tensors copied. `name` ends with a dot, or is empty."""
        if isinstance(x, torch.Tensor):
            twin = self.tensor(x)
            self.tensors.append((name.removesuffix("."), twin))
            return twin
        if id(x) in self.memo:
            return self.memo[id(x)]
        if isinstance(x, torch.nn.Module):
            return self.module(x, name)
        if not holds(x):
            return x
        if type(x) in (list, tuple):
            return type(x)([self.value(v, f"{name}{k}.") for k, v in enumerate(x)])
        if isinstance(x, types.FunctionType):
            return self.of_function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(x.__func__, self.value(x.__self__, name))
        if isinstance(x, functools.partial):
            return functools.partial(self.value(x.func, name), *self.value(x.args, name),
                                     **self.value(x.keywords, name))
        twin = self.memo[id(x)] = copy.copy(x)
        attributes = twin if isinstance(twin, dict) else twin.__dict__  # also works for a frozen dataclass
        for k, v in list(attributes.items()):
            attributes[k] = self.value(v, f"{name}{k}.")
        return twin

    def module(self, x: torch.nn.Module, name: str) -> torch.nn.Module:
        twin = copy.deepcopy(x, self.memo)
        for p in twin.parameters():
            p.grad = None
        self.modules.append((name, twin.double() if self.wide else twin))
        return twin

    def of_function(self, f: types.FunctionType) -> types.FunctionType:
        """The function with copies of the globals that it names, of its defaults and of its closure."""
        scope = {**f.__globals__}
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        twin = self.memo[id(f)] = types.FunctionType(f.__code__, scope, f.__name__, None, cells)
        for n in names(f.__code__):
            if n in scope:
                scope[n] = self.value(scope[n], f"{n}.")
        for cell, given, n in zip(cells, f.__closure__ or (), f.__code__.co_freevars, strict=True):
            if (x := contents(given)) is not EMPTY:
                cell.cell_contents = self.value(x, f"{n}.")
        twin.__defaults__, twin.__kwdefaults__ = (self.value(x, "") for x in (f.__defaults__, f.__kwdefaults__))
        twin.__dict__.update(f.__dict__)
        return twin

    def tensor(self, t: torch.Tensor) -> torch.Tensor:
        """A copy in new memory with the same strides, detached from any graph."""
        if id(t) in self.memo:
            return self.memo[id(t)]
        wide = torch.float64 if t.is_floating_point() else torch.complex128 if t.is_complex() else None
        self.memo[id(t)] = twin = copied(t, wide if self.wide else None).requires_grad_(t.requires_grad)
        return twin


EMPTY = object()


def contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return EMPTY


def names(code: types.CodeType) -> Iterator[str]:
    """The globals that a function, or a function inside it, may read."""
    yield from code.co_names
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from names(c)


def holds(x: Any, seen: set[int] | None = None) -> bool:
    """Whether a value contains tensors, other than those inside of torch itself."""
    seen = set() if seen is None else seen
    if isinstance(x, (torch.Tensor, torch.nn.Module)):
        return True
    if id(x) in seen or isinstance(x, (type, types.ModuleType)):
        return False
    seen.add(id(x))
    return any(holds(part, seen) for part in parts(x))


def parts(x: Any) -> Iterable[Any]:
    """The values that a container, a function or an object holds."""
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, (list, tuple)):
        return x
    if isinstance(x, types.MethodType):
        return (x.__self__,)
    if isinstance(x, functools.partial):
        return (x.func, x.args, x.keywords)
    if owner(x) in ("torch", "builtins"):
        return ()
    if isinstance(x, types.FunctionType):
        return (x.__defaults__, x.__kwdefaults__, *(contents(c) for c in x.__closure__ or ()),
                *(x.__globals__[n] for n in names(x.__code__) if n in x.__globals__))
    return (getattr(x, "__dict__", None),)


def owner(x: Any) -> str:
    """The package that a function, or the class of an object, comes from."""
    return str(getattr(x if isinstance(x, types.FunctionType) else type(x), "__module__", None)).partition(".")[0]


@contextmanager
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(before)

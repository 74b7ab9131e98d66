"""Watches lists of tensors that recur at every step: whether they changed, and where their memory is now.

One pass of C++ (lists.cpp) checks thousands of tensors. It is compiled in the background while the first kernels are.
Where nothing can be compiled, torch's Python functions do the same, five times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from flambeau.ir.lines import reach
from flambeau.native.build import Background
from flambeau.torch_compat.autograd import increment_version
from flambeau.torch_compat.memory import TensorBase, TensorGuards

PLAIN = (torch.Tensor, torch.nn.Parameter)
OTHER, MOVED, SAME = range(3)


class Watch:
    """Lists of plain tensors: types, dtypes, devices, sizes and strides, and the addresses at the last check."""

    def __init__(self, lists: Sequence[list[torch.Tensor]]) -> None:
        self.counts = [len(tensors) for tensors in lists]
        self.addresses = torch.zeros(sum(self.counts), dtype=torch.int64, device="cpu")
        self.by_list = self.addresses.split(self.counts)
        self.moves = 0  # how many checks found an address changed
        module = native()
        self._kinds = PythonKinds(tuple(lists)) if module is None else NativeKinds(module, tuple(lists))
        if not self.check(lists):
            raise AssertionError("lists that differ from themselves")

    def check(self, lists: Sequence[list[torch.Tensor]]) -> bool:
        """Whether the lists match in everything except addresses; if so, remember their addresses."""
        found = self._kinds.check(tuple(lists), self.addresses)
        self.moves += found == MOVED
        return bool(found != OTHER)

    def apart(self) -> bool:
        """Whether no two tensors share memory, and each has some."""
        return bool(self._kinds.apart(self.addresses))


class NativeKinds:
    def __init__(self, module: Any, lists: tuple[list[torch.Tensor], ...]) -> None:
        self.module, self.watch = module, module.make(lists, PLAIN)

    def check(self, lists: tuple[list[torch.Tensor], ...], addresses: torch.Tensor) -> int:
        return self.module.check(self.watch, lists, addresses.data_ptr())

    def apart(self, _: torch.Tensor) -> bool:
        return self.module.apart(self.watch)


class PythonKinds:
    def __init__(self, lists: tuple[list[torch.Tensor], ...]) -> None:
        tensors = list(chain.from_iterable(lists))
        sizes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        self.guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self.counts = [len(tensors) for tensors in lists]
        self.bytes = torch.tensor([reach(t.shape, t.stride()) * t.element_size() for t in tensors], dtype=torch.int64,
                                  device="cpu")

    def check(self, lists: tuple[list[torch.Tensor], ...], addresses: torch.Tensor) -> int:
        if [len(tensors) for tensors in lists] != self.counts:
            return OTHER
        tensors = list(chain.from_iterable(lists))
        if not self.guards.check(*tensors):
            return OTHER
        new = torch.tensor(list(map(TensorBase.data_ptr, tensors)), dtype=torch.int64, device="cpu")
        same = torch.equal(new, addresses)
        addresses.copy_(new)
        return SAME if same else MOVED

    def apart(self, addresses: torch.Tensor) -> bool:
        some = self.bytes > 0
        starts, order = torch.sort(addresses[some])
        sizes = self.bytes[some][order]
        return not len(starts) or bool(starts[0] > 0 and (starts[1:] >= starts[:-1] + sizes[:-1]).all())


def changed(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that plain tensors were written to."""
    if (module := native()) is not None:
        module.changed(tensors)
    else:
        increment_version(tensors)


def numbers(scalars: list[torch.Tensor], addresses: torch.Tensor) -> list[float]:
    """The values of CPU scalars of one dtype, given with their addresses; a single value if all are equal."""
    module = native()
    if module is not None and scalars[0].dtype in (torch.float32, torch.float64):
        return module.numbers(addresses.data_ptr(), len(scalars), scalars[0].element_size())
    found = [t.item() for t in scalars]
    return found[:1] if len(set(found)) == 1 else found


# ---- the extension -------------------------------------------------------------------------------------


def open_extension(module: Any) -> None:
    samples = [torch.empty(k, device="cpu") for k in range(3)]
    module.open([*samples, torch.nn.Parameter(samples[1]), samples[2][1:]])


EXTENSION = Background("lists", "the watch over lists of tensors", open_extension, seconds=2,
                       without="steps of optimizers spend more time in Python")


def native() -> Any:
    """The extension, once it is compiled; None where it cannot be."""
    return EXTENSION.wait()

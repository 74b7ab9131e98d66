"""Copies to, from and within the device, for all layouts and dtypes, conjugated and negated views included.

Elements are transferred in their memory layout: the bytes from a tensor's first to its last element are one copy
between host and device. Conversions to another dtype or other strides are done on the host.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from flambeau.ir.lines import reach
from flambeau.runtime.memory_layout import dense
from flambeau.torch_compat.ops import conj, neg_view

from .core import Core, Driver
from .sparse import is_sparse, joined, parts

_INDICES = (torch.int64, torch.int32)
_FEW = 1024  # elements: up to this many indices, minimum and maximum are found while the copy runs


def span(t: Tensor) -> int:
    """The number of bytes from the first element to the end of the last."""
    return reach(t.shape, t.stride()) * t.element_size()


def host_memory(nbytes: int, dtype: torch.dtype, shape: Any, strides: Any, offset: int = 0,
                storage: torch.UntypedStorage | None = None) -> Tensor:
    """A CPU tensor with any shape, strides and offset, by default on a resizable storage of its own."""
    memory = torch.UntypedStorage(nbytes, device="cpu") if storage is None else storage
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, offset, shape, strides)


def as_marked(physical: Tensor, t: Tensor) -> Tensor:
    """Apply the conjugate and negative bits of `t` to a tensor that holds its memory's raw values."""
    if t.is_conj():
        physical = conj(physical)
    return neg_view(physical) if t.is_neg() else physical


def same_geometry(a: Tensor, b: Tensor) -> bool:
    return (a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.is_conj() == b.is_conj()
            and a.is_neg() == b.is_neg())


def refuse_overlap(source: Tensor, target: Tensor) -> None:
    """Raise eager's error if source and target overlap partially, by copying between equal views on the host."""
    a, b = source.data_ptr(), target.data_ptr()
    low, high = min(a, b), max(a + span(source), b + span(target))
    if high - low >= span(source) + span(target) or source.dtype != target.dtype or (a - b) % source.element_size():
        return
    memory = torch.UntypedStorage(high - low, device="cpu")
    there, here = (host_memory(0, t.dtype, t.shape, t.stride(), (t.data_ptr() - low) // t.element_size(), memory)
                   for t in (source, target))
    here.copy_(there)


class Copies:
    """The copies of one device type. Each runs on the current stream of the device involved."""

    def __init__(self, kind: str, driver: Driver, core: Core) -> None:
        self.kind = kind
        self.driver = driver
        self.core = core
        self._lock = threading.Lock()
        self._kept: deque[tuple[Any, Tensor]] = deque()  # host memory in use by copies that are still running

    # ---- bytes -----------------------------------------------------------------------------------------

    def read(self, device: int, address: int, host: Tensor, wait: bool = True) -> None:
        """Copy device memory into the span of a CPU tensor."""
        if nbytes := span(host):
            done = self.driver.read(device, self.core.stream(device), address, host.data_ptr(), nbytes, wait)
            self._keep(done, host, wait)

    def write(self, device: int, address: int, host: Tensor, wait: bool = True) -> None:
        """Copy the span of a CPU tensor into device memory."""
        if nbytes := span(host):
            done = self.driver.write(device, self.core.stream(device), address, host.data_ptr(), nbytes, wait)
            self._keep(done, host, wait)

    def _keep(self, done: Any, host: Tensor, wait: bool) -> None:
        if wait:
            return
        with self._lock:
            while self._kept and self.driver.is_complete(self._kept[0][0]):
                self._kept.popleft()
            self._kept.append((done, host))

    # ---- tensors ---------------------------------------------------------------------------------------

    def to_host(self, t: Tensor) -> Tensor:
        """A CPU tensor of the same geometry, with a copy of t's memory."""
        host = host_memory(span(t), t.dtype, t.shape, t.stride())
        self.read(t.device.index, t.data_ptr(), host)
        return host

    def upload(self, host: Tensor, device: torch.device) -> Tensor:
        """Copy a tensor to the device, in the same memory order if it has no gaps."""
        if is_sparse(host):
            return joined(host, [self.upload(part, device) for part in parts(host)])
        if host._is_zerotensor():  # zeros without memory
            host = torch.zeros(host.shape, dtype=host.dtype, device="cpu")
        if host.is_conj() or host.is_neg() or not dense(host):
            host = host.resolve_conj().resolve_neg().contiguous()
        made = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self.write(made.device.index, made.data_ptr(), host)
        return made

    def copy_from(self, source: Tensor | complex, target: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(source, Tensor):  # PyTorch unwraps a tensor that it made from a number
            return target.fill_(source)
        source_here, target_here = source.device.type == self.kind, target.device.type == self.kind
        if target.numel() == 0:
            return target
        if source_here and target_here:
            self._within(source, target)
        elif target_here:
            self._from_host(source, target, non_blocking)
        else:
            self._from_device(source, target, non_blocking)
        return target

    def copy_and_resize(self, source: Tensor, target: Tensor) -> Tensor:
        if source.shape != target.shape:
            target.resize_(source.shape)
        return self.copy_from(source, target)

    def item(self, t: Tensor) -> Any:
        if t.numel() == 0:
            raise RuntimeError("_local_scalar_dense: Empty tensor not supported")
        return as_marked(self.to_host(t), t).item()

    def _within(self, source: Tensor, target: Tensor) -> None:
        if same_geometry(source, target) and dense(source) and source.device == target.device:
            a, b, nbytes = source.data_ptr(), target.data_ptr(), span(source)
            if a == b:
                return
            if abs(a - b) >= nbytes:  # OpenCL does not allow overlapping copies
                self.driver.copy(source.device.index, self.core.stream(source.device.index), b, a, nbytes)
                return
        refuse_overlap(source, target)
        self._from_host(as_marked(self.to_host(source), source), target, False)

    def _from_host(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        staged = source
        if not (source.is_cpu and same_geometry(source, target) and dense(source)):
            # For a target with gaps, the memory between its elements is written back unchanged.
            staged = host_memory(span(target), target.dtype, target.shape, target.stride()) if dense(target) \
                else self.to_host(target)
            as_marked(staged, target).copy_(source)
        free = non_blocking and (staged is not source or source.is_pinned())
        self.write(target.device.index, target.data_ptr(), staged, wait=not free)
        # Pinned memory may still be the target of an earlier copy, so its values are not final.
        if target.dtype in _INDICES and target.numel() <= _FEW and not (free and staged is source):
            least, most = staged.aminmax()
            self.core.know(target._cdata, int(least), int(most))

    def _from_device(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if target.is_cpu and same_geometry(source, target) and dense(source):
            free = non_blocking and target.is_pinned()
            self.read(source.device.index, source.data_ptr(), target, wait=not free)
        else:
            target.copy_(as_marked(self.to_host(source), source))

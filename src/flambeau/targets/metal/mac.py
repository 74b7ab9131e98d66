"""Everything that needs a Mac: `torch.mps.compile_shader` compiles and launches kernels.

This file has not run on one. Its assumptions are listed here and in docs/metal.md: a kernel of the library takes
tensors (their buffers, from the first element on), lists of ints (as an array of `long`), `threads` (their total
number, not that of groups) and `group_size`; launches go to the current stream of `torch.mps`, one after the other.
The tests run this file on the emulator's `compile_shader`, which is called in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

from flambeau.codegen.simt.metal import direct
from flambeau.codegen.source import RangeSource, items_function
from flambeau.errors import CompileError, UnsupportedError

from ..base import KeyedSource, Step, not_compiled
from .library import whole

RECORD = 6  # words of a fault's record
Kernel: TypeAlias = KeyedSource[RangeSource]
Place: TypeAlias = tuple[torch.Tensor, int]  # a tensor, and an offset in bytes from its first element


def compiler() -> Callable[[str], Any]:
    if not torch.backends.mps.is_available():
        raise UnsupportedError("this is no Mac with a GPU that PyTorch can use", target="mps",
                               hint='FLAMBEAU_TARGET=metal-emulator runs the same kernels on the CPU')
    return torch.mps.compile_shader


class MacLibrary:
    """Kernels that are compiled together, when the first of them is needed."""

    def __init__(self, sources: Sequence[RangeSource], compile: Callable[[str], Any]) -> None:
        self.kernels = {s.name: Kernel(s, hashlib.sha256(s.text.encode()).hexdigest()) for s in sources}
        self._compile, self._library = compile, None

    def launch(self, name: str) -> MacLaunch | CompileError:
        kernel = self.kernels[name]
        try:
            if self._library is None:
                self._library = self._compile(whole([k.text for k in self.kernels.values()]))
            return MacLaunch(kernel, self._library)
        except (RuntimeError, SyntaxError) as error:  # raised by torch for a text that does not compile
            return not_compiled(f"the kernel {name}", str(error), "mps", None)


class MacLaunch:
    """A kernel: its functions, in the order of their launches."""

    def __init__(self, kernel: Kernel, library: Any) -> None:
        self.source, self.name = kernel.source, kernel.source.name
        names = [r.function.replace("KERNEL_NAME", kernel.symbol) for r in self.source.ranges]
        self._functions = [getattr(library, name) for name in names]
        self._items = items_function(self.source)

    def run(self, places: Sequence[Place], sizes: Sequence[int]) -> int:
        """Launch the kernel and return the fault that it reports, or 0. Waits for it only if it checks for faults."""
        tensors = [moved(*place) for place in places]
        few = direct(len(tensors))
        more = [tensors[few:]] if tensors[few:] else []  # a list of tensors is a buffer of their addresses
        device = tensors[0].device if tensors else torch.device("mps")
        record = torch.zeros(RECORD, dtype=torch.int32, device=device) if self.source.checks else nothing(device)
        for function, part, items in zip(self._functions, self.source.ranges, self._items(1, *sizes), strict=True):
            if items > 0:
                threads = -(-items // part.group) * part.group  # kernels rely on whole groups
                function(*tensors[:few], *more, [*sizes] or [0], record, threads=[threads], group_size=[part.group])
        if not self.source.checks:
            return 0
        found = record.cpu()
        return int(found[2:4].view(torch.int64).item()) if found[0] else 0

    def __call__(self, pointers: Sequence[Any], sizes: Sequence[int], /) -> int:
        return self.run([(t, 0) for t in pointers], sizes)


@cache
def nothing(device: torch.device) -> torch.Tensor:
    """The record passed to kernels that check for no faults; none of them touches it."""
    return torch.zeros(RECORD, dtype=torch.int32, device=device)


def moved(t: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor that begins `offset` bytes after the first element of another. Kernels use nothing but its start, so its
    dtype and shape do not matter."""
    if not offset:
        return t
    start = t.storage_offset() * t.element_size() + offset
    count = t.untyped_storage().nbytes() - start
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage(), start, (count,), (1,))


class MacPlan:
    """A sequence of launches. Its table holds tensors, because addresses of a Mac's buffers are of no use."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = [(launch, tuple(where), tuple(which)) for launch, where, which in steps]

    def __call__(self, pointers: Sequence[Any], sizes: Sequence[int], /) -> tuple[int, int] | None:
        for at, (launch, where, which) in enumerate(self._steps):
            assert isinstance(launch, MacLaunch)
            code = launch.run([(pointers[slot], offset) for slot, offset in where], [sizes[slot] for slot in which])
            if code:
                return at, code
        return None

"""Tables of addresses, where the kernels that go along them can read them."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Hashable, Sequence

import torch

from flambeau.ir.faults import error_of
from flambeau.ir.program import CHUNK
from flambeau.targets.base import Launch, Target


def start(launch: Launch, pointers: Sequence[int], sizes: tuple[int, int]) -> None:
    """Launch along a table. Such kernels have no faults of their own; one of an earlier kernel is raised instead."""
    if code := launch(pointers, sizes):
        error = error_of(code)
        error.add_note("reported by a kernel that was launched before")
        raise error


def sizes_of(rows: int, blocks: torch.Tensor) -> tuple[int, int]:
    """The sizes that a kernel along a table takes."""
    return 2 * rows + 1, 2 * len(blocks) + 1


def blocks_of(lengths: Sequence[int]) -> torch.Tensor:
    """Rows cut into blocks: (row, first element) of each, one after the other."""
    counts = (torch.tensor(lengths, dtype=torch.int64, device="cpu") + (CHUNK - 1)) // CHUNK
    rows = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((rows, (torch.arange(len(rows), device="cpu") - before) * CHUNK), 1).contiguous()


class PointerTable:
    """A table whose rows a program knows: only the addresses differ from call to call."""

    def __init__(self, target: Target, device: torch.device, pointers: Sequence[tuple[int, int]],
                 lengths: Sequence[int]) -> None:
        self.mirror = Mirror(target, device)
        self.pointers, self.lengths = pointers, torch.tensor(lengths, dtype=torch.int64, device="cpu")
        self.blocks = blocks_of(lengths).to(device)

    def __call__(self, slots: Sequence[int]) -> tuple[torch.Tensor, int, int]:
        """The memory, which the caller holds for as long as kernels read it, and the addresses of table and blocks."""
        words = array("q", [slots[slot] + offset for slot, offset in self.pointers])
        return self.send(torch.frombuffer(words, dtype=torch.int64))

    def send(self, addresses: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """The same for addresses as they are."""
        words = torch.cat((addresses, self.lengths))
        memory = self.mirror.memory(len(words))
        self.mirror.send(words, memory)
        return memory, memory.data_ptr(), self.blocks.data_ptr()


class Mirror:
    """Words of the host where a target's kernels read them; copied only when they differ from those of the call before.

    On a device each queue and thread has its own memory: a copy waits for the kernels of its queue that still read what
    was there, and no thread writes between the copy and the launch of another.
    """

    def __init__(self, target: Target, device: torch.device, alone: bool = False) -> None:
        """`alone`: no two calls overlap."""
        self.target, self.device, self.alone = target, device, alone
        self.there: dict[Hashable, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # what captured graphs will read again

    def memory(self, count: int) -> torch.Tensor:
        """Where the words of this call will lie."""
        place = self.place()
        if place is None:
            return torch.empty(count, dtype=torch.int64, device=self.device)
        if place not in self.there or self.there[place][0].numel() != count:
            self.there[place] = torch.empty(count, dtype=torch.int64, device=self.device), None
        return self.there[place][0]

    def place(self) -> Hashable | None:
        """What orders the uses of one memory; None: nothing does."""
        if self.device.type == "cpu":
            return () if self.alone else None
        queue = self.target.queue()
        return None if queue is None else (queue, threading.get_ident())

    def send(self, words: torch.Tensor, memory: torch.Tensor) -> None:
        if self.device.type == "cpu":
            memory.copy_(words)
            return
        place = self.place()
        before = None if place is None else self.there[place][1]
        if before is not None and torch.equal(before, words):
            return
        # From pinned memory nothing waits; torch does not reuse it before the copy is done.
        pinned = words.pin_memory() if self.device.type == "cuda" else words
        memory.copy_(pinned, non_blocking=True)
        if place is None:
            self.kept.append((pinned, memory))
        else:
            self.there[place] = memory, words.clone()

"""Tables of tensor addresses and lengths in device memory, for kernels that run over many tensors."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from flambeau.ir.program import CHUNK
from flambeau.targets.base import Target

Column = int | tuple[tuple[int, int], ...]
# Computes some words of a table from the pointers of a call and the addresses in its lists of tensors.
Part = Callable[[Sequence[int], Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Table:
    """The content of the table of one launch, column after column."""

    columns: tuple[Column, ...]  # the number of a list of the call; or a (slot, offset) pointer for each row
    lengths: tuple[int, ...]


def counts_of(lengths: Sequence[int]) -> list[int]:
    """The number of blocks in each row."""
    return [-(-n // CHUNK) for n in lengths]


def sizes_of(lengths: Sequence[int]) -> tuple[int, int]:
    """The two size arguments of a kernel that runs along a table."""
    return 2 * len(lengths) + 1, 2 * sum(counts_of(lengths)) + 1


def blocks_of(lengths: Sequence[int]) -> torch.Tensor:
    """Rows split into blocks: the (row, first element) of each block in turn."""
    counts = words(counts_of(lengths))
    rows = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((rows, (torch.arange(len(rows), device="cpu") - before) * CHUNK), 1).contiguous()


def words(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


class AddressTables:
    """The tables of consecutive launches, in one memory block; copied only if they changed since the last call.

    On a device, each queue and thread has its own block: the copy runs in queue order after kernels that still read the
    old content, and no other thread can write between the copy and the launch.
    """

    def __init__(self, target: Target, device: torch.device, tables: Sequence[Table]) -> None:
        self.target, self.device = target, device
        self.blocks = [blocks_of(t.lengths).to(device) for t in tables]
        self.parts: list[Part] = []
        self.starts: list[int] = []  # byte offsets of the tables
        at = 0
        for t in tables:
            self.starts.append(8 * at)
            count = len(t.lengths) * (len(t.columns) + 1)
            pad = count % 2  # so that the next address is a multiple of 16 again, as kernels may assume
            self.parts += [*columns_of(t.columns), constant((*t.lengths, *(0,) * pad))]
            at += count + pad
        self.there: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}  # by queue and thread: memory and content
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # read again when captured graphs are replayed

    def __call__(self, slots: Sequence[int], lists: Sequence[torch.Tensor]) -> tuple[object, ...]:
        """The memory block, which the caller must keep while kernels read it; the addresses of tables and blocks."""
        memory = self.sent(torch.cat([part(slots, lists) for part in self.parts]))
        base = memory.data_ptr()
        return memory, *[x for at, b in zip(self.starts, self.blocks) for x in (base + at, b.data_ptr())]

    def sent(self, table: torch.Tensor) -> torch.Tensor:
        """Copy a table to the device, unless the same words are there already."""
        if self.device.type == "cpu":
            return table
        queue = self.target.queue()
        place = None if queue is None else (queue, threading.get_ident())
        memory, before = self.there.get(place, (None, None))
        if memory is None:
            memory = torch.empty(len(table), dtype=torch.int64, device=self.device)
        elif before is not None and torch.equal(before, table):
            return memory
        # A copy from pinned memory does not block; torch does not reuse that memory before the copy is complete.
        pinned = table.pin_memory() if self.device.type == "cuda" else table
        memory.copy_(pinned, non_blocking=True)
        if place is None:
            self.kept.append((pinned, memory))
        else:
            self.there[place] = memory, table
        return memory


def constant(values: Sequence[int]) -> Part:
    known = words(values)
    return lambda slots, lists: known


def columns_of(columns: Sequence[Column]) -> list[Part]:
    """Parts that compute the columns. Only columns with pointers from several slots are summed in Python, together."""
    parts: list[Part] = []
    for several, found in groupby(columns, lambda c: isinstance(c, tuple) and len({slot for slot, _ in c}) > 1):
        some = list(found)
        parts += [pointers_of([p for c in some for p in c])] if several else map(column_of, some)  # type: ignore[union-attr]
    return parts


def column_of(c: Column) -> Part:
    if isinstance(c, int):
        return lambda slots, lists: lists[c]
    slot, offsets = c[0][0], words([offset for _, offset in c])
    return lambda slots, lists: offsets + slots[slot]


def pointers_of(pointers: Sequence[tuple[int, int]]) -> Part:
    return lambda slots, lists: torch.frombuffer(
        array("q", [slots[slot] + offset for slot, offset in pointers]), dtype=torch.int64)

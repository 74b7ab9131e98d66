"""Tables of addresses and lengths in memory, for kernels over many tensors."""

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
# Some words of a table, from the pointers of a call and the addresses of its lists of tensors.
Part = Callable[[Sequence[int], Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Table:
    """What stands in the table of one launch, column after column."""

    columns: tuple[Column, ...]  # which list of the call; or pointers, as those of a step, of row after row
    lengths: tuple[int, ...]


def counts_of(lengths: Sequence[int]) -> list[int]:
    """How many blocks each row has."""
    return [-(-n // CHUNK) for n in lengths]


def sizes_of(lengths: Sequence[int]) -> tuple[int, int]:
    """The sizes that a kernel along a table takes."""
    return 2 * len(lengths) + 1, 2 * sum(counts_of(lengths)) + 1


def blocks_of(lengths: Sequence[int]) -> torch.Tensor:
    """Rows cut into blocks: (row, first element) of each, one after the other."""
    counts = words(counts_of(lengths))
    rows = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((rows, (torch.arange(len(rows), device="cpu") - before) * CHUNK), 1).contiguous()


def words(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


class AddressTables:
    """The tables of launches that follow each other, in one memory; copied only if they differ from those of the call
    before.

    On a device each queue and thread has its own memory: a copy waits for the kernels of its queue that still read what
    was there, and no thread writes between the copy and the launch of another.
    """

    def __init__(self, target: Target, device: torch.device, tables: Sequence[Table]) -> None:
        self.target, self.device = target, device
        self.blocks = [blocks_of(t.lengths).to(device) for t in tables]
        self.parts: list[Part] = []
        self.starts: list[int] = []  # of the tables, in bytes
        at = 0
        for t in tables:
            self.starts.append(8 * at)
            count = len(t.lengths) * (len(t.columns) + 1)
            pad = count % 2  # to where an address is a multiple of 16 again, as kernels may assume
            self.parts += [*columns_of(t.columns), constant((*t.lengths, *(0,) * pad))]
            at += count + pad
        self.there: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}  # memory, and what lies there
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # what captured graphs will read again

    def __call__(self, slots: Sequence[int], lists: Sequence[torch.Tensor]) -> tuple[object, ...]:
        """The memory, which the caller holds for as long as kernels read it, and the addresses of tables and blocks."""
        memory = self.sent(torch.cat([part(slots, lists) for part in self.parts]))
        base = memory.data_ptr()
        return memory, *[x for at, b in zip(self.starts, self.blocks) for x in (base + at, b.data_ptr())]

    def sent(self, table: torch.Tensor) -> torch.Tensor:
        """The same words on the device."""
        if self.device.type == "cpu":
            return table
        queue = self.target.queue()
        place = None if queue is None else (queue, threading.get_ident())
        memory, before = self.there.get(place, (None, None))
        if memory is None:
            memory = torch.empty(len(table), dtype=torch.int64, device=self.device)
        elif before is not None and torch.equal(before, table):
            return memory
        # From pinned memory nothing waits; torch does not reuse it before the copy is done.
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
    """Pointers are added up in Python only where those of a column are anybody's, and all such columns at once."""
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

"""Functions over lists of tensors, such as the steps of torch's optimizers, as one kernel for all tensors of a kind.

Such a function computes each row of its lists (a parameter, its gradient, its states) by itself. So one row of each
kind, that is of each combination of dtypes, is compiled (row_kernels.py), and its kernels go along a table of all rows:
how many there are, and of which sizes, costs nothing. What cannot be done this way is left to torch, with the reason
in `DECLINED`.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from flambeau.config import config
from flambeau.errors import UnsupportedError
from flambeau.ir.dtypes import SUPPORTED
from flambeau.pipeline import LOCK
from flambeau.runtime import tensor_lists
from flambeau.runtime.address_tables import Mirror, blocks_of, sizes_of, start
from flambeau.runtime.memory_layout import dense
from flambeau.runtime.tensor_lists import PLAIN, Watch
from flambeau.targets.base import get_target
from flambeau.torch_compat.dispatch import count_dispatch_modes
from flambeau.torch_compat.optim import COUNT

from .row_kernels import SCALARS, Declined, RowForm, RowKind, TableLaunch, Variant, compile_row, target_name

CHANGING = ("grads", "d_p_list")  # names of lists whose tensors are others in every call
MUST_BE_OFF = ("fused", "differentiable", "has_complex", "has_sparse_grad", "grad_scale", "found_inf")
MOST_PREPARED = 64  # calls whose tables are kept, for one function

DECLINED: Counter[str] = Counter()  # reasons why calls were left to torch

Addresses = dict[str, torch.Tensor]  # of the tensors of each list


@dataclass
class Class:
    """Rows of one kind."""

    kind: RowKind
    rows: list[int]
    variants: list[Variant | Declined]
    tables: dict[Any, Tables] = field(default_factory=dict)


@dataclass
class PreparedRows:
    """What follows from the dtypes, sizes and layouts of a call's tensors, for as long as those are the same."""

    lengths: list[int]
    classes: list[Class]
    left: list[int]  # rows that are not dense, or laid out in different ways
    watch: Watch | None = None
    apart: int = -1  # the moves of the watch after which tensors were seen to share no memory


class ListFunction:
    """One of torch's functions, and what was compiled for it."""

    def __init__(self, original: Callable[..., None], module: str) -> None:
        self.original, self.module = original, importlib.import_module(module)
        self.name = original.__name__
        self.names = list(inspect.signature(self.original).parameters)
        self.changing = self.names[1] if self.names[1] in CHANGING else self.names[0]
        self.compiled: dict[Any, list[Variant | Declined]] = {}
        self.prepared: dict[Any, PreparedRows] = {}
        self.lock = threading.RLock()

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], options: tuple[str | None, str]) -> None:
        """`options`: the target, if not that of the tensors' device, and the numerics."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        tensor_lists.EXTENSION.begin()
        try:
            with self.lock:
                left = _Call(self, given, options).run()
        except Declined as reason:
            DECLINED[f"{self.name}: {reason}"] += 1
            self.original(*args, **kwargs)
            return
        if left:
            DECLINED[f"{self.name}: rows that are not laid out alike"] += len(left)
            self.original(**{k: [v[row] for row in left] if isinstance(v, list) and v else v for k, v in given.items()})


@cache
def list_function(original: Callable[..., None], module: str) -> ListFunction:
    """One for a process."""
    return ListFunction(original, module)


class _Call:
    """One call of such a function."""

    def __init__(self, function: ListFunction, given: dict[str, Any], options: tuple[str | None, str]) -> None:
        self.f = function
        if count_dispatch_modes():
            raise Declined("a dispatch mode is active")
        for name in MUST_BE_OFF:
            if given.get(name):
                raise Declined(name)
        every = {name: value for name, value in given.items() if isinstance(value, list)}
        self.lists = {name: value for name, value in every.items() if value and value[0] is not None}
        self.shared = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        self.rows = len(given["params"])
        self.numbers = {name: value for name, value in given.items() if isinstance(value, float)}
        for name, tensors in every.items():
            if len(tensors) != self.rows if name in self.lists else any(map(is_something, tensors)):
                raise Declined(f"{name} that are not there for all parameters")
        for name, t in self.shared.items():
            check_plain(name, t)
            if t.dim() or t.device != given["params"][0].device:
                raise Declined(f"{name} is no scalar, or is elsewhere")
        self.form = RowForm(
            self.f.original, self.f.module, self.f.changing, given, tuple(self.lists),
            {name: [None] if value else [] for name, value in every.items() if name not in self.lists},
            {name: t.dtype for name, t in self.shared.items()}, self.numbers,
            "state_steps" in self.lists and not given.get("capturable") and hasattr(self.f.module, COUNT), *options)
        rest = ((name, value) for name, value in given.items() if not isinstance(value, (list, float, torch.Tensor)))
        self.key = (*options, *self.lists, *self.numbers, *rest, *self.form.shared.items())

    # ---- what the lists hold ---------------------------------------------------------------------------

    def prepare(self) -> PreparedRows:
        known = self.f.prepared
        key = (id(self.lists["params"][0]), self.rows, self.key)
        found = known.get(key)
        if found is None or found.watch is None or not found.watch.check(self.watched()):
            known.pop(key, None)
            if len(known) >= MOST_PREPARED:
                del known[next(iter(known))]
            found = known[key] = self.classify()
        return found

    def watched(self) -> list[list[torch.Tensor]]:
        """Its lists, then what all rows read: none may share memory with another."""
        return [*self.lists.values(), list(self.shared.values())]

    def classify(self) -> PreparedRows:
        groups: dict[RowKind, list[int]] = {}
        left = []
        for k in range(self.rows):
            row = {name: tensors[k] for name, tensors in self.lists.items()}
            if not is_row(row):
                left.append(k)
                continue
            places = {t.device for name, t in row.items() if name in SCALARS}
            kind = RowKind(row["params"].device, next(iter(places), None), tuple(t.dtype for t in row.values()))
            groups.setdefault(kind, []).append(k)
        classes = [Class(kind, rows, self.f.compiled.setdefault((self.key, kind), [])) for kind, rows in groups.items()]
        return PreparedRows([t.numel() for t in self.lists["params"]], classes, left)

    # ---- the run -----------------------------------------------------------------------------------------

    def run(self) -> list[int]:
        """All rows that can be; those that cannot are returned."""
        if not self.rows:
            return []
        prepared = self.prepare()
        # All are compiled before the first of them runs: what cannot be compiled, is left to torch as a whole.
        try:
            parts = [(c, *part) for c in prepared.classes for part in self.parts(c, prepared.watch)]
        finally:  # for a call that is declined too: the next one is not looked at again
            watch = prepared.watch = prepared.watch or Watch(self.watched())
        if prepared.apart != watch.moves:
            if not watch.apart():  # rows are computed in no order
                raise Declined("tensors that share memory")
            prepared.apart = watch.moves
        addresses = dict(zip(self.lists, watch.by_list))
        shared = {name: t.data_ptr() for name, t in self.shared.items()}
        for c, variant, rows, counts in parts:
            key = (id(variant), None if rows is c.rows else tuple(rows))
            if key not in c.tables:
                c.tables[key] = Tables(variant, c, rows, prepared.lengths, target_name(c.kind.device, self.form.target))
            tables = c.tables[key]
            with tables.target.on(c.kind.device):
                tables.run(self.numbers, addresses, watch.moves, shared, counts)
        tensor_lists.changed(self.lists["params"])  # states are in no graph of autograd's
        return prepared.left

    def parts(self, c: Class, watch: Watch | None) -> list[tuple[Variant, list[int], list[float]]]:
        """Rows with the kernels that hold for their numbers, and for each row the count of steps after this one; one
        count, if it is that of all of them."""
        if not self.form.counts:
            return [(self.variant(c, 0.0), c.rows, [])]
        if c.kind.scalars is not None and c.kind.scalars.type != "cpu":
            raise Declined("counts of steps on a device, and capturable is not set")
        steps = self.lists["state_steps"]
        if watch is not None and len(c.rows) == self.rows:
            where = watch.by_list[list(self.lists).index("state_steps")]
            after = [count + 1.0 for count in tensor_lists.numbers(steps, where)]
        else:
            after = [steps[row].item() + 1.0 for row in c.rows]
        chosen = {count: self.variant(c, count) for count in set(after)}
        if len({id(v) for v in chosen.values()}) == 1:
            return [(chosen[after[0]], c.rows, after)]
        parts: dict[int, tuple[Variant, list[int], list[float]]] = {}
        for row, count in zip(c.rows, after, strict=True):
            v = chosen[count]
            _, rows, counts = parts.setdefault(id(v), (v, [], []))
            rows.append(row)
            counts.append(count)
        return list(parts.values())

    def variant(self, c: Class, count: float) -> Variant:
        for v in c.variants:
            if isinstance(v, Declined):
                raise v
            if v.holds(step=count, **self.numbers):
                return v
        try:
            with LOCK:
                made = compile_row(self.form, c.kind, count)
        except Exception as e:  # whatever is wrong with the compiler, the optimizer runs
            if config.verify and not isinstance(e, (Declined, UnsupportedError)):
                raise
            c.variants.append(e if isinstance(e, Declined) else Declined(f"{type(e).__name__}: {e}"))
            raise c.variants[-1] from e  # type: ignore[misc]
        c.variants.append(made)
        return made


class Tables:
    """The tables of a variant's kernels: what of them stays from call to call."""

    def __init__(self, v: Variant, c: Class, rows: list[int], lengths: list[int], target: str) -> None:
        self.v, self.rows = v, rows
        self.which = None if rows == list(range(len(lengths))) else torch.tensor(rows, device="cpu")
        own = [lengths[row] for row in rows]
        self.lengths = {True: words([1] * len(rows)), False: words(own)}
        self.target = get_target(target)
        targets = {False: (self.target, c.kind.device), True: (get_target("cpu"), torch.device("cpu"))}
        places = sorted({t.apart for t in v.launches})  # a device begins before the host counts
        self.mirrors = {apart: Mirror(*targets[apart], alone=True) for apart in places}
        self.launches = {apart: [t for t in v.launches if t.apart is apart] for apart in places}
        self.words = {apart: sum(even((len(t.pointers) + 1) * len(rows)) for t in mine)
                      for apart, mine in self.launches.items()}
        self.blocks: dict[tuple[bool, bool], torch.Tensor] = {}
        for t in v.launches:
            if (t.apart, t.single) not in self.blocks:
                blocks = blocks_of([1] * len(rows) if t.single else own)
                self.blocks[t.apart, t.single] = blocks.to(targets[t.apart][1])
        self.places = torch.empty(v.temporaries * len(rows), dtype=torch.float64, device=c.kind.device)
        # The words of the last call, where their tables begin, and what they follow from.
        self.before: dict[bool, tuple[Any, torch.Tensor, list[int]]] = {}

    def run(self, given: dict[str, float], addresses: Addresses, moves: int, shared: dict[str, int],
            counts: list[float]) -> None:
        """`moves`: another number when addresses are others."""
        counted = list(dict.fromkeys(counts)) or [0.0]
        doubles = [self.v.numbers(step=count, **given) for count in counted]
        flat = [x for d in doubles for x in (*d, *[0.0] * (len(d) % 2))]
        numbers = torch.tensor(flat, dtype=torch.float64, device="cpu").view(torch.int64)
        for apart, mirror in self.mirrors.items():
            launches = self.launches[apart]
            memory = mirror.memory(len(numbers) + self.words[apart])
            base = memory.data_ptr()
            # All but the numbers stays as it was, if no tensor moved.
            follows = moves, base, shared, counts if len(counted) > 1 else None
            known = self.before.get(apart)
            if known is None or known[0] != follows:
                table, starts = self.table(launches, len(numbers), addresses, shared, base, counts, counted)
                self.before[apart] = known = follows, table, starts
            _, table, starts = known
            table[: len(numbers)] = numbers
            mirror.send(table, memory)
            for t, at in zip(launches, starts, strict=True):
                blocks = self.blocks[apart, t.single]
                if len(blocks):
                    start(t.launch, (at, blocks.data_ptr()), sizes_of(len(self.rows), blocks))

    def table(self, launches: Sequence[TableLaunch], first: int, addresses: Addresses, shared: dict[str, int],
              base: int, counts: list[float], counted: list[float]) -> tuple[torch.Tensor, list[int]]:
        """Place for the numbers, then the tables of the launches; and where those begin."""
        rows = len(self.rows)
        places = {count: base + 8 * first // len(counted) * k for k, count in enumerate(counted)}
        numbers = words([places[count] for count in counts] if len(counted) > 1 else [base])
        parts, starts, at = [words([0] * first)], [], first
        for t in launches:
            starts.append(base + 8 * at)
            columns: list[torch.Tensor] = []
            for p in t.pointers:
                if p.kind == "temporary":
                    begin = self.places.data_ptr() + 8 * p.which * rows
                    columns.append(torch.arange(begin, begin + 8 * rows, 8, device="cpu"))
                elif p.kind == "number":
                    columns.append((numbers + 8 * p.which).expand(rows))
                elif p.which in shared:
                    columns.append(words([shared[p.which]]).expand(rows))
                else:
                    columns.append(addresses[p.which] if self.which is None else addresses[p.which][self.which])
            columns.append(self.lengths[t.single])
            count = len(columns) * rows
            parts += [*columns, words([0] * (even(count) - count))]
            at += even(count)
        return torch.cat(parts), starts


def words(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def even(count: int) -> int:
    """Words up to where an address is a multiple of 16 again, as kernels may assume."""
    return count + count % 2


def is_row(row: dict[str, torch.Tensor]) -> bool:
    """Whether one element after the other of its tensors belongs together. What is no plain tensor is torch's."""
    p = row["params"]
    for name, t in row.items():
        check_plain(name, t)
        if name in SCALARS:
            if t.dim():
                raise Declined(f"{name} that are no scalars")
        elif t.device != p.device or t.shape != p.shape:
            raise Declined(f"{name} that differ from their parameters")
        elif t.stride() != p.stride() and not (t.is_contiguous() and p.is_contiguous()):
            return False
    return dense(p)


def check_plain(name: str, t: torch.Tensor) -> None:
    if type(t) not in PLAIN or t.layout is not torch.strided or t.is_neg():
        raise Declined(f"{name} holds what is no plain tensor")
    if t.dtype not in SUPPORTED or not t.is_floating_point():
        raise Declined(f"{name} of {t.dtype}")


def is_something(x: Any) -> bool:
    return x is not None

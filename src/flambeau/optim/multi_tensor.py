"""Runs functions over lists of tensors, such as optimizer steps, as one kernel for all tensors of a kind.

Such a function computes each row of its lists (a parameter, its gradient, its states) independently. So one row of each
kind, that is of each combination of dtypes, is compiled (row_kernels.py), and its kernels run along a table of all
rows. The number of rows and their sizes cost no compilation. Calls that cannot be done this way are left to torch, with
the reason in `DECLINED`.
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
from flambeau.runtime.address_tables import words
from flambeau.runtime.memory_layout import dense
from flambeau.runtime.tensor_lists import PLAIN, Watch
from flambeau.runtime.watchers import BOUND
from flambeau.targets.base import Run
from flambeau.torch_compat.dispatch import count_dispatch_modes
from flambeau.torch_compat.optim import COUNT

from .row_kernels import SCALARS, Declined, RowForm, RowKind, Variant, compile_row

CHANGING = ("grads", "d_p_list")  # names of lists whose tensors are new in every call
MUST_BE_OFF = ("fused", "differentiable", "has_complex", "has_sparse_grad", "grad_scale", "found_inf")
MOST_PREPARED = 64  # calls per function whose tables are kept
MOST_PARTS = 64  # subsets of the rows of one kind whose tables are kept

DECLINED: Counter[str] = Counter()  # reasons why calls were left to torch


@dataclass(eq=False)
class Class:
    """Rows of one kind."""

    kind: RowKind
    rows: list[int]
    variants: list[Variant | Declined]
    # By variant and rows: programs along tables of these rows, and the rows' indices unless they are all rows.
    runs: dict[Any, tuple[torch.Tensor | None, list[Run]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        BOUND.add(self)

    def bind_again(self) -> None:
        """Bind the programs anew at the next call, because the watchers changed."""
        self.runs.clear()


@dataclass
class PreparedRows:
    """The facts derived from the dtypes, sizes and layouts of a call's tensors, valid while those stay the same."""

    lengths: list[int]
    classes: list[Class]
    left: list[int]  # rows left to torch: not dense, or with tensors in different layouts
    watch: Watch | None = None
    apart: int = -1  # the watch's count of moves when tensors were last found to share no memory


class ListFunction:
    """One of torch's list functions, with everything that was compiled for it."""

    def __init__(self, original: Callable[..., None], module: str) -> None:
        self.original, self.module = original, importlib.import_module(module)
        self.name = original.__name__
        self.names = list(inspect.signature(self.original).parameters)
        self.changing = self.names[1] if self.names[1] in CHANGING else self.names[0]
        self.compiled: dict[Any, list[Variant | Declined]] = {}
        self.prepared: dict[Any, PreparedRows] = {}
        self.lock = threading.RLock()

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], options: tuple[str | None, str]) -> None:
        """Run the function. `options`: the target (None: that of the tensors' device) and the numerics."""
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
    """The ListFunction of a torch function, one per process."""
    return ListFunction(original, module)


class _Call:
    """One call of a list function."""

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
        """The call's lists, then the scalars that all rows read: none of these may share memory."""
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
        """Run all rows that can be; returns those that are left to torch."""
        if not self.rows:
            return []
        prepared = self.prepare()
        # All kinds are compiled before the first one runs, so that a call is left to torch as a whole if one fails.
        try:
            parts = [(c, *part) for c in prepared.classes for part in self.parts(c, prepared.watch)]
        finally:  # so that the next such call need not be checked, even if this one is declined
            watch = prepared.watch = prepared.watch or Watch(self.watched())
        if prepared.apart != watch.moves:
            if not watch.apart():  # rows run in no particular order
                raise Declined("tensors that share memory")
            prepared.apart = watch.moves
        ready = [(*self.runs(c, variant, rows, prepared.lengths), counts) for c, variant, rows, counts in parts]
        lists = watch.by_list[: len(self.lists)]
        for which, runs, counts in ready:
            for run in runs:
                run([*(lists if which is None else [addresses[which] for addresses in lists]), *self.shared.values(),
                     *self.numbers.values(), *counts])
        tensor_lists.changed(self.lists["params"])  # autograd does not track the states
        return prepared.left

    def runs(self, c: Class, variant: Variant, rows: list[int], lengths: list[int]
             ) -> tuple[torch.Tensor | None, list[Run]]:
        """The indices of the rows (None if they are all rows), and the programs that run along them."""
        key = (id(variant), None if rows is c.rows else tuple(rows))
        if key not in c.runs:
            if len(c.runs) >= MOST_PARTS:
                c.runs.clear()
            try:
                runs = [p.along([lengths[row] for row in rows]) for p in variant.programs]
            except Declined as reason:
                c.variants.insert(0, reason)
                raise
            c.runs[key] = None if len(rows) == self.rows else words(rows), runs
        return c.runs[key]

    def parts(self, c: Class, watch: Watch | None) -> list[tuple[Variant, list[int], list[float]]]:
        """Rows grouped by their step count, each with the kernels for its numbers, and the count after this step."""
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
        if len(set(after)) == 1:
            return [(self.variant(c, after[0]), c.rows, after[:1])]
        alike: dict[float, list[int]] = {}
        for row, count in zip(c.rows, after, strict=True):
            alike.setdefault(count, []).append(row)
        return [(self.variant(c, count), rows, [count]) for count, rows in alike.items()]

    def variant(self, c: Class, count: float) -> Variant:
        for v in c.variants:
            if isinstance(v, Declined):
                raise v
            if v.holds(step=count, **self.numbers):
                return v
        try:
            with LOCK:
                made = compile_row(self.form, c.kind, count)
        except Exception as e:  # whatever is wrong with the compiler, the optimizer must run
            if config.verify and not isinstance(e, (Declined, UnsupportedError)):
                raise
            c.variants.append(e if isinstance(e, Declined) else Declined(f"{type(e).__name__}: {e}"))
            raise c.variants[-1] from e  # type: ignore[misc]
        c.variants.append(made)
        return made


def is_row(row: dict[str, torch.Tensor]) -> bool:
    """Whether corresponding elements of a row's tensors are at the same offset. Declined if unsuitable."""
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

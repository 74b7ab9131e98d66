"""Runs a function in eager, compiled and in float64, and compares results, gradients and layers.

    report = flambeau.debug.compare(model, x, numerics="eager")
    report.equal, report.first, report.worse()

Each run uses copies of parameters, buffers and inputs, and starts from the same random state. Layers are the results of
submodules, recorded by forward hooks. In the compiled run, the hooks are part of the graph, so a layer's value is what
the model computes when it also has to return it. Results and gradients come from another run, without hooks.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from flambeau.capture.decompositions import table
from flambeau.compile.backend import check_options
from flambeau.errors import UnsupportedError
from flambeau.ops.facts import facts
from flambeau.torch_compat import pytree
from flambeau.torch_compat.dispatch import TorchDispatchMode
from flambeau.torch_compat.dynamo import innermost_fn
from flambeau.torch_compat.ops import OpOverload

from .copied_call import Twin
from .differences import Difference, difference, gathered
from .first_difference import First, first_of_call, of_torch
from .recorded_calls import Call, kept, random_state, recorded, states

HERE = str(Path(__file__).parents[1])


@dataclass
class Comparison:
    """The result of `compare`. A row is a result, a gradient, a changed input or buffer, or a layer."""

    numerics: str
    target: str
    graphs: int  # compiled graphs that were called
    results: list[Difference] = field(default_factory=list)
    gradients: list[Difference] = field(default_factory=list)
    changed: list[Difference] = field(default_factory=list)  # inputs, parameters and buffers that the call wrote to
    layers: list[Difference] = field(default_factory=list)
    first: First | None = None
    also: list[First] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Difference]:
        return [*self.results, *self.gradients, *self.changed]

    @property
    def equal(self) -> bool:
        """Whether all rows, except layers, are equal bit for bit (except for NaN payloads)."""
        return all(row.equal for row in self.rows)

    @property
    def differ(self) -> int:
        return sum(row.differ for row in self.rows)

    @property
    def total(self) -> int:
        return sum(row.total for row in self.rows)

    @property
    def histogram(self) -> dict[str, int]:
        """Number of values that differ by 1 ulp, by 2 or 3, by 4 to 7, ..."""
        return gathered(self.rows)

    def worse(self, than: float = 1.0) -> list[Difference]:
        """Rows whose error against float64 is more than `than` times eager's, the worst first."""
        found = [row for row in self.rows if row.ratio is not None and row.ratio > than]
        return sorted(found, key=lambda row: -(row.ratio or 0.0))

    @property
    def nearness(self) -> float | None:
        """How many times nearer to float64 compiled is than eager: the geometric mean over all rows with an error. None
        if there is no reference, or no error."""
        logs = [math.log(row.rms_eager / row.rms_compiled) for row in self.rows if row.rms_eager and row.rms_compiled]
        return math.exp(sum(logs) / len(logs)) if logs else None

    def headline(self) -> str:
        what = f"numerics={self.numerics}, target {self.target}, {self.graphs} graph(s)"
        if self.equal:
            return f"equal: all {self.total:,} values are eager's, bit for bit ({what})"
        near = "" if self.nearness is None else f"{nearer(self.nearness)}; "
        return f"{near}{self.differ:,} of {self.total:,} values differ from eager's ({what})"

    def _repr_html_(self) -> str:
        """For notebooks. Imported by name, because `report` is a higher layer."""
        return str(import_module("flambeau.report.comparison").fragment(self))

    def __str__(self) -> str:
        first = [f"first: {self.first}"] if self.first else []
        bins = [f"ulps: {', '.join(f'{name}: {n:,}' for name, n in self.histogram.items())}"] if self.histogram else []
        return "\n".join([self.headline(), *bins, *first, *(f"note: {note}" for note in self.notes)])


def nearer(times: float) -> str:
    if f"{times:.2f}" == "1.00":
        return "compiled is as near to float64 as eager"
    more = times > 1.0
    return f"compiled is {'nearer to' if more else 'farther from'} float64 than eager by {max(times, 1 / times):.2f} ×"


def compare(function: Callable[..., Any], *args: Any, numerics: str = "fast", backward: bool = True,
            target: str | None = None, layers: bool = True, locate: bool = True) -> Comparison:
    """Run a function in eager, compiled and in float64, on copies of everything it refers to, and compare.

    `backward`: also compare gradients of a weighted sum of the results. `target`: as the option of torch.compile.
    `layers`: compile a second time to compare the results of submodules. `locate`: search for the first operator that
    differs; this compiles its graph many times.
    """
    options = {"numerics": numerics, **({"target": target} if target is not None else {})}
    check_options(options, None)
    function = innermost_fn(getattr(function, "_orig_mod", function))  # the function as it was before torch.compile
    start = states()
    eager = Run(Twin(function, args), start, backward)
    torch.compiler.reset()  # otherwise code compiled by an earlier call would be reused and not recorded
    try:
        with recorded() as calls:
            ours = Run(Twin(function, args), start, backward, options)
        reference = Reference(function, args, start, backward, eager.dtypes)
        names = sorted({c.compiled.package.target for c in calls})
        out = Comparison(numerics, ", ".join(names) or "none", len(calls), notes=reference.notes)
        if not calls:
            out.notes.append("nothing was compiled: the function does no work on tensors that a graph could hold")
        for part in ("results", "gradients", "changed"):
            setattr(out, part, rows(getattr(eager, part), getattr(ours, part), getattr(reference, part)))
        if layers and eager.layers:
            compare_layers(out, function, args, start, options, eager, reference)
        if locate and not out.equal:
            find_first(out, calls, eager, function, args, start, backward)
    finally:
        torch.compiler.reset()
    return out


def rows(eager: dict[str, Any], ours: dict[str, Any], wide: dict[str, Any]) -> list[Difference]:
    """One row per name; a value that only one of the runs has counts as different."""
    names = dict.fromkeys([*eager, *ours])
    return [difference(name, eager.get(name), ours.get(name), wide.get(name)) for name in names]


# ---- the three runs ----------------------------------------------------------------------------------------


class Run:
    """The results, gradients and changed tensors of one run of a twin; compiled if options are given."""

    def __init__(self, twin: Twin, start: Sequence[Any], backward: bool, options: dict[str, Any] | None = None, *,
                 hooks: bool | None = None, dtypes: Sequence[torch.dtype] = (), mode: Any = None) -> None:
        self.layers: dict[str, Any] = {}
        found: list[tuple[str, Any]] = []
        before = {name: kept(t) for name, t in twin.held().items()}
        call = twin.call
        if options is not None:
            compiled = torch.compile(twin.function, backend="flambeau", options=options)
            call = lambda: compiled(*twin.args)  # noqa: E731
        wanted = options is None if hooks is None else hooks
        with random_state(start), mode or nullcontext(), hooked(twin, found, wanted):
            self.outputs = call()
            self.results = named("result", self.outputs)
            self.dtypes = [t.dtype for t in self.results.values() if isinstance(t, torch.Tensor)]
            # Copied, because results may share memory with tensors that a backward changes.
            self.results = {name: kept(t) for name, t in self.results.items()}
            if backward:
                if mode is not None:
                    mode.direction = "backward"
                self.differentiate(dtypes or self.dtypes)
            self.draws = any(not torch.equal(a, b) for a, b in zip(states(), start))
        self.gradients = {f"gradient of {name}": t.grad for name, t in twin.leaves.items() if t.grad is not None}
        self.changed = {f"{name} afterwards": t.detach() for name, t in twin.held().items()
                        if name in before and not difference("", before[name], t.detach()).equal}
        count: dict[str, int] = {}
        for name, value in found:
            count[name] = k = count.get(name, 0) + 1
            self.layers |= named(name if k == 1 else f"{name} (call {k})", value)

    def differentiate(self, dtypes: Sequence[torch.dtype]) -> None:
        tensors = [t for t in pytree.tree_leaves(self.outputs) if isinstance(t, torch.Tensor)]
        wanted = [(t, weights(t, dtype)) for t, dtype in zip(tensors, dtypes, strict=True) if t.requires_grad]
        if wanted:
            torch.autograd.backward([t for t, _ in wanted], [w for _, w in wanted])


class Reference(Run):
    """The run in float64, or the reason why there is none."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], start: Sequence[Any], backward: bool,
                 dtypes: Sequence[torch.dtype]) -> None:
        self.results, self.gradients, self.changed, self.layers = {}, {}, {}, {}
        self.notes: list[str] = []
        try:
            super().__init__(Twin(function, args, wide=True), start, backward, dtypes=dtypes)
            if self.draws:
                raise UnsupportedError("the function draws random numbers, and would draw others")
        except Exception as e:  # whatever the function does, it may not do it in float64
            self.notes.append(f"no float64 reference: {type(e).__name__}: {first_line(e)}")
            self.results, self.gradients, self.changed, self.layers = {}, {}, {}, {}
        for part in (self.results, self.gradients, self.changed, self.layers):
            for name, t in list(part.items()):
                if isinstance(t, torch.Tensor) and (t.is_floating_point() and t.dtype is not torch.float64):
                    self.notes.append(f"no float64 reference for {name}: the function makes it {t.dtype}")
                    del part[name]


def named(what: str, values: Any) -> dict[str, Any]:
    """The leaves of a result, by name and path."""
    leaves, _ = pytree.tree_flatten_with_path(values)
    return {f"{what}{pytree.keystr(path)}": t.detach() if isinstance(t, torch.Tensor) else t for path, t in leaves}


def weights(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The output gradient for a result. Not all ones, as some gradients would vanish (a softmax's sum is constant)."""
    line = torch.linspace(-1, 1, t.numel(), dtype=torch.float64) if t.numel() != 1 else torch.ones(1)
    return line.to(dtype).to(t.device, t.dtype).reshape(t.shape)


@contextmanager
def hooked(twin: Twin, found: list[tuple[str, Any]], wanted: bool) -> Iterator[None]:
    """While active, record the results of submodules in the order of their calls."""
    handles = []
    for prefix, root in twin.modules if wanted else ():
        for name, module in root.named_modules():
            if name or prefix:
                def keep(m: Any, inputs: Any, output: Any, name: str = (prefix + name).strip(".")) -> None:
                    found.append((name, output))

                handles.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def compare_layers(out: Comparison, function: Callable[..., Any], args: tuple[Any, ...], start: Sequence[Any],
                   options: dict[str, Any], eager: Run, reference: Run) -> None:
    torch.compiler.reset()
    try:
        ours = Run(Twin(function, args), start, False, options, hooks=True)
    except Exception as e:  # hooks change the graph, and layers are only additional information
        out.notes.append(f"layers are not compared: {type(e).__name__}: {first_line(e)}")
        return
    both = [name for name in eager.layers if name in ours.layers]
    out.layers = [difference(name, eager.layers[name], ours.layers[name], reference.layers.get(name)) for name in both]
    if missing := len(eager.layers) - len(both):
        out.notes.append(f"{missing} results of layers are seen in eager only")


def first_line(e: Exception) -> str:
    return (str(e).splitlines() or [""])[0]


# ---- the first difference ----------------------------------------------------------------------------------


def find_first(out: Comparison, calls: Sequence[Call], eager: Run, function: Callable[..., Any], args: tuple[Any, ...],
               start: Sequence[Any], backward: bool) -> None:
    again = Run(Twin(function, args), start, backward)
    if unsteady := sum(row.differ for part in ("results", "gradients", "changed")
                       for row in rows(getattr(eager, part), getattr(again, part), {})):
        out.notes.append(f"eager does not repeat itself: {unsteady:,} values differ between two runs of it")
    found = (first_of_call(call, number) for number, call in enumerate(calls, 1))
    try:
        firsts = list(itertools.islice((f for f in found if f is not None), 1))
    except Exception as e:  # a graph with more results differs, and might not compile
        firsts = []
        out.notes.append(f"the search for the first operator ended early: {type(e).__name__}: {first_line(e)}")
    if not firsts or firsts[0].direction == "backward":
        mode = Decomposed({n.target for call in calls for n in call.graph.nodes})
        Run(Twin(function, args), start, backward, mode=mode)
        firsts = [*firsts, *([mode.first] if mode.first else [])]
        firsts.sort(key=lambda f: (f.direction == "backward", f.kind == "capture"))
    out.first, out.also = (firsts[0], firsts[1:]) if firsts else (None, [])
    if not firsts and not any("ended early" in note for note in out.notes):
        out.notes.append("every captured graph gives what ATen gives operator by operator, and no operator was taken "
                         "apart with other results: what is left is the order in which gradients are summed up")


class Decomposed(TorchDispatchMode):
    """Runs the decomposition of every operator next to eager's kernel, and keeps the first one that differs.

    Operators that the graphs contain whole are skipped, since they were not decomposed.
    """

    def __init__(self, whole: set[Any]) -> None:
        super().__init__()
        overloads = (op for op in table(False) if isinstance(op, OpOverload) and op not in whole)
        self.apart = {op for op in overloads if not facts(op).random and not op._schema.is_mutable}
        self.direction = "forward"
        self.first: First | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.first is None and func in self.apart:
            with Apart():
                parts = table(False)[func](*args, **kwargs)
            if parts is not NotImplemented:
                self.look(func, out, parts)
        return out

    def look(self, func: Any, whole: Any, parts: Any) -> None:
        for a, b in zip(pytree.tree_leaves(whole), pytree.tree_leaves(parts)):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                if not (off := difference(str(func), a, b)).equal:
                    file, line = caller() if self.direction == "forward" else ("", 0)
                    self.first = First(str(func), "capture", self.direction, difference=off, file=file, line=line)
                    return


class Apart(TorchDispatchMode):
    """While active, decomposes operators recursively."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in table(False):
            with self:
                out = table(False)[func](*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return func(*args, **(kwargs or {}))


def caller() -> tuple[str, int]:
    """The file and line of the user's code that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not of_torch(file) and not file.startswith(HERE):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0

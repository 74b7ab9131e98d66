"""Runs OpInfo samples through the pipeline, forward and gradient, and compares them with eager.

    report = check_opinfo("nn.functional.hardswish", torch.float32)
    assert not report.failures and not report.externs

    python -m flambeau.testing.opinfo [name-part ...] [--dtype float32] [--limit N]

All graphs of one operator are captured first (running as ATen), then built together, then run again on our kernels:
one compiler start instead of one for each sample. The reference is eager in the same dtype at torch's own tolerances.
Where eager itself is inaccurate in low precision, the float64 result decides: ours may not be further from it than
eager's. With numerics="eager" there are no tolerances: results have eager's bits, random numbers included.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from flambeau.capture.decompositions import table
from flambeau.capture.kept_whole import whole_operators
from flambeau.compare.differences import difference
from flambeau.config import config
from flambeau.errors import GuessedShapeError
from flambeau.ir.numerics import wants_bits
from flambeau.pipeline import Options, compile_graph, interpret
from flambeau.results_file import write_results
from flambeau.runtime.memory_layout import copied
from flambeau.testing.one_order import warned
from flambeau.torch_compat import pytree
from flambeau.torch_compat.aot import aot_function, min_cut_rematerialization_partition
from flambeau.torch_compat.testing import OpInfo, SampleInput, default_tolerances, op_db

OPS: dict[str, OpInfo] = {o.formatted_name: o for o in op_db}
RANDOM = ("rand", "normal", "bernoulli", "uniform", "dropout", "exponential", "geometric", "cauchy", "multinomial",
          "empty", "log_normal", "rrelu", "poisson", "fractional")
PARTS = ("output", "gradient")

# Outputs that eager leaves uninitialised: the random number state of calls that draw nothing.
UNDEFINED: dict[str, tuple[int, ...]] = {"torch.ops.aten._flash_attention_forward": (2, 3),
                                        "torch.ops.aten._efficient_attention_forward": (2, 3)}
# The outputs that depend on which of several equal elements eager's algorithm chooses; gradients do, too. Samples of
# the dtypes in DISTINCT have no equal elements.
TIED: dict[str, tuple[int, ...]] = {"argsort": (0,), "kthvalue": (1,), "median": (1,), "mode": (1,), "msort": (),
                                    "nanmedian": (1,), "sort": (1,), "topk": (1,)}
DISTINCT = (torch.float32, torch.float64)


def is_undefined(op: Any, dtype: torch.dtype, part: int, k: int) -> bool:
    """Whether eager does not define the value of an output (part 0) or a gradient (part 1)."""
    name = getattr(op, "name", "")
    if name in TIED and dtype not in DISTINCT and (part == 1 or k in TIED[name]):
        return True
    return not part and k in UNDEFINED.get(name, ())


@dataclass
class Report:
    op: str
    dtype: torch.dtype
    samples: int = 0
    gradients: int = 0
    externs: dict[str, int] = field(default_factory=dict)  # operators that our kernels did not compute: calls
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # eager or the capture itself refuses the sample
    values: int = 0  # compared bit by bit
    unequal: int = 0

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def native(self) -> bool:
        return self.samples > 0 and not self.externs


class Switch:
    """A captured graph that runs as ATen until its kernels are built."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.run = interpret(gm)
        self.compiled: Any = None
        self.random = False


def samples_of(op: OpInfo, dtype: torch.dtype, limit: int | None, device: str) -> tuple[list[SampleInput], bool]:
    """The first `limit` samples (None: all), and whether there are gradients to compare."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes(device) and dtype.is_floating_point
    torch.manual_seed(1234)
    return list(op.sample_inputs(device, dtype, requires_grad=grad))[:limit], grad


def check_opinfo(name: str, dtype: torch.dtype = torch.float32, *, limit: int | None = None, numerics: str = "fast",
                 device: str = "cpu") -> Report:
    """Checks all sample inputs (or the first `limit`) of the op_db entry `name` (a key of OPS) in `dtype`."""
    op = OPS[name]
    report = Report(name, dtype)
    samples, wants_grad = samples_of(op, dtype, limit, device)
    cases = [c for s in samples if (c := _Case.make(op, s, wants_grad, report, wants_bits(numerics))) is not None]
    switches = [s for c in cases for s in c.switches]
    for s in switches:
        try:
            with config.override(verify="passes"):
                s.compiled = compile_graph(s.gm, Options(numerics))
        except GuessedShapeError as e:
            report.skipped.append(f"compile: {e}")
        except Exception as e:
            report.failures.append(f"compile: {type(e).__name__}: {str(e)[:400]}")
    for s in switches:
        if s.compiled is not None:
            captured = s.compiled.compiled.captured
            s.random = bool(captured.graph.seeds)
            for k, n in captured.externs.items():
                report.externs[k] = report.externs.get(k, 0) + n
            s.run = s.compiled
    for c in cases:
        try:
            with warnings.catch_warnings():
                # A kernel that does not build is a failure here, not a reason to try ATen.
                warnings.filterwarnings("error", message="flambeau: ", category=RuntimeWarning)
                c.compare(report)
        except Exception as e:
            report.failures.append(f"{c.text}: {type(e).__name__}: {str(e)[:600]}")
    return report


def in_dtype(x: Any, dtype: torch.dtype) -> Any:
    """The argument with `dtype` in place of every floating dtype in it, also inside an options dataclass."""
    if isinstance(x, torch.dtype):
        return dtype if x.is_floating_point else x
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: in_dtype(getattr(x, f.name), dtype) for f in fields(x)})
    return x


@dataclass
class _Case:
    fn: OpInfo
    leaves: list[torch.Tensor]
    call: Callable[..., Any]
    wants_grad: bool
    random: bool
    text: str
    exact: bool = False
    switches: list[Switch] = field(default_factory=list)
    traced: Callable[..., Any] | None = None
    kinds: list[torch.dtype] = field(default_factory=list)  # of the outputs

    @classmethod
    def make(cls, op: OpInfo, sample: SampleInput, wants_grad: bool, report: Report, exact: bool) -> _Case | None:
        flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        where = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]

        def call(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
            full = [in_dtype(x, dtype) for x in flat] if dtype else list(flat)
            for k, t in zip(where, tensors, strict=True):
                full[k] = t
            first, args, kwargs = pytree.tree_unflatten(full, spec)
            return op(first, *args, **kwargs)

        leaves = [flat[k] for k in where]
        text = str(sample)[:160].replace("\n", " ")
        case = cls(op, leaves, call, wants_grad, any(r in op.name for r in RANDOM), text, exact)
        try:
            with torch.random.fork_rng():
                call(*[t.detach().clone() for t in leaves])
        except Exception as e:
            report.skipped.append(f"eager: {type(e).__name__}: {str(e)[:120]}")
            return None

        def compiler(gm: fx.GraphModule, example_inputs: Any) -> Any:
            s = Switch(gm)
            case.switches.append(s)

            def run(args: list[Any]) -> list[Any]:
                return s.run(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        try:
            case.traced = aot_function(call, fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler,
                                       partition_fn=min_cut_rematerialization_partition, decompositions=table(exact),
                                       keep_inference_input_mutations=True)
            with whole_operators(exact):
                case.evaluate(case.traced)
        except Exception as e:
            report.skipped.append(f"capture: {type(e).__name__}: {str(e)[:120]}")
            return None
        report.samples += 1
        return case

    def evaluate(self, fn: Callable[..., Any], dtype: torch.dtype | None = None) -> tuple[list[Any], list[Any]]:
        """(outputs, gradients) for fixed random output gradients, computed in `dtype` if it is given."""
        args = [copied(t, dtype if t.is_floating_point() else None).requires_grad_(t.requires_grad and self.wants_grad)
                for t in self.leaves]
        torch.manual_seed(42)  # entries that draw numbers use this seed themselves, when they are not traced
        results = fn(*args) if dtype is None else fn(*args, dtype=dtype)
        outs = [o for o in pytree.tree_leaves(results) if isinstance(o, torch.Tensor)]
        if dtype is None:
            self.kinds = [o.dtype for o in outs]
        grads = gradients(outs, [a for a in args if a.requires_grad], self.kinds) if self.wants_grad else []
        return [o.detach() for o in outs], grads

    def repeats(self, part: int, k: int, y: torch.Tensor) -> bool:
        """Whether eager gives this result in every run. Sums in an undefined order often agree by chance, so torch's
        deterministic mode decides: it has other kernels for them, or warns."""
        again, refused = warned(lambda: self.evaluate(self.call)[part][k])
        return not differing(again, y)[0] and not refused

    def compare(self, report: Report) -> None:
        assert self.traced is not None
        try:
            eager, eager_grads = self.evaluate(self.call)
        except RuntimeError as e:  # a gradient that is not defined for random output gradients
            report.skipped.append(f"eager: {str(e)[:120]}")
            return
        ours, our_grads = self.evaluate(self.traced)
        report.gradients += bool(our_grads)
        wide = cache(lambda: self.evaluate(self.call, torch.float64))
        for part, (a, b) in enumerate(((ours, eager), (our_grads, eager_grads))):
            assert len(a) == len(b), f"{len(a)} results, eager has {len(b)}"
            for k, (x, y) in enumerate(zip(a, b, strict=True)):
                if x is None or y is None:
                    assert x is y or (x is None and not y.any()) or (y is None and not x.any()), "missing gradient"
                    continue
                if is_undefined(self.fn, report.dtype, part, k):
                    continue
                same = x.shape == y.shape and x.dtype == y.dtype
                assert same, f"{x.dtype}{list(x.shape)}, eager {y.dtype}{list(y.shape)}"
                if self.exact:
                    count, ulps = differing(x, y)
                    if count and not self.repeats(part, k, y):
                        report.skipped.append("eager: its own results differ from run to run")
                        continue
                    report.values, report.unequal = report.values + x.numel(), report.unequal + count
                    assert not count, f"{PARTS[part]} {k}: {count} of {x.numel()}, {ulps} ulps"
                    continue
                if self.random or any(s.random for s in self.switches):
                    continue  # other numbers than eager's by design; tests/ops/test_random.py judges those
                judge(self.fn, x, y, wide, part, k)


def gradients(outs: Sequence[Any], leaves: Sequence[torch.Tensor], kinds: Sequence[torch.dtype]) -> list[Any]:
    """The gradients of the leaves for fixed output gradients, which are rounded to the dtypes `kinds`, so that a
    reference in another dtype gets the same ones."""
    differentiable = [(o, kind) for o, kind in zip(outs, kinds, strict=True) if o.requires_grad]
    if not differentiable or not leaves:
        return []
    draw = torch.Generator().manual_seed(3)
    seeds = [torch.randn(o.shape, generator=draw, dtype=torch.float64).to(kind).to(o) for o, kind in differentiable]
    return list(torch.autograd.grad([o for o, _ in differentiable], leaves, seeds, allow_unused=True))


def differing(x: torch.Tensor, y: torch.Tensor) -> tuple[int, int]:
    """The number of values whose bits differ from y's (all NaN are equal), and the largest difference in ulps."""
    found = difference("", y, x)
    assert not found.note, found.note
    return found.differ, found.max_ulps


def judge(op: Any, x: torch.Tensor, y: torch.Tensor, exact: Callable[[], tuple[list[Any], list[Any]]], part: int,
          k: int) -> None:
    """Raises unless x is equal to eager's y at torch's tolerances, or no further than y from the float64 result."""
    try:
        torch.testing.assert_close(x, y, equal_nan=True, **tolerance(op, y.dtype))  # type: ignore[arg-type]
    except AssertionError as e:
        failure = AssertionError(f"{PARTS[part]} {k}: {e}")
        try:
            near = y.is_floating_point() and no_further(x, y, exact()[part][k])
        except RuntimeError:  # there is no such call in float64
            raise failure from None
        if not near:
            raise failure from None


def tolerance(op: Any, dtype: torch.dtype) -> dict[str, float]:
    """The tolerances for an operator: the dtype's, or OpInfo's own if they are wider."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return {}
    rtol, atol = default_tolerances(dtype)
    for info in op.decorators:
        for d in getattr(info, "decorators", None) or [info]:
            limits = getattr(d, "d", None) if type(d).__name__ == "toleranceOverride" else None
            if limits and dtype in limits:
                atol, rtol = max(atol, limits[dtype].atol), max(rtol, limits[dtype].rtol)
    return {"rtol": rtol, "atol": atol}


def no_further(x: torch.Tensor, y: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether x is as near to the float64 result as eager's y, or within one rounding of the largest element."""
    eps = torch.finfo(x.dtype).eps
    largest = exact.nan_to_num(0, 0, 0).abs().amax().item() if exact.numel() else 0.0
    ok = torch.isclose(x.double(), exact, rtol=4 * eps, atol=eps * max(largest, 1.0), equal_nan=True)
    ours, eager = (t.double() - exact for t in (x, y))
    if bool((ok | (x == y)).all()) or x.numel() == 0:
        return True
    # Rounding errors in low precision: on average as small as eager's, and nowhere far above eager's largest.
    finite = exact.isfinite() & ours.isfinite() & eager.isfinite()
    # Where eager overflows on the way to a finite result, our result may overflow too.
    overflow = exact.isfinite() & ~eager.isfinite() & ~ours.isfinite()
    if not bool((finite | overflow | ok | (x == y)).all()):
        return False
    if not bool(finite.any()):
        return True
    ours, eager = ours[finite], eager[finite]
    return bool(ours.square().mean() <= 4 * eager.square().mean()) and bool(ours.abs().amax() <= 3 * eager.abs().amax())


def counts(reports: Sequence[Report], dtype: torch.dtype) -> dict[str, int]:
    """Counts for the entries of a dtype: all, passed, passed with our kernels only ("native"), samples, gradients."""
    those = [r for r in reports if r.dtype == dtype]
    return {"entries": len(those), "passed": sum(r.ok for r in those), "native": sum(r.ok and r.native for r in those),
            "samples": sum(r.samples for r in those), "gradients": sum(r.gradients for r in those)}


def print_table(check: Callable[..., Report], doc: str, limit: int | None = None, device: str | None = None) -> None:
    """The command line of a check: prints a line for each entry, with its failures."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("names", nargs="*", help="parts of names; none: every entry")
    parser.add_argument("--dtype", action="append", help="float32 if none is named")
    parser.add_argument("--limit", type=int, default=limit, help="samples of each entry")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--exact", action="store_true", help="names are whole, not parts")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th entry from the k-th on")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    a.dtype = a.dtype or ["float32"]
    named = [name for name in OPS if not a.names or any((n == name) if a.exact else (n in name) for n in a.names)]
    dtypes = [getattr(torch, d) for d in a.dtype]
    cases = [(name, dtype) for name in named for dtype in dtypes if dtype in OPS[name].supported_dtypes(a.device)]
    k, n = map(int, a.part.split("/"))
    reports: list[Report] = []
    for name, dtype in cases[k::n]:
        start = time.perf_counter()
        r = check(name, dtype, limit=a.limit, device=a.device)
        reports.append(r)
        print(f"{'ok  ' if r.ok else 'FAIL'} {name} {str(dtype)[6:]} samples={r.samples} grads={r.gradients} "
              f"externs={r.externs or '-'} skipped={len(r.skipped)} {time.perf_counter() - start:.1f}s", flush=True)
        for text in (*r.failures[:3], *(f"skipped: {f}" for f in r.skipped[:2])):
            print("     ", text.replace("\n", " ")[:500], flush=True)
        if a.json:
            wrong = [{"name": r.op, "dtype": str(r.dtype)[6:], "reason": r.failures[0].partition("\n")[0]}
                     for r in reports if not r.ok]
            write_results(a.json, "opinfo", wrong, {d: counts(reports, getattr(torch, d)) for d in a.dtype},
                          device or a.device)
    right, native = sum(r.ok for r in reports), sum(r.ok and r.native for r in reports)
    print(f"{len(reports)} entries, {right} right, {native} of them without externs")


if __name__ == "__main__":
    print_table(check_opinfo, __doc__.partition("\n")[0])

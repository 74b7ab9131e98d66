"""Failures by bad data, a bad machine or a bad kernel end in an error that names them, or in the right result."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

import flambeau
from compile.beside_eager import compiled
from flambeau import pipeline
from flambeau.codegen.source import KernelSource
from flambeau.config import config
from flambeau.ir.verify import VerificationError
from flambeau.targets.cpu.target import CpuTarget

# ---- data ----------------------------------------------------------------------------------------------

W = torch.randn(5, 4)
BAD_INDICES: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "embedding": (lambda i: F.embedding(i, W), torch.tensor([[0, 5]])),
    "embedding, negative": (lambda i: F.embedding(i, W), torch.tensor([-1])),
    "embedding, no rows": (lambda i: F.embedding(i, W[:0]), torch.tensor([0])),
    "index": (lambda i: W[i], torch.tensor([1, 5])),
    "index, negative": (lambda i: W[i], torch.tensor([-6])),
    "index, no rows": (lambda i: W[:0][i], torch.tensor([0])),
    "index, columns": (lambda i: W[:, i], torch.tensor([3, 4])),
    "index_select": (lambda i: W.index_select(0, i), torch.tensor([5])),
    "gather": (lambda i: W.gather(0, i), torch.tensor([[1, 5]])),
    "gather, negative": (lambda i: W.gather(0, i), torch.tensor([[-1]])),
    "take": (lambda i: W.take(i), torch.tensor([20])),
    "scatter": (lambda i: W.scatter(0, i, 1.0), torch.tensor([[5]])),
    "scatter_add": (lambda i: W.scatter_add(0, i, torch.ones(1, 1)), torch.tensor([[-1]])),
    "scatter_reduce": (lambda i: W.scatter_reduce(0, i, torch.ones(1, 1), "amax"), torch.tensor([[7]])),
    "scatter, no rows": (lambda i: W[:0].clone().scatter(0, i, 1.0), torch.tensor([[0]])),
    "index_add": (lambda i: W.index_add(0, i, torch.ones(1, 4)), torch.tensor([5])),
    "index_copy": (lambda i: W.index_copy(0, i, torch.ones(1, 4)), torch.tensor([5])),
    "index_put": (lambda i: W.index_put((i,), torch.tensor(1.0)), torch.tensor([5])),
    "nll_loss": (lambda i: F.nll_loss(W, i), torch.tensor([0, 1, 2, 3, 4])),
    "cross_entropy": (lambda i: F.cross_entropy(W, i), torch.tensor([0, 1, 2, 3, -1])),
    "embedding_bag": (lambda i: F.embedding_bag(i, W, torch.tensor([0, 1])), torch.tensor([0, 1, 9])),
    "one_hot": (lambda i: F.one_hot(i, 3), torch.tensor([3])),
}


@pytest.mark.parametrize("name", BAD_INDICES)
def test_an_index_out_of_range_is_an_error(name: str) -> None:
    """Never a crash, never a result: the same function works again with good data."""
    fn, bad = BAD_INDICES[name]
    with pytest.raises((IndexError, RuntimeError)):
        fn(bad)
    if name == "one_hot" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("AOTAutograd of torch before 2.13 traces one_hot without its check of the classes")
    c = compiled(fn)
    with pytest.raises((IndexError, RuntimeError)):
        c(bad)
    if "no rows" not in name:
        good = torch.zeros_like(bad)
        torch.testing.assert_close(c(good), fn(good))


def test_the_error_names_the_operator() -> None:
    with pytest.raises(IndexError, match="out of range") as caught:
        compiled(lambda i: F.embedding(i, W) * 2)(torch.tensor([99]))
    assert "embedding" in "".join(caught.value.__notes__)


def test_a_bad_index_among_many_threads_is_found() -> None:
    i = torch.zeros(300_000, dtype=torch.int64)
    table = torch.randn(10)
    c = compiled(lambda i: table[i].sum())
    torch.testing.assert_close(c(i), table[i].double().sum().float())
    i[-1] = 10
    with pytest.raises(IndexError):
        c(i)


def test_a_failed_run_leaves_arguments_alone() -> None:
    """The new value of a mutated argument is written when everything else has been computed."""

    def f(x: Tensor, i: Tensor) -> Tensor:
        y = W[i]
        x.add_(1)
        return y

    x = torch.zeros(3)
    c = compiled(f)
    with pytest.raises(IndexError):
        c(x, torch.tensor([9]))
    assert torch.equal(x, torch.zeros(3))
    c(x, torch.tensor([1]))
    assert torch.equal(x, torch.ones(3))


QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor_divide": torch.floor_divide,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "a number by a tensor": lambda a, b: 7 % b + 7 // b,
    "by one element": lambda a, b: a // b[-1],
    "summed": lambda a, b: (a % b).sum(),
    "only where it is defined": lambda a, b: torch.where(b == 0, a, a // b),  # eager divides everywhere as well
}
INTEGERS = (torch.int64, torch.int32, torch.uint8)  # each has its own division


def same_error(fn: Callable[..., Any], c: Callable[..., Any], *args: Tensor) -> None:
    """Checks that two errors have the same type, and the same message up to the values that each adds."""
    with pytest.raises((IndexError, RuntimeError)) as eager:
        fn(*args)
    with pytest.raises(eager.type) as ours:
        c(*args)
    texts = sorted((str(eager.value), str(ours.value)), key=len)
    assert texts[1].startswith(texts[0]), f"{ours.value}, where eager has {eager.value}"


@pytest.mark.parametrize("name", QUOTIENTS)
def test_an_integer_divided_by_zero_is_an_error(name: str) -> None:
    fn = QUOTIENTS[name]
    for dtype in INTEGERS:
        a, good = torch.arange(1, 41).to(dtype), torch.arange(1, 41).to(dtype)
        bad = good.clone()
        bad[-1] = 0
        c = compiled(fn)
        same_error(fn, c, a, bad)
        torch.testing.assert_close(c(a, good), fn(a, good))


def test_an_integer_divided_by_a_literal_zero_is_an_error() -> None:
    for fn in (lambda a: a // 0, lambda a: a % 0, lambda a: torch.fmod(a, 0)):
        same_error(fn, compiled(fn), torch.arange(5))
        assert compiled(fn)(torch.arange(0)).shape == (0,)  # nothing is divided


def test_a_quotient_is_only_asked_for_where_it_is_read() -> None:
    """What pads or stands beside it reads its divisor as zero, in places where nothing is divided."""
    a, b = torch.arange(1, 9), torch.arange(1, 9)
    for fn in (lambda a, b: F.pad(a // b, (2, 3)), lambda a, b: torch.cat([a % b, a])):
        torch.testing.assert_close(compiled(fn)(a, b), fn(a, b))
        same_error(fn, compiled(fn), a, b - 3)


def test_floats_divide_by_zero() -> None:
    a, b = torch.tensor([-1.0, 0.0, 1.0]), torch.zeros(3)
    fn = lambda a, b: (a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"))  # noqa: E731
    torch.testing.assert_close(compiled(fn)(a, b), fn(a, b), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8], ids=str)
def test_the_most_negative_integer_by_minus_one_wraps(dtype: torch.dtype) -> None:
    """The processor traps here. ATen does as well for lcm, so the expected results are written out."""
    low = torch.iinfo(dtype).min
    a, b = torch.full((9,), low, dtype=dtype), torch.full((9,), -1, dtype=dtype)
    fn = lambda a, b: (a // b, torch.div(a, b, rounding_mode="trunc"), a % b, torch.fmod(a, b),  # noqa: E731
                       torch.lcm(a, torch.full_like(a, 7)))
    assert [t.unique().tolist() for t in compiled(fn)(a, b)] == [[low], [low], [0], [0], [low]]


ITEMS = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize("last", [False, True], ids=["", "include_last_offset"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bad_offsets_are_an_error(mode: str, last: bool) -> None:
    fn = lambda o: F.embedding_bag(ITEMS, W, o, mode=mode, include_last_offset=last)  # noqa: E731
    c = compiled(fn)
    for offsets in ([1, 2, 4], [-1, 2, 4], [0, 2, 9]):
        same_error(fn, c, torch.tensor(offsets))
    for offsets in ([0, 9, 4], [0, -1, 4]):  # ATen raises one of two errors for these
        with pytest.raises((IndexError, RuntimeError)):
            fn(torch.tensor(offsets))
        with pytest.raises((IndexError, RuntimeError)):
            c(torch.tensor(offsets))
    with pytest.raises(RuntimeError, match="decrease"):  # ATen may return uninitialised memory
        c(torch.tensor([0, 3, 1]))
    good = torch.tensor([0, 0, 4])
    torch.testing.assert_close(c(good), fn(good))


@pytest.mark.parametrize("size", [0, 5, 6, 7])
def test_a_wrong_output_size_is_an_error(size: int) -> None:
    fn = lambda r: torch.repeat_interleave(r, output_size=size)  # noqa: E731
    c = compiled(fn)
    for repeats in ([1, 2, 3], [3, 3, 0], [1, 2, 4], [7, -1, 0], [-1, 3, 3]):
        r = torch.tensor(repeats)
        if sum(repeats) == size and min(repeats) >= 0:
            torch.testing.assert_close(c(r), fn(r))
        else:
            same_error(fn, c, r)


BAD_CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "shapes do not broadcast": (lambda a, b: a + b, (torch.randn(3), torch.randn(4))),
    "inner sizes differ": (lambda a, b: a @ b, (torch.randn(3, 3), torch.randn(4, 4))),
    "dtypes differ": (lambda a, b: a @ b, (torch.randn(3, 3), torch.randn(3, 3).double())),
    "a float is no index": (lambda a: F.embedding(a, W), (torch.rand(3),)),
    "bits of a float": (lambda a: a & 1, (torch.randn(3),)),
    "no such dimension": (lambda a: a.sum(3), (torch.randn(3),)),
    "the largest of nothing": (lambda a: a.max(1), (torch.randn(3, 0),)),
    "the place of nothing": (lambda a: a.argmin(), (torch.randn(3, 0),)),
    "a view that does not fit": (lambda a: a.view(7), (torch.randn(3),)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_that_eager_refuses_is_refused(name: str) -> None:
    fn, args = BAD_CALLS[name]
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        fn(*args)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        compiled(fn)(*args)


def test_another_dtype_or_rank_is_compiled_for_itself() -> None:
    c = compiled(lambda x: (x * 2).sum(-1))
    for x in (torch.randn(4), torch.randn(4).double(), torch.randn(4, 5), torch.arange(4), torch.randn(5, 4).t()):
        torch.testing.assert_close(c(x), (x * 2).sum(-1))


# ---- kernels -------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_build_runs_as_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning that says what to report; its operators are called as they are, the others stay compiled."""
    real = CpuTarget.render

    def broken(target: CpuTarget, kernel: Any, name: str) -> KernelSource:
        source = real(target, kernel, name)
        return KernelSource(source.name, "this is not C++\n" + source.text, source.headers) if "softmax" in str(
            kernel.origins) else source

    monkeypatch.setattr(CpuTarget, "render", broken)
    f = lambda x, w: ((x @ w).softmax(-1) @ w).exp()  # noqa: E731
    x, w = torch.randn(5, 6), torch.randn(6, 6)
    c = compiled(f)
    with pytest.warns(RuntimeWarning, match="did not build") as caught:
        torch.testing.assert_close(c(x, w), f(x, w))
    (message,) = [str(m.message) for m in caught if "flambeau" in str(m.message)]
    assert "softmax" in message and "report" in message and "this is not C++" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        torch.testing.assert_close(c(x, w), f(x, w))


def test_no_kernel_builds_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTarget, "render", lambda _, kernel, name: KernelSource(name, f"#error no {name}\n"))
    x = torch.randn(5, 6, requires_grad=True)
    c = compiled(lambda x: x.exp().softmax(-1).cumsum(0))
    with pytest.warns(RuntimeWarning, match="did not build"):
        y = c(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x.exp().softmax(-1).cumsum(0))
    torch.testing.assert_close(grad, torch.autograd.grad(x.exp().softmax(-1).cumsum(0).sum(), x)[0])


@pytest.mark.parametrize("error", [VerificationError("buffer b1 is computed twice"), RecursionError("too deep"),
                                   AttributeError("no such thing"), ZeroDivisionError("by zero")], ids=repr)
def test_an_error_in_the_compiler_runs_the_graph_as_aten(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def objects(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "schedule", objects)
    x = torch.randn(5, 6, requires_grad=True)
    words = f"{type(error).__name__}: {error}"
    with config.override(verify=False), pytest.warns(RuntimeWarning, match=words) as caught:
        y = compiled(lambda x: x.exp().sum(0))(x)
        y.sum().backward()
    assert "report" in str(caught[0].message)
    torch.testing.assert_close(y, x.exp().sum(0))
    torch.testing.assert_close(x.grad, x.exp())
    with config.override(verify=True), pytest.raises(Exception, match=str(error)):
        compiled(lambda x: x.exp().sum(1))(x)


# ---- the machine ---------------------------------------------------------------------------------------

MODEL = """
import torch
torch.set_num_threads(1)
f = lambda x: (x @ x.t()).softmax(-1).exp().sum(0)
x = torch.linspace(-1, 1, 60).reshape(6, 10)
y = torch.compile(f, backend="flambeau")(x)
torch.testing.assert_close(y, f(x))
print("right")
"""


def python(code: str, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120,
                          env={**os.environ, "FLAMBEAU_CACHE_DIR": str(cache), **env})


def test_without_a_compiler(tmp_path: Path) -> None:
    code = MODEL.replace("y = torch.compile", """
import flambeau
try:
    torch.compile(f, backend="flambeau")(x)
except Exception as e:
    e = getattr(e, "inner_exception", e)
    assert isinstance(e, flambeau.Error), repr(e)
    assert e.hint, repr(e)
    print(e)
raise SystemExit
y = torch.compile""")
    run = python(code, tmp_path, FLAMBEAU_CXX="/nonexistent/g++")
    assert run.returncode == 0, run.stderr[-2000:]
    assert "/nonexistent/g++" in run.stdout and "FLAMBEAU_CXX" in run.stdout


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where the folder should be: the most stubborn of unwritable caches, for root as well."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    run = python(MODEL, blocked / "cache")
    assert run.returncode == 0 and "right" in run.stdout, run.stderr[-2000:]


def test_a_damaged_cache_is_rebuilt(tmp_path: Path) -> None:
    assert "right" in python(MODEL, tmp_path).stdout
    entries = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert entries
    for k, p in enumerate(entries):
        p.write_bytes(b"" if k % 3 == 0 else b"not what was here" if k % 3 == 1 else p.read_bytes()[:100])
    run = python(MODEL, tmp_path)
    assert run.returncode == 0 and "right" in run.stdout, run.stderr[-2000:]


@pytest.mark.slow
def test_processes_that_compile_the_same_model_at_once(tmp_path: Path) -> None:
    env = {**os.environ, "FLAMBEAU_CACHE_DIR": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", MODEL], env=env, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE) for _ in range(2)]
    for r in runs:
        out, err = r.communicate(timeout=120)
        assert r.returncode == 0 and "right" in out, err[-2000:]


@pytest.mark.slow
def test_a_compile_killed_half_way(tmp_path: Path) -> None:
    """Its incomplete files must not be used as kernels."""
    env = {**os.environ, "FLAMBEAU_CACHE_DIR": str(tmp_path)}
    first = subprocess.Popen([sys.executable, "-c", MODEL], env=env, start_new_session=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):  # once anything is on disk, the compilers are running
        if any(tmp_path.rglob("*")) or first.poll() is not None:
            break
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    run = python(MODEL, tmp_path)
    assert run.returncode == 0 and "right" in run.stdout, run.stderr[-2000:]


@pytest.mark.slow
def test_a_bad_setting_says_what_it_may_be(tmp_path: Path) -> None:
    run = python(MODEL, tmp_path, FLAMBEAU_NUMERICS="sloppy")
    assert run.returncode != 0 and "FLAMBEAU_NUMERICS" in run.stderr and "fast, eager" in run.stderr


def test_error_classes_are_public() -> None:
    for name in ("Error", "CompileError", "CacheError", "OptionError", "UnsupportedError"):
        assert issubclass(getattr(flambeau, name), flambeau.Error)


def test_a_shape_that_torch_guessed_is_not_believed() -> None:
    """An operator whose data decide its shape, in a graph where that shape is a number: it was run on zeros."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(3, dtype=torch.int64)
    call = graph.call_function(torch.ops.aten._unique.default, (x,))
    call.meta["val"] = (torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    first = graph.call_function(operator.getitem, (call, 0))
    first.meta["val"] = call.meta["val"][0]
    graph.output([first])
    with config.override(verify=False), pytest.warns(RuntimeWarning, match="no rule for the shape"):
        run = pipeline.compile_graph(fx.GraphModule({}, graph))
    assert run([torch.tensor([5, 5, 7])])[0].tolist() == [5, 7]

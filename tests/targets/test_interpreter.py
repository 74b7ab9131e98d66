"""GPU kernels on the CPU: Triton's interpreter as a target, from single launches to whole models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flambeau.codegen.source import BlockSource, Part
from flambeau.errors import CompileError
from flambeau.targets.base import get_target
from flambeau.targets.cuda.interpreter import InterpreterTarget
from small_models import MODELS, gradients

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]

HEAD = "import triton\nimport triton.language as tl\nimport tritonlib as fl\n\n"


def kernel(body: str, pointers: int = 2, kind: str = "*fp32") -> Any:
    """A kernel over n0 points in blocks of 64: `x` is loaded from p0, `y` is stored to the last pointer."""
    names = ", ".join(f"p{k}" for k in range(pointers))
    text = f"""{HEAD}
@triton.jit
def part0({names}, n0, bad):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    m = i < n0
    x = tl.load(p0 + i, m)
    {body}
    tl.store(p{pointers - 1} + i, y, m)
"""
    source = BlockSource("k", text, (kind,) * pointers, ("i64",), (Part("part0", "(n0 + 63) // 64"),))
    return InterpreterTarget().build([source]).wait()["k"]


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
def test_every_point_and_no_other(n: int) -> None:
    x, y = torch.randn(n + 8), torch.full((n + 8,), 7.0)
    assert kernel("y = x * 2")([x.data_ptr(), y.data_ptr()], [n]) == 0
    assert torch.equal(y[:n], x[:n] * 2) and torch.all(y[n:] == 7)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fl.exp(x)": torch.exp, "fl.erf(x)": torch.erf, "fl.rsqrt(x * x)": lambda x: torch.rsqrt(x * x),
    "fl.atan2(x, 2.0)": lambda x: torch.atan2(x, torch.tensor(2.0)), "fl.floor(x)": torch.floor,
    "fl.log1p(tl.abs(x))": lambda x: torch.log1p(x.abs()), "fl.lgamma(x)": torch.lgamma,
}


@pytest.mark.parametrize("text", FUNCTIONS)
def test_functions_of_the_device_library(text: str) -> None:
    x, y = torch.randn(100) * 3, torch.empty(100)
    kernel(f"y = {text}")([x.data_ptr(), y.data_ptr()], [100])
    torch.testing.assert_close(y, FUNCTIONS[text](x))


def test_the_shim_has_the_names_of_the_library() -> None:
    InterpreterTarget().build([])  # makes the library importable
    import libdevice_cpu  # type: ignore[import-not-found]
    from triton.language.extra.cuda import libdevice

    names = {*libdevice_cpu.UNARY, *libdevice_cpu.BINARY, "fma"}
    assert all(callable(getattr(libdevice_cpu, n)) and hasattr(libdevice, n) for n in names)


def test_parts_share_a_workspace_that_starts_as_zero() -> None:
    text = f"""{HEAD}
@triton.jit
def count(p0, n0, work, bad):
    tl.atomic_add(work.to(tl.pointer_type(tl.int32)) + tl.program_id(0) % 2, 1)

@triton.jit
def copy(p0, n0, work, bad):
    i = tl.arange(0, 2)
    tl.store(p0 + i, tl.load(work.to(tl.pointer_type(tl.int32)) + i))
"""
    source = BlockSource("k", text, ("*i32",), ("i64",), (Part("count", "n0"), Part("copy", "1")), "8")
    launch = InterpreterTarget().build([source]).wait()["k"]
    out = torch.empty(2, dtype=torch.int32)
    for n in (5, 8):
        assert launch([out.data_ptr()], [n]) == 0
        assert out.tolist() == [(n + 1) // 2, n // 2]


def test_faults_name_the_step() -> None:
    target = InterpreterTarget()
    bad = kernel("y = x\n    tl.store(bad + tl.zeros_like(i), 2, m & (x < 0))")
    plan = target.plan([(kernel("y = x + 1"), [(0, 0), (1, 0)], [0]), (bad, [(0, 0), (1, 64)], [0])])
    x, y = torch.ones(10), torch.empty(26)
    assert plan([x.data_ptr(), y.data_ptr()], [10]) is None
    assert torch.all(y[:10] == 2) and torch.all(y[16:] == 1)
    x[3] = -1
    assert plan([x.data_ptr(), y.data_ptr()], [10]) == (1, 2)


def test_text_that_does_not_parse_is_its_kernels_error() -> None:
    source = BlockSource("k", "def part0(:", ("*fp32",), (), (Part("part0", "1"),))
    error = InterpreterTarget().build([source]).wait()["k"]
    assert isinstance(error, CompileError) and "k does not parse" in error.message


def test_triton_that_was_imported_to_compile_is_an_error() -> None:
    text = ("import triton; from flambeau.targets.cuda.interpreter import InterpreterTarget; "
            "InterpreterTarget().build([])")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "set TRITON_INTERPRET=1 before anything imports triton" in done.stderr


# ---- through torch.compile -------------------------------------------------------------------------------


def compiled(f: Any, **kwargs: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="flambeau", options={"target": "interpreter"}, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_models_forward_and_backward(name: str) -> None:
    f, shape = MODELS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = gradients(f, x)
    torch.testing.assert_close(gradients(compiled(f), x), want)


def test_kernels_were_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = InterpreterTarget.build
    monkeypatch.setattr(InterpreterTarget, "build", lambda self, sources: built.extend(sources) or real(self, sources))
    x = torch.randn(4, 5)
    torch.testing.assert_close(compiled(lambda x: x.exp() + 1)(x), x.exp() + 1)
    assert [type(s) for s in built] == [BlockSource]
    assert get_target("interpreter").capabilities().ordered_scatter is False


def test_sizes_that_vary() -> None:
    f = lambda x: (x * 2).softmax(-1)  # noqa: E731
    c = compiled(f, dynamic=True)
    for n in (3, 16, 33):
        x = torch.randn(n, n + 2)
        torch.testing.assert_close(c(x), f(x))


def test_an_index_out_of_range_raises_what_eager_raises() -> None:
    table = torch.randn(10, 4)
    c = compiled(lambda i: F.embedding(i, table) * 2)
    torch.testing.assert_close(c(torch.tensor([1, 9])), F.embedding(torch.tensor([1, 9]), table) * 2)
    with pytest.raises(IndexError, match="out of range"):
        c(torch.tensor([1, 10]))


def test_dropout_is_seeded_and_redrawn() -> None:
    c = compiled(lambda x: F.dropout(x, 0.5))
    x = torch.ones(40, 40)
    torch.manual_seed(3)
    first, second = c(x), c(x)
    torch.manual_seed(3)
    assert torch.equal(c(x), first) and not torch.equal(first, second)
    assert abs(first.mean().item() - 1) < 0.1 and set(first.unique().tolist()) == {0.0, 2.0}


def test_inputs_are_updated_in_place() -> None:
    def f(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(x.mean(0))
        return x - seen

    x, seen, other = torch.randn(5, 3), torch.zeros(3), torch.zeros(3)
    torch.testing.assert_close(compiled(f)(x, seen), f(x, other))
    torch.testing.assert_close(seen, other)


def test_scans_of_varying_length_that_look_back() -> None:
    """The workspace of a single long row depends on run-time sizes."""
    fn = compiled(lambda x: x.cumsum(0), dynamic=True)
    for n in (20_000, 9_000):
        x = torch.randint(-9, 9, (n,)).float()  # whole numbers: the order of the sum does not matter
        assert torch.equal(fn(x), x.cumsum(0))


@pytest.mark.parametrize("channels", [17, 32, 37, 67])
def test_sampling_of_rows_that_are_padded(channels: int) -> None:
    """Channels next to each other, in rows that begin where wide accesses may: what pads them shows nowhere."""
    x = torch.randn(2, channels, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    grid = (torch.rand(2, 3, 11, 2, generator=torch.Generator().manual_seed(1)) * 2.4 - 1.2).requires_grad_()
    f = lambda x, grid: F.grid_sample(x, grid, align_corners=False)  # noqa: E731
    seed = torch.randn(2, channels, 3, 11, generator=torch.Generator().manual_seed(2))
    ours, eager = compiled(f)(x, grid), f(x, grid)
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, grid), seed), torch.autograd.grad(eager, (x, grid), seed),
                               rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [1024, 3000, 1029])
def test_maps_of_any_length(n: int) -> None:
    """Whole tiles without masks, the last one with them."""
    x = torch.randn(n)
    torch.testing.assert_close(compiled(lambda x: (x * 2).sigmoid() + x)(x), (x * 2).sigmoid() + x)
    y = compiled(lambda x: F.dropout(x, 0.5))(torch.ones(n))
    assert set(y.unique().tolist()) == {0.0, 2.0} and abs(y.mean().item() - 1) < 0.2


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_become_half_precision(dtype: torch.dtype) -> None:
    """Rounded twice, as eager does: to float32, then to half precision."""
    x = torch.tensor([0, 1, -1, 5, 100, 257, 65537, 2**24 + 1, -(2**31), 2**40 + 2**16 + 1]).to(dtype)

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.bfloat16(), x.half(), x.bfloat16() * 2, (x.bfloat16() * 1.5).to(torch.int64)

    torch._dynamo.reset()
    made = torch.compile(halves, backend="flambeau", options={"target": "interpreter"})(x)
    assert [torch.equal(a, b) for a, b in zip(made, halves(x), strict=True)] == [True] * 4


def test_bfloat16_is_rounded() -> None:
    """From every dtype to the nearest, and constants of it."""
    x = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, -1e-40, float("inf"), float("nan")])

    def numbers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b = x.bfloat16()
        return (b, x.double().bfloat16(), x.half().bfloat16(), b.double(), b.half(), b * b, b.bool(), (b > 1).int(),
                b.any(), b.fill_(-1.3))

    torch._dynamo.reset()
    made = torch.compile(numbers, backend="flambeau", options={"target": "interpreter", "numerics": "eager"})(x)
    for a, b in zip(made, numbers(x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

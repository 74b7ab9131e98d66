"""Products of scaled small floats, and casts to these, as kernels of ours: against float64, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.config import config
from flambeau.ir.program import ContractKernel
from flambeau.ops import cast
from flambeau.pipeline import Compiled, compile_graph

E4, E5, HALF = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
ROWS, COLUMNS, DEPTH = 70, 128, 256
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with config.override(target="interpreter", contractions="own", verify="passes"):
        yield


def compiled(fn: Callable[..., Any], *args: torch.Tensor) -> Compiled:
    made: Compiled = compile_graph(make_fx(lambda *a: [fn(*a)], tracing_mode="fake")(*args)).compiled
    assert not made.captured.externs
    return made


def small(*shape: int, dtype: torch.dtype = E4) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.5


def blocks(scale: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Of 1 x 128 or 128 x 128 elements each, as many as these."""
    return scale.double().repeat_interleave(128, 1).repeat_interleave(rows, 0)


def close(made: Compiled, want: torch.Tensor, *args: torch.Tensor) -> None:
    (got,) = made.finish()(list(args))
    limit = 5e-3 if got.dtype is HALF else 1e-3 if got.dtype is torch.float16 else 1e-6
    assert (got.double() - want).norm() <= limit * want.norm()
    (kernel,) = made.program.kernels
    assert isinstance(kernel, ContractKernel)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("out", [HALF, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["tensor", "rows"])
def test_scales_of_tensors_and_rows(kind: str, out: torch.dtype, fast: bool) -> None:
    a, b, bias = small(ROWS, DEPTH), small(COLUMNS, DEPTH), torch.randn(COLUMNS).to(HALF)
    x, y = (scales(), scales()) if kind == "tensor" else (scales(ROWS, 1), scales(1, COLUMNS))
    args = a, b, x, y, bias

    def fn(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return aten._scaled_mm(a, b.t(), x, y, z, None, out, fast)

    made = compiled(fn, *args)
    close(made, (a.double() * x) @ (b.double().t() * y) + bias.double(), *args)
    # Fast sums are asked for, and never chosen: others are added in float32 after each 128 elements.
    assert made.program.kernels[0].promoted == (0 if fast else 128)
    assert ("+= tl.dot" in made.texts[0].text) != fast


@pytest.mark.parametrize("dtypes", [(E4, E5), (E5, E4)])
def test_both_kinds_of_small_floats(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b, x, y = small(ROWS, 200, dtype=dtypes[0]), small(48, 200, dtype=dtypes[1]), scales(), scales()
    made = compiled(lambda a, b, x, y: aten._scaled_mm(a, b.t(), x, y, None, None, HALF, False), a, b, x, y)
    close(made, a.double() @ b.double().t() * x.double() * y, a, b, x, y)


@pytest.mark.parametrize("squares", [True, False])
def test_scales_of_blocks(squares: bool) -> None:
    a, b, x = small(ROWS, DEPTH), small(COLUMNS, DEPTH), scales(DEPTH // 128, ROWS)
    y = scales(COLUMNS // 128 if squares else COLUMNS, DEPTH // 128)
    want = (a.double() * blocks(x.t())) @ (b.double() * blocks(y, 128 if squares else 1)).t()
    made = compiled(lambda a, b, x, y: aten._scaled_mm(a, b.t(), x.t(), y.t(), None, None, HALF, False), a, b, x, y)
    close(made, want, a, b, x, y)


@pytest.mark.parametrize("recipes", [(0, 0), (1, 1), (4, 4), (4, 5), (5, 4)])
def test_the_newer_operator(recipes: tuple[int, int]) -> None:
    rows = 128 if recipes[0] == 5 else ROWS
    a, b = small(rows, 512), small(COLUMNS, 512)

    def scale(recipe: int, lines: int, across: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As the operator takes it, and of each element."""
        if recipe == 0:
            return (s := scales()), s.double()
        if recipe == 1:
            return (s := scales(1, lines) if across else scales(lines, 1)), s.double().reshape(lines, 1)
        if recipe == 4:
            return (s := scales(4, lines).t()), blocks(s)
        return (s := scales(lines // 128, 4).t()), blocks(s.t(), 128)

    (x, of_a), (y, of_b) = scale(recipes[0], rows, False), scale(recipes[1], COLUMNS, True)
    made = compiled(lambda a, b, x, y: aten._scaled_mm_v2(a, b.t(), [x], [recipes[0]], [], [y], [recipes[1]], [], None,
                                                          HALF), a, b, x, y)
    close(made, (a.double() * of_a) @ (b.double() * of_b).t(), a, b, x, y)


def test_casts_on_the_way_to_a_product() -> None:
    """As training does: each tensor by its largest element."""
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        of_x, of_w = (t.abs().amax() / 448 for t in (x, w))
        return aten._scaled_mm((x / of_x).to(E4), (w / of_w).to(E4).t(), of_x, of_w, None, None, HALF, False)

    x, w = torch.randn(64, 256), torch.randn(96, 256)
    (got,) = compiled(fn, x, w).finish()([x, w])
    want = x.double() @ w.double().t()
    assert (got.double() - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("dtype", [E4, E5])
def test_casts_have_eagers_bits(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.cat([*(torch.randn(3000) * s for s in (1e-9, 1e-5, 1e-3, 1, most / 3, most)), torch.tensor(
        [0.0, -0.0, most, -most, 1.03 * most, 1.1 * most, -2 * most, torch.inf, -torch.inf, torch.nan]),
        torch.arange(256).to(torch.uint8).view(dtype).float()])
    (got,) = compiled(lambda x: x.to(dtype), x).finish()([x])
    want = x.to(dtype)
    assert got.dtype is dtype and torch.equal(got.float().isnan(), want.float().isnan())
    there = ~want.float().isnan()
    assert torch.equal(got.view(torch.uint8)[there], want.view(torch.uint8)[there])
    back = torch.arange(256).to(torch.uint8).view(dtype)
    (got,) = compiled(lambda x: x.to(HALF) * 2, back).finish()([back])
    torch.testing.assert_close(got, back.to(HALF) * 2, equal_nan=True, rtol=0, atol=0)


def test_what_is_too_large_is_nan_where_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "overflows", lambda: True)  # as torch before 2.13
    x = torch.tensor([448.0, 464.0, 464.1, -465.0, torch.inf, 1.0])
    (got,) = compiled(lambda x: x.to(E4), x).finish()([x])
    assert got.float().isnan().tolist() == [False, False, True, True, True, False]
    assert got.float()[:2].tolist() == [448, 448]


def test_a_machine_without_them_calls_torch() -> None:
    from flambeau.targets.cuda.target import CudaTarget

    assert E4 in CudaTarget(arch=90).capabilities().dtypes
    assert E4 not in CudaTarget(arch=80).capabilities().dtypes  # torch says what is missing

"""Sorts of our own: stable, every axis and dtype, NaNs and zeros of both signs, any sizes; on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from agreement import through
from flambeau.config import config
from flambeau.ir import sort as sorts
from flambeau.targets.cpu.target import CpuTarget
from flambeau.targets.cuda.interpreter import InterpreterTarget

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
          torch.int64, torch.uint8, torch.bool)
OTHERS = {"cpu": CpuTarget, "interpreter": InterpreterTarget}

try:
    from opencl_forms import FORMS, THREADS
except ImportError:  # PyOpenCL is not installed
    FORMS, THREADS = (), ""


def machines(*quick: str) -> list:
    """All of them in `make test-all`; these in `make test`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.sweep) for name in (*FORMS, *OTHERS)]


@pytest.fixture(params=machines(THREADS))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where sorts are kernels; those that have a library for them do without."""
    if request.param in OTHERS:
        kind = OTHERS[request.param]
        own = kind.capabilities
        monkeypatch.setattr(kind, "capabilities", lambda self: replace(own(self), sorts=True))
    with config.override(target=request.param):
        yield request.param


@pytest.fixture
def by_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and no ranks: short rows go the way of long ones."""
    monkeypatch.setattr(sorts, "SHORT", 0)
    monkeypatch.setattr(sorts, "PAIRS", 0)
    monkeypatch.setattr(sorts, "BLOCK", 16)


def with_ties(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Few different values, the extreme ones among them."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        few = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, info.max, info.min, info.tiny, -info.tiny])
        few = few.to(dtype)
    else:
        limits = torch.iinfo(dtype)
        few = torch.tensor([limits.min, limits.max, 0, 1, 2, limits.max // 3, limits.min // 3], dtype=dtype)
    return few[torch.randint(len(few), shape)]


def same(ours: Any, eager: Any) -> None:
    for a, b in zip(ours, eager, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride()
        if a.is_floating_point():  # zeros keep their sign
            assert torch.equal(a.nan_to_num(7).signbit(), b.nan_to_num(7).signbit())
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def each_way(*xs: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor, ...]:
    return tuple(t for k, x in enumerate(xs) for t in x.sort(stable=True, dim=dim, descending=bool(k % 2)))


@pytest.mark.parametrize("machine", machines(*FORMS, *OTHERS), indirect=True)
def test_every_machine(machine: str, by_digits: None) -> None:
    x = with_ties(torch.float32, 2, 20)
    same(through(each_way)(x, x), each_way(x, x))


def test_every_dtype_of_short_rows(machine: str) -> None:
    xs = [with_ties(dtype, 4, 17) for dtype in DTYPES]
    same(through(each_way)(*xs), each_way(*xs))


def test_every_width_of_keys(machine: str, by_digits: None) -> None:
    xs = [with_ties(dtype, 3, 50) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.uint8)]
    same(through(each_way)(*xs), each_way(*xs))


def test_several_blocks(machine: str) -> None:
    x = torch.randint(0, 3000, (2, 2500)).float() - 1500
    same(through(each_way)(x), each_way(x))


def test_every_axis_and_any_strides(machine: str) -> None:
    x = torch.randint(-9, 9, (5, 6, 7)).float()

    def fn(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t for k, x in enumerate(xs) for t in each_way(x, dim=k % 3))

    xs = x, x[:, ::2], x.transpose(0, 2), x.transpose(0, 1), x.expand(2, 5, 6, 7)[1].permute(1, 0, 2)
    same(through(fn)(*xs), fn(*xs))


def test_no_element_and_one(machine: str, by_digits: None) -> None:
    xs = torch.empty(3, 0), torch.empty(0, 4), torch.randn(3, 1), torch.tensor(2.0)
    same(through(each_way)(*xs), each_way(*xs))


def test_sizes_of_the_run(machine: str) -> None:
    compiled = torch.compile(lambda x: x.sort(stable=True), backend="flambeau", dynamic=True)
    for n in (5, 1300 if machine != "interpreter" else 20, 2, 77):
        x = torch.randint(-9, 9, (2, n))
        same(compiled(x), x.sort(stable=True))


# ---- what is made of sorts -------------------------------------------------------------------------------


def taken(x: torch.Tensor, found: Any, dim: int, keepdim: bool = True) -> torch.Tensor:
    """What the indices say, which must be the values: among equals any will do."""
    values, places = (found if keepdim else (t.unsqueeze(dim) for t in found))
    torch.testing.assert_close(x.gather(dim, places), values, rtol=0, atol=0, equal_nan=True)
    return values


@pytest.mark.parametrize("largest", [True, False])
def test_topk(machine: str, largest: bool) -> None:
    x = with_ties(torch.float32, 4, 30)

    def fn(x: torch.Tensor) -> Any:
        return x.topk(7, largest=largest), x.topk(3, 0, largest, sorted=False), x.topk(0), x[0, 0].topk(1)

    ours, eager = through(fn)(x), fn(x)
    assert all(places.unique().numel() == 7 for places in ours[0][1])
    for k, dim in enumerate((1, 0)):
        a, b = (taken(x, found[k], dim).sort(dim)[0] for found in (ours, eager))
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours[0][0].nan_to_num(9), ours[0][0].sort(descending=largest)[0].nan_to_num(9))
    same(ours[2], eager[2])
    same(ours[3], eager[3])


def test_the_first_few_of_long_rows(machine: str) -> None:
    x = torch.randint(-40, 40, (3, 300)).float()
    x[0, 7] = x[0, 9] = NAN

    def fn(x: torch.Tensor) -> Any:
        return x.topk(5), x.topk(2, largest=False), x.view(-1).topk(1), x.to(torch.int64).topk(3)

    sources = x, x, x.view(-1), x.to(torch.int64)
    for (values, places), given, wanted in zip(through(fn)(x), sources, fn(x), strict=True):
        torch.testing.assert_close(values, wanted[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(given.gather(-1, places), values, rtol=0, atol=0, equal_nan=True)
        assert all(len(set(row)) == len(row) for row in places.view(-1, places.shape[-1]).tolist())


def test_one_of_a_row(machine: str) -> None:
    x, y = torch.randn(3, 6, 10), torch.randint(0, 4, (5, 12))
    x[0, 1, 2:4] = x[2, 2] = NAN

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [t for found in (x.kthvalue(3), x.kthvalue(10, keepdim=True), x.kthvalue(2, 1), x.median(1), x.median(2),
                                x.nanmedian(2, keepdim=True), x[0, 0, 0].median(0), y.mode(1), x[:, 3:].mode(0))
                for t in found] + [x.median(), x.nanmedian(), y.median()]

    ours, eager = through(fn)(x, y), fn(x, y)
    nan = eager[0].isnan()  # eager names one of the NaNs
    assert torch.equal(ours[1][~nan], eager[1][~nan])
    for k, (a, b) in enumerate(zip(ours, eager, strict=True)):
        if k not in (1, 3, 5, 11):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("right", [True, False])
def test_searches(machine: str, right: bool) -> None:
    line = torch.tensor([-2.0, 0.0, 0.0, 1.0, 5.0, INF])
    rows = torch.randint(-9, 9, (3, 8)).sort()[0]
    order = torch.tensor([[2, 0, 1]])
    x = torch.tensor([[-3.0, -2, 0, 0.5], [6, INF, NAN, -INF]])

    def fn(line, rows, x, order):
        y = x.nan_to_num(0, 2, 3)[:, :3].to(rows.dtype)
        return (torch.searchsorted(line, x, right=right), torch.bucketize(x, line, right=right, out_int32=True),
                torch.searchsorted(rows[:2], y, right=right), torch.searchsorted(line, 0.5, right=right),
                torch.bucketize(3, line, right=right), torch.searchsorted(rows[0], x, right=right),
                torch.searchsorted(line[:0], x, side="right" if right else "left"),
                torch.searchsorted(line[[3, 4, 0]][None], x[:1], sorter=order, right=right))

    same(through(fn)(line, rows, x, order), fn(line, rows, x, order))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_compared_as_numbers(machine: str, dtype: torch.dtype) -> None:
    """Not by their bits, in which -1 is more than 1, -0 another number than 0 and a NaN itself."""
    line, x = torch.tensor([-2, -1, 0.5, 3], dtype=dtype), torch.tensor([-3, -1, 0, -0.0, 4, NAN, NAN], dtype=dtype)

    def fn(line: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.bucketize(x, line), x.median(0).values, x.nanmedian(0).values, x[:5].mode(0).values

    same(through(fn)(line, x), fn(line, x))


def test_gradients_go_where_elements_came_from(machine: str) -> None:
    x = torch.randn(4, 9, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(9.0)
        return (x.sort(1)[0] * weights).sum() + (x.topk(2, 0)[0] * 3).sum() + x.median() + x.kthvalue(2, 1)[0].sum()

    ours, = torch.autograd.grad(through(fn)(x), x)
    torch.testing.assert_close(ours, torch.autograd.grad(fn(x), x)[0])

"""Run by test_one_function.py: an operator of another library, told to Flambeau by one function, through every door."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flambeau
from flambeau.ir.expr import Expr, where
from flambeau.ops.facts import EVERYWHERE, facts
from flambeau.ops.registry import lower_pointwise

CALLS: list[str] = []  # of the library's own kernels, but for those that try what they take


def library() -> None:
    """What its authors wrote, for PyTorch: schemas, a kernel for the CPU, shapes."""
    torch.library.define("toy::tilt", "(Tensor x, float slope) -> Tensor")
    torch.library.define("toy::tilt_", "(Tensor(a!) x, float slope) -> Tensor(a!)")

    def tilt(x: torch.Tensor, slope: float) -> torch.Tensor:
        CALLS.extend(["tilt"] * (x.numel() > 4))
        return torch.where(x > 0, x, x * slope)

    def tilt_(x: torch.Tensor, slope: float) -> torch.Tensor:
        CALLS.extend(["tilt_"] * (x.numel() > 4))
        return x.copy_(torch.where(x > 0, x, x * slope))

    torch.library.impl("toy::tilt", "CPU", tilt)
    torch.library.impl("toy::tilt_", "CPU", tilt_)
    torch.library.register_fake("toy::tilt", lambda x, slope: torch.empty_like(x))
    torch.library.register_fake("toy::tilt_", lambda x, slope: x)


def lowering() -> None:
    """All that Flambeau has to be told."""

    @lower_pointwise(torch.ops.toy.tilt, operands=1, exact=EVERYWHERE, group="light activations", any_order=True)
    def tilt(x: Expr, slope: float) -> Expr:
        return where(x > 0, x, x * slope)


def test_what_is_known() -> None:
    library()
    assert not facts(torch.ops.toy.tilt).known  # it may do anything
    lowering()
    known = facts(torch.ops.toy.tilt)
    assert known.known and known.in_place == ("toy::tilt_",) and known.checks and not known.waits


def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 3
    torch.ops.toy.tilt_(y, 0.1)
    return torch.ops.toy.tilt(y + 1, 0.3), y


def inputs(shape: tuple[int, ...] = (40, 33)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def expected(fn: Any, x: torch.Tensor) -> Any:
    made = fn(x)
    CALLS.clear()
    return made


def test_compiled() -> None:
    for numerics in ("eager", "fast"):
        x = inputs()
        want = expected(step, x)
        got = torch.compile(step, backend="flambeau", options={"numerics": numerics})(x)
        assert not CALLS  # both forms are in kernels of ours
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) if numerics == "eager" else torch.allclose(a, b)

    def updated(x: torch.Tensor) -> torch.Tensor:
        torch.ops.toy.tilt_(x, 0.1)
        return x + 1

    x, other = inputs(), inputs()
    want = expected(updated, other)
    assert torch.equal(torch.compile(updated, backend="flambeau", options={"numerics": "eager"})(x), want)
    assert torch.equal(x, other) and not CALLS


def test_accelerated() -> None:
    x = inputs((400, 300))
    want = expected(lambda x: torch.ops.toy.tilt(x, 0.2), x)
    with flambeau.accelerate("cpu", only="toy::tilt", wait=True):
        assert torch.equal(torch.ops.toy.tilt(x, 0.2), want)
        written = x.clone()
        assert torch.ops.toy.tilt_(written, 0.2) is written and torch.equal(written, want)
        assert not CALLS
        rows = {row.operator: row.ours for row in flambeau.accelerated()}
        assert rows == {"toy.tilt": 1, "toy.tilt_": 1}
        torch.ops.toy.tilt(x[:1], 0.2)
        assert CALLS == ["tilt"]  # too small to be looked at
    torch.ops.toy.tilt(x, 0.2)
    assert CALLS == ["tilt", "tilt"]


def test_on_the_device() -> None:
    pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
    x = inputs()
    want = expected(lambda x: torch.ops.toy.tilt(x, 0.2), x)
    flambeau.enable_device()
    there = x.to("flambeau")
    made = torch.ops.toy.tilt(there, 0.2)
    assert torch.equal(made.cpu(), want)
    assert torch.ops.toy.tilt_(there, 0.2) is there and torch.equal(there.cpu(), want)
    assert not flambeau.fallbacks()

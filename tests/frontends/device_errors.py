"""What test_device.py runs in a process of its own: what a user is told. The device has no float64."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import nn

import flambeau
from flambeau.config import config
from flambeau.ir.dtypes import SUPPORTED
from flambeau.targets.opencl import OpenClTarget
from flambeau.targets.opencl_device import ClDevice, devices

DEV = "flambeau"


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    ClDevice.dtypes = property(lambda self: SUPPORTED - {torch.float64})  # type: ignore[assignment, method-assign]
    flambeau.enable_device()


def test_a_device_index_that_does_not_exist() -> None:
    there = "there is 1 device$" if len(devices()) == 1 else f"there are {len(devices())} devices$"
    for use in (lambda: torch.ones(2, device="flambeau:9"), lambda: nn.Linear(2, 2).to("flambeau:9")):
        with pytest.raises(RuntimeError, match=f"flambeau:9 does not exist: {there}"):
            use()


@pytest.mark.parametrize("call", [
    lambda x, y: x + y, lambda x, y: x @ y, lambda x, y: torch.cat([x, y]), lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: nn.functional.linear(x, y), lambda x, y: torch.add(x, x, out=y), lambda x, y: y.mul_(x),
    lambda x, y: nn.functional.layer_norm(x, (3,), y[0]),
], ids=["add", "matmul", "cat", "where", "linear", "out", "in place", "layer_norm"])
def test_a_tensor_of_the_cpu_among_those_of_the_device(call: Any) -> None:
    with pytest.raises(RuntimeError, match="(?i)expected all tensors to be on the same device") as error:
        call(torch.ones(3, 3, device=DEV), torch.ones(3, 3))
    assert "flambeau:0" in str(error.value) and "cpu" in str(error.value)


def test_a_dtype_that_the_device_lacks() -> None:
    x = torch.arange(3.0, dtype=torch.float64).to(DEV)
    assert x.mul(2).cpu().tolist() == [0, 2, 4]  # the CPU has it
    with config.override(fallback="error"), pytest.raises(flambeau.UnsupportedError, match="aten::mul") as error:
        x.mul(2)
    assert "does not have a dtype; float64" in str(error.value) and devices()[0].name in str(error.value)
    assert "unset FLAMBEAU_FALLBACK" in str(error.value)
    single = x.float()
    with config.override(fallback="error"):
        assert single.mul(2).cpu().tolist() == [0, 2, 4]


def test_a_kernel_that_does_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OpenClTarget.render

    def broken(self: OpenClTarget, kernel: Any, name: str) -> Any:
        source: Any = real(self, kernel, name)
        return dataclasses.replace(source, text=source.text.replace(";", " this is no C;", 1))

    x = torch.arange(5.0, device=DEV)
    monkeypatch.setattr(OpenClTarget, "render", broken)
    with pytest.warns(RuntimeWarning, match="did not build, and the CPU computes it. Please report this") as said:
        assert torch.equal(torch.erf(x).cpu(), torch.erf(torch.arange(5.0)))
    assert "aten.erf" in str(said[0].message) and "its text is in" in str(said[0].message)
    with config.override(fallback="error"), pytest.warns(RuntimeWarning), \
            pytest.raises(flambeau.UnsupportedError, match="did not compile"):
        torch.expm1(x)
    with pytest.warns(RuntimeWarning, match="did not build; their operators .* run as ATen"):
        got = torch.compile(lambda x: x.tan() * 3, backend="flambeau")(x)
    torch.testing.assert_close(got.cpu(), torch.arange(5.0).tan() * 3)


def test_memory_that_is_exhausted() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="flambeau:0 is out of memory: .* bytes were asked for, .* in use"):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEV)
    assert torch.ones(3, device=DEV).sum().item() == 3


def test_a_fork_after_the_start() -> None:
    torch.ones(2, device=DEV)
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            torch.ones(2, device=DEV)
            said = "no error"
        except RuntimeError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    said = os.read(read, 4096).decode()
    assert "forked after OpenCL was used" in said and "spawn" in said

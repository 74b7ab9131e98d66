"""Helpers for the test files that test_device.py runs in separate processes: devices, numbers, and no log messages
about fallbacks to the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import flambeau
from flambeau.targets.opencl import driver as opencl_driver
from flambeau.targets.opencl.device import ClDevice, devices

DEV = "flambeau"


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    """Enables two devices, both on the first OpenCL device."""
    first = devices()[0].device
    opencl_driver.devices = lambda: (ClDevice(0, first), ClDevice(1, first))  # type: ignore[assignment]
    flambeau.enable_device()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("flambeau.device.fallback")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    values = torch.arange(count, dtype=torch.float64) * 7 % 13 - (0 if dtype in (torch.uint8, torch.bool) else 6)
    return values.reshape(shape).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)

"""PyTorch's operator database through OpenCL kernels: those for CPUs, and some through those for GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

import torch

from flambeau.config import config
from flambeau.testing.opinfo import check_opinfo
from opencl_forms import FORMS, THREADS
from samples import agrees
from test_opinfo import taken
from test_opinfo_blocks import CURATED

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def cases() -> list:
    """Examples of every kind of node in both forms, from which `make test` draws; `make test-all` runs the rest."""
    out = []
    for name, dtype in taken(DTYPES):
        for on in FORMS:
            if on != THREADS and dtype is not torch.float32:
                continue
            example = name in CURATED and dtype is torch.float32
            out.append(pytest.param(name, dtype, on, id=f"{name}-{str(dtype)[6:]}-{on}",
                                    marks=pytest.mark.slow if example else pytest.mark.sweep))
    return out


@pytest.mark.parametrize(("name", "dtype", "on"), cases())
def test_samples_agree_with_eager(name: str, dtype: torch.dtype, on: str) -> None:
    with config.override(target=on):
        report = check_opinfo(name, dtype, limit=2)
    agrees(report)

"""`samples_agree`: checks that our kernels have eager's results on PyTorch's own samples of an operator."""

from __future__ import annotations

import pytest
import torch

from flambeau.testing.opinfo import OPS, Report, check_opinfo


def samples_agree(name: str, dtype: torch.dtype = torch.float32, limit: int | None = 4) -> None:
    """Checks the first `limit` samples (None: all), and that nothing is left to ATen. Does nothing if eager does not
    support the dtype."""
    if dtype not in OPS[name].supported_dtypes("cpu"):
        return
    report = check_opinfo(name, dtype, limit=limit)
    assert report.samples and not report.failures and not report.externs, report


def agrees(report: Report) -> None:
    """Checks that every sample that was run agrees. If none was, because eager or its tracing refuses them, skips the
    test with the reasons."""
    assert report.ok, "\n".join(report.failures)
    if not report.samples:
        assert report.skipped, f"{report.op} has no samples of {report.dtype}"
        pytest.skip(f"no sample was run: {'; '.join(sorted(set(report.skipped)))[:400]}")

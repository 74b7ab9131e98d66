"""`samples_agree`: PyTorch's own samples of an operator give on our kernels what they give in eager."""

from __future__ import annotations

import pytest
import torch

from flambeau.testing.opinfo import OPS, Report, check_opinfo


def samples_agree(name: str, dtype: torch.dtype = torch.float32, limit: int | None = 4) -> None:
    """The first `limit` samples, or all; none where eager does not take the dtype. Nothing is left to ATen."""
    if dtype not in OPS[name].supported_dtypes("cpu"):
        return
    report = check_opinfo(name, dtype, limit=limit)
    assert report.samples and not report.failures and not report.externs, report


def agrees(report: Report) -> None:
    """Every sample that was run agrees. If none was, that is a skip with its reasons: eager or its tracing refuses."""
    assert report.ok, "\n".join(report.failures)
    if not report.samples:
        assert report.skipped, f"{report.op} has no samples of {report.dtype}"
        pytest.skip(f"no sample was run: {'; '.join(sorted(set(report.skipped)))[:400]}")

"""Intermediate values of a lowering have the memory order of the values that they are computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flambeau.capture.kept_whole import whole_operators
from schedule.programs import programs


def image(channels_last: bool) -> torch.Tensor:
    x = torch.randn(2, 8, 12, 14)
    return (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("fn", [
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: F.adaptive_avg_pool2d(x, (5, 3)),
    lambda x: F.adaptive_max_pool2d(x, (5, 3)),
])
def test_channels_stay_where_they_are(fn: Callable[..., Any], channels_last: bool) -> None:
    seen = 0
    with whole_operators():
        made = programs(fn, image(channels_last))
    for p in made:
        for b in p.buffers:
            if len(b.shape) == 4 and b.place == "arena":
                seen += 1
                step = b.strides[1 if channels_last else 3]
                assert step.is_const and step.const == 1, f"{b.name} of {list(b.shape)} has strides {list(b.strides)}"
    assert seen

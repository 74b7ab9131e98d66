"""What test_streams.py runs in a process of its own: streams and events inside compiled functions, on the device."""

from __future__ import annotations

import pytest
import torch

import flambeau

DEV = "flambeau"


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    flambeau.enable_device()


def test_a_question_to_a_stream_is_refused() -> None:
    """Dynamo asks it once, while it traces, and compiles one of the two branches."""
    side = torch.Stream(device=DEV)

    def f(x: torch.Tensor) -> torch.Tensor:
        with side:
            y = x + 1
        return y if side.query() else y * 2

    with pytest.raises(flambeau.errors.UnsupportedError, match=r"Stream\.query"):
        torch.compile(f, backend="flambeau", fullgraph=True)(torch.ones(8, device=DEV))


def test_streams_in_a_checkpoint_are_refused() -> None:
    side = torch.Stream(device=DEV)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with side:
            y = x.sin()
        torch.accelerator.current_stream().wait_stream(side)
        return y

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False)

    with pytest.raises(flambeau.errors.UnsupportedError, match="checkpoint"):
        torch.compile(f, backend="flambeau", fullgraph=True)(torch.ones(8, device=DEV, requires_grad=True))

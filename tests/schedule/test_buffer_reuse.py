"""Updates of inputs in place: a kernel that writes several inputs reads all of them before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.codegen.triton.dialect import CAPABILITIES
from schedule.programs import programs

TARGETS = ["cpu", pytest.param("interpreter", marks=pytest.mark.skipif(find_spec("triton") is None,
                                                                       reason="Triton is not installed"))]


def crossed(x: Tensor, y: Tensor, z: Tensor) -> None:
    a, b = y.sin() + z, x.cos() + z
    x.copy_(a)
    y.copy_(b)


def transposed(x: Tensor, y: Tensor, z: Tensor) -> None:
    a, b, c = y * 2 + z, z * 3 + x, x * 5 + y
    x.copy_(a)
    y.copy_(b)
    z.copy_(c)


def chosen(x: Tensor, y: Tensor, z: Tensor) -> None:
    a, b = torch.where(z > 0, y, z), torch.where(z < 0, x, z)
    x.copy_(a)
    y.copy_(b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("f", [crossed, transposed, chosen])
def test_what_is_written_was_read_before(f: Callable[..., None], target: str) -> None:
    ours = [torch.randn(300) for _ in range(3)]
    eager = [t.clone() for t in ours]
    torch.compile(f, backend="flambeau", options={"target": target})(*ours)
    f(*eager)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)


def test_no_memory_is_its_own_predecessor() -> None:
    """A row that is too long for fast memory is stored and read again only by the kernel that computes it."""
    caps = replace(CAPABILITIES, arena_most=1 << 20)
    x, y = (torch.randn(215, 7320, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    made = programs(lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"), x, y, caps=caps)
    assert made and not [b for p in made for b in p.buffers if b.over == b.name]

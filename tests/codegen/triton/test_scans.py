"""Scans in block kernels: pieces that wait for each other, and tiles of one size that are summed."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import flambeau.debug
from flambeau.codegen.triton import scans
from flambeau.config import config
from flambeau.ir.tuning import BLOCKS

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]

INF, NAN = math.inf, math.nan
# What stands where in a line of random numbers.
LINES: dict[str, list[tuple[int | slice, float]]] = {
    "of one size": [],
    "of many sizes": [(slice(None, None, 3), 150.0)],
    "steps down": [(slice(100), 300.0)],
    "steps up": [(slice(100), -300.0)],
    "nothing here and there": [(3, -INF), (slice(150, 153), -INF)],
    "nothing but one": [(slice(None), -INF), (170, 1.0)],
    "nothing": [(slice(None), -INF)],
    "infinite and undefined": [(100, INF), (200, NAN)],
}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form with few elements: the interpreter is slow."""
    small = replace(BLOCKS, scan_programs=10**6, scan_alone=128, scan_piece=256, scan_row=64, scan_window=4)
    monkeypatch.setattr(scans, "BLOCKS", small)


def line(kind: str, n: int = 260) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    for where, value in LINES[kind]:
        x[where] = value
    return x


@pytest.mark.parametrize("shape", ["row", "columns", "walked"])
@pytest.mark.parametrize("kind", LINES)
def test_logarithms_of_sums(kind: str, shape: str, short_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = line(kind)
    if shape != "row":
        x = torch.stack((x, line("of one size"), x.flip(0)), 1)
    if shape == "walked":
        monkeypatch.setattr(scans, "BLOCKS", replace(scans.BLOCKS, scan_programs=0))
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        run = torch.compile(lambda x: x.logcumsumexp(0), backend="flambeau", options={"target": "interpreter"})
        torch.testing.assert_close(run(x).double(), x.double().logcumsumexp(0), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("shape", ["row", "columns", "walked"])
def test_an_extremum_is_carried_with_the_sign_of_its_zero(shape: str, short_pieces: None,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([0.0, -0.0, -1.0])[torch.randint(3, (260, 3), generator=torch.Generator().manual_seed(0))]
    x[120:140] = -1
    if shape == "row":
        x = x[:, 0].clone()
    if shape == "walked":
        monkeypatch.setattr(scans, "BLOCKS", replace(scans.BLOCKS, scan_programs=0))
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        run = torch.compile(lambda x: x.cummax(0), backend="flambeau", options={"target": "interpreter"})
        values, indices = run(x)
    assert torch.equal(indices, x.cummax(0).indices)
    assert torch.equal(values.view(torch.int32), x.gather(0, indices).view(torch.int32))


@pytest.mark.parametrize("shape", ["row", "columns", "walked"])
@pytest.mark.parametrize("name", ["cummax", "cummin", "cumprod"])
def test_gradients_are_scans(name: str, shape: str, short_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three values for each element. Those of extrema begin anew with each run of one place: what another run has
    (infinity, here) stays out."""
    x, weight = line("of one size"), torch.arange(1.0, 261.0)
    weight[x.argmax()] = INF
    if shape != "row":
        x, weight = torch.stack((x, x.flip(0), x.abs()), 1), weight[:, None]
    if shape == "walked":
        monkeypatch.setattr(scans, "BLOCKS", replace(scans.BLOCKS, scan_programs=0))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cumprod(0) if name == "cumprod" else getattr(x, name)(0).values

    torch._dynamo.reset()
    with config.override(graph_cache=False), flambeau.debug.collect() as graphs:
        run = torch.compile(f, backend="flambeau", options={"target": "interpreter"})
        grads = [torch.autograd.grad(g(y), y, weight.expand_as(y)) for g, y in (
            (run, x.clone().requires_grad_()), (f, x.double().requires_grad_()))]
    torch.testing.assert_close(grads[0][0].double(), grads[1][0], rtol=1e-5, atol=1e-5, equal_nan=True)
    texts = [s.text for s in graphs[-1].texts]
    assert not any("atomic_add(p" in text for text in texts)
    sizes = {int(n) for text in texts for n in re.findall(r"tl.arange\(0, (\d+)\)", text)}
    assert sizes and all(n & (n - 1) == 0 for n in sizes)  # Triton has no others

"""Whole models: every one of the suite, static and dynamic, and training that goes where eager's goes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flambeau.bench.models import SUITE, Built, without_dropout
from frontends.compare import compiled

pytestmark = pytest.mark.filterwarnings("error:flambeau:RuntimeWarning")


def step(built: Built, forward: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
         ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and every gradient."""
    *args, target = inputs
    built.module.zero_grad()
    loss = built.loss(forward(*args), target)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in built.module.named_parameters() if p.grad is not None}


QUICK = ("gpt", "dlrm", "scans")  # models whose dynamic form is in the sampled tier


@pytest.mark.parametrize(("name", "dynamic"), [
    *(pytest.param(name, False, marks=pytest.mark.slow, id=f"{name}-static") for name in SUITE),
    *(pytest.param(name, True, marks=pytest.mark.slow if name in QUICK else pytest.mark.sweep, id=f"{name}-dynamic")
      for name in SUITE)])
def test_suite(name: str, dynamic: bool) -> None:
    """Loss, gradients and buffers beside eager's in float64: we may be no further off than a few float32 roundings."""
    built = SUITE[name].build("tiny")
    without_dropout(built.module)
    exact = Built(copy.deepcopy(built.module).double(), built.make_inputs, built.loss)
    c = compiled(built.module, dynamic=dynamic)
    for batch in (2, 3) if dynamic else (2,):
        inputs = built.make_inputs(batch)
        loss, grads = step(built, c, inputs)
        wide = tuple(t.double() if t.is_floating_point() else t for t in inputs)
        true_loss, true_grads = step(exact, exact.module, wide)
        torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-5)
        assert grads.keys() == true_grads.keys()
        for n, g in grads.items():
            scale = true_grads[n].abs().max().item()
            torch.testing.assert_close(g.double(), true_grads[n], rtol=1e-3, atol=1e-4 * scale + 1e-7,
                                       msg=lambda m, n=n: f"gradient of {n}: {m}")
    for (n, a), b in zip(built.module.named_buffers(), exact.module.buffers(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"buffer {n}: {m}")
    built.module.eval()
    exact.module.eval()
    with torch.no_grad():
        *args, _ = built.make_inputs(2)
        torch.testing.assert_close(c(*args).double(), exact.module(*(
            t.double() if t.is_floating_point() else t for t in args)), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_fifty_steps_follow_eager(name: str) -> None:
    curves: list[list[float]] = []
    for own in (True, False):
        built = SUITE[name].build("tiny")
        forward = compiled(built.module) if own else built.module
        optimizer = torch.optim.SGD(built.module.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for k in range(50):
            *args, target = built.make_inputs(2, seed=k % 4)
            loss = built.loss(forward(*args), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    ours, eager = curves
    assert ours[-1] < 0.7 * ours[0], "it learns"
    torch.testing.assert_close(ours[:10], eager[:10], rtol=1e-3, atol=1e-3)
    # Rounding grows from step to step in either: later losses agree less, and still follow one curve.
    torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.05)

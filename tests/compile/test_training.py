"""Whole models: every model of the suite, static and dynamic, and training that follows eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile.beside_eager import compiled
from flambeau.bench.models import SUITE, Built, without_dropout

pytestmark = pytest.mark.filterwarnings("error:flambeau:RuntimeWarning")


def step(built: Built, forward: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
         ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and all gradients of one step."""
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


# Learning rates that are small enough for rounding errors to stay small. In unstable training, eager itself differs
# from float64 by percents.
RATES = {"gpt": 0.05, "llama": 0.05, "resnet": 0.0001, "vit": 0.01, "unet3d": 0.05, "dlrm": 0.003, "mlp": 0.001,
         "scans": 0.05}
BATCHES = 4  # batches that are used repeatedly


def losses(name: str, own: bool) -> torch.Tensor:
    built = SUITE[name].build("tiny")
    without_dropout(built.module)
    forward = compiled(built.module, dynamic=False) if own else built.module
    optimizer = torch.optim.SGD(built.module.parameters(), lr=RATES[name], momentum=0.9)
    out = []
    for k in range(50):
        *args, target = built.make_inputs(2, seed=k % BATCHES)
        loss = built.loss(forward(*args), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return torch.tensor(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_fifty_steps_follow_eager(name: str) -> None:
    """A loss is good to a few roundings (6e-8 each), and errors grow from step to step: within 4e-7 over ten steps
    and 4e-6 over fifty, for eager beside float64 as for us beside eager. The bounds leave other machines room."""
    ours, eager = losses(name, own=True), losses(name, own=False)
    assert ours[-BATCHES:].mean() < 0.9 * ours[:BATCHES].mean(), "it learns"
    torch.testing.assert_close(ours[:10], eager[:10], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, eager, rtol=2e-4, atol=2e-5)


def test_gradients_come_laid_out_as_results_are() -> None:
    torch._dynamo.reset()  # sizes that differ from an earlier test's would be symbolic; torch then copies gradients
    seen = []

    @torch.library.custom_op("flambeau_tests::transposed", mutates_args=())
    def transposed(x: torch.Tensor) -> torch.Tensor:
        return (2 * x).transpose(0, 1).contiguous().transpose(0, 1)

    transposed.register_fake(lambda x: torch.empty_strided(x.shape, (1, x.shape[0]), dtype=x.dtype, device=x.device))

    @torch.library.custom_op("flambeau_tests::transposed_backward", mutates_args=())
    def transposed_backward(g: torch.Tensor) -> torch.Tensor:
        seen.append(g.stride())
        return 2 * g

    transposed_backward.register_fake(torch.empty_like)
    transposed.register_autograd(lambda ctx, g: transposed_backward(g))
    x = torch.randn(3, 5, requires_grad=True)
    from torch._functorch import config

    with config.patch(guess_tangent_strides_as_outputs=False):  # torch's default depends on the version
        y = torch.compile(transposed, backend="flambeau")(x)
    y.backward(torch.randn(5, 3).t())
    assert seen == [(1, 3)]

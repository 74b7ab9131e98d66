"""Train steps in packages: losses and gradients of all parameters equal autograd's, with dynamic sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import flambeau
from flambeau.errors import UnsupportedError

F = nn.functional


class Classifier(nn.Module):
    """A model with normalisation, a product, and a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.unused = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x).relu())

    def loss(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self(x)
        return F.cross_entropy(y, target), y.softmax(-1)


class Images(nn.Module):
    """A model with convolution, and with a normalisation whose buffers are states."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def loss(self, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(F.max_pool2d(self.norm(self.conv(image)).relu(), 2).mean((2, 3))), target)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv = nn.Embedding(10, 16), nn.Linear(16, 48)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(self.table(ids)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


CASES = {
    "classifier": (Classifier, lambda n: (torch.randn(n, 8), torch.arange(n) % 4), 2),
    "images": (Images, lambda n: (torch.randn(n, 3, 6, 6), torch.arange(n) % 5), 2),
    "attention": (Attention, lambda n: (torch.randint(0, 10, (n, 5)),), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autograd(name: str, tmp_path: Path) -> None:
    make, args, count = CASES[name]
    torch.manual_seed(0)
    model = make().train()
    batch = Dim("N", min=2, max=64)
    flambeau.export(None, (), tmp_path / "step.flam", debug=False,
                    methods={"step": (flambeau.TrainStep(model.loss), args(4), ({0: batch},) * count)})
    with flambeau.load(tmp_path / "step.flam") as module:
        for n in (4, 7):
            given = args(n)
            *found, gradients = module.step(*given)
            expected = model.loss(*given)  # this also updates the buffers, as the package does
            loss = expected[0] if isinstance(expected, tuple) else expected
            model.zero_grad()
            loss.backward()
            torch.testing.assert_close(found, list(expected) if isinstance(expected, tuple) else [loss])
            wanted = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
            assert set(gradients) == set(wanted)
            for k, grad in wanted.items():
                torch.testing.assert_close(gradients[k], grad, msg=lambda text, k=k: f"{k}: {text}")


def test_a_package_learns(tmp_path: Path) -> None:
    """Weights are shared with the other method, and new ones are used by both."""
    torch.manual_seed(0)
    model = Classifier().train()
    x, target = torch.randn(16, 8), torch.arange(16) % 4
    flambeau.export(model, (x,), tmp_path / "model.flam",
                    methods={"step": (flambeau.TrainStep(model.loss), (x, target))})
    with flambeau.load(tmp_path / "model.flam") as module:
        given, weights, losses = (x.numpy(), target.numpy()), {}, []
        for k, p in model.named_parameters():
            weights[k] = p.detach().numpy().copy()
        for _ in range(20):
            loss, soft, gradients = module.step(*given)
            assert np.allclose(soft, torch.softmax(torch.from_numpy(module.forward(given[0])), -1), atol=1e-6)
            losses.append(float(loss))
            weights |= {k: weights[k] - g for k, g in gradients.items()}
            module.update_weights({k: weights[k] for k in gradients})
        assert losses[-1] < 0.7 * losses[0]


def test_a_step_without_gradients_is_refused(tmp_path: Path) -> None:
    model = Classifier()
    for function, args in ((model, (torch.ones(2, 8),)), (lambda x: x.sum(), (torch.ones(2),))):
        with pytest.raises(UnsupportedError, match="step: torch finds no gradients of this step"):
            flambeau.export(None, (), tmp_path / "f.flam", methods={"step": (flambeau.TrainStep(function), args)})

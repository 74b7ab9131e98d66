"""Each network is the one that its name says, and trains in its dtype."""

import pytest
import torch
from torch import nn

from flambeau.bench.models import ResNet50
from flambeau.bench.networks import DTYPES, NETWORKS, with_dropout


@pytest.mark.parametrize("name", NETWORKS)
def test_trains(name: str) -> None:
    built = NETWORKS[name].build("tiny", dtype=DTYPES[name])
    *args, target = built.make_inputs()
    dropouts = [m for m in with_dropout(built.module).modules() if isinstance(m, nn.Dropout)]
    assert bool(dropouts) == (name != "unet3d")
    loss = built.loss(built.module(*args), target)
    loss.backward()
    assert loss.isfinite() and loss.dtype is DTYPES[name]
    assert all(p.grad is not None and p.grad.dtype is DTYPES[name] for p in built.module.parameters())


def test_a_resnet_50_has_its_parameters() -> None:
    with torch.device("meta"):
        network = ResNet50(image=224, width=64, stages=4, classes=1000)
    assert sum(p.numel() for p in network.parameters()) == 25_557_032

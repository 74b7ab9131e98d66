"""The suite runs in eager with any batch size, and only its dropout is random."""

import pytest
import torch

from flambeau.bench.models import ACTIVATIONS, SUITE, without_dropout


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", SUITE)
def test_trains(name: str, batch: int) -> None:
    built = SUITE[name].build("tiny")
    *args, target = built.make_inputs(batch)
    loss = built.loss(built.module(*args), target)
    loss.backward()
    assert loss.isfinite()
    for parameter, value in built.module.named_parameters():
        assert value.grad is not None and value.grad.isfinite().all(), parameter


@pytest.mark.parametrize("name", SUITE)
def test_builds_and_draws_repeat(name: str) -> None:
    state = torch.get_rng_state()
    first, second = (without_dropout(SUITE[name].build("tiny").module) for _ in range(2))
    inputs = SUITE[name].build("tiny").make_inputs()[:-1]
    assert torch.equal(torch.get_rng_state(), state), "drawing must leave the caller's generator alone"
    torch.testing.assert_close(first(*inputs), second(*inputs), rtol=0, atol=0)


def test_inputs_follow_the_seed() -> None:
    built = SUITE["vit"].build("tiny")
    assert not torch.equal(built.make_inputs(2, seed=1)[0], built.make_inputs(2, seed=2)[0])


def test_dropout_is_only_in_the_mlp() -> None:
    holders = {name for name, model in SUITE.items()
               if any(isinstance(part, torch.nn.Dropout) for part in model.build("tiny").module.modules())}
    assert holders == {"mlp"}


def test_the_mlp_uses_every_activation() -> None:
    assert len(ACTIVATIONS) == 17
    assert set(SUITE["mlp"].build("tiny").module.layers) == set(ACTIVATIONS)

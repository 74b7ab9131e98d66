"""PyTorch's operator database through the Triton kernels for GPUs, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from flambeau.config import config
from flambeau.testing.opinfo import OPS, check_opinfo
from samples import agrees

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

# Some entries for every kind of node, from which `make test` draws; `make test-all` runs the whole database.
KINDS = {
    "map": ("add", "div_floor_rounding", "nn_functional_gelu", "where", "remainder", "tril",
            "nn_functional_pad_reflect"),
    "reduction": ("sum", "var_mean", "argmax", "softmax", "nn_functional_layer_norm", "logsumexp", "amax", "norm",
                  "nn_functional_batch_norm", "std", "all", "prod"),
    "scan": ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    "segment": ("nn_functional_embedding_bag",),
    "scatter": ("index_add", "index_put", "scatter_add", "scatter", "put", "index_copy", "nn_functional_max_unpool2d"),
    "window": ("nn_functional_max_pool2d", "nn_functional_avg_pool3d", "nn_functional_adaptive_avg_pool2d",
               "nn_functional_grid_sample", "nn_functional_interpolate_bicubic", "nn_functional_max_pool3d"),
    "random": ("nn_functional_dropout", "bernoulli", "uniform"),
}
CURATED = {name for names in KINDS.values() for name in names}


def test_the_examples_exist() -> None:
    assert not {n for n in CURATED if n not in OPS}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in CURATED else pytest.mark.sweep)
                                  for n, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu")])
def test_samples_agree_with_eager(name: str) -> None:
    with config.override(target="interpreter"):
        report = check_opinfo(name, torch.float32, limit=2)
    agrees(report)

"""PyTorch's operator database through Metal kernels in the emulator; the checker inspects every source."""

from __future__ import annotations

import pytest
import torch

from flambeau.config import config
from flambeau.testing.opinfo import OPS, check_opinfo
from samples import agrees
from targets.metal_texts import texts_checked
from test_opinfo import taken
from test_opinfo_blocks import CURATED

pytest.importorskip("clang.cindex", reason="libclang is not installed: pip install libclang")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
# Operators that PyTorch lacks on Apple GPUs, or runs one by one: each with its gradient, in the fast tier.
NAMED = (
    "nn_functional_hardsigmoid", "nn_functional_hardswish", "nn_functional_leaky_relu", "nn_functional_softshrink",
    "abs", "expm1", "cumsum", "cumprod", "cummin", "cummax", "logcumsumexp", "nn_functional_max_pool1d",
    "nn_functional_max_pool2d", "nn_functional_max_pool3d", "nn_functional_avg_pool1d", "nn_functional_avg_pool2d",
    "nn_functional_avg_pool3d", "nn_functional_max_unpool1d", "nn_functional_max_unpool2d",
    "nn_functional_max_unpool3d", "nn_functional_grid_sample", "nn_functional_dropout", "exponential",
    "nn_functional_embedding_bag", "index_add", "index_put",
)


def cases() -> list:
    """The operators named above and some of every kind of node, from which `make test` draws; `make test-all` runs the
    rest."""
    out = []
    for name, dtype in taken(DTYPES):
        drawn = name in NAMED or (name in CURATED and dtype is torch.float32)
        out.append(pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}",
                                marks=pytest.mark.slow if drawn else pytest.mark.sweep))
    return out


def test_the_named_operators_exist() -> None:
    assert not {name for name in NAMED if name not in OPS}


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_samples_agree_with_eager(name: str, dtype: torch.dtype) -> None:
    with config.override(target="metal-emulator"), texts_checked() as texts:
        report = check_opinfo(name, dtype, limit=2)
    agrees(report)
    if name in NAMED:
        assert not report.externs and (texts or not report.samples)
        assert report.gradients or not dtype.is_floating_point or name == "exponential"

"""Packages compute the same bits as compiled functions at any size, and contain what was requested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.export import Dim

import flambeau
from flambeau.bench.package_bits import FAMILIES, Norms, leaves


@pytest.mark.parametrize("name", FAMILIES)
def test_package_has_the_bits_of_the_compiler(name: str, tmp_path) -> None:
    make, args, shapes = FAMILIES[name]
    torch.manual_seed(0)
    model = make().eval()
    path = tmp_path / "model.flam"
    flambeau.export(model, args(5), path, dynamic_shapes=shapes)
    compiled = torch.compile(model, backend="flambeau", options={"target": "cpu-alone"})
    with flambeau.load(path) as module, torch.no_grad():
        for n in (5, 8) if shapes else (5,):
            given = args(n)
            for x, dims in zip(given, (shapes or {}).values()):
                torch._dynamo.mark_dynamic(x, list(dims))  # so that these sizes are symbolic for the compiler too
            ours, expected = module.forward(*given), compiled(*given)
            assert type(ours) is type(expected)
            for a, b in zip(leaves(ours), leaves(expected), strict=True):
                assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
            arrays = module.forward(*(x.numpy() for x in given))
            for a, b in zip(leaves(arrays), leaves(expected), strict=True):
                assert isinstance(a, np.ndarray) and np.array_equal(a, b.numpy())
        for n in (0, 1) if name == "images" else ():  # torch traces with sizes from two on, but promises these
            given = args(n)
            for a, b in zip(leaves(module.forward(*given)), leaves(model(*given)), strict=True):
                torch.testing.assert_close(a, b)


def test_functions_with_sizes_of_the_run(tmp_path) -> None:
    def shifted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = x.half() + y[1:]
        return both, both[None].expand(2, -1)

    n = Dim("n")
    flambeau.export(shifted, (torch.ones(4), torch.ones(5)), tmp_path / "f.flam", numerics="eager",
                    dynamic_shapes=({0: n}, {0: n + 1}))
    with flambeau.load(tmp_path / "f.flam") as module:
        x, y = torch.randn(7), torch.randn(8)
        for a, b in zip(module.forward(x, y), shifted(x, y), strict=True):
            assert torch.equal(a, b)
        with pytest.raises(flambeau.Error, match=r"input 'y': expected float32 \[n \+ 1\] contiguous, got "):
            module.forward(x, y[1:])


def test_the_same_model_gives_the_same_bytes(tmp_path) -> None:
    model, args = Norms().eval(), (torch.randn(4, 48),)
    names = [flambeau.export(model, args, tmp_path / f"{k}.flam") for k in range(2)]
    assert names[0] == names[1] and (tmp_path / "0.flam").read_bytes() == (tmp_path / "1.flam").read_bytes()


@pytest.mark.slow
def test_processes_give_the_same_bytes(tmp_path: Path) -> None:
    """For all targets, whatever the seed of hashes is, and with nothing in a cache."""
    text = ("import sys, torch, flambeau\nfrom flambeau.bench.package_bits import Norms\ntorch.manual_seed(0)\n"
            "flambeau.export(Norms().eval(), (torch.ones(4, 48),), sys.argv[1],"
            " targets=['cpu', 'cuda:sm_80', 'opencl', 'metal'])")
    for k in range(2):
        cache = tmp_path / f"cache{k}"
        cache.mkdir(mode=0o700)
        subprocess.run([sys.executable, "-c", text, f"{tmp_path}/{k}.flam"], check=True, env={
            **os.environ, "PYTHONHASHSEED": str(k), "FLAMBEAU_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache)})
    assert (tmp_path / "0.flam").read_bytes() == (tmp_path / "1.flam").read_bytes()

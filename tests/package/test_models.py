"""Whole models in packages, with sizes of the run: the compiler's bits without torch, Triton and a compiler."""

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
from flambeau.bench.models import SUITE

from .test_export import MODELS, leaves

ALONE = """
import sys
for name in ("torch", "triton", "pyopencl"): sys.modules[name] = None
import numpy, flambeau
given, expected = (dict(numpy.load(f)) for f in sys.argv[2:4])
found = flambeau.load(sys.argv[1]).load_method("forward").run(list(given.values()))
print(*(a.dtype == b.dtype and numpy.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(found, expected.values(), strict=True)))
"""


def alone(package: Path, given: list[torch.Tensor], expected: list[torch.Tensor], folder: Path) -> str:
    """Which results are the expected ones, in a process that has NumPy alone."""
    for name, arrays in (("given", given), ("expected", expected)):
        np.savez(folder / f"{name}.npz", *(x.detach().numpy() for x in arrays))
    done = subprocess.run([sys.executable, "-c", ALONE, str(package), f"{folder}/given.npz", f"{folder}/expected.npz"],
                          capture_output=True, text=True, env={
                              "PATH": "", "PYTHONPATH": str(Path(flambeau.__file__).parents[1]), "HOME": "/nowhere",
                              "OMP_NUM_THREADS": str(os.cpu_count())})
    return done.stdout.strip() or done.stderr


def same_alone(package: Path, model: torch.nn.Module, draws: list[tuple[torch.Tensor, ...]], folder: Path,
               shapes: list[dict[int, object]]) -> None:
    compiled = torch.compile(model, backend="flambeau", options={"target": "cpu-alone"})
    for given in draws:
        for x, dims in zip(given, shapes):
            torch._dynamo.maybe_mark_dynamic(x, list(dims))
        with torch.no_grad():
            expected = leaves(compiled(*given))
            torch.testing.assert_close(expected, leaves(model(*given)), rtol=1e-3, atol=1e-4)
        assert alone(package, list(given), expected, folder) == " ".join(["True"] * len(expected))


@pytest.mark.parametrize("name", [n if n == "scans" else pytest.param(n, marks=pytest.mark.slow) for n in SUITE])
def test_models_of_the_suite(name: str, tmp_path: Path) -> None:
    """Sizes that the batch decides are sizes of the run."""
    built = SUITE[name].build("tiny")
    model = built.module.eval()
    draws = [built.make_inputs(batch=n, seed=n)[:-1] for n in (4, 3, 5)]
    shapes = [{k: Dim.AUTO for k, (m, n) in enumerate(zip(x.shape, y.shape)) if m != n} for x, y in zip(*draws[:2])]
    flambeau.export(model, draws[0], tmp_path / "model.flam", dynamic_shapes=tuple(shapes), debug=False)
    same_alone(tmp_path / "model.flam", model, draws, tmp_path, shapes)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_models_of_families(name: str, tmp_path: Path) -> None:
    """Normalisation, bags, sampling and pooling, attention, convolution."""
    make, args, shapes = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    flambeau.export(model, args(5), tmp_path / "model.flam", dynamic_shapes=shapes, debug=False)
    same_alone(tmp_path / "model.flam", model, [args(n) for n in ((6, 8) if shapes else (5,))], tmp_path,
               list((shapes or {}).values()))

"""Packages for devices: OpenCL on PoCL, NVIDIA GPUs on a fake driver, Metal sources by the checker."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import flambeau
from flambeau.bench.package_bits import FAMILIES, cases, leaves
from flambeau.errors import OptionError, UnsupportedError
from flambeau.package import container
from flambeau.package.client import PackageError

HERE = Path(__file__).parent
F = nn.functional


class Cached(nn.Module):
    """A model with a buffer that it updates, an index that is checked, and a view among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, at: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.table(ids)
        self.cache.index_add_(0, at, found)
        return self.cache.sum(0), found.t()


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cached, Path]:
    torch.manual_seed(3)
    model = Cached().eval()
    path = tmp_path_factory.mktemp("device") / "cached.flam"
    flambeau.export(model, (torch.arange(3), torch.arange(3)), path,
                    targets=["cuda:sm_80", "opencl:cpu", "cpu", "metal"])
    return model, path


def test_one_file_has_several_targets_and_weights_once(cached: tuple[Cached, Path]) -> None:
    model, path = cached
    sections = container.read(path)
    assert [s.name for s in sections if s.kind in (container.CODE, container.DEVICE)] == [
        "cuda:sm_80", "opencl:cpu", "cpu", "metal"]
    assert sum(s.kind == container.WEIGHTS for s in sections) == 1
    with flambeau.load(path, "cpu") as there, flambeau.load(path, "opencl") as here:
        assert (there.device, here.device) == ("cpu", "opencl")
        at, ids = np.array([0, 3, 1]), np.array([7, 7, 2])
        for _ in range(2):  # each module has its own state
            for a, b in zip(here(at, ids), there(at, ids), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
        total, _ = here(at, ids)
        with pytest.raises(PackageError, match=r"index 10 is out of bounds for dimension 0 with size 10 .*bedding"):
            here(at, np.array([1, 10, 2]))
        nothing = np.zeros(3, np.int64)
        here.update_weights({"table.weight": np.zeros((10, 8), np.float32)})
        assert np.array_equal(here(nothing, nothing)[0], total)  # the failed call did not change the state
        assert here(at, ids)[1].strides == (4, 32)  # the model's own strides
        here.update_weights({"cache": np.ones((4, 8), np.float32)})
        assert here(nothing, nothing)[0].tolist() == [4.0] * 8


def test_a_target_that_does_not_run_says_why(cached: tuple[Cached, Path]) -> None:
    _, path = cached
    with pytest.raises(PackageError, match=r"\(metal\): of its targets, .*metal needs a runtime for metal"):
        flambeau.load(path, "metal")
    with pytest.raises(PackageError, match=r"\(tpu\): of its targets, cuda:sm_80; opencl:cpu; cpu; metal;"):
        flambeau.load(path, "tpu")
    with pytest.raises(PackageError, match="there is no OpenCL device number 17"):
        flambeau.load(path, "opencl", device=17)
    with pytest.raises(OptionError, match="'tpu:4'"):
        flambeau.export(F.relu, (torch.ones(2),), path, targets=["tpu:4"])
    with pytest.raises(OptionError, match="'cuda:hopper' is no target"):
        flambeau.export(F.relu, (torch.ones(2),), path, targets=["cuda:hopper"])


@pytest.mark.parametrize("name", [n if n == "norms" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_opencl_package_has_the_bits_of_the_compiler(name: str, tmp_path: Path) -> None:
    make, args, shapes = FAMILIES[name]
    torch.manual_seed(0)
    model = make().eval()
    flambeau.export(model, args(5), tmp_path / "model.flam", dynamic_shapes=shapes, targets=["opencl:cpu"])
    compiled = torch.compile(model, backend="flambeau", options={"target": "opencl"})
    with flambeau.load(tmp_path / "model.flam") as module, torch.no_grad():
        for n in (5, 8) if shapes else (5,):
            given = args(n)
            for x, dims in zip(given, (shapes or {}).values()):
                torch._dynamo.mark_dynamic(x, list(dims))
            for a, b in zip(leaves(module.forward(*given)), leaves(compiled(*given)), strict=True):
                assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_opencl_package_for_gpus(name: str, tmp_path: Path) -> None:
    """Texts for GPUs, with points for work-items, run on CPUs as well."""
    make, args, shapes = FAMILIES[name]
    torch.manual_seed(0)
    model = make().eval()
    flambeau.export(model, args(5), tmp_path / "model.flam", dynamic_shapes=shapes, targets=["opencl"])
    with flambeau.load(tmp_path / "model.flam") as module, torch.no_grad():
        given = args(8 if shapes else 5)
        for a, b in zip(leaves(module.forward(*given)), leaves(model(*given)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_threads_share_an_opencl_package_that_was_built_here(tmp_path: Path) -> None:
    """What the driver made of the text is in the file; calls of many threads have queues of their own."""
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return F.hardswish(x) * x.sum()

    flambeau.export(scaled, (torch.ones(64),), tmp_path / "f.flam", targets=["opencl:here"],
                    dynamic_shapes=({0: Dim("n", max=512)},))
    code = next(s for s in container.read(tmp_path / "f.flam") if s.kind == container.DEVICE)
    assert bytes(code.data).count(b"Portable Computing Language|") == 1
    with flambeau.load(tmp_path / "f.flam") as module, ThreadPoolExecutor(8) as pool:
        def once(k: int) -> bool:
            n = 64 + 16 * (k % 3)
            return np.array_equal(module(np.full(n, 4, np.float32)), np.full(n, 16 * n, np.float32))

        assert all(pool.map(once, range(200)))


def test_metal_text_is_checked(cached: tuple[Cached, Path]) -> None:
    pytest.importorskip("clang.cindex", reason="libclang is not installed: pip install libclang")
    from flambeau.targets.metal.checker import check

    sections = {s.kind: bytes(s.data) for s in container.read(cached[1]) if s.name.endswith("metal")}
    code, text = sections[container.DEVICE], sections[container.TEXT]
    kernels = [k.partition(b"\n")[2] for k in text.split(b"// ")[1:]]
    assert len(kernels) >= 2 and all(k in code for k in kernels)  # the kernels that were checked are those in the file
    assert check(text.decode()) == []


@pytest.mark.parametrize("names", [
    ("family of norms", "family of bags"),
    *(pytest.param((n,), marks=pytest.mark.slow) for n in cases("tiny") if n[10:] not in ("norms", "bags"))])
def test_cuda_package_on_a_driver_that_is_made_up(names: tuple[str, ...], tmp_path: Path) -> None:
    """Triton's interpreter runs what the driver is asked to launch, with the bits of the compiler."""
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(HERE / "made_up_cuda.c"), "-o",
                    str(library)], check=True)
    script = str(HERE / "on_made_up_cuda.py")
    done = subprocess.run([sys.executable, script, str(library), str(tmp_path), *names],
                          capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    found = [x.split(":") for x in done.stdout.splitlines() if x.startswith(names)]
    assert {x[0] for x in found} == set(names) and all(set(x[1].split()[1:]) == {"True"} for x in found), (
        done.stdout + done.stderr)
    if "family of bags" in names:
        assert "index of input takes value 64 which is not in the valid range [0, 64) (in _emb" in done.stdout
    assert "of its targets, cuda:sm_90 needs sm_90, and this GPU is sm_80; cpu;\ncpu\n" in done.stdout


def test_operators_that_a_target_lacks_are_refused_by_name(tmp_path: Path) -> None:
    def factor(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x).R.relu()

    with pytest.raises(UnsupportedError, match=r"aten\.linalg_qr\.default \(in forward, opencl:cpu\); .*forward, cpu"):
        flambeau.export(factor, (torch.eye(3),), tmp_path / "f.flam", targets=["opencl:cpu", "cpu"])

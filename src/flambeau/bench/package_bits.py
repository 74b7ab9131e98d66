"""Whether packages give the results of the compiler, in processes that have neither torch nor Triton nor a compiler.

    measure_bits(["gpt", "scans"], "tiny", "cuda")      # rows of `flambeau bench package-results`

The cases are models of the suite with batches that are run-time sizes, and small models of families that packages must
support: normalisation, bags, sampling and pooling, scans, attention, convolution.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim

import flambeau
from flambeau.bench import harness
from flambeau.bench.harness import Row
from flambeau.bench.models import SUITE
from flambeau.package.export import export
from flambeau.torch_compat.dynamo import maybe_mark_dynamic

F = nn.functional
Inputs = tuple[torch.Tensor, ...]
# The targets of the compiler to compare with: the same kernels, and no library.
COMPILED = {"cpu": "cpu-alone", "cuda": "cuda-alone", "opencl": "opencl"}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of as many bytes
EXPORTED = {"cpu": "cpu", "opencl": "opencl:cpu"}


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.gelu(self.norm(x))
        return {"soft": torch.softmax(y, -1), "sum": y.sum(0), "best": y.argmax(-1)}


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(64, 24, mode="mean")
        self.table = nn.Embedding(64, 24)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bag(ids, offsets) + self.table(ids[:1])
        return found


class Sampling(nn.Module):
    """Sampling and pooling; the height is known only at run time."""

    def forward(self, image: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = F.grid_sample(image, grid, align_corners=False)
        best, where = F.max_pool2d(F.avg_pool2d(found, 2), 2, return_indices=True)
        return best, where, F.adaptive_avg_pool2d(found, 3)


class Scans(nn.Module):
    """Scans; rows and their length are known only at run time."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.cumsum(-1), x.cumprod(0), *x.cummax(-1), x.logcumsumexp(-1)


class Attention(nn.Module):
    """A layer of a transformer; the length is known only at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.RMSNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return found


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.relu(self.norm(self.conv(image)))
        best, where = self.head(y.mean((2, 3))).topk(2)
        return best, where


def batch(name: str, **more: int) -> dict[int, Dim]:
    return {0: Dim(name, **more)}


# The model's constructor, its arguments for a number, and which of their sizes are run-time sizes.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs], dict[str, dict[int, Any]]]] = {
    "norms": (Norms, lambda n: (torch.randn(n, 48),), {"x": batch("N", min=2, max=512)}),
    "bags": (Bags, lambda n: (torch.randint(0, 64, (4 * n,)), torch.arange(0, 4 * n, 4)),
             {"ids": batch("ids"), "offsets": batch("bags")}),
    "sampling": (Sampling, lambda n: (torch.randn(n, 3, 16, 16), torch.rand(n, 4 * n, 16, 2) * 2.2 - 1.1),
                 {"image": batch("N"), "grid": {**batch("N"), 1: 4 * Dim("h", min=2, max=16)}}),
    "scans": (Scans, lambda n: (torch.randn(n, 7 * n),), {"x": {**batch("N"), 1: Dim("T", max=4096)}}),
    "attention": (Attention, lambda n: (torch.randn(2, n, 32),), {"x": {1: Dim("T", min=2, max=256)}}),
    "images": (Images, lambda n: (torch.randn(n, 3, 12, 12),), {"image": batch("N")}),
}


@dataclass(frozen=True)
class Case:
    """A model, inputs of several sizes, and which of their sizes differ."""

    model: nn.Module
    draws: list[Inputs]
    shapes: tuple[dict[int, Any], ...]


def of_suite(name: str, size: str) -> Case:
    """Returns a model of the suite; sizes that depend on the batch are run-time sizes."""
    built = SUITE[name].build(size)
    draws = [tuple(built.make_inputs(batch=n, seed=n)[:-1]) for n in (4, 3, 5)]
    shapes = tuple({k: Dim.AUTO for k, (m, n) in enumerate(zip(x.shape, y.shape)) if m != n}
                   for x, y in zip(*draws[:2]))
    return Case(built.module.eval(), draws, shapes)


def of_family(name: str) -> Case:
    make, args, shapes = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Case(make().eval(), [args(n) for n in (5, 6, 8)], tuple(shapes.values()))


def leaves(x: Any) -> list[torch.Tensor]:
    if isinstance(x, dict):
        return [y for v in x.values() for y in leaves(v)]
    return [y for v in x for y in leaves(v)] if isinstance(x, list | tuple) else [x]


# ---- in a separate process -------------------------------------------------------------------------------------------

ALONE = """
import json, sys, time
for name in sys.argv[3].split(","): sys.modules[name] = None
import numpy, flambeau
start = time.perf_counter()
module = flambeau.load(sys.argv[1], sys.argv[4])
took, method = [time.perf_counter() - start], module.load_method("forward")
for k in range(int(sys.argv[5])):
    given = dict(numpy.load(f"{sys.argv[2]}/given{k}.npz")).values()
    start = time.perf_counter()
    found = method.run(list(given))
    took.append(time.perf_counter() - start)
    numpy.savez(f"{sys.argv[2]}/found{k}.npz", *found)
print(json.dumps({"device": module.device, "seconds": took}))
"""


def run_alone(package: Path, draws: Sequence[Inputs], folder: Path, target: str) -> tuple[list[list[Any]], list[float]]:
    """Returns the results of a package for each draw, computed in a process with NumPy but without torch, Triton and
    programs to run; and the seconds of loading it and of each call."""
    # PyOpenCL brings the OpenCL library along.
    blocked = ["torch", "triton", *(["pyopencl"] if target != "opencl" else [])]
    programs = folder / "programs"
    programs.mkdir()
    paths, more = [str(Path(flambeau.__file__).parents[1])], dict[str, str]()
    if target == "opencl":  # PoCL, a driver, links what it compiles
        if linker := shutil.which("ld"):
            (programs / "ld").symlink_to(linker)
        if (there := find_spec("pyopencl")) and there.origin:
            paths.append(str(Path(there.origin).parents[1]))
        more = {k: v for k, v in os.environ.items() if k.startswith(("OCL_", "POCL_"))}
    for k, draw in enumerate(draws):
        np.savez(folder / f"given{k}.npz", *(x.detach().numpy() for x in draw))
    done = subprocess.run([sys.executable, "-c", ALONE, str(package), str(folder), ",".join(blocked), target,
                           str(len(draws))], capture_output=True, text=True, check=False, env={
                               **more, "PATH": str(programs), "PYTHONPATH": os.pathsep.join(paths), "HOME": "/nowhere",
                               "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
                               "OMP_NUM_THREADS": str(torch.get_num_threads())})
    if done.returncode:
        raise RuntimeError(f"a process of its own failed: {done.stderr.strip()[-500:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["device"] == target
    return [list(dict(np.load(folder / f"found{k}.npz")).values()) for k in range(len(draws))], said["seconds"]


# ---- compared with the compiler --------------------------------------------------------------------------------------


def exported_target(target: str) -> str:
    if target == "cuda":
        return "cuda:sm_{}{}".format(*torch.cuda.get_device_capability())
    return EXPORTED[target]


def compiled_results(case: Case, target: str) -> list[list[torch.Tensor]]:
    """Returns the results of torch.compile, with the same run-time sizes, on the CPU."""
    device = "cuda" if target == "cuda" else "cpu"
    torch.compiler.reset()
    model, found = copy.deepcopy(case.model).to(device), []
    # "own": products and attention without a choice by timing, which may round differently.
    compiled = torch.compile(model, backend="flambeau", options={"target": COMPILED[target], "contractions": "own"})
    for draw in case.draws:
        there = [x.to(device, copy=True) for x in draw]
        for x, dims in zip(there, case.shapes):
            maybe_mark_dynamic(x, list(dims))
        with torch.no_grad():
            found.append([x.cpu() for x in leaves(compiled(*there))])
    return found


def floats(results: Sequence[torch.Tensor]) -> harness.Results:
    return {str(k): x for k, x in enumerate(results) if x.is_floating_point()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; NaNs count as equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.contiguous().view(WORDS[t.itemsize]) for t in (a, b))
    return bool(((x == y) | ((a != a) & (b != b))).all())


def double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def bits(case: Case, target: str, row: Row) -> Row:
    """Measures for each draw how many results differ from the compiler's in any bit, and how far they are from
    eager's."""
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as name:
        folder = Path(name)
        export(case.model, case.draws[0], folder / "model.flam", dynamic_shapes=case.shapes,
               targets=[exported_target(target)], debug=False)
        ours, (load, *_) = run_alone(folder / "model.flam", case.draws, folder, target)
    row.seconds["load"] = load
    exact: Callable[..., Any] = copy.deepcopy(case.model).double()
    row.accuracy["package"] = []
    with torch.no_grad():
        for draw, found, expected in zip(case.draws, ours, compiled_results(case, target), strict=True):
            results = [torch.from_numpy(x) for x in found]
            unequal = sum(not same_bits(a, b) for a, b in zip(results, expected, strict=True))
            worst = harness.differences(*map(floats, (results, leaves(case.model(*draw)),
                                                      leaves(exact(*map(double, draw))))))
            row.accuracy["package"].append({"results": len(results), "unequal": unequal, **worst})
    return row


def cases(size: str) -> Mapping[str, Callable[[], Case]]:
    """Returns models of the suite, and of families."""
    return {name: partial(of_suite, name, size) for name in SUITE} | {
        f"family of {name}": partial(of_family, name) for name in FAMILIES}


def measured_bits(name: str, size: str, target: str) -> Row:
    row = Row(name, "bits", target)
    try:
        return bits(cases(size)[name](), target, row)
    except Exception as error:  # a failure is a result to report, not the end of the run
        row.errors["package"] = harness.message(error)
        return row


def measure_bits(names: Sequence[str], size: str, target: str, jobs: int = 1) -> Iterator[Row]:
    yield from side_by_side(partial(measured_bits, size=size, target=target), names, jobs)


def side_by_side(function: Callable[[str], Row], names: Sequence[str], jobs: int) -> Iterator[Row]:
    """Yields the rows of all names, computed by `jobs` processes at a time: one process for each name, which may
    crash."""
    if jobs == 1 or len(names) < 2:
        yield from map(function, names)
        return
    with ThreadPoolExecutor(jobs) as pool:
        for found in as_completed([pool.submit(in_a_process, function, name) for name in names]):
            yield found.result()


def in_a_process(function: Callable[[str], Row], name: str) -> Row:
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(function, name).result()
    except BrokenProcessPool as error:
        return Row(name, "", "", errors={"process": harness.message(error)})

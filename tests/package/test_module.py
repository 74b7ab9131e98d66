"""A loaded package: its methods, its errors, threads, weights, and damaged files; in Python and in C."""

from __future__ import annotations

import importlib.util
import io
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import uvicorn
from torch import nn
from torch.export import Dim

import flambeau
from flambeau.package import container
from flambeau.package.client import PackageError
from flambeau.package.container import MAJOR, MINOR, NewerPackage
from flambeau.package.machine_code import FILES, RUNTIME, build_runtime

HERE = Path(__file__).parent


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.hardswish(x) * self.weight


class Small(nn.Module):
    """A model with two methods, a state, an index to check, and a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.table = nn.Embedding(10, 8)
        self.register_buffer("cache", torch.zeros(3, 8))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.linear(image).relu()

    def look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.table(ids)
        self.cache.add_(found)
        return found, self.cache.sum()


@pytest.fixture(scope="module")
def model() -> Small:
    torch.manual_seed(1)
    return Small().eval()


@pytest.fixture(scope="module")
def path(model: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("package") / "small.flam"
    flambeau.export(model, (torch.randn(4, 8),), found, dynamic_shapes={"image": {0: Dim("N", min=2, max=64)}},
                    methods={"look_up": (model.look_up, (torch.arange(3),))}, metadata={"author": "us"})
    return found


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("package") / "scaled.flam"
    flambeau.export(Scaled(), (torch.randn(64),), found, debug=False)
    return found


def test_methods_states_and_metadata(path: Path, model: Small) -> None:
    module = flambeau.load(path)
    assert module.method_names == ["forward", "look_up"] and module.metadata["author"] == "us"
    assert {"linear.weight", "linear.bias", "table.weight", "cache"} <= set(module.weights)
    x = np.random.default_rng(0).standard_normal((5, 8), dtype=np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(module(x), model(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6)
    module.set_input(x, "image")
    first, = module.execute()
    assert np.array_equal(first, module.get_output(0)) and np.array_equal(first, module.forward(image=x))
    module.set_inputs([2 * x])
    assert np.array_equal(module.execute()[0], module.forward(2 * x))
    for call, message in ((lambda: module.set_input(x, 1), "has no input 1: its inputs are image"),
                          (lambda: module.set_inputs([x, x]), "has no input 1"),
                          (lambda: module.get_output(1), "has 1 outputs, asked for number 1"),
                          (lambda: module.get_outputs("look_up"), "'look_up' was not executed in this thread")):
        with pytest.raises(PackageError, match=message):
            call()
    ids = np.array([1, 2, 1])
    for times in (1, 2):
        rows, total = module.load_method("look_up")(ids)
        assert np.array_equal(rows, model.table.weight.detach().numpy()[ids])
        np.testing.assert_allclose(total, times * rows.sum(), rtol=1e-4)
    with pytest.raises(PackageError, match="has no method 'backward': it has forward, look_up"):
        module.load_method("backward")
    with pytest.raises(PackageError, match=r"index 10 is out of bounds for dimension 0 with size 10 \(in .*embedding"):
        module.look_up(np.array([1, 10, 2]))
    module.unload()
    with pytest.raises(PackageError, match="was unloaded"):
        module(x)


ONES = np.ones((4, 8), np.float32)
EXPECTED = r"input 'image': expected float32 \[2..64, 8\] contiguous, got "


@pytest.mark.parametrize(("given", "message"), [
    ((ONES.astype(np.float16),), EXPECTED + r"float16 \[4, 8\]"),
    ((ONES[None],), EXPECTED + r"float32 \[1, 4, 8\]"),
    ((ONES[:, :7].copy(),), EXPECTED + r"float32 \[4, 7\]"),
    ((ONES[:1],), EXPECTED + r"float32 \[1, 8\]"),
    ((np.ones((65, 8), np.float32),), EXPECTED + r"float32 \[65, 8\]"),
    ((np.ones((8, 4), np.float32).T,), EXPECTED + r"float32 \[4, 8\] with strides \[1, 4\]"),
    ((np.ones((4, 16), np.float32)[:, ::2],), EXPECTED + r"float32 \[4, 8\] with strides \[16, 2\]"),
    ((ONES, ONES), r"method 'forward' takes 1 inputs, got 2: they are image \(float32 \[2..64, 8\] contiguous\)"),
    ((), r"method 'forward': input 'image' is missing: expected float32 \[2..64, 8\] contiguous"),
])
def test_wrong_inputs_are_refused_by_name(path: Path, given: tuple, message: str) -> None:
    with flambeau.load(path) as module, pytest.raises(PackageError, match=message):
        module.forward(*given)


def test_weights_change_at_once(scaled: Path, tmp_path: Path) -> None:
    module = flambeau.load(scaled)
    x = np.full(64, 4, np.float32)
    wrong: list[np.ndarray] = []
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            y = module(x)
            if len(set(y.tolist())) != 1:
                wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for t in threads:
        t.start()
    for k in (2, 3) * 50:
        module.update_weights({"weight": np.full(64, k, np.float32)})
    done.set()
    for t in threads:
        t.join()
    assert not wrong and module(x)[0] == 12
    with pytest.raises(PackageError, match="has no weight 'wieght'"):
        module.update_weights({"wieght": x})
    with pytest.raises(PackageError, match=r"weight 'weight': expected float32 \[64\].*, got float32 \[63\]"):
        module.update_weights({"weight": x[:63]})
    section = next(s for s in container.read(scaled) if s.kind == container.WEIGHTS)
    (tmp_path / "w.safetensors").write_bytes(section.data)  # the section itself has the format of such a file
    module.update_weights(tmp_path / "w.safetensors")
    assert module(x)[0] == 4


def test_a_process_without_torch_and_compiler_loads_it(scaled: Path) -> None:
    text = ("import sys, numpy; sys.modules['torch'] = None; import flambeau;"
            f"print(flambeau.load({str(scaled)!r}).forward(numpy.full(64, 4, 'float32'))[0])")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True,
                          env={"PATH": "", "PYTHONPATH": str(Path(flambeau.__file__).parents[1]), "HOME": "/nowhere"})
    assert done.stdout == "4.0\n", done.stderr


# ---- files -------------------------------------------------------------------------------------------------


def test_a_newer_format_is_refused_by_name(scaled: Path, tmp_path: Path) -> None:
    data = bytearray(scaled.read_bytes())
    data[8] = 2
    (tmp_path / "new.flam").write_bytes(data)
    with pytest.raises(NewerPackage, match=rf"has format 2\.{MINOR}, and this version reads up to 1"):
        flambeau.load(tmp_path / "new.flam")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the files were made on x86-64")
def test_files_of_every_version_are_read() -> None:
    assert MAJOR == 1
    for minor in range(MINOR + 1):  # each new version adds a file
        file = HERE / "fixtures" / f"format-1.{minor}.flam"
        with flambeau.load(file) as module:
            for times in (1, 2):
                y, count = module(np.full((2, 4), 4, np.float32))
                assert y.tolist() == [[0, 4, 8, 12]] * 2 and count == times
            if minor >= 3:  # an operator that is left to torch
                assert module.trace(np.eye(3, dtype=np.float32)) == 3
            if minor >= 4:  # names of arguments and of tied weights, results of any nesting
                a, b = np.ones((3, 4), np.float32), np.full((3, 4), 2, np.float32)
                module.update_weights({"same": np.arange(4, dtype=np.float32)})
                found = module.named({"b": b, "a": a}, 2)
                assert found.keys() == {0, "rows"} and found["rows"] == 3 and found[0].tolist() == [[0, 2, 4, 6]] * 3


def test_server_with_batches_and_new_weights(path: Path, model: Small, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("serve", HERE.parents[1] / "examples" / "package" / "serve.py")
    assert spec is not None and spec.loader is not None
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    server = uvicorn.Server(uvicorn.Config(serve.application(str(path)), log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    serving.start()

    def post(where: str, body: bytes) -> bytes:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{where}"
        return urllib.request.urlopen(address, body, timeout=60).read()

    def forward(x: np.ndarray) -> np.ndarray:
        body = io.BytesIO()
        np.save(body, x)
        return np.load(io.BytesIO(post("forward", body.getvalue())))

    with ThreadPoolExecutor(8) as pool:
        given = [np.full((2, 8), k, np.float32) for k in range(16)]
        wrong = pool.submit(forward, np.zeros((2, 9), np.float32))  # among others that are right
        found = list(pool.map(forward, given))
    for x, y in zip(given, found):
        np.testing.assert_allclose(y, model(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        wrong.result()
    assert b"expected float32" in refused.value.read()
    # Weights change during calls: each result is that of the old or of the new weights.
    once = next(bytes(s.data) for s in container.read(path) if s.kind == container.WEIGHTS)
    header = 8 + int.from_bytes(once[:8], "little")
    twice = once[:header] + (2 * np.frombuffer(once[header:], np.float32)).tobytes()
    x = np.full((2, 8), 3, np.float32)
    y = forward(x)
    assert np.any(y)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for weights in (twice, once):
                post("weights", weights)

    swapper = threading.Thread(target=swap)
    swapper.start()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(forward, [x] * 200))
    done.set()
    swapper.join()
    which = [[np.array_equal(z, y), np.array_equal(z, 2 * y)] for z in found]
    assert all(map(any, which)) and all(map(any, zip(*which)))
    assert np.array_equal(forward(x), y)
    server.should_exit = True
    serving.join(60)
    assert not serving.is_alive()


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_and_forged_files_are_refused_in_python(path: Path, tmp_path: Path, count: int) -> None:
    """With a runtime that was built under AddressSanitizer."""
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("gcc has no sanitizers here")
    runtime = tmp_path / "runtime.so"
    runtime.write_bytes(build_runtime(flags=("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g",
                                             "-O1")))
    seed = random.SystemRandom().randrange(1 << 30)
    done = subprocess.run(
        [sys.executable, str(HERE / "damage.py"), str(path), str(count), str(seed), str(runtime)], capture_output=True,
        text=True, env={**os.environ, "LD_PRELOAD": found,  # leaks are not checked, as Python itself has some
                        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"})
    assert done.returncode == 0 and done.stdout.startswith(f"{count} files"), (
        f"seed {seed}\n{done.stdout}{done.stderr[-4000:]}")


def compiled(tmp_path: Path, *flags: str) -> Path:
    """Compiles the stress test together with the runtime's sources."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    out = tmp_path / "stress"
    made = subprocess.run(["gcc", "-std=gnu11", "-g", "-O1", *flags, f"-I{RUNTIME}", str(HERE / "stress.c"),
                           *(str(RUNTIME / name) for name in FILES), "-pthread", "-ldl", "-lm", "-o", str(out)],
                          capture_output=True, text=True)
    if "cannot find" in made.stderr:
        pytest.skip("gcc has no sanitizers here")
    assert made.returncode == 0, made.stderr
    return out


CPP = """
#include <cstdio>
#include "flambeau.hpp"

int main(int, char** argv) {
  flambeau::Module module(argv[1]);
  std::vector<float> ones(64, 1), threes(64, 3);
  const flam_tensor x{ones.data(), FLAM_FLOAT32, 1, {64}, {1}};
  std::printf("%g\\n", module.forward({x})[0].as<float>()[63]);
  module.update_weights({"weight"}, {{threes.data(), FLAM_FLOAT32, 1, {64}, {1}}});
  std::printf("%g\\n", module.forward({x})[0].as<float>()[0]);
  try {
    module.forward({{ones.data(), FLAM_FLOAT32, 2, {8, 8}, {8, 1}}});
  } catch (const flambeau::Error& e) {
    std::puts(e.what());
  }
  try {
    module.execute("backward", {x});
    std::puts("it has such a method");
  } catch (const flambeau::Error&) {
  }
}
"""


@pytest.mark.parametrize(("threads", "calls", "files"), [
    (16, 800, 120), pytest.param(64, 10_048, 10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_that_load_run_and_swap_weights(scaled: Path, tmp_path: Path, sanitizer: str, threads: int, calls: int,
                                                files: int) -> None:
    out = compiled(tmp_path, f"-fsanitize={sanitizer}")
    done = subprocess.run([str(out), "threads", str(scaled), str(threads), str(calls)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{calls} calls, 0 wrong\n", done.stdout + done.stderr[-3000:]
    if sanitizer != "thread":
        seed = str(random.SystemRandom().randrange(1 << 30))
        done = subprocess.run([str(out), "damage", str(scaled), str(files), seed], capture_output=True, text=True)
        assert done.returncode == 0 and "0 accepted" in done.stdout, seed + done.stdout + done.stderr[-3000:]


def test_sizes(scaled: Path, tmp_path: Path) -> None:
    """A package of one operator with its runtime, and what the runtime and the kernels need of a system."""
    sections = {s.kind: s for s in container.read(scaled)}
    assert scaled.stat().st_size <= 80_000
    library = tmp_path / "runtime.so"
    library.write_bytes(sections[container.RUNTIME].data)
    text = int(subprocess.run(["size", str(library)], capture_output=True, text=True).stdout.splitlines()[1].split()[0])
    assert text <= 50_000
    for kind in (container.RUNTIME, container.CODE):
        library.write_bytes(sections[kind].data)
        needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True).stdout
        names = {x.split("[")[1].split(".")[0] for x in needed.splitlines() if "NEEDED" in x}
        assert names <= {"libc", "libm", "libpthread"}


def test_c_and_cpp_clients(scaled: Path, tmp_path: Path) -> None:
    example = HERE.parents[1] / "examples" / "package" / "run.c"
    out = tmp_path / "run"
    subprocess.run(["gcc", f"-I{RUNTIME}", str(example), *(str(RUNTIME / name) for name in FILES), "-pthread", "-ldl",
                    "-lm", "-o", str(out)], check=True)
    assert subprocess.run([str(out), str(scaled), "64"], capture_output=True, text=True).stdout == "0.666667\n"
    refused = subprocess.run([str(out), str(scaled), "8", "8"], capture_output=True, text=True)
    assert refused.stderr == "input 'x': expected float32 [64] contiguous, got float32 [8, 8]\n"
    objects = [f"{tmp_path}/{Path(name).stem}.o" for name in FILES]
    for name, to in zip(FILES, objects):
        subprocess.run(["gcc", "-c", f"-I{RUNTIME}", str(RUNTIME / name), "-o", to], check=True)
    client = tmp_path / "client.cpp"
    client.write_text(CPP)
    subprocess.run(["g++", "-std=c++17", f"-I{RUNTIME}", str(client), *objects, "-pthread", "-ldl", "-lm", "-o",
                    str(out)], check=True)
    assert subprocess.run([str(out), str(scaled)], capture_output=True, text=True).stdout == (
        "0.666667\n2\ninput 'x': expected float32 [64] contiguous, got float32 [8, 8]\n")

"""Machine code for NVIDIA GPUs, built on machines without one: in worker processes, once, with helpful errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.capture.decompositions import table
from flambeau.capture.graph import capture
from flambeau.codegen.source import BlockSource, Part
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.runtime.placement import graph_device
from flambeau.schedule.plan import schedule
from flambeau.targets.cuda import triton_compile
from flambeau.targets.cuda.target import CudaTarget
from flambeau.targets.cuda.triton_compile import Code, Facts, TritonCompiler, Workers

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ARCH = 90
TEXT = """
import triton
import triton.language as tl
import tritonlib as fl

@triton.jit
def scaled(p0, p1, n0, bad):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    m = i < n0
    x = tl.load(p0 + i, m)
    tl.store(bad + tl.zeros_like(i), 1, m & (x < 0))
    tl.store(p1 + i, fl.exp(x) * FACTOR, m)
"""


def source(factor: float = 2.0, warps: int = 4) -> BlockSource:
    return BlockSource("scaled", TEXT.replace("FACTOR", str(factor)), ("*fp32", "*fp32"), ("i64",),
                       (Part("scaled", "(n0 + 1023) // 1024", warps),))


def built(compiler: TritonCompiler, s: BlockSource, facts: Facts = Facts()) -> Code | CompileError:  # noqa: B008
    return compiler.compile(s, s.parts[0], facts, ARCH).result(timeout=120)


@pytest.fixture(scope="module")
def compiler() -> TritonCompiler:
    return TritonCompiler()


@pytest.fixture
def fresh(tmp_path: Path, compiler: TritonCompiler) -> Any:
    """A cache folder of the test's own; the worker processes are shared by all tests."""
    tmp_path.chmod(0o700)
    with config.override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"


def test_code_for_a_machine_that_is_not_here(compiler: TritonCompiler) -> None:
    code = built(compiler, source(warps=8))
    assert isinstance(code, Code)
    assert (code.name, code.warps, code.scratch) == ("scaled", 8, 0) and code.code.startswith(b"\x7fELF")
    assert built(compiler, source(warps=8)) is code


def test_code_depends_on_what_it_may_assume(compiler: TritonCompiler) -> None:
    """Only where pointers and the size are divisible by 16 can a thread move 16 bytes at once."""
    facts = [Facts(False, 0), Facts(True, 0), Facts(False, 1), Facts(True, 1)]
    codes = [built(compiler, source(3.0), f) for f in facts]
    assert all(isinstance(c, Code) for c in codes) and len({c.code for c in codes}) >= 2


CHILD = """
import json, sys
from flambeau.codegen.source import BlockSource, Part
from flambeau.targets.cuda.triton_compile import Facts, TritonCompiler, Workers

workers = []
new = Workers._new
Workers._new = lambda self: workers.append(new(self)) or workers[-1]
s = BlockSource("scaled", sys.argv[1], ("*fp32", "*fp32"), ("i64",), (Part("scaled", "1"),))
code = TritonCompiler().compile(s, s.parts[0], Facts(), 90).result()
print(json.dumps([len(code.code), [w.process.pid for w in workers], "triton" in sys.modules, "torch" in sys.modules]))
"""


def child(cache: Path, s: BlockSource) -> tuple[int, list[int], bool, bool]:
    """The length of the code, the processes that compiled it, and whether Triton and torch were imported."""
    done = subprocess.run([sys.executable, "-c", CHILD, s.text], env={**os.environ, "FLAMBEAU_CACHE_DIR": str(cache)},
                          check=True, capture_output=True, text=True, timeout=120)
    length, workers, triton, torch_ = json.loads(done.stdout)
    return length, workers, triton, torch_


def test_a_second_process_compiles_nothing_and_imports_no_triton(fresh: Path) -> None:
    length, workers, *imported = child(fresh, source(5.0))
    assert len(workers) == 1 and imported == [False, False]
    assert child(fresh, source(5.0)) == (length, [], False, False)


def test_text_that_does_not_compile_is_its_kernels_error(fresh: Path, compiler: TritonCompiler) -> None:
    for factor in ("nonsense", "tl.sum(x)[3]"):
        error = built(compiler, source(factor))  # type: ignore[arg-type]
        assert isinstance(error, CompileError)
        assert "scaled" in str(error) and "Error" in error.message and error.hint and "source is in" in error.hint
    assert isinstance(built(compiler, source(6.0)), Code)


def test_a_worker_that_was_killed_is_replaced(fresh: Path) -> None:
    compiler = TritonCompiler()
    with config.override(compile_jobs=1):
        assert isinstance(built(compiler, source(7.0)), Code)
        (workers,) = compiler._pools.values()
        worker = workers._idle.get()
        workers._idle.put(worker)
        worker.kill()
        assert isinstance(built(compiler, source(8.0)), Code)


def test_workers_end_with_their_process(fresh: Path) -> None:
    _, (pid,), *_ = child(fresh, source(9.0))
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"the worker {pid} is still there")


def test_without_triton_the_way_out_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compile, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"flambeau\[cuda\]"):
        built(TritonCompiler(), source(10.0))


def test_workers_start_in_advance(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(Workers, "_new", lambda self: started.append(self))
    with config.override(compile_jobs=3):
        TritonCompiler().prepare()
    assert len(started) == 3


SHARES = """
import triton
import triton.language as tl

@triton.jit
def shares(p0, n0, bad):
    i = tl.program_id(0) % 19 * 2 + tl.arange(0, 2)[:, None]
    at = tl.arange(0, 64)[None, :]
    tl.store(p0 + 64 * i + at, at + (167 * i + 7) // 38 - (167 * i + 3) // 38)
"""


def test_machine_code_has_no_packed_sums(compiler: TritonCompiler, tmp_path: Path) -> None:
    """LLVM adds 3 and 7 to an index below 2^16 in one instruction. ptxas makes additions of 0 of it."""
    s = BlockSource("shares", SHARES, ("*i32",), ("i64",), (Part("shares", "19"),))
    code = built(compiler, s)
    assert isinstance(code, Code), str(code)
    assert "IMAD" in machine_text(code, tmp_path) and "VIADD.16x2" not in machine_text(code, tmp_path)


def machine_text(code: Code, folder: Path) -> str:
    """Disassembles machine code, with the tool that comes with Triton."""
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    (path := folder / "code").write_bytes(code.code)
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, path], check=True, capture_output=True, text=True, timeout=60).stdout


def test_code_made_otherwise_is_not_found_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A repair of the compiler also reaches kernels that are in a cache already."""
    before = triton_compile.identity()
    (changed := tmp_path / "worker.py").write_text(triton_compile.WORKER.read_text() + "# otherwise")
    monkeypatch.setattr(triton_compile, "WORKER", changed)
    repaired = triton_compile.identity.__wrapped__()
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert len({before, repaired, triton_compile.identity.__wrapped__()}) == 3


# ---- from graphs of tensors that are not there -----------------------------------------------------------


def kernels(f: Any, *shapes: tuple[int, ...], deterministic: bool = False) -> list[BlockSource]:
    """The kernels of a function of float32 tensors on a GPU, as the pipeline renders them."""
    target = CudaTarget(arch=ARCH)
    caps = replace(target.capabilities(), deterministic=deterministic)
    with FakeTensorMode():
        inputs = [torch.empty(s, device="cuda") for s in shapes]
        gm = make_fx(lambda *args: [f(*args)], decomposition_table=table(False))(*inputs)
    device = graph_device(gm)
    assert device == torch.device("cuda", 0)
    with unset_fake_temporarily():
        captured = capture(gm, caps, device=device)
    program = schedule(captured.graph, caps, True)
    return [target.render(k, f"k{i}") for i, k in enumerate(program.kernels)]


def indices(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64, device="cuda")


FUNCTIONS = {
    "map": (lambda x, y: (x * y).tanh() + 1, (33, 65), (65,)),
    "softmax": (lambda x: x.softmax(-1), (33, 65)),
    "column": (lambda x: x.sum(0), (33, 65)),
    "scan": (lambda x: x.cumsum(1), (33, 65)),
    "scatter": (lambda x, y: x.index_add(0, indices(8), y), (33, 16), (8, 16)),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5), (33, 65)),
}


def many(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x * y).sum(1) for y in others])


def test_rows_of_many_tensors_fit_into_shared_memory(compiler: TritonCompiler) -> None:
    k = next(k for k in kernels(many, *[(2048, 1 << 15)] * 20) if k.text.count("tl.load") == 20)
    assert "for base0" in k.text  # rows in pieces, several of which are loaded at the same time
    code = built(compiler, k)
    assert isinstance(code, Code), str(code)
    assert code.shared <= 227 << 10  # the limit for a program on that chip


ORDERED = {
    "sum by row": (lambda x, y: x.index_add(0, indices(2000), y), (33, 16), (2000, 16)),
    "sum by element": (lambda x, y: x.scatter_add(1, indices(9, 8), y), (9, 16), (9, 8)),
    "last by row": (lambda x, y: x.index_copy(0, indices(8), y), (33, 16), (8, 16)),
    "scan of one row": (lambda x: x.logcumsumexp(0), (100_000,)),
    "sum of one row": (lambda x: x.cumsum(0), (100_003,)),
    "scan of few columns": (lambda x: x.cumsum(0), (5000, 40)),
    "sampling": (lambda g, x, at: torch.ops.aten.grid_sampler_2d_backward(g, x, at, 0, 0, False, (True, False))[0],
                 (2, 64, 9, 9), (2, 64, 9, 9), (2, 9, 9, 2)),
}


@pytest.mark.parametrize(("name", "deterministic"), [*((n, False) for n in FUNCTIONS), *((n, True) for n in ORDERED)])
def test_kernels_of_every_kind_compile(compiler: TritonCompiler, name: str, deterministic: bool) -> None:
    f, *shapes = (ORDERED if deterministic else FUNCTIONS)[name]
    found = kernels(f, *shapes, deterministic=deterministic)
    assert found
    futures = [compiler.compile(k, part, Facts(), ARCH) for k in found for part in k.parts]
    for future in futures:
        code = future.result(timeout=120)
        assert isinstance(code, Code), str(code)

"""Metal without a Mac: faults that the emulator and the checker find, and the Mac's launcher on the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("clang.cindex", reason="libclang is not installed: pip install libclang")

import torch
import torch.nn.functional as F
from torch import nn

import flambeau
from flambeau import pipeline
from flambeau.bench.models import SUITE
from flambeau.config import config
from flambeau.errors import CompileError, UnsupportedError
from flambeau.targets.base import get_target, register_target
from flambeau.targets.metal import mac
from flambeau.targets.metal.checker import check
from flambeau.targets.metal.emulator.target import EmulatorError
from flambeau.targets.metal.target import MetalTarget
from metal_on_a_mac import losses
from targets.metal_mutants import KINDS, caught, changes_nothing, drawn
from targets.metal_shader import compile_shader
from targets.metal_texts import texts_checked

SUM = """
[[max_total_threads_per_threadgroup(64)]]
kernel void total(device const float* x [[buffer(0)]], device float* out [[buffer(1)]], constant long* n [[buffer(2)]],
                  uint lane [[thread_position_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup float parts[64];
  float mine = 0.0f;
  for (long k = lane; k < n[0]; k += 64) mine += x[group * n[0] + k];
  parts[lane] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint h = 32; h > 0; h /= 2) {
    if (lane < h) parts[lane] += parts[lane + h];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (lane == 0) out[group] = parts[0];
}
"""


def total(text: str = SUM, threads: int = 192, group: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(3, 100), torch.zeros(3)
    compile_shader(text).total(x, out, [100], threads=[threads], group_size=[group])
    return out, x.sum(1)


def test_a_kernel_runs_as_it_is() -> None:
    torch.testing.assert_close(*total())


def test_what_was_written_before_a_barrier_may_be_written_again() -> None:
    """A dead store, not an error: a scan leaves one where a part of its state is what came last."""
    again = "parts[lane] = 0.0f;\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n  parts[lane] = mine;"
    torch.testing.assert_close(*total(SUM.replace("parts[lane] = mine;", again)))


# Changes to a source, and the emulator's message for each.
FAULTS = {
    "no barrier": (("parts[lane] = mine;\n  threadgroup_barrier(mem_flags::mem_threadgroup);", "parts[lane] = mine;"),
                   "uninitialised|race"),
    "divergent barrier": (("parts[lane + h];\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
                           "parts[lane + h];\n    if (lane < 40) threadgroup_barrier(mem_flags::mem_threadgroup);"),
                          "divergent"),
    "a thread that leaves": (("float mine", "if (lane == 63) return;\n  float mine"), "divergent"),
    "one too far": (("k < n[0]", "k <= n[0]"), "out of bounds"),
    "one before": (("x[group * n[0] + k]", "x[group * n[0] + k - 1]"), "out of bounds"),
    "a result too far": (("out[group] =", "out[group + 1] ="), "out of bounds"),
    "threadgroup array too short": (("parts[64]", "parts[63]"), "out of bounds"),
    "beyond an array": (("parts[lane + h]", "parts[lane + h + 32]"), "out of bounds"),
    "nobody wrote": (("parts[lane] = mine;", "if (lane < 50) parts[lane] = mine;"), "uninitialised"),
    "a thread did not write": (
        ("parts[lane] = mine;", "float own[2];\n  own[lane % 2] = mine;\n  parts[lane] = own[0];"),
        "uninitialised: .* of a thread"),
    "threadgroup memory": (("parts[64]", "parts[8193]"), "32772 bytes|32784 bytes"),
    "no limit": (("[[max_total_threads_per_threadgroup(64)]]", ""), "max_total_threads"),
    "limit below the group": (("threadgroup(64)", "threadgroup(32)"), "skipped silently"),
    "all write one result": (("if (lane == 0) out", "out"), "race"),
    "writes what it reads": (("out[group] =", "((device float*)x)[group] ="), "only reads"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_reports(fault: str) -> None:
    (old, new), says = FAULTS[fault]
    assert old in SUM
    with pytest.raises(EmulatorError, match=says):
        total(SUM.replace(old, new))


def test_a_group_beyond_the_limit() -> None:
    with pytest.raises(EmulatorError, match="skipped silently"):
        total(threads=384, group=128)


SIMD = """
#include <metal_stdlib>
using namespace metal;
[[max_total_threads_per_threadgroup(64)]]
kernel void across(device float* x [[buffer(0)]], uint lane [[thread_position_in_threadgroup]]) {
  float v = x[lane];
  BEFORE v = simd_sum(v);
  x[lane] = v + simd_shuffle_xor((float)lane, 1);
}
"""


def test_threads_of_a_simdgroup_are_in_step() -> None:
    x = torch.randn(64)
    ours = x.clone()
    compile_shader(SIMD.replace("BEFORE", "")).across(ours, threads=[64], group_size=[64])
    sums = x.view(2, 32).sum(1, keepdim=True).expand(2, 32).reshape(64)
    torch.testing.assert_close(ours, sums + (torch.arange(64) ^ 1))
    with pytest.raises(EmulatorError, match="divergent"):
        compile_shader(SIMD.replace("BEFORE", "if (lane < 40)")).across(ours, threads=[64], group_size=[64])


def test_what_was_left_does_not_show_in_the_next_launch() -> None:
    x = torch.randn(64)
    sums = x.view(2, 32).sum(1, keepdim=True).expand(2, 32).reshape(64) + (torch.arange(64) ^ 1)
    with pytest.raises(EmulatorError, match="divergent"):
        compile_shader(SIMD.replace("BEFORE", "if (lane >= 40) return;")).across(+x, threads=[64], group_size=[64])
    compile_shader(SIMD.replace("BEFORE", "")).across(x, threads=[64], group_size=[64])
    torch.testing.assert_close(x, sums)


# ---- the checker -----------------------------------------------------------------------------------------

WRONG = {
    "address space": (("parts[lane] = mine;", "device float* p = parts; p[lane] = mine;"), "threadgroup float"),
    "a pointer to nothing": (("float mine = 0.0f;", "float mine = 0.0f; float* p = parts;"), "threadgroup float"),
    "written constant": (("out[group] = ", "x[group] = "), "read-only"),
    "double": (("float mine", "double mine"), "no double"),
    "a literal of a double": (("0.0f", "0.0"), "without an f"),
    "half atomic": (("float mine", "atomic<half> a; float mine"), "incomplete|undefined|explicit|implicit"),
    "no limit": (("[[max_total_threads_per_threadgroup(64)]]", ""), "max_total_threads"),
    "large group": (("threadgroup(64)", "threadgroup(2048)"), "1024"),
    "threadgroup memory": (("parts[64]", "parts[8193]"), "32784"),
    "exceptions": (("float mine", "try { } catch (...) { } float mine"), "no exceptions"),
    "buffer 31": (("[[buffer(2)]]", "[[buffer(31)]]"), "31"),
    "two buffers of one number": (("[[buffer(2)]]", "[[buffer(1)]]"), "buffers"),
    "no address space": (("device float* out", "float* out"), "no address space"),
    "unknown function": (("float mine = 0.0f;", "float mine = erf(0.0f);"), "erf"),
    "a loop beyond an array": (("float mine = 0.0f;", "float mine = 0.0f;\n  float own[3];\n"
                                "  for (int s = 0; s <= 3; ++s) {\n    if (lane < 0) own[s] = 1.0f;\n  }"), "3 elem"),
    "recursion": (("float mine", "total(x, out, n, lane, group); float mine"), "recursion"),
}


def test_the_checker_accepts() -> None:
    assert check(SUM) == [] and check(SIMD.replace("BEFORE", "")) == []


@pytest.mark.parametrize("fault", WRONG)
def test_the_checker_rejects(fault: str) -> None:
    (old, new), says = WRONG[fault]
    assert old in SUM
    with pytest.raises(AssertionError, match=says):
        assert check(SUM.replace(old, new)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_found(kind: str) -> None:
    """Some of those of results/metal-faults.json, which says what was missed of all."""
    missed = [m for m in drawn(kind, 5, seed=1) if not caught(m) and not changes_nothing(m)]
    assert len(missed) <= 1, [*map(str, missed)]


# ---- programs ----------------------------------------------------------------------------------------------


def grids(x: torch.Tensor) -> torch.Tensor:
    grid = torch.stack([x[0, 0], x[0, 1], x[1, 0]], -1)[None].clamp(-1, 1)
    return F.grid_sample(x, grid.expand(2, *grid.shape[1:]), padding_mode="border", align_corners=False)


def bags(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def f(x: torch.Tensor) -> torch.Tensor:
        table, i, at = x.reshape(-1, 5), torch.tensor([3, 1, 4, 1, 5, 9, 2]), torch.tensor([0, 3, 3])
        return F.embedding_bag(i, table, at, mode=mode, per_sample_weights=table[:7, 0] if mode == "sum" else None)

    return f


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grid_sampler_3d": grids, **{f"embedding_bag {mode}": bags(mode) for mode in ("sum", "mean", "max")},
    "running statistics": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    """Against those of a float32 run, and no operator is left to ATen."""
    x = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    f, graphs = GRADIENTS[name], []
    compiled = torch.compile(f, backend="flambeau", options={"target": "metal-emulator"})
    pipeline.OBSERVERS.append(graphs.append)
    try:
        with config.override(graph_cache=False):
            y = compiled(x)
            ours = y, *torch.autograd.grad(y.float().square().sum(), x)
    finally:
        pipeline.OBSERVERS.remove(graphs.append)
    assert graphs and not any(g.captured.externs for g in graphs)
    wide = x.detach().float().requires_grad_()
    y = f(wide)
    how = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(ours, (y, *torch.autograd.grad(y.square().sum(), wide)), strict=True):
        torch.testing.assert_close(a, b.to(dtype), **how)


@pytest.mark.parametrize("length", [100, 3001, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_scans_of_rows_are_those_of_simdgroups(dtype: torch.dtype, length: int) -> None:
    f = lambda x: (x.cumsum(1), *x.cummax(1))  # noqa: E731
    x = torch.randn(3, length).mul(9).to(dtype)
    torch._dynamo.reset()
    with texts_checked() as texts, config.override(graph_cache=False):
        ours = torch.compile(f, backend="flambeau", options={"target": "metal-emulator"}, dynamic=False)(x)
    torch.testing.assert_close(ours, f(x), rtol=1e-3, atol=1e-3)
    assert texts and all("fl_of_one" in t and t.count("_barrier(") <= 4 for t in texts)


def test_what_is_drawn_is_never_zero() -> None:
    draw = torch.compile(lambda x: torch.empty_like(x).exponential_(), backend="flambeau",
                         options={"target": "metal-emulator"})
    x = draw(torch.empty(50000))
    assert (x > 0).all() and abs(x.mean() - 1) < 0.05


def test_numbers_of_the_run_are_read() -> None:
    f = lambda x, a: x * a + x.var(-1, keepdim=True)  # noqa: E731
    compiled = torch.compile(f, backend="flambeau", options={"target": "metal-emulator"}, dynamic=True)
    x = torch.randn(3, 30)
    for a in (2.5, 1e-40, -3.75, 7e300, 0.1, float("inf"), 1.0000000596046448):
        torch.testing.assert_close(compiled(x, a), f(x, a), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_models_train_as_in_eager(name: str) -> None:
    with texts_checked(), config.override(graph_cache=False):
        ours = losses(name, "cpu", True, target="metal-emulator")
    torch.testing.assert_close(ours, losses(name, "cpu", False), rtol=1e-4, atol=1e-6)


# ---- the target for Macs, with the emulator in the Mac's place ---------------------------------------------


class Stand(MetalTarget):
    name = "metal-stand"


register_target(Stand.name, Stand)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    monkeypatch.setattr(mac, "compiler", lambda: compile_shader)
    return lambda f: torch.compile(f, backend="flambeau", options={"target": Stand.name})


def test_the_launcher_trains_a_model(launched: Callable[..., object]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.GELU(), nn.Linear(30, 5))
    x, y = torch.randn(7, 20), torch.randint(5, (7,))
    loss = lambda m: nn.functional.cross_entropy(m(x), y)  # noqa: E731
    ours, eager = (torch.autograd.grad(loss(m), [*model.parameters()]) for m in (launched(model), model))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_launcher_draws_views_and_reports(launched: Callable[..., object]) -> None:
    f = launched(lambda x, i: (torch.dropout(x, 0.5, True), x[i], x.cumsum(0).t() @ x))
    x = torch.randn(40, 30)[5:, 3:]
    dropped, taken, product = f(x, torch.tensor([0, 34]))  # type: ignore[operator]
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    torch.testing.assert_close(taken, x[[0, 34]])
    torch.testing.assert_close(product, x.cumsum(0).t() @ x, rtol=1e-4, atol=1e-4)
    with pytest.raises(IndexError):
        f(x, torch.tensor([0, 35]))  # type: ignore[operator]


def test_the_launcher_serves_eager_operators(launched: Callable[..., object]) -> None:
    x = torch.randn(300, 401)
    with config.override(target=Stand.name), flambeau.accelerate("cpu", only=["cumsum", "softmax"], wait=True):
        ours = [(x.cumsum(1), x.softmax(0)) for _ in range(2)][1]
        used = {row.operator: row.ours for row in flambeau.accelerated() if row.ours}
    assert used == {"aten.cumsum": 2, "aten._softmax": 2}
    torch.testing.assert_close(ours, (x.cumsum(1), x.softmax(0)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on", ["metal-emulator", Stand.name])
def test_more_tensors_than_buffers(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac, "compiler", lambda: compile_shader)
    f = lambda *x: sum(a * k for k, a in enumerate(x))  # noqa: E731
    x = [torch.randn(70) for _ in range(40)]
    with texts_checked() as texts, config.override(graph_cache=False):
        torch.testing.assert_close(torch.compile(f, backend="flambeau", options={"target": on})(*x), f(*x))
    assert any("fl_more" in text for text in texts)


def test_without_a_mac() -> None:
    target = get_target("metal")
    assert target.capabilities().dtypes >= {torch.float32, torch.bfloat16} and target.name == "mps"
    if not torch.backends.mps.is_available():
        with pytest.raises(UnsupportedError, match="no Mac") as error:
            target.build([])
        assert "metal-emulator" in str(error.value.hint)


def test_a_text_that_does_not_compile() -> None:
    with pytest.raises(CompileError):
        compile_shader(SUM.replace("mine += ", "yours += "))

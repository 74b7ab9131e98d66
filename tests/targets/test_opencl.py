"""OpenCL as a target: devices, memory, programs and their cache, from single launches to whole models."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

import torch
import torch.nn.functional as F
from torch import nn

from flambeau.codegen.source import Range, RangeSource
from flambeau.errors import CompileError, UnsupportedError
from flambeau.ir.dtypes import SUPPORTED
from flambeau.targets.base import get_target, register_target
from flambeau.targets.cache import DiskCache
from flambeau.targets.opencl import pocl
from flambeau.targets.opencl.compile import ClCompiler, library
from flambeau.targets.opencl.device import ClDevice, devices, host_device
from flambeau.targets.opencl.memory import ALIGNMENT, HostMemory, Span, merged
from flambeau.targets.opencl.target import OpenClTarget
from opencl_forms import FORMS, POINTS, THREADS
from small_models import MODELS as SMALL
from small_models import gradients

form = pytest.mark.parametrize("on", FORMS)


def source(body: str, pointers: int = 2, kind: str = "float", name: str = "k", group: int = 64) -> RangeSource:
    """A kernel over n0 points: `x` is loaded from p0, `y` is stored to the last pointer."""
    head = "".join(f"__global {kind}* p{k}, const long o{k}, " for k in range(pointers))
    text = f"""
__kernel __attribute__((reqd_work_group_size({group}, 1, 1)))
void KERNEL_NAME_0({head}const long n0, __global int* faults, const long at) {{
  const long i = get_global_id(0);
  if (i < n0) {{
    const {kind} x = p0[o0 + i];
    {body}
    p{pointers - 1}[o{pointers - 1} + i] = y;
  }}
}}
"""
    size = torch.tensor([], dtype=torch.float32 if kind == "float" else torch.int32).itemsize
    return RangeSource(name, text, (size,) * pointers, (False,) * (pointers - 1) + (True,), (0,) * pointers, 1,
                       (Range("KERNEL_NAME_0", "n0", group),), "faults" in body)


def kernel(body: str, **options: Any) -> Any:
    return get_target(THREADS).build([source(body, **options)]).wait()["k"]


# ---- devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "pinned"), [({}, True), ({"POCL_AFFINITY": "0"}, False),
                                               ({"POCL_MAX_PTHREAD_COUNT": "1"}, False)])
def test_threads_keep_to_a_core(given: dict[str, str], pinned: bool) -> None:
    if len(os.sched_getaffinity(0)) != os.cpu_count() or not host_device().is_pocl:
        pytest.skip("only where PoCL runs in a process that has all cores")
    script = f"""
import os
from flambeau.targets.opencl.device import devices
before = set(os.listdir("/proc/self/task"))
devices()
started = set(os.listdir("/proc/self/task")) - before
cores = [tuple(os.sched_getaffinity(int(t))) for t in started]
assert cores and all(len(c) == (1 if {pinned} else os.cpu_count()) for c in cores), cores
assert not {pinned} or len(set(cores)) == os.cpu_count(), cores
assert os.environ.get("POCL_AFFINITY") == {given.get("POCL_AFFINITY")!r}
"""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("POCL_")}
    subprocess.run([sys.executable, "-c", script], env=plain | given, check=True, timeout=120)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="PoCL knows all CPUs of other kinds by one name")
@pytest.mark.parametrize(("known", "found", "named"), [(b"generic", "avx2 avx512vl", b"skylake-avx512"),
                                                       (b"generic", "sse2 avx2", b"haswell"),
                                                       (b"generic", "sse2", b"x86-64"),
                                                       (b"generic_", "avx2", b""), (b"znver3", "avx2", b"")])
def test_a_cpu_that_pocl_has_no_name_for_gets_one(known: bytes, found: str, named: bytes,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocl, "_features", lambda: set(found.split()))
    text = ctypes.create_string_buffer(known)
    words = (ctypes.c_uint64 * 600)(1, 2**63, 0xdead0000, 0, *range(596))
    words[300] = ctypes.addressof(text)
    before = list(words)
    assert pocl.name_the_cpu(ctypes.addressof(words)) == named.decode()
    if named:
        assert ctypes.string_at(words[300]) == named
        before[300] = words[300]
    assert list(words) == before


def test_devices_have_names_and_limits() -> None:
    device = host_device()
    assert device in devices()
    assert device.units >= 1 and device.name and device.device.name.strip() in device.identity
    caps = device.capabilities()
    assert caps.name == "opencl" and torch.float32 in caps.dtypes


def test_a_dtype_that_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ClDevice(0, host_device().device)
    monkeypatch.setattr(device, "dtypes", SUPPORTED - {torch.float64})
    assert not device.capabilities().serial_scans and ("add", torch.float64) not in device.joins
    with pytest.raises(UnsupportedError) as error:
        device.check_dtypes(frozenset((torch.float32, torch.float64)))
    assert "float64" in str(error.value) and device.name in str(error.value) and "float32" not in str(error.value)


def test_what_a_device_lacks_is_left_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ClDevice(0, host_device().device)
    monkeypatch.setattr(device, "dtypes", SUPPORTED - {torch.float64})

    class Single(OpenClTarget):
        name = "opencl-single"

    target = Single(device)
    register_target(target.name, lambda: target)
    made: list[str] = []
    monkeypatch.setattr(target, "build", lambda sources: made.extend(s.text for s in sources) or real(sources))
    real = OpenClTarget(device).build
    f = lambda x, y: (x.cumsum(0) + 1, (y * 2).sum())  # noqa: E731
    x, y = torch.randn(300), torch.randn(9, dtype=torch.float64)
    for ours, eager in zip(compiled(f, target.name)(x, y), f(x, y), strict=True):
        torch.testing.assert_close(ours, eager)
    assert made and not any("double" in text for text in made)


def test_a_process_that_was_forked_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ClDevice(0, host_device().device)
    device.check_process()
    assert device.context
    monkeypatch.setattr(device, "_pid", -1)
    with pytest.raises(UnsupportedError, match="forked"):
        device.check_process()


# ---- memory ----------------------------------------------------------------------------------------------


def test_spans_that_overlap_become_one_region() -> None:
    a = ALIGNMENT
    spans = [Span(10 * a, 4, False), Span(0, 9, True), Span(2 * a + 8, a, False), Span(3 * a, 4, True),
             Span(a, 4, False)]
    assert merged(spans, 1 << 30) == [Span(a, 4, False), Span(2 * a, a + 8, True), Span(10 * a, 4, False)]
    assert merged([Span(a, 1 << 40, False)], 1 << 30) == [Span(a, 1 << 30, False)]


def test_addresses_are_found_in_their_window() -> None:
    x, y = torch.zeros(100), torch.zeros(100)
    spans = [Span(t.data_ptr(), 400, True) for t in (x, y)]
    with HostMemory(host_device()).window(spans) as find:
        for t in (x, x[7:], y, y[99:]):
            buffer, offset = find(t.data_ptr())
            assert buffer is not None and 0 <= offset < buffer.size and offset % 4 == 0
        assert find(0) == (None, 0)


# ---- launches and programs -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
def test_every_point_and_no_other(n: int) -> None:
    x, y = torch.randn(n + 8), torch.full((n + 8,), 7.0)
    assert kernel("const float y = x * 2;")([x.data_ptr(), y.data_ptr()], [n]) == 0
    assert torch.equal(y[:n], x[:n] * 2) and torch.all(y[n:] == 7)


def test_faults_name_the_step() -> None:
    fine, bad = kernel("const float y = x + 1;"), kernel("const float y = x; if (x < 0) fl_report(faults, at, 2, 0);")
    plan = get_target(THREADS).plan([(fine, [(0, 0), (1, 0)], [0]), (bad, [(0, 0), (1, 64)], [0])])
    x, y = torch.ones(10), torch.empty(26)
    assert plan([x.data_ptr(), y.data_ptr()], [10]) is None
    assert torch.all(y[:10] == 2) and torch.all(y[16:] == 1)
    x[3] = -1
    assert plan([x.data_ptr(), y.data_ptr()], [10]) == (1, 2)
    x[3] = 1
    assert plan([x.data_ptr(), y.data_ptr()], [10]) is None  # the fault word was reset


def test_text_that_does_not_compile_is_its_kernels_error() -> None:
    made = get_target(THREADS).build([source("const float y = x - 3;", name="a"), source("y = nothing;", name="b"),
                                      source("const float y = x * 3;", name="c")]).wait()
    assert isinstance(made["b"], CompileError) and "b did not compile" in made["b"].message
    assert "nothing" in str(made["b"]) and host_device().name in str(made["b"])
    x, y = torch.ones(4), torch.empty(4)
    assert not isinstance(made["a"], CompileError) and made["a"]([x.data_ptr(), y.data_ptr()], [4]) == 0
    assert torch.all(y == -2)


def test_binaries_are_kept_and_damage_is_repaired(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    device = host_device()
    text = source("const float y = x * 5;")
    first, = ClCompiler(device).start([text], disk).values()
    assert not isinstance(first[1].result(), CompileError)
    again, = ClCompiler(device).start([text], disk).values()
    assert again[1].done()  # loaded, not built
    binary, = (tmp_path / "cache").glob("*.clbin")
    binary.write_bytes(b"damaged")
    third, = ClCompiler(device).start([text], disk).values()
    assert not isinstance(third[1].result(), CompileError) and binary.stat().st_size > 100


def test_the_library_is_one_text() -> None:
    text = library("opencl.h")
    assert "#include" not in text and "fl_philox" in text and "FL_F(tanh)" in text


# ---- arithmetic ------------------------------------------------------------------------------------------


def compiled(f: Any, on: str = THREADS, **kwargs: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="flambeau", options={"target": on}, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_bit_pattern_of_the_small_floats(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    small = bits.view(dtype)
    torch.testing.assert_close(compiled(lambda x: x.float() * 1)(small), small.float(), rtol=0, atol=0, equal_nan=True)
    wide = torch.cat([small.float().nan_to_num(0) * k for k in (1, 1.0003, 1.0009, 0.9997, 1e-5, 300)])
    torch.testing.assert_close(compiled(lambda x: (x * 1).to(dtype))(wide), wide.to(dtype), rtol=0, atol=0)


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "exp": (torch.exp, 30), "exp2": (torch.exp2, 30), "expm1": (torch.expm1, 3), "tanh": (torch.tanh, 4),
    "sigmoid": (torch.sigmoid, 20), "log": (lambda x: torch.log(x.abs()), 5), "log1p": (lambda x: x.abs().log1p(), 2),
    "log2": (lambda x: torch.log2(x.abs()), 5), "log10": (lambda x: torch.log10(x.abs()), 5), "erf": (torch.erf, 3),
    "erfinv": (lambda x: torch.erfinv(x.clamp(-1, 1)), 0.5), "erfc": (torch.erfc, 3), "sin": (torch.sin, 40),
    "rsqrt": (lambda x: torch.rsqrt(x.abs()), 3), "pow": (lambda x: x.abs().pow(1.7), 3), "lgamma": (torch.lgamma, 9),
    "floor": (torch.floor, 5), "round": (torch.round, 5), "remainder": (lambda x: torch.remainder(x, 0.7), 5),
    "atan2": (lambda x: torch.atan2(x, x.roll(1)), 3), "sqrt": (lambda x: torch.sqrt(x.abs()), 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions(dtype: torch.dtype) -> None:
    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        return [f(x * scale) for f, scale in FUNCTIONS.values()]

    x = torch.randn(4001, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[:6] = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan])
    bounds = {"rtol": 2e-6, "atol": 2e-6} if dtype is torch.float32 else {}
    for name, ours, eager in zip(FUNCTIONS, compiled(everything)(x), everything(x), strict=True):
        torch.testing.assert_close(ours, eager, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}", **bounds)


def test_angles_and_powers_of_every_size() -> None:
    """All exponents, both signs, and undefined powers, compared with float64 results that are rounded once."""
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**28])])
    ends = torch.tensor([0, -0.0, 1, -1, 2, 0.5, -3, torch.inf, -torch.inf, torch.nan, 1e-40, 2.5, 2**24 + 2, 1e30])
    base = torch.cat([x, ends.repeat(len(ends))])
    power = torch.cat([torch.randn(len(x), generator=torch.Generator().manual_seed(6)) * 3,
                       ends.repeat_interleave(len(ends))])
    sine, cosine, tangent, powers = compiled(lambda x, a, b: (x.sin(), x.cos(), x.tan(), a.pow(b)))(x, base, power)
    wide = x.double()
    for ours, exact in ((sine, wide.sin()), (cosine, wide.cos()), (tangent, wide.tan()),
                        (powers, base.double().pow(power.double()))):
        torch.testing.assert_close(ours, exact.float(), rtol=2e-7, atol=0, equal_nan=True)


SPECIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "digamma": torch.digamma, "polygamma": lambda x: torch.polygamma(2, x.abs() + 0.1), "i0": torch.i0,
    "i1e": torch.special.i1e, "ndtri": lambda x: torch.special.ndtri(x.sigmoid()), "erfcx": torch.special.erfcx,
    "log_ndtr": torch.special.log_ndtr, "airy": torch.special.airy_ai,
    "zeta": lambda x: torch.special.zeta(x.abs() + 1.1, x.abs().roll(1) + 0.1),
    "gammainc": lambda x: torch.special.gammainc(x.abs(), x.abs().roll(1)),
    "k0": lambda x: torch.special.modified_bessel_k0(x.abs()), "sinc": torch.special.spherical_bessel_j0,
}


def test_special_functions() -> None:
    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        return [f(x) for f in SPECIAL.values()]

    x = torch.randn(501, generator=torch.Generator().manual_seed(4)) * 3
    cpu = compiled(everything, "cpu")(x)  # the same kernel in C++, which is tested against scipy
    for name, ours, other in zip(SPECIAL, compiled(everything)(x), cpu, strict=True):
        torch.testing.assert_close(ours, other, rtol=5e-7, atol=1e-7, equal_nan=True,
                                   msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    g = torch.Generator().manual_seed(2)
    x = torch.randint(low, high, (501,), generator=g, dtype=dtype)
    y = torch.randint(max(low, -9), 9, (501,), generator=g, dtype=dtype)
    y[y == 0] = 3

    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x + y, x - y, x * y, x // y, x % y, torch.fmod(x, y), torch.gcd(x, y), x & y, x ^ y,
                torch.minimum(x, y), x > y, x.abs() + y.sign(),
                x.float().to(torch.int32) if dtype is not torch.int64 else x]

    for ours, eager in zip(compiled(f)(x, y), f(x, y), strict=True):
        assert torch.equal(ours, eager)


@form
def test_dropout_draws_the_bits_of_the_cpu_target(on: str) -> None:
    f = lambda x: (F.dropout(x, 0.3), torch.rand_like(x), torch.randn_like(x))  # noqa: E731
    x = torch.ones(37, 50)
    found = []
    for target in ("cpu", on):
        c = compiled(f, target)
        torch.manual_seed(3)
        found.append([*c(x), *c(x)])
    for k, (cpu, ours) in enumerate(zip(*found, strict=True)):
        if k % 3 < 2:
            assert torch.equal(cpu, ours)
        else:  # normal numbers: the same bits, passed through each target's own sine and logarithm
            torch.testing.assert_close(cpu, ours, rtol=1e-5, atol=1e-5)


# ---- through torch.compile -------------------------------------------------------------------------------


MODELS = {
    **SMALL,
    "padding": (lambda x: F.pad(x, (3, 1, 0, 2), mode="reflect").relu(), (2, 5, 6)),
    "empty": (lambda x: x[:, :0].softmax(1).sum() + x.mean(), (4, 5)),
}


@form
@pytest.mark.parametrize("name", MODELS)
def test_models_forward_and_backward(name: str, on: str) -> None:
    f, shape = MODELS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = gradients(f, x)
    torch.testing.assert_close(gradients(compiled(f, on), x), want)


def test_kernels_ran_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = OpenClTarget.build
    monkeypatch.setattr(OpenClTarget, "build", lambda self, sources: made.extend(sources) or real(self, sources))
    x = torch.randn(4, 5)
    torch.testing.assert_close(compiled(lambda x: x.exp() + 1)(x), x.exp() + 1)
    assert [type(s) for s in made] == [RangeSource]
    assert get_target(THREADS).capabilities().ordered_scatter and not get_target(POINTS).capabilities().ordered_scatter


@form
def test_sizes_that_vary(on: str) -> None:
    f = lambda x: (x * 2).softmax(-1)  # noqa: E731
    c = compiled(f, on, dynamic=True)
    for n in (3, 16, 0, 130):
        x = torch.randn(n, n + 2)
        torch.testing.assert_close(c(x), f(x))


@form
def test_an_index_out_of_range_raises_what_eager_raises(on: str) -> None:
    table = torch.randn(10, 4)
    c = compiled(lambda i: F.embedding(i, table) * 2, on)
    torch.testing.assert_close(c(torch.tensor([1, 9])), F.embedding(torch.tensor([1, 9]), table) * 2)
    with pytest.raises(IndexError, match="out of range"):
        c(torch.tensor([1, 10]))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(lambda a, b: a // b, on)(torch.tensor([7]), torch.tensor([0]))


@form
def test_inputs_are_updated_in_place(on: str) -> None:
    def f(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(x.mean(0))
        return x - seen

    x, seen, other = torch.randn(5, 3), torch.zeros(3), torch.zeros(3)
    torch.testing.assert_close(compiled(f, on)(x, seen), f(x, other))
    torch.testing.assert_close(seen, other)


@form
def test_views_that_start_inside_their_storage(on: str) -> None:
    x = torch.randn(1001)
    c = compiled(lambda a, b: a * b + 1, on, dynamic=True)
    for a, b in ((x[1:], x[:-1]), (x[3:10], x[500:507]), (x[::2], x[::2])):
        torch.testing.assert_close(c(a, b), a * b + 1)


def test_threads_of_the_host_take_turns() -> None:
    c = compiled(lambda x: (x * 2).softmax(-1).sum(0))
    inputs = [torch.randn(50, 60, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    expected = [c(x) for x in inputs]

    def run(k: int) -> bool:
        return all(torch.equal(c(inputs[k]), expected[k]) for _ in range(25))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_a_training_run_follows_eager() -> None:
    def curve(wrap: Callable[[nn.Module], Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(),
                              nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = wrap(model)
        losses = []
        for _ in range(8):
            x, y = torch.randint(50, (8, 4)), torch.randint(10, (8,))
            loss = F.cross_entropy(step(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert curve(compiled) == pytest.approx(curve(lambda m: m), rel=1e-4)

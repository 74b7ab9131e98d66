"""`flambeau.accelerate`: the same results as torch's own kernels, in every form of a call, and torch's again after."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

import flambeau
from eager.starts_and_ends import starts
from flambeau.config import config
from flambeau.eager import accelerate as overrides
from flambeau.eager import any_shape, gate
from flambeau.eager import one_call as eager_graph
from flambeau.eager.accelerate import Acceleration, Replaced
from flambeau.eager.any_shape import Programs
from flambeau.eager.kept_programs import Kept
from flambeau.eager.operator_forms import GROUPS, all_forms
from flambeau.errors import UnsupportedError
from flambeau.ops.facts import described, name_of
from flambeau.targets.cpu.target import CpuTarget
from flambeau.targets.cuda.target import CudaTarget

CPU = "cpu"
SMALL = (16, 16)
LARGE = (96, 384)  # above every threshold


@contextmanager
def accelerated(*names: str, **options: Any) -> Iterator[Acceleration]:
    """Kernels that are there at the first call."""
    with flambeau.accelerate(CPU, only=names or None, **{"wait": True, **options}) as made:
        yield made


def usage(name: str) -> Replaced:
    return next(row for row in flambeau.accelerated() if row.operator == f"aten.{name}")


def flat(x: Any) -> list[torch.Tensor]:
    return [t for y in x for t in flat(y)] if isinstance(x, (list, tuple)) else [x]


def with_gradients(call: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The results, and the gradients of those inputs that have any."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = [t for t in flat(call(*leaves)) if isinstance(t, torch.Tensor)]
    out = next(t for t in results if t.is_floating_point())
    wanted = [x for x in leaves if x.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    grads = torch.autograd.grad(out, wanted, weights, allow_unused=True) if out.requires_grad else ()
    return [*(t.detach() for t in results), *(g for g in grads if g is not None)]


# ---- the same results ----------------------------------------------------------------------------------


def image(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(shape),)


def bag_inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(300, 32), torch.randint(300, (2048,)), torch.arange(0, 2048, 8), torch.rand(2048)


def row_inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(128, 32), torch.randint(128, (2048,)), torch.randn(2048, 32)


def element_inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(128, 32), torch.randint(128, (2048, 32)), torch.randn(2048, 32)


PLANES, VOLUME = image(2, 8, 64, 64), image(1, 4, 16, 24, 32)

# what is called, on what, and the operators that serve it
CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]], tuple[str, ...]]] = {
    "cumsum": (lambda x: x.cumsum(0), image(*LARGE), ("cumsum",)),
    "cumsum of integers": (lambda x: (x.to(torch.int32).cumsum(1), x * 1), image(*LARGE), ("cumsum",)),
    "cumsum of a lazy negative": (lambda x: torch.complex(x, x).conj().imag.cumsum(1), image(*LARGE), ("cumsum",)),
    "cumprod": (lambda x: x.tanh().cumprod(1), image(*LARGE), ("cumprod",)),
    "cummax": (lambda x: x.cummax(0), image(*LARGE), ("cummax",)),
    "cummin": (lambda x: x.cummin(1), image(*LARGE), ("cummin",)),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), image(*LARGE), ("logcumsumexp",)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), PLANES, ("max_pool2d_with_indices",)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, return_indices=True), VOLUME, ("max_pool3d_with_indices",)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), PLANES, ("avg_pool2d",)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), VOLUME, ("avg_pool3d",)),
    "channels last": (lambda x: F.avg_pool2d(x.to(memory_format=torch.channels_last), 2), PLANES, ("avg_pool2d",)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 7), PLANES, ("_adaptive_avg_pool2d",)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), PLANES, ("upsample_bilinear2d",)),
    "bicubic": (lambda x: F.interpolate(x, size=(90, 50), mode="bicubic"), PLANES, ("upsample_bicubic2d",)),
    "grid_sample of volumes": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        lambda: (torch.randn(1, 4, 12, 16, 16), torch.rand(1, 12, 16, 16, 3) * 2.2 - 1.1),
        ("grid_sampler_3d", "grid_sampler_3d_backward")),
    "embedding": (lambda w, i: F.embedding(i, w), lambda: bag_inputs()[:2], ("embedding_dense_backward",)),
    **{f"embedding_bag {mode}": (
        lambda w, i, o, mode=mode: F.embedding_bag(i, w, o, mode=mode), lambda: bag_inputs()[:3],
        ("_embedding_bag", "_embedding_bag_dense_backward")) for mode in ("sum", "mean", "max")},
    "embedding_bag weights": (
        lambda w, i, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s), bag_inputs,
        ("_embedding_bag", "_embedding_bag_dense_backward")),
    "index_add": (lambda x, i, s: x.index_add(0, i, s, alpha=0.5), row_inputs, ("index_add",)),
    "index_put": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True), row_inputs, ("_index_put_impl_",)),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), element_inputs, ("scatter_add",)),
    "gather": (lambda x, i, s: x.gather(0, i), element_inputs, ("gather",)),
    "softmax": (lambda x: x.softmax(1), image(*LARGE), ("_softmax", "_softmax_backward_data")),
    "log_softmax": (lambda x: x.log_softmax(0), image(*LARGE), ("_log_softmax", "_log_softmax_backward_data")),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        lambda: (torch.randn(LARGE), torch.randn(384), torch.randn(384)),
        ("native_layer_norm", "native_layer_norm_backward")),
    "var": (lambda x: x.var(1), image(*LARGE), ("var.correction",)),
    "std_mean": (lambda x: torch.std_mean(x, 0), image(*LARGE), ("std_mean.correction",)),
    "logsumexp": (lambda x: x.logsumexp(1), image(*LARGE), ("logsumexp",)),
    "max": (lambda x: x.max(1), image(*LARGE), ("max.dim",)),
    "argmin": (lambda x: (x.argmin(1), x), image(*LARGE), ("argmin",)),
    "mish": (F.mish, image(*LARGE), ("mish", "mish_backward")),
    "gelu": (F.gelu, image(*LARGE), ("gelu", "gelu_backward")),
    "half precision": (F.gelu, lambda: (torch.randn(LARGE).bfloat16(),), ("gelu", "gelu_backward")),
}
QUICK = ("cumsum", "max_pool2d", "index_put", "layer_norm")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in CASES])
def test_results_and_gradients(name: str) -> None:
    call, make, operators = CASES[name]
    torch.manual_seed(0)
    inputs = make()
    expected = with_gradients(call, *inputs)
    with accelerated():
        got = with_gradients(call, *inputs)
        rows = {row.operator: row for row in flambeau.accelerated()}
    for operator in operators:
        assert rows[f"aten.{operator}"].ours, rows[f"aten.{operator}"]
    assert not [row for row in rows.values() if row.refused]
    assert [(t.stride(), t.dtype) for t in got] == [(t.stride(), t.dtype) for t in expected]
    if any(x.dtype is torch.bfloat16 for x in inputs):
        torch.testing.assert_close(got, expected)
        return
    exact = with_gradients(call, *(x.double() if x.is_floating_point() else x for x in inputs))
    for ours, eagers, right in zip(got, expected, exact, strict=True):  # eager's sums may be off by as much as ours
        off = float((eagers.double() - right).abs().max())
        torch.testing.assert_close(ours, right, rtol=1.3e-6, atol=max(1e-5, 2 * off), check_dtype=False)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cumsum_": lambda x: x.cumsum_(0),
    "cumsum.out": lambda x: torch.cumsum(x, 1, out=torch.empty_like(x)),
    "cummax.out": lambda x: torch.cummax(x, 0, out=(torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64))),
    "mish_": lambda x: F.mish(x, inplace=True),
    "gelu.out": lambda x: torch._C._nn.gelu(x, out=torch.empty_like(x)),
    "index_add_": lambda x: x.index_add_(0, torch.arange(96) % 7, x.clone()),
    "_index_put_impl_": lambda x: x.index_put_((torch.arange(96) % 7,), x.clone(), accumulate=True),
    "scatter_add_": lambda x: x.scatter_add_(1, x.abs().long(), x.clone()),
    "var.correction_out": lambda x: torch.var(x, 1, correction=1, out=torch.empty(96)),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("name", FORMS)
def test_forms_that_write(name: str, layout: str) -> None:
    x = torch.randn(LARGE) if layout == "contiguous" else torch.randn(LARGE[::-1]).t()
    given, copy = x.clone(memory_format=torch.preserve_format), x.clone(memory_format=torch.preserve_format)
    expected = FORMS[name](given)
    with accelerated(name):
        got = FORMS[name](copy)
        assert usage(name).ours == 1, usage(name)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(copy, given)
    assert (flat(got)[0].data_ptr() == copy.data_ptr()) is name.endswith("_")


def test_autocast() -> None:
    x, w = torch.randn(LARGE), torch.randn(384, 384)

    def step() -> torch.Tensor:
        with torch.autocast(CPU, dtype=torch.bfloat16):
            return (x @ w).softmax(1)

    expected = step()
    with accelerated("softmax"):
        got = step()
        assert usage("_softmax").ours
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected)


def test_which_arguments_are_one() -> None:
    """Calls that are alike but for that: the kernel of one is not that of another."""
    x, y = torch.randn(LARGE).softmax(1), torch.randn(LARGE).softmax(1)
    memory = np.ones((LARGE[0] + 1, LARGE[1]), dtype="float32")
    whole, shifted = torch.from_numpy(memory[:-1]), torch.from_numpy(memory[1:])  # storages of their own, one memory
    with accelerated("softmax"):
        for grad, result in ((x, x), (x, y), (y, x), (y, y), (x, y)):
            out = torch.empty(LARGE)
            torch.ops.aten._softmax_backward_data.out(grad, result, 1, torch.float32, grad_input=out)
            torch.testing.assert_close(out, result * (grad - (grad * result).sum(1, keepdim=True)))
        before = usage("_softmax_backward_data.out")
        assert before.ours == 5
        torch.ops.aten._softmax_backward_data.out(whole, y, 1, torch.float32, grad_input=shifted)
        torch.ops.aten._softmax_backward_data.out(x, y, 1, torch.float32, grad_input=x.clone())
        after = usage("_softmax_backward_data.out")
        assert (after.ours, after.original) == (6, before.original + 1)


# ---- whose call it is ----------------------------------------------------------------------------------


def test_settings_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is one of the settings that it was built for."""
    asked: list[str] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        asked.append(config.numerics)
        return eager_graph.build(*args, **kwargs)

    monkeypatch.setattr(any_shape, "build", build)
    monkeypatch.setattr(Kept, "places", lambda self: [])
    monkeypatch.setattr(overrides, "PROGRAMS", Programs(into_any=False, apart=overrides._aside))
    x = torch.randn(97, 383)
    with accelerated("cumsum"):
        for numerics in ("fast", "eager", "fast", "eager"):
            with config.override(numerics=numerics):
                x.cumsum(0)
    assert asked[:2] == ["fast", "eager"] and len(asked) <= 3  # one for many shapes, and where there is none, for this


def test_small_calls_are_the_originals() -> None:
    with accelerated("cumsum"):
        torch.randn(SMALL).cumsum(0)
        assert (usage("cumsum").ours, usage("cumsum").original) == (0, 1)
        torch.randn(LARGE).cumsum(0)
        assert (usage("cumsum").ours, usage("cumsum").original) == (1, 1)


@pytest.mark.parametrize("call", [
    pytest.param(lambda x: torch.complex(x, x).cumsum(0), id="complex"),
    pytest.param(lambda x: torch.cumsum(x, 0, out=x), id="output is input"),
    pytest.param(lambda x: torch.cumsum(x, 0, out=torch.empty(0)), id="output is resized"),
    pytest.param(lambda x: torch.cumsum(x, 0, out=torch.empty(x.shape, dtype=torch.float64)), id="output is cast"),
    pytest.param(lambda x: x[:, ::2].cumsum_(0), id="output has holes"),
])
def test_calls_that_stay_with_torch(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(384, 384)
    expected = call(x.clone())
    with accelerated("cumsum"):
        got = call(x.clone())
        got = call(x.clone())
        assert all(row.ours == 0 for row in flambeau.accelerated())
    torch.testing.assert_close(got, expected)


def test_deterministic_algorithms_are_torchs() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with accelerated("cumsum"):
            torch.randn(LARGE).cumsum(0)
            assert usage("cumsum").ours == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_subclasses_and_modes_see_no_more_than_without() -> None:
    calls = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(LARGE).as_subclass(Watched)
    torch.cumsum(x, 0)
    without, calls[:] = list(calls), []
    with accelerated("cumsum"), torch.device("meta"):
        got = torch.cumsum(x, 0)
        assert usage("cumsum").ours == 1
    assert calls == without
    assert type(got) is Watched


def test_errors_are_those_of_torch() -> None:
    x, index, source = torch.randn(64, 32), torch.full((1024,), 64), torch.randn(1024, 32)
    weight, offsets = torch.randn(64, 32), torch.arange(0, 1024, 8)
    calls = [lambda: x.index_add(0, index, source), lambda: x.clone().index_add_(0, index, source),
             lambda: x.clone().index_put_((index,), source, accumulate=True),
             lambda: F.embedding_bag(index, weight, offsets, mode="max"),
             lambda: torch.zeros(LARGE).cumsum(2)]
    for call in calls:
        with pytest.raises((IndexError, RuntimeError)) as expected:
            call()
        with accelerated(), pytest.raises(expected.type) as got:
            call()
        assert str(got.value) == str(expected.value)


# ---- random numbers ------------------------------------------------------------------------------------


def test_random_numbers_follow_the_seed() -> None:
    def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        return torch.empty(LARGE).exponential_(2.0), torch.empty(LARGE).bernoulli_(0.3)

    with flambeau.accelerate(CPU, only="draws"):  # the first call is ours: torch would draw others
        first, again, other = draw(1), draw(1), draw(2)
        assert usage("exponential_").original == 0
        following = torch.empty(LARGE).exponential_(2.0)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0]) and not torch.equal(other[0], following)
    assert abs(first[0].mean().item() - 0.5) < 0.02 and abs(first[1].mean().item() - 0.3) < 0.02


def test_a_generator_of_ones_own_is_the_originals() -> None:
    def draw() -> torch.Tensor:
        return torch.empty(LARGE).exponential_(generator=torch.Generator().manual_seed(3))

    expected = draw()
    with accelerated("draws"):
        assert torch.equal(draw(), expected)


# ---- building and timing -------------------------------------------------------------------------------


def test_the_second_call_of_a_class_decides() -> None:
    def call(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
        torch.ones(shape, dtype=dtype).cumsum(1)
        return usage("cumsum").ours, usage("cumsum").original

    with flambeau.accelerate(CPU, only="cumsum"):
        assert call(7, 97, 384) == (0, 1)
        assert call(7, 97, 384) == (1, 1)
        assert call(3, 93, 385) == (2, 1)  # of another shape
        assert call(7, 97, 384, dtype=torch.float64) == (2, 2)
    with accelerated("cumsum"):  # for who waits, the first does
        assert call(7, 97, 384, dtype=torch.bfloat16) == (1, 0)


@pytest.mark.slow
def test_processes_that_give_the_same_bits() -> None:
    """The same calls by the same kernels, and an end without words, threads or not."""
    starts(processes=2, together=2)


def test_whose_calls_follow_from_the_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours serve from the second call of a class on, however long they take, unless results would lie otherwise."""
    x = torch.randn(512, 1032)
    # No program of another test, of this process or from the disk, would serve the first call.
    monkeypatch.setattr(Kept, "places", lambda self: [])
    monkeypatch.setattr(overrides, "PROGRAMS", Programs(into_any=False, apart=overrides._aside))
    with flambeau.accelerate(CPU, only="logcumsumexp"):
        for _ in range(3):
            x.logcumsumexp(0)
        assert (usage("logcumsumexp").ours, usage("logcumsumexp").original) == (2, 1)
        monkeypatch.setattr(overrides, "layout", lambda results, seen=[]: seen.append(0) or len(seen))
        before = usage("logcumsumexp").apart
        x.double().logcumsumexp(0), x.double().logcumsumexp(0)
        row = usage("logcumsumexp")
    assert (row.ours, row.original, row.apart - before) == (2, 3, 1)


def test_many_shapes_have_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build = CpuTarget.build

    def counted(self: CpuTarget, sources: Any) -> Any:
        made.extend(sources)
        return build(self, sources)

    monkeypatch.setattr(CpuTarget, "build", counted)
    with accelerated("softmax"):
        for n in range(30):
            x = torch.randn(180 + 3 * n, 200 + 7 * n)
            torch.testing.assert_close(x.softmax(1), x.exp() / x.exp().sum(1, True))
        assert usage("_softmax").ours == 30
    assert len(made) <= 3


def test_operators_without_programs_for_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would compile for ever."""
    def none(*args: Any) -> Any:
        raise UnsupportedError("one for each shape")

    monkeypatch.setattr(any_shape, "made", none)
    monkeypatch.setattr(overrides.PROGRAMS, "most_fixed", 0)
    x = torch.randn(98, 384, 2)
    with accelerated("cumsum"):
        torch.testing.assert_close(x.cumsum(0), x.double().cumsum(0).float())
        assert usage("cumsum").ours == 0 and "kernels were built" in str(usage("cumsum"))


def test_calls_from_many_threads() -> None:
    x = torch.randn(99, 384)
    expected = x.cumsum(0)
    results: list[torch.Tensor] = []
    with flambeau.accelerate(CPU, only="cumsum"):
        def work() -> None:
            results.extend(x.cumsum(0) for _ in range(50))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert usage("cumsum").ours + usage("cumsum").original == 200
    for got in results:
        torch.testing.assert_close(got, expected)


# ---- undo ----------------------------------------------------------------------------------------------


def test_undo_restores_every_kernel() -> None:
    def kernels() -> list[str]:
        return [torch._C._dispatch_dump(form.op.name()) for form in all_forms()]

    before = kernels()
    made = flambeau.accelerate(CPU)
    assert kernels() != before and flambeau.accelerated()
    made.undo()
    made.undo()
    assert kernels() == before and not flambeau.accelerated()


def test_nested_accelerations() -> None:
    x = torch.randn(LARGE)
    with accelerated("cumsum"):
        x.cumsum(0)
        with accelerated("cumulative"):
            x.cumsum(0)
            assert usage("cumsum").ours == 2
        x.cumsum(0)
        assert usage("cumsum").ours == 3
        assert {row.operator.split(".")[1].rstrip("_") for row in flambeau.accelerated()} == {"cumsum"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_and_traced_code_goes_on_working() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return F.mish(x.cumsum(0)).softmax(1)

    x = torch.randn(LARGE)
    expected = step(x)
    with accelerated():
        torch.testing.assert_close(torch.compile(step, backend="aot_eager")(x), expected)
        assert usage("cumsum").ours
        torch.testing.assert_close(torch.compile(step, backend="flambeau")(x), expected)
        traced = torch.jit.trace(step, x)
        torch.testing.assert_close(traced(x), expected)
        with torch.inference_mode():
            got = step(x)
        assert got.is_inference()
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.func.vmap(lambda row: row.cumsum(0))(x), x.cumsum(1))


# ---- what is asked for ---------------------------------------------------------------------------------


def test_only_and_exclude() -> None:
    def operators(**chosen: Any) -> set[str]:
        with flambeau.accelerate(CPU, **chosen):
            return {row.operator.split(".")[1].rstrip("_") for row in flambeau.accelerated()}

    assert operators(only="aten::cumsum_") == {"cumsum"}
    assert operators(only=["max pooling", "aten.cumprod"], exclude=["max_pool3d_with_indices"]) == {
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "cumprod"}
    assert "gelu" in operators() and "relu" not in operators()
    assert operators(only="relu") == {"relu"}


def test_names_that_nobody_knows() -> None:
    with pytest.raises(flambeau.OptionError, match="convolution"):
        flambeau.accelerate(CPU, only=["cumsum", "convolution"])
    with pytest.raises(flambeau.OptionError, match="cpu:0"):
        flambeau.accelerate("cpu:0")
    with pytest.raises(flambeau.UnsupportedError, match="meta"):
        flambeau.accelerate("meta")


def test_without_a_compiler() -> None:
    gate.load_gates.cache_clear()
    hooks = dict(_global_optimizer_pre_hooks)
    try:
        with config.override(compiler="no-such"), pytest.raises(flambeau.CompileError, match="no-such"):
            flambeau.accelerate(CPU)
    finally:
        gate.load_gates.cache_clear()
    assert not flambeau.accelerated()
    assert _global_optimizer_pre_hooks == hooks  # steps are not waited for either


def test_every_operator_of_a_group_has_a_form() -> None:
    grouped = {op if isinstance(op, str) else name_of(op) for op, group in described("group") if group}
    assert {form.operator for form in all_forms()} == grouped
    assert {form.group for form in all_forms()} == set(GROUPS)
    for target in (CpuTarget, CudaTarget):
        assert set(target.wins) <= set(GROUPS)


def test_the_example_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "accelerate.md"
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), {})
    assert not flambeau.accelerated()


def test_a_forked_child_builds_its_own() -> None:
    x = torch.randn(100, 384)
    expected = x.cumsum(0)
    with accelerated("cumsum"):
        torch.randn(LARGE).cumsum(0)  # the worker of this process runs
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            good = torch.allclose(x.cumsum(0), expected, atol=1e-4) and usage("cumsum").ours == 2
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

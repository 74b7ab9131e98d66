"""torch.compile(backend="flambeau") compared with eager: results, writes, aliases, recompilations and errors."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import flambeau
from compile.beside_eager import compiled, fresh, same
from flambeau.debug import collect

# For users, a kernel that does not build or a graph that is not compiled is a warning; here it is an error.
pytestmark = pytest.mark.filterwarnings("error:flambeau:RuntimeWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


# ---- results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [lambda x: x.conj().imag + 1, lambda x: x.conj().real + x.conj().imag,
                                lambda x: (x.conj().imag, x.conj().imag * 2)])
def test_negated_views(fn: Any) -> None:
    x = torch.randn(4, dtype=torch.complex64)
    same(fn, x)


def test_an_operator_with_an_effect_runs_though_nobody_reads_its_result() -> None:
    calls: list[int] = []

    @torch.library.custom_op("flambeau_tests::notes", mutates_args=())
    def notes(x: Tensor) -> Tensor:
        calls.append(x.numel())
        return x.clone()

    notes.register_fake(torch.empty_like)
    torch.fx.node.has_side_effect(torch.ops.flambeau_tests.notes.default)

    def fn(x: Tensor) -> Tensor:
        notes(x)
        return x + x

    x = torch.ones(3)
    assert torch.equal(compiled(fn)(x), x + x) and calls == [3]


def test_operators_with_an_argument_called_self() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        lists = {"self": [x.clone()], "tensors1": [x * 2], "weights": [x * 3]}
        torch._foreach_lerp_(**lists)
        return lists["self"]

    same(fn, torch.ones(3))


def test_inputs_whose_memory_holds_opposites() -> None:
    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    for make in (lambda x: x.conj().imag, lambda x: x.conj(), lambda x: x):
        ours, theirs = (torch.full((4,), 1 + 2j) for _ in range(2))
        torch.testing.assert_close(compiled(fn)(make(ours)), fn(make(theirs)))
        torch.testing.assert_close(ours, theirs)


def test_the_entry_point_is_registered() -> None:
    assert "flambeau" in torch._dynamo.list_backends()


def test_inference_and_training() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(x @ w), (w.shape[1],)).softmax(-1)

    same(f, torch.randn(5, 7), torch.randn(7, 11))
    same(f, leaf(5, 7), leaf(7, 11))
    with torch.no_grad():
        same(f, leaf(5, 7), leaf(7, 11), gradients=False)


def test_what_is_returned_besides_fresh_tensors() -> None:
    def f(x: Tensor) -> tuple[Any, ...]:
        y = x.sin()
        return x, x.t(), x[1:, ::2], y, y.t(), y.view(-1), y[:, 1], None, 3, 2.5, True, (x, [y]), {"y": y}

    same(f, torch.randn(6, 4))
    same(lambda x: (x + 1,) * 2, torch.randn(3))
    same(lambda x: x, torch.randn(3))
    same(lambda x: (x.detach(), x * 2), leaf(3))
    same(lambda x: (x[:, :1].expand(4, 7), x.sin()[:, :1].expand(4, 7)), torch.randn(4, 2))


def test_a_clone_is_a_copy() -> None:
    """Also where nothing is computed: who writes to the result must not write to the argument."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.clone(), x.t().clone(), x[:, 1:].clone(), x.to(torch.float32, copy=True), x + 0

    same(f, torch.randn(4, 6))


def test_constants_held_by_the_function() -> None:
    table = torch.randn(4)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (x * table, x + torch.tensor(1.5), x * torch.tensor([1.0, 2, 3, 4]), torch.tensor([[1, 2]]),
                torch.tensor([1.0, 2.0]).add_(x[0, :2]), torch.ones(3), torch.arange(4))

    same(f, torch.randn(3, 4))


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (1,), (1, 1), (3, 0, 2)], ids=str)
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2 + 1).exp()
        return y, y.sum(), y.sum(-1), y.mean(), y.prod(-1), y.cumsum(-1), y.softmax(-1), y.to(torch.int32), y > 1

    same(f, torch.randn(shape))
    same(lambda x: (x.exp() * 2).sum() + x.sum(-1).sum(), torch.randn(shape).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                                   torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x + y, x * y, x == y, torch.where(x > y, x, y), x.sum(0), x.float().mean(1), x.to(torch.float64) / 3,
                x.amax(1))

    same(f, *((torch.rand(2, 5, 37) * 60).to(dtype)))
    if dtype.is_floating_point:
        same(lambda x, y: (x * y).sigmoid().sum(1) + x.amax(1), leaf(5, 37, dtype=dtype), leaf(5, 37, dtype=dtype),
             options={"numerics": "eager"})  # with eager's roundings, otherwise half precision could not be compared


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_wide_unsigned_dtypes_are_moved_and_converted(dtype: torch.dtype) -> None:
    same(lambda x: (x.float() + 1, x.t().clone(), x == x), torch.arange(35).reshape(5, 7).to(dtype))


def test_complex_is_left_to_aten() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x * y
        return z, z.abs().softmax(0), torch.view_as_real(z) + 1

    with collect() as graphs:
        same(f, torch.randn(5, dtype=torch.complex64), torch.randn(5))
    assert "aten.mul.Tensor" in graphs[0].captured.externs


def test_gradient_through_a_complex_number() -> None:
    """The backward conjugates the factor, which is a number and no tensor."""
    x = torch.randn(4, 2, requires_grad=True)
    compiled = torch.compile(lambda z: torch.mul(z, 2j), backend="flambeau")
    torch.view_as_real(compiled(torch.view_as_complex(x))).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.tensor([[2.0, -2.0]]).expand(4, 2))


def test_an_operator_without_a_lowering_is_called_and_listed() -> None:
    with collect() as graphs:
        same(lambda x: torch.linalg.qr(x.exp()).R.abs() + 1, torch.randn(4, 4))
    assert graphs[0].captured.externs == {"aten.linalg_qr.default": 1}


# ---- writes to arguments -------------------------------------------------------------------------------


def test_an_operator_that_returns_a_number_besides() -> None:
    """As ATen's attention does: the longest sequence, which follows from sizes."""
    with torch.library._scoped_library("flambeau_tests", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> (Tensor, SymInt)")
        library.impl("doubled", lambda x: (2 * x, x.shape[0]), "CompositeExplicitAutograd")
        torch.library.register_fake("flambeau_tests::doubled", lambda x: (torch.empty_like(x), x.shape[0]), lib=library)

        def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, n = torch.ops.flambeau_tests.doubled(x.sin())
            return y.cos() + n, torch.full((2,), n)

        for dynamic in (False, True):
            torch._dynamo.reset()
            run = torch.compile(f, backend="flambeau", dynamic=dynamic, fullgraph=True)
            for n in (3, 5):
                x = torch.randn(n, 4)
                torch.testing.assert_close(run(x), f(x))


def test_writes_to_arguments() -> None:
    def both(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        y.mul_(x)
        return x - y

    def parts(x: Tensor) -> Tensor:
        x[:, 1:3] = 0
        x[0].add_(1)
        x[-1, -1] = 7
        return x.sum()

    def kept(x: Tensor) -> Tensor:
        before = x.clone()
        x.mul_(2)
        return before

    def through_view(x: Tensor) -> Tensor:
        y = x.t()
        y.add_(1)
        return y

    def swap(x: Tensor, y: Tensor) -> Tensor:
        t = x.clone()
        x.copy_(y)
        y.copy_(t)
        return x + y

    def narrow(x: Tensor) -> Tensor:
        x.copy_(x.double().sum(0))
        return x + 1

    for f, count in ((both, 2), (parts, 1), (kept, 1), (through_view, 1), (swap, 2), (narrow, 1)):
        same(f, *(torch.randn(4, 5) for _ in range(count)))
        same(f, *(torch.randn(5, 4).t() for _ in range(count)))


def test_writes_that_gradients_pass() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        z[1:] += y[1:]
        z.relu_()
        return z

    same(f, leaf(4, 5), leaf(4, 5))


def test_arguments_that_share_memory() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    c = compiled(f)
    for view in (lambda t: (t.view(4, 3), t[:6]), lambda t: (t, t), lambda t: (t[2:8], t[5:11])):
        ours, eager = torch.arange(12.0), torch.arange(12.0)
        torch.testing.assert_close(c(*view(ours)), f(*view(eager)))
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_buffers(training: bool) -> None:
    ours = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU()).train(training)
    with torch.no_grad():
        ours[1].running_var.uniform_(0.5, 2)
    eager = copy.deepcopy(ours)
    c = compiled(ours)
    for _ in range(3):
        x = torch.randn(4, 3, 9, 9)
        a, b = c(x), eager(x)
        torch.testing.assert_close(a, b)
        a.square().mean().backward()
        b.square().mean().backward()
    for (name, a), b in zip(ours.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# ---- layouts -------------------------------------------------------------------------------------------


def test_channels_last_stays() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2),
                        nn.Conv2d(8, 4, 1))
    net = net.to(memory_format=torch.channels_last)
    eager = copy.deepcopy(net)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    a, b = compiled(net)(x), eager(x)
    torch.testing.assert_close(a, b)
    assert a.stride() == b.stride()
    a.sum().backward()
    b.sum().backward()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
        assert p.grad.stride() == q.grad.stride()


def test_strided_arguments() -> None:
    base = torch.randn(9, 10, 11)
    for x in (base.transpose(0, 2), base[1::2, :, 3:], base[2], base[:, 0], base[:1].expand(5, 10, 11),
              base.flatten()[7:-9].as_strided((4, 3), (5, 7), 3)):
        same(lambda x: (x * 2, x.sum(-1), x.softmax(0), x.cumsum(-1), x.transpose(0, -1).contiguous()), x)


def test_offsets_in_the_storage_of_an_argument() -> None:
    """Offsets count from the start of the storage. Dynamo does not guard where in it an argument begins."""
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.as_strided(x, (3,), (2,), 7) * 2, torch.as_strided(x[2:], (3,), (2,), 9) + 1,
                torch.as_strided(x * 2, (3,), (2,), 4), torch.as_strided(x, (3,), (2,)) - 1,
                torch.as_strided_scatter(x, x[:3] * 2, (3,), (2,), 6))

    ours = compiled(fn)
    for start in (5, 0, 3):
        same(fn, torch.arange(32.0)[start:start + 20], fn_compiled=ours, gradients=False)


# ---- dynamic shapes ------------------------------------------------------------------------------------


def steps(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x @ w, (w.shape[1],))
    return y.softmax(-1), y.mean(0), y.reshape(-1), y.cumsum(0), torch.cat((y, x @ w), 1), y.t().contiguous()


@pytest.mark.parametrize("dynamic", [True, None])
def test_another_batch_size_is_not_another_compile(dynamic: bool | None) -> None:
    """dynamic=None: the second size shows that the dimension varies, and later ones cost nothing."""
    counter = CompileCounterWithBackend("flambeau")
    torch._dynamo.reset()
    c = torch.compile(steps, backend=counter, dynamic=dynamic)
    w = leaf(6, 8)
    for batch in (4, 7, 13, 64, 2, 31):
        same(steps, leaf(batch, 6), w, fn_compiled=c)
    assert counter.frame_count == (1 if dynamic else 2)


def test_marked_dynamic() -> None:
    counter = CompileCounterWithBackend("flambeau")
    torch._dynamo.reset()
    c = torch.compile(steps, backend=counter)
    for batch in (3, 12, 5):
        x = torch.randn(batch, 6)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=100)
        torch.testing.assert_close(c(x, w := torch.randn(6, 8)), steps(x, w))
    assert counter.frame_count == 1


def test_dynamic_spatial_operators() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.adaptive_avg_pool2d(x, 3),
                F.adaptive_max_pool2d(x, 2), F.interpolate(x, scale_factor=2, mode="bilinear"), F.pad(x, (1, 2, 3, 0)),
                x.flatten(1).argmax(1), x + torch.arange(x.shape[-1]), F.pixel_unshuffle(x[:, :, :6, :6], 2))

    c = compiled(f, dynamic=True)
    for size in ((2, 2, 9, 7), (3, 2, 12, 15), (2, 2, 31, 8)):
        same(f, torch.randn(size), fn_compiled=c)


def test_dynamic_sizes_and_numbers_as_results() -> None:
    def f(x: Tensor, k: int, s: float) -> tuple[Any, ...]:
        return x.shape[0] * 2, x * k + x.shape[0] * s, x.new_zeros(x.shape[0] // 2 + k)

    c = compiled(f, dynamic=True)
    for n, k, s in ((5, 3, 0.5), (8, 4, 1.5), (11, 9, -2.0)):
        same(f, torch.randn(n), k, s, fn_compiled=c)


def test_sizes_by_way_of_floats() -> None:
    def f(x: Tensor, k: int) -> tuple[Tensor, ...]:
        return (F.interpolate(x, scale_factor=0.5), x / math.sqrt(x.shape[-1]), x.new_ones(math.ceil(x.shape[2] / 2)),
                (x * (1 / x.shape[2])).sin(), x + max(k, 0) + k // 2)

    c = compiled(f, dynamic=True)
    for size, k in (((2, 2, 9, 7), -3), ((3, 2, 12, 15), 4), ((2, 2, 31, 8), -10)):
        same(f, torch.randn(size), k, fn_compiled=c)


def test_sizes_that_data_decides() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y, chosen = x.sin(), x[x > 0]
        n = chosen.shape[0]
        return y + 1, chosen * 2, torch.nonzero(x > 0), x.masked_select(x < 0).sum(), y * n, torch.ones(n) + chosen

    same(f, torch.randn(5, 4))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        c = compiled(f, fullgraph=True)
        for x in (torch.randn(5, 4), torch.randn(5, 4), torch.zeros(5, 4)):
            same(f, x, fn_compiled=c)


# ---- autograd ------------------------------------------------------------------------------------------


def test_retain_graph_and_uses_of_one_result() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.tanh() * x.exp()).sum(1)

    ours, eager = leaf(4, 5), None
    eager = ours.detach().clone().requires_grad_()
    for x, g in ((ours, compiled(f)), (eager, f)):
        y = g(x)
        y.sum().backward(retain_graph=True)
        (y * y).sum().backward()
        (g(x) + g(x * 2)).sum().backward()
    torch.testing.assert_close(ours.grad, eager.grad)


def test_some_gradients_are_not_asked_for() -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return x * y, y.sin().detach(), (x + z).argmax(0), z * 2

    same(f, leaf(4, 5), torch.randn(4, 5), leaf(4, 5))
    x, y, z = fresh((leaf(4, 5), leaf(4, 5), leaf(4, 5)))
    compiled(f)(x, y, z)[0].sum().backward()
    assert y.grad is not None and torch.equal(y.grad, x)


def test_autocast() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    eager = copy.deepcopy(net)
    c, x = compiled(net), torch.randn(5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = c(x), eager(x)
    assert a.dtype is torch.bfloat16
    torch.testing.assert_close(a, b)
    a.float().square().sum().backward()
    b.float().square().sum().backward()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        assert p.grad.dtype is torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


def test_optimizer_step_under_compile() -> None:
    nets = [nn.Linear(6, 4) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.1, foreach=True) for n in nets]
    torch._dynamo.reset()
    step = torch.compile(optimizers[0].step, backend="flambeau")
    for _ in range(3):
        x = torch.randn(5, 6)
        for k, net in enumerate(nets):
            optimizers[k].zero_grad()
            net(x).square().sum().backward()
            step() if k == 0 else optimizers[k].step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ---- Dynamo --------------------------------------------------------------------------------------------


def test_graph_breaks() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        if y.sum() > 0:
            y = y.cos()
        return y * float(x.sum().item())

    with collect() as graphs:
        same(f, torch.randn(5))
    assert len(graphs) >= 3


def test_modules_can_be_copied_and_saved(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    c = compiled(net)
    x = torch.randn(3, 4)
    expected = c(x)
    twin = copy.deepcopy(c)
    torch.testing.assert_close(twin(x), expected)
    torch.save(c.state_dict(), tmp_path / "weights.pt")
    again = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="flambeau")
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    torch.testing.assert_close(again(x), expected)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="threads that trace at once "
                    "make torch before 2.13 crash in what it traces next, whatever the backend")
def test_threads_compile_and_run_at_once() -> None:
    """Each thread compiles functions of its own and calls one that they share."""
    torch._dynamo.reset()
    shared = torch.compile(lambda x: (x.exp() + 1).log().sum(1), backend="flambeau")
    def work(k: int) -> None:
        own = torch.compile(lambda x: ((x * (k + 1)).sin() + k).softmax(-1).sum(0), backend="flambeau")
        for n in (4, 4, 9):
            x = torch.randn(n, 33, generator=torch.Generator().manual_seed(k))
            # While one thread traces, torch.fx treats all threads as tracing, and Dynamo refuses their calls. With this
            # setting they run in eager mode instead.
            with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
                torch.testing.assert_close(own(x), ((x * (k + 1)).sin() + k).softmax(-1).sum(0))
                torch.testing.assert_close(shared(x), (x.exp() + 1).log().sum(1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_runs_that_overlap_do_not_share_intermediates() -> None:
    """An intermediate lives in memory that runs take turns with: eight threads, one compiled function."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = (x @ w).softmax(-1) + x
        return x

    w = torch.randn(64, 64)
    torch._dynamo.reset()
    c = torch.compile(f, backend="flambeau")
    inputs = [torch.randn(32, 64) for _ in range(8)]
    expected = [f(x, w) for x in inputs]
    c(inputs[0], w)
    start = threading.Barrier(8)

    def work(k: int) -> None:
        start.wait()
        for _ in range(20):
            torch.testing.assert_close(c(inputs[k], w), expected[k])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    ({"numerix": "fast"}, ("unknown option 'numerix'", "numerics")),
    ({"numerics": "slow"}, ("numerics is 'slow'", "'fast' or 'eager'")),
    ({"numerics": None}, ("numerics is None",)),
    ({"target": "cud"}, ("no target 'cud'",)),
])
def test_bad_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(flambeau.OptionError) as caught:  # the error itself: Dynamo does not wrap it
        compiled(lambda x: x + 1, options=options)(torch.randn(3))
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_bad_mode() -> None:
    from flambeau.compile.backend import check_options

    with pytest.raises(flambeau.OptionError, match="unknown mode 'warp'"):
        check_options(None, "warp")


@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_numerics(numerics: str) -> None:
    """eager rounds between operators, so bfloat16 chains have eager's bits; fast is nearer to the exact result."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return ((x + y) * 1.7 - x) * y

    x, y = torch.randn(2, 4096, dtype=torch.bfloat16)
    ours, eager, exact = compiled(f, options={"numerics": numerics})(x, y), f(x, y), f(x.double(), y.double())
    if numerics == "eager":
        assert torch.equal(ours, eager)
    else:
        assert (ours.double() - exact).abs().mean() < (eager.double() - exact).abs().mean()


def test_no_warning_in_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        same(lambda x, w: F.cross_entropy(x @ w, torch.tensor([1, 0, 2])), leaf(3, 4), leaf(4, 3))


@pytest.mark.parametrize("backend", ["flambeau", "eager"])
def test_a_function_that_is_not_compiled_but_what_it_calls_is(backend: str) -> None:
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="flambeau")(torch.ones(3))
    counter = CompileCounterWithBackend(backend)

    def inside(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    @torch._dynamo.disable(recursive=False)
    def outside(x: torch.Tensor) -> torch.Tensor:
        return inside(x) * 2

    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(lambda x: outside(x), backend=counter)(x), x.cos() * 2)
    assert counter.op_count == 1

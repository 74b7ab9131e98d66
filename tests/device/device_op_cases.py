"""Operators of the device "flambeau", in a process of its own (test_device.py): two devices, as device_cases.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flambeau
from flambeau import pipeline
from flambeau.device import torch_module as device_module
from flambeau.device.copies import Copies
from flambeau.device.fallback import Fallback, reset_fallbacks
from flambeau.testing.device_opinfo import check_on_device
from two_devices import DEV, enabled, numbers, quiet  # noqa: F401


@pytest.fixture
def falls_back() -> None:
    """A test in which the CPU may compute."""


@pytest.fixture(autouse=True)
def nothing_falls_back(request: pytest.FixtureRequest) -> Iterator[None]:
    reset_fallbacks()
    yield
    if "falls_back" not in request.fixturenames:
        assert flambeau.fallbacks() == []


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.device.type == DEV
    torch.testing.assert_close(a.cpu(), b, equal_nan=True)


@pytest.fixture
def compiled() -> Iterator[list[Any]]:
    """Collects the kernels that are compiled in a test."""
    seen: list[Any] = []
    pipeline.OBSERVERS.append(seen.append)
    yield seen
    pipeline.OBSERVERS.remove(seen.append)


# ---- forms -----------------------------------------------------------------------------------------------


def test_an_operator_in_all_its_forms() -> None:
    x, y = numbers(4, 5), numbers(4, 5).abs() + 1
    a, b = x.to(DEV), y.to(DEV)
    close(torch.div(a, b), x / y)
    out = torch.empty(0, device=DEV)
    assert torch.div(a, b, out=out) is out
    close(out, x / y)
    wide = torch.empty(4, 5, dtype=torch.float64, device=DEV)
    close(torch.div(a, b, out=wide), (x / y).double())
    many = numbers(4, 999) / 7
    close(torch.sum(many.to(DEV), 1, out=torch.empty(4, dtype=torch.float64, device=DEV)),
          torch.sum(many, 1, out=torch.empty(4, dtype=torch.float64)))  # not in float32
    gaps = torch.full((4, 10), 7.0, device=DEV)
    torch.div(a, b, out=gaps[:, ::2])
    close(gaps[:, ::2], x / y)
    close(gaps[:, 1::2], torch.full((4, 5), 7.0))
    assert a.div_(b) is a
    close(a, x / y)


def test_several_results_in_arguments() -> None:
    x = numbers(3, 7)
    values, indices = torch.empty(0, device=DEV), torch.empty(0, dtype=torch.int64, device=DEV)
    torch.max(x.to(DEV), 1, out=(values, indices))
    close(values, x.max(1).values)
    close(indices, x.max(1).indices)


def test_a_tensor_may_be_there_twice() -> None:
    x = numbers(6)
    a = x.to(DEV)
    a.mul_(a)
    close(a, x * x)
    torch.add(a, a, out=a)
    close(a, 2 * x * x)


@pytest.mark.parametrize(("join", "xs"), [
    (partial(torch.cat, dim=1), [numbers(3, k % 4) for k in range(150)]),
    (torch.cat, [numbers(0) if k % 3 else numbers(2, 3) for k in range(40)]),
    (torch.cat, [numbers(3).long() if k < 20 else numbers(3) for k in range(40)]),
    (partial(torch.cat, dim=-3), [numbers(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(20)]),
    (partial(torch.stack, dim=-1), [numbers(3, 4) for _ in range(40)]),
    (torch.stack, [numbers() for _ in range(40)])])
def test_many_tensors_are_joined_piece_by_piece(join: Callable[..., torch.Tensor], xs: list[torch.Tensor],
                                                compiled: list[Any]) -> None:
    want = join(xs)
    for out in ({}, {"out": torch.empty(0, dtype=want.dtype, device=DEV)}):
        made = join([x.to(DEV) for x in xs], **out)
        close(made, want)
        assert made.stride() == want.stride()
    assert len(compiled) < 12  # kernels of all parts would take minutes


def test_what_overlaps_is_the_cpus() -> None:
    a = numbers(6).to(DEV)
    with pytest.raises(RuntimeError, match="single memory location"):
        a[1:].add_(a[:-1])
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.zeros(1, device=DEV).expand(3).add_(1)


def test_wrong_calls_raise_what_the_cpu_raises() -> None:
    a = numbers(3).to(DEV)
    with pytest.raises(RuntimeError, match="must match the size"):
        a + numbers(4).to(DEV)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(a, a, out=torch.empty(3, dtype=torch.int32, device=DEV))


def test_numbers_and_promotion() -> None:
    x = numbers(5, dtype=torch.int32)
    for other in (2, 2.5, True, torch.tensor(2.5), torch.tensor(3)):
        close(x.to(DEV) * other, x * other)
        close(other + x.to(DEV), other + x)
    close(numbers(5, dtype=torch.bfloat16).to(DEV) + 1.5, numbers(5, dtype=torch.bfloat16) + 1.5)


def test_compiled_numbers_of_data() -> None:
    def f(n: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
        k, z = (n + 1).item(), x * 2
        torch._check(k >= 0)
        torch._check(k <= 5)
        return z.sin() * k, z[:k].sum(), torch.zeros(k) + 1, k, z.round().nonzero().shape[0]

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, backend="flambeau", fullgraph=True)
        for k in (3, 0, 2):
            n, x = torch.tensor(k), torch.rand(5, 4)
            torch.testing.assert_close(compiled(n.to(DEV), x.to(DEV)), f(n, x), check_device=False)


def test_numbers_that_change_are_arguments(compiled: list[Any]) -> None:
    x, y = numbers(6), numbers(6).abs() + 1
    for k in range(8):
        close(x.to(DEV) * (k + 0.5), x * (k + 0.5))
        close(x.to(DEV) - k * 3, x - k * 3)
        a = x.to(DEV)
        close(a.addcdiv_(y.to(DEV), y.to(DEV), value=-0.1 * k), x.clone().addcdiv_(y, y, value=-0.1 * k))
    assert len(compiled) <= 3 * 2  # one with the number in it, then one for all numbers


def test_views_in_place_move_nothing() -> None:
    a = numbers(3, 3).to(DEV)
    other = a.view(9)
    assert a.transpose_(0, 1).stride() == (1, 3)
    close(other, numbers(9))
    close(a, numbers(3, 3).t())
    close(a.unsqueeze_(0).squeeze_(0), numbers(3, 3).t())


# ---- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_copies_stay_on_the_device(dtype: torch.dtype) -> None:
    x = numbers(4, 6)
    a = x.to(DEV)
    close(a.to(dtype), x.to(dtype))
    close(a.t()[::2].contiguous(), x.t()[::2].contiguous())
    target = torch.zeros(6, 8, dtype=dtype, device=DEV)
    target[:, ::2].copy_(a.t())
    close(target[:, ::2], x.t().to(dtype))
    assert not target[:, 1::2].any()


def test_masks_and_places() -> None:
    x = numbers(4, 6)
    a, mask = x.to(DEV), x > 2
    close(a[mask.to(DEV)], x[mask])
    close(a[mask], x[mask])  # indices may be on the CPU
    close(a[torch.tensor([2, 0])], x[[2, 0]])
    for found in (mask, mask[:0], mask & False, mask.any()):
        close(found.to(DEV).nonzero(), found.nonzero())
        assert found.to(DEV).nonzero().stride() == found.nonzero().stride()
    b, y = a.clone(), x.clone()
    b[mask.to(DEV)] = 1.5
    y[mask] = 1.5
    close(b, y)
    b[mask.to(DEV)] = torch.arange(mask.sum(), dtype=torch.float32).to(DEV)
    y[mask] = torch.arange(mask.sum(), dtype=torch.float32)
    close(b, y)
    assert torch.equal(a, a.clone()) and not torch.equal(a, b)


def test_integers_are_counted() -> None:
    x = torch.tensor([3, 0, 7, 7, 9, -2, 4, 8], dtype=torch.int32)
    for arguments in ((8, 0, 8), (3, -2, 9), (5,), (4, 2, 2)):
        close(torch.histc(x.to(DEV), *arguments), torch.histc(x.double(), *arguments).int())


def test_statistics_of_a_norm_are_updated() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.BatchNorm2d(3).to(DEV), nn.BatchNorm2d(3)
    for _ in range(2):
        x = torch.randn(4, 3, 5, 5)
        close(ours(x.to(DEV)), theirs(x))
    close(ours.running_mean, theirs.running_mean)
    close(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked.item() == 2


@pytest.mark.usefixtures("falls_back")
def test_statistics_are_updated_by_the_cpu_as_well() -> None:
    core = device_module._native()
    fallback = Fallback(Copies(DEV, core._driver, core), core.generator, device_module.current_device)
    x, mean, var = numbers(4, 3, 5), torch.zeros(3), torch.ones(3)
    there = [t.to(DEV) for t in (mean, var)]
    fallback.call(torch.ops.aten.native_batch_norm.default, x.to(DEV), None, None, *there, True, 0.1, 1e-5)
    torch.ops.aten.native_batch_norm.default(x, None, None, mean, var, True, 0.1, 1e-5)
    close(there[0], mean)
    close(there[1], var)


def test_statistics_of_a_transposed_batch_lie_as_the_cpus() -> None:
    for x in (torch.randn(4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 3, 4)):
        x = x.transpose(0, 1)
        want, got = (F.batch_norm(t, None, None, training=True) for t in (x, x.to(DEV)))
        assert x.to(DEV).stride() == x.stride() and got.stride() == want.stride()
        close(got, want)


# ---- random numbers --------------------------------------------------------------------------------------


def test_random_numbers_come_from_the_generator() -> None:
    draws: list[Callable[..., torch.Tensor]] = [
        lambda **g: torch.rand(1000, device=DEV, **g), lambda **g: torch.randn(1000, device=DEV, **g),
        lambda **g: torch.empty(1000, device=DEV).exponential_(**g)]
    for draw in draws:
        torch.manual_seed(5)
        first, second = draw().cpu(), draw().cpu()
        torch.manual_seed(5)
        assert torch.equal(draw().cpu(), first) and not torch.equal(first, second)
        given = torch.Generator(DEV).manual_seed(5)
        torch.manual_seed(6)
        assert torch.equal(draw(generator=given).cpu(), first)
    x = torch.randn(20000, device=DEV)
    assert abs(x.mean().item()) < 0.05 and abs(x.std().item() - 1) < 0.05


def test_dropout() -> None:
    x = torch.ones(10000, device=DEV, requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and abs((y == 0).float().mean().item() - 0.25) < 0.03


# ---- faults, streams, devices ----------------------------------------------------------------------------


def test_a_fault_is_raised_where_somebody_waits() -> None:
    x = numbers(5, 3).to(DEV)
    for wait in (torch.flambeau.synchronize, x.cpu):
        x.index_select(0, torch.tensor([0, 8]).to(DEV) + 1)  # on its way: nobody knows yet
        with pytest.raises((IndexError, RuntimeError), match="index out of range"):
            wait()
    close(x.index_select(0, torch.tensor([1, 4]).to(DEV)), numbers(5, 3)[[1, 4]])
    torch.flambeau.synchronize()


def test_kernels_go_to_the_current_stream() -> None:
    x = torch.ones(1 << 18, device=DEV)
    side = torch.Stream(device=DEV)
    torch.flambeau.synchronize()
    with side:
        y = x
        for _ in range(30):
            y = y.sin()
        done = side.record_event()
    torch.accelerator.current_stream().wait_event(done)
    z = y + 1
    expected = torch.ones(8)
    for _ in range(30):
        expected = expected.sin()
    close(z[:8], expected + 1)
    side.synchronize()
    assert side.query()


def test_another_device() -> None:
    x = numbers(8)
    a = x.to("flambeau:1")
    b = (a * 2).cumsum(0)
    assert b.device.index == 1 and torch.flambeau.current_device() == 0
    close(b, (x * 2).cumsum(0))


# ---- torch.compile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["flambeau:0", "flambeau:1"])
def test_compiled_forward_and_backward(device: str) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(x * w, (6,)).softmax(1) * x).sum(0)

    x, w = numbers(5, 6), numbers(6) / 3
    results = []
    for on in ("cpu", device):
        torch._dynamo.reset()
        a, b = x.clone().to(on).requires_grad_(), w.clone().to(on).requires_grad_()
        out = (torch.compile(loss, backend="flambeau") if on == device else loss)(a, b)
        out.backward(torch.arange(6, dtype=torch.float32).to(on))
        results.append([t.detach().cpu() for t in (out, a.grad, b.grad)])
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_compiled_random_numbers() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: F.dropout(x, 0.5), backend="flambeau")
    x = torch.ones(1000, device=DEV)
    torch.manual_seed(1)
    first, second = run(x).cpu(), run(x).cpu()
    torch.manual_seed(1)
    assert torch.equal(run(x).cpu(), first) and not torch.equal(first, second)


@pytest.mark.usefixtures("falls_back")
def test_compiled_calls_of_what_has_no_lowering() -> None:
    torch._dynamo.reset()
    x = numbers(6)
    close(torch.compile(lambda x: torch.fft.rfft(x * 2).real + 1, backend="flambeau")(x.to(DEV)),
          torch.fft.rfft(x * 2).real + 1)


# ---- sparse tensors --------------------------------------------------------------------------------------

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def sparse(layout: torch.layout, dense: torch.Tensor) -> torch.Tensor:
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return dense.to_sparse(layout=layout, **blocks)


@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sparse_tensors(layout: torch.layout) -> None:
    dense = numbers(4, 6).relu()
    x, a = sparse(layout, dense), sparse(layout, dense.to(DEV))
    close(a, x)
    close(x.to(DEV), x)
    close(a.clone() * 2, x * 2)
    close(a.to_dense(), dense)
    close(a.sum(), x.sum())
    close(a.t(), x.t())
    if layout is torch.sparse_coo:
        close(a.unsqueeze(0), x.unsqueeze(0))
    if layout is torch.sparse_csr:
        close(a.select(0, 1), x.select(0, 1))
    if layout is not torch.sparse_bsc:  # which the CPU does not multiply
        close(a @ dense.t().to(DEV), x @ dense.t())
    assert "device='flambeau:0', size=(4, 6)" in str(a) and str(layout) in str(a)
    leaf, there = (d.clone().requires_grad_() for d in (dense, dense.to(DEV)))
    for t in (leaf, there):
        (sparse(layout, t).to_dense() * t).sum().backward()
    close(there.grad, leaf.grad)


@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_sparse_tensors_that_are_written(layout: torch.layout) -> None:
    x, more = sparse(layout, numbers(4, 6).relu()), sparse(layout, torch.eye(4, 6))
    a, values = x.to(DEV), "_values" if layout is torch.sparse_coo else "values"
    held = getattr(a, values)()
    assert a.sin_() is a
    close(a, x.sin_())
    close(held, getattr(x, values)())  # in the memory that it had
    a.add_(more.to(DEV))  # more elements than there were
    close(a, x.add_(more))
    assert getattr(a, values)().device.type == DEV
    out = sparse(layout, torch.zeros(4, 6)).to(DEV)
    assert torch.add(a, more.to(DEV), out=out) is out
    close(out, x + more)


@pytest.mark.usefixtures("falls_back")
def test_sparse_tensors_made_of_parts() -> None:
    places, values = torch.tensor([[0, 0, 2], [1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0])
    x = torch.sparse_coo_tensor(places, values, (3, 3))
    a = torch.sparse_coo_tensor(places.to(DEV), values.to(DEV), (3, 3))
    assert not a.is_coalesced() and a.coalesce().is_coalesced()
    close(a.coalesce(), x.coalesce())
    close(torch.sparse_coo_tensor(places, values, (3, 3), device=DEV).to_dense(), x.to_dense())
    with pytest.raises(RuntimeError, match="size is inconsistent"):
        torch.sparse_coo_tensor(places.to(DEV), values.to(DEV), (1, 1), check_invariants=True)
    with pytest.raises(RuntimeError, match="same device"):
        a @ torch.ones(3, 3)
    for name in ("sparse_mm_reduce", "sparse_sampled_addmm"):
        assert check_on_device(name).failures == []


@pytest.mark.usefixtures("falls_back")
def test_sparse_gradients_of_embeddings() -> None:
    weights = []
    for device in ("cpu", DEV):
        table = nn.Embedding.from_pretrained(numbers(10, 3).to(device), freeze=False, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        table(torch.tensor([1, 1, 3], device=device)).square().sum().backward()
        assert table.weight.grad is not None and table.weight.grad.layout is torch.sparse_coo
        optimizer.step()
        weights.append(table.weight.detach())
    close(weights[1], weights[0])


# ---- the operator database -------------------------------------------------------------------------------

# One of each family; test_device.py has all of them, for `make test-all`.
FAMILIES = ("add", "nn_functional_gelu", "sum", "cumsum", "nn_functional_max_pool2d", "nn_functional_layer_norm",
            "nn_functional_embedding", "scatter_add", "gather", "softmax", "nn_functional_cross_entropy", "cat",
            "nn_functional_grid_sample", "bitwise_xor", "_upsample_bilinear2d_aa")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_do_not_fall_back(name: str) -> None:
    report = check_on_device(name, torch.int64 if name.startswith("bitwise") else torch.float32, limit=1)
    assert report.samples and report.ok and report.native, (report.failures, report.externs)


# ---- sorts -----------------------------------------------------------------------------------------------


def every_result(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.stride() == b.stride()
        close(a, b)


def test_sorts_and_what_is_chosen_by_order() -> None:
    x = torch.randint(0, 9, (3, 12)).float()
    d = x.to(DEV)
    every_result(d.sort(stable=True, descending=True), x.sort(stable=True, descending=True))
    every_result(d.mode(1), x.mode(1))
    every_result((d.argsort(stable=True), torch.msort(d)), (x.argsort(stable=True), torch.msort(x)))
    every_result((d.topk(5)[0], d.median(), d.median(1)[0]), (x.topk(5)[0], x.median(), x.median(1)[0]))
    values, places = torch.empty(0, device=DEV), torch.empty(0, dtype=torch.int64, device=DEV)
    torch.sort(d, stable=True, out=(values, places))
    every_result((values, places), x.sort(stable=True))
    with pytest.raises(RuntimeError, match="out of range"):
        d.topk(99)


def test_unique() -> None:
    x, y = torch.randint(0, 9, (3, 12)), torch.randint(0, 2, (30, 3))
    for fn in (lambda t, u: t.unique(return_inverse=True, return_counts=True),
               lambda t, u: u.unique(dim=0, return_inverse=True, return_counts=True),
               lambda t, u: u.unique_consecutive(return_inverse=True, return_counts=True)):
        every_result(fn(x.to(DEV), y.to(DEV)), fn(x, y))


@pytest.mark.usefixtures("falls_back")
def test_unique_rows_with_nan() -> None:
    """They have no order: eager's is that of the CPU's sort."""
    x = torch.tensor([[1.0, torch.nan], [1.0, torch.nan], [2.0, 0.0], [2.0, 0.0]])
    for k in (0, 1):
        every_result(x.to(DEV).unique(dim=k, return_inverse=True), x.unique(dim=k, return_inverse=True))


def test_draws_that_sort() -> None:
    n, p = 20_000, torch.tensor([0.0, 1, 2, 3, 0], device=DEV)
    torch.manual_seed(3)
    several, first = p.multinomial(n, replacement=True), p.expand(n, 5).multinomial(2)
    for drawn in (several, first[:, 0], p.expand(n, 5).multinomial(1)[:, 0]):
        counts = torch.bincount(drawn.cpu(), minlength=5)
        torch.testing.assert_close(counts / n, p.cpu() / 6, rtol=0, atol=0.02)
        assert counts[0] == counts[4] == 0
    assert not (first[:, 0] == first[:, 1]).any()
    g = torch.Generator(DEV)
    a, b = (torch.randperm(300, generator=g.manual_seed(5), device=DEV, dtype=torch.int32) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(a.sort()[0].cpu(), torch.arange(300, dtype=torch.int32))
    for probabilities, replacement, said in (([-1.0, 2], False, "element < 0"), ([0.0, 0], False, "sum of prob"),
                                             ([1.0, float("nan")], True, "infinity or NaN")):
        with pytest.raises(RuntimeError, match=said):
            torch.tensor(probabilities, device=DEV).multinomial(1 if not replacement else 5, replacement)


def _filled(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.full(shape, value, dtype=dtype, device=device)


FLOATS, MANY, INTS, BOOLS = (_filled(1, 3), _filled(1, 3, 3), _filled(1, 3, dtype=torch.int64),
                             _filled(1, 3, dtype=torch.bool))
ROW = _filled(0, 2, dtype=torch.int64)


@pytest.mark.parametrize("call", [
    lambda d: torch.add(INTS(d), INTS(d), alpha=1.5), lambda d: torch.add(INTS(d), 1, alpha=True),
    lambda d: FLOATS(d) - BOOLS(d), lambda d: BOOLS(d) - 1, lambda d: torch.rsub(BOOLS(d), 1),
    lambda d: torch.linspace(0, 1, 3, device=d, dtype=torch.bool), lambda d: INTS(d) ** -1,
    lambda d: INTS(d).var(), lambda d: torch.heaviside(FLOATS(d), INTS(d)), lambda d: BOOLS(d).relu(),
    lambda d: BOOLS(d).ceil(), lambda d: BOOLS(d).argmax(), lambda d: INTS(d).round(decimals=2),
    lambda d: F.avg_pool2d(_filled(1, 1, 3, 3, dtype=torch.int32)(d), 2),
    lambda d: F.max_pool2d(_filled(1, 1, 3, 3, dtype=torch.bool)(d), 2),
    lambda d: FLOATS(d).uniform_(2, 1), lambda d: BOOLS(d).random_(0, 5),
    lambda d: MANY(d).index_add(0, ROW(d), _filled(1, 2, 2)(d)),
    lambda d: MANY(d).index_copy(0, ROW(d), _filled(1, 2, 3, dtype=torch.float64)(d)),
    lambda d: MANY(d).__setitem__(([0, 1], [0, 1, 2]), 0),
    lambda d: MANY(d).__setitem__(ROW(d), MANY(d)[:2].double()),
    lambda d: FLOATS(d).put_(INTS(d), _filled(1, 2)(d)), lambda d: INTS(d).div_(2), lambda d: BOOLS(d).add_(1),
], ids=str)
def test_what_the_cpu_refuses(falls_back: None, call: Callable[[str], torch.Tensor]) -> None:
    state = torch.get_rng_state()
    with pytest.raises(Exception) as theirs:  # noqa: B017
        call("cpu")
    with pytest.raises(type(theirs.value)) as ours:
        call(DEV)
    assert str(ours.value) == str(theirs.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_small_floats_that_the_cpu_lacks() -> None:
    x = torch.full((1, 1, 2, 2, 2), 2.0, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
        F.avg_pool3d(x, 2)
    assert F.avg_pool3d(x.to(DEV), 2).item() == 2


@pytest.mark.parametrize("args", [(7,), (7, False), (7, True, 8.0)])
def test_windows(falls_back: None, args: tuple[Any, ...]) -> None:
    """PyTorch makes this one of a kernel that only its own devices can have."""
    made = torch.kaiser_window(*args, device=DEV)
    assert made.device.type == DEV and torch.equal(made.cpu(), torch.kaiser_window(*args))

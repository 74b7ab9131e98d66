"""What copies in eager is memory of its own, with eager's strides: for `as_strided`, for views as other dtypes, for
results that share memory, and for writes to a view."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from flambeau.capture import eager_strides

Fn = Callable[..., Any]

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(24.0).view(2, 2, 3, 2).permute(3, 2, 1, 0),
    "channels last": lambda: torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "every other": lambda: torch.arange(48.0).view(2, 3, 2, 4)[..., ::2],
    "expanded": lambda: torch.arange(4.0).view(1, 1, 2, 2).expand(2, 3, 2, 2),
    "ones": lambda: torch.arange(6.0).view(2, 3, 1, 1).to(memory_format=torch.channels_last),
}
COPIES: dict[str, Fn] = {
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "flip": lambda x: x.flip(1),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)),
    "roll": lambda x: x.roll(1, 1),
    "roll flat": lambda x: x.roll(3),
    "clone": lambda x: x.clone(),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x.diagonal(0, 1, 2) + 1, 0, 1, 2),
    "select_scatter": lambda x: torch.select_scatter(x, x[:, 0] + 1, 1, 1),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:1] * 2, 0, 1, 2),
    "sum": lambda x: x.sum(1, keepdim=True),
    "amax": lambda x: x.amax((0, 2), keepdim=True),
    "argmax": lambda x: x.argmax(1, keepdim=True).float(),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "floor_divide": lambda x: x // torch.tensor(2.0),
    "logical_and": lambda x: torch.logical_and(x, x[:1]).float(),
    "narrow_copy": lambda x: torch.narrow_copy(x, 1, 1, 2),
    "relu": lambda x: x.relu(),
    "matmul": lambda x: x @ x.transpose(2, 3),
}


def facts(results: Any, inputs: list[Tensor]) -> tuple[Any, ...]:
    """Shapes, strides and offsets; who shares memory with whom; values, those of the inputs after the call included."""
    tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    every = [*tensors, *inputs]
    places = [t.untyped_storage().data_ptr() for t in every]
    return ([(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors],
            [(a, b) for a, b in itertools.combinations(range(len(every)), 2) if places[a] == places[b]],
            [t.detach().clone() for t in every])


def same(fn: Fn, *makers: Callable[[], Tensor], dynamic: bool = False, **options: Any) -> None:
    torch._dynamo.reset()
    runs = []
    for f in (fn, torch.compile(fn, backend="flambeau", dynamic=dynamic, options=options)):
        inputs = [make() for make in makers]
        runs.append(facts(f(*inputs), inputs))
    eager, ours = runs
    assert ours[0] == eager[0]
    assert ours[1] == eager[1]
    torch.testing.assert_close(ours[2], eager[2])


def looked_at(x: Tensor) -> list[Any]:
    """Every copy, through whatever looks at memory; together, so that one compilation does."""
    out: list[Any] = []
    for copy in COPIES.values():
        y = copy(x)
        out += [y.as_strided((2, 2), (1, 2)) + 1, y.select(0, 0).as_strided((2,), (1,)) + 1]
        out += [y.as_strided((2,), (1,), 1)]
    return out


def viewed(x: Tensor) -> list[Any]:
    out: list[Any] = []
    for copy in COPIES.values():
        y = copy(x)
        out += [y, y.select(0, y.shape[0] - 1), y.transpose(0, -1), copy(x)[-1:], y.view(torch.int32)]
    return out


@pytest.mark.parametrize("layout", ["transposed", "channels last", "every other", "expanded"])
def test_what_looks_at_memory_sees_eagers(layout: str) -> None:
    same(looked_at, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["transposed", "channels last", "ones"])
def test_results_share_memory_and_have_strides_as_in_eager(layout: str) -> None:
    same(viewed, LAYOUTS[layout])


def test_the_same_with_sizes_of_the_run() -> None:
    def fn(x: Tensor) -> list[Any]:
        n = x.shape[0]
        y, z = x.flip(1), x.repeat(2, 1)
        return [y, y[1:], y.as_strided((n,), (1,)) + 1, z.as_strided((n, 2), (2, 1)), z.view(torch.int32), z[n:].t(),
                x.sum(1, keepdim=True), torch.select_scatter(x, x[1], 0, 0).as_strided((n,), (1,), 1)]

    same(fn, lambda: torch.arange(35.0).view(7, 5), dynamic=True)


@pytest.mark.parametrize("target", ["interpreter", "opencl"])
def test_on_other_targets(target: str) -> None:
    def fn(x: Tensor) -> list[Any]:
        y, z = x.flip(1), x.roll(1, 1)
        return [y, y[1:], z.as_strided((4, 3), (3, 1)) + 1, x.repeat(1, 2, 1, 1).as_strided((2, 6), (6, 1)) + 1, z]

    same(fn, LAYOUTS["channels last"], target=target)


def test_in_place_on_views_of_what_has_gaps() -> None:
    def fn(x: Tensor) -> Tensor:
        x.diagonal().add_(1)
        x.fill_diagonal_(2)
        return x + 0

    same(fn, lambda: torch.arange(42).view(7, 6)[:, ::2])


def test_an_input_that_begins_inside_its_storage() -> None:
    def fn(x: Tensor) -> list[Any]:
        y = torch.select_scatter(x, x[0] * 2, 0, 1)
        z = torch.slice_scatter(y, y[:1], 0, 1, 2)
        return [x.as_strided((3,), (1,), 1) + 1, y.as_strided((3,), (1,), 1) + 1, z.as_strided((3,), (1,), 1) + 1]

    for k in (2, 0, 3):
        same(fn, lambda k=k: torch.arange(100.0).view(10, 10)[k:k + 7])


def test_views_as_another_dtype_are_views() -> None:
    def fn(x: Tensor) -> list[Any]:
        y = x + 1
        return [y.view(torch.int16), y.view(torch.int16).as_strided((2, 4), (4, 1)) + 1, y.view(torch.int32), y,
                x.view(torch.int32).as_strided((2, 4), (4, 1)) + 1, x.flip(0).view(torch.uint8)[1:]]

    same(fn, lambda: torch.arange(24.0).view(4, 6))


def test_a_constant_is_copied_for_each_caller() -> None:
    fn = torch.compile(lambda x: torch.tensor([1.0, 2.0, 3.0]), backend="flambeau")
    first = fn(torch.ones(2))
    first.add_(1)
    assert fn(torch.ones(2)).tolist() == [1, 2, 3]


@pytest.fixture(params=["eager's kernels", "rules"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says how a result lies: eager's kernels do of small tensors, the rules of large ones."""
    if request.param == "rules":
        monkeypatch.setattr(eager_strides, "FEW", -1)


@pytest.mark.usefixtures("asked")
def test_strides_where_torchs_metadata_says_others() -> None:
    """They have eager's strides where torch's metadata is wrong; so have values computed from them, and gradients."""
    channels = LAYOUTS["channels last"]
    same(lambda x: (x.roll(1, 1), x.roll((1, 2), (1, 3)) * 2), channels)
    same(lambda x: x.roll(1, 1) * 2, lambda: channels().requires_grad_())
    ints, floats = lambda: torch.arange(10).view(2, 5).t(), lambda: torch.ones(5, 1) * 1.5
    same(lambda x, y: [torch.hypot(x, y), torch.copysign(x, y), torch.floor_divide(x, y), torch.logaddexp(x * 0.1, y),
                       torch.logical_and(x, y), torch.atan2(x, y) + 1], ints, floats)
    same(lambda x: [x.expand(1, 1), (x + 1).expand(1, 1)], lambda: torch.tensor(2.0))
    same(lambda x: [torch.stack([x, x], 1), torch.einsum("abcd,abde->abce", x, x.transpose(2, 3)), x.exp(), x * 2],
         lambda: torch.arange(8.0).view(1, 2, 1, 4).to(memory_format=torch.channels_last) / 8)
    same(lambda x: [torch.zeros_like(x), x.flip(0), F.hardtanh(x), x + 1, x.clone()],
         lambda: torch.ones(5, 0, 10, 2)[..., 0])
    same(lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2)),
         lambda: torch.arange(24.0).view(4, 2, 3).transpose(0, 2))


@pytest.mark.usefixtures("asked")
def test_strides_of_dimensions_of_one_element() -> None:
    """With run-time sizes, with gradients beside views of results, and for empty tensors."""

    def fn(x: Tensor) -> list[Any]:
        y = x.transpose(0, 1)[:, :1]
        return [x.rot90(2, (1, 2)), x.clamp(0), y.clamp(0), x[:, :1].sort(1)[0], torch.zeros_like(y),
                y.index_copy(0, torch.tensor([0]), y[:1]), x[:, :1].view(1, -1, 1), x * 2 - x[:, :1]]

    same(fn, lambda: torch.arange(24.0).view(2, 4, 3)[::2], dynamic=True)
    same(lambda x: (x.clamp(0) * 2, (y := x.neg()), y[0]),
         lambda: torch.ones(1, 5, 1).transpose(0, 1).requires_grad_())
    same(lambda x: [x * 2, x.t() * 2, torch.minimum(x, x[:1]), x.unsqueeze(2).permute(2, 1, 0) + 1],
         lambda: torch.ones(2, 0))
    same(lambda x: x.permute(1, 2, 0) + 1, lambda: torch.ones(5, 3, 0))


def test_strides_that_eagers_kernels_have() -> None:
    """Cases without a rule for strides: indexing, and reductions of empty tensors."""
    index = lambda: torch.tensor([0])  # noqa: E731
    same(lambda x, i: [x.as_strided((3, 1, 1), (1, 4, 4))[..., i], x[:0].view(1, 0, 1, 1)[:, :, i]],
         lambda: torch.arange(9.0), index)
    same(lambda x, i: [x[:, i[:0]], x[:, i], x[i, :, i]], lambda: torch.ones(12, 3, 2, 1).transpose(0, -1), index)
    same(lambda x: [x[:, 1:0].sum((2, -4), keepdim=True), x[:, :0].sum(2), x[:, :0].amax(2)],
         lambda: torch.ones(1, 2, 3, 4))
    same(lambda x: x.all(-1, keepdim=True)[:, :, :, :1:3].select(1, -1).sigmoid(), lambda: torch.ones(2, 2, 1, 1))
    same(lambda x: (x.expm1() * 0.1, x.float().nan_to_num()), lambda: torch.ones(0, 1, 2).bool(), dynamic=True)
    same(lambda x: x.nan_to_num(1, 2, 3), lambda: torch.tensor([0, torch.inf, -torch.inf, 1]).as_strided(
        (2, 1, 2), (2, 7, 1)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_strided_view_across_dimensions_is_a_view(dynamic: bool) -> None:
    def fn(x: Tensor) -> list[Any]:
        y = (x * x + 1).log()
        return [y.as_strided((4, 2), (7, 1), 1), y, y[1], y.as_strided((4, 2), (7, 1), 1).t()]

    same(fn, lambda: torch.arange(28.0).view(2, 1, 7, 2), dynamic=dynamic)
    same(fn, lambda: torch.arange(28.0).view(2, 2, 7, 1).permute(0, 3, 2, 1), dynamic=dynamic)


def test_views_without_elements_begin_where_eagers_do() -> None:
    def fn(x: Tensor) -> list[Any]:
        y = x + 1
        z = x.slice_scatter(x[:1], 0, 0, 1).zero_()
        return [y, y[1:-2], y[2:, 1:], y.diagonal(3), z.diagonal(3), y[:0].squeeze(), y.view(torch.int16)[2:, 1:]]

    same(fn, lambda: torch.ones(2, 3))
    same(fn, lambda: torch.ones(2, 3), dynamic=True)
    x = torch.ones(2, 3, 0, dtype=torch.int32)
    same(lambda x: torch.bmm(x, x.mT), lambda: x.narrow(1, 1, 1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_all_that_is_empty_are_other_objects(dynamic: bool) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        y, z = x[2:].abs(), x[:, 1:].amin(0)
        return [y, y.view(-1, 1), y.squeeze(0), y, z.tensor_split(2)[0].neg_(), z]

    torch._dynamo.reset()
    found = torch.compile(fn, backend="flambeau", dynamic=dynamic)(torch.ones(2, 1))
    assert [next(k for k, other in enumerate(found) if other is t) for t in found] == [0, 1, 2, 0, 4, 5]


def test_shuffled_channels_are_a_copy_unless_there_are_none() -> None:
    def fn(x: Tensor) -> list[Any]:
        y = x[4::3]
        return [torch.channel_shuffle(x, 2), torch.channel_shuffle(y, 2), y]

    same(fn, lambda: torch.arange(144.0).view(4, 4, 3, 3))


def test_copies_of_one_element_keep_its_stride() -> None:
    def fn(x: Tensor) -> list[Any]:
        y = x.as_strided((1,), (2,))
        return [y.clone(), y.to(torch.int32), y.clone(memory_format=torch.contiguous_format)]

    same(fn, lambda: torch.ones(5, 1))


def test_scatters_copy_the_storage() -> None:
    """The copy keeps the offset, elements beyond the view, and shared elements, but not expanded dimensions."""
    base = torch.arange(8.0)
    same(lambda x: x.slice_scatter(x[2:], 0, 2).select_scatter(x[0], 0, 1).unsqueeze_(0),
         lambda: base[2:].clone().narrow(0, 3, 3))

    def beyond(x: Tensor) -> Tensor:
        x[5:] = 0
        return x.as_strided((1, 4), (4, 2))

    same(beyond, lambda: base.clone().unfold(0, 3, 1).select(1, 1))
    same(lambda x: x.chunk(2, 0)[-1].neg_(), lambda: base.clone()[2:6], dynamic=True)

    def shared(x: Tensor) -> Tensor:
        x.as_strided((4, 3, 3), (3, 2, 3))[-2:, ::2, -2] = 0
        return x

    same(shared, lambda: torch.arange(24.0).view(1, 3, 2, 4))
    same(lambda x: [x.select_scatter(x[0], 0, 1), x.as_strided_scatter(x[0, :2], (2,), (1,), 0)],
         lambda: torch.arange(5.0).expand(4, 5))


def test_a_copy_is_taken_before_its_input_changes() -> None:
    """Also of what a call made a view of."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        copy = y.tile(1)
        x.add_(5)
        return copy

    x = torch.arange(4)
    torch._dynamo.reset()
    assert torch.compile(fn, backend="flambeau")(x[::2], x[::2][:1]).tolist() == [0]


# ---- what eager refuses ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Fn, Tensor]] = {
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), torch.ones(1, 2, 4, 4, dtype=torch.int64)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), torch.ones(1, 2, 4, 4, dtype=torch.int32)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), torch.ones(1, 2, 4, 4, dtype=torch.int32)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), torch.ones(1, 2, 4, 4, dtype=torch.bool)),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x, x), torch.ones(4, dtype=torch.int64)),
    "binary_cross_entropy, mixed": (lambda x: F.binary_cross_entropy(x, x.bfloat16()), torch.full((4,), 0.5)),
    "hypot": (lambda x: torch.hypot(x, x), torch.ones(5, 1, dtype=torch.int64)),
    "softmax of a scalar": (lambda x: x.softmax(3), torch.tensor(2.0)),
    "softmax": (lambda x: x.softmax(1), torch.ones(2, 3, dtype=torch.int64)),
    "var": (lambda x: x.var(), torch.ones(2, 3, dtype=torch.int64)),
    "index_select": (lambda x: x.index_select(0, x), torch.zeros(1, 2, dtype=torch.int64)),
    "argmax": (lambda x: x.argmax(1), torch.ones(2, 3, dtype=torch.bool)),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, x), torch.ones(2, dtype=torch.int64)),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, x), torch.ones(2, dtype=torch.int64)),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, x[0]), torch.zeros(2, 3, dtype=torch.int64)[:, :2]),
    "trace": (lambda x: x.trace(), torch.ones(2, 2, dtype=torch.bool)),
    "prelu": (lambda x: F.prelu(x, x[0]), torch.ones(2, 2, dtype=torch.int64)),
    "cdist": (lambda x: torch.cdist(x, x), torch.ones(2, 2, dtype=torch.float16)),
    "embedding in nothing": (lambda x: F.embedding(x[0], x.float()[:0]), torch.zeros(1, 2, dtype=torch.int64)),
    "embedding of nothing": (lambda x: F.embedding(x[0], x.float()[:, :0]), torch.full((1, 2), 9)),
    "index_select of nothing": (lambda x: x[:0].index_select(1, x[0]), torch.full((1, 2), 9)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str) -> None:
    fn, x = REFUSED[name]
    torch._dynamo.reset()
    with pytest.raises((RuntimeError, IndexError)) as eager:
        fn(x)
    with pytest.raises(type(eager.value)) as ours:
        torch.compile(fn, backend="flambeau")(x)
    assert str(eager.value).splitlines()[0] in str(ours.value)

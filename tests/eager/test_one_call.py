"""One call as a program: what is fixed in its graph, what is known only at run time, and which calls are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flambeau.eager.one_call import (
    Number,
    OtherShapes,
    TensorLike,
    build,
    described,
    graph_of,
    map_numbers,
    numbers_of,
)
from flambeau.eager.operator_forms import OperatorForm, forms
from flambeau.errors import UnsupportedError
from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.runtime.launch_plan import word

aten = torch.ops.aten


def form(op: Any) -> OperatorForm:
    ops_loaded()
    name = op._schema.name.partition("::")[2].removesuffix("_")
    return next(f for f in forms(name, LOWERINGS) if f.op is op)


def call(op: Any, *args: Any, same: tuple[int, ...] | None = None, into_any: bool = False) -> list[Any]:
    """The results of a program for such a call, with these tensors."""
    run, *_ = build(form(op), described(args, same), into_any=into_any)
    return run([x for x in args if isinstance(x, Tensor)])


# ---- arguments ---------------------------------------------------------------------------------------------


def test_descriptions_hold_no_memory() -> None:
    x, s = torch.randn(2, 3), torch.tensor(2.5)
    a, (b, number), c = described((x, [x.t(), s], 7), same=(0, 0, 2), numbers=True)
    assert a == TensorLike((2, 3), (3, 1), torch.float32, x.device, False, 0) and a.is_dense
    assert (b.shape, b.strides, b.same) == ((3, 2), (1, 3), 0)
    assert number == Number(2.5, torch.float32) and c == 7
    assert described((x.expand(4, 2, 3),))[0].overlaps and not described((x[:, ::2],))[0].is_dense


@pytest.mark.parametrize(("op", "args", "want"), [
    (aten.add.Tensor, (torch.ones(2), 3, 2), [3, 2]),  # a number in a tensor's place, and one that the schema has
    (aten.threshold.default, (torch.ones(2), 0.5, 2), [0.5, 2]),
    (aten.threshold.default, (torch.ones(2), True, 2), [2]),  # a truth value is no number of the call
    (aten.clamp.default, (torch.ones(2), 0.5, None), []),  # which may be missing
    (aten.transpose.int, (torch.ones(2, 2), 0, 1), []),  # dimensions decide what the graph is
])
def test_numbers_of_a_call(op: Any, args: tuple[Any, ...], want: list[Any]) -> None:
    assert numbers_of(op, described(args)) == want
    assert numbers_of(op, map_numbers(op, described(args), lambda k, x: x * 10 + k)) == [
        x * 10 + k for k, x in enumerate(want)]


# ---- programs ----------------------------------------------------------------------------------------------


def test_results_are_eagers() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(call(aten.relu.default, x)[0], x.relu())
    torch.testing.assert_close(call(aten.native_layer_norm.default, x, [5], torch.ones(5), None, 1e-5),
                               list(aten.native_layer_norm(x, [5], torch.ones(5), None, 1e-5)))
    torch.testing.assert_close(call(aten.mish.default, x.t())[0], torch.nn.functional.mish(x.t()))


@pytest.mark.parametrize("value", [2.5, -0.0, float("inf"), 1e-300])
def test_lifted_numbers_follow_the_tensors(value: float) -> None:
    """One program for all values."""
    x = torch.randn(3, 4)
    run, *_ = build(form(aten.add.Tensor), described((x, x, 1.0)), lift=1)
    assert torch.equal(run([x, x, word(value)])[0], torch.add(x, x, alpha=value))


def test_truth_values_are_not_lifted() -> None:
    x = torch.ones(3)
    with pytest.raises(UnsupportedError, match="truth value"):
        graph_of(form(aten.add.Tensor), described((x, torch.tensor(True), 1), numbers=True), lift=1)


def test_what_is_written_to_holds_the_results() -> None:
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    assert call(aten.relu_.default, kept := x.clone()) == [] and torch.equal(kept, x.relu())
    assert call(aten.gelu.out, x, "none", out) == []
    torch.testing.assert_close(out, torch.nn.functional.gelu(x))


def test_one_tensor_is_one_argument() -> None:
    """Two arguments that are the same tensor become one input, so that it is read before it is written."""
    x = torch.randn(6)
    graph = graph_of(form(aten.add_.Tensor), described((x, x, 1), same=(0, 0)))
    assert sum(bool(n.users) for n in graph.graph.nodes if n.op == "placeholder") == 1
    want = x + x
    call(aten.add_.Tensor, x, x, 1, same=(0, 0))
    assert torch.equal(x, want)


@pytest.mark.parametrize(("out", "words"), [
    (torch.empty(4, 3), "another shape"), (torch.empty(3, 4, dtype=torch.float64), "another dtype"),
    (torch.empty(3, 8)[:, ::2], "not plain memory"), (torch.empty(3, 1).expand(3, 4), "not plain memory")],
    ids=["shape", "dtype", "gaps", "overlap"])
def test_what_cannot_take_the_results(out: Tensor, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        graph_of(form(aten.relu.out), described((torch.randn(3, 4), out)))


def test_the_device_takes_more() -> None:
    """`out` may have another dtype, and gaps; if its shape differs, it has to be resized first."""
    x, wide, gaps = torch.randn(3, 4), torch.empty(3, 4, dtype=torch.float64), torch.zeros(3, 8)
    call(aten.relu.out, x, wide, into_any=True)
    call(aten.relu.out, x, gaps[:, ::2], into_any=True)
    assert torch.equal(wide, x.relu().double()) and torch.equal(gaps[:, ::2], x.relu()) and not gaps[:, 1::2].any()
    with pytest.raises(OtherShapes) as caught:
        graph_of(form(aten.relu.out), described((x, torch.empty(2))), into_any=True)
    assert caught.value.shapes == [(3, 4, 4, 1)]  # sizes, then strides


def test_a_range_keeps_the_shape_of_what_it_fills() -> None:
    out = torch.empty(2, 3)
    call(aten.arange.start_out, 0, 6, 1, out, into_any=True)
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("op", "args", "want"), [
    (aten.gather.default, lambda x, i: (x, 0, i, False), [(1, 0, 4)]),
    (aten.index.Tensor, lambda x, i: (x, [i]), [(1, -5, 4)]),  # counts from the end, too
    (aten.relu.default, lambda x, i: (x,), [])])
def test_what_indices_may_be(op: Any, args: Any, want: list[Any]) -> None:
    x, i = torch.randn(5, 2), torch.zeros(3, 2, dtype=torch.int64)
    _, ranges, *_ = build(form(op), described(args(x, i)))
    assert list(ranges) == want


def test_indices_into_nothing_are_anothers_to_refuse() -> None:
    with pytest.raises(UnsupportedError, match="no elements|no lowering"):
        build(form(aten.index.Tensor), described((torch.zeros(0, 2), [torch.zeros(3, dtype=torch.int64)])))

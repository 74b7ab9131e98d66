"""Calls of operators that were prepared: natively and in Python the same results, errors as torch raises them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau import pipeline
from flambeau.compile.cache_entry import codec
from flambeau.native import build
from flambeau.pipeline import Options, compiled
from flambeau.runtime.launch_plan import operator_named
from flambeau.runtime.operator_calls import EXTENSION, TENSOR, Prepared, Strided, by_schema, is_constant

aten = torch.ops.aten
X, W, A, B = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 3, 3), torch.randn(4, 6), torch.randn(4, 6)
CONV = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
CASES: dict[str, tuple[Prepared, tuple[torch.Tensor, ...], Callable[[], Any]]] = {
    "one result": (Prepared("aten.convolution.default", (TENSOR, TENSOR, *CONV), None), (X, W),
                   lambda: aten.convolution(X, W, *CONV)),
    "some results": (
        Prepared("aten.native_layer_norm.default", (TENSOR, [6], TENSOR, None, 1e-5), (0, 2)), (A, B[0]),
        lambda: tuple(aten.native_layer_norm(A, [6], B[0], None, 1e-5)[k] for k in (0, 2))),
    "a view": (Prepared("aten.mm.default", (TENSOR, Strided((6, 4), (1, 6), 0, True)), None), (A, B),
               lambda: A @ B.t()),
    "a view of a view": (
        Prepared("aten.mul.Tensor", (Strided((2, 3), (6, 2), 1, True), Strided((2, 3), (6, 2), 1, False)), None),
        (A[2:], A[2:]), lambda: A[2:, 1::2] * A[:2, 1::2]),
    "no tensor": (Prepared("aten.native_batch_norm_backward.default",
                           (TENSOR, TENSOR, None, None, None, TENSOR, TENSOR, True, 1e-5, [True, False, False]), (0,)),
                  (X, X, X.mean((0, 2, 3)), X.var((0, 2, 3)).rsqrt()),
                  lambda: aten.native_batch_norm_backward(X, X, None, None, None, X.mean((0, 2, 3)),
                                                          X.var((0, 2, 3)).rsqrt(), True, 1e-5,
                                                          [True, False, False])[:1]),
    "numbers": (Prepared("aten.clamp.default", (TENSOR, -1, 0.5), None), (A,), lambda: A.clamp(-1, 0.5)),
    "a text, kept by name": (Prepared("aten.gelu.default", (TENSOR, "tanh"), None), (A,),
                             lambda: aten.gelu(A, approximate="tanh")),
}


@pytest.fixture(scope="module")
def native() -> Any:
    found, there = [], threading.Event()
    EXTENSION.tell(lambda module: (found.append(module), there.set()))
    assert there.wait(120)
    return found[0]


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, native: Any) -> None:
    prepared, tensors, wanted = CASES[name]
    prepared = codec().decode(codec().encode(prepared))
    op = operator_named(prepared.operator)
    for call in (prepared.native(native, op), prepared.python(op)):
        torch.testing.assert_close(call(*tensors), wanted(), rtol=0, atol=0)


def test_what_is_written_to(native: Any) -> None:
    prepared, op = Prepared("aten.mm.out", (TENSOR, TENSOR, TENSOR), ()), aten.mm.out
    for call in (prepared.native(native, op), prepared.python(op)):
        out = torch.empty(4, 4)
        assert call(A, B.t(), out) == ()
        assert torch.equal(out, A @ B.t())


def test_errors_are_torchs(native: Any) -> None:
    pick = Prepared("aten.index_select.default", (TENSOR, 0, TENSOR), None)
    far = Prepared("aten.neg.default", (Strided((4, 6), (6, 1), 1, True),), None)
    for make in (lambda c, op: c.native(native, op), lambda c, op: c.python(op)):
        with pytest.raises(IndexError):
            make(pick, aten.index_select.default)(A, torch.tensor([9]))
        with pytest.raises(RuntimeError, match="beyond|out of bounds"):
            make(far, aten.neg.default)(torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="expected a tensor"):
        pick.native(native, aten.index_select.default)(A, 3)
    with pytest.raises(RuntimeError, match="number of tensors"):
        pick.native(native, aten.index_select.default)(A)


def test_dispatch_modes_see_them(native: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    call = Prepared("aten.mm.default", (TENSOR, Strided((6, 4), (1, 6), 0, True)), None).native(native, aten.mm.default)
    with FlopCounterMode(display=False) as counter:
        call(A, B)
    assert counter.get_total_flops() == 2 * 4 * 6 * 4


@pytest.mark.parametrize(("x", "kind", "yes"), [
    (3, "int", True), (3, "float", True), (0.5, "int", False), (None, "Optional[int]", True), (None, "int", False),
    ([1, 2], "List[int]", True), ([], "List[Tensor]", False), (torch.float32, "Optional[int]", False),
    (None, "Tensor", True), (3, "Tensor", False), (True, "bool", True), ([True, False], "List[bool]", True),
    ("none", "str", True),
])
def test_constants(x: Any, kind: str, yes: bool) -> None:
    assert is_constant(x, kind) is yes


def test_a_schema_fills_in_what_is_not_given() -> None:
    found = by_schema(aten.sum.dim_IntList, (A, [0]), {"keepdim": True}, None)
    assert found is not None and [x for x, _ in found[1:]] == [[0], True, None]
    assert by_schema(aten.mm.default, (A,), {}, None) is None


def test_only_tensors_are_returned() -> None:
    attention = aten._scaled_dot_product_flash_attention.default
    given = (X, X, X)
    assert by_schema(attention, given, {}, (0, 1)) is not None
    assert by_schema(attention, given, {}, (0, 4)) is None  # a size
    assert by_schema(aten.split.Tensor, (A, 2), {}, (0, 1)) is None  # a list
    assert by_schema(aten.split.Tensor, (A, 2), {}, None) is None


def test_programs_have_them() -> None:
    gm = make_fx(lambda x, w: [torch.relu(aten.convolution(x, w, *CONV))])(X, W)
    package = compiled(gm, Options("eager")).package
    assert [c.operator for c in package.calls.values()] == ["aten.convolution.default"]
    assert torch.equal(package.load()([X, W])[0], torch.relu(aten.convolution(X, W, *CONV)))


def test_an_argument_may_be_no_tensor(native: Any) -> None:
    """Where the schema asks for one: what an operator does without it is its own affair."""
    make = Prepared("aten.relu.default", (None,), None)
    for call in (make.native(native, aten.relu.default), make.python(aten.relu.default)):
        with pytest.raises((RuntimeError, NotImplementedError), match="[Tt]ensor"):
            call()


def test_warnings_are_pythons(native: Any) -> None:
    call = Prepared("aten.mm.out", (TENSOR, TENSOR, TENSOR), ()).native(native, aten.mm.out)
    with pytest.warns(UserWarning, match="resized"):
        call(A, B.t(), torch.empty(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="resized"):
            call(A, B.t(), torch.empty(3))


def test_a_listener_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose operator is gone when the extension is built."""
    built, heard = threading.Event(), list[object]()
    monkeypatch.setattr(build, "load_native", lambda *args, **options: built.wait() and "module")
    background = build.Background("name", "what", lambda module: None, 1, "without it")
    background.tell(lambda module: [][0])
    background.tell(heard.append)
    built.set()
    assert background.wait() == "module" and heard == ["module"]


def test_a_transposed_argument_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is prepared, although the sizes of the view are not known."""
    seen: list[Any] = []
    monkeypatch.setattr(pipeline, "OBSERVERS", [seen.append])
    run = torch.compile(lambda x, w: x @ w.t(), backend="flambeau", dynamic=True)
    for n in (3, 5, 1):
        x, w = torch.randn(n, 4), torch.randn(n + 2, 4)
        torch.testing.assert_close(run(x, w), x @ w.t())
    call = next(line for line in seen[0].package.source.splitlines() if "permute" in line)
    assert " = call0(" in call and ".permute(1, 0))" in call

"""Where eager's kernels for CUDA round: multiply-adds, casts and quotients, in expressions and in Triton's interpreter.

What the formulas must be was read from the machine code of eager's kernels; here they are held to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.capture.graph import capture
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import Expr, walk
from flambeau.ir.numerics import EAGER, FAST, Policy
from flambeau.ops import ops_loaded
from flambeau.pipeline import Options, compiled
from flambeau.schedule.plan import schedule
from flambeau.testing.opinfo import differing

aten = torch.ops.aten
ops_loaded()


def blocks() -> Capabilities:
    from flambeau.codegen.triton.dialect import CAPABILITIES

    return replace(CAPABILITIES, tables=False, gpu_eager=True)


def expressions(f: Any, *inputs: Tensor, policy: Policy = EAGER["cuda"]) -> list[Expr]:  # noqa: B008
    """What the kernels of f compute, as if for a GPU."""
    caps = blocks()
    captured = capture(make_fx(lambda *x: [f(*x)])(*inputs), caps, device=inputs[0].device, policy=policy)
    assert not captured.externs
    program = schedule(captured.graph, caps, True)
    roots = [e for k in program.kernels for items in k.stages for i in items for e in i.exprs]  # type: ignore[union-attr]
    return list(walk(*roots))


def count(found: list[Expr]) -> Counter[str]:
    return Counter(e.op for e in found)


A, B, C = torch.randn(3, 64).unbind()


@pytest.mark.parametrize(("f", "fmas", "products"), [
    (lambda a, b, c: torch.add(a, b, alpha=0.3), 1, 0),
    (lambda a, b, c: torch.addcmul(a, b, c), 1, 0),
    (lambda a, b, c: torch.addcmul(a, b, c, value=0.3), 1, 1),
    (lambda a, b, c: torch.addcdiv(a, b, c, value=0.3), 1, 0),
    (lambda a, b, c: torch.addcdiv(a, b, c), 0, 0),
    (lambda a, b, c: torch.lerp(a, b, c), 2, 0),
    (lambda a, b, c: aten.tanh_backward(a, b), 1, 1),
    (lambda a, b, c: aten.silu_backward(a, b), 1, 2),
    (lambda a, b, c: aten.mish_backward(a, b), 2, 2),
    (lambda a, b, c: aten.gelu(a, approximate="tanh"), 1, 5),
    (lambda a, b, c: aten.gelu_backward(a, b), 0, 7),
    (lambda a, b, c: a * b + c, 0, 1),  # two operators, two roundings
])
def test_products_are_contracted_where_nvcc_does(f: Any, fmas: int, products: int) -> None:
    found = count(expressions(f, A, B, C))
    assert (found["fma"], found["mul"]) == (fmas, products)


@pytest.mark.parametrize(("f", "casts"), [
    (lambda a, b, c: a * b + c, 2),
    (lambda a, b, c: aten.sigmoid_backward(a, b), 3),  # this kernel computes in the dtype of its tensors
    (lambda a, b, c: aten.tanh_backward(a, b), 3),
    (lambda a, b, c: a ** 3, 2),
    (lambda a, b, c: aten.silu_backward(a, b), 1),
    (lambda a, b, c: aten.log_sigmoid_backward(a, b, b), 1),
    (lambda a, b, c: torch.round(a, decimals=2), 3),  # the power of ten too
])
def test_half_precision_is_rounded_where_eager_rounds(f: Any, casts: int) -> None:
    found = expressions(f, *(x.bfloat16() for x in (A, B, C)))
    assert sum(e.op == "cast" and e.dtype is torch.bfloat16 for e in found) == casts


def test_maxima_of_half_precision_see_the_sign_of_zero() -> None:
    """A comparison does not: made as the values are stored, -0.0 would stay."""
    x = A.bfloat16()
    assert count(expressions(torch.relu, x))["max"] == 1
    assert count(expressions(torch.relu, x, policy=FAST))["max"] == 0


NAN = float("nan")


@pytest.mark.parametrize(("f", "inputs", "expected"), [
    (lambda x: torch.nn.functional.softshrink(x), [-0.25, -0.0, 0.25, 1.0, NAN], [0.0, 0.0, 0.0, 0.5, NAN]),
    (lambda x: aten.elu_backward(x, 1.0, 3.0, 1.0, True, torch.full_like(x, NAN)), [1.0, -2.0], [3.0, -6.0]),
    (lambda x: torch.nn.functional.threshold(x, 0.3, 20.0), [0.300048828125, 0.5], [20.0, 0.5]),  # float16(0.3)
    (lambda x: torch.nn.functional.hardshrink(x, 0.3), [0.300048828125, 0.5], [0.0, 0.5]),
], ids=("softshrink", "elu of NaN", "threshold", "hardshrink"))
def test_edges_are_those_of_eager_on_cuda(f: Any, inputs: list[float], expected: list[float],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    monkeypatch.setitem(EAGER, "cpu", EAGER["cuda"])
    x = torch.tensor(inputs, dtype=torch.float16)
    ours, = compiled(make_fx(lambda x: [f(x)])(x), Options("eager", target="interpreter")).finish()([x])
    assert differing(ours, torch.tensor(expected, dtype=torch.float16))[0] == 0


SCALE = 0.0316  # in float32, one divided by it is another number


def numbers(found: list[Expr]) -> list[float]:
    return [e.attr for e in found if e.op == "const"]


@pytest.mark.parametrize("f", [lambda a: a / SCALE, lambda a: torch._foreach_div([a], SCALE)[0]])
def test_a_quotient_by_a_number_is_a_product_with_its_reciprocal(f: Any) -> None:
    exact = expressions(f, A)
    assert count(exact)["div"] == 0 and numbers(exact) == [torch.tensor(1 / SCALE).item()]
    assert torch.tensor(1 / SCALE) != 1 / torch.tensor(SCALE)
    assert count(expressions(f, A, policy=FAST))["div"] == 1


@pytest.mark.parametrize("f", [lambda a, b: a / b, lambda a, b: torch._foreach_div([a], [SCALE])[0],
                               lambda a, b: a / b[0]])
def test_other_quotients_are_divided(f: Any) -> None:
    assert count(expressions(f, A, B))["div"] == 1


@pytest.mark.parametrize("f", [lambda a: torch._foreach_div([a], [SCALE])[0], lambda a: torch._foreach_pow([a], 2)[0]])
@pytest.mark.parametrize("a", [torch.randn(64, 2)[:, 0], torch.arange(64), torch.randn(1).expand(64)],
                         ids=("gaps", "integers", "repeated"))
def test_lists_for_which_eager_has_no_kernel_are_left_to_it(f: Any, a: Tensor) -> None:
    captured = capture(make_fx(lambda x: [f(x)])(a), blocks(), device=a.device, policy=EAGER["cuda"])
    assert len(captured.externs) == 1


def test_lists_have_no_easy_powers() -> None:
    assert count(expressions(lambda a: a ** 2, A))["pow"] == 0
    assert count(expressions(lambda a: torch._foreach_pow([a], 2)[0], A))["pow"] == 1


@pytest.mark.parametrize(("f", "rounded"), [
    (lambda x, s: x * s, False), (lambda x, s: s * x, False), (lambda x, s: x + s, False), (lambda x, s: s - x, False),
    (lambda x, s: torch.add(s, x, alpha=0.7), False), (lambda x, s: x / s, False), (lambda x, s: s / x, True),
    (lambda x, s: torch.maximum(x, s), True), (lambda x, s: torch._foreach_mul([x], s)[0], False)])
def test_scalars_of_the_host_are_not_rounded_first(f: Any, rounded: bool) -> None:
    """By those of eager's kernels that take them as arguments; a GPU's own are."""
    with FakeTensorMode():
        x, host = torch.empty(64, dtype=torch.bfloat16, device="cuda"), torch.empty((), dtype=torch.float32)
        own = torch.empty((), dtype=torch.float32, device="cuda")
        for scalar, kept in ((host, not rounded), (own, False)):
            found = expressions(f, x, scalar)
            # A tensor of the GPU is loaded; a scalar of the host is a word among the kernel's sizes, made a float32.
            plain = {"load"} if scalar is own else {"cast"}
            of = {e.args[0].op for e in found if e.op == "cast" and e.dtype is torch.bfloat16}
            assert bool(of & plain) is not kept


def test_fast_numerics_contract_nothing() -> None:
    assert count(expressions(lambda a, b: aten.tanh_backward(a, b), A, B, policy=FAST))["fma"] == 0


def once(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once: the product is exact in double."""
    return (a.double() * b.double() + c.double()).float()


NEAR, FAR = torch.tensor(0.1), torch.tensor(0.8)


@pytest.mark.parametrize(("f", "exact", "planted"), [
    (lambda a, b, c: torch.addcmul(a, b, c, value=0.1), lambda a, b, c: once(NEAR, b * c, a),
     lambda a, b, c: NEAR * (b * c) + a),
    (lambda a, b, c: torch.lerp(a, b, 0.1), lambda a, b, c: once(NEAR, b - a, a), lambda a, b, c: NEAR * (b - a) + a),
    (lambda a, b, c: torch.lerp(a, b, 0.8), lambda a, b, c: once(a - b, 1 - FAR, b),
     lambda a, b, c: once(FAR, b - a, a)),
    (lambda a, b, c: a / 3 + b * c, lambda a, b, c: a * torch.tensor(1 / 3) + b * c, lambda a, b, c: a / 3 + b * c),
    (lambda a, b, c: a * b + c, lambda a, b, c: a * b + c, once),
    (lambda a, b, c: aten.tanh_backward(a, b), lambda a, b, c: a * once(-b, b, torch.ones(())),
     lambda a, b, c: a * (1 - b * b)),
], ids=("addcmul", "near lerp", "far lerp", "number", "two operators", "slope"))
def test_blocks_compute_what_eager_does_on_cuda(f: Any, exact: Any, planted: Any, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    """The formulas for CUDA in Triton's interpreter; one rounding too many or too few gives other values."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    monkeypatch.setitem(EAGER, "cpu", EAGER["cuda"])
    inputs = [torch.randn(900, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    graph = make_fx(lambda *x: [f(*x)])(*inputs)
    ours, = compiled(graph, Options("eager", target="interpreter")).finish()(list(inputs))
    assert differing(ours, exact(*inputs))[0] == 0
    assert differing(ours, planted(*inputs))[0] > 0


def test_minus_keeps_the_sign_of_zero() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    f = torch.compile(lambda x: -x, backend="flambeau", options={"target": "interpreter"})
    assert torch.signbit(f(torch.tensor([0.0, -0.0, 1.0]))).tolist() == [True, False, True]

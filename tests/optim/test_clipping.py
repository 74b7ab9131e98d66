"""The kernels of norms, and clipping, apart from torch.compile: blocks, dtypes, devices, plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from flambeau.ir.dtypes import opmath
from flambeau.ir.program import CHUNK
from flambeau.optim import clipping
from flambeau.optim.clipping import ORDERS, clip_with_norm, norm_of, norms, total_norm
from flambeau.optim.multi_tensor import DECLINED
from flambeau.optim.row_kernels import Declined
from flambeau.runtime.address_tables import words

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
TARGETS = ["cpu", pytest.param("interpreter", marks=NEEDS_TRITON)]
LENGTHS = (1, 0, CHUNK, CHUNK + 1, 37, 3 * CHUNK - 5)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    clipping._PLANS.clear()
    DECLINED.clear()
    yield


def tensors(lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in lengths]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ORDERS)
def test_what_each_block_comes_to(order: float, target: str) -> None:
    """One value for every block, in the order of the tensors."""
    found = tensors()
    run = norms(target, torch.device("cpu"), torch.float32, order, LENGTHS)
    (partial,) = run([words([t.data_ptr() for t in found])])
    blocks = [b.double() for t in found for b in t.split(CHUNK) if t.numel()]
    each = {1.0: lambda b: b.abs().sum(), 2.0: lambda b: b.square().sum(), math.inf: lambda b: b.abs().max()}[order]
    want = torch.stack([each(b) for b in blocks])
    torch.testing.assert_close(partial.double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision_is_that_of_the_arithmetic(dtype: torch.dtype) -> None:
    """Small floats are added up in float32, and rounded once."""
    found = tensors((3, 5000, 20000), dtype)
    got = norm_of(found, 2.0, None)
    exact = torch.tensor(math.fsum(x * x for t in found for x in t.tolist()), dtype=torch.float64).sqrt()
    assert got.dtype is dtype
    torch.testing.assert_close(got, exact.to(dtype), rtol=4 * torch.finfo(opmath(dtype)).eps, atol=0)
    assert torch.equal(got, norm_of([t.clone() for t in found], 2.0, None)), "the same in every run"


def test_no_elements_and_no_numbers() -> None:
    assert norm_of([torch.zeros(0), torch.zeros(2, 0)], 2.0, None) == 0
    assert norm_of([torch.tensor([math.inf, 1.0])], 2.0, None) == math.inf
    assert norm_of([torch.tensor([math.nan]), torch.ones(3)], math.inf, None).isnan()


def test_a_plan_serves_the_same_shapes_wherever_they_are() -> None:
    for _ in range(3):
        found = tensors()
        torch.testing.assert_close(norm_of(found, 2.0, None), torch.cat(found).norm())
    (plans,) = clipping._PLANS.values()
    assert len(plans) == 1
    for k in range(clipping.MOST_PLANS + 2):  # as many tensors, of other sizes
        norm_of(tensors((k + 1,) * len(LENGTHS)), 2.0, None)
    assert len(plans) == clipping.MOST_PLANS


@pytest.mark.parametrize(("found", "words"), [
    ([torch.ones(4, 4)[:, ::2]], "gaps"), ([torch.ones(3, dtype=torch.int32)], "int32"),
    ([torch.ones(2).to_sparse()], "plain")], ids=["gaps", "integers", "sparse"])
def test_what_has_no_kernel(found: list[Tensor], words: str) -> None:
    with pytest.raises(Declined, match=words):
        norm_of(found, 2.0, None)


@pytest.mark.parametrize("reason", ["order", "nonfinite", "bits", "nothing"])
def test_what_is_left_to_torch(reason: str) -> None:
    given = [] if reason == "nothing" else tensors((3, 4))
    order, check = 3.0 if reason == "order" else 2.0, reason == "nonfinite"
    calls: list[object] = []
    total_norm(lambda *args: calls.append(args), (None, "eager" if reason == "bits" else "near"),  # type: ignore[arg-type]
               given, order, check)
    assert len(calls) == 1 and len(DECLINED) == 1


def test_gradients_are_scaled_where_they_are_too_large() -> None:
    def never(*_: object) -> None:
        raise AssertionError("left to torch")

    params = [torch.nn.Parameter(t) for t in tensors((3, 700))]
    for p in params[:1]:
        p.grad = torch.full_like(p, 2.0)  # the other has none
    for most, want in ((100.0, 2.0), (1.0, 2.0 / math.sqrt(12))):
        clip_with_norm(never, (None, "near"), params, most, torch.tensor(math.sqrt(12)))
        torch.testing.assert_close(params[0].grad, torch.full((3,), want))

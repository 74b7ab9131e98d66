"""Distances between tensors: which values count as different, and by how much."""

from __future__ import annotations

import math

import pytest
import torch

from flambeau.compare.differences import APART, SIGN, difference, gathered

INF, NAN = math.inf, math.nan


def stepped(x: torch.Tensor, ulps: int) -> torch.Tensor:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return (x.view(bits) + ulps).view(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_ulps(dtype: torch.dtype, sign: int) -> None:
    a = sign * torch.tensor([1.0, 1.0, 1.5, 2.0, 0.0], dtype=dtype)
    b = torch.stack([stepped(a[k], n) for k, n in enumerate((0, 1, 3, -1, 2))])
    d = difference("x", a, b)
    assert (d.differ, d.total, d.max_ulps, d.bins) == (4, 5, 3, {"1": 2, "2-3": 2})
    assert d.bins == difference("x", b, a).bins


@pytest.mark.parametrize(("a", "b", "bins"), [
    ([NAN, 1.0], [NAN, 1.0], {}),
    ([NAN, 1.0], [1.0, 1.0], {APART: 1}),
    ([INF, -INF], [INF, INF], {APART: 1}),
    ([0.0, 0.0], [-0.0, 0.0], {SIGN: 1}),
    ([], [], {}),
])
def test_what_is_not_a_plain_number(a: list[float], b: list[float], bins: dict[str, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        d = difference("x", torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))
        assert (d.bins, d.equal) == (bins, not bins)


def test_payloads_of_nan_do_not_count() -> None:
    a = torch.tensor([0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    assert difference("x", a, b).equal


def test_numbers_on_both_sides_of_zero() -> None:
    a = torch.tensor([1e-45, -1e-45, 3e38], dtype=torch.float32)
    assert difference("x", a, -a).bins == {"2-3": 2, "2^31": 1}
    wide = torch.tensor([1e308], dtype=torch.float64)
    assert difference("x", wide, -wide).max_ulps == 2**62  # as far as is counted


def test_integers_and_booleans() -> None:
    a = torch.tensor([0, 255, 7], dtype=torch.uint8)
    assert difference("x", a, torch.tensor([255, 255, 8], dtype=torch.uint8)).bins == {"1": 1, "128-255": 1}
    assert difference("x", torch.tensor([True, False]), torch.tensor([True, True])).bins == {"1": 1}
    big = torch.tensor([-(2**63), 5])
    assert difference("x", big, torch.tensor([2**63 - 1, 7])).bins == {"2-3": 1, "2^62": 1}


def test_other_shapes_and_kinds() -> None:
    x = torch.ones(2)
    assert not difference("x", x, torch.ones(3)).equal and not difference("x", x, x.double()).equal
    assert not difference("x", x, None).equal
    assert difference("x", 3, 3).equal and difference("x", NAN, NAN).equal and not difference("x", 1, 1.0).equal
    assert difference("x", x.to_sparse(), x.to_sparse()).note.startswith("not compared")


def test_complex_numbers_and_strides() -> None:
    a = torch.randn(4, 5, dtype=torch.complex64)
    assert difference("x", a, a.clone()).equal and difference("x", a.conj(), a.conj().resolve_conj()).equal
    b = a.t().contiguous().t()
    b[1, 1] += 1
    assert difference("x", a, b).differ == 1


def test_errors_against_a_reference() -> None:
    reference = torch.tensor([1.0, 2.0, NAN, INF], dtype=torch.float64)
    eager = torch.tensor([1.5, 2.0, NAN, INF])
    d = difference("x", eager, torch.tensor([1.0, 3.0, NAN, INF]), reference)
    assert (d.rms_eager, d.rms_compiled, d.ratio) == (0.25, 0.5, 2.0)
    exact = difference("x", reference.float(), eager, reference)
    assert exact.rms_eager == 0.0 and exact.ratio == INF
    assert difference("x", eager, eager).ratio is None


def test_bins_of_several_are_joined_in_order() -> None:
    a = torch.ones(2)
    rows = [difference("x", a, stepped(a, n)) for n in (9, 1, 2)] + [difference("x", a, a * NAN)]
    assert gathered(rows) == {"1": 2, "2-3": 2, "8-15": 2, APART: 2}
    assert list(gathered(rows)) == ["1", "2-3", "8-15", APART]

"""Dtype rules against torch's own, exhaustively."""

from __future__ import annotations

import itertools

import pytest
import torch

from flambeau.ir.dtypes import (
    FLOATS,
    INTS,
    SUPPORTED,
    Operand,
    accumulator,
    highest,
    int_to_float,
    is_bool,
    is_float,
    is_int,
    lowest,
    number_dtype,
    opmath,
    promote,
)

DTYPES = (torch.bool, *INTS, *FLOATS)
NUMBERS = (True, 3, 2.5)


def arguments() -> list[tuple[object, Operand]]:
    """Everything that can take part in promotion, as torch sees it and as we do."""
    out: list[tuple[object, Operand]] = []
    for d in DTYPES:
        out += [(torch.ones(2, dtype=d), Operand(d, 1)), (torch.ones((), dtype=d), Operand(d, 0))]
    return out + [(x, Operand(number_dtype(x), None)) for x in NUMBERS]


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_promotion_of_every_pair(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for (a, x), (b, y) in itertools.product(arguments(), repeat=2):
            if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):  # two numbers never meet in an operator
                assert promote([x, y]) is torch.result_type(a, b), f"{x} with {y}"
    finally:
        torch.set_default_dtype(before)


def test_promotion_does_not_depend_on_order() -> None:
    some = [o for _, o in arguments()][::3]
    for three in itertools.combinations(some, 3):
        results = {promote(p) for p in itertools.permutations(three)}
        assert len(results) == 1, three


def test_promotion_of_three() -> None:
    """Numbers and scalars lift a tensor to their category once, whatever else there is."""
    tensor, scalar, number = Operand(torch.int8, 2), Operand(torch.float64, 0), Operand(torch.bool, None)
    assert promote([tensor, scalar, number]) is torch.float64
    assert promote([Operand(torch.float16, 1), scalar]) is torch.float16
    assert promote([Operand(torch.int16, 1), Operand(torch.int64, None)]) is torch.int16
    with pytest.raises(ValueError, match="no operands"):
        promote([])


def test_complex_numbers_are_not_ours() -> None:
    with pytest.raises(TypeError, match="1j"):
        number_dtype(1j)


def test_categories_are_disjoint() -> None:
    for d in SUPPORTED:
        assert is_float(d) + is_int(d) + is_bool(d) == 1


@pytest.mark.parametrize("d", FLOATS, ids=str)
def test_opmath(d: torch.dtype) -> None:
    """ATen computes on half precision in float32; sums of integers are kept in int64."""
    assert opmath(d) is (torch.float32 if d.itemsize == 2 else d)
    assert accumulator(d) is opmath(d)
    assert int_to_float(d) is d


@pytest.mark.parametrize("d", [*INTS, torch.bool], ids=str)
def test_integers(d: torch.dtype) -> None:
    assert opmath(d) is d and accumulator(d) is torch.int64
    assert int_to_float(d) is torch.get_default_dtype()
    assert torch.tensor(lowest(d), dtype=d) <= torch.tensor(highest(d), dtype=d)
    if d is not torch.bool:
        assert (lowest(d), highest(d)) == (torch.iinfo(d).min, torch.iinfo(d).max)


def test_extremes_of_floats_are_infinite() -> None:
    """So that the identity of a maximum loses against every element, -inf included."""
    for d in FLOATS:
        assert lowest(d) == -float("inf") and highest(d) == float("inf")

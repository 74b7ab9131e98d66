"""Every number by which loops are shaped says what it counts and why it is what it is."""

from __future__ import annotations

from dataclasses import fields

import pytest

from flambeau.ir.tuning import BLOCKS, CPU, POINTS, Tuning, explain


@pytest.mark.parametrize("table", [CPU, POINTS, BLOCKS], ids=lambda t: type(t).__name__)
def test_units_and_reasons(table: Tuning) -> None:
    explained = {name for name, value, unit, reason in explain(table) if value >= 0 and unit and len(reason) > 10}
    assert explained == {f.name for f in fields(table) if f.type != "bool"}


def test_numbers_that_must_agree_are_derived_from_one_another() -> None:
    assert CPU.tile_wide == CPU.tile_vectors * CPU.vector_bytes // 4  # float32
    assert BLOCKS.split_columns == BLOCKS.columns  # pieces are counted as programs are

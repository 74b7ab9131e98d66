"""Every number in the tuning tables has a unit and a reason."""

from __future__ import annotations

from dataclasses import fields

import pytest

from flambeau.codegen.c.contractions.tiles import USUAL, best_tile
from flambeau.ir.index import Sym, as_index
from flambeau.ir.tuning import BLOCKS, CPU, POINTS, Tuning, explain


@pytest.mark.parametrize("table", [CPU, POINTS, BLOCKS], ids=lambda t: type(t).__name__)
def test_units_and_reasons(table: Tuning) -> None:
    explained = {name for name, value, unit, reason in explain(table) if value >= 0 and unit and len(reason) > 10}
    assert explained == {f.name for f in fields(table) if f.type != "bool"}


def test_numbers_that_must_agree_are_derived_from_one_another() -> None:
    large = best_tile(USUAL, 4, as_index(Sym("rows")), as_index(Sym("columns")))  # float32, of any size
    assert (CPU.tile_high, CPU.tile_wide) == (large.high, large.wide)
    assert BLOCKS.split_columns == BLOCKS.columns  # pieces are counted as programs are

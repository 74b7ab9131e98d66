"""The table of whole networks: ratios of what was measured, and no column for what was not."""

from io import StringIO

from rich.console import Console

from flambeau.bench.compiled import CompiledRow, step_table


def test_ratios() -> None:
    rows = [CompiledRow("lm24", "train", ms={"eager": 4.0, "ours": 3.0, "whole": 2.0},
                        peak_mib={"eager": 8.0, "ours": 6.0}, unequal_with_regions=2),
            CompiledRow("vit", "infer", ms={"eager": 1.0}, errors={"ours": "failed"})]
    page = StringIO()
    Console(width=140, file=page).print(step_table(rows, "tiny"))
    text = page.getvalue()
    assert [word for word in ("1.500", "0.750", "3.00", "6.00") if word not in text] == []
    assert "inductor" not in text and "first s" not in text

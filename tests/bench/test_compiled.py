"""The table of whole networks: ratios of what was measured, and no column for what was not."""

from io import StringIO

from rich.console import Console

from flambeau.bench.compiled import CompiledRow
from flambeau.report.performance import compiled_steps
from flambeau.report.sheet import terminal
from flambeau.results_file import plain


def test_ratios() -> None:
    rows = [CompiledRow("lm24", "train", ms={"eager": 4.0, "ours": 3.0, "whole": 2.0},
                        peak_mib={"eager": 8.0, "ours": 6.0}, unequal_with_regions=2),
            CompiledRow("vit", "infer", ms={"eager": 1.0}, errors={"ours": "failed"})]
    page = StringIO()
    sheet, = compiled_steps({"rows": plain(rows)})
    Console(width=200, file=page).print(terminal(sheet, "tiny"))
    text = page.getvalue()
    assert [word for word in ("1.500", "0.750", "3.00", " 6 ") if word not in text] == []
    assert "Inductor" not in text and "first s" not in text

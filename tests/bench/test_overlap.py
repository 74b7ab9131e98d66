"""The tables of streams and of offloading: ratios of what was measured, and what had other bits."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from flambeau.bench import offload, overlap
from flambeau.bench.offload import OffloadRow
from flambeau.bench.overlap import OverlapRow
from flambeau.report import performance
from flambeau.report.sheet import Sheet, terminal
from flambeau.results_file import plain


def printed(parts: list[Any]) -> str:
    page = StringIO()
    console = Console(width=200, file=page)
    for part in parts:
        console.print(terminal(part, "tiny") if isinstance(part, Sheet) else part)
    return page.getvalue()


def test_streams() -> None:
    rows = [OverlapRow("vit", "infer", seconds={"one": 2e-3, "auto": 1e-3}, wall={"one": 4e-3, "auto": 5e-3},
                       equal=True, steady=True),
            OverlapRow("lm", "train", seconds={"one": 1e-3, "auto": 2e-3}, equal=False, steady=True),
            OverlapRow("dlrm", "train", equal=False, steady=False, errors={"part": "no time"})]
    found = overlap.summarise(rows)
    assert found["gain by seconds"] == pytest.approx(1.0) and found["least by seconds"] == 0.5
    assert found["gain by wall"] == found["least by wall"] == pytest.approx(0.8) and found["other bits"] == ["lm train"]
    text = printed(performance.overlap({"rows": plain(rows), "summary": found}))
    assert [w for w in ("2.00", "0.50", "0.80", "equal", "other", "differ from run to run") if w not in text] == []


def test_offloading() -> None:
    rows = [OffloadRow("0.35", {"keep": 50.0, "less": 51.0}, {"keep": 1000.0, "less": 650.0}, equal=True, differ=0.0),
            OffloadRow("0.65", {}, {"keep": 1000.0}, equal=False, differ=1e-3)]
    assert offload.summarise(rows) == {"0.35": {"memory": 0.35, "time": 0.02}, "0.65": {}}
    text = printed(performance.offload({"rows": plain(rows)}))
    assert [w for w in ("35.0%", "2.0%", "equal", "differ by 1.0e-03") if w not in text] == []


def test_wishes_are_shares_with_and_without_eagers_numerics() -> None:
    fast, eager = ({share for share, options in offload.WISHES.values() if bool(options) == exact}
                   for exact in (False, True))
    assert fast <= eager and all(name.startswith(str(share)) for name, (share, _) in offload.WISHES.items())

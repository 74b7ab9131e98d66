"""Parts of a bench: their results are kept if they fail later, and only one part measures at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import flambeau
from flambeau.bench import parts

FOLDERS = (Path(flambeau.__file__).parents[1], Path(__file__).parent)  # of the package and of part_cases
HERE = {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS)), "OMP_NUM_THREADS": "1"}


def told(acts: dict[str, list[str]], jobs: int = 2, limit: float = 60, prepare: float = 50) -> dict[str, Any]:
    found: dict[str, Any] = {name: {"seen": {}, "errors": {}} for name in acts}
    spec = {name: {"acts": list(words)} for name, words in acts.items()}
    for name, words in parts.run("part_cases", spec, jobs, limit, prepare, HERE):
        for key, value in words.items():
            found[name][key] = found[name].get(key, {}) | value if isinstance(value, dict) else value
    return found


def test_a_part_that_fails_or_dies_leaves_what_it_told() -> None:
    found = told({"fails": ["noise", "attempt", "fail"], "dies": ["noise", "turn", "die"], "slow": ["long", "noise"]})
    assert found["fails"]["errors"] == {"it": "ValueError: as it was told", "part": "ValueError: as it was told"}
    assert found["dies"]["errors"] == {"part": "exit 7: a library's word"}
    assert found["slow"]["errors"] == {"compile": "no time"}
    assert list(found["slow"]["seen"]) == ["long", "noise"]


def test_parts_measure_one_after_the_other() -> None:
    found = told({name: ["turn", "measure"] for name in "abc"}, jobs=3)
    spans = [found[name]["measured"] for name in "abc"]
    assert all(not found[name]["errors"] for name in "abc")
    assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:])), spans
    assert max(found[name]["seen"]["turn"] for name in "abc") < min(start for start, _ in spans)


def test_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that takes too long is stopped, and a part that could not start is reported."""
    monkeypatch.setattr(parts, "GRACE", 0.0)
    start = time.time()
    found = told({"on": ["turn", "sleep"], "first": ["sleep"], "never": ["noise"]}, jobs=1, limit=12, prepare=10)
    assert 10 < time.time() - start < 20
    assert found["on"]["errors"] == {"measure": "no time"} and "sleep" in found["on"]["seen"]
    assert found["first"]["errors"] == found["never"]["errors"] == {"part": "no time"}
    assert not found["never"]["seen"]

"""Renders every graph that the tests compile, for any target, as Metal sources too, and checks each source.

    PYTHONPATH=tests python -m pytest -p targets.metal_suite --metal-json results/metal-texts.json tests/ops

Runs add to the file, if it exists: it counts distinct sources. This is a plug-in, not a test: it takes its graphs from
whichever tests are run.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flambeau import pipeline
from flambeau.codegen.simt.metal import render
from flambeau.errors import Error
from flambeau.ir.program import TableKernel
from flambeau.results_file import write_results
from flambeau.schedule.plan import schedule
from flambeau.targets.metal.checker import check

TARGET = "metal-emulator"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--metal-json", type=Path, default=None, help="check the Metal texts of all graphs, count here")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--metal-json"):
        config.pluginmanager.register(Suite(path))


class Suite:
    def __init__(self, path: Path) -> None:
        self.path, self.seen_path = path, path.with_suffix(".seen")
        known = json.loads(path.read_text()) if path.exists() else {"rows": [], "summary": {}}
        self.counts: Counter[str] = Counter(known["summary"].get("counts", {}))
        self.rows: list[dict[str, Any]] = known["rows"]
        self.seen = set(self.seen_path.read_text().split()) if self.seen_path.exists() else set()
        self.here = 0
        pipeline.OBSERVERS.append(self.observe)

    def observe(self, made: pipeline.Compiled) -> None:
        self.counts["graphs"] += 1
        try:
            _, _, captured = pipeline.lowered(made.gm, replace(made.options, target=TARGET))
            program = schedule(captured.graph, captured.graph.capabilities)
            sources = [render(k, f"k{i}") for i, k in enumerate(program.kernels) if not isinstance(k, TableKernel)]
        except (Error, NotImplementedError) as error:
            self.counts[f"not written: {type(error).__name__}"] += 1
            self.rows.append({"refused": str(error)[:300], "text": ""})
            return
        for source in sources:
            self.counts["kernels"] += 1
            name = hashlib.sha256(source.text.encode()).hexdigest()[:16]
            if name in self.seen:
                continue
            self.seen.add(name)
            self.counts["texts"] += 1
            if problems := check(source.text):
                self.counts["refused"] += 1
                self.rows.append({"refused": problems[:3], "text": source.text[:4000]})

    def pytest_runtest_logfinish(self) -> None:
        self.here += 1
        if self.here % 50 == 0:
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        self.seen_path.write_text("\n".join(sorted(self.seen)))
        write_results(self.path, "metal texts", self.rows, {"counts": dict(self.counts)})

"""Runs all checks of `numerics="eager"` in parallel, until the time is over, and adds up the results.

    flambeau bench numerics --target cuda --json results/numerics-cuda.json

Processes share the tasks of `bits`, each with one compiler; each network of `bits_models` has a process of its own.
Step times are measured when all others are done.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flambeau.bench.harness import UNSTEADY, geometric_mean, wanted
from flambeau.bench.parts import Talk, run
from flambeau.config import config

GROUPS = {
    "alone": "operators alone, three dtypes", "entries": "op_db entries, forward and gradient, three dtypes",
    "chains": "random chains of up to 12 operators",
    "large": "reductions, scans, norms, losses, pooling, embedding: large shapes",
    "networks": "networks drawn at random: results, gradients and buffers, three dtypes",
    "optimizers": "optimizers in all forms: parameters, state and averages, with clipping and scaled gradients"}
MODELS = ("lm24", "resnet50", "vit", "dlrm")
QUIET = 50.0  # seconds of the limit in which steps are timed, or a quarter of it
LISTED = 20  # cases that are listed by name if values differ


@dataclass
class NumericsRow:
    """The results of a group. `differ` lists cases with unequal values; `unsteady` counts those in which eager does not
    repeat itself."""

    name: str
    cases: int = 0
    values: int = 0
    unequal: int = 0
    unsteady: int = 0
    differ: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, finding: dict[str, Any]) -> None:
        if finding["error"]:
            self.errors[finding["name"]] = finding["error"]
            return
        self.cases, self.values, self.unequal = (
            self.cases + 1, self.values + finding["values"], self.unequal + finding["unequal"])
        if finding["note"].startswith(UNSTEADY):
            self.unsteady += 1
        if finding["unequal"] and len(self.differ) < LISTED:
            self.differ.append(f"{finding['name']}: {finding['note']}")


def part(talk: Talk, what: str, **arguments: Any) -> None:
    from flambeau.bench import bits, bits_models

    if what == "tasks":
        bits.part(talk, **arguments)
    else:
        bits_models.part(talk, **arguments)


def measure(device: str, size: str, only: str | None, jobs: int, limit: float, seed: int = 0
            ) -> Iterator[tuple[list[NumericsRow], dict[str, Any]]]:
    """Yields rows and summary, again whenever there is more in them. `limit`: seconds for all of it; `seed`: that of
    the first network."""
    rows: dict[str, NumericsRow] = {}
    told_of = ("ms", "error", "error_of_results", "draws", "planned", "done")
    summary: dict[str, Any] = {"seed": seed, **{key: {} for key in told_of}}
    models = [name for name in MODELS if wanted(f"models {name}", only)]
    common = {"size": size, "device": device}
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as claims:
        parts: dict[str, dict[str, Any]] = {
            f"tasks {k}": {"what": "tasks", "only": only, "claims": claims, "seed": seed, **common}
            for k in range(max(1, jobs - len(models)))}
        parts |= {f"models {name}": {"what": "model", "name": name, **common} for name in models}
        # Kernels may come from the usual cache folder: their compile time is not measured.
        environment = {"FLAMBEAU_JOBS": "1", "OMP_NUM_THREADS": "1", "FLAMBEAU_CACHE_DIR": str(config.cache_dir)}
        prepare = limit - min(QUIET, limit / 4)
        for name, told in run("flambeau.bench.numerics", parts, jobs, limit, prepare, environment):
            for finding in told.pop("found", ()):
                title = GROUPS.get(finding["group"], finding["group"])
                rows.setdefault(title, NumericsRow(title)).add(finding)
            if errors := told.pop("errors", {}):
                row = rows.setdefault(name, NumericsRow(name))
                row.errors |= errors
            if group := told.pop("done", None):
                summary["done"][group] = summary["done"].get(group, 0) + 1
            for key, value in told.items():
                summary[key] |= value
            yield sorted(rows.values(), key=place), summary | {"over_eager": over_eager(summary["ms"])}


def place(row: NumericsRow) -> int:
    """Returns the position of a row: the order of groups and models, independent of when findings came."""
    order = [*GROUPS.values(), *MODELS]
    return next((k for k, text in enumerate(order) if row.name.startswith(text)), len(order))


def over_eager(ms: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns geometric means over the models of each kind of step, relative to eager."""
    kinds = dict.fromkeys(kind for times in ms.values() for kind in times if kind != "eager")
    return {kind: geometric_mean([t[kind] / t["eager"] for t in ms.values() if kind in t and "eager" in t])
            for kind in kinds}

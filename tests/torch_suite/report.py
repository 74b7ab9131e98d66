"""results/torch-tests.json, and the table of it in docs/guides/device.md.

    PYTHONPATH=tests python -m torch_suite.report results/torch-tests.json docs/guides/device.md
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flambeau.results_file import origin

from .files import DEVICE, FILES, KINDS, File, common_name
from .reasons import UNEXPLAINED, reason
from .runner import BAD, LOADING, Settings, State

BEGIN, END = "<!-- torch-tests: written by `make docs` -->", "<!-- /torch-tests -->"


def results(settings: Settings, files: Iterable[File], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Plain data: per file counts, and each failure with its reason. `before`: results whose other files are kept.
    Each file has the commit and the date of its run."""
    import torch

    found = {**origin(), "torch": torch.__version__, "python": platform.python_version(),
             "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "dtypes": list(settings.dtypes)}
    run = {"commit": found["commit"], "date": found["date"]}
    rows = {row["file"]: {**run, **row} for file in files if (row := _row(settings, file)) is not None}
    if before is not None and (before["torch"], before["dtypes"]) == (found["torch"], found["dtypes"]):
        run = {"commit": before["commit"], "date": before["date"]}
        rows = {row["file"]: {**run, **row} for row in before["files"]} | rows
    order = {file.path: k for k, file in enumerate(FILES)}
    return {**found, "files": sorted(rows.values(), key=lambda row: order.get(row["file"], len(order)))}


def _row(settings: Settings, file: File) -> dict[str, Any] | None:
    kind = KINDS[file.kind]
    ours = State(settings, file, DEVICE).tests
    beside = {side: State(settings, file, side).tests for side in kind.beside}
    judges = {side: State(settings, file, side).tests for side in kind.judges}
    whole = ours.pop(LOADING, {})
    if not ours and not whole:
        return None
    no_reference = {test for tests in beside.values() for test in {*ours, *tests}
                    if test not in tests or tests[test]["status"] != "passed"}
    counts = Counter({"no reference": len(no_reference)})
    failures, skips = [], Counter[str]()
    for test, report in sorted(ours.items()):
        if test in no_reference:
            continue
        if report["status"] == "passed":
            counts["passed"] += 1
        elif report["status"] not in BAD:
            counts["skipped"] += 1
            skips[report["error"][:100]] += 1
        else:
            judged = {side: tests[test] for side, tests in judges.items() if test in tests}
            why, applies = reason(file.kind, test, report, judged)
            counts["failed" if applies else "not applicable"] += 1
            failures.append({"test": common_name(report["test"]), "status": report["status"], "reason": why,
                             "counts": applies, "error": report["error"][:300]})
    ran = len(no_reference | ours.keys())
    return {"file": file.path, "kind": file.kind, "tests": max(whole.get("selected", 0), ran), "ran": ran,
            "beside": [*kind.beside, *kind.judges], "load error": whole.get("error", ""),
            "seconds": round(sum(report["seconds"] for report in ours.values())),
            **{name: counts[name] for name in ("passed", "failed", "not applicable", "skipped", "no reference")},
            "crashed": sum(report["status"] == "crashed" for report in ours.values()),
            "hung": sum(report["status"] == "hung" for report in ours.values()),
            "skips": dict(skips.most_common()), "failures": failures}


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


def unexplained(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"file": row["file"], **failure} for row in found["files"] for failure in row["failures"]
            if failure["reason"] == UNEXPLAINED]


def share(row: dict[str, Any]) -> str:
    total = row["passed"] + row["failed"]
    return f"{100 * row['passed'] / total:.1f}%" if total else ""


def table(found: dict[str, Any]) -> str:
    names = ("tests", "ran", "passed", "failed", "not applicable", "skipped", "no reference")
    dates = sorted({row.get("date", found["date"]) for row in found["files"]} or {found["date"]})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    lines = [f"torch {found['torch']}, {days}; tests of {', '.join(found['dtypes'])} or of no dtype.", "",
             f"| file | {' | '.join(names)} | passed of those that apply |", "|---|" + "---|" * (len(names) + 1)]
    rows = [{"ran": row["tests"], "title": _short(row["file"])} | row for row in found["files"]]
    for kind in KINDS:
        if same := [row for row in rows if row.get("kind") == kind]:
            rows.append({"title": f"all of {kind}", **{name: sum(row[name] for row in same) for name in names}})
    for row in rows:
        lines.append(f"| {row['title']} | {' | '.join(str(row[name]) for name in names)} | {share(row)} |")
    reasons = Counter((failure["reason"], failure["counts"]) for row in found["files"] for failure in row["failures"])
    if reasons:
        lines += ["", "| why a test fails | counts | tests |", "|---|---|---|"]
        lines += [f"| {why} | {'yes' if counts else 'no'} | {number} |"
                  for (why, counts), number in reasons.most_common()]
    return "\n".join(lines)


def _short(path: str) -> str:
    parts = path.split("/")
    return f"`{path}`" if len(parts) < 3 else f"`{parts[-3]}: {parts[-1]}`"


def page(text: str, found: dict[str, Any]) -> str:
    """docs/guides/device.md with the table of these results."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table(found)}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(page(target.read_text(), json.loads(source.read_text())))

"""Results files: what was measured, on which machine, by which command, at which commit.

    write_results(Path("results/models-cpu.json"), "models", rows, summary)
    read_results(Path("results/models-cpu.json"))  # an error, if it does not say where it comes from

Every page with figures is written from such files, so each figure can be made again.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flambeau.errors import UnsupportedError

ORIGIN = ("command", "commit")


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine and versions that the numbers were measured with."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                 platform.processor())
    more: dict[str, Any] = {}
    if device == "cuda":
        more = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": version("triton")}
    elif device == "flambeau":
        more = {"device": torch.get_device_module(device).get_device_name(0)}
    return {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(), "system": platform.system(),
            "torch": torch.__version__, "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), **more}


def origin() -> dict[str, str]:
    """The command line of this process, and the commit of the sources that it runs.

    FLAMBEAU_COMMIT gives the commit if the sources were copied without their history.
    """
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = module.name.removesuffix(".__main__") if module else ""
    file = Path(sys.argv[0])
    program = (f"python -m {name}" if name and name not in ("flambeau", "flambeau.cli")
               else f"python {shortened(file)}" if file.suffix == ".py" and file.name != "__main__.py" else "flambeau")
    words = [shortened(Path(word)) if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return {"command": " ".join([program, *map(shlex.quote, words)]),
            "commit": os.environ.get("FLAMBEAU_COMMIT") or _commit()}


def shortened(path: Path) -> str:
    """A path without the parts that are specific to this machine."""
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else (
        path.name if path.is_absolute() else str(path))


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(("git", "-C", str(Path(__file__).parent), *words), capture_output=True, text=True,
                              check=True).stdout.strip()
    try:
        return git("rev-parse", "--short=10", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"release {version('flambeau')}"


def plain(rows: Sequence[Any]) -> list[Any]:
    return [asdict(row) if is_dataclass(row) and not isinstance(row, type) else row for row in rows]


def without_number(summary: dict[str, Any]) -> list[str]:
    """The keys of figures that are NaN, such as the mean of no cases."""
    return [key for key, x in summary.items() if isinstance(x, float) and x != x]


def write_results(path: Path, kind: str, rows: Sequence[Any], summary: dict[str, Any], device: str = "cpu") -> None:
    """Writes a results file. `device`: torch's name of the measured device; rows are dataclasses or plain data.

    Raises UnsupportedError if a figure of the summary is NaN, which means that nothing was measured."""
    if empty := without_number(summary):
        raise UnsupportedError(f"{path.name} would say nothing: {', '.join(empty)} of no measured case",
                               hint="see the errors of its rows; give it more time, or fewer cases")
    report = {"kind": kind, **origin(), "machine": machine(device), "rows": plain(rows), "summary": summary}
    path.write_text(json.dumps(report, indent=1) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """The content of a results file. Raises UnsupportedError if it does not name its command and commit."""
    report: dict[str, Any] = json.loads(path.read_text())
    missing = [key for key in ORIGIN if not report.get(key)]
    if missing:
        raise UnsupportedError(f"{path.name} does not say its {' and '.join(missing)}",
                               hint="make it again with the command that writes it: each adds both")
    return report

"""The run on a GPU keeps the results of its jobs, also of jobs that do not end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gpu_session
from gpu_session import PHASES, Job, Phase, interpreter, planned, run

WRITES = "import json, sys, time; json.dump([{seed}], open(sys.argv[-1], 'w')); time.sleep({limit} * {nap})"


def job(tmp_path: Path, name: str, nap: int) -> Job:
    script = tmp_path / f"{name}.py"
    script.write_text(WRITES.replace("{nap}", str(nap)).replace("{seed}", "7").replace("{limit}", "60"))
    return Job(name, str(script))


def test_what_was_written_is_kept(tmp_path: Path, capfd) -> None:
    found = tmp_path / "results"
    found.mkdir()
    start = time.time()
    run([job(tmp_path, "ends", 0), job(tmp_path, "hangs", 1)], 4.0, {}, found, tmp_path, dict(os.environ))
    assert time.time() - start < 20
    assert "ends: exit 0" in (printed := capfd.readouterr().out) and "hangs: out of time" in printed
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        assert {json.load(tar.extractfile(f"results/{name}.json"))[0] for name in ("ends", "hangs")} == {7}


def test_all_phases_end_in_time(monkeypatch) -> None:
    jobs = [job.name for phase in PHASES for job in phase.jobs]
    assert len(set(jobs)) == len(jobs)
    for before, only in ((Path("."), ""), (None, ""), (None, "cliffs,streams")):
        phases = list(planned(only, before, 1000))
        assert 0 < sum(seconds for seconds, _ in phases) <= 1000.1
        assert ("two-commits" in [job.name for _, jobs in phases for job in jobs]) == bool(before)
    monkeypatch.setattr(gpu_session, "PHASES", (Phase(1.0, (Job("one", "x.py"),)),))
    assert [jobs for _, jobs in planned("two", None, 5)] == []


def test_sources_are_found_without_an_installation(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_session.importlib.metadata, "entry_points", lambda **_: [])
    env = interpreter(tmp_path)
    code = ("from importlib.metadata import entry_points\n"
            "print(len(entry_points(group='torch_dynamo_backends', name='flambeau')))")
    answer = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "1"

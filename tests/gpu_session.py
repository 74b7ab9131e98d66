"""Tests and measurements that need an NVIDIA GPU, in one run of a given length: streams and packages, then times.

    make test-gpu                                               # half an hour; writes build/gpu/
    python tests/gpu_session.py --out build/gpu --seconds 1400 --only cliffs,streams --before build/before

The jobs of a phase run at the same time. Those of the first phase only check results; in the others one job measures
while the rest, if any, compile (`--beside`). Every job writes a results file as it goes. The archive of these files
and of the jobs' output, OUT/results.tar.gz, is rewritten every half minute, so that an interrupted run loses nothing.
`--before` is a tree of another commit, for `two_commits.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
SHARDS = 3
ARCHIVE_SECONDS = 30.0
END_SECONDS = 20.0  # extra time for a job after its limit, to write its results


class Job(NamedTuple):
    name: str
    words: str  # the command's arguments; {limit}: seconds, {seed}, {beside}: a folder, {before}: a tree


class Phase(NamedTuple):
    seconds: float
    jobs: tuple[Job, ...]


def bench(what: str, more: str = "", name: str = "") -> Job:
    return Job(name or what, f"-m flambeau bench {what} --target cuda --limit {{limit}} {more}")


PHASES = (
    Phase(330, (*(Job(f"streams-{k}", f"tests/compile/stream_programs.py --device cuda --runs 1000 --recorded "
                                      f"--shard {k}/{SHARDS} --seconds {{limit}}") for k in range(SHARDS)),
                Job("package-results", "-m flambeau bench package-results --target cuda --jobs 6"),
                Job("results", "tests/gpu_results.py --cases 1000 --jobs 4 --seed {seed} --limit {limit}"))),
    Phase(280, (bench("overlap", "--beside {beside} --jobs 7"), bench("offload", "--beside {beside} --jobs 6"))),
    Phase(280, (bench("cliffs", "--cases 1000 --seed {seed}"),)),
    Phase(70, (bench("contractions", "--only products --backends eager,flambeau,own", "products"),)),
    Phase(90, (bench("contractions", "--only tails --backends eager,inductor,autotuned,flambeau", "tails"),)),
    Phase(90, (bench("contractions", "--only attention --backends eager,flambeau,flex", "attention"),)),
    Phase(30, (bench("contractions", "--only experts --backends eager,flambeau", "experts"),)),
    Phase(130, (Job("two-commits", "tests/two_commits.py {before} . --kind host,ops,models --target cuda"),)),
    Phase(100, (bench("compiled", "--jobs 8"),)),
)


def interpreter(tools: Path) -> dict[str, str]:
    """An environment that finds the sources and the entry points that torch looks up, also without installation."""
    env = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=os.pathsep.join(
        [str(PROJECT / "src"), str(PROJECT / "tests"), str(tools), os.environ.get("PYTHONPATH", "")]))
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="flambeau"):
        project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
        info = tools / "flambeau-0.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: flambeau\nVersion: 0\n")
        info.joinpath("entry_points.txt").write_text("".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items())
            for group, names in project["entry-points"].items()))
    return env


def planned(only: str, before: Path | None, seconds: float) -> Iterator[tuple[float, list[Job]]]:
    """The selected phases, with their lengths scaled so that all end in time."""
    phases = [(phase.seconds, jobs) for phase in PHASES if (jobs := [
        job for job in phase.jobs if any(part in job.name for part in only.split(",")) and
        (before or "{before}" not in job.words)])]
    share = seconds / sum(length for length, _ in phases) if phases else 1.0
    for length, jobs in phases:
        yield length * min(share, 3.0), jobs


def archive(found: Path, out: Path) -> None:
    draft = out / "results.tmp"
    with tarfile.open(draft, "w:gz") as tar:
        tar.add(found, "results")
    draft.replace(out / "results.tar.gz")


def run(jobs: list[Job], seconds: float, places: dict[str, str], found: Path, out: Path, env: dict[str, str]) -> None:
    limit = max(1.0, seconds - END_SECONDS)
    running = {}
    for job in jobs:
        words = [word.format(limit=round(limit), **places) for word in job.words.split()]
        with open(found / f"{job.name}.txt", "w") as log:
            running[job.name] = subprocess.Popen(
                [sys.executable, *words, "--json", str(found / f"{job.name}.json")], cwd=PROJECT, env=env, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True)
    end, saved = time.time() + seconds, time.time()
    while time.time() < end and any(process.poll() is None for process in running.values()):
        time.sleep(0.5)
        if time.time() > saved + ARCHIVE_SECONDS:
            archive(found, out)
            saved = time.time()
    for name, process in running.items():
        ended = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # the job's child processes too
        process.wait()
        tail = (found / f"{name}.txt").read_text(errors="replace").splitlines()[-3:]
        print(f"{name}: {'out of time' if ended is None else f'exit {ended}'}: {' | '.join(tail)[-300:]}", flush=True)
    archive(found, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1500, help="for everything")
    parser.add_argument("--only", default="", help="parts of names of jobs, separated by commas")
    parser.add_argument("--before", type=Path, help="a tree of another commit")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flambeau-gpu-") as scratch:
        found, tools = Path(scratch) / "results", Path(scratch) / "tools"
        found.mkdir()
        env = interpreter(tools)
        places = {"beside": str(Path(scratch) / "beside"), "seed": str(args.seed), "before": str(args.before)}
        for seconds, jobs in planned(args.only, args.before, args.seconds):
            print(f"==> {', '.join(job.name for job in jobs)}: {seconds:.0f} s", flush=True)
            run(jobs, seconds, places, found, args.out.resolve(), env)
    print(f"{args.out / 'results.tar.gz'} has everything")


if __name__ == "__main__":
    main()

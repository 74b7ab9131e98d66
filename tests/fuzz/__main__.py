"""The command line of the fuzzer: `python -m fuzz --target cpu --count 2000 --jobs 2`, with tests/ on the path."""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

from .results import add
from .run import LENGTH, TARGETS, fuzz, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Random programs against eager.")
    parser.add_argument("--target", choices=TARGETS, default="cpu")
    parser.add_argument("--count", type=int, default=300, help="programs (300)")
    parser.add_argument("--seed", type=int, help="the first one's; programs are named by their seeds (drawn)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (as many as there are cores)")
    parser.add_argument("--time", type=float, help="seconds after which no program is started")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which one program hangs (120)")
    parser.add_argument("--shrink", type=int, default=4, help="how many findings of a kind are shrunk (4)")
    parser.add_argument("--skip", nargs="*", default=(), metavar="KIND", help="kinds of findings that do not count")
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--results", type=Path, help="the results file that this run is added to")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this program here, and show it")
    given = parser.parse_args()
    if given.replay is not None:
        return replay(given.replay, given.target)
    first = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    report = fuzz(given.target, first, given.count, given.jobs, given.time, given.limit, given.shrink,
                  lambda text: print(text, flush=True), given.skip)
    print(report.text())
    if given.results:
        add(report, given.results)
    if given.json:
        write([report], given.json)
    return int(bool(report.groups))


def replay(seed: int, target: str) -> int:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from .judge import findings
    from .kinds import draw

    if target == "device":
        import flambeau

        flambeau.enable_device()
    program = draw(seed, LENGTH[target])
    print(program.text(target))
    ours, torchs = findings(program, target)
    for f in torchs:
        print(f"torch's own: {f.kind}: {f.detail}")
    for f in ours:
        print(f"{f.kind} (call {f.call}): {f.detail}")
    return int(bool(ours))


if __name__ == "__main__":
    sys.exit(main())

"""The command line: run, then report. The exit status is 1 if a failure is unexplained."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import report
from .files import DTYPES, FILES
from .runner import Settings, Suite

PROJECT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="torch_suite", description="PyTorch's tests on the device and the backend.")
    parser.add_argument("root", type=Path, help="PyTorch's test folder, of the installed version")
    parser.add_argument("files", nargs="*", help="parts of file names; all files without")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="tests of these dtypes, and those that name none")
    parser.add_argument("--only", default="", metavar="PART", help="tests whose name has this part")
    parser.add_argument("--limit", type=float, default=Settings.limit, help="seconds of processors for a test")
    parser.add_argument("--time", type=float, default=float("inf"), help="seconds for all: the report is of what ran")
    parser.add_argument("--shard", default="1/1", help="k/n: the k-th of n parts of each file")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--redo", default="", help="statuses that are run again: failed,crashed,hung,passed,skipped")
    parser.add_argument("--state", type=Path, default=PROJECT / "build" / "torch-tests", help="what is known so far")
    parser.add_argument("--json", type=Path, default=None, help="write the results to this file")
    parser.add_argument("--keep", action="store_true", help="what that file says of test files that are not run stays")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    args = parser.parse_intermixed_args()
    part, parts = (int(number) for number in args.shard.split("/"))
    settings = Settings(args.root.resolve(), args.state, tuple(args.dtypes.split(",")), limit=args.limit,
                        time=args.time, jobs=args.jobs, shard=(part, parts), only=args.only,
                        redo=tuple(filter(None, args.redo.split(","))))
    files = [file for file in FILES if not args.files or any(part in file.path for part in args.files)]
    for file in [file for file in files if not (args.root / file.path).exists()]:
        print(f"{file.path}: not in this version")
        files.remove(file)
    if not args.report_only:
        Suite(settings, files, lambda text: print(text, flush=True)).run()
    before = json.loads(args.json.read_text()) if args.keep and args.json and args.json.exists() else None
    results = report.results(settings, files, before)
    if args.json:
        args.json.write_text(report.as_json(results))
    print(report.table(results))
    unexplained = report.unexplained(results)
    for row in unexplained:
        print(f"unexplained: {row['file']}: {row['test']}: {row['error'][:200]!r}")
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())

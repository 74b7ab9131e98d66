"""A process that loads one test file, names its tests, and runs those that it is then told.

    python -m torch_suite.worker REPORTS

Two lines of JSON on standard input: {"root", "file", "side", "memory"}, and, after the names came, a list of those to
run. Reports are lines of JSON on the file descriptor REPORTS: {"tests"}, the names; {"test"}, when one begins; and
{"test", "status", "seconds", "error", "trace", "line"}, when it has ended: the line is the last one in a test file.
Statuses: passed, failed, skipped, expected (a failure that the file expects).
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import DEVICE, File
from .prepare import before_torch, prepare

# Tells a worker to say where it is. In its own thread: to look at frames that run (faulthandler's timer) may crash.
WHERE = signal.SIGUSR1
_LENGTH = 1200  # characters kept of an error and of a trace


class Reports(unittest.TestResult):
    def __init__(self, descriptor: int, settle: Callable[[], None], root: str):
        super().__init__()
        self.settle, self.root = settle, root
        self.out = os.fdopen(descriptor, "w", buffering=1)
        self.reported: set[str] = set()
        self.whole_class: dict[str, dict[str, Any]] = {}  # what happened to a class before its first test

    def write(self, **report: Any) -> None:
        self.out.write(json.dumps(report) + "\n")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.outcome: dict[str, Any] = {"status": "passed"}
        self.began = spent()
        self.write(test=name_of(test))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        try:
            self.settle()  # an error that comes late is this test's, and not that of the next
        except Exception as error:
            if self.outcome["status"] == "failed":
                self.outcome["late"] = f"{type(error).__name__}: {error}"
            else:
                self.addError(test, sys.exc_info())
        self.reported.add(name_of(test))
        self.write(test=name_of(test), seconds=round(spent() - self.began, 3), **self.outcome)

    def stop(self) -> None:
        """PyTorch's test classes stop after some errors of CUDA; here each test counts."""

    def _ended(self, test: Any, status: str, error: str = "", trace: str = "", line: str = "") -> None:
        outcome = {"status": status, "error": error[:_LENGTH], "trace": trace[-_LENGTH:], "line": line}
        if not isinstance(test, unittest.TestCase):  # setUpClass
            self.whole_class[re.search(r"\((?:.*\.)?(\w+)\)", str(test))[1]] = outcome  # type: ignore[index]
        elif self.outcome["status"] != "failed":
            self.outcome = outcome

    def addError(self, test: Any, err: Any) -> None:
        _, value, frames = err
        chain = [value.__cause__, value] if value.__cause__ is not None else [value]  # what was wrong comes first
        said = "; ".join(f"{type(x).__name__}: {x}" for x in chain)
        lines = [f"{f.filename.removeprefix(self.root)}:{f.lineno}" for f in traceback.extract_tb(frames)
                 if f.filename.startswith(self.root)]
        self._ended(test, "failed", said, "".join(traceback.format_exception(*err)), (lines or [""])[-1])

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self._ended(test, "skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._ended(test, "expected", f"{err[0].__name__}: {err[1]}")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._ended(test, "failed", "unexpected success")


def spent() -> float:
    """Seconds of processors: this one's, and of compilers that it has waited for."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def name_of(test: unittest.TestCase) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


def load(root: Path, file: File, side: str) -> types.ModuleType:
    """The module of a test file, with our names in its text on our side."""
    path = root / file.path
    for folder in (root, path.parent):  # as if it were started there
        sys.path.insert(0, str(folder))
    name = file.path.removesuffix(".py").rsplit("/", 1)[-1]
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    text = path.read_text()
    for old, new in file.renames if side == DEVICE else ():
        text = text.replace(old, new)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def tests_of(module: types.ModuleType, file: File) -> dict[str, unittest.TestCase]:
    """By name. Of a file of tests for devices only those that are given one, if it does not name its classes."""
    found = {}
    for value in vars(module).values():
        if not (isinstance(value, type) and issubclass(value, unittest.TestCase)):
            continue
        if value.__module__ != module.__name__:  # imported
            continue
        if file.classes and not re.fullmatch(file.classes, value.__name__):
            continue
        if file.kind == "device" and not file.classes and not hasattr(value, "get_primary_device"):
            continue
        for method in unittest.TestLoader().getTestCaseNames(value):
            test = value(method)
            found[name_of(test)] = test
    return found


def main() -> None:
    order, descriptor = json.loads(sys.stdin.readline()), int(sys.argv[1])
    sys.argv[1:] = []  # torch's test tools read them
    file, side = File(**order["file"]), order["side"]
    faulthandler.enable()
    faulthandler.register(WHERE)
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    resource.setrlimit(resource.RLIMIT_DATA, (min(order["memory"], limit % (1 << 63)),) * 2)  # -1: there is none
    before_torch(file, side)
    settle = prepare(file, side)
    try:
        tests = tests_of(load(Path(order["root"]), file, side), file)
    except unittest.SkipTest:
        tests = {}  # the file says itself that it is not for us
    reports = Reports(descriptor, settle, order["root"])
    reports.write(tests=list(tests))
    wanted = json.loads(sys.stdin.readline() or "[]")
    # In unittest's own order: some tests leave things behind for those that come before them by name.
    unittest.TestSuite(tests[test] for test in sorted(wanted) if test in tests).run(reports)
    for test in wanted:
        if test not in reports.reported:
            gone = {"status": "failed", "error": "not in the file"}
            reports.write(test=test, seconds=0, **reports.whole_class.get(test.split(".")[0], gone))


if __name__ == "__main__":
    main()

"""The runner of PyTorch's test files, on small files in their style: every way in which a test can end is a result."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from torch_suite import report
from torch_suite.files import DEVICE, DTYPES, File, chosen, common_name, dtypes_of
from torch_suite.reasons import UNEXPLAINED
from torch_suite.runner import BATCH, LOADING, Settings, State, Suite, in_turn, run_tests

# Needs no torch, so that its processes start quickly.
ENDINGS = '''
import os, time, unittest

class TestEndings(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.assertEqual(1, 2)
    def test_is_skipped(self): self.skipTest("not today")
    @unittest.expectedFailure
    def test_fails_as_expected(self): self.assertEqual(1, 2)
    @unittest.expectedFailure
    def test_passes_unexpectedly(self): pass
    def test_parts(self):
        for k in range(3):
            with self.subTest(k=k): self.assertNotEqual(k, 1)
    def test_crashes(self): os.abort()
    def test_exits(self): os._exit(0)
    def test_hangs(self): time.sleep(60)

class TestNoStart(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise RuntimeError("no start")
    def test_anything(self): pass
'''
DEVICES = '''
import torch
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests, onlyNativeDeviceTypes
from torch.testing._internal.common_utils import TestCase

class TestDevices(TestCase):
    @onlyNativeDeviceTypes
    @dtypes(torch.float32, torch.int8)
    def test_add(self, device, dtype):
        x = torch.ones(3, device=device, dtype=dtype)
        self.assertEqual(torch.device(device).type, x.device.type)
        self.assertEqual(x + x, torch.full((3,), 2, dtype=dtype))
    def test_is_the_cpu(self, device):
        self.assertEqual(torch.device(device).type, "cpu")

class TestWithoutADevice(TestCase):
    def test_nothing(self): pass

instantiate_device_type_tests(TestDevices, globals())
'''
COMPILED = '''
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import TestCase

class TestCompiled(TestCase):
    def test_backends(self):
        counter, x = CompileCounter(), torch.ones(2, 3)
        for backend in ("inductor", "eager", counter):
            torch._dynamo.reset()
            self.assertEqual(torch.compile(lambda x: x.sin() + 1, backend=backend)(x), x.sin() + 1)
        self.assertEqual(counter.frame_count, 1)
    def test_code(self):
        _, code = run_and_get_code(torch.compile(lambda x: x.sin() + 1), torch.ones(3))
        self.assertIn("kernel", code[0])
'''


def written(folder: Path, text: str, **options: object) -> tuple[Settings, File]:
    (folder / "test_small.py").write_text(text)
    return (Settings(folder, folder / "state", DTYPES, limit=float(options.pop("limit", 100))),  # type: ignore[arg-type]
            File("test_small.py", **options))  # type: ignore[arg-type]


def test_names() -> None:
    ours, theirs = "TestXPRIVATEUSE1.test_to_cpu_flambeau_float32_bool", "TestXCPU.test_to_cpu_cpu_float32_bool"
    assert common_name(ours) == common_name(theirs) == "TestX.test_to_cpu_float32_bool"
    assert dtypes_of(ours) == ("float32", "bool") and dtypes_of("TestX.test_float32") == ()
    names = [f"TestX.test_{k}_cpu{dtype}" for k in range(30) for dtype in ("", "_int8", "_bool")]
    shards = [set(chosen(names, ("bool",), (k, 3))) for k in (1, 2, 3)]
    assert set.union(*shards) == {name for name in names if "int8" not in name} and sum(map(len, shards)) == 60


def test_a_stopped_run_is_a_sample_of_every_file() -> None:
    tests = {File(f"{name}.py", "device"): [f"T.{name}{k}" for k in range(count)]
             for name, count in (("a", 3), ("b", 13 * BATCH["device"]), ("c", 67 * BATCH["device"]))}
    batches = in_turn(tests)
    assert {*itertools.chain(*(batch for _, batch in batches))} == {*itertools.chain(*tests.values())}
    half = batches[:len(batches) // 2]
    for file, names in [*tests.items()][1:]:
        assert 0.3 < sum(len(batch) for other, batch in half if other == file) / len(names) < 0.7


def test_a_run_stops_in_time(tmp_path: Path) -> None:
    settings, file = written(tmp_path, ENDINGS, kind="compile")
    began, state = time.monotonic(), State(settings, file, "stock")
    run_tests(settings, file, "stock", lambda tests: ["TestEndings.test_fails", "TestEndings.test_hangs"], state,
              stop=began + 3)
    assert time.monotonic() - began < 10 and [*state.tests] == ["TestEndings.test_fails"]  # the other has no result


def test_every_ending_is_a_result(tmp_path: Path) -> None:
    settings, file = written(tmp_path, ENDINGS, kind="compile", limit=1.5)
    state = State(settings, file, "stock")
    run_tests(settings, file, "stock", lambda tests: tests, state)
    found = {test.partition(".test_")[2]: row["status"] for test, row in State(settings, file, "stock").tests.items()}
    assert found == {
        "passes": "passed", "fails": "failed", "is_skipped": "skipped", "fails_as_expected": "expected",
        "passes_unexpectedly": "failed", "parts": "failed", "crashes": "crashed", "exits": "crashed", "hangs": "hung",
        "anything": "failed"}
    assert "time.sleep" in ENDINGS and "test_hangs" in state.tests["TestEndings.test_hangs"]["trace"]
    assert "SIGABRT" in state.tests["TestEndings.test_crashes"]["error"]
    assert "no start" in state.tests["TestNoStart.test_anything"]["error"]


def test_a_file_that_does_not_load(tmp_path: Path) -> None:
    settings, file = written(tmp_path, "import nothing_of_that_name", kind="compile")
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        run_tests(settings, file, "stock", lambda tests: tests, State(settings, file, "stock"))


def test_results_of_other_files_stay(tmp_path: Path) -> None:
    """Each file says of which commit and day its results are."""
    settings, file = written(tmp_path, "", kind="skeleton")
    State(settings, file, DEVICE).add({"test": "TestA.test_b", "status": "passed", "seconds": 0})
    found = report.results(settings, [file])
    before = {**found, "commit": "one", "date": "2000-01-02",
              "files": [{**found["files"][0], "file": name, "passed": 7} for name in ("test_other.py", file.path)]}
    for row in before["files"]:
        del row["commit"], row["date"]
    both = {row["file"]: row for row in report.results(settings, [file], before)["files"]}
    assert [both[name]["passed"] for name in (file.path, "test_other.py")] == [1, 7]
    assert both["test_other.py"]["commit"] == "one" and both[file.path]["commit"] == found["commit"]
    assert f"2000-01-02 to {found['date']};" in report.table({**found, "files": [*both.values()]})
    assert len(report.results(settings, [file], {**before, "torch": "another"})["files"]) == 1


@pytest.mark.slow
def test_devices(tmp_path: Path) -> None:
    settings, file = written(tmp_path, DEVICES, kind="device")
    lines: list[str] = []
    Suite(settings, [file], lines.append).run()
    ours = {test: row["status"] for test, row in State(settings, file, DEVICE).tests.items() if test != LOADING}
    assert ours == {"TestDevices.test_add_float32": "passed", "TestDevices.test_is_the_cpu": "failed"}, lines
    found = report.results(settings, [file])
    assert [row["test"] for row in report.unexplained(found)] == ["TestDevices.test_is_the_cpu"]
    assert "| `test_small.py` | 2 | 2 | 1 | 1 | 0 | 0 | 0 | 50.0% |" in report.table(found)
    page = report.page(f"before {report.BEGIN} old {report.END} after", found)
    assert page.startswith("before ") and page.endswith(" after") and UNEXPLAINED in page and " old " not in page
    lines.clear()
    Suite(settings, [file], lines.append).run()  # all results are known
    assert lines == ["test_small.py: 2 tests, 0 to run"]


@pytest.mark.slow
def test_backends(tmp_path: Path) -> None:
    settings, file = written(tmp_path, COMPILED, kind="compile")
    lines: list[str] = []
    Suite(settings, [file], lines.append).run()
    row, = report.results(settings, [file])["files"]
    assert (row["passed"], row["failed"], row["not applicable"]) == (1, 0, 1), lines
    assert row["failures"][0]["reason"] == "fails with aot_eager as well"

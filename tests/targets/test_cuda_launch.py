"""Launches on a fake CUDA driver that only logs its calls: arguments, grids, variants, faults.

Needs no GPU and no Triton, as the machine code is made up. The kernels themselves are tested with the interpreter.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flambeau.codegen.source import WORKSPACE, BlockSource, Part, TensorMap
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.ir.faults import Fault
from flambeau.targets.cache import shared_cache
from flambeau.targets.cuda.recorder import CudaRecorder
from flambeau.targets.cuda.target import CudaKernel, CudaTarget, shape_function
from flambeau.targets.cuda.triton_compile import Code, Facts, map_words
from flambeau.targets.launch import _extension
from flambeau.targets.toolchain import find_toolchain

DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>

static std::string said;
static int count = 0, fault = 0, fault_at = 0, failure = 0;

static void say(const char* format, long long a = 0, long long b = 0, long long c = 0) {
  char line[200];
  snprintf(line, sizeof line, format, a, b, c);
  said += line;
}

struct Config { unsigned grid[3], block[3], shared; void* stream; const int64_t* attributes; unsigned count; };

extern "C" {
const char* driver_said() { static std::string out; out = said; said.clear(); return out.c_str(); }
void driver_expects(int arguments) { count = arguments; }
void driver_faults(int code, int argument) { fault = code; fault_at = argument; }
void driver_fails(int code) { failure = code; }

int cuInit(unsigned) { return 0; }
int cuGetErrorString(int, const char** text) { *text = "made up"; return 0; }
int cuCtxGetCurrent(void** context) { *context = nullptr; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGet(int* handle, int device) { *handle = device; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = (void*)1; return 0; }
int cuModuleLoadData(void** module, const void* code) {
  *module = strdup((const char*)code);
  return strcmp((const char*)code, "broken") == 0 ? 200 : 0;
}
int cuModuleGetFunction(void** function, void* module, const char*) { *function = module; return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) {
  said += (const char*)function;
  say(" attribute %lld = %lld\n", attribute, value);
  return 0;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) { *memory = malloc(bytes); return 0; }
int cuMemHostGetDevicePointer_v2(unsigned long long* address, void* memory, unsigned) {
  *address = (unsigned long long)memory;
  return 0;
}
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void* stream) {
  memset((void*)address, value, bytes);
  say("zero %lld on %lld\n", bytes, (long long)stream);
  return 0;
}
int cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address, const uint64_t* shape,
                           const uint64_t* steps, const uint32_t* block, const uint32_t* each, int, int swizzle, int,
                           int) {
  if ((uint64_t)map % 64) return 201;
  say("map of %lld at %lld rank %lld", dtype, (long long)address, rank);
  for (unsigned i = 0; i < rank; ++i) say(" %lldx%lld/%lld", shape[i], block[i], each[i]);
  for (unsigned i = 0; i + 1 < rank; ++i) say(" step %lld", steps[i]);
  say(" swizzle %lld\n", swizzle);
  *(int64_t*)map = 1000 + (int64_t)address;
  return 0;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned shared, void* stream, void** arguments, void**) {
  said += (const char*)function;
  say(" (%lld, %lld, %lld)", x, y, z);
  say(" threads %lld shared %lld on %lld:", threads, shared, (long long)stream);
  for (int i = 0; i < count; ++i) say(" %lld", *(int64_t*)arguments[i]);
  said += "\n";
  if (fault) *(int64_t*)*(int64_t*)arguments[fault_at] |= int64_t(fault) << 50;
  return failure;
}
int cuLaunchKernelEx(const Config* how, void* function, void** arguments, void** extra) {
  if (how->count != 1 || how->attributes[0] != 6 || how->attributes[1] != 1) return 202;
  said += "early ";
  return cuLaunchKernel(function, how->grid[0], how->grid[1], how->grid[2], how->block[0], 1, 1, how->shared,
                        how->stream, arguments, extra);
}
}
"""

STREAM = 77


class Machine(CudaTarget):
    """A target on the fake driver. `built`: the facts of every variant that was requested."""

    def __init__(self, driver: Path, extension: ModuleType) -> None:
        super().__init__(arch=90, driver=str(driver))
        self.current_device = lambda: 0
        self.current_stream = lambda device: STREAM + device
        self._extension = Future()
        self._extension.set_result(extension)
        self.built: list[tuple[str, Facts]] = []
        self.machine_code = {"shared": 0, "scratch": 0, "broken": False}
        self.library = ctypes.CDLL(str(driver))
        self.library.driver_said.restype = ctypes.c_char_p

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def codes(self, source: BlockSource, facts: Facts, device: int) -> tuple[Future[Code | CompileError], ...]:
        self.built.append((source.name, facts))
        made = []
        for part in source.parts:
            text = "broken" if self.machine_code["broken"] else f"{source.name}.{part.function}"
            made.append(Future[Code | CompileError]())
            there = [k for k, m in enumerate(part.maps) if m.there(facts.aligned, facts.sizes)]
            maps = tuple(map_words(k, {"elem_type": 10, "swizzle": 3, "block_size": part.maps[k].block}) for k in there)
            made[-1].set_result(Code(part.function, part.warps, self.machine_code["shared"],
                                     self.machine_code["scratch"], text.encode() + b"\0", maps))
        return tuple(made)

    def said(self) -> list[str]:
        text: bytes = self.library.driver_said()
        return text.decode().splitlines()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModuleType]:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "driver.so", folder / "driver.cpp"], check=True)
    disk = shared_cache(config.cache_dir, config.cache_limit_mb)
    # Built here rather than taken from the cache: the library keeps its driver, and a real driver has its own copy.
    return folder / "driver.so", _extension("cuda_launcher", find_toolchain(config.compiler, disk), disk).build()


@pytest.fixture
def machine(parts: tuple[Path, ModuleType]) -> Machine:
    made = Machine(*parts)
    for reset in (made.library.driver_expects, made.library.driver_fails):
        reset(0)
    made.library.driver_faults(0, 0)
    made.said()
    return made


def source(name: str = "k", pointers: int = 2, sizes: Sequence[str] = (), parts: Sequence[Part] = (Part("part0", "3"),),
           workspace: str = "", checks: bool = False) -> BlockSource:
    text = "".join(f"def {p.function}(bad): ...\n" for p in parts) + ("tl.store(bad, 1)" if checks else "")
    return BlockSource(name, text, ("*fp32",) * pointers, tuple(sizes), tuple(parts), workspace)


def test_arguments_are_pointers_sizes_memory_and_two_of_the_compiler(machine: Machine) -> None:
    parts = [Part("a", "(n0 + 63) // 64", 8), Part("b", "2, n1")]
    k = machine.build([source(sizes=("i32", "i64"), parts=parts)]).wait()
    plan = machine.plan([(k["k"], [(1, 0), (0, 64)], [1, 0])])
    machine.library.driver_expects(7)
    assert plan([1600, 3200], [5, 130]) is None
    first, second = machine.said()
    assert first.startswith("k.a (3, 1, 1) threads 256 shared 0 on 77: 3200 1664 130 5 ")
    assert second.startswith("k.b (2, 5, 1) threads 128 shared 0 on 77: 3200 1664 130 5 ")
    *_, bad, scratch, profile = map(int, first.split(": ")[1].split())
    assert bad != 0 and (scratch, profile) == (0, 0)


def test_a_launch_alone_does_the_same_as_in_a_plan(machine: Machine) -> None:
    k = machine.build([source()]).wait()["k"]
    assert k.name == "k" and repr(k) == "<Launch k>"
    assert k([16, 32], []) == 0
    assert [line.split(":")[0] for line in machine.said()] == ["k.part0 (3, 1, 1) threads 128 shared 0 on 77"]


def test_every_call_takes_the_variant_that_its_arguments_allow(machine: Machine) -> None:
    k = machine.build([replace(source(sizes=("i32", "i64")), narrow="n0 < 99", usual=2)]).wait()["k"]
    assert machine.built == [("k", Facts(aligned=True, sizes=2))]
    machine.built.clear()
    for pointers, sizes, facts in [([16, 32], [3, 5], Facts(True, 0)), ([16, 36], [3, 5], Facts(False, 0)),
                                   ([16, 32], [3, 16], Facts(True, 2)), ([16, 32], [0, 16], Facts(True, 3)),
                                   ([16, 32], [99, 5], Facts(True, 0, wide=True))]:
        for _ in range(3):
            k(pointers, sizes)
        assert {f for _, f in machine.built} == {facts}
        assert len(machine.built) == 2  # the first call starts the builds and waits for them
        machine.built.clear()


def test_numbers_that_are_no_sizes_make_no_variants(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are shapes computed anew for them: a number that changes at every call costs nothing."""
    asked: list[tuple[int, ...]] = []

    def shape(*sizes: int) -> tuple[int, ...]:
        asked.append(sizes)
        return 0, False, sizes[1], 1, 1

    numbered = CudaKernel(machine, replace(source(sizes=("i64", "i64")), words=1))
    monkeypatch.setattr("flambeau.targets.cuda.target.shape_function", lambda *_: shape)
    kernel = numbered.launch()
    machine.built.clear()
    for number in (3, 16, 2**60, -32):
        kernel([16, 32], [number, 5])
    assert {facts for _, facts in machine.built} == {Facts(True, 0)} and asked == [(3, 5)]
    assert [line.split()[1] for line in machine.said()] == ["(5,"] * 4
    kernel([16, 32], [16, 16])
    assert machine.built[-1][1] == Facts(True, 2) and len(asked) == 2


def test_all_variants_of_a_plan_are_begun_before_one_is_waited_for(machine: Machine) -> None:
    built = machine.build([source("k"), source("l")]).wait()
    plan = machine.plan([(built["k"], [(0, 0), (0, 0)], []), (built["l"], [(0, 0), (0, 0)], [])])
    machine.built.clear()
    plan([20], [])
    assert [name for name, _ in machine.built] == ["k", "l", "k", "l"]


def test_what_waits_by_itself_is_launched_early(machine: Machine) -> None:
    k = machine.build([source(parts=[Part("a", "5, 2", 8, waits=True), Part("b", "2")])]).wait()["k"]
    k([16, 32], [])
    assert [line.split(" on ")[0] for line in machine.said()] == [
        "early k.a (5, 2, 1) threads 256 shared 0", "k.b (2, 1, 1) threads 128 shared 0"]
    machine._arch = 80  # does not support such launches
    k = machine.build([source(parts=[Part("a", "5", waits=True)])]).wait()["k"]
    k([16, 32], [])
    assert machine.said()[0].startswith("k.a")


def test_no_points_no_launch(machine: Machine) -> None:
    k = machine.build([source(sizes=("i64",), parts=[Part("part0", "n0")])]).wait()["k"]
    k([16, 32], [0])
    assert machine.said() == []
    k([16, 32], [4])
    assert len(machine.said()) == 1


def test_shapes_are_computed_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(text: BlockSource, units: int) -> object:
        real = shape_function(text, units)
        return lambda *sizes: asked.append(sizes) or real(*sizes)

    monkeypatch.setattr("flambeau.targets.cuda.target.shape_function", counted)
    k = machine.build([source(sizes=("i64",), parts=[Part("part0", "n0")])]).wait()["k"]
    for n in (1, 2, 3, 1, 2, 3):
        k([16, 32], [n])
    assert asked == [(1,), (2,), (3,)]
    assert [line.split(")")[0] for line in machine.said()] == [f"k.part0 ({n}, 1, 1" for n in (1, 2, 3, 1, 2, 3)]


def test_the_workspace_is_zero_and_shared_by_a_stream(machine: Machine) -> None:
    k = machine.build([source(sizes=("i64",), workspace="4 * n0", parts=[Part("a", "1"), Part("b", "1")])]).wait()["k"]
    machine.library.driver_expects(5)
    k([16, 32], [100])
    zeroed, first, second = machine.said()
    assert zeroed == "zero 512 on 77"
    place = int(first.split()[-2])
    assert first.split()[-5:] == second.split()[-5:]
    assert bytes((ctypes.c_char * 512).from_address(place)) == bytes(512)
    k([16, 32], [1 << 20])  # larger than the first workspace, which is kept because a captured graph may still use it
    k([16, 32], [100])
    assert len(machine._workspaces[0, STREAM]) == 2
    assert int(machine.said()[-1].split()[-2]) != place


def test_tensors_are_described_where_the_copy_engine_can_read_them(machine: Machine) -> None:
    read = TensorMap("a", 1, 8, "bf16", 2, ("n0", "n1"), ("n1", "1"), (128, 64), even=2)
    write = TensorMap("b", WORKSPACE, 0, "fp32", 4, ("3", "n0", "16"), ("n0 * 16", "16", "1"), (1, 64, 16))
    parts = [Part("first", "1", maps=(read, write)), Part("second", "1")]
    k = machine.build([replace(source(sizes=("i32", "i64"), parts=parts, workspace="64"), cleared=False)]).wait()["k"]
    machine.library.driver_expects(6)
    k([1600, 3200], [10, 32])
    left, right, first, second = machine.said()
    work = int(right.split()[4])
    # The driver's numbers of dtypes; the innermost dimension comes first.
    assert left == "map of 9 at 3216 rank 2 32x64/1 10x128/1 step 64 swizzle 3"
    assert right == f"map of 9 at {work} rank 3 16x16/1 10x64/1 3x1/1 step 64 step 640 swizzle 3"
    assert first.split(": ")[1].split()[:5] == ["1600", "3200", "10", "32", str(work)]
    machine.library.driver_expects(18)
    k([1600, 3200], [10, 32])
    words = [*map(int, machine.said()[2].split(": ")[1].split())]
    shape = [n & 0xFFFFFFFF for n in (words[7], words[8], words[12], words[13], words[14])]
    assert (words[6], words[11], shape) == (4216, 1000 + work, [10, 32, 3, 10, 16])
    assert (words[9:11], words[15:18]) == ([32, 1], [160, 16, 1])
    machine.library.driver_expects(8)
    k([1600, 3200], [10, 33])  # rows of 33 elements are not aligned
    assert [line.split()[0] for line in machine.said()] == ["map", "k.first", "k.second"]
    k([1602, 3200], [10, 32])
    assert [line.split()[0] for line in machine.said()] == ["k.first", "k.second"]


def test_flags_are_zeros_of_the_stream(machine: Machine) -> None:
    k = machine.build([replace(source(workspace="64"), cleared=False, signals=True), source("l")]).wait()
    machine.library.driver_expects(4)
    k["k"]([16, 32], [])
    (line,) = machine.said()  # no buffer is cleared
    flags = int(line.split()[-1])
    assert flags == machine.flags(0, STREAM) and bytes((ctypes.c_char * 64).from_address(flags)) == bytes(64)
    k["l"]([16, 32], [])
    assert str(flags) not in machine.said()[0].split()


def test_what_has_no_address_is_not_aligned(machine: Machine) -> None:
    read = TensorMap("a", 0, 0, "bf16", 2, ("8", "8"), ("8", "1"), (8, 8))
    k = machine.build([source(), source("l", parts=[Part("part0", "1", maps=(read,))])]).wait()
    k["k"]([0, 32], [])
    assert machine.built[-1] == ("k", Facts(True, 0))
    k["l"]([0, 32], [])
    assert machine.built[-1] == ("l", Facts(False, 0))


def test_scratch_of_the_compiler_follows_the_workspace(machine: Machine) -> None:
    machine.machine_code["scratch"] = 64
    k = machine.build([source(workspace="8")]).wait()["k"]
    machine.library.driver_expects(6)
    k([16, 32], [])
    _, work, bad, scratch, profile = map(int, machine.said()[-1].split(": ")[1].split()[1:])
    assert scratch == work + 256 and profile == 0


def test_much_shared_memory_is_asked_for(machine: Machine) -> None:
    machine.machine_code["shared"] = 64 << 10
    machine.build([source()]).wait()["k"]([16, 32], [])
    assert machine.said()[0] == "k.part0 attribute 8 = 65536"


def test_a_fault_is_raised_by_a_later_call(machine: Machine) -> None:
    k = machine.build([source(name, checks=True) for name in "klm"]).wait()
    step = [(0, 0), (0, 0)]
    both, other = machine.plan([(k["k"], step, []), (k["l"], step, [])]), machine.plan([(k["m"], step, [])])
    machine.library.driver_faults(4, 2)
    assert both([16], []) is None
    machine.library.driver_faults(0, 0)
    machine.said()
    assert sorted([both([16], []), both([16], [])]) == [(0, 4 << 50), (1, 4 << 50)]
    assert machine.said() == []  # nothing is launched after a fault
    assert both([16], []) is None
    machine.library.driver_faults(1, 2)
    other([16], [])
    machine.library.driver_faults(0, 0)
    assert both([16], []) == (-1, 1 << 50) and both([16], []) is None


def test_replays_raise_faults_that_no_launch_would_see(machine: Machine) -> None:
    k = machine.build([source("k", pointers=1, checks=True)]).wait()["k"]
    recorder = CudaRecorder(machine)
    recorder.check()
    machine.library.driver_expects(2)
    machine.library.driver_faults(Fault.SELECTED << 8, 1)
    k([16], [])
    machine.library.driver_faults(0, 0)
    with pytest.raises(IndexError, match="out of range") as raised:
        recorder.check()
    assert raised.value.__notes__ == ["reported by a kernel that was launched before"]
    recorder.check()


def test_errors_of_the_driver_name_the_kernel(machine: Machine) -> None:
    k = machine.build([source("k")]).wait()["k"]
    machine.library.driver_fails(719)
    with pytest.raises(RuntimeError, match=r"k failed: made up \(CUDA error 719\)"):
        k([16, 32], [])


def test_code_that_does_not_load_is_that_kernels_error(machine: Machine) -> None:
    machine.machine_code["broken"] = True
    error = machine.build([source("k")]).wait()["k"]
    assert isinstance(error, CompileError) and "does not load" in str(error)


def test_a_plan_that_is_misused_says_so(machine: Machine) -> None:
    k = machine.build([source("k", sizes=("i64",))]).wait()["k"]
    plan = machine.plan([(k, [(0, 0), (2, 0)], [1])])
    with pytest.raises(ValueError, match="needs 3 pointers and 2 sizes, got 1 and 1"):
        plan([16], [1])
    with pytest.raises(ValueError, match="negative"):
        machine.plan([(k, [(-1, 0)], [])])
    with pytest.raises(TypeError):
        machine.plan([("k", [], [])])
    with pytest.raises(TypeError, match="list or tuple of ints"):
        k(1, [])


def test_a_machine_without_a_driver_is_told(parts: tuple[Path, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="nvidia-smi"):
        Machine.launcher(_on(tmp_path / "none.so", parts))


def _on(driver: Path, parts: tuple[Path, ModuleType]) -> Machine:
    made = Machine(*parts)
    made._driver = str(driver)
    return made

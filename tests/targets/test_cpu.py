"""The CPU target: compiled once, isolated from bad kernels, and called quickly."""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flambeau.codegen.source import KernelSource
from flambeau.config import config
from flambeau.errors import CompileError, OptionError
from flambeau.targets import base, launch, toolchain
from flambeau.targets.base import Build, get_target, register_target
from flambeau.targets.cache import DiskCache, shared_cache
from flambeau.targets.cpu import target as cpu
from flambeau.targets.cpu.target import CpuTarget

# A compiler that logs each start, and behaves as the files next to it ask.
WRAPPER = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/log"
while [ -e "$here/hang" ]; do sleep 0.05; done
[ -e "$here/die" ] && kill -9 $$
if [ -e "$here/full" ]; then
  case "$*" in *"$(cat "$here/full")"*) cat "$here/says" >&2; exit 1;; esac
fi
if [ -e "$here/without" ]; then
  case " $* " in *" $(cat "$here/without") "*) echo "unrecognized option" >&2; exit 1;; esac
fi
exec g++ "$@"
"""


def scale(factor: int, name: str | None = None) -> KernelSource:
    """y = factor * x; the second size is returned."""
    return KernelSource(
        name or f"scale{factor}",
        f"""
static float helper(float x) {{ return x * {factor}; }}
extern "C" int64_t KERNEL_NAME(void** p, const int64_t* n) {{
  const float* x = (const float*)p[0];
  float* y = (float*)p[1];
  for (int64_t i = 0; i < n[0]; ++i) y[i] = helper(x[i]);
  return n[1];
}}
""",
        headers=(),
    )


BAD = KernelSource("bad", 'extern "C" int64_t KERNEL_NAME(void**, const int64_t*) { return nonsense; }', ())
UNLINKED = KernelSource(
    "unlinked",
    'int64_t elsewhere(); extern "C" int64_t KERNEL_NAME(void**, const int64_t*) { return elsewhere(); }',
    (),
)


@dataclass
class Machine:
    """A compiler and a cache for one test."""

    compiler: Path
    root: Path

    @property
    def compiles(self) -> int:
        log = self.compiler.parent / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def ask(self, what: str, value: object = "") -> None:
        (self.compiler.parent / what).write_text(str(value))

    def relent(self, what: str) -> None:
        (self.compiler.parent / what).unlink()

    def reset(self) -> None:
        for path in self.compiler.parent.iterdir():
            if path != self.compiler:
                path.unlink()

    def fresh(self) -> CpuTarget:
        """A target without state from this process, as in a new one."""
        shared_cache.cache_clear()
        toolchain._toolchain.cache_clear()
        return CpuTarget()

    def libraries(self) -> set[Path]:
        return set(self.root.glob("*.so"))

    def temporaries(self) -> list[Path]:
        return list(self.root.glob("tmp/*/*"))

    def processes(self) -> list[str]:
        """The running compilers and their watchers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if str(self.compiler).encode() in (text := path.read_bytes()):
                    found.append(text.decode())
        return found


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A compiler that was probed, with its launcher compiled, before the tests begin."""
    compiler = tmp_path_factory.mktemp("compiler") / "cxx"
    compiler.write_text(WRAPPER)
    compiler.chmod(0o755)
    machine = Machine(compiler, tmp_path_factory.mktemp("seed") / "cache")
    with config.override(cache_dir=machine.root, compiler=str(compiler)):
        target = machine.fresh()
        target.build([]).wait()
        assert target.launcher() is not launch.CTYPES
    return machine


@pytest.fixture
def machine(seed: Machine, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(seed.compiler, tmp_path / "cache")
    shutil.copytree(seed.root, machine.root)
    machine.reset()
    with config.override(cache_dir=machine.root, compiler=str(machine.compiler), compile_jobs=2):
        yield machine
    machine.reset()


def check(build: Build, *factors: int) -> None:
    kernels = build.wait()
    x, y = torch.randn(100), torch.empty(100)
    for factor in factors:
        kernel = kernels[f"scale{factor}"]
        assert not isinstance(kernel, CompileError), kernel
        assert kernel([x.data_ptr(), y.data_ptr()], [100, 7]) == 7
        assert torch.equal(y, x * factor)


def test_kernels_run(machine: Machine) -> None:
    target = machine.fresh()
    build = target.build([scale(2), scale(3)])
    check(build, 2, 3)
    assert build.done()
    assert machine.compiles == 1  # both kernels in one unit
    assert machine.temporaries() == []


def test_the_same_text_is_compiled_once(machine: Machine) -> None:
    target = machine.fresh()
    kernels = target.build([scale(2, "a"), scale(2, "b")]).wait()
    assert machine.compiles == 1 and kernels["a"].name == "a" and kernels["b"].name == "b"
    again = [target.build([scale(2, "c")]) for _ in range(2)]
    assert all(build.done() for build in again)
    assert machine.compiles == 1


def test_a_kernel_on_its_way_is_not_started_again(machine: Machine) -> None:
    target = machine.fresh()
    builds = [target.build([scale(2)]), target.build([scale(2), scale(3)])]
    for build in builds:
        check(build, 2)
    assert machine.compiles == 2


def test_a_warm_cache_starts_no_compiler(machine: Machine) -> None:
    sources = [scale(factor) for factor in range(5)]
    machine.fresh().build(sources).wait()
    started = machine.compiles
    check(machine.fresh().build(sources[1:4]), 1, 2, 3)
    run_child(machine, [2, 3])
    assert machine.compiles == started


def test_headers_flags_and_processor_are_part_of_a_kernel(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = toolchain.find_toolchain(config.compiler, DiskCache(machine.root))
    keys = {cpu.kernel_key(scale(2), found.identity())}
    keys.add(cpu.kernel_key(scale(3), found.identity()))
    monkeypatch.setattr(toolchain, "cpu_identity", lambda: "another processor")
    keys.add(cpu.kernel_key(scale(2), found.identity()))
    monkeypatch.setattr(cpu, "_headers_digest", lambda: "other headers")
    keys.add(cpu.kernel_key(scale(2), found.identity()))
    assert len(keys) == 4
    assert cpu.kernel_key(scale(2, "other"), "") == cpu.kernel_key(scale(2), "")


@pytest.mark.parametrize(("told", "wanted"), [
    ("processor : 0\nCPU part : 0xd05\n\nprocessor : 1\nCPU part : 0xd0b\n\nprocessor : 2\nCPU part : 0xd05\n",
     "CPU part: 0xd05\nCPU part: 0xd0b"),
    ("processor : 0\nisa : rv64gcv\n", None)])
def test_machines_with_other_instructions_have_other_kernels(told: str, wanted: str | None,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores of a machine may differ. If their features cannot be read, kernels are for this machine only."""
    monkeypatch.setattr(Path, "read_text", lambda self: told)
    assert toolchain.cpu_identity.__wrapped__() == (wanted or f"{os.uname().machine} {os.uname().nodename}")


def test_kernels_leave_the_mask_that_the_librarys_functions_wait_for(tmp_path: Path) -> None:
    """Otherwise each exponential of doubles would wait until the choice that follows the last one is made."""
    found = toolchain.find_toolchain(config.compiler, shared_cache(config.cache_dir, config.cache_limit_mb))
    text = tmp_path / "huber.cpp"
    text.write_text("""
        extern "C" {
        #pragma omp declare simd notinbranch
        double exp(double) noexcept;
        double sum(const double* x, const double* y, long n) {
          double total = 0;
          #pragma omp simd reduction(+ : total)
          for (long i = 0; i < n; ++i) { const double e = exp(x[i]) - y[i]; total += e < 1.0 ? e * e : e; }
          return total;
        }
        }""")
    flags = [f for f in found.flags if f != "-shared"]
    done = subprocess.run([found.compiler, *flags, "-S", "-o", "-", str(text)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "%k1" not in done.stdout
    if "clang" not in found.version and "avx512dq" in Path("/proc/cpuinfo").read_text():
        assert "%k2" in done.stdout  # masks are used


def test_names_within_a_build_are_unique(machine: Machine) -> None:
    with pytest.raises(ValueError, match="called 'same'"):
        machine.fresh().build([scale(2, "same"), scale(3, "same")])


@pytest.mark.parametrize("bad", [BAD, UNLINKED], ids=lambda source: source.name)
def test_a_bad_kernel_is_alone_with_its_error(machine: Machine, bad: KernelSource) -> None:
    target = machine.fresh()
    build = target.build([scale(2), bad, scale(3), scale(4)])
    check(build, 2, 3, 4)
    error = build.wait()[bad.name]
    assert isinstance(error, CompileError)
    assert {"bad": "nonsense", "unlinked": "elsewhere"}[bad.name] in str(error)
    path = Path(str(error).split("its source is in ")[1])
    assert "extern" in path.read_text()
    started = machine.compiles
    check(target.build([scale(2), scale(3), scale(4)]), 2, 3, 4)
    assert machine.compiles == started


def test_units_are_few_and_balanced() -> None:
    kernels = [
        cpu._Kernel(KernelSource(str(i), "x" * (100 + 137 * i % 3000), ()), f"{i:064x}") for i in range(100)
    ]
    units = cpu.group(kernels, jobs=2)
    assert sorted(k.key for unit in units for k in unit) == sorted(k.key for k in kernels)
    lengths = [sum(len(k.source.text) for k in unit) for unit in units]
    assert len(units) == 4 and max(lengths) < 1.05 * min(lengths)
    assert len(cpu.group(kernels[:3], jobs=2)) == 1 and cpu.group([], jobs=2) == []


@pytest.mark.parametrize(
    "damage", [lambda data: data[:4000] + b"\1" + data[4001:], lambda data: data[:1000], lambda data: b""]
)
def test_a_damaged_library_is_built_again(machine: Machine, damage) -> None:
    before = machine.libraries()
    run_child(machine, [2])
    (library,) = machine.libraries() - before
    good = library.read_bytes()
    library.write_bytes(damage(good))
    started = machine.compiles
    run_child(machine, [2])
    assert machine.compiles == started + 1
    assert len(library.read_bytes()) == len(good)
    run_child(machine, [2])
    assert machine.compiles == started + 1


def test_a_reference_without_its_library(machine: Machine) -> None:
    before = machine.libraries()
    machine.fresh().build([scale(2)]).wait()
    (library,) = machine.libraries() - before
    library.unlink()
    check(machine.fresh().build([scale(2)]), 2)
    assert machine.compiles == 2


def test_damage_to_probe_and_launcher(machine: Machine) -> None:
    for path in (*machine.root.glob("*.probe"), *machine.root.glob("*.so")):
        path.write_bytes(path.read_bytes()[:-100])
    run_child(machine, [2])
    assert machine.compiles == 4  # version, probe, launcher, kernel


CHILD = """
import ctypes, sys
from flambeau.codegen.source import KernelSource
from flambeau.errors import CompileError
from flambeau.targets.cpu.target import CpuTarget
text = open(sys.argv[1]).read()
kernels = CpuTarget().build([KernelSource(f, text.replace("FACTOR", f), ()) for f in sys.argv[2:]]).wait()
for factor, kernel in kernels.items():
    if isinstance(kernel, CompileError):
        raise kernel
    x, y = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)()
    assert kernel([ctypes.addressof(x), ctypes.addressof(y)], [3, 0]) == 0
    assert list(y) == [int(factor) * v for v in x], list(y)
"""


def start_child(machine: Machine, factors: list[int]) -> subprocess.Popen[str]:
    """A process that builds and checks the kernels of `scale`."""
    text = machine.root.parent / "scale.txt"
    text.write_text(scale(2).text.replace("x * 2;", "x * FACTOR;"))
    environment = {
        **os.environ,
        "FLAMBEAU_CACHE_DIR": str(machine.root),
        "FLAMBEAU_CXX": str(machine.compiler),
        "FLAMBEAU_JOBS": "2",
    }
    command = [sys.executable, "-c", CHILD, str(text), *map(str, factors)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def run_child(machine: Machine, factors: list[int]) -> str:
    process = start_child(machine, factors)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def test_two_processes_build_the_same_kernels(machine: Machine) -> None:
    before = machine.libraries()
    processes = [start_child(machine, [2, 3, 4]) for _ in range(3)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    assert len(machine.libraries() - before) == 1 and machine.temporaries() == []
    started = machine.compiles
    run_child(machine, [4, 2])
    assert machine.compiles == started


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_killed_while_it_compiles(machine: Machine) -> None:
    machine.ask("hang")
    process = start_child(machine, [2])
    wait_for(lambda: machine.compiles == 1)
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not machine.processes())  # only its watcher ends the compiler
    machine.relent("hang")
    assert len(machine.temporaries()) == 1
    run_child(machine, [2])
    assert machine.compiles == 2 and not (machine.root / "tmp").exists()


def test_a_compiler_that_hangs_is_ended(machine: Machine) -> None:
    target = machine.fresh()
    machine.ask("hang")
    with config.override(compile_timeout=1):
        errors = target.build([scale(2), scale(3)]).wait()
    assert machine.compiles == 1 and machine.temporaries() == []
    wait_for(lambda: not machine.processes())  # a killed process is visible until it is scheduled once more
    for error in errors.values():
        assert isinstance(error, CompileError) and "had not ended after 1 seconds" in str(error)
        assert "FLAMBEAU_COMPILE_TIMEOUT" in str(error)
    machine.relent("hang")
    check(target.build([scale(2), scale(3)]), 2, 3)


def test_a_compiler_that_hangs_when_it_is_probed(machine: Machine) -> None:
    for path in machine.root.glob("*.probe"):
        path.unlink()
    machine.ask("hang")
    with config.override(compile_timeout=1), pytest.raises(CompileError, match="had not ended"):
        machine.fresh().build([scale(2)])
    assert machine.compiles == 1
    wait_for(lambda: not machine.processes())


def test_a_killed_compiler_is_an_error_for_now(machine: Machine) -> None:
    target = machine.fresh()
    machine.ask("die")
    errors = target.build([scale(2), scale(3)]).wait()
    assert all(isinstance(error, CompileError) and "SIGKILL" in str(error) for error in errors.values())
    assert machine.compiles == 1
    machine.relent("die")
    check(target.build([scale(2), scale(3)]), 2, 3)


def test_no_compiler(machine: Machine) -> None:
    with config.override(compiler="no-such-compiler"), pytest.raises(CompileError) as caught:
        machine.fresh().build([scale(2)])
    assert "'no-such-compiler' was not found" in str(caught.value)
    assert "apt install g++" in str(caught.value) and "FLAMBEAU_CXX" in str(caught.value)


def test_a_compiler_that_does_not_work(machine: Machine, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is broken\nexit 1\n")
    broken.chmod(0o755)
    with config.override(compiler=str(broken)), pytest.raises(CompileError, match="it is broken"):
        machine.fresh().build([scale(2)])


@pytest.mark.parametrize("flag, told", [("-march=native", 0), ("-fopenmp", 1), ("-lmvec", 0)])
def test_a_compiler_without_a_flag(machine: Machine, flag: str, told: int) -> None:
    for path in machine.root.glob("*.probe"):
        path.unlink()
    machine.ask("without", flag)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(machine.fresh().build([scale(2)]), 2)
    assert ["OpenMP" in str(warning.message) for warning in caught] == [True] * told
    found = toolchain.find_toolchain(config.compiler, shared_cache(config.cache_dir, config.cache_limit_mb))
    assert flag not in (*found.flags, *found.libraries)
    assert len({"-march=native", "-fopenmp", "-lmvec"} & {*found.flags, *found.libraries}) == 2


@pytest.mark.parametrize("says, told", toolchain._DISK_SYMPTOMS.items())
def test_a_disk_that_is_of_no_use_to_the_compiler(machine: Machine, says: str, told: str) -> None:
    machine.ask("full", machine.root)
    machine.ask("says", f"fatal error: x.s: {says}")
    with pytest.warns(UserWarning, match=f"cannot be used .{told}") as caught:
        check(machine.fresh().build([scale(2), scale(3)]), 2, 3)
    assert len(caught) == 1


def test_an_unwritable_cache_directory(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with config.override(cache_dir=tmp_path / "file" / "cache"), pytest.warns(UserWarning) as caught:
        check(machine.fresh().build([scale(2)]), 2)
    assert len(caught) == 1 and "cannot be used" in str(caught[0].message)


def test_a_forked_child_builds_on_its_own(machine: Machine) -> None:
    target = machine.fresh()
    machine.ask("hang")
    build = target.build([scale(2)])
    wait_for(lambda: machine.compiles == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: what this test is about
        child = os.fork()
    if child == 0:
        machine.relent("hang")
        os._exit(int(isinstance(target.build([scale(2)]).wait()["scale2"], CompileError)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(build, 2)


def test_the_ctypes_launcher_does_the_same(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "python_headers", lambda: machine.root / "nowhere")
    target = machine.fresh()
    check(target.build([scale(2)]), 2)
    assert target.launcher() is launch.CTYPES
    check_plan(target)


def check_plan(target: CpuTarget) -> None:
    kernels = target.build([scale(2), scale(3)]).wait()
    x, y = torch.randn(10), torch.zeros(20)
    steps = [
        (kernels["scale2"], [(0, 0), (1, 0)], [1, 0]),
        (kernels["scale3"], [(1, 0), (1, 40)], [1, 0]),
        (kernels["scale3"], [(1, 0), (1, 0)], [1, 2]),
    ]
    plan = target.plan(steps)
    assert plan([x.data_ptr(), y.data_ptr()], [0, 10, 0]) is None
    assert torch.equal(y, torch.cat([x * 2 * 3, x * 2 * 3]))
    assert plan([x.data_ptr(), y.data_ptr()], (0, 10, 5)) == (2, 5)
    assert target.plan([])([], []) is None
    with pytest.raises(ValueError, match="negative"):
        target.plan([(kernels["scale2"], [(-1, 0)], [])])


def test_a_plan_runs_its_steps_in_order(machine: Machine) -> None:
    target = machine.fresh()
    check_plan(target)
    with pytest.raises(ValueError, match="needs 1 pointers and 0 sizes, got 0 and 0"):
        target.plan([(target.build([scale(2)]).wait()["scale2"], [(0, 0)], [])])([], [])


def test_wrong_arguments_are_python_errors(machine: Machine) -> None:
    kernel = machine.fresh().build([scale(2)]).wait()["scale2"]
    for arguments in [(1, 2), ([1.5], [2]), (["x"], [2]), ([1],), ({1}, {2})]:
        with pytest.raises(TypeError):
            kernel(*arguments)
    with pytest.raises(OverflowError):
        kernel([1 << 70], [2])
    assert repr(kernel) == "<Launch scale2>"


def test_a_long_list_of_pointers(machine: Machine) -> None:
    text = """extern "C" int64_t KERNEL_NAME(void** p, const int64_t* n) {
      int64_t sum = 0;
      for (int64_t i = 0; i < n[0]; ++i) sum += (int64_t)p[i] + n[i];
      return sum;
    }"""
    kernel = machine.fresh().build([KernelSource("sum", text, ())]).wait()["sum"]
    for count in (1, 47, 48, 49, 1000):
        sizes = [count, *range(1, count)]
        assert kernel(list(range(count)), sizes) == sum(range(count)) + sum(sizes)


def test_a_launch_takes_less_than_ten_microseconds(machine: Machine) -> None:
    kernel = machine.fresh().build([scale(2)]).wait()["scale2"]
    x = torch.randn(8)
    pointers, sizes = [x.data_ptr()] * 6, [1, 0]
    times = []
    for _ in range(200):
        start = time.perf_counter_ns()
        for _ in range(10):
            kernel(pointers, sizes)
        times.append((time.perf_counter_ns() - start) / 10_000)
    assert statistics.median(times) < 10, f"{statistics.median(times)} µs"


@pytest.mark.parametrize("nbytes", [0, 1, 63, 1000, 1 << 20])
def test_memory_is_aligned(nbytes: int) -> None:
    memory = CpuTarget().empty(nbytes, torch.device("cpu"))
    assert memory.dtype == torch.uint8 and memory.numel() == nbytes
    assert memory.data_ptr() % 64 == 0


def test_capabilities() -> None:
    capabilities = get_target("cpu").capabilities()
    assert capabilities.name == "cpu" and capabilities.ordered_scatter


def test_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_FACTORIES", {})
    monkeypatch.setattr(base, "_TARGETS", {})
    assert isinstance(get_target("cpu"), CpuTarget) and get_target("cpu") is get_target("cpu")
    with pytest.raises(OptionError, match="'warp'") as caught:
        get_target("warp")
    assert "cpu" in str(caught.value)
    mine = CpuTarget()
    register_target("warp", lambda: mine)
    assert get_target("warp") is mine and "warp" in base.target_names()


def test_large_memory_comes_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(cpu, "_madvise", lambda start, nbytes, advice: asked.append((start, nbytes)) or 0)
    target = get_target("cpu")
    target.fresh(torch.empty(1 << 20))
    assert not asked
    memory = torch.empty(10 << 20)
    target.fresh(memory)
    (start, nbytes), = asked
    assert start % mmap.PAGESIZE == 0 and nbytes > 0.99 * memory.nbytes
    assert memory.data_ptr() <= start and start + nbytes <= memory.data_ptr() + memory.nbytes
    run = torch.compile(lambda x: x + 1, backend="flambeau")
    assert torch.equal(run(torch.zeros(10 << 20)), torch.ones(10 << 20)) and len(asked) == 2

"""`flambeau doctor`: check this machine, and say what to install."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from flambeau import Error, __version__
from flambeau.config import SETTINGS, Setting, config

PYTHON = ((3, 11), (3, 14))  # the first that is supported, and the first that is not
TORCH = (2, 11)
COMPILE_TIMEOUT_S = 60
PREFIX = "FLAMBEAU_"
ASIDE = {"FLAMBEAU_COMMIT", "FLAMBEAU_SAMPLE", "FLAMBEAU_TEST_ROUNDS", "FLAMBEAU_TEST_SEED"}  # of tests and benchmarks
COLOURS = {"ok": "green", "slow": "yellow", "missing": "bold red", "invalid": "bold red", "broken": "bold red"}
# The x86 extensions that decide how wide a vectorised loop is, and the ARM ones, with the names in /proc/cpuinfo.
VECTOR_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "asimd", "sve")

PROBE_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC")
PROBE_SIZE = 1000
PROBE = """
#include <cmath>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads() { return 1; }
#endif
extern "C" int flambeau_probe(int n, float* out) {
  #pragma omp parallel for
  for (int i = 0; i < n; ++i) out[i] = std::sqrt(static_cast<float>(i));
  return omp_get_max_threads();
}
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `remedy` says what to do; it is empty if all is well."""

    name: str
    detail: str
    remedy: str = ""
    bad: str = "missing"  # the verdict if there is a remedy; "slow": Flambeau works without it

    @property
    def verdict(self) -> str:
        return self.bad if self.remedy else "ok"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "The exit status is 1 if torch.compile(..., backend='flambeau') does not work on the CPU."
    parser.add_argument("--settings", action="store_true", help="also list all settings and their values")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for a bug report or a program")


def run(args: argparse.Namespace) -> int:
    findings = list(examine())
    fine = all(finding.verdict not in ("missing", "broken") for finding in findings)
    if args.json:
        print(json.dumps(plain(findings, fine), indent=1))
        return 0 if fine else 1
    console = Console(highlight=False)
    console.print(_checks_table(findings))
    if args.settings:
        console.print(_settings_table())
    for finding in findings:
        if finding.remedy:
            console.print(f"[{COLOURS[finding.verdict]}]{finding.name}[/]: {escape(finding.remedy)}", soft_wrap=True)
    console.print("[green]Everything that Flambeau needs is here.[/]" if fine else
                  "[bold red]Flambeau does not work here yet.[/]")
    return 0 if fine else 1


def plain(findings: list[Finding], fine: bool) -> dict[str, object]:
    """The findings as JSON data."""
    checks = [{"check": f.name, "verdict": f.verdict, "found": f.detail, "remedy": f.remedy} for f in findings]
    settings = {s.env: _value(s) for s in SETTINGS if config.is_given(s.name)}
    return {"flambeau": __version__, "works": fine, "system": platform.platform(), "checks": checks,
            "settings": settings}


def examine() -> Iterator[Finding]:
    """Run all checks. An invalid setting fails only the check that reads it."""
    for name, check in CHECKS.items():
        try:
            yield check(name)
        except Error as error:
            yield Finding(name, error.message, error.hint or "correct the setting", "invalid")


def _python(name: str) -> Finding:
    low, high = PYTHON
    detail = f"{platform.python_version()} ({sys.executable})"
    wanted = f"install Python {low[0]}.{low[1]} or newer, below {high[0]}.{high[1]}"
    return Finding(name, detail, "" if low <= sys.version_info < high else wanted)


def _torch(name: str) -> Finding:
    wanted = f"pip install 'torch>={TORCH[0]}.{TORCH[1]}'"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library of torch that does not load
        return Finding(name, f"cannot be imported: {error}", wanted)
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return Finding(name, torch.__version__, "" if found >= TORCH else wanted)


def _backend(name: str) -> Finding:
    """torch finds backends by entry point. A package that is only on the PYTHONPATH has none."""
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="flambeau"):
        return Finding(name, 'backend="flambeau" is registered')
    return Finding(name, "the backend is not registered", "install the package: pip install -e .")


def _compiler(name: str) -> Finding:
    path = shutil.which(config.compiler)
    if path is None:
        remedy = "install g++ (package g++ or gcc-c++), or set FLAMBEAU_CXX"
        return Finding(name, f"{config.compiler} not found", remedy)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    return Finding(name, f"{(answer.stdout or answer.stderr).partition(chr(10))[0]} ({path})")


def _compile(name: str) -> Finding:
    """The compiler may exist and still not work."""
    try:
        _run_probe()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Finding(name, str(error), lacking() or "install g++ with its standard library, or set FLAMBEAU_CXX")
    return Finding(name, "compiled, loaded and run")


def _openmp(name: str) -> Finding:
    try:
        threads = _run_probe("-fopenmp")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Finding(name, str(error), lacking() or "install libgomp; without it, kernels use one thread", "slow")
    return Finding(name, f"{threads} threads")


def lacking() -> str:
    return "" if shutil.which(config.compiler) else "install the compiler first"


def _run_probe(*flags: str) -> int:
    """Compile a loop, load it, run it and check its result. Returns the number of threads it may use."""
    with tempfile.TemporaryDirectory(prefix="flambeau-doctor-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(PROBE)
        command = [config.compiler, *PROBE_FLAGS, *flags, "-o", str(library), str(source)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if answer.returncode != 0:
            raise ValueError(f"does not compile: {answer.stderr.strip()}")
        out = (ctypes.c_float * PROBE_SIZE)()
        threads = int(ctypes.CDLL(str(library)).flambeau_probe(PROBE_SIZE, out))
    if [round(value * value) for value in out] != list(range(PROBE_SIZE)):
        raise ValueError("the compiled loop gives wrong results")
    return threads


def _vector(name: str) -> Finding:
    # No remedy: a slow machine is not a broken one.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return Finding(name, f"{platform.machine()} (this system does not list vector extensions)")
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    known = [flag for flag in VECTOR_FLAGS if flag in flags]
    return Finding(name, f"{platform.machine()}: {' '.join(known) or 'none known'}")


def _device(name: str) -> Finding:
    # No remedy: the device is optional.
    from flambeau.targets.base import device_target

    try:
        names = ", ".join(device.name for device in device_target().driver().found)
    except Error as error:
        return Finding(name, f"none: {error.message}" + (f" ({error.hint})" if error.hint else ""))
    return Finding(name, f'torch.device("flambeau"), {config.device}: {names}')


def _metal(name: str) -> Finding:
    # No remedy: Metal is optional too.
    import importlib.util

    import torch

    if torch.backends.mps.is_available():
        return Finding(name, "this Mac's GPU, through torch.mps")
    found = importlib.util.find_spec("clang") is not None
    checks = "libclang checks them" if found else "pip install libclang to check them"
    return Finding(name, f"not a Mac: FLAMBEAU_TARGET=metal-emulator runs Metal kernels on the CPU; {checks}")


def _functions(name: str) -> Finding:
    # No remedy: without it, operators that need it call eager's kernels.
    from flambeau.targets.cuda.libdevice import inexact, toolkit_library, torch_cuda

    version = torch_cuda()
    if not version:
        return Finding(name, "not needed: torch is built without CUDA")
    path = toolkit_library()
    kept = f"with numerics=eager, {', '.join(sorted(inexact()))} call eager's kernels"
    return Finding(name, str(path) if path else f"Triton's own, as there is no CUDA {version} toolkit: {kept}")


def _cache(name: str) -> Finding:
    from flambeau.targets.cache import DiskCache  # imported here, so that the other checks work without torch

    root = config.cache_dir
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        remedy = "set FLAMBEAU_CACHE_DIR to a folder that you can write to; without one, every process compiles again"
        return Finding(name, str(error), remedy, "slow")
    entries, size = DiskCache(root).stats()
    return Finding(name, f"{root}: {entries} entries, {size / 2**20:.1f} MiB, writable")


def _settings(name: str) -> Finding:
    for setting in SETTINGS:
        config.read(setting)  # raises if the value is invalid
    known = sorted(s.env.removeprefix(PREFIX) for s in SETTINGS)  # the prefix would make all names alike
    unknown = sorted(v for v in config.environ if v.startswith(PREFIX) and v not in {PREFIX + k for k in known} | ASIDE)
    if unknown:
        near = {v: get_close_matches(v.removeprefix(PREFIX), known, n=1) for v in unknown}
        remedy = [f"{v}: did you mean {PREFIX}{found[0]}?" if found else f"{v} is no setting"
                  for v, found in near.items()]
        listed = "" if all(near.values()) else " (flambeau doctor --settings lists all)"
        return Finding(name, f"unknown: {', '.join(unknown)}", "; ".join(remedy) + listed, "invalid")
    return Finding(name, "valid")


def _main_job(name: str) -> Finding:
    """Compile and run a function: the other checks may pass, and this one still fail."""
    try:
        import torch

        from flambeau.compile.backend import flambeau_backend

        x = torch.linspace(-3, 3, PROBE_SIZE)
        start = time.perf_counter()
        y = torch.compile(lambda x: torch.softmax(x.sin() * 2, 0), backend=flambeau_backend)(x)
        seconds = time.perf_counter() - start
        torch.testing.assert_close(y, torch.softmax(x.sin() * 2, 0))
    except Exception as raised:  # whatever the user would get
        error = getattr(raised, "inner_exception", raised)  # without Dynamo's words around it
        return Finding(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                       "fix the problems above; if there are none, report this with `flambeau doctor --json`", "broken")
    return Finding(name, f"a function was compiled and run, {seconds:.1f} s")


CHECKS: dict[str, Callable[[str], Finding]] = {
    "Python": _python, "torch": _torch, "torch.compile": _backend, "C++ compiler": _compiler, "test compile": _compile,
    "OpenMP": _openmp, "vector units": _vector, "device": _device, "libdevice": _functions, "Metal": _metal,
    "kernel cache": _cache, "settings": _settings, "compiles": _main_job}


def _checks_table(findings: list[Finding]) -> Table:
    columns = (Column(name, overflow="fold") for name in ("check", "", "found"))
    table = Table(*columns, title=f"Flambeau {__version__}", title_justify="left")
    for finding in findings:
        mark = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.name, mark, escape(finding.detail))
    return table


def _settings_table() -> Table:
    names = (Column(name, no_wrap=True) for name in ("setting", "variable"))
    texts = (Column(name, overflow="fold") for name in ("value", "what it does"))
    table = Table(*names, *texts, title="Settings", title_justify="left")
    for setting in SETTINGS:
        table.add_row(setting.name, setting.env, escape(_value(setting)), escape(setting.doc))
    return table


def _value(setting: Setting[Any]) -> str:
    try:
        return str(config.read(setting))
    except Error as error:
        return f"invalid: {error.message}"

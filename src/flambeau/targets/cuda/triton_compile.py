"""Compiles Triton kernels to machine code in worker processes without a GPU, and stores them on disk.

    compiler = TritonCompiler()
    code = compiler.compile(source, part, facts, arch=90).result()     # Code, or CompileError

Machine code depends on assumptions about the arguments (`Facts`). Facts are checked at every call, so that the same
source has several codes, each built when a call first needs it. A process that finds its codes in the cache on disk
neither starts a worker nor imports Triton.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import re
import selectors
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flambeau.codegen.source import HOSTED, LIBRARY, UNHOSTED, BlockSource, Part
from flambeau.config import config
from flambeau.errors import CompileError

from ..background import Child, Pool, check
from ..base import failed, not_compiled
from ..cache import DiskCache, shared_cache
from .libdevice import toolkit_library

WORKER = Path(__file__).with_name("triton_worker.py")
SUFFIX = ".cubin"
# a*b+c has two roundings, as in eager; where one is wanted, the kernel says fma. Denormals are not flushed to zero.
OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
# Variables of Triton that change machine code.
VARIABLES = ("TRITON_PTXAS_PATH", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "DISABLE_LLVM_OPT")
# Each worker takes some 100 MB; more of them do not make a graph's few dozen kernels faster.
MOST_WORKERS = 16


@dataclass(frozen=True)
class Facts:
    """The assumptions of machine code: whether all pointers, and which of the sizes, are divisible by 16, and whether
    indices may need more than 32 bits."""

    aligned: bool = True
    sizes: int = 0  # a bit for each size
    wide: bool = False


@dataclass(frozen=True)
class Code:
    """Machine code of one function, and the facts that a launch needs."""

    name: str
    warps: int
    shared: int  # bytes of shared memory
    scratch: int  # bytes of global memory for each program
    code: bytes
    maps: tuple[tuple[int, ...], ...] = ()  # `map_words` of each tensor map that it takes


def divisible(source: BlockSource, facts: Facts) -> list[int]:
    """The positions of arguments that are divisible by 16."""
    pointers, sizes = len(source.pointers), len(source.sizes)
    found = [k for k in range(pointers) if facts.aligned]
    found += [pointers + k for k in range(sizes) if facts.sizes >> k & 1]
    return found + ([pointers + sizes] if source.workspace else [])


def signature(source: BlockSource, wide: bool) -> dict[str, str]:
    """Returns the arguments that all functions of a source have, with their types."""
    out = {f"p{k}": kind for k, kind in enumerate(source.pointers)}
    out |= {f"n{k}": "i64" if wide else kind for k, kind in enumerate(source.sizes)}
    out |= {"work": "*i8"} if source.workspace else {}
    return out | ({"flags": "*i32"} if source.signals else {}) | {"bad": "*i64"}


def described(part: Part, facts: Facts) -> dict[str, int | None]:
    """Returns the part's tensor maps as constants, for a kernel that describes them itself: 1 for those that the copy
    engine can read, else None."""
    return {m.name: 1 if m.there(facts.aligned, facts.sizes) else None for m in part.maps}


def map_words(number: int, found: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns what a launch must know of a tensor map in addition to its shape: its number within the part; dtype and
    swizzle in shared memory, as the driver numbers them; and the block, which the compiler may have split."""
    # The numbers of dtypes inside descriptors are not those of the driver's interface.
    kind = {8: 10, 9: 8, 10: 9}.get(found["elem_type"], found["elem_type"])
    return number, kind, found["swizzle"], *found["block_size"]


class TritonCompiler:
    """Machine code by key, as futures: complete, or being compiled."""

    def __init__(self) -> None:
        self._start()

    def compile(self, source: BlockSource, part: Part, facts: Facts, arch: int, hosted: bool = False
                ) -> Future[Code | CompileError]:
        """Starts to compile one function, unless that was done before. `hosted`: launches pass its tensor maps."""
        if self._pid != os.getpid():
            self._start()
        given = described(part, facts)
        kinds = signature(source, facts.wide) | dict.fromkeys(given, "constexpr")
        if hosted:
            kinds |= {m.name: f"tensordesc<{m.kind}{[*m.block]}>" for m in part.maps if given[m.name]}
        text = source.text if hosted else source.text.replace(HOSTED, UNHOSTED)
        staged = {} if part.stages is None else {"num_stages": part.stages}
        request = {"text": text, "function": part.function, "signature": kinds,
                   "constants": {name: given[name] for name, kind in kinds.items() if kind == "constexpr"},
                   "arch": arch, "divisible": divisible(source, facts),
                   "options": {**OPTIONS, "num_warps": part.warps, **staged}, "library": library()}
        key = hashlib.sha256(json.dumps([request, identity()]).encode()).hexdigest()
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        with self._lock:
            known = self._codes.get(key)
            if known is not None and not failed(known):
                return known
            made = self._codes[key] = Future()
            if (code := unpacked(disk.read(key, SUFFIX))) is not None:
                made.set_result(code)
                return made
            if find_spec("triton") is None:
                del self._codes[key]
                raise CompileError("Triton, which compiles kernels for NVIDIA GPUs, is not installed", target="cuda",
                                   hint="pip install 'flambeau[cuda]'")
            workers = self._workers()
        numbers = [k for k, m in enumerate(part.maps) if kinds[m.name] != "constexpr"]
        workers.pool.submit(self._work, workers, request, source.title or source.name, numbers, key, disk, made)
        return made

    def prepare(self) -> None:
        """Starts the workers, so that the first kernels need not wait for their imports."""
        if self._pid != os.getpid():
            self._start()
        if find_spec("triton") is not None:
            with self._lock:
                self._workers().prepare()

    def _start(self) -> None:
        """Resets the tables: initially, and in a forked child, which lacks the threads that would fill them."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._codes: dict[str, Future[Code | CompileError]] = {}
        self._pools: dict[tuple[int, int], Workers] = {}

    def _workers(self) -> Workers:
        kind = min(config.compile_jobs, MOST_WORKERS), config.compile_timeout
        if kind not in self._pools:
            self._pools[kind] = Workers(*kind, shared_cache(config.cache_dir, config.cache_limit_mb))
        return self._pools[kind]

    def _work(self, workers: Workers, request: dict[str, Any], name: str, numbers: Sequence[int], key: str,
              disk: DiskCache, made: Future[Code | CompileError]) -> None:
        try:
            answer = workers.ask(request)
            if "error" in answer:
                path = disk.put(key, request["text"].encode(), ".txt")
                what = f"{request['function']} of the kernel {name}"
                made.set_result(not_compiled(what, answer["error"], "cuda", path))
                return
            code = Code(answer["name"], answer["warps"], answer["shared"], answer["scratch"],
                        base64.b64decode(answer["code"]), tuple(map(map_words, numbers, answer["maps"])))
            disk.put(key, packed(code), SUFFIX)
            made.set_result(code)
        except BaseException as error:  # raised where the code is waited for
            made.set_exception(error)


def packed(code: Code) -> bytes:
    head = {k: v for k, v in asdict(code).items() if k != "code"}
    return json.dumps(head).encode() + b"\n" + code.code


def unpacked(data: bytes | None) -> Code | None:
    """Returns the code in a cache entry; None if the entry is malformed."""
    head, _, code = (data or b"").partition(b"\n")
    try:
        fields = json.loads(head)
        made = Code(fields["name"], fields["warps"], fields["shared"], fields["scratch"], code,
                    tuple(map(tuple, fields["maps"])))
    except (ValueError, TypeError, KeyError):
        return None
    numbers = made.warps, made.shared, made.scratch, *(n for m in made.maps for n in m)
    return made if isinstance(made.name, str) and all(type(n) is int and n >= 0 for n in numbers) else None


# ---- the processes ---------------------------------------------------------------------------------------


class Worker(Child):
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        super().__init__(process)
        self.folder = folder


class Workers:
    """Up to `count` worker processes. Each serves one request at a time; they start when they are needed.

    A worker whose request takes longer than `seconds` is killed.
    """

    def __init__(self, count: int, seconds: int, disk: DiskCache) -> None:
        self.count, self.seconds, self.disk = count, seconds, disk
        self.pool = Pool(count, "triton")
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # the one used last is warm
        self._started = 0
        self._lock = threading.Lock()

    def prepare(self) -> None:
        for _ in range(self.count - self._started):
            self._idle.put(self._new())

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns a worker's answer. If a worker dies, the request is tried once more: a second death is the text's
        fault."""
        for _ in range(2):
            check()
            worker = self._take()
            line = None
            with suppress(BrokenPipeError):
                line = self._answer(worker.process, request)
            check()  # the exit of this process may have killed it
            if line:
                self._idle.put(worker)
                answer: dict[str, Any] = json.loads(line)
                return answer
            self._bury(worker)
            if line == "":
                return {"error": f"it had not compiled after {self.seconds} seconds, and was ended "
                                 "(FLAMBEAU_COMPILE_TIMEOUT is the limit)"}
        return {"error": f"the compiler ended with code {worker.process.returncode}"}

    def _answer(self, worker: subprocess.Popen[str], request: dict[str, Any]) -> str | None:
        """Returns the line of an answer; empty if it did not come in time, None if the worker has ended."""
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            if not selector.select(self.seconds):
                return ""
        return worker.stdout.readline() or None

    def _take(self) -> Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._new()

    def _new(self) -> Worker:
        with self._lock:
            self._started += 1
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = python_path()
        # In a session of its own: a keyboard interrupt is for this process. A worker ends when its pipe is closed, and
        # during a request by an alarm: if this process is killed, nothing else ends the worker.
        folder = self.disk.folder()
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(LIBRARY), str(folder), str(self.seconds)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True)
        return Worker(process, folder)

    def _bury(self, worker: Worker) -> None:
        with self._lock:
            self._started -= 1
        worker.end()
        shutil.rmtree(worker.folder, ignore_errors=True)


def python_path() -> str:
    """Returns the folders of this process's modules: Triton may be in a folder that only sys.path names."""
    return os.pathsep.join(p for p in sys.path if p)


# ---- what is installed -----------------------------------------------------------------------------------


@cache
def identity() -> Sequence[str]:
    """Returns what machine code depends on besides the text: versions, the functions that texts call, and how they are
    compiled."""
    library = [p.read_text() for p in (*sorted(LIBRARY.glob("*.py")), WORKER)]
    linked = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (toolkit_library(),) if path is not None]
    return (triton_version(), *(os.environ.get(name, "") for name in VARIABLES), *library, *linked)


def library() -> str:
    """Returns the path of the toolkit's device library; empty if Triton links its own."""
    return str(toolkit_library() or "")


def triton_version() -> str:
    """Returns Triton's version, read from its file: importing Triton takes longer than loading a kernel."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    found = re.search(r"__version__ *= *['\"]([^'\"]+)", Path(spec.origin).read_text())
    return found.group(1) if found else str(Path(spec.origin).stat().st_mtime_ns)

"""Builds C++ code that uses torch's headers, once for each version of torch and Python."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.targets.background import Closing, fork_safe, start
from flambeau.targets.cache import shared_cache
from flambeau.targets.toolchain import Extension, find_toolchain, whole_text

LONG = 5  # seconds: longer builds are announced

log = logging.getLogger(__name__)

# Most of the time is spent on torch's headers, and the hot code is small: -O2 takes twice as long and gains nothing.
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")


def source(name: str) -> str:
    """The text of a file in this folder, with the files that it includes inlined."""
    return whole_text(Path(__file__).with_name(f"{name}.cpp"))


def load_native(name: str, what: str, text: str | None = None, load: Callable[[Path], Any] | None = None,
                seconds: int = 20) -> Any:
    """Compile a text (by default the file `name`) and load it: as a Python module, or with `load`. Raises CompileError
    if there is no compiler.

    `what` names it for users, who are told about long builds. A process loads it once, whether or not it compiled it.
    """
    disk = shared_cache(config.cache_dir, config.cache_limit_mb)
    home = Path(torch.__file__).parent
    toolchain = replace(find_toolchain(config.compiler, disk), flags=(*_FLAGS, f"-I{home / 'include'}"),
                        libraries=(f"-L{home / 'lib'}", *_LIBRARIES))
    extension = Extension(name, text or source(name), toolchain, disk, load,
                          (torch.__version__, str(torch.version.git_version)))
    found = extension.stored()
    if found is None:
        with disk.alone(name, toolchain.seconds):
            found = extension.stored() or _built(extension, what, seconds)
    return found


def _built(extension: Extension, what: str, seconds: int) -> Any:
    level = logging.WARNING if seconds >= LONG else logging.INFO
    log.log(level, "compiling %s for torch %s: once, some %s seconds", what, torch.__version__, seconds)
    try:
        return extension.build()
    except Closing:
        raise
    except (CompileError, ImportError, OSError) as error:
        raise CompileError(f"{what} did not build: {error}",
                           hint=f"torch {torch.__version__} may be newer than this version of Flambeau") from error


class Background:
    """An extension that is built or loaded once, in the background. Until it is ready, and if it cannot be built,
    Python code does its work. `opened` initializes it; `without` describes the effect of not having it."""

    def __init__(self, name: str, what: str, opened: Callable[[Any], Any], seconds: int, without: str,
                 text: str | None = None) -> None:
        self.name, self.what, self.opened, self.text = name, what, opened, text
        self.seconds, self.without = seconds, without
        self._lock = fork_safe(threading.Lock())
        self._thread: threading.Thread | None = None
        self._begun = False
        self._module: Any = None
        self._done = False
        self._told: list[Callable[[Any], None]] = []

    def begin(self) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True
                try:
                    self._thread = start(self._build, name=self.name)
                except Closing:
                    self._done = True

    def wait(self) -> Any:
        """The module; None if it cannot be built, or in a process that was forked while another thread built it."""
        self.begin()
        if not self._done and self._thread is not None:
            self._thread.join()
        return self._module

    def tell(self, hear: Callable[[Any], None]) -> None:
        """Call `hear` with the module: now, or once it is ready."""
        self.begin()
        with self._lock:
            if not self._done:
                self._told.append(hear)
                return
        if self._module is not None:
            hear(self._module)

    def _build(self) -> None:
        module = None
        try:
            found = load_native(self.name, self.what, self.text, seconds=self.seconds)
            self.opened(found)
            module = found
        except Closing:
            pass
        except Exception as error:  # whatever fails, programs run without the extension
            log.warning("%s: %s", self.without, error)
        with self._lock:
            self._module, self._done = module, True
            told, self._told = self._told, []
        for hear in told if module is not None else ():
            try:
                hear(module)
            except Exception as error:  # e.g. an operator no longer exists: this listener keeps its Python version
                log.warning("%s: %s", self.without, error)

"""The native code in front of eager operators (gate.cpp), compiled once for each version of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from flambeau.config import config
from flambeau.errors import UnsupportedError
from flambeau.native.build import load_native, source
from flambeau.targets.toolchain import python_headers

from .operator_forms import all_forms, cpp_names


class Gates(Protocol):
    """The extension module."""

    def make(self, name: str, overload: str, key: str, device: str) -> int:
        """A gate before one operator at one dispatch key; it exists until the process ends."""

    def start(self, ask: Any, hot: Any, with_generator: None) -> None:
        """Whom to ask about calls, as the device's gates do."""

    def open(self, gate: int, threshold: int, measured: int, capturing: Callable[[], bool] | None) -> None:
        """Put it into the dispatch table, or change its settings if it is there."""

    def close(self, gate: int) -> None:
        """Take it out: what was there before is there again."""

    def watch(self, changed: int, here: Callable[[], int]) -> None:
        """Part of what calls are told apart by: what `here` says, once the word at the address `changed` is not 0."""

    def aside(self, on: bool) -> bool:
        """Whether calls of this thread pass all gates: the compiler asks eager, and its own kernels are to answer.
        Returns what it was before."""

    def usage(self, gate: int) -> tuple[int, int, int, int]:
        """(calls of ours, calls of the original, kinds of calls with a program, those of them that it serves)"""


@cache
def load_gates() -> Gates:
    """The module, out of the cache or compiled now. CompileError where there is nothing to compile with."""
    if not (python_headers() / "Python.h").exists():
        raise UnsupportedError("eager operators cannot be replaced: Python.h is not installed",
                               hint="install the headers of this Python (Debian, Ubuntu: apt install python3-dev)")
    native: Gates = load_native("gate", "the gates before eager operators", text())
    native.watch(*watched())
    return native


def watched() -> tuple[int, Callable[[], int]]:
    """What gates watch of the settings."""
    return ctypes.addressof(config.changed), config.variant


def text() -> str:
    """gate.cpp with its table of operators."""
    headers, types = cpp_names(all_forms())
    return source("gate").replace(
        "// OPERATOR HEADERS", "\n".join(f"#include <{h}>" for h in headers)).replace(
        "// OPERATOR ROWS", "\n".join(f"    row<{t}>()," for t in types))

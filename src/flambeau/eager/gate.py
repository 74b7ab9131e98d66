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
        """Make a gate in front of one operator at one dispatch key; it exists until the process ends."""

    def start(self, ask: Any, hot: Any, with_generator: None) -> None:
        """Set the functions that are asked about calls, as the device's gates do."""

    def open(self, gate: int, threshold: int, measured: int, capturing: Callable[[], bool] | None) -> None:
        """Insert the gate into the dispatch table, or change its settings if it is there."""

    def close(self, gate: int) -> None:
        """Remove the gate from the dispatch table, which restores the previous kernel."""

    def watch(self, changed: int, here: Callable[[], int]) -> None:
        """Make the result of `here` part of the key of calls, once the word at the address `changed` is not 0."""

    def aside(self, on: bool) -> bool:
        """Set whether this thread's calls bypass all gates: when the compiler asks eager, eager's own kernels must
        answer. Returns the previous value."""

    def usage(self, gate: int) -> tuple[int, int, int, int]:
        """(our calls, calls of the original, classes of calls that have a program, those among them that use it)"""


@cache
def load_gates() -> Gates:
    """The extension module, from the cache or compiled now. Raises CompileError if there is no compiler."""
    if not (python_headers() / "Python.h").exists():
        raise UnsupportedError("eager operators cannot be replaced: Python.h is not installed",
                               hint="install the headers of this Python (Debian, Ubuntu: apt install python3-dev)")
    native: Gates = load_native("gate", "the gates before eager operators", text())
    native.watch(*watched())
    return native


def watched() -> tuple[int, Callable[[], int]]:
    """The two arguments of `Gates.watch`: how gates notice changed settings."""
    return ctypes.addressof(config.changed), config.variant


def text() -> str:
    """The source of gate.cpp with its table of operators filled in."""
    headers, types = cpp_names(all_forms())
    return source("gate").replace(
        "// OPERATOR HEADERS", "\n".join(f"#include <{h}>" for h in headers)).replace(
        "// OPERATOR ROWS", "\n".join(f"    row<{t}>()," for t in types))

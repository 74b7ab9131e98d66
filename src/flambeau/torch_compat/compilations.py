"""The record of what Dynamo has compiled in this process: functions, reasons for recompilations, graph breaks.

Torch logs all this (TORCH_LOGS="recompiles,graph_breaks"), but programs can only read it by private names.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch._dynamo import utils

KEPT = 4096  # compilations whose metrics torch keeps; its default is 64
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")  # Dynamo's name for the rest of a function after a break
BRANCH = "a branch on the value of a tensor"


class Compilation(NamedTuple):
    frame: str  # Dynamo's number of the function
    function: str
    file: str
    line: int
    seconds: float
    why: str  # the reason for recompiling; empty the first time


class Break(NamedTuple):
    why: str
    function: str
    file: str
    line: int


def keep_compilations() -> None:
    """Make torch keep the metrics of more than its last few compilations."""
    utils.set_compilation_metrics_limit(KEPT)


def compilations() -> list[Compilation]:
    """The compilations of forwards: a backward is compiled with its forward, for the same reason."""
    return [Compilation((m.compile_id or "").partition("/")[0], whole(m.co_name or ""), m.co_filename or "",
                        m.co_firstlineno or 0, m.entire_frame_compile_time_s or 0.0, reason(m.recompile_reason or ""))
            for m in utils.get_compilation_metrics() if m.co_name]


def breaks() -> list[Break]:
    """The graph breaks so far. torch.compiler.reset() forgets them."""
    found = []
    for b in utils.graph_break_reasons:
        at = b.user_stack[-1] if b.user_stack else None
        lines = [line.strip() for line in b.reason.splitlines() if line.strip()]
        said = [line.removeprefix("Explanation: ") for line in lines[:2] if not line.startswith("Hint")]
        why = BRANCH if b.reason.startswith("generic_jump") else ": ".join(said)
        found.append(Break(why, whole(at.name), at.filename, at.lineno or 0) if at else Break(why, "", "", 0))
    return found


def whole(name: str) -> str:
    """The function that a resume function belongs to."""
    found = RESUMED.fullmatch(name)
    return whole(found[1]) if found else name


def reason(text: str) -> str:
    """The reason alone, from `0/1: k == 1      # y = x + k  # t.py:4 in f` and a stack below."""
    first = text.partition("\n")[0]
    return re.sub(r"^\d+/\d+: ", "", first).partition("  # ")[0].strip()

"""The text of one kernel, as codegen hands it to a target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSource:
    """One C++ kernel: the function

        extern "C" int64_t KERNEL_NAME(void** p, const int64_t* n)

    which returns 0, or a code that says what was wrong with the data. The token KERNEL_NAME stands where the
    function's name belongs: the target puts in a name made from the content, so that equal text from
    different graphs is one kernel. The text may define helpers beside the function (it is put in a namespace
    of its own) and has no #include lines: `headers` names the files of this package that it needs.
    """

    name: str
    text: str
    headers: tuple[str, ...] = ("prelude.h",)

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


@dataclass(frozen=True)
class Part:
    """One launch of a block kernel: the function, how many programs, how many warps each."""

    function: str
    grid: str  # a Python expression over the sizes n0, n1, ...
    warps: int = 4


@dataclass(frozen=True)
class BlockSource:
    """One kernel in Triton: a module with functions that are launched one after the other,

        @triton.jit
        def part0(p0, p1, ..., n0, n1, ..., work, bad): ...

    all with the same arguments: pointers; run-time sizes; `work`, a pointer to memory that is zero at the start of
    the first part (only where `workspace` is given); `bad`, a pointer to one int32, into which faults are stored.
    """

    name: str
    text: str
    pointers: tuple[str, ...]  # Triton's types: "*fp32"
    sizes: tuple[str, ...]  # "i32" or "i64"
    parts: tuple[Part, ...]
    workspace: str = ""  # bytes, a Python expression over the sizes

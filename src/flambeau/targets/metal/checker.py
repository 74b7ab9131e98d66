"""Checks Metal source without a Mac: libclang type-checks it as C++14 with address spaces, and the checker looks for
features that the language does not have.

    problems = check(source_text)      # [] if there are none

`pip install libclang` brings the compiler's front end. Declarations of Metal's library are in `declarations.h`; address
spaces are attributes there, so that a pointer to the wrong memory does not convert.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from flambeau.codegen.simt.metal import BUFFERS, LARGEST_GROUP, THREADGROUP_BYTES
from flambeau.codegen.source import LIBRARY
from flambeau.errors import UnsupportedError

from .emulator.binding import IDS, functions_of

DECLARATIONS = Path(__file__).with_name("declarations.h")
HEADERS = ("metal_stdlib", "metal_simdgroup", "metal_simdgroup_matrix")
FLAGS = ["-x", "c++", "-std=c++14", "-nostdinc", "-nostdlibinc", "-fno-exceptions", "-fno-rtti", "-Wno-everything",
         "-Werror=return-type", "-Werror=uninitialized", f"-I{LIBRARY}", f"-I{DECLARATIONS.parent}"]
# Words that the language does not have, or that a kernel does not need.
FORBIDDEN = {
    "double": "there is no double", "try": "there are no exceptions", "throw": "there are no exceptions",
    "new": "there is no heap", "delete": "there is no heap", "virtual": "there are no virtual functions",
    "goto": "there is no goto", "dynamic_cast": "there is no run-time type", "typeid": "there is no run-time type",
    "thread_local": "there is no such storage", "asm": "there is no assembler", "atomic_half": "no atomics on half",
    "atomic_ulong": "no atomics on 64 bits", "atomic_long": "no atomics on 64 bits",
}
_WORD = re.compile(r"\b(" + "|".join(FORBIDDEN) + r")\b")
_SHARED = re.compile(r"(^|[;{}])(\s*)threadgroup\b(?=\s+[\w:]+\s+\w+\s*\[)", re.MULTILINE)
_ARRAY = re.compile(r"\bthreadgroup\s+([\w:]+)\s+((?:\w+\s*\[\s*\d+\s*\]\s*,?\s*)+);")
_NUMBER = re.compile(r"(?<![\w.])(\d+\.\d*|\.\d+|\d+[eE][-+]?\d+)([eE][-+]?\d+)?(?![\w.])")
_CAST = re.compile(r"\(\s*(?:const\s+)?(?:device|threadgroup|constant|thread)\b[^()]*\*\s*\)")
_OWN = re.compile(r"\b(\w+)\s*\[\s*(\d+)\s*\];")
_LOOP = re.compile(r"^( *)for \(int (\w+) = [^;]+; \2 (<=?) (\d+); \+\+\2\) \{$(.*?)^\1\}", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SIZES = {"float": 4, "int": 4, "uint": 4, "long": 8, "ulong": 8, "short": 2, "ushort": 2, "half": 2, "char": 1,
          "uchar": 1, "bool": 1, "float4": 16, "uint4": 16, "float2": 8, "uint2": 8, "atomic_int": 4, "atomic_uint": 4}


def check(text: str, name: str = "kernel") -> list[str]:
    """The problems of the kernels of a text without includes."""
    text = text.replace("KERNEL_NAME", name)
    return [*grammar(_COMMENT.sub("", text)), *types(text)]


def grammar(text: str) -> list[str]:
    """Problems with attributes, limits, and words of C++ that Metal does not have."""
    out = [f"{found[0]}: {FORBIDDEN[found[0]]}" for found in _WORD.finditer(text)]
    out += [f"{found[0]}: a number without an f" for found in _NUMBER.finditer(text)]
    out += [f"{found[0]}: a cast that does not ask what memory it is of" for found in _CAST.finditer(text)]
    try:
        functions = functions_of(text)
    except ValueError as error:
        return [*out, str(error)]
    bodies = re.split(r"\bkernel\s+void\s+\w+", text)[1:]
    if not functions:
        out.append("there is no kernel")
    for f, body in zip(functions, bodies, strict=True):
        numbers = [n for _, what, n in f.arguments if what == "buffer"]
        if not f.limit:
            out.append(f"{f.name}: no [[max_total_threads_per_threadgroup]]")
        elif not 0 < f.limit <= LARGEST_GROUP:
            out.append(f"{f.name}: groups of {f.limit} threads, where {LARGEST_GROUP} are the most")
        if len(set(numbers)) != len(numbers) or any(n >= BUFFERS for n in numbers):
            out.append(f"{f.name}: buffers {numbers}, of {BUFFERS}")
        for kind, what, _ in f.arguments:
            if what == "buffer" and not re.match(r"(const )?(device|constant)\b", kind):
                out.append(f"{f.name}: a buffer of type {kind!r} is in no address space")
            if what in IDS and kind not in ("uint", "ushort", "uint2", "uint3"):
                out.append(f"{f.name}: {what} is no {kind}")
        used = 0
        for kind, names in _ARRAY.findall(body):
            for size in re.findall(r"\[\s*(\d+)\s*\]", names):
                used += -(-_SIZES.get(kind, 16) * int(size) // 16) * 16
        if used > THREADGROUP_BYTES:
            out.append(f"{f.name}: {used} bytes of threadgroup memory, of {THREADGROUP_BYTES}")
        if f.name in re.findall(r"\b(\w+)\s*\(", body):
            out.append(f"{f.name}: recursion")
        out += [f"{f.name}: {problem}" for problem in loops_beyond(body)]
    return out


def loops_beyond(body: str) -> Iterator[str]:
    """Yields loops that run past the end of an array of constant size, even if its accesses are guarded."""
    sizes = {name: int(size) for name, size in _OWN.findall(body)}
    for found in _LOOP.finditer(body):
        _, v, compared, end, inside = found.groups()
        for name in re.findall(rf"\b(\w+)\[{v}\]", inside):
            if sizes.get(name, int(end)) < int(end) + (compared == "<="):
                yield f"{v} {compared} {end}: {name} has {sizes[name]} elements"


def types(text: str) -> list[str]:
    """The errors that the compiler reports."""
    # In plain C++ a variable with an address space must be declared static; in Metal it is static anyway.
    text = _SHARED.sub(r"\1\2static threadgroup", text)
    unit = _unit()
    unit.reparse(unsaved_files=files(text))
    return [f"{d.location.line}: {d.spelling}" for d in unit.diagnostics if d.severity >= 3]


def files(text: str) -> list[tuple[str, str]]:
    """The text, and the headers of Metal's library that it includes."""
    named = [str(DECLARATIONS.with_name(name)) for name in HEADERS]
    return [("kernel.cpp", '#include "metal.h"\n' + text), *((name, f'#include "{DECLARATIONS}"\n') for name in named)]


@cache
def _unit() -> Any:
    """One translation unit that is parsed again and again, so that its includes are read only once."""
    try:
        from clang import cindex
    except ImportError as error:
        raise UnsupportedError(f"libclang cannot be imported: {error}", target="metal",
                               hint="pip install libclang") from error
    atexit.register(_unit.cache_clear)  # before libclang itself goes
    return cindex.Index.create().parse(
        "kernel.cpp", FLAGS, files(""), options=cindex.TranslationUnit.PARSE_PRECOMPILED_PREAMBLE)

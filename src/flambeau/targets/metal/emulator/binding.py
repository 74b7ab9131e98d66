"""Turns Metal source into C++ for g++: the kernels unchanged, and a function that binds their arguments.

Macros cannot do three things. An array in threadgroup memory becomes one object for all threads, allocated with nothing
next to it; the runner is told of each thread's own arrays, whose elements must not be read before they are written; and
a kernel's arguments are bound by their attributes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flambeau.codegen.source import KernelSource, RangeSource

# The ids of a thread (runner.cpp) that an argument's attribute stands for.
IDS = {
    "thread_position_in_threadgroup": "lane", "thread_index_in_threadgroup": "lane",
    "threadgroup_position_in_grid": "group", "thread_position_in_grid": "item", "threads_per_threadgroup": "size",
    "threadgroups_per_grid": "groups", "threads_per_grid": "threads", "thread_index_in_simdgroup": "lane % 32",
    "simdgroup_index_in_threadgroup": "lane / 32", "threads_per_simdgroup": "lane * 0 + 32",
}
_KERNEL = re.compile(r"((?:\[\[[^\]]*\]\]\s*)*)\bkernel\s+void\s+(\w+)\s*\(")
_LIMIT = re.compile(r"max_total_threads_per_threadgroup\((\d+)\)")
_ARGUMENT = re.compile(r"^(?P<type>.*?)\b\w+\s*\[\[\s*(?P<what>\w+)(?:\((?P<number>\d+)\))?\s*\]\]$", re.DOTALL)
_SHARED = re.compile(r"(?P<before>[;{}]\s*)threadgroup\s+(?P<type>[\w:]+)\s+"
                     r"(?P<names>\w+\s*\[[^;=]*\](?:\s*,\s*\w+\s*\[[^;=,]*\])*);")
_OWN = re.compile(r"^(\s*(?!return\b)[\w:]+ (\w+)\[\d+\];)", re.MULTILINE)
_NAMED = re.compile(r"(\w+)\s*((?:\[[^\]]*\])+)")


@dataclass(frozen=True)
class Function:
    """A kernel of a text: its name, the largest number of threads in a group (0: not stated), its arguments."""

    name: str
    limit: int
    arguments: tuple[tuple[str, str, int], ...]  # type, attribute, number
    more: int = 0  # pointers that share one buffer, as the fields of a structure

    def call(self) -> str:
        """The call of the kernel by a thread: `a` has the buffers, `i` the ids."""
        given, later = [], 0  # buffers after the shared one come later: each of its pointers has a place in `a`
        for kind, what, number in self.arguments:
            number += later if what == "buffer" else 0
            if kind.endswith("_more&"):
                given.append(f"*({kind[:-1]}*)(a + {number})")
                later = self.more - 1
            elif what != "buffer":
                given.append(f"({kind})(i->{IDS[what]})")
            elif kind.endswith("&"):
                given.append(f"*({kind[:-1]}*)a[{number}]")
            else:
                given.append(f"({kind})a[{number}]")
        return f"{self.name}({', '.join(given)})"


def functions_of(text: str) -> list[Function]:
    """The kernels of a text."""
    out = []
    for found in _KERNEL.finditer(text):
        limit = _LIMIT.search(found[1])
        arguments = []
        for argument in _until(text, found.end()).split(","):
            parts = _ARGUMENT.match(argument.strip())
            if parts is None or (parts["what"] != "buffer" and parts["what"] not in IDS):
                raise ValueError(f"{found[2]}: what is bound to {argument.strip()!r}?")
            arguments.append((parts["type"].strip(), parts["what"], int(parts["number"] or 0)))
        fields = re.search(rf"struct {found[2]}_more \{{(.*?)\}};", text)
        more = fields[1].count(";") if fields else 0
        out.append(Function(found[2], int(limit[1]) if limit else 0, tuple(arguments), more))
    return out


def _until(text: str, start: int) -> str:
    """The text up to the closing parenthesis."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    raise ValueError("a parenthesis is not closed")


def with_arrays(text: str) -> str:
    """The text with arrays in threadgroup memory taken from the runner, and with threads' own arrays reported to it."""
    count = 0

    def declared(found: re.Match[str]) -> str:
        nonlocal count
        lines = []
        for name, size in _NAMED.findall(found["names"]):
            lines.append(f"auto& {name} = flm::shared<{found['type']}{size}>({count});")
            count += 1
        return found["before"] + " ".join(lines)

    before = None
    while before != text:  # one match may end where the next begins
        before, text = text, _SHARED.sub(declared, text)
    return _OWN.sub(r"\1 flm_unset(\2, sizeof(\2));", text)


def bound(source: RangeSource) -> KernelSource:
    """A CPU kernel that runs the Metal kernel. Its sizes are followed by the threads of each launch."""
    functions = {f.name: f for f in functions_of(source.text)}
    count = len(source.itemsizes)
    lines = [with_arrays(source.text)]
    for part in source.ranges:
        lines.append(f'FLM_PLAIN static void {part.function}_thread(void** a, const flm::Ids* i) '
                     f'{{ {functions[part.function].call()}; }}')
    plain = source.sizes - 2 * count  # the extents of the buffers follow them
    buffers = [f"{{p[{k}], n[{plain + 2 * k}] * {size}, n[{plain + 2 * k + 1}] * {size}, {size}, {int(written)}}}"
               for k, (size, written) in enumerate(zip(source.itemsizes, source.written, strict=True))]
    buffers += [f"{{(void*)n, 0, {8 * max(source.sizes, 1)}, 8, 0}}", "{record, 0, sizeof(record), 4, 1}"]
    limits = [functions[r.function].limit for r in source.ranges]
    parts = [f'{{{r.function}_thread, "{source.name}", n[{source.sizes + k}], {r.group}, {limits[k]}}}'
             for k, r in enumerate(source.ranges)]
    lines.append(f"""extern "C" FLM_PLAIN int64_t KERNEL_NAME(void** p, const int64_t* n) {{
  int32_t record[6] = {{0}};
  const flm::Buffer buffers[] = {{{', '.join(buffers)}}};
  const flm::Part parts[] = {{{', '.join(parts)}}};
  return flm_launch(buffers, {len(buffers)}, parts, {len(parts)}, {int(source.collides)});
}}""")
    return KernelSource(source.name, "\n".join(lines), ("metal.h", "flm.h"), source.sites, source.bounded)

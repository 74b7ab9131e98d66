"""GPU C languages are tables: no writer says a word of one of them itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from codegen.c.test_loops import arg_max, rows_at, running, scattered, softmax, sums, swapped
from codegen.programs import graph_of
from flambeau.codegen.simt import kernel as simt
from flambeau.codegen.simt.dialect import Exchange, Shape
from flambeau.codegen.simt.opencl import OpenCL
from flambeau.ir import build
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import DType
from flambeau.ir.nodes import Value
from flambeau.ir.program import Kernel, TableKernel
from flambeau.ir.tuning import CPU_WORK_ITEMS, POINTS
from flambeau.schedule.plan import schedule

WORDS = re.compile(r"__(global|local|kernel|private|constant|attribute)\b|\bget_\w+\(0|\bbarrier\(|\bv(load|store)\d?"
                   r"|\bas_\w+\(|\batom(ic)?_\w+|\bCLK_|#pragma|\breqd_|\brestrict\b|\bu?long\b|\bu(int|short|char)\b|\bfl_\w+")


class Marked(OpenCL):
    """A language whose words are all its own; types, literals and casts are not what this is about."""

    types = {dtype: f"T{k}" for k, dtype in enumerate(OpenCL.types)}
    stored = types
    function = "lib_{}"
    finished_reads = "READ;"
    local, barrier, item, lane, group = "LOCAL", "WAIT;", "ITEM", "LANE", "GROUP"
    minimum, contracted, unlikely = "LESS({}, {})", "CONTRACT", "SELDOM({})"
    thread, threads, zeros, inlined = "THREAD", "THREADS", "ZERO({})", "INLINE"

    def named(self, op: str, dtype: DType) -> str:
        return f"lib_{op}"

    def pragma(self, how: object, reports: bool, counted: bool) -> str:
        return "HINT"

    def bitcast(self, text: str, dtype: DType) -> str:
        return f"BITS({text})"

    def aligned(self, pointers: object, lanes: int) -> str:
        return "ALIGNED"

    def read_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        return f"READ({array}, {pointer});"

    def write_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        return f"WRITE({pointer}, {array});"

    def exchange(self, dtype: DType, element: str, place: str, seen: str, old: str) -> Exchange:
        return Exchange((f"BEGIN({element});",), "", "SWAP({});", "} END", "OLD")

    def head(self, kernel: Kernel, name: str, group: int, extents: Sequence[str]) -> list[str]:
        return [f"HEAD {name} {{"]

    def report(self, size: str) -> str:
        return f"REPORT({size});"

    def constant(self, value: bool | int | float, dtype: DType) -> str:
        return str(value)

    def cast(self, text: str, src: DType, dst: DType) -> str:
        return text


def product(x: Value, y: Value) -> Value:
    """Of matrices."""
    return build.contract((x.shape[0], y.shape[1]), (x.shape[1],), lambda i: x.load((i[0], i[2])),
                          lambda i: y.load((i[2], i[1])), x.dtype)


CASES: dict[str, tuple[Callable[..., list[Value]], list[torch.Tensor]]] = {
    "map": (lambda x: [build.pointwise(x.shape, lambda i: x.load(i) + 1)], [torch.zeros(40000)]),
    "short map": (lambda x: [build.pointwise(x.shape, lambda i: x.load(i) + 1)], [torch.zeros(40)]),
    "transpose": (lambda x: [swapped(x)], [torch.zeros(300, 200)]),
    "rows": (lambda x: [softmax(x, 1), *arg_max(x, 1)], [torch.zeros(30, 600)]),
    "long rows": (lambda x: [softmax(x, 1)], [torch.zeros(600, 20011)]),
    "columns": (lambda x: [sums(x, [0])], [torch.zeros(300, 3000)]),
    "scan of rows": (lambda x: [running(x, 1, True)], [torch.zeros(30, 600)]),
    "scan of columns": (lambda x: [running(x, 0)], [torch.zeros(600, 300)]),
    "scatter": (lambda x, i: [scattered(x, i, x, "add")], [torch.zeros(300, 64), torch.zeros(300, dtype=torch.int64)]),
    "product": (lambda x, y: [product(x, y)], [torch.zeros(70, 90), torch.zeros(90, 80)]),
    "gather": (lambda x, i: [rows_at(x, i)], [torch.zeros(300, 64), torch.zeros(300, dtype=torch.int64)]),
}


def texts(case: str, threads: bool) -> Iterator[str]:
    make, args = CASES[case]
    caps = Capabilities("gpu", programs=1024, ordered_scatter=threads, contracts=True, sorts=True,
                        tuning=CPU_WORK_ITEMS if threads else POINTS)
    for k, kernel in enumerate(schedule(graph_of(make, *args), caps).kernels):
        assert not isinstance(kernel, TableKernel)
        yield simt.render_in(Marked, kernel, f"k{k}", Shape(threads)).text


@pytest.mark.parametrize("threads", [False, True], ids=["points", "threads"])
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_has_the_words_of_its_language_alone(case: str, threads: bool) -> None:
    for text in texts(case, threads):
        found = WORDS.search(text.replace("KERNEL_NAME", ""))
        assert found is None, text[max(found.start() - 80, 0):found.end() + 80]


def test_no_writer_has_a_word_of_opencl() -> None:
    folder = Path(simt.__file__).parent
    for path in folder.glob("*.py"):
        if path.name in ("opencl.py", "metal.py"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = re.sub(r"\bself\.d\.\w+|\{\w+\}|\blong\b(?!\")|#(?!pragma).*", "", line)
            strings = " ".join(re.findall(r'"[^"]*"', code))
            found = WORDS.search(strings)
            assert found is None, f"{path.name}:{number}: {line}"

"""The source code of one kernel, as codegen passes it to a target."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.ir.faults import Sites
from flambeau.ir.index import Dyn, Index, Op, Sym

if TYPE_CHECKING:
    from flambeau.ir.program import AnyKernel, AttentionKernel, Kernel

# headers that kernels include, and the Python module that Triton kernels import
LIBRARY = Path(__file__).parent / "lib"


@dataclass(frozen=True)
class KernelSource:
    """A kernel in C++: the function

        extern "C" int64_t KERNEL_NAME(void** p, const int64_t* n)

    which returns 0, or a code that says what was wrong with the data. The token KERNEL_NAME stands for the function's
    name: `called` puts in one that says what it computes, or the target one made from the content. Equal text for equal
    operators is one kernel, whatever the graph. The text may define helpers next to the function (it is put in a
    namespace of its own) and has no #include lines: `headers` names the files of this package that it needs.
    """

    name: str
    text: str
    headers: tuple[str, ...] = ("prelude.h",)
    sites: Sites = ()  # the bounds that indices are checked against
    bounded: bool = False  # checks its accesses: after the sizes come the first element and the end of every pointer
    binary: bytes | None = None  # the compiled text, where a target keeps it with the text
    title: str = ""  # the name of the function: what it computes, for profilers, reports and errors


# The line of a block kernel that takes its tensor maps from the host, and the line that replaces it where the kernel
# makes them itself.
HOSTED, UNHOSTED = "HOSTED = tl.constexpr(True)", "HOSTED = tl.constexpr(False)"
FLAGS = 4096  # the number of flags by which programs of a kernel may tell each other what is done
WORKSPACE = -1  # of a tensor map: its pointer is that of the workspace


@dataclass(frozen=True)
class TensorMap:
    """A tensor whose tiles the copy engine of an NVIDIA GPU moves: an argument of the kernel that describes it.

    The argument is None if the engine cannot read the tensor: if its pointer is no multiple of 16 bytes, or one of the
    sizes `even` is not divisible by 16. The contiguous dimension comes last.
    """

    name: str
    pointer: int  # the position among the kernel's pointers, or WORKSPACE
    start: int  # offset in elements
    kind: str  # Triton's type of an element: "bf16"
    itemsize: int
    shape: tuple[str, ...]  # Python expressions over the sizes
    steps: tuple[str, ...]  # in elements
    block: tuple[int, ...]
    even: int = 0  # bits, one for each size

    def there(self, aligned: bool, sizes: int) -> bool:
        return aligned and sizes & self.even == self.even


@dataclass(frozen=True)
class Part:
    """One launch of a block kernel: the function, the number of programs, the warps of each, and the number of pipeline
    stages of loops over tensor core products that do not set it themselves."""

    function: str
    grid: str  # a Python expression over the sizes n0, n1, ... and `units`, the processors of the device
    warps: int = 4
    stages: int | None = None
    maps: tuple[TensorMap, ...] = ()
    # It waits for earlier kernels on its stream by itself (`fl.wait`), so it may be launched before they are done.
    waits: bool = False


@dataclass(frozen=True)
class BlockSource:
    """A kernel in Triton: a module with functions that are launched one after the other,

        @triton.jit
        def part0(p0, p1, ..., n0, n1, ..., work, flags, bad, map0, ...): ...

    with the same arguments: pointers; run-time sizes; `work`, a pointer to memory (only if there is a `workspace`);
    `flags`, a pointer to FLAGS words of 32 bits, which are zero before a launch and after it (only if it `signals`);
    `bad`, a pointer to one int64, into which a fault is stored; then the part's own tensor maps.
    """

    name: str
    text: str
    pointers: tuple[str, ...]  # Triton's types: "*fp32"
    sizes: tuple[str, ...]  # "i32" or "i64", where indices are narrow
    parts: tuple[Part, ...]
    workspace: str = ""  # bytes, a Python expression over the sizes
    narrow: str = ""  # the condition for narrow indices, a Python expression over the sizes; empty: always
    # The same kernel in other block shapes, to choose the fastest from. For the comparison, `results` has for each
    # result the position of its pointer and its number of elements, a Python expression over the sizes.
    alternatives: tuple[BlockSource, ...] = ()
    results: tuple[tuple[int, str], ...] = ()
    sites: Sites = ()
    bounded: bool = False  # launches check their accesses
    origins: tuple[str, ...] = ()  # if it is bounded: the operators that it computes
    usual: int = 0  # bits: the sizes that were divisible by 16 when the graph was captured
    words: int = 0  # bits: the sizes that are plain numbers, whose values are not used in shapes or addresses
    cleared: bool = True  # the workspace is zero when the first part begins
    signals: bool = False  # programs signal each other that results are written
    binary: bytes | None = None
    title: str = ""


@dataclass(frozen=True)
class Range:
    """One launch of an OpenCL kernel: the function, the number of work-items, and the size of a group."""

    function: str
    items: str  # a Python expression over the sizes n0, n1, ... and `units`, the cores of the device
    group: int = 1


@dataclass(frozen=True)
class RangeSource:
    """A kernel in OpenCL C: functions that are launched one after the other,

        __kernel void KERNEL_NAME_0(__global float* p0, long o0, ..., long n0, ..., __global int* faults, long at)

    all with the same arguments: for each pointer a buffer and an offset in elements; run-time sizes; a table of faults
    and the index of this launch's record in it (`fl_report`). KERNEL_NAME is as in `KernelSource`.
    """

    name: str
    text: str
    itemsizes: tuple[int, ...]  # of the pointers' elements
    written: tuple[bool, ...]  # whether the kernel writes there
    reach: tuple[int, ...]  # bytes that it can access from the pointer on; 0: not known before the run
    sizes: int
    ranges: tuple[Range, ...]
    checks: bool = False  # whether it can report faults
    headers: tuple[str, ...] = ("opencl.h",)
    sites: Sites = ()
    bounded: bool = False
    origins: tuple[str, ...] = ()  # the operators that it computes
    collides: bool = False  # whether several work-items may set one element, in no fixed order
    binary: bytes | None = None
    title: str = ""


_LONGEST = 40  # characters of operators' names in a kernel's name
AnySource = KernelSource | BlockSource | RangeSource


def called(kernel: AnyKernel, source: AnySource) -> AnySource:
    """Returns the source with function names that say what they compute: flambeau_layer_norm_gelu_3f2a91c0. A name
    follows from operators and text alone, so that equal kernels stay one."""
    operators = dict.fromkeys(_NUMBER.sub("", o).strip("_") for o in kernel.origins)
    label = "_".join(n.removeprefix("native_") for n in operators if n.isidentifier())[:_LONGEST].strip("_")
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:8]
    title = f"flambeau_{label or 'kernel'}_{digest}"
    if isinstance(source, BlockSource):
        return _called_blocks(source, title)
    text = source.text.replace("KERNEL_NAME", title)
    if isinstance(source, KernelSource):
        return replace(source, text=text, title=title)
    ranges = tuple(replace(r, function=r.function.replace("KERNEL_NAME", title)) for r in source.ranges)
    return replace(source, text=text, ranges=ranges, title=title)


def _called_blocks(source: BlockSource, title: str) -> BlockSource:
    names = {p.function: f"{title}_{k}" if k else title for k, p in enumerate(source.parts)}
    text = re.sub(r"(?<=^def )\w+(?=\()", lambda found: names.get(found[0], found[0]), source.text, flags=re.MULTILINE)
    return replace(source, text=text, parts=tuple(replace(p, function=names[p.function]) for p in source.parts),
                   alternatives=tuple(_called_blocks(other, f"{title}_v{k}")
                                      for k, other in enumerate(source.alternatives, 1)), title=title)


_NUMBER = re.compile(r"(_default|_Tensor|_Scalar|_\d+)+$")  # endings of a node's name


def items_function(source: RangeSource) -> Callable[..., tuple[int, ...]]:
    """Returns a function of the number of cores and the sizes: the work-items of each launch."""
    names = ", ".join(["units", *(f"n{k}" for k in range(source.sizes))])
    scope: dict[str, Any] = {}
    exec(f"def items({names}): return ({''.join(r.items + ', ' for r in source.ranges)})", scope)
    items: Callable[..., tuple[int, ...]] = scope["items"]
    return items


def site_table(kernel: Kernel | AttentionKernel) -> Sites:
    """Returns the faults that a kernel can report, with the sizes as expressions for the host."""
    from flambeau.ir.program import sites_of  # imports torch, which processes that only compile texts do without

    names = {s: f"n{k}" for k, s in enumerate(kernel.sizes)}
    return tuple((code, host_text(b.size, names)) for b, code in sites_of(kernel).items()
                 if b.size.symbols() <= set(kernel.sizes) and not any(isinstance(a, Dyn) for a in b.size.atoms()))


def host_text(i: Index, names: Mapping[Sym, str] | None = None) -> str:
    """Returns an index over run-time sizes as a Python expression; sizes have the given names, or their own."""
    written = {"div": "({} // {})", "mod": "({} % {})", "min": "min({}, {})", "max": "max({}, {})"}
    parts = [str(i.const)] if i.const or not i.terms else []
    for mono, coef in i.terms:
        factors = [str(coef)] if coef != 1 else []
        for a in mono:
            if isinstance(a, Op):
                factors.append(written[a.kind].format(host_text(a.a, names), host_text(a.b, names)))
            else:
                assert isinstance(a, Sym) and a.extent is None, f"{a} is not known before the launch"
                factors.append(names[a] if names else a.name)
        parts.append(" * ".join(factors))
    return f"({' + '.join(parts)})"

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

LIBRARY = Path(__file__).parent / "lib"  # headers that kernels include, and the Python that Triton's import


@dataclass(frozen=True)
class KernelSource:
    """One C++ kernel: the function

        extern "C" int64_t KERNEL_NAME(void** p, const int64_t* n)

    which returns 0, or a code that says what was wrong with the data. The token KERNEL_NAME stands where the
    function's name belongs: `called` puts in one that says what it computes, or the target one made from the content.
    Equal text for equal operators is one kernel, whatever the graph. The text may define helpers beside the function
    (it is put in a namespace of its own) and has no #include lines: `headers` names the files of this package that it
    needs.
    """

    name: str
    text: str
    headers: tuple[str, ...] = ("prelude.h",)
    sites: Sites = ()  # what indices are checked against
    bounded: bool = False  # checks its accesses: behind the sizes, the first element and the end of every pointer
    binary: bytes | None = None  # what the text was compiled to, where a target keeps it beside the text
    title: str = ""  # the name of the function: what it computes, for profilers, reports and errors


# A line of a block kernel that takes its tensor maps from the host, and the same line where it makes them itself.
HOSTED, UNHOSTED = "HOSTED = tl.constexpr(True)", "HOSTED = tl.constexpr(False)"
FLAGS = 4096  # by which programs of a kernel may tell each other what is done
WORKSPACE = -1  # of a tensor map: the pointer is that of the workspace


@dataclass(frozen=True)
class TensorMap:
    """A tensor whose tiles the copy engine of an NVIDIA GPU moves: an argument of the kernel that describes it.

    It is None where the engine cannot read: where a pointer is no multiple of 16 bytes, or one of the sizes `even` is
    not divisible by 16. The contiguous dimension comes last."""

    name: str
    pointer: int  # which of the kernel's, or WORKSPACE
    start: int  # elements from there on
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
    """One launch of a block kernel: the function, how many programs, how many warps each, and for how many rounds of a
    loop what tensor cores multiply is on its way at once, unless the loop says so."""

    function: str
    grid: str  # a Python expression over the sizes n0, n1, ... and `units`, the processors of the device
    warps: int = 4
    stages: int | None = None
    maps: tuple[TensorMap, ...] = ()
    # It waits by itself for what is before it on its stream (`fl.wait`): it may be launched before that is done.
    waits: bool = False


@dataclass(frozen=True)
class BlockSource:
    """One kernel in Triton: a module with functions that are launched one after the other,

        @triton.jit
        def part0(p0, p1, ..., n0, n1, ..., work, flags, bad, map0, ...): ...

    with the same arguments: pointers; run-time sizes; `work`, a pointer to memory (only where `workspace` is given);
    `flags`, a pointer to FLAGS words of 32 bits, which are zero before a launch and after it (only where it `signals`);
    `bad`, a pointer to one int64, into which a fault is stored; then the part's own tensor maps.
    """

    name: str
    text: str
    pointers: tuple[str, ...]  # Triton's types: "*fp32"
    sizes: tuple[str, ...]  # "i32" or "i64", of those that are narrow
    parts: tuple[Part, ...]
    workspace: str = ""  # bytes, a Python expression over the sizes
    narrow: str = ""  # where sizes are, a Python expression over them; all are where there is none
    # The same kernel in other block shapes, to choose the fastest from; and then, of each result, which pointer it is
    # and how many elements from there on, a Python expression over the sizes.
    alternatives: tuple[BlockSource, ...] = ()
    results: tuple[tuple[int, str], ...] = ()
    sites: Sites = ()
    bounded: bool = False  # what is launched checks its accesses
    origins: tuple[str, ...] = ()  # the operators that it computes, then
    usual: int = 0  # bits: the sizes that were divisible by 16 when the graph was captured
    words: int = 0  # bits: the sizes that are just numbers, whose values say nothing of shapes and addresses
    cleared: bool = True  # the workspace is zero when the first part begins
    signals: bool = False  # programs tell each other of what they wrote
    binary: bytes | None = None
    title: str = ""


@dataclass(frozen=True)
class Range:
    """One launch of an OpenCL kernel: the function, how many work-items, how many of them in a group."""

    function: str
    items: str  # a Python expression over the sizes n0, n1, ... and `units`, the cores of the device
    group: int = 1


@dataclass(frozen=True)
class RangeSource:
    """One kernel in OpenCL C: functions that are launched one after the other,

        __kernel void KERNEL_NAME_0(__global float* p0, long o0, ..., long n0, ..., __global int* faults, long at)

    all with the same arguments: for each pointer a buffer and an offset in elements; run-time sizes; a table of faults
    and which record of it is this launch's (`fl_report`). KERNEL_NAME is as in `KernelSource`.
    """

    name: str
    text: str
    itemsizes: tuple[int, ...]  # of the pointers' elements
    written: tuple[bool, ...]  # whether the kernel writes there
    reach: tuple[int, ...]  # bytes that it can touch from there on; 0: not known before the run
    sizes: int
    ranges: tuple[Range, ...]
    checks: bool = False  # whether it can report anything
    headers: tuple[str, ...] = ("opencl.h",)
    sites: Sites = ()
    bounded: bool = False
    origins: tuple[str, ...] = ()  # the operators that it computes
    collides: bool = False  # whether several work-items may set one element, in no fixed order
    binary: bytes | None = None
    title: str = ""


_LONGEST = 40  # characters of operators' names in a kernel's
AnySource = KernelSource | BlockSource | RangeSource


def called(kernel: AnyKernel, source: AnySource) -> AnySource:
    """The source with a name for its functions that says what they compute: flambeau_layer_norm_gelu_3f2a91c0. It
    follows from operators and text alone, so that kernels that are equal stay one."""
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


_NUMBER = re.compile(r"(_default|_Tensor|_Scalar|_\d+)+$")  # of a node's name


def items_function(source: RangeSource) -> Callable[..., tuple[int, ...]]:
    """Of the cores and the sizes: the work-items of each launch."""
    names = ", ".join(["units", *(f"n{k}" for k in range(source.sizes))])
    scope: dict[str, Any] = {}
    exec(f"def items({names}): return ({''.join(r.items + ', ' for r in source.ranges)})", scope)
    items: Callable[..., tuple[int, ...]] = scope["items"]
    return items


def site_table(kernel: Kernel | AttentionKernel) -> Sites:
    """What a kernel reports, with the sizes as the host can find them."""
    from flambeau.ir.program import sites_of  # with torch, which compilers of texts do without

    names = {s: f"n{k}" for k, s in enumerate(kernel.sizes)}
    return tuple((code, host_text(b.size, names)) for b, code in sites_of(kernel).items()
                 if b.size.symbols() <= set(kernel.sizes) and not any(isinstance(a, Dyn) for a in b.size.atoms()))


def host_text(i: Index, names: Mapping[Sym, str] | None = None) -> str:
    """An index over run-time sizes as Python computes it; sizes go by these names, or their own."""
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

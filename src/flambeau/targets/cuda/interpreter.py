"""Runs Triton kernels without a GPU: Triton's interpreter executes them on the CPU, in numpy.

For tests of code generation for GPUs: kernels have the same text, and are written for the same capabilities. Triton
decides when it is imported whether it compiles or interprets: TRITON_INTERPRET=1 must be set before that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flambeau.codegen.source import FLAGS, HOSTED, LIBRARY, UNHOSTED, BlockSource
from flambeau.codegen.triton.dialect import pointed
from flambeau.errors import BoundsError, CompileError, UnsupportedError
from flambeau.ir.program import TableKernel

from ..base import Build, Launch, Plan, Source, Step
from ..launch import PythonPlan
from ..search import OpenPlan, is_open, offered
from .target import BlockTarget, shape_function
from .triton_compile import Facts, described, signature
from .triton_worker import module_of

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel


UNITS = 2  # processors of the interpreted machine


class InterpreterTarget(BlockTarget):
    name = "interpreter"

    def capabilities(self) -> Capabilities:
        from flambeau.codegen.c.dialect import INEXACT
        from flambeau.codegen.triton.dialect import CAPABILITIES

        assert CAPABILITIES.scatters is not None
        # numpy has no bfloat16
        joins = frozenset((mode, d) for mode, d in CAPABILITIES.scatters if d is not torch.bfloat16)
        return replace(CAPABILITIES, name=self.name, inexact=INEXACT, scatters=joins)  # compared with eager's for CPUs

    def bounded(self, kernel: AnyKernel, name: str) -> BlockSource:
        source = self.render(kernel, name)
        return source if isinstance(kernel, TableKernel) else replace(source, bounded=True, origins=kernel.origins)

    def build(self, sources: Sequence[Source]) -> Build:
        interpreted_triton()
        texts = {source.name: source for source in sources if isinstance(source, BlockSource)}

        def made(name: str) -> Launch | CompileError:
            try:
                return offered(texts[name], InterpreterLaunch(texts[name]))
            except SyntaxError as error:
                return CompileError(f"the kernel {name} does not parse: {error}", target=self.name)

        return Build(dict.fromkeys(texts, ()), made)

    def plan(self, steps: Sequence[Step]) -> Plan:
        return OpenPlan(self, steps) if is_open(steps) else PythonPlan(steps)

    # ---- the search for block shapes, for its tests ------------------------------------------------------

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        shared = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(shared, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)


class InterpreterLaunch:
    def __init__(self, source: BlockSource) -> None:
        self.name = source.name
        self._source = source
        self._shape: Callable[..., tuple[int, ...]] = shape_function(source, UNITS)
        _module(source.text.replace(HOSTED, UNHOSTED))

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int:
        count = len(self._source.sizes)
        sizes, extents = sizes[:count], sizes[count:]
        work, wide, *grids = self._shape(*sizes)
        kinds = signature(self._source, bool(wide)).values()
        memory, bad = ctypes.create_string_buffer(max(work, 1)), ctypes.c_int64(0)
        if not self._source.cleared:  # makes reads of uninitialized memory visible
            ctypes.memset(memory, 0xFF, max(work, 1))
        space = [ctypes.addressof(memory)] if self._source.workspace else []
        flags = (ctypes.c_int32 * FLAGS)()
        space += [ctypes.addressof(flags)] if self._source.signals else []
        values = [*pointers, *sizes, *space, ctypes.addressof(bad)]
        name = f"{', '.join(self._source.origins)} ({self.name})"
        given = [(name, "the workspace", ctypes.addressof(memory), ctypes.sizeof(memory)),
                 (name, "the flags", ctypes.addressof(flags), ctypes.sizeof(flags)),
                 (name, "the fault", ctypes.addressof(bad), 8)]
        for k, (p, kind) in enumerate(zip(pointers, self._source.pointers, strict=True)):
            if extents:
                width = pointed(kind).itemsize
                given.append((name, f"its pointer {k}", p + extents[2 * k] * width,
                              (extents[2 * k + 1] - extents[2 * k]) * width))
        # Infinities and NaN are ordinary values.
        with np.errstate(all="ignore"), memory_is(given if self._source.bounded else None):
            facts = Facts(all(p % 16 == 0 for p in pointers), sum(1 << k for k, n in enumerate(sizes) if n % 16 == 0))
            module = _module(self._source.text.replace(HOSTED, UNHOSTED))
            for k, part in enumerate(self._source.parts):
                arguments = [argument(v, kind) for v, kind in zip(values, kinds, strict=True)]
                arguments += described(part, facts).values()
                try:
                    getattr(module, part.function)[tuple(grids[3 * k : 3 * k + 3])](*arguments)
                except Exception as error:
                    if isinstance(error.__cause__, BoundsError):
                        raise error.__cause__ from None
                    raise
        if any(flags):
            raise RuntimeError(f"the kernel {self.name} left flags behind")
        return bad.value

    def __repr__(self) -> str:
        return f"<Launch {self.name}>"


# ---- accesses that are checked ---------------------------------------------------------------------------

# A range of memory that a launch may access: the kernel, the role of the memory, its first byte and its size.
Region = tuple[str, str, int, int]
WIDE = 16  # bytes of the last access to a row, which may reach beyond its end
_regions: list[Region] | None = None


@contextmanager
def memory_is(regions: list[Region] | None) -> Iterator[None]:
    """Makes accesses of any other memory an error within this block. None: accesses are not checked."""
    global _regions
    before, _regions = _regions, regions
    try:
        yield
    finally:
        _regions = before


def check_accesses(addresses: Any, mask: Any) -> None:
    if _regions is None:
        return
    at = np.unique(np.broadcast_to(addresses.data, mask.data.shape)[mask.data.astype(bool)].astype(np.int64))
    inside = np.zeros(at.shape, bool)
    for _, _, first, count in _regions:
        inside |= (at >= first) & (at < (-(-(first + count) // WIDE) * WIDE if count else first))
    if not inside.all():
        wrong = int(at[~inside][0])
        kernel, what, first, count = min(_regions, key=lambda r: abs(wrong - r[2]))
        raise BoundsError(f"the kernel of {kernel} accessed byte {wrong - first} of {what}, which has {count}",
                          target=InterpreterTarget.name)


def argument(value: int, kind: str) -> Any:
    """Returns a number in the interpreter's own form, with exactly this type: it follows any address."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    dtype = tl.str_to_ty(kind, None)
    numpy = np.uint64 if dtype.is_ptr() else {"i32": np.int32, "i64": np.int64}[kind]
    return tl.tensor(TensorHandle(np.array([value], dtype=numpy), dtype), dtype)


def from_bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(numbers: Any) -> Any:
    """Returns the bits of the nearest bfloat16, ties to even."""
    single = np.asarray(numbers, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def eight_bits(dtype: torch.dtype) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns conversions from the bits of an 8-bit float to float32, and back; values beyond the range become the
    largest number."""
    most = torch.finfo(dtype).max

    def wide(bits: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(bits)).view(dtype).float().numpy()

    def rounded(numbers: Any) -> Any:
        single = torch.from_numpy(np.array(numbers, dtype=np.float32))
        return single.clamp(-most, most).to(dtype).view(torch.uint8).numpy()

    return wide, rounded


@cache
def _module(text: str) -> ModuleType:
    return module_of(text, f"interpreted{abs(hash(text))}")


@cache
def interpreted_triton() -> None:
    """Imports Triton so that it interprets, and puts the device library where kernels find it."""
    if find_spec("triton") is None:
        raise CompileError("Triton is not installed", target=InterpreterTarget.name, hint="pip install triton")
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if not triton.knobs.runtime.interpret:
        raise UnsupportedError(
            "Triton was imported to compile, not to interpret", target=InterpreterTarget.name,
            hint="set TRITON_INTERPRET=1 before anything imports triton (torch._inductor and torch.compile do)")
    if str(LIBRARY) not in sys.path:
        sys.path.append(str(LIBRARY))
    from triton.runtime import interpreter

    def create_splat(self: Any, kind: Any, scalar: Any) -> Any:
        # As the interpreter's own, but the result of a float comparison, whose handle says float, stays a bool.
        return interpreter.TensorHandle(np.full(kind.shape, scalar.data.reshape(-1)[0]), scalar.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    builder.create_splat = create_splat
    cast, convert, patch = builder.cast_impl, builder.create_fp_to_fp, interpreter._patch_lang_tensor

    tl = triton.language
    small: dict[Any, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
        tl.bfloat16: (np.uint16, from_bfloat16, to_bfloat16),
        tl.float8e4nv: (np.uint8, *eight_bits(torch.float8_e4m3fn)),
        tl.float8e5: (np.uint8, *eight_bits(torch.float8_e5m2))}

    def widened(value: Any) -> Any:
        """Returns a small float as float32. The result of a comparison is left alone, although its handle says float
        too."""
        bits, wide, _ = small.get(value.dtype.scalar, (None, None, None))
        return wide(value.data) if wide is not None and value.data.dtype == bits else value.data

    def cast_impl(self: Any, value: Any, kind: Any) -> Any:
        """Casts to and from small floats by way of float32, as eager does; the interpreter's own converts some of them
        only from and to float32, and truncates."""
        given, wanted = value.dtype.scalar, kind.scalar
        if (given not in small and wanted not in small) or given == wanted:
            return cast(self, value, kind)
        data = widened(value)
        data = small[wanted][2](data) if wanted in small else data.astype(interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(data, wanted)

    def create_fp_to_fp(self: Any, value: Any, kind: Any, rounding: Any) -> Any:
        if value.dtype.scalar in small or kind.scalar in small:
            return cast_impl(self, value, kind)
        return convert(self, value, kind, rounding)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 takes an index from an array of one element by a numpy conversion that newer versions of numpy
        # refuse.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.cast_impl, builder.create_fp_to_fp, interpreter._patch_lang_tensor = cast_impl, create_fp_to_fp, patched
    builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), triton.language.bfloat16)
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        """Multiplies small floats in float32: the interpreter's own multiplies the bits of bfloat16."""
        single = [interpreter.TensorHandle(widened(x), tl.float32) if x.dtype.scalar in small else x for x in (a, b)]
        return dot(self, *single, d, *how)

    builder.create_dot = create_dot
    load, store, change = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def checked_load(self: Any, addresses: Any, mask: Any, *args: Any, **named: Any) -> Any:
        check_accesses(addresses, mask)
        return load(self, addresses, mask, *args, **named)

    def checked_store(self: Any, addresses: Any, value: Any, mask: Any, *args: Any, **named: Any) -> Any:
        check_accesses(addresses, mask)
        return store(self, addresses, value, mask, *args, **named)

    def checked_change(self: Any, op: Any, addresses: Any, value: Any, mask: Any, *args: Any, **named: Any) -> Any:
        check_accesses(addresses, mask)
        return change(self, op, addresses, value, mask, *args, **named)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw = checked_change
    interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = reduced, scanned


# ---- reductions and scans by any function ----------------------------------------------------------------

# As on a GPU: in a logarithmic number of steps, each for a whole block. The interpreter's own take one element after
# the other.


def combined(ops: Any, left: Sequence[Any], right: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """Combines two lists of arrays, with one array for each value that is reduced."""
    made = ops.combine_fn.fn(*map(ops.to_tensor, left, kinds), *map(ops.to_tensor, right, kinds))
    made = made if isinstance(made, tuple) else (made,)
    return [np.broadcast_to(getattr(getattr(m, "handle", None), "data", m), a.shape).astype(a.dtype)
            for m, a in zip(made, left, strict=True)]


def along(axis: int, first: int, step: int = 1) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(first, None, step),)


def reduced(ops: Any, given: Sequence[Any]) -> list[Any]:
    rank = len(given[0].handle.data.shape)
    given, axis = ops.unravel(given, ops.axis)
    arrays, kinds = [t.handle.data for t in given], [t.dtype for t in given]
    while arrays[0].shape[axis] > 1:  # neighbours first, which keeps the order for combines that depend on it
        left, right = ([a[along(axis, k, 2)] for a in arrays] for k in (0, 1))
        arrays = combined(ops, left, right, kinds)
    kept = (1,) * rank if ops.axis is None else arrays[0].shape
    shape = kept if ops.keep_dims else arrays[0].shape[:axis] + arrays[0].shape[axis + 1:]
    return [ops.to_tensor(a.reshape(shape), kind) for a, kind in zip(arrays, kinds, strict=True)]


def scanned(ops: Any, given: Sequence[Any]) -> list[Any]:
    arrays, kinds = [np.array(t.handle.data) for t in given], [t.dtype for t in given]
    far = 1
    while far < arrays[0].shape[ops.axis]:
        # Blocks have powers of two: elements before the beginning are computed and ignored.
        later = along(ops.axis, far)
        for a, made in zip(arrays, combined(ops, [np.roll(a, far, ops.axis) for a in arrays], arrays, kinds),
                           strict=True):
            a[later] = made[later]
        far *= 2
    return [ops.to_tensor(a, kind) for a, kind in zip(arrays, kinds, strict=True)]

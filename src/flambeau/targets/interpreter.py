"""Triton's kernels without a GPU: its interpreter runs them on the CPU, program by program, in numpy.

For tests of what is written for GPUs: the texts are the same, and so are the capabilities that they are written for.
Triton decides when it is imported whether it compiles or interprets: TRITON_INTERPRET=1 must be set before that.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flambeau.codegen.source import BlockSource
from flambeau.errors import CompileError, UnsupportedError
from flambeau.targets.base import Build, Launch, Plan, Source, Step
from flambeau.targets.cuda import BlockTarget, shape_function
from flambeau.targets.launch import PythonPlan
from flambeau.targets.search import OpenPlan, is_open, offered
from flambeau.targets.triton_compile import LIBRARY, signature
from flambeau.targets.triton_worker import module_of

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities


class InterpreterTarget(BlockTarget):
    name = "interpreter"

    def capabilities(self) -> Capabilities:
        from flambeau.codegen.triton import CAPABILITIES

        return replace(CAPABILITIES, name=self.name)

    def build(self, sources: Sequence[Source]) -> InterpreterBuild:
        interpreted_triton()
        return InterpreterBuild(sources)

    def plan(self, steps: Sequence[Step]) -> Plan:
        return OpenPlan(self, steps) if is_open(steps) else PythonPlan(steps)

    # ---- the search for block shapes, for its tests ------------------------------------------------------

    def chip(self) -> str:
        return self.name

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        shared = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(shared, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)

    def seconds(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class InterpreterBuild(Build):
    """Nothing is compiled; a text that does not parse shows when it is loaded."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def done(self) -> bool:
        return True

    def wait(self) -> dict[str, Launch | CompileError]:
        out: dict[str, Launch | CompileError] = {}
        for source in self._sources:
            assert isinstance(source, BlockSource)
            try:
                out[source.name] = offered(source, InterpreterLaunch(source))
            except SyntaxError as error:
                out[source.name] = CompileError(f"the kernel {source.name} does not parse: {error}",
                                                target=InterpreterTarget.name)
        return out


class InterpreterLaunch:
    def __init__(self, source: BlockSource) -> None:
        self.name = source.name
        self._source = source
        module = _module(source.text)
        self._functions = [getattr(module, part.function) for part in source.parts]
        self._shape: Callable[..., tuple[int, ...]] = shape_function(source)
        self._kinds = list(signature(source).values())

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int:

        work, *grids = self._shape(*sizes)
        memory, bad = ctypes.create_string_buffer(max(work, 1)), ctypes.c_int32(0)
        space = [ctypes.addressof(memory)] if self._source.workspace else []
        values = [*pointers, *sizes, *space, ctypes.addressof(bad)]
        with np.errstate(all="ignore"):  # infinities and NaN are numbers
            for k, function in enumerate(self._functions):
                arguments = [argument(v, kind) for v, kind in zip(values, self._kinds, strict=True)]
                function[tuple(grids[3 * k : 3 * k + 3])](*arguments)
        return bad.value

    def __repr__(self) -> str:
        return f"<Launch {self.name}>"


def argument(value: int, kind: str) -> Any:
    """A number as the interpreter has it inside, with exactly this type: it follows addresses wherever they lead."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    dtype = tl.str_to_ty(kind, None)
    numpy = np.uint64 if dtype.is_ptr() else {"i32": np.int32, "i64": np.int64}[kind]
    return tl.tensor(TensorHandle(np.array([value], dtype=numpy), dtype), dtype)


@cache
def _module(text: str) -> ModuleType:
    return module_of(text, f"interpreted{abs(hash(text))}")


@cache
def interpreted_triton() -> None:
    """Triton imported so that it interprets, and the device library where texts find it."""
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
        # As the interpreter's own, but a comparison of floats, whose handle says float, stays a bool.
        return interpreter.TensorHandle(np.full(kind.shape, scalar.data.reshape(-1)[0]), scalar.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat

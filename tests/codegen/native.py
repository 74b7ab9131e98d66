"""C++ kernels built against the codegen headers and called with numpy arrays."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flambeau.codegen.source import LIBRARY

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fPIC",
)
C_TYPES = {"f32": "float", "f64": "double"}


class Native:
    """A library of elementwise kernels, one to a line, and the names of those that became vector loops."""

    def __init__(self, folder: Path, kernels: Iterable[str], header: str, *arch: str) -> None:
        lines = [f'#include "{header}"', *kernels, ""]
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text("\n".join(lines))
        command = [
            "g++",
            *FLAGS,
            *arch,
            "-shared",
            f"-I{LIBRARY}",
            str(source),
            "-o",
            str(library),
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fopt-info-vec-optimized",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        marks = re.findall(r"kernels\.cpp:(\d+):\d+: optimized: loop vectorized", done.stderr)
        self.vectorised = {lines[int(k) - 1].split("(")[0].split()[-1] for k in marks}
        self.library = ctypes.CDLL(str(library))

    def __call__(self, name: str, *inputs: np.ndarray, out: type | None = None) -> np.ndarray:
        arrays = [np.ascontiguousarray(x) for x in inputs]
        result = np.empty(arrays[0].shape, out or arrays[0].dtype)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (*arrays, result)]
        getattr(self.library, name)(ctypes.c_int64(result.size), *pointers)
        return result


def kernel(name: str, arguments: Iterable[str], result: str, body: str) -> str:
    """One line of C++: out[i] = body, where a, b and c are the inputs at i."""
    inputs = list(zip("abc", arguments, strict=False))
    parameters = "".join(f"const {kind}* __restrict__ p{x}, " for x, kind in inputs)
    loads = "".join(f"const {kind} {x} = p{x}[i]; " for x, kind in inputs)
    loop = f"for (int64_t i = 0; i < n; ++i) {{ {loads}out[i] = {body}; }}"
    head = f'extern "C" void {name}(int64_t n, {parameters}{result}* __restrict__ out)'
    return f'{head} {{ _Pragma("omp simd") {loop} }}'


def float_kernels(functions: Iterable[str], arity: int) -> list[str]:
    """`f32_name` and `f64_name` for each function."""
    call = ", ".join("abc"[:arity])
    return [
        kernel(f"{short}_{f}", [kind] * arity, kind, f"fl::{f}({call})")
        for f in functions
        for short, kind in C_TYPES.items()
    ]


def special_values(dtype: type) -> np.ndarray:
    """Zero, the ends of the range, infinity and NaN, the places where exp overflows, and round numbers."""
    limits = np.finfo(dtype)
    ends = np.array([0, limits.smallest_subnormal, limits.tiny, limits.max, np.inf], dtype)
    inside = np.array([0.5, 1, 1.5, 2, 3, 10, 88.72, 88.73, 104, 709.78], dtype)
    positive = np.concatenate([ends, inside])
    return np.concatenate([positive, -positive, np.array([np.nan], dtype)])

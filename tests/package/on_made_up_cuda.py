"""A process in which packages for NVIDIA GPUs run on a fake driver: Triton's interpreter executes its launches. Called
with the driver's library, a folder and names of cases of flambeau.bench.package_bits."""

from __future__ import annotations

import ctypes
import sys
import traceback

import numpy as np
import torch

import flambeau
from flambeau.bench.package_bits import cases, leaves, same_bits
from flambeau.codegen.source import HOSTED, UNHOSTED
from flambeau.package.client import PackageError
from flambeau.package.device_code import CudaCode
from flambeau.targets.cuda.interpreter import _module, argument, interpreted_triton
from flambeau.targets.cuda.triton_compile import Facts, described, signature

TOLD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, *(ctypes.c_uint,) * 5, ctypes.POINTER(ctypes.c_void_p))
FUNCTIONS: list[tuple] = []  # of the loaded package


@TOLD
def launch(function: int, x: int, y: int, z: int, threads: int, shared: int, arguments) -> int:
    try:
        source, part, facts = FUNCTIONS[function]
        kinds = [*signature(source, facts.wide).values()]
        values = [ctypes.cast(arguments[k], ctypes.POINTER(ctypes.c_int64))[0] for k in range(len(kinds) + 2)]
        values = [v if kind != "i32" else int(np.int32(v & 0xFFFFFFFF)) for v, kind in zip(values, kinds)]
        assert all(v % 16 == 0 for v, kind in zip(values, kinds[:-1]) if kind.startswith("*") and v)
        assert threads == 32 * source.parts[part].warps and shared >= 0
        name = source.parts[part].function
        with np.errstate(all="ignore"):
            getattr(_module(source.text.replace(HOSTED, UNHOSTED)), name)[(x, y, z)](
                *(argument(v, kind) for v, kind in zip(values, kinds)),
                *described(source.parts[part], facts).values())  # interpreted kernels make their own tensor maps
    except BaseException:
        traceback.print_exc()
        return 700
    return 0


def recorded(self: CudaCode, source, part: int, facts: Facts) -> int:
    found = function(self, source, part, facts)
    if found == len(FUNCTIONS):
        FUNCTIONS.append((source, part, facts))
    return found


function, CudaCode.function = CudaCode.function, recorded


def main(driver: str, folder: str, *names: str) -> None:
    interpreted_triton()
    library = ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
    library.driver_tells(launch)
    functions = ctypes.c_ssize_t.in_dll(library, "functions")
    for name in names:
        case, path = cases("tiny")[name](), f"{folder}/{name}.flam"
        FUNCTIONS.clear()
        functions.value = 0
        flambeau.export(case.model, case.draws[0], path, dynamic_shapes=case.shapes, targets=["cuda:sm_90", "cpu"])
        compiled = torch.compile(case.model, backend="flambeau",
                                 options={"target": "interpreter", "contractions": "own"})
        with flambeau.load(path, "cuda") as module, torch.no_grad():
            assert module.device == "cuda"
            for n, given in enumerate(case.draws[:2]):
                for x, dims in zip(given, case.shapes):
                    torch._dynamo.maybe_mark_dynamic(x, list(dims))
                ours, expected = module.forward(*given), compiled(*given)
                same = [same_bits(a, b) for a, b in zip(leaves(ours), leaves(expected), strict=True)]
                print(f"{name}:", n, *same, flush=True)
            if name == "family of bags":
                try:
                    module.forward(torch.full((20,), 64), torch.arange(0, 20, 4))
                except PackageError as error:
                    print(error, flush=True)
    library.driver_is(80)
    try:
        flambeau.load(path, "cuda")
    except PackageError as error:
        print(error, flush=True)
    print(flambeau.load(path).device)  # the file contains the CPU target as well


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A worker process that compiles Triton kernels: reads requests as lines of JSON, and returns machine code.

It is run by path, with three arguments (the device library's folder, one for temporary files, and the seconds that a
request may take), and imports neither torch nor Flambeau: Triton alone starts in a third of the time, and no process
that compiles holds a GPU.
"""

from __future__ import annotations

import base64
import json
import linecache
import os
import re
import signal
import sys
import traceback
from types import ModuleType
from typing import Any, TextIO

MODULES: dict[str, ModuleType] = {}


def module_of(text: str, name: str) -> ModuleType:
    """Returns a text as a module. Triton asks for the source of its functions, and finds it through `linecache`."""
    path = f"<{name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__file__ = path
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the machine code of one function of a text, with the facts that a launch needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = request["text"]
    if text not in MODULES:
        MODULES[text] = module_of(text, f"kernel{len(MODULES)}")
    attributes = {(place,): [["tt.divisibility", 16]] for place in request["divisible"]}
    places = {name: k for k, name in enumerate(request["signature"])}
    constants = {(places[name],): value for name, value in request["constants"].items()}
    source = ASTSource(getattr(MODULES[text], request["function"]), request["signature"], constants, attributes)
    options = request["options"] | ({"extern_libs": {"libdevice": request["library"]}} if request["library"] else {})
    kernel = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=options)
    found = kernel.metadata
    return {
        "name": found.name, "warps": found.num_warps, "shared": found.shared, "scratch": found.global_scratch_size,
        "code": base64.b64encode(kernel.asm["cubin"]).decode(), "maps": [dict(m) for m in found.tensordesc_meta],
    }


# Two sums of 16-bit integers in one instruction, which LLVM makes of index arithmetic with small bounds.
PACKED_SUM = re.compile(r"\tadd\.[su]16x2 \t(\S+), (\S+), (\S+);")
SINGLE_SUMS = r"""\t{
\t.reg .b16 %sum<4>;
\tmov.b32 {%sum0, %sum1}, \2;
\tmov.b32 {%sum2, %sum3}, \3;
\tadd.s16 %sum0, %sum0, %sum2;
\tadd.s16 %sum1, %sum1, %sum3;
\tmov.b32 \1, {%sum0, %sum1};
\t}"""


def repaired(ptx: str) -> str:
    """Replaces instructions that give other numbers than eager's kernels have.

    Square roots are rounded as in nvcc's code. Packed sums are computed one by one: where a pair is added to two
    constants, and one of the sums is read, ptxas (12.8 to 13.0) adds 0 instead."""
    return PACKED_SUM.sub(SINGLE_SUMS, ptx.replace("\tsqrt.approx.f32", "\tsqrt.rn.f32"))


def correct_compiler() -> None:
    """Makes device functions round as nvcc does (the library asks for the rounding mode, and Triton's answer is less
    precise), and repairs what Triton writes."""
    from triton._C.libtriton import nvidia
    from triton.backends.nvidia.compiler import CUDABackend, CUDAOptions

    if "enable_reflect_ftz" not in CUDAOptions.__dataclass_fields__:  # before 3.7, denormals always became zero
        nvidia.set_nvvm_reflect_ftz = lambda module: None
    make_ptx = CUDABackend.make_ptx

    CUDABackend.make_ptx = lambda self, *args: repaired(make_ptx(self, *args))


def serve(requests: TextIO, answers: TextIO, seconds: int) -> None:
    """Answers requests until the other side closes the pipe."""
    for line in requests:
        # The parent process does not wait longer, and may be gone. There is no handler, because none runs while native
        # code compiles.
        signal.alarm(seconds + 1)
        try:
            answer = compiled(json.loads(line))
        except Exception:  # of any kind: the text is at fault, and the parent process raises it
            answer = {"error": traceback.format_exc()}
        signal.alarm(0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    # Do not import from the script's own folder: its files have the names of other modules.
    sys.path[0] = sys.argv[1]
    # Output of compilers must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Triton's own cache would store every kernel a second time, in all of its stages.
    folder, seconds = sys.argv[2:]
    os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_STORE_BINARY_ONLY": "1", "TRITON_DISABLE_LINE_INFO": "1",
                   "TMPDIR": folder}
    import tritonlib  # noqa: F401  # before a request has to wait for it

    correct_compiler()
    serve(sys.stdin, answers, int(seconds))


if __name__ == "__main__":
    main()

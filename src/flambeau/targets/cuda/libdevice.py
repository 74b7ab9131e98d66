"""Finds NVIDIA's device library: that of torch's CUDA version if it is installed, or Triton's.

Functions change between its versions. Those in `CHANGED` have other last bits in Triton's copy than in CUDA 13's, so
that a kernel which calls them has eager's bits only with the toolkit's library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FILE = Path("nvvm/libdevice/libdevice.10.bc")
CHANGED = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "erf", "erfinv", "sinh", "tanh"))
# Inexact with any library: nvcc contracts within `pow`, and eager computes the others by formulas of its own.
NEVER = frozenset(("pow", "i0", "i1", "ndtri", "erfcx", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"))


@cache
def toolkit_library() -> Path | None:
    """Returns the toolkit's library, if there is one of torch's CUDA version."""
    wanted = torch_cuda()
    found = (folder / FILE for folder in toolkits(wanted) if wanted and version_of(folder) == wanted)
    return next((path for path in found if path.is_file()), None)


def inexact() -> frozenset[str]:
    """Functions whose last bits differ from those of eager's kernels."""
    return NEVER if toolkit_library() is not None else NEVER | CHANGED


def torch_cuda() -> str:
    """Returns the version of CUDA that torch was built with, such as 13.0; empty if it was built without. Read from
    torch's file: importing torch takes longer than loading a kernel."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin is not None else None
    found = re.search(r"^cuda\b.*= *['\"]([\d.]+)", file.read_text(), re.MULTILINE) if file is not None else None
    return found[1] if found else ""


def toolkits(version: str) -> Iterator[Path]:
    """Yields the folders where a toolkit may be: those that the environment names, the usual places, and packages next
    to torch."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    yield from (Path(f"/usr/local/cuda-{version}"), Path("/usr/local/cuda"))
    for place in dict.fromkeys(sys.path):
        yield from sorted(Path(place or ".").glob("nvidia/cu*"))


def version_of(toolkit: Path) -> str | None:
    """Returns a toolkit's version, such as 13.0, from the header that every toolkit has."""
    header = toolkit / "include" / "cuda.h"
    if not header.is_file():
        return None
    found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else None

"""The functions of NVIDIA's libdevice that tritonlib.py uses, for Triton's interpreter, computed by torch.

Each function takes a kernel's values (blocks, scalars, numbers) and returns a block of the same kind.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

special = torch.special

UNARY: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp",
        "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan",
        "tanh", "trunc")},
    "cyl_bessel_i0": special.i0, "cyl_bessel_i1": special.i1, "erfcx": special.erfcx, "fast_log2f": torch.log2,
    "j0": special.bessel_j0, "j1": special.bessel_j1, "normcdfinv": special.ndtri, "rint": torch.round,
    "y0": special.bessel_y0, "y1": special.bessel_y1,
}
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name) for name in ("atan2", "copysign", "fmod", "hypot", "nextafter", "pow")}


def _made(compute: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Makes a function of the interpreter's tensors from one of torch's."""

    def function(*args: Any, _semantic: Any = None) -> Any:
        blocks = [interpreter_semantic.to_tensor(a, check_type=False) for a in args]
        arrays = np.broadcast_arrays(*(b.handle.data for b in blocks))
        out = compute(*(torch.from_numpy(np.array(a)) for a in arrays)).numpy()
        dtype = blocks[0].dtype
        widest = max((b.type for b in blocks), key=lambda t: len(t.shape) if t.is_block() else 0)
        shape = list(widest.shape) if widest.is_block() else None
        return tl.tensor(TensorHandle(out, dtype), tl.block_type(dtype, list(out.shape)) if shape else dtype)

    return function


globals().update({name: _made(f) for table in (UNARY, BINARY) for name, f in table.items()})
fma = _made(lambda x, y, z: (x.double() * y.double() + z.double()).to(x.dtype))

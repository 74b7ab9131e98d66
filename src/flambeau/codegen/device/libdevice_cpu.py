"""NVIDIA's libdevice for Triton's interpreter, which has none: the same names, computed by torch on the CPU.

Each function takes what a kernel has there (blocks, scalars, numbers) and returns a block of the same kind.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

special = torch.special

UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs, "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "asinh": torch.asinh,
    "atan": torch.atan, "atanh": torch.atanh, "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh,
    "cospi": lambda x: torch.cos(torch.pi * x), "cbrt": lambda x: x.sign() * x.abs().pow(1 / 3),
    "cyl_bessel_i0": special.i0, "cyl_bessel_i1": special.i1, "erf": torch.erf, "erfc": torch.erfc,
    "erfcinv": lambda x: torch.erfinv(1 - x), "erfcx": special.erfcx, "erfinv": torch.erfinv, "exp": torch.exp,
    "exp10": lambda x: torch.pow(10.0, x), "exp2": torch.exp2, "expm1": torch.expm1, "floor": torch.floor,
    "j0": special.bessel_j0, "j1": special.bessel_j1, "lgamma": torch.lgamma, "log": torch.log,
    "log10": torch.log10, "log1p": torch.log1p, "log2": torch.log2, "fast_log2f": torch.log2, "nearbyint": torch.round,
    "normcdf": special.ndtr, "normcdfinv": special.ndtri, "rint": torch.round,
    "round": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)), "rsqrt": torch.rsqrt,
    "rcbrt": lambda x: x.sign() * x.abs().pow(-1 / 3), "sin": torch.sin, "sinh": torch.sinh,
    "sinpi": lambda x: torch.sin(torch.pi * x), "sqrt": torch.sqrt, "tan": torch.tan, "tanh": torch.tanh,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)), "trunc": torch.trunc, "y0": special.bessel_y0,
    "y1": special.bessel_y1, "sqrt_rn": torch.sqrt, "rsqrt_rn": torch.rsqrt, "rcp_rn": torch.reciprocal,
}
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add_rn": torch.add, "atan2": torch.atan2, "copysign": torch.copysign, "div_rn": torch.div,
    "fdim": lambda x, y: torch.where(x > y, x - y, torch.zeros_like(x)), "fmod": torch.fmod, "hypot": torch.hypot,
    "mul_rn": torch.mul, "nextafter": torch.nextafter, "pow": torch.pow, "sub_rn": torch.sub,
    "remainder": lambda x, y: x - y * torch.round(x / y),
}
TESTS: dict[str, Callable[..., torch.Tensor]] = {
    "isinf": torch.isinf, "isnan": torch.isnan, "finitef": torch.isfinite, "isfinited": torch.isfinite,
    "signbit": torch.signbit,
}


def _made(compute: Callable[..., torch.Tensor], kind: Any = None) -> Callable[..., Any]:
    """A function of the interpreter's tensors; `kind` is the result's type where it is not that of the arguments."""

    def function(*args: Any, _semantic: Any = None) -> Any:
        blocks = [interpreter_semantic.to_tensor(a, check_type=False) for a in args]
        arrays = np.broadcast_arrays(*(b.handle.data for b in blocks))
        out = compute(*(torch.from_numpy(np.array(a)) for a in arrays)).numpy()
        dtype = kind or blocks[0].dtype
        widest = max((b.type for b in blocks), key=lambda t: len(t.shape) if t.is_block() else 0)
        shape = list(widest.shape) if widest.is_block() else None
        return tl.tensor(TensorHandle(out, dtype), tl.block_type(dtype, list(out.shape)) if shape else dtype)

    return function


globals().update({name: _made(f) for table in (UNARY, BINARY) for name, f in table.items()})
globals().update({name: _made(f, tl.int1) for name, f in TESTS.items()})
fma = fma_rn = _made(lambda x, y, z: (x.double() * y.double() + z.double()).to(x.dtype))

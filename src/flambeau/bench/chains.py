"""Random chains of pointwise operators, compared with eager after fusion.

    names, run = chain(7)
    results = run(*inputs_of(7, torch.bfloat16, "cuda", 4099))
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs, "neg": torch.neg, "relu": torch.relu, "exp": lambda x: torch.exp(-x.abs()), "sin": torch.sin,
    "cos": torch.cos, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu, "erf": torch.erf,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "log1p": lambda x: torch.log1p(x.abs()), "mish": F.mish,
    "softplus": F.softplus, "logsigmoid": F.logsigmoid, "elu": F.elu, "selu": F.selu, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "leaky relu": F.leaky_relu, "atan": torch.atan, "square": torch.square,
    "sqrt": lambda x: torch.sqrt(x.abs()), "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.5), "round": torch.round,
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 0.7), "times": lambda x: x * 0.7, "over": lambda x: x / 3,
    "plus": lambda x: x + 0.3, "minus from": lambda x: 1 - x, "cube": lambda x: x.clamp(-8, 8) ** 3,
    "clamp": lambda x: x.clamp(-1.5, 2.5), "inverse square": lambda x: (x.abs() + 0.5) ** -2, "floor": torch.floor,
    "through bfloat16": lambda x: x.to(torch.bfloat16).to(x.dtype), "through float": lambda x: (x.float() * 1.1).to(x),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": lambda a, b: a / (b.abs() + 0.5),
    "add multiple": lambda a, b: torch.add(a, b, alpha=0.3), "sub multiple": lambda a, b: torch.sub(a, b, alpha=1.7),
    "maximum": torch.maximum, "minimum": torch.minimum, "lerp": lambda a, b: torch.lerp(a, b, 0.1),
    "far lerp": lambda a, b: torch.lerp(a, b, 0.8), "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "addcmul": lambda a, b: torch.addcmul(a, a, b), "addcmul multiple": lambda a, b: torch.addcmul(a, b, b, value=0.3),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a.abs() + 1, value=0.3), "copysign": torch.copysign,
    "tanh slope": lambda a, b: torch.ops.aten.tanh_backward(a, b), "atan2": torch.atan2,
    "sigmoid slope": lambda a, b: torch.ops.aten.sigmoid_backward(a, b),
    "silu slope": lambda a, b: torch.ops.aten.silu_backward(a, b),
    "gelu slope": lambda a, b: torch.ops.aten.gelu_backward(a, b),
}
TOO_LARGE = 1e4  # values are clamped, because infinities would hide differences


def chain(seed: int, longest: int = 12) -> tuple[str, Callable[..., list[Tensor]]]:
    """Returns the names of up to `longest` operators in a row, and a function that runs them, each on some values
    before it."""
    draw = random.Random(seed)
    steps: list[tuple[Any, ...]] = []
    for k in range(draw.randint(2, longest)):
        # Mostly the last value, so that it is a chain and not a bush.
        places = [2 + k if draw.random() < 0.8 else draw.randrange(3 + k) for _ in range(2)]
        table = BINARY if draw.random() < 0.4 else UNARY
        steps.append((draw.choice(list(table)), *places))
    kept = draw.randrange(len(steps))

    def run(*inputs: Tensor) -> list[Tensor]:
        values = list(inputs)
        for name, a, b in steps:
            made = UNARY[name](values[a]) if name in UNARY else BINARY[name](values[a], values[b])
            values.append(made.clamp(-TOO_LARGE, TOO_LARGE))
        return [values[3 + kept], values[-1]]

    return ", ".join(name for name, _, _ in steps), run


def inputs_of(seed: int, dtype: torch.dtype, device: str, size: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=g) * scale).to(device, dtype) for scale in (1, 3, 0.3)]

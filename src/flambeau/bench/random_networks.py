"""Random networks: convolutions, matrix products, norms, pooling, reductions, and maps between them.

    module, x = draw(seed, "tiny")      # the same seed, the same network and weights

A network starts from a vector, a sequence of tokens, a line, an image or a volume. Each step is drawn from those that
accept the current shape; a step whose result would have too many values is left out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The most elements of a value, and the ranges of sizes: batch, channels (or features), and a side by the number of
# sides.
SIZES: dict[str, tuple[int, tuple[int, int], tuple[int, int], dict[int, tuple[int, int]]]] = {
    "large": (1 << 22, (1, 32), (3, 96), {0: (1, 1), 1: (16, 512), 2: (8, 64), 3: (6, 24)}),
    "tiny": (1 << 12, (1, 3), (3, 8), {0: (1, 1), 1: (6, 12), 2: (5, 9), 3: (4, 6)}),
}
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "mish": F.mish, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "hardswish": F.hardswish, "softplus": F.softplus,
    "hardtanh": F.hardtanh, "leaky relu": lambda x: F.leaky_relu(x, 0.2), "elu": F.elu, "selu": F.selu,
    "clamp": lambda x: x.clamp(-0.5, 1.5), "times": lambda x: x * 1.7, "over": lambda x: x / 2.3,
    "minus": lambda x: x - 0.4, "from": lambda x: 1.0 - x, "square": lambda x: x.clamp(-4, 4) ** 2,
    "at most": lambda x: torch.clamp(x, max=0.8), "gate": lambda x: x * torch.sigmoid(x),
    "dropout": lambda x: F.dropout(x, 0.2), "exp": lambda x: torch.exp(-x.abs()),
}


def layer(name: str, sides: int) -> Any:
    """Returns torch's class of a layer for so many sides, such as Conv2d."""
    return getattr(nn, f"{name}{max(sides, 1)}d")


@dataclass(frozen=True)
class Reduced:
    """A reduction along one dimension, as a class: reports show a better name than a lambda's."""

    kind: str
    dim: int
    keep: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "max":
            return x.max(self.dim, self.keep).values
        if self.kind == "logsumexp":
            return x.logsumexp(self.dim, self.keep)
        return getattr(x, self.kind)(self.dim, keepdim=self.keep)


class Step(nn.Module):
    """A layer, or a function; with `back`, the input is added to its result."""

    def __init__(self, name: str, act: Callable[[Tensor], Tensor], back: bool = False) -> None:
        super().__init__()
        self.name, self.act, self.back = name, act, back

    def forward(self, x: Tensor) -> Tensor:
        made = self.act(x)
        return x + made if self.back else made


class Scale(nn.Module):
    """A learned number, or one for each channel."""

    def __init__(self, shape: tuple[int, ...], kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(shape)), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "add":
            return x + self.weight
        return x - self.weight if self.kind == "sub" else x * self.weight


class Network(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.title = ", ".join(s.name + (" and back" if s.back else "") for s in steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Drawing:
    """Draws the steps for a shape. Channels are dimension 1; for tokens, features come last."""

    def __init__(self, seed: int, size: str) -> None:
        self.r = random.Random(seed)
        self.most, batch, channels, sides = SIZES[size]
        self.sides = self.r.choice((0, 0, 1, 1, 2, 2, 2, 3, 3, -1))  # -1: tokens
        spatial = [self.r.randint(*sides[abs(self.sides)]) for _ in range(abs(self.sides))]
        self.channels = channels
        features = self.r.choice((self.r.randint(*channels), 4 * max(1, self.r.randint(*channels) // 4)))
        n = self.r.randint(*batch)
        shape = (n, *spatial, features) if self.sides < 0 else (n, features, *spatial)
        self.input = torch.randn(shape)
        self.kinds: list[Callable[[tuple[int, ...]], Step | None]] = [
            self.contraction, self.contraction, self.norm, self.pool, self.map, self.map, self.scale, self.reduction,
            self.softmax]

    def contraction(self, shape: tuple[int, ...]) -> Step | None:
        r, out = self.r, self.r.randint(*self.channels)
        bias = r.random() < 0.8
        if self.sides <= 0 or len(shape) != self.sides + 2:
            return Step(f"linear {out}", nn.Linear(shape[-1], out, bias))
        kernel, stride, dilation = r.choice((1, 2, 3, 3, 5)), r.choice((1, 1, 2)), r.choice((1, 1, 1, 2))
        padding, transposed = r.randint(0, kernel // 2), r.random() < 0.3
        groups = r.choice((1, 1, 1, shape[1]))
        out = out if groups == 1 else groups * r.choice((1, 2))
        kind = layer("ConvTranspose" if transposed else "Conv", self.sides)
        name = f"{kind.__name__} {out} {kernel} {stride} {padding} {dilation} {groups}"
        more: dict[str, Any] = {"output_padding": 1} if transposed and stride > 1 and r.random() < 0.3 else {}
        return Step(name, kind(shape[1], out, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias,
                               **more))

    def norm(self, shape: tuple[int, ...]) -> Step | None:
        r, sides = self.r, len(shape) - 2
        last = [Step("layer norm", nn.LayerNorm(shape[-1])), Step("rms norm", nn.RMSNorm(shape[-1], eps=1e-5))]
        if self.sides < 0 or sides < 0 or sides > 3:
            return r.choice(last)
        groups = r.choice([g for g in (1, 2, 3, 4, 8, shape[1]) if shape[1] % g == 0])
        all_but = nn.LayerNorm(shape[1:])
        options = [*last, Step("batch norm", layer("BatchNorm", sides)(shape[1])), Step("layer norm of all", all_but),
                   Step(f"group norm {groups}", nn.GroupNorm(groups, shape[1]))]
        if sides:
            options.append(Step("instance norm", layer("InstanceNorm", sides)(shape[1], affine=r.random() < 0.5)))
        return r.choice(options)

    def pool(self, shape: tuple[int, ...]) -> Step | None:
        r, sides = self.r, len(shape) - 2
        if self.sides < 0 or not 1 <= sides <= 3:
            return None
        kernel, stride = r.choice((2, 3)), r.choice((1, 2))
        padding = r.randint(0, kernel // 2)
        side = r.randint(1, min(shape[2:]))
        window = [Step(f"{name} pool {kernel} {stride} {padding}", layer(f"{kind}Pool", sides)(kernel, stride, padding))
                  for name, kind in (("max", "Max"), ("mean", "Avg"))]
        return r.choice([*window, *(Step(f"adaptive {name} pool {side}", layer(f"Adaptive{kind}Pool", sides)(side))
                                    for name, kind in (("mean", "Avg"), ("max", "Max")))])

    def map(self, shape: tuple[int, ...]) -> Step | None:
        name = self.r.choice(list(MAPS))
        return Step(name, MAPS[name], back=self.r.random() < 0.2)

    def scale(self, shape: tuple[int, ...]) -> Step | None:
        kind, wide = self.r.choice(("add", "sub", "mul")), self.r.random() < 0.7
        at = len(shape) - 1 if self.sides < 0 else min(1, len(shape) - 1)
        own = tuple(n if k == at and wide else 1 for k, n in enumerate(shape))[1:]
        return Step(f"{kind} {'by channel' if wide else 'a number'}", Scale(own, kind))

    def reduction(self, shape: tuple[int, ...]) -> Step | None:
        kind, dim = self.r.choice(("sum", "mean", "max", "logsumexp", "amin", "var")), self.r.randrange(1, len(shape))
        keep = len(shape) < 3 or self.r.random() < 0.5
        if kind == "var" and shape[dim] < 2:
            return None
        return Step(f"{kind} {dim}{' kept' if keep else ''}", Reduced(kind, dim, keep))

    def softmax(self, shape: tuple[int, ...]) -> Step | None:
        dim = self.r.randrange(1, len(shape))
        if self.r.random() < 0.5:
            return Step(f"softmax {dim}", lambda x: x.softmax(dim))
        return Step(f"log softmax {dim}", lambda x: x.log_softmax(dim))

    def network(self) -> Network:
        steps: list[Step] = []
        shape, wanted = tuple(self.input.shape), self.r.randint(3, 9)
        for _ in range(4 * wanted):
            made = (self.contraction if not steps else self.r.choice(self.kinds))(shape)
            after = None if made is None else self.after(made, shape)
            if made is not None and after is not None:
                steps.append(made)
                shape = after
            if len(steps) == wanted:
                break
        return Network(steps)

    def after(self, step: Step, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the shape that a step makes of a shape; None if it does not accept it, or if the result would be too
        large."""
        try:
            with torch.no_grad():
                made = copy.deepcopy(step).to("meta")(torch.empty(shape, device="meta")).shape
        except (RuntimeError, ValueError):
            return None
        return tuple(made) if 0 < made.numel() <= self.most else None


def draw(seed: int, size: str) -> tuple[Network, Tensor]:
    """Returns a network in training mode with its input, in float32 on the CPU."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        drawing = Drawing(seed, size)
        return drawing.network(), drawing.input

"""Random cases of all families of operators: axes, sizes, layouts, dtypes, forward or gradients.

    case = draw(7, "cpu")                       # the same seed, the same case
    case.function(*case.tensors("cpu"))

Sizes are log-uniform and half of them odd, so that a compiler cannot be tuned to them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.bench.random_networks import MAPS

ELEMENTS = {"cuda": (1 << 18, 1 << 26), "cpu": (1 << 14, 1 << 21), "tiny": (1 << 5, 1 << 9)}  # of the largest input
DTYPES = {"cuda": ("float32", "bfloat16", "float16"), "cpu": ("float32", "bfloat16", "float64"), "tiny": ("float32",)}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """An input. `order`: its dimensions in memory order, the contiguous one last; `gap`: elements between rows."""

    shape: Shape
    dtype: torch.dtype
    order: Shape
    gap: int = 0
    below: int = 0  # the upper limit of indices; 0: normal numbers

    def made(self, device: str) -> Tensor:
        stored = [self.shape[d] for d in self.order]
        wide = [*stored[:-1], stored[-1] + self.gap] if stored else []
        t = torch.randint(self.below, wide, device=device) if self.below else torch.randn(wide, device=device)
        t = t.to(self.dtype)
        if stored:
            t = t[..., : stored[-1]].permute([self.order.index(d) for d in range(len(stored))])
        return t

    def __str__(self) -> str:
        words = [f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"]
        words += [f"in memory order {self.order}"] if list(self.order) != sorted(self.order) else []
        words += [f"{self.gap} between rows"] if self.gap else []
        return " ".join(words)


@dataclass(frozen=True)
class Case:
    """A case. `gradient`: forward and the gradients of all floating inputs; `dynamic`: compiled for any size."""

    seed: int
    family: str
    what: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    gradient: bool
    dynamic: bool

    def __str__(self) -> str:
        modes = [word for word in ("gradient", "dynamic") if getattr(self, word)]
        return f"{self.what}: {', '.join(map(str, self.inputs))}" + "".join(f", {m}" for m in modes)

    def tensors(self, device: str) -> list[Tensor]:
        with torch.random.fork_rng(devices=[torch.device(device)] if device == "cuda" else []):
            torch.manual_seed(self.seed)
            made = [one.made(device) for one in self.inputs]
        for t in made:
            t.requires_grad_(self.gradient and t.is_floating_point())
        return made


class Draw:
    """The source of random choices for the families."""

    def __init__(self, seed: int, size: str) -> None:
        self.r = random.Random(seed)
        self.elements = round(2 ** self.r.uniform(*map(math.log2, ELEMENTS[size])))
        self.dtype = getattr(torch, self.r.choice(DTYPES[size]))

    def pick(self, *options: Any) -> Any:
        return self.r.choice(options)

    def side(self, most: float) -> int:
        """Draws a log-uniform size; one half odd, the other a multiple of eight if it is large enough."""
        n = max(1, round(2 ** self.r.uniform(0, math.log2(max(most, 1.0)))))
        return n | 1 if self.r.random() < 0.5 else n if n < 8 else n // 8 * 8

    def shape(self, rank: int, elements: float | None = None) -> Shape:
        """Draws a shape of about so many elements, distributed over the dimensions at random."""
        left = float(elements or self.elements)
        sizes: list[int] = []
        for k in range(rank, 1, -1):
            sizes.append(self.side(min(left, left ** (2.0 / k))))
            left = max(1.0, left / sizes[-1])
        last = max(1, int(left))
        sizes.append(last | 1 if self.r.random() < 0.5 else max(1, last // 8 * 8))
        self.r.shuffle(sizes)
        return tuple(sizes)

    def image(self, sides: int, channels: int | None = None, kernel: int = 3) -> Shape:
        """Draws (N, C, sides…), each side at least twice the kernel."""
        c = channels or max(1, self.side(512))
        side = max(2 * kernel, round((self.elements / c / self.pick(1, 2, 4, 8, 16)) ** (1 / sides)))
        around = tuple(max(2 * kernel, round(side * self.r.uniform(0.7, 1.4))) for _ in range(sides))
        n = max(1, round(self.elements / c / math.prod(around)))
        return (n, c, *around)

    def laid(self, shape: Shape) -> Input:
        """Draws a layout: in half of the cases in the order of its dimensions, without gaps."""
        rank, order, gap = len(shape), tuple(range(len(shape))), 0
        kind = self.r.random()
        if rank > 2 and kind > 0.75:
            order = (0, *range(2, rank), 1)
        elif rank > 1 and kind > 0.6:
            order = tuple(self.r.sample(order, rank))
        elif rank > 1 and kind > 0.5:
            gap = self.side(64)
        return Input(shape, self.dtype, order, gap)

    def plain(self, *shape: int) -> Input:
        return Input(shape, self.dtype, tuple(range(len(shape))))

    def index(self, below: int, *shape: int) -> Input:
        return Input(shape, torch.int64, tuple(range(len(shape))), below=below)

    def dims(self, rank: int) -> list[int]:
        return sorted(self.r.sample(range(rank), self.r.randint(1, rank)))

    def tail(self, most: int = 4) -> tuple[str, Callable[[Tensor], Tensor]]:
        names = [self.r.choice([n for n in MAPS if n != "dropout"]) for _ in range(self.r.randint(0, most))]

        def run(x: Tensor) -> Tensor:
            for name in names:
                x = MAPS[name](x)
            return x

        return "".join(f", {name}" for name in names), run


Drawn = tuple[str, Callable[..., Any], Sequence[Input]]
FAMILIES: dict[str, Callable[[Draw], Drawn]] = {}


def family(draw: Callable[[Draw], Drawn]) -> Callable[[Draw], Drawn]:
    FAMILIES[draw.__name__] = draw
    return draw


@family
def reduction(d: Draw) -> Drawn:
    shape = d.shape(d.r.randint(1, 5))
    kind = d.pick("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm", "argmax", "argmin", "max", "min",
                  "prod", "all")
    dims, keep = d.dims(len(shape)), d.r.random() < 0.5
    if kind in ("argmax", "argmin", "max", "min", "prod"):
        dim = d.pick(*dims)
        return f"{kind} over {dim}", lambda x: getattr(torch, kind)(x, dim, keepdim=keep), [d.laid(shape)]
    if kind == "norm":
        return f"norm over {dims}", lambda x: torch.linalg.vector_norm(x, 2, dims, keep), [d.laid(shape)]
    if kind == "all":
        return f"all over {dims}", lambda x: (x > -9).all(dims[0], keepdim=keep), [d.laid(shape)]
    return f"{kind} over {dims}", lambda x: getattr(torch, kind)(x, dims, keepdim=keep), [d.laid(shape)]


@family
def norm(d: Draw) -> Drawn:
    kind, sides = d.pick("layer", "group", "batch", "instance", "rms"), d.r.randint(1, 3)
    tail, after = d.tail(2)
    if kind in ("layer", "rms"):
        shape = d.shape(d.r.randint(2, 4))
        own = shape[-d.r.randint(1, len(shape) - 1):]
        weight, bias = d.plain(*own), d.plain(*own)
        if kind == "rms":
            return f"rms norm{tail}", lambda x, w: after(F.rms_norm(x, own, w, 1e-5)), [d.laid(shape), weight]
        return f"layer norm{tail}", lambda x, w, b: after(F.layer_norm(x, own, w, b)), [d.laid(shape), weight, bias]
    groups = d.pick(1, 2, 4, 8, 16, 32)
    shape = d.image(sides, groups * d.pick(1, 2, 3, 4, 7))
    weight, bias = d.plain(shape[1]), d.plain(shape[1])
    functions: dict[str, Callable[..., Tensor]] = {
        "group": lambda x, w, b: after(F.group_norm(x, groups, w, b)),
        "batch": lambda x, w, b: after(F.batch_norm(x, None, None, w, b, training=True)),
        "instance": lambda x, w, b: after(F.instance_norm(x, weight=w, bias=b))}
    return f"{kind} norm {groups}{tail}", functions[kind], [d.laid(shape), weight, bias]


@family
def softmax(d: Draw) -> Drawn:
    shape, kind = d.shape(d.r.randint(1, 5)), d.pick("softmax", "log_softmax", "softmin")
    dim = d.r.randrange(len(shape))
    return f"{kind} over {dim}", lambda x: getattr(F, kind)(x, dim), [d.laid(shape)]


@family
def scan(d: Draw) -> Drawn:
    shape, kind = d.shape(d.r.randint(1, 4)), d.pick("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
    dim = d.r.randrange(len(shape))
    if kind == "cumsum" and d.r.random() < 0.4:
        def shifted(x: Tensor) -> Tensor:
            zeros = torch.zeros_like(x.narrow(dim, 0, 1))
            return torch.cat((zeros, x), dim).cumsum(dim).narrow(dim, 0, x.shape[dim])

        return f"exclusive cumsum over {dim}", shifted, [d.laid(shape)]
    return f"{kind} over {dim}", lambda x: getattr(torch, kind)(x, dim), [d.laid(shape)]


@family
def pooling(d: Draw) -> Drawn:
    sides, kernel, stride = d.r.randint(1, 3), d.pick(2, 3, 3, 5), d.pick(1, 2, 3)
    shape, padding = d.image(sides, kernel=kernel), d.r.randint(0, kernel // 2)
    kind = d.pick("max", "avg", "adaptive_avg", "adaptive_max")
    function = getattr(F, f"{kind}_pool{sides}d")
    if kind.startswith("adaptive"):
        out = [d.r.randint(1, n) for n in shape[2:]]
        return f"{kind} pool to {out}", lambda x: function(x, out), [d.laid(shape)]
    return f"{kind} pool {kernel} {stride} {padding}", lambda x: function(x, kernel, stride, padding), [d.laid(shape)]


@family
def pointwise(d: Draw) -> Drawn:
    shape = d.shape(d.r.randint(1, 5))
    others = [d.laid(tuple(n if d.r.random() < 0.6 else 1 for n in shape)) for _ in range(d.r.randint(0, 3))]
    tail, after = d.tail(4)
    joins = [d.pick("add", "mul", "sub", "maximum") for _ in others]

    def run(x: Tensor, *more: Tensor) -> Tensor:
        for join, other in zip(joins, more):
            x = getattr(torch, join)(x, other)
        return after(x)

    return f"pointwise {' '.join(joins)}{tail}", run, [d.laid(shape), *others]


@family
def move(d: Draw) -> Drawn:
    shape = d.shape(d.r.randint(2, 4), d.elements / 2)
    rank, dim = len(shape), d.r.randrange(len(shape))
    perm, by = d.r.sample(range(rank), rank), d.side(shape[dim])
    pads = [d.r.randint(0, 3) for _ in range(2 * d.r.randint(1, 2))]
    options: dict[str, Callable[..., Tensor]] = {
        f"cat over {dim}": lambda x, y: torch.cat((x, y, x), dim),
        f"stack at {dim}": lambda x, y: torch.stack((x, y), dim),
        f"pad {pads}": lambda x: F.pad(x, pads), f"flip {dim}": lambda x: x.flip(dim),
        f"roll {by} over {dim}": lambda x: x.roll(by, dim),
        f"transpose to {perm}": lambda x: x.permute(perm).contiguous(),
        f"transpose to {perm} and add": lambda x: x.permute(perm) + x.permute(perm).contiguous(),
        "repeat": lambda x: x.repeat(*[1] * (rank - 1), 3),
        f"repeat each over {dim}": lambda x: x.repeat_interleave(2, dim),
        "lower triangle": lambda x: x.tril(1), f"every third over {dim}": lambda x: x.unfold(dim, 1, 3).contiguous()}
    what = d.pick(*options)
    inputs = [d.laid(shape) for _ in range(2 if what.startswith(("cat", "stack")) else 1)]
    return what, options[what], inputs


@family
def indexing(d: Draw) -> Drawn:
    rows, width = d.shape(2)
    count, dim = d.side(max(2.0, d.elements / width)), d.pick(0, 1)
    table, index, source = d.laid((rows, width)), d.index(rows, count), d.laid((count, width))
    options: dict[str, tuple[Callable[..., Tensor], list[Input]]] = {
        "embedding": (lambda x, i: F.embedding(i, x), [table, index]),
        "index_select": (lambda x, i: x.index_select(0, i), [table, index]),
        "index of rows": (lambda x, i: x[i], [table, index]),
        "gather": (lambda x, i: x.gather(dim, i), [table, d.index((rows, width)[dim], rows, width)]),
        "index_add": (lambda x, i, s: x.index_add(0, i, s), [table, index, source]),
        "scatter_add": (lambda x, i, s: x.scatter_add(0, i[:, None].expand_as(s), s), [table, index, source]),
        "index_put": (lambda x, i, s: x.index_put((i,), s, accumulate=True), [table, index, source]),
        "masked_fill": (lambda x, y: x.masked_fill(y > 0.5, -1.0), [table, d.laid((rows, width))]),
        "where": (lambda x, y: torch.where(y > 0, x, y), [table, d.laid((rows, width))])}
    what = d.pick(*options)
    return what, *options[what]


@family
def resize(d: Draw) -> Drawn:
    mode = d.pick("nearest", "linear", "bilinear", "bicubic", "trilinear", "area", "grid")
    sides = {"linear": 1, "trilinear": 3}.get(mode, 2)
    shape = d.image(sides)
    if mode == "grid":
        grid = Input((shape[0], *shape[2:], 2), d.dtype, (0, 1, 2, 3))
        return "grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), [d.laid(shape), grid]
    out = [max(1, round(n * d.r.uniform(0.4, 2.2))) for n in shape[2:]]
    corners = d.pick(True, False) if mode not in ("nearest", "area") else None
    return f"{mode} to {out}", lambda x: F.interpolate(x, out, mode=mode, align_corners=corners), [d.laid(shape)]


@family
def convolution(d: Draw) -> Drawn:
    sides, kernel, stride = d.pick(1, 2, 2, 2, 3), d.pick(1, 3, 3, 5), d.pick(1, 1, 2)
    channels, out, padding = max(1, d.side(128)), max(1, d.side(128)), d.r.randint(0, kernel // 2)
    d.elements = min(d.elements, 1 << 22)  # the time grows with the channels of the result as well
    groups = channels if d.r.random() < 0.2 else 1
    out = out if groups == 1 else channels
    shape, transposed = d.image(sides, channels, kernel), d.r.random() < 0.25
    weight = (channels, out // groups) if transposed else (out, channels // groups)
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{sides}d")
    tail, after = d.tail(4)
    last = d.pick("", "", "max pool", "mean", "softmax over channels", "group norm", "add a number by channel")
    ends: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "": lambda y, b: y, "max pool": lambda y, b: getattr(F, f"max_pool{sides}d")(y, 2),
        "mean": lambda y, b: y.mean(list(range(2, sides + 2))), "softmax over channels": lambda y, b: y.softmax(1),
        "group norm": lambda y, b: F.group_norm(y, 1),
        "add a number by channel": lambda y, b: y + b.view(-1, *[1] * sides)}

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ends[last](after(function(x, w, b, stride=stride, padding=padding, groups=groups)), b)

    what = f"{function.__name__} {out} {kernel} {stride} {padding} {groups}{tail}{', ' if last else ''}{last}"
    return what, run, [d.laid(shape), d.plain(*weight, *[kernel] * sides), d.plain(out)]


@family
def product(d: Draw) -> Drawn:
    m, n = d.shape(2)
    k = max(1, d.side(1024))
    tail, after = d.tail(4)
    return f"linear {n}{tail}", lambda x, w, b: after(F.linear(x, w, b)), [d.laid((m, k)), d.plain(n, k), d.plain(n)]


@family
def loss(d: Draw) -> Drawn:
    rows, classes = d.shape(2)
    x, y = d.laid((rows, classes)), d.laid((rows, classes))
    kind = d.pick("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
                  "binary_cross_entropy_with_logits", "kl_div")
    if kind == "cross_entropy":
        return kind, F.cross_entropy, [x, d.index(classes, rows)]
    function = getattr(F, kind)
    if kind == "kl_div":
        return kind, lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"), [x, y]
    return kind, lambda a, b: function(a, b.sigmoid()), [x, y]


def draw(seed: int, size: str) -> Case:
    """Returns the case of a seed; a third of the differentiable ones are measured with gradients, and a sixth of all
    for any size."""
    d = Draw(seed, size)
    name = d.pick(*FAMILIES)
    what, function, inputs = FAMILIES[name](d)
    smooth = not what.startswith(("argmax", "argmin", "all"))
    return Case(seed, name, what, function, tuple(inputs), smooth and d.r.random() < 1 / 3, d.r.random() < 1 / 6)

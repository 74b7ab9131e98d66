"""The model suite: small networks of many kinds, with random weights, in three sizes.

    built = SUITE["gpt"].build("tiny")
    *args, target = built.make_inputs(batch=2)
    built.loss(built.module(*args), target).backward()

"small" is for measuring (a training step of tens of milliseconds on two cores), "large" for measuring on a GPU,
"tiny" for tests. Weights and inputs are drawn on the CPU and moved, so that they are the same on every device.
Only `mlp` holds dropout; `without_dropout` turns it off so that results can be compared.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Built:
    """A module, its inputs (the last one is the target of the loss) and its loss."""

    module: nn.Module
    make_inputs: Callable[..., Inputs]
    loss: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Model:
    name: str
    create: Callable[..., nn.Module]
    draw: Callable[[dict[str, int], int], Inputs]
    loss: Callable[[Tensor, Tensor], Tensor]
    sizes: dict[str, dict[str, int]]

    def build(self, size: str = "small", seed: int = 0, device: str = "cpu",
              dtype: torch.dtype = torch.float32) -> Built:
        """Builds the model with fresh weights; `make_inputs(batch, seed)` draws for any batch size."""
        config = dict(self.sizes[size])
        default_batch = config.pop("batch")

        def make_inputs(batch: int = default_batch, seed: int = 1) -> Inputs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return tuple(t.to(device, dtype if t.is_floating_point() else None) for t in self.draw(config, batch))

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Built(self.create(**config).to(device, dtype), make_inputs, self.loss)


def without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


def class_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshapes [batch, time, heads * d] to [batch, heads, time, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


# ---- transformers ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block, as in GPT (causal) and ViT (not)."""

    def __init__(self, dim: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.heads) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, time: int, dim: int, heads: int, depth: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(time, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Module):
    """A block with RMSNorm, rotary positions, grouped queries, and SwiGLU."""

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        kv_dim, hidden = dim // heads * kv_heads, dim * 8 // 3 // 16 * 16
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = nn.Linear(dim, kv_dim, bias=False), nn.Linear(dim, kv_dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, dim=-1)
            return t * cos + torch.cat((-b, a), dim=-1) * sin

        def repeat(t: Tensor) -> Tensor:
            return t.repeat_interleave(self.heads // self.kv_heads, dim=1)

        y = self.norm1(x)
        q = rotate(split_heads(self.q(y), self.heads))
        k = repeat(rotate(split_heads(self.k(y), self.kv_heads)))
        v = repeat(split_heads(self.v(y), self.kv_heads))
        x = x + self.o(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, vocab: int, time: int, dim: int, heads: int, kv_heads: int, depth: int):
        super().__init__()
        half = dim // heads // 2
        angle = torch.outer(torch.arange(time), 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.tokens = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads) for _ in range(depth))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, time = self.tokens(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
        return self.head(self.norm(x))


def draw_tokens(config: dict[str, int], batch: int) -> Inputs:
    text = torch.randint(config["vocab"], (batch, config["time"] + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


# ---- images and volumes ----------------------------------------------------------------------------------


class ViT(nn.Module):
    def __init__(self, image: int, patch: int, dim: int, heads: int, depth: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Residual(nn.Module):
    """A basic (3x3, 3x3) or bottleneck (1x1, 3x3, 1x1) block with batch norms."""

    def __init__(self, cin: int, cout: int, stride: int, bottleneck: bool):
        super().__init__()
        mid = cout // 4
        plan = ([(cin, mid, 1, 1), (mid, mid, 3, stride), (mid, cout, 1, 1)] if bottleneck
                else [(cin, cout, 3, stride), (cout, cout, 3, 1)])
        layers: list[nn.Module] = []
        for a, b, kernel, step in plan:
            layers += [nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        same = cin == cout and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class ResidualNetwork(nn.Module):
    """A residual network. `stages`: for each, the number of blocks, their width as a multiple of `width`, and whether
    they are bottlenecks."""

    def __init__(self, width: int, stages: Iterable[tuple[int, int, bool]], classes: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                                  nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        channels = width
        for stage, (count, growth, bottleneck) in enumerate(stages):
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks.append(Residual(channels, width * growth, stride, bottleneck))
                channels = width * growth
        self.stages, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


class ResNet(ResidualNetwork):
    """A network of basic blocks, then bottlenecks."""

    def __init__(self, image: int, width: int, blocks: int, classes: int):
        super().__init__(width, [(blocks, 1, False), (blocks, 2, False), (blocks, 4, True), (blocks, 8, True)], classes)


class ResNet50(ResidualNetwork):
    """The first `stages` stages of ResNet-50."""

    def __init__(self, image: int, width: int, stages: int, classes: int):
        super().__init__(width, [(3, 4, True), (4, 8, True), (6, 16, True), (3, 32, True)][:stages], classes)


def draw_images(config: dict[str, int], batch: int) -> Inputs:
    image = config["image"]
    return torch.randn(batch, 3, image, image), torch.randint(config["classes"], (batch,))


class UNet3D(nn.Module):
    """A U-Net: group norms on the way down; trilinear upsampling, concatenation, instance norms on the way up."""

    def __init__(self, side: int, width: int, levels: int, classes: int):
        super().__init__()

        def convs(cin: int, cout: int, norm: Callable[[int], nn.Module], bias: bool) -> nn.Module:
            first, second = (nn.Conv3d(c, cout, 3, padding=1, bias=bias) for c in (cin, cout))
            return nn.Sequential(first, norm(cout), nn.LeakyReLU(), second, norm(cout), nn.LeakyReLU())

        widths = [width << level for level in range(levels)]
        group, instance = partial(nn.GroupNorm, 4), partial(nn.InstanceNorm3d, affine=True)
        self.down = nn.ModuleList(convs(a, b, group, True) for a, b in zip([1, *widths], widths))
        # An instance norm cancels a bias before it: its gradient would be nothing but rounding.
        pairs = zip(widths[-2::-1], widths[:0:-1])
        self.up = nn.ModuleList(convs(a + b, a, instance, False) for a, b in pairs)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, volume: Tensor) -> Tensor:
        skips = [self.down[0](volume)]
        for block in self.down[1:]:
            skips.append(block(F.max_pool3d(skips[-1], 2)))
        x = skips.pop()
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:], mode="trilinear", align_corners=False)
            x = block(torch.cat((skip, x), dim=1))
        return self.head(x)


def draw_volumes(config: dict[str, int], batch: int) -> Inputs:
    space = (config["side"],) * 3
    return torch.randn(batch, 1, *space), torch.randint(config["classes"], (batch, *space))


# ---- recommendation, activations, scans ------------------------------------------------------------------


class DLRM(nn.Module):
    """A click model: bags of sparse features and dense ones, pairwise dot products, a click probability."""

    pairs: Tensor

    def __init__(self, tables: int, rows: int, bag: int, dense: int, dim: int):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + tables * (tables + 1) // 2, 4 * dim), nn.ReLU(),
                                 nn.Linear(4 * dim, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = [x] + [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets)]
        stacked = torch.stack(features, dim=1)
        dots = stacked @ stacked.transpose(1, 2)
        return self.top(torch.cat((x, dots[:, self.pairs[0], self.pairs[1]]), dim=1)).squeeze(1)


def draw_clicks(config: dict[str, int], batch: int) -> Inputs:
    """Draws bags of random lengths (some empty) that hold `bag` features on average; popular rows repeat."""
    tables, total = config["tables"], batch * config["bag"]
    indices = (torch.rand(tables, total) ** 3 * config["rows"]).long()
    offsets = torch.randint(total, (tables, batch)).sort(dim=1).values
    offsets[:, 0] = 0
    return torch.randn(batch, config["dense"]), indices, offsets, torch.rand(batch).round()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "leaky_relu": F.leaky_relu, "hardtanh": F.hardtanh, "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "softshrink": partial(F.softshrink, lambd=0.1),
    "hardshrink": partial(F.hardshrink, lambd=0.1), "silu": F.silu, "mish": F.mish, "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"), "elu": F.elu, "celu": F.celu, "selu": F.selu,
    "softplus": F.softplus, "logsigmoid": F.logsigmoid,
    "threshold": partial(F.threshold, threshold=0.1, value=-0.1),
}


class MLP(nn.Module):
    """An MLP with a residual layer for every activation, and dropout after each."""

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ACTIVATIONS})
        self.prelu, self.glu = nn.PReLU(dim), nn.Linear(dim, 2 * dim)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x = x + self.dropout(ACTIVATIONS[name](layer(x)))
        x = x + self.dropout(F.glu(self.glu(self.prelu(x)), dim=-1))
        return self.head(x)


def draw_vectors(config: dict[str, int], batch: int) -> Inputs:
    return torch.randn(batch, config["dim"]), torch.randint(config["classes"], (batch,))


class Scans(nn.Module):
    """Every cumulative operator over time and over features, side by side."""

    def __init__(self, time: int, dim: int):
        super().__init__()
        self.encode = nn.Linear(dim, dim)
        self.mix = nn.Parameter(torch.randn(10) / 10)
        self.decode = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.encode(x))
        near_one = 1 + 0.05 * x  # keeps long products in range and away from zero
        parts = []
        for axis in (1, 2):
            length = x.shape[axis]
            parts += [x.cumsum(axis) / length, near_one.cumprod(axis), x.cummax(axis).values,
                      x.cummin(axis).values, x.logcumsumexp(axis)]
        return self.decode(sum(w * part for w, part in zip(self.mix.unbind(), parts)))


def draw_series(config: dict[str, int], batch: int) -> Inputs:
    shape = (batch, config["time"], config["dim"])
    return torch.randn(shape), torch.randn(shape)


SUITE: dict[str, Model] = {model.name: model for model in (
    Model("gpt", GPT, draw_tokens, token_loss, {
        "large": {"batch": 16, "vocab": 16384, "time": 512, "dim": 768, "heads": 12, "depth": 8},
        "small": {"batch": 4, "vocab": 4096, "time": 128, "dim": 256, "heads": 8, "depth": 4},
        "tiny": {"batch": 2, "vocab": 64, "time": 16, "dim": 32, "heads": 2, "depth": 2}}),
    Model("llama", Llama, draw_tokens, token_loss, {
        "large": {"batch": 16, "vocab": 16384, "time": 512, "dim": 768, "heads": 12, "kv_heads": 4, "depth": 8},
        "small": {"batch": 4, "vocab": 4096, "time": 128, "dim": 256, "heads": 8, "kv_heads": 2, "depth": 4},
        "tiny": {"batch": 2, "vocab": 64, "time": 16, "dim": 32, "heads": 4, "kv_heads": 2, "depth": 2}}),
    Model("resnet", ResNet, draw_images, class_loss, {
        "large": {"batch": 64, "image": 224, "width": 64, "blocks": 2, "classes": 1000},
        "small": {"batch": 8, "image": 96, "width": 32, "blocks": 2, "classes": 100},
        "tiny": {"batch": 2, "image": 64, "width": 8, "blocks": 1, "classes": 10}}),
    Model("vit", ViT, draw_images, class_loss, {
        "large": {"batch": 64, "image": 224, "patch": 16, "dim": 384, "heads": 6, "depth": 8, "classes": 1000},
        "small": {"batch": 8, "image": 64, "patch": 8, "dim": 192, "heads": 6, "depth": 4, "classes": 100},
        "tiny": {"batch": 2, "image": 16, "patch": 4, "dim": 32, "heads": 2, "depth": 2, "classes": 10}}),
    Model("unet3d", UNet3D, draw_volumes, class_loss, {
        "large": {"batch": 2, "side": 64, "width": 32, "levels": 4, "classes": 4},
        "small": {"batch": 1, "side": 24, "width": 16, "levels": 3, "classes": 4},
        "tiny": {"batch": 2, "side": 8, "width": 4, "levels": 2, "classes": 3}}),
    Model("dlrm", DLRM, draw_clicks, F.binary_cross_entropy_with_logits, {
        "large": {"batch": 16384, "tables": 16, "rows": 100000, "bag": 16, "dense": 13, "dim": 64},
        "small": {"batch": 2048, "tables": 8, "rows": 10000, "bag": 16, "dense": 13, "dim": 32},
        "tiny": {"batch": 4, "tables": 3, "rows": 50, "bag": 3, "dense": 5, "dim": 8}}),
    Model("mlp", MLP, draw_vectors, class_loss, {
        "large": {"batch": 16384, "dim": 1024, "classes": 1000},
        "small": {"batch": 1024, "dim": 256, "classes": 100},
        "tiny": {"batch": 4, "dim": 16, "classes": 10}}),
    Model("scans", Scans, draw_series, F.mse_loss, {
        "large": {"batch": 32, "time": 1024, "dim": 1024},
        "small": {"batch": 8, "time": 256, "dim": 256},
        "tiny": {"batch": 2, "time": 8, "dim": 8}}),
)}

"""The cases of bench/bits.py: single operators on all kinds of values, reductions and others on large shapes.

`ALONE` holds functions of three tensors of one dtype; `large(device, size)` functions of leaves, with their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.torch_compat.ops import foreach_add, foreach_div, foreach_mul, foreach_pow

aten = torch.ops.aten
Function = Callable[..., Any]

UNARY = ("abs", "neg", "relu", "sin", "cos", "tan", "tanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
         "sqrt", "rsqrt", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "asin", "acos", "atan", "sinh", "cosh",
         "asinh", "acosh", "atanh", "reciprocal", "square", "round", "trunc", "floor", "ceil", "frac", "sign", "sinc",
         "deg2rad", "rad2deg", "signbit", "nan_to_num", "logit")
ACTIVATIONS = ("silu", "gelu", "mish", "softplus", "logsigmoid", "elu", "selu", "celu", "hardswish", "hardsigmoid",
               "relu6", "leaky_relu", "hardtanh", "softsign", "tanhshrink", "hardshrink", "softshrink")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "fmax", "fmin", "fmod", "remainder", "atan2", "hypot",
          "copysign", "logaddexp", "logaddexp2", "pow", "xlogy", "heaviside")
SLOPES = ("sigmoid", "tanh", "silu", "mish", "gelu", "hardswish", "hardsigmoid", "logit")
SCALE = 0.0316  # its reciprocal rounds differently in float32 and in float64
SCALED: dict[str, Function] = {
    "product": torch.mul, "quotient": torch.div, "sum": torch.add, "difference": torch.sub, "maximum": torch.maximum,
    "multiple": lambda x, s: torch.add(s, x, alpha=0.7), "inverse": lambda x, s: s / x, "power": lambda x, s: x ** s,
    "whole quotient": partial(torch.div, rounding_mode="trunc"), "rest": torch.fmod,
    "choice": lambda x, s: torch.where(x > s, x, s), "addcmul": lambda x, s: torch.addcmul(x, x, s)}
LISTS: dict[str, Function] = {
    "sum": foreach_add, "product": foreach_mul, "quotient": foreach_div,
    "power": foreach_pow, "quotients": lambda x, s: foreach_div(x, [s])}


def of(count: int, f: Function) -> Function:
    """Returns a function of the first `count` of three tensors."""
    return lambda *tensors: f(*tensors[:count])


ALONE: dict[str, Function] = {
    **{name: of(1, getattr(torch, name)) for name in UNARY},
    **{name: of(1, getattr(F, name)) for name in ACTIVATIONS},
    **{name: of(2, getattr(torch, name)) for name in BINARY},
    **{f"{name} slope": of(2, getattr(aten, f"{name}_backward")) for name in SLOPES},
    **{f"to {str(d)[6:]}": of(1, partial(torch.Tensor.to, dtype=d)) for d in (torch.half, torch.bfloat16, torch.float)},
    **{f"pow {p}": of(1, partial(torch.pow, exponent=p)) for p in (2, 3, 4, 0.5, -0.5, -1, -2, 1.7)},
    **{f"round {n}": of(1, partial(torch.round, decimals=n)) for n in (-1, 2, 4)},
    **{f"div {mode}": of(2, partial(torch.div, rounding_mode=mode)) for mode in ("trunc", "floor")},
    **{f"{f.__name__} 0.3": of(2, partial(f, alpha=0.3)) for f in (torch.add, torch.sub, torch.rsub)},
    **{f"lerp {w}": of(2, partial(torch.lerp, weight=w)) for w in (0.1, 0.8)},
    **{f"{f.__name__}{v}": partial(f, value=v) for f in (torch.addcmul, torch.addcdiv) for v in (1, 0.3)},
    **{f"{n} 0.3": of(1, partial(getattr(F, n), lambd=0.3)) for n in ("softshrink", "hardshrink")},
    "lerp": torch.lerp, "clamp by tensors": torch.clamp, "where": lambda a, b, c: torch.where(a > 0, b, c),
    "2 ** x": lambda a, b, c: torch.pow(2.0, a), "x * 0.3": lambda a, b, c: a * 0.3, "x + 0.3": lambda a, b, c: a + 0.3,
    **{f"{n} of the host's": of(1, lambda a, f=f: f(a, torch.tensor(SCALE))) for n, f in SCALED.items()},
    **{f"{n} of a list": of(1, lambda a, f=f: f([a], SCALE)[0]) for n, f in LISTS.items()},
    "square of a list": lambda a, b, c: foreach_pow([a], 2)[0],
    "x / 3": lambda a, b, c: a / 3, "x / 0.0316": lambda a, b, c: a / SCALE, "0.7 / x": lambda a, b, c: 0.7 / a,
    "1 - x": lambda a, b, c: 1 - a, "div 0.7 trunc": lambda a, b, c: torch.div(a, 0.7, rounding_mode="trunc"),
    "gelu tanh": lambda a, b, c: F.gelu(a, approximate="tanh"), "softplus 2.3": lambda a, b, c: F.softplus(a, 2.3, 10),
    "celu 1.7": lambda a, b, c: F.celu(a, 1.7), "elu 1.3": lambda a, b, c: F.elu(a, 1.3),
    "logit 1e-3": lambda a, b, c: torch.logit(a, 1e-3), "threshold": lambda a, b, c: F.threshold(a, 0.1, 20.0),
    "leaky_relu 0.3": lambda a, b, c: F.leaky_relu(a, 0.3), "hardtanh 0.3": lambda a, b, c: F.hardtanh(a, -0.3, 0.3),
    "clamp": lambda a, b, c: a.clamp(-0.7, 1.3), "clamp min": lambda a, b, c: a.clamp(min=0.0),
    "clamp max": lambda a, b, c: a.clamp(max=0.0), "clamp min tensor": lambda a, b, c: torch.clamp(a, min=b),
    "prelu": lambda a, b, c: F.prelu(a, a.new_full((1,), 0.3)), "glu": lambda a, b, c: F.glu(torch.stack([a, b], 1), 1),
    "glu slope": lambda a, b, c: aten.glu_backward(a.view(-1, 1), torch.stack([b, c], 1), 1),
    "gelu tanh slope": lambda a, b, c: aten.gelu_backward(a, b, approximate="tanh"),
    "softplus slope": lambda a, b, c: aten.softplus_backward(a, b, 2.3, 20.0),
    "elu slope": lambda a, b, c: aten.elu_backward(a, 1.3, 1.1, 0.9, False, b),
    "elu slope of result": lambda a, b, c: aten.elu_backward(a, 1.3, 1.1, 0.9, True, b),
    "leaky_relu slope": lambda a, b, c: aten.leaky_relu_backward(a, b, 0.01, False),
    "logit slope 1e-3": lambda a, b, c: aten.logit_backward(a, b, 1e-3),
    "logsigmoid slope": lambda a, b, c: aten.log_sigmoid_backward(a, b, b),
    "dropout slope": lambda a, b, c: aten.native_dropout_backward(a, b > 0, 1 / 0.9),
    **{f"threshold slope {x}": of(2, partial(aten.threshold_backward, threshold=x)) for x in (0.0, 0.3)},
    **{f"softshrink slope {x}": of(2, partial(aten.softshrink_backward, lambd=x)) for x in (0.3, 0.5)},
    **{f"hardtanh slope {x}": of(2, partial(aten.hardtanh_backward, min_val=-x, max_val=x)) for x in (0.3, 1.0)},
    "relu of product": lambda a, b, c: torch.relu(a * b) + torch.maximum(b, c),
}

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0, float("inf"), -float("inf"), float("nan"), 1e-40,
           -1e-40, 1e-38, 3e38, -3e38, 88.7, -88.7, 20.0, -20.0, 0.1, 1e-8, -1e-8, 1e-5, 65504.0, 6e-8, -6e-8)


def values(dtype: torch.dtype, count: int, device: str) -> list[Tensor]:
    """Returns three tensors: special numbers, `count` values of each of several distributions, and all bit patterns, or
    random ones for float32."""
    g = torch.Generator().manual_seed(5)
    normal = partial(torch.randn, count, generator=g)
    parts = [torch.tensor(SPECIAL), torch.tensor([0.0, -0.0, -0.0, 0.0]).repeat(2048), normal(), normal() * 30,
             torch.rand(count, generator=g) * 2 - 1, torch.exp(normal() * 20), -torch.exp(normal() * 20)]
    if dtype is torch.float32:
        parts.append(torch.randint(-2**31, 2**31, (count,), generator=g).to(torch.int32).view(dtype))
    else:
        parts.append(torch.arange(-2**15, 2**15).to(torch.int16).view(dtype).float())
    a = torch.cat(parts).to(dtype)
    return [x.to(device) for x in (a, *(a[torch.randperm(len(a), generator=g)] for _ in range(2)))]


def large(device: str, size: str) -> dict[str, tuple[Function, list[tuple[int, ...]]]]:
    """Returns name -> (function of leaves, shapes of the leaves)."""
    big, image, table, count = {"large": ((4096, 4096), (8, 64, 56, 56), (100000, 128), 8192),
                                "tiny": ((96, 130), (2, 8, 14, 14), (100, 16), 64)}[size]
    g = torch.Generator().manual_seed(2)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=g).to(device)

    index, bags = draw(table[0], count, 4), torch.arange(0, count * 4, 4, device=device)
    target, rows, deep = draw(big[1], big[0]), draw(big[0], big[0] // 2), draw(big[1], *big)
    zeros = torch.tensor([0.0, -0.0, -1.0], device=device)[draw(3, *big)]

    def tied(f: Function) -> Function:
        """Applies the function to zeros of both signs, which are ties."""
        return lambda x: f(torch.where(x > 99, x, zeros.to(x.dtype)))

    ties: dict[str, Function] = {
        "amax": lambda x: x.amax(1), "max 0": lambda x: x.max(0), "argmax": lambda x: x.argmax(1),
        "cummax": lambda x: x.cummax(0), "sort": lambda x: x.sort(1), "topk": lambda x: x.topk(7, 1)}
    plane: dict[str, Function] = {
        **ties, **{f"zeros, {name}": tied(f) for name, f in ties.items()}, "zeros, max": tied(torch.max),
        "zeros, min": tied(lambda x: x.min(1)), "zeros, max_pool2d": tied(lambda x: F.max_pool2d(x[None], 3, 2, 1)),
        "zeros, adaptive_max_pool2d": tied(lambda x: F.adaptive_max_pool2d(x[None], 7)),
        "sum": torch.sum, "sum 0": lambda x: x.sum(0), "sum 1": lambda x: x.sum(1), "mean": lambda x: x.mean(1),
        "var": lambda x: x.var(1), "var_mean 0": lambda x: torch.var_mean(x, 0), "std": torch.std,
        "logsumexp": lambda x: x.logsumexp(1), "norm": lambda x: x.norm(dim=1), "norm 3": lambda x: x.norm(3),
        "softmax 0": lambda x: x.softmax(0), "softmax 1": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1), "normalize": F.normalize, "cumsum 0": lambda x: x.cumsum(0),
        "cumsum 1": lambda x: x.cumsum(1), "cumprod": lambda x: (1 + x * 1e-3).cumprod(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1), "cross_entropy": lambda x: F.cross_entropy(x, target),
        "cross_entropy, smoothed": lambda x: F.cross_entropy(x, target, label_smoothing=0.1),
        "nll_loss": lambda x: F.nll_loss(x, target, reduction="sum"), "dropout": lambda x: F.dropout(x, 0.3),
        "rand": lambda x: x + torch.rand_like(x), "index_select": lambda x: x.index_select(0, rows),
        "index": lambda x: x[rows], "gather": lambda x: x.gather(1, deep),
        "sums in a chain": lambda x: F.gelu(x * 2 + 1).sum(1, keepdim=True) * x.sigmoid(),
        "softmax in a chain": lambda x: F.dropout(torch.softmax(F.silu(x) / 3, -1), 0.1) * 1.5}
    pairs: dict[str, Function] = {
        "mse_loss": F.mse_loss, "l1_loss": F.l1_loss, "smooth_l1_loss": F.smooth_l1_loss, "huber_loss": F.huber_loss,
        "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        "kl_div": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        "cosine_similarity": F.cosine_similarity, "matmul": lambda x, y: F.relu(x @ y.t()) + 1}
    images: dict[str, Function] = {
        "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1), "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool2d, inside": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 7), "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 3),
        "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 5), "instance_norm": F.instance_norm,
        "nearest": lambda x: F.interpolate(x, scale_factor=2), "mean of images": lambda x: x.mean((2, 3)),
        "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "conv2d": lambda x: F.relu(F.conv2d(x, x[:1, :, :3, :3])), "unfold": lambda x: F.unfold(x, 3),
        "pad": lambda x: F.pad(x, (2, 2, 2, 2), "reflect"), "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2) * 2}
    row, channels = big[1:], image[1:2]
    return {
        **{name: (f, [big]) for name, f in plane.items()}, **{name: (f, [big, big]) for name, f in pairs.items()},
        **{name: (f, [image]) for name, f in images.items()},
        "layer_norm": (lambda x, w, b: F.layer_norm(x, row, w, b), [big, row, row]),
        "rms_norm": (lambda x, w: F.rms_norm(x, row, w), [big, row]),
        "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [image, channels, channels]),
        "batch_norm": (lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)), [image, channels, channels]),
        "embedding": (lambda w: F.embedding(index, w), [table]),
        **{f"embedding_bag, {mode}": (partial(F.embedding_bag, index.flatten(), offsets=bags, mode=mode), [table])
           for mode in ("sum", "mean", "max")}}

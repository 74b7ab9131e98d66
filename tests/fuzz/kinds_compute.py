"""Lines that compute: maps with promotion, casts, reductions, scans, norms, sorting, products, windows."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import ERRORS, Draw, error, kind
from .program import FLOATS

WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)


@kind(4)
def functions(d: Draw, x: str, t: Tensor) -> str | None:
    return d.r.choice((
        f"{x}.sin()", f"{x}.cos()", f"torch.exp(-{x} * {x})", f"{x}.tanh()", f"{x}.sigmoid()", f"F.silu({x})",
        f"{x}.abs().sqrt()", f"{x}.abs().log1p()", f"({x}.abs() + 1).rsqrt()", f"{x}.erf()", f"F.softplus({x})",
        f"F.gelu({x})", f"1 / (2 + {x}.abs())", f"{x} * 0.5 + 1", f"{x}.square() * 0.1", f"{x}.expm1() * 0.1",
        f"({x} * {x} + 1).log()", f"{x}.pow(2)", f"{x}.atan()", f"F.elu({x})", f"{x}.sinh() * 0.01", f"{x} / 3"))


@kind(2, "move", "kink")
def choices(d: Draw, x: str, t: Tensor) -> str | None:
    """Continuous maps whose slope jumps."""
    number = d.number_of(t)
    return d.r.choice((f"{x}.abs()", f"{x}.relu()", f"{x}.clamp(-1, 2)", f"{x}.clamp(min={number})", f"{x}.neg()",
                       f"F.hardtanh({x})", f"F.leaky_relu({x}, 0.5)", f"{x}.nan_to_num()"))


@kind(1.5, "move", "exact")
def jumps(d: Draw, x: str, t: Tensor) -> str | None:
    """Maps whose value jumps, so their operands must be exact."""
    return d.r.choice((f"{x}.sign()", f"{x}.floor()", f"{x}.round()", f"{x}.trunc()", f"{x}.ceil()",
                       f"{x}.logical_not()", f"{x}.isnan()", f"{x}.signbit()", f"{x}.bitwise_not()",
                       f"{x} > {d.number_of(t)}", f"{x} == {d.number_of(t)}", f"{x}.bool()",
                       f"torch.heaviside({x}, {x})", f"{x} != 0"))


@kind(7)
def arithmetic(d: Draw, x: str, t: Tensor) -> str | None:
    """Arithmetic with type promotion: two tensors of any dtypes, or a tensor and a number."""
    y = d.broadcastable(t) if d.r.random() < 0.8 else None
    if y is None:
        s = d.scalar()
        return d.r.choice((f"{x} + {s}", f"{x} * {s}", f"{x} - {s}", f"{s} - {x}", f"{x} / 4",
                           f"torch.add({x}, {s}, alpha=2)"))
    return d.r.choice((
        f"{x} + {y}", f"{x} * {y}", f"{x} - {y}", f"{x} / (1 + {y}.abs())", f"torch.add({x}, {y}, alpha=2)",
        f"torch.lerp({x}, {y}, 0.25)", f"torch.addcmul({x}, {x}, {y}, value=0.5)", f"torch.hypot({x}, {y})",
        f"torch.addcdiv({x}, {x}, {y}.abs() + 1)", f"{x}.mul({y}).add({x})", f"torch.rsub({x}, {y})"))


@kind(2, "move", "kink")
def greater(d: Draw, x: str, t: Tensor) -> str | None:
    y = d.broadcastable(t)
    if y is None:
        return None
    return d.r.choice((f"torch.maximum({x}, {y})", f"torch.minimum({x}, {y})", f"torch.fmax({x}, {y})",
                       f"torch.clamp({x}, max={y})"))


@kind(3, "move", "exact")
def comparisons(d: Draw, x: str, t: Tensor) -> str | None:
    y = d.broadcastable(t) or x
    m = d.other(lambda v: v.dtype == torch.bool) or x
    return d.r.choice((
        f"{x} > {y}", f"{x} == {y}", f"{x} <= {y}", f"{x} != {y}", f"torch.logical_and({x}, {y})",
        f"torch.logical_xor({x}, {y})", f"{x} & {y}", f"{x} ^ {y}", f"{x} | {y}", f"torch.where({m}, {x}, {y})",
        f"torch.where({x} > {y}, {x}, {y})", f"torch.isclose({x}, {x})", f"torch.where({m}, {x}, 0)",
        f"{x} << 2", f"{x} >> 1"))


@kind(1.5, "round", "exact")
def quotients(d: Draw, x: str, t: Tensor) -> str | None:
    # Only whole numbers: a floating-point quotient that is nearly whole may be floored either way.
    if t.dtype in FLOATS:
        return None
    y = d.other(lambda v: v.dtype in WHOLE[:3] and v.shape == t.shape)
    by = f"({y}.abs() + 1)" if y else "3"
    return d.r.choice((f"{x} // {by}", f"{x} % {by}", f"torch.fmod({x}, {by})",
                       f"torch.div({x}, {by}, rounding_mode='trunc')"))


@kind(4, "move", "exact")
def casts(d: Draw, x: str, t: Tensor) -> str | None:
    """Casts that keep all values, or convert them in a defined way."""
    to = d.r.choice((torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool))
    if d.odd and t.dtype in FLOATS and to in WHOLE[:3]:
        return None  # C++ does not define which integer NaN becomes
    if t.dtype in FLOATS and to == torch.uint8:
        return f"{x}.abs().to({to})"
    if t.dtype == torch.float64 and to == torch.float32:
        return None
    return f"{x}.to({to})"


@kind(3, "round")
def roundings(d: Draw, x: str, t: Tensor) -> str | None:
    to = d.r.choice(FLOATS)
    return d.r.choice((f"{x}.to({to})", f"{x}.type({to})", f"{x}.float()", f"{x}.double()"))


def axes(d: Draw, t: Tensor) -> str:
    chosen = d.r.sample(range(t.dim()), d.r.randint(1, t.dim()))
    if len(chosen) == 1 and d.r.random() < 0.6:
        return str(chosen[0])
    return str(tuple(k if d.r.random() < 0.8 else k - t.dim() for k in chosen))


@kind(4)
def sums(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim() or d.r.random() < 0.15:
        return d.r.choice((f"{x}.sum()", f"{x}.mean()", f"{x}.prod()"))
    a, keep = axes(d, t), d.r.choice(("", ", keepdim=True"))
    return d.r.choice((
        f"{x}.sum({a}{keep})", f"{x}.mean({a}{keep})", f"{x}.sum({a}{keep}) * 0.5", f"{x}.logsumexp({a}{keep})",
        f"{x}.var({a}, correction=0{keep})", f"{x}.prod({d.dim(t)}{keep})", f"{x}.norm(2, {a}{keep})",
        f"torch.linalg.vector_norm({x}, dim={a}{keep})", f"{x}.sum({a}{keep}, dtype=torch.float32)",
        f"torch.var_mean({x}, {a}, correction=0{keep})[0]", f"{x}.nansum({a}{keep})"))


@kind(3, "move", "kink")
def extremes(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim():
        return f"{x}.max()"
    a, keep, k = axes(d, t), d.r.choice(("", ", keepdim=True")), d.dim(t)
    return d.r.choice((f"{x}.amax({a}{keep})", f"{x}.amin({a}{keep})", f"{x}.max({k}{keep}).values",
                       f"{x}.min({k}{keep})[0]", f"{x}.max()", f"{x}.min()", f"{x}.cummax({k}).values",
                       f"{x}.cummin({k})[0]", f"torch.aminmax({x}, dim={k}{keep})[0]"))


@kind(2, "move", "exact")
def found(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim():
        return f"{x}.any()"
    a, keep, k = axes(d, t), d.r.choice(("", ", keepdim=True")), d.dim(t)
    return d.r.choice((f"{x}.any({k}{keep})", f"{x}.all({k}{keep})", f"{x}.argmax({k}{keep})", f"{x}.argmin({k}{keep})",
                       f"{x}.count_nonzero({a})", f"{x}.max({k}{keep}).indices", f"{x}.all()", f"{x}.argmax()",
                       f"{x}.cummax({k}).indices", f"{x}.sort({k}, stable=True).indices", f"{x}.any({a}{keep})",
                       f"{x}.argsort({k}, stable=True)", f"torch.sort({x}, dim={k}, descending=True, stable=True)[1]"))


@kind(2, "move", "kink")
def ordered(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim():
        return None
    k = d.dim(t)
    n = t.shape[k]
    if d.grad:  # for the others, torch does not define which of several equal elements gets the gradient
        return d.r.choice((f"{x}.sort({k}, stable=True).values", f"{x}.sort({k}, descending=True, stable=True)[0]"))
    return d.r.choice((f"{x}.sort({k}).values", f"{x}.sort({k}, descending=True)[0]", f"{x}.msort()",
                       f"{x}.topk({d.r.randint(0, n)}, {k}).values",
                       f"{x}.kthvalue({d.r.randint(1, max(1, n))}, {k})[0]",
                       # torch 2.13 reads beyond the end of memory that overlaps.
                       f"{x}.median({k}).values" if t.is_contiguous() else f"{x}.msort()"))


@kind(2)
def scans(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim():
        return None
    k = d.dim(t)
    return d.r.choice((f"{x}.cumsum({k})", f"({x}.sin() * 0.1 + 1).cumprod({k})", f"{x}.logcumsumexp({k})",
                       f"{x}.diff(dim={k})", f"{x}.flip({k}).cumsum({k})", f"torch.cumulative_trapezoid({x}, dim={k})"))


@kind(2)
def norms(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim():
        return None
    k = d.dim(t)
    return d.r.choice((f"{x}.softmax({k})", f"{x}.log_softmax({k})", f"F.layer_norm({x}, {x}.shape[-1:])",
                       f"F.normalize({x}, dim={k})", f"{x} - {x}.mean({k}, keepdim=True)",
                       f"F.rms_norm({x}, {x}.shape[-1:])", f"F.group_norm({x}, 1)",
                       f"F.instance_norm({x})", f"F.batch_norm({x}, None, None, training=True)",
                       f"F.softmin({x}, {k})", f"F.glu({x}, {k})"))


@kind(2)
def products(d: Draw, x: str, t: Tensor) -> str | None:
    y = d.other(lambda v: v.dtype == t.dtype and v.dim() >= 1 and t.dim() >= 1 and v.shape[-2 if v.dim() > 1 else 0]
                == t.shape[-1])
    if t.dim() == 1:
        return d.r.choice((f"torch.outer({x}, {x})", f"{x} @ {x}", f"{x} @ {y}" if y else f"{x}.dot({x})"))
    if t.dim() not in (2, 3):
        return None
    if y and d.r.random() < 0.6:
        return f"{x} @ {y}"
    own = f"{x} @ {x}.transpose(-1, -2)"
    more = (f"F.linear({x}, {x})", f"torch.addmm({x}, {own}, {x}, beta=0.5)", f"torch.einsum('ij,kj->ik', {x}, {x})")
    return d.r.choice((own, f"{x}.mT @ {x}", *(more if t.dim() == 2 else (f"torch.bmm({x}, {x}.mT)",))))


@kind(1.5)
def windows(d: Draw, x: str, t: Tensor) -> str | None:
    if t.dim() not in (3, 4):
        return None
    n = t.dim() - 2 if d.r.random() < 0.7 else t.dim() - 1  # with or without a batch
    if n not in (1, 2):
        return None
    c = t.shape[-n - 1]
    return d.r.choice((
        f"F.avg_pool{n}d({x}, 2)", f"F.avg_pool{n}d({x}, 3, 1, 1)",
        f"F.adaptive_avg_pool{n}d({x}, {d.r.choice((1, 2))})",
        f"F.conv{n}d({x}, {x}.new_ones(2, {c}, {', '.join('2' * n)}))",
        f"F.conv{n}d({x}, {x}.new_ones({c}, 1, {', '.join('3' * n)}), padding=1, groups={c})",
        f"F.conv_transpose{n}d({x}, {x}.new_ones({c}, 2, {', '.join('2' * n)}), stride=2)",
        f"F.interpolate({x}, scale_factor=2, mode={'linear' if n == 1 else 'bilinear'!r})",
        f"F.lp_pool{n}d({x}, 2, 2)"))


@kind(1, "move", "kink")
def max_windows(d: Draw, x: str, t: Tensor) -> str | None:
    if t.dim() not in (3, 4):
        return None
    n = t.dim() - 2
    return d.r.choice((f"F.max_pool{n}d({x}, 2)", f"F.max_pool{n}d({x}, 3, 2, 1)",
                       f"F.adaptive_max_pool{n}d({x}, 2)", f"F.max_pool{n}d({x}, 2, 1, ceil_mode=True)"))


@kind(0.7, "exact")
def made(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim():
        return f"torch.arange(5, dtype=torch.float32, device={x}.device)"
    n = d.size(x, t, d.r.randrange(t.dim()))
    return d.r.choice((f"torch.arange({n}, device={x}.device)", f"torch.full(({n}, 2), 1.5, device={x}.device)",
                       f"{x}.new_zeros({n})", f"torch.eye({n}, device={x}.device)", f"torch.zeros_like({x})",
                       f"torch.full_like({x}, 2)", f"{x}.new_ones(3, {n}, dtype=torch.int64)",
                       f"torch.tril_indices(3, 3, device={x}.device)"))


# ---- what eager refuses ----------------------------------------------------------------------------------


@error
def index_too_large(d: Draw, x: str, t: Tensor) -> str | None:
    if not t.dim() or d.dynamic:
        return None
    a = d.r.randrange(t.dim())
    n = t.shape[a]
    low = d.index(["3"], f"{n} + 1")
    bad = f"({low} + {n})"
    return d.r.choice((f"{x}.index_select({a}, {bad})", f"{x}[{':, ' * a}{bad}]", f"{x}[{':, ' * a}{n}]",
                       f"{x}.select({a}, {n})", f"{x}.clone().index_fill_({a}, {bad}, 1)",
                       f"{x}.clone().index_add_({a}, {bad}, {x}[{':, ' * a}:3])",
                       f"{x}.flatten().gather(0, {low} + {max(t.numel(), 1)})", f"{x}.take({low} + {t.numel()})",
                       f"{x}.flatten().scatter_add(0, {low} + {t.numel()}, {x}.flatten()[:3])",
                       f"F.embedding({bad}, {x})", f"F.one_hot({bad}, {max(n, 1)})"))


@error
def shapes_that_do_not_fit(d: Draw, x: str, t: Tensor) -> str | None:
    n = t.shape[-1] if t.dim() else 0
    return d.r.choice((f"{x} + {x}.new_ones({n + 2})", f"{x} @ {x}.new_ones({n + 1}, 2)",
                       f"torch.cat(({x}, {x}.new_ones({n + 1}, 7, 1)))", f"{x}.view(7, {n + 3})",
                       f"{x}.expand({n + 2})", f"{x}.reshape(-1, {n + 5})", f"{x}.sum({t.dim() + 1})",
                       f"{x}.transpose(0, {t.dim() + 2})", f"{x}.unfold(0, {n + 30}, 1)",
                       f"{x}.split([1, {n + 20}])", f"{x}.clone().copy_({x}.new_ones({n + 2}))",
                       f"F.conv1d({x}, {x}.new_ones(2, 3, 99))", f"{x}.softmax({t.dim() + 3})",
                       f"torch.stack(({x}, {x}.new_ones({n + 1})))", f"{x}.squeeze({t.dim() + 2})"))


@error
def dtypes_that_do_not_fit(d: Draw, x: str, t: Tensor) -> str | None:
    if t.dtype in FLOATS:
        return d.r.choice((f"{x} & {x}", f"{x} << 1", f"{x}.bitwise_not()", f"{x}[{x}]", f"F.one_hot({x})",
                           f"{x}.index_select(0, {x})", f"{x}.clone().masked_fill_({x}, 1)"))
    return d.r.choice((f"{x}.clone().sin_()", f"{x}.mean()", f"{x}.clone().div_(2)", f"{x}.softmax(0)",
                       f"{x}.clone().add_(1.5)", f"F.layer_norm({x}, {x}.shape[-1:])", f"{x}.logsumexp(0)",
                       f"{x}.var(0)", f"F.avg_pool1d({x}, 2)", f"F.gelu({x})", f"F.adaptive_avg_pool1d({x}, 2)"))


assert ERRORS

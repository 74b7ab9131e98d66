"""Random programs of views, maps, reductions, scans, gathers and scatters: forward and gradients as in eager.

Everything is float64, so that results differ by rounding alone, however they were fused; a seed names a program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.aot_autograd import aot_function

from flambeau.frontends.decompositions import table
from flambeau.frontends.partition import partition
from flambeau.frontends.pipeline import compile_graph

pytestmark = pytest.mark.filterwarnings("error:flambeau:RuntimeWarning")

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 17, 33)
Step = Callable[[list[Tensor], Any], Tensor]


class Generator:
    """Draws one step at a time; `values` are eager results, which say what shapes there are."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        rank = self.r.randint(1, 4)
        shape = [self.r.choice(SIZES) for _ in range(rank)]
        self.inputs = [torch.randn(shape, dtype=torch.float64, generator=self.torch) for _ in range(2)]
        if rank > 1 and self.r.random() < 0.3:
            self.inputs[1] = self.inputs[1].transpose(0, 1).contiguous().transpose(0, 1)
        self.indices: list[Tensor] = []  # tensors of integers: arguments too, behind the inputs
        self.values: list[Tensor] = list(self.inputs)
        self.steps: list[Step] = []
        self.names: list[str] = []

    def program(self, length: int) -> tuple[Callable[..., Any], list[Tensor]]:
        while len(self.steps) < length:
            kind = self.r.choice(KINDS)
            k = self.r.randrange(max(0, len(self.values) - 4), len(self.values))
            made = kind(self, self.values[k])
            if made is None:
                continue
            fn, others, picks = made if len(made) == 3 else (*made, ())
            step = lambda v, ix, fn=fn, k=k, others=others, picks=picks: fn(  # noqa: E731
                v[k], *(v[o] for o in others), *(ix[i] for i in picks))
            value = step(self.values, self.indices)
            if value.numel() > 40_000 or value.dim() > 5 or not value.isfinite().all() or value.abs().max() > 1e4:
                continue
            self.steps.append(step)
            self.values.append(value)
            self.names.append(f"{kind.__name__}({k}{''.join(f', {o}' for o in others)}) {list(value.shape)}")
        # Steps read tensors by number, so inputs and every step keep their place.
        shown = sorted({len(self.values) - 1, *(self.r.randrange(2, len(self.values)) for _ in range(2))})

        def fn(*args: Tensor) -> tuple[Tensor, ...]:
            values, indices = list(args[:len(self.inputs)]), args[len(self.inputs):]
            for s in self.steps:
                values.append(s(values, indices))
            return tuple(values[k] for k in shown)

        return fn, [*self.inputs, *self.indices]


# A function, the values it takes beside the first, and the integer tensors it takes after those.
Numbers = tuple[int, ...]
Made = tuple[Callable[..., Tensor], Numbers] | tuple[Callable[..., Tensor], Numbers, Numbers] | None


def unary(g: Generator, x: Tensor) -> Made:
    fn = g.r.choice((torch.sin, torch.tanh, torch.sigmoid, torch.neg, F.relu, F.gelu, lambda t: t * 0.5 + 1,
                     lambda t: torch.exp(-t * t), lambda t: t.abs().sqrt().clamp(min=0.1), lambda t: t.square() * 0.1))
    return fn, ()


def binary(g: Generator, x: Tensor) -> Made:
    fits = [k for k, v in enumerate(g.values) if broadcastable(x, v)]
    fn = g.r.choice((torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a, b * 0.5),
                     lambda a, b: a / (1 + b.abs()), lambda a, b: a.masked_fill(b > 0, 0.25)))
    return (fn, (g.r.choice(fits),)) if fits else None


def broadcastable(a: Tensor, b: Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


def reduction(g: Generator, x: Tensor) -> Made:
    if not x.dim():
        return None
    dims = g.r.sample(range(x.dim()), g.r.randint(1, min(2, x.dim())))
    keep = g.r.random() < 0.6
    fn = g.r.choice((lambda t: t.mean(dims, keep), lambda t: t.sum(dims, keep) * 0.1, lambda t: t.amax(dims, keep),
                     lambda t: t.var(dims, correction=0, keepdim=keep), lambda t: t.logsumexp(dims, keep),
                     lambda t: t.max(dims[0], keep).values, lambda t: (t * 0.1 + 1).prod(dims[0], keep)))
    return fn, ()


def normalized(g: Generator, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = g.r.randrange(x.dim())
    return g.r.choice((lambda t: t.softmax(d), lambda t: t.log_softmax(d),
                       lambda t: F.layer_norm(t, t.shape[-1:]) if t.shape[-1] > 2 else t,
                       lambda t: t - t.mean(d, keepdim=True))), ()


def scan(g: Generator, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = g.r.randrange(x.dim())
    return g.r.choice((lambda t: t.cumsum(d) * 0.2, lambda t: t.cummax(d).values, lambda t: t.logcumsumexp(d),
                       lambda t: (1 + 0.1 * t.tanh()).cumprod(d))), ()


def view(g: Generator, x: Tensor) -> Made:
    if not x.dim():
        return (lambda t: t.expand(3)), ()
    d, e = g.r.randrange(x.dim()), g.r.randrange(x.dim())
    n = x.shape[d]
    start = g.r.randrange(n)
    order = g.r.sample(range(x.dim()), x.dim())
    regroup = factors(g, x.numel())
    shift = g.r.randint(-n, n)
    return g.r.choice((
        lambda t: t.transpose(d, e), lambda t: t.permute(order), lambda t: t.reshape(regroup),
        lambda t: t.narrow(d, start, n - start), lambda t: t.flip(d), lambda t: t.roll(shift, d),
        lambda t: t.unsqueeze(e), lambda t: t.select(d, start) if t.dim() > 1 else t, lambda t: t.flatten(),
        lambda t: t.squeeze(),
        lambda t: t[..., ::2], lambda t: t.unsqueeze(0).expand(3, *t.shape), lambda t: t.contiguous(),
        lambda t: t.diagonal(0, d, e) if d != e else t, lambda t: t.movedim(d, e), lambda t: t.clone())), ()


def factors(g: Generator, n: int) -> list[int]:
    out = []
    while n > 1 and len(out) < 3:
        f = g.r.choice([k for k in range(1, n + 1) if n % k == 0])
        out.append(f)
        n //= f
    return [*out, n] if n > 1 or not out else out


def joined(g: Generator, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = g.r.randrange(x.dim())
    before, after = g.r.randint(0, 3), g.r.randint(0, 2)
    return g.r.choice((
        lambda t: torch.cat((t, t * 2, t.flip(d)), d), lambda t: torch.stack((t, t.sin()), d),
        lambda t: F.pad(t, (before, after)), lambda t: t.repeat_interleave(2, d),
        lambda t: t.tril() if t.dim() > 1 else t, lambda t: t.repeat(*[1] * (t.dim() - 1), 2),
        lambda t: torch.cat([p.exp() if k else p for k, p in enumerate((t * 0.1).chunk(2, d))], d),
        lambda t: t.unfold(d, min(2, t.shape[d]), 1).sum(-1) * 0.5)), ()


def indexed(g: Generator, x: Tensor) -> Made:
    if not x.dim():
        return None
    d = g.r.randrange(x.dim())
    n = x.shape[d]
    whole = g.r.random() < 0.5
    g.indices.append(torch.randint(n, x.shape if whole else (g.r.choice((1, 3, 9)),), generator=g.torch))
    if whole:
        fn = g.r.choice((lambda t, i: t.gather(d, i), lambda t, i: t.scatter_add(d, i, t * 0.5),
                         lambda t, i: t.scatter_reduce(d, i, t * 2, "amax")))
    else:
        fn = g.r.choice((
            lambda t, i: t.index_select(d, i), lambda t, i: t.index_add(d, i, t.index_select(d, i) * 0.5),
            lambda t, i: t.movedim(d, 0)[i], lambda t, i: t.index_fill(d, i, 0.5),
            lambda t, i: t.movedim(d, 0)[i, ..., 0] if t.dim() > 1 else t[i]))
    return fn, (), (len(g.indices) - 1,)


def pooled(g: Generator, x: Tensor) -> Made:
    if x.dim() < 3 or min(x.shape[-2:]) < 3:
        return None
    image = lambda t: t if t.dim() < 5 else t[0]  # noqa: E731
    return g.r.choice((lambda t: F.max_pool2d(image(t), 2), lambda t: F.avg_pool2d(image(t), 3, 1, 1),
                       lambda t: F.adaptive_avg_pool2d(image(t), 2))), ()


def product(g: Generator, x: Tensor) -> Made:
    return ((lambda t: t @ t.transpose(-1, -2) * 0.1), ()) if 2 <= x.dim() <= 3 else None


KINDS = (unary, unary, binary, binary, binary, reduction, reduction, normalized, scan, view, view, view, joined,
         indexed, pooled, product)


def check(seed: int, length: int, dynamic: bool = False) -> None:
    g = Generator(seed)
    fn, inputs = g.program(length)
    compiler = lambda gm, _: compile_graph(gm)  # noqa: E731
    run = aot_function(fn, fw_compiler=compiler, bw_compiler=compiler, decompositions=table(), dynamic=dynamic,
                       partition_fn=partition)
    ours, eager = evaluate(run, inputs), evaluate(fn, inputs)
    for k, (a, b) in enumerate(zip(ours, eager, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, equal_nan=True,
                                   msg=lambda m, k=k: f"seed {seed}, result {k}: {m}\n" + "\n".join(g.names))


def evaluate(fn: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    args = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    outs = fn(*args)
    live = [o for o in outs if o.requires_grad]
    seeds = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape) for o in live]
    grads = torch.autograd.grad(live, [a for a in args if a.requires_grad], seeds, allow_unused=True) if live else ()
    return [*(o.detach() for o in outs), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(8))
def test_short_programs(seed: int, dynamic: bool) -> None:
    check(seed, 8, dynamic)


@pytest.mark.parametrize("seed", [1041, 1049, 1080])
def test_programs_that_failed_once(seed: int) -> None:
    """Strides that are differences of sizes; a backward that is given s + 1 and never s."""
    check(seed, 20, dynamic=True)


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_long_programs(seed: int, dynamic: bool) -> None:
    check(seed, 20, dynamic)

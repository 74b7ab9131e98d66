"""Functions of a tensor whose first size is known at the run alone, and may be 0 or 1: run in a process of its own.

    python empty_sizes.py quick|all [target ...]

Each family is one graph. What is written last says what was under way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.config import config

SIZES = (17, 0, 1, 3, 2)  # first many: what is compiled then must hold for few
Family = Callable[[Tensor], Any]


def places(x: Tensor, count: int) -> Tensor:
    return x[:, 0].long().abs().clamp(max=count - 1)


FAMILIES: dict[str, Family] = {
    "maps": lambda x: (x.sin() * 2, torch.where(x > 0, x, 0.0), x.long() // 3, x + torch.arange(5.0), x.double() * 2),
    "sums": lambda x: (x.sum(), x.sum(0), x.sum(1), x.mean(0), x.var(0), x.prod(0), x.norm(), (x > 0).any(),
                       (x > 0).all(0), x.logsumexp(1), x.to(torch.int8).sum(0), x.double().sum()),
    "extrema": lambda x: (x.amax(1), x.argmax(1), *x.max(1), *x.aminmax(dim=1)),
    "scans": lambda x: (x.cumsum(0), x.cumsum(1), x.cumprod(0), *x.cummax(0), *x.cummin(1), x.logcumsumexp(0),
                        x.reshape(-1).cumsum(0)),
    "softmax": lambda x: (x.softmax(0), x.softmax(1), x.log_softmax(0), x.reshape(-1).softmax(0)),
    "sorts": lambda x: (*x.sort(0), *x.sort(1), x.argsort(0), *x.topk(2, 1), *x.median(1), x.unique()),
    "norms": lambda x: (F.layer_norm(x, (5,)), F.rms_norm(x, (5,)), F.batch_norm(x, torch.zeros(5), torch.ones(5)),
                        F.group_norm(x.view(-1, 5, 1).expand(-1, 5, 3), 5)),
    "pooling": lambda x: (F.max_pool1d(x.unsqueeze(1), 2), F.avg_pool1d(x.unsqueeze(1), 3, padding=1),
                          F.adaptive_avg_pool1d(x.unsqueeze(1), 2), F.interpolate(x.unsqueeze(1), 7, mode="linear")),
    "products": lambda x: (x @ torch.ones(5, 3), x.t() @ x, F.linear(x, torch.ones(4, 5), torch.ones(4)),
                           torch.bmm(x.unsqueeze(1).expand(-1, 2, 5), x.unsqueeze(2)), torch.outer(x[:, 0], x[:, 1]),
                           (x @ x.t()).softmax(-1) @ x, torch.cdist(x, x), (x[:, None] - x[None]).abs().sum((0, 1)),
                           F.conv1d(x.unsqueeze(1), torch.ones(2, 1, 3), padding=1)),
    "gathers": lambda x: (x.gather(1, torch.zeros_like(x, dtype=torch.long)), x[:, torch.tensor([1, 3])],
                          x.index_select(1, torch.tensor([4, 0])), torch.arange(10.0)[places(x, 10)],
                          F.embedding(places(x, 4), torch.arange(12.0).view(4, 3)), x[x > 0]),
    "scatters": lambda x: (torch.zeros(5).scatter_add(0, places(x, 5), x[:, 1]),
                           torch.zeros(5).scatter_reduce(0, places(x, 5), x[:, 1], "amax"),
                           torch.zeros(6, 5).index_add(0, places(x, 6), x), x.index_fill(1, torch.tensor([0, 2]), 3.0),
                           torch.zeros(6, 5).index_put((places(x, 6),), x, accumulate=True),
                           x.scatter(1, torch.zeros((x.shape[0], 1), dtype=torch.long), 7.0)),
    "joins": lambda x: (torch.cat([x, x * 2]), torch.cat([x, x.cos()], 1), torch.stack([x, x + 1]),
                        torch.cat([torch.ones(2, 5), x, x + 1, torch.zeros(1, 5)]).sum(0), x.repeat(2, 3)),
    "shapes": lambda x: (x.roll(1, 0), x.roll(2, 1), x.roll(3), x.flip(0), x.flip(0, 1), x.rot90(), x.tril(),
                         x[::2] * 2, x.t() * 2, x.reshape(-1) * 2, x.diagonal() + 1, x[:1] + 1, x[-1:] * 2,
                         x[-2:].sum(0)),
    "pads": lambda x: (F.pad(x, (0, 0, 2, 1)), F.pad(x, (1, 1)), F.pad(x.unsqueeze(1), (2, 2), mode="reflect"),
                       F.pad(x.unsqueeze(1), (2, 2), mode="replicate"), F.pad(x.unsqueeze(1), (2, 2), mode="circular")),
    "losses": lambda x: (F.cross_entropy(x, places(x, 5), reduction="none"), F.mse_loss(x, x + 1),
                         F.nll_loss(x.log_softmax(1), places(x, 5), reduction="sum")),
    "made": lambda x: (torch.arange(x.shape[0]) * 2, torch.ones(x.shape[0], 3) * 2, torch.eye(x.shape[0]) + 1,
                       x.new_full((x.shape[0],), 3.0).sum()),
}
# What has no value of nothing: eager raises, and so does the compiled function.
REFUSED: dict[str, Family] = {
    "max": lambda x: x.max(), "min of a dimension": lambda x: x.min(0), "max of rows": lambda x: x.t().max(1),
}


def source(rows: int) -> Tensor:
    return torch.randn(40, 5, generator=torch.Generator().manual_seed(0))[:rows].clone()


def unbacked(rows: int) -> tuple[Tensor]:
    x = source(rows)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    return (x,)


def outcome(f: Callable[..., Any], *args: Any) -> Any:
    try:
        return f(*args)
    except (RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def hold(what: str, f: Callable[..., Any], compiled: Callable[..., Any], args: Callable[[int], tuple[Any, ...]],
         sizes: Sequence[int]) -> None:
    for n in sizes:
        print(f"{what} of {n}", file=sys.stderr, flush=True)
        got, want = outcome(compiled, *args(n)), outcome(f, *args(n))
        if isinstance(want, str):
            assert got == want, (got, want)
            continue
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def derived(f: Family) -> Callable[[Tensor, int], Any]:
    return lambda x, n: f(x[: n // 2])


HALF = derived(lambda x: (x.sin() * 2, x.sum(0), x.cumsum(0), x.softmax(0), x.cummax(0).values, x.reshape(-1) + 1,
                          x[-1:] * 2, x.unsqueeze(1).expand(-1, 3, -1) + 1))
LOOKUP = derived(lambda x: x[:, 0].gather(0, torch.zeros(3, dtype=torch.long)))


def check(target: str, families: Sequence[str]) -> None:
    for name in families:
        torch._dynamo.reset()
        f = {**FAMILIES, **REFUSED}[name]
        hold(f"{target}: {name}", f, torch.compile(f, backend="flambeau"), unbacked, SIZES)
    # Half of a number: torch knows its range, which may end at 1, and guards what it asked for.
    for name, f, sizes in (("half", HALF, (1, 0)), ("gather", LOOKUP, (17, 1))):
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="flambeau", dynamic=True)
        hold(f"{target}: {name}", f, compiled, lambda n: (source(40), n), sizes)


if __name__ == "__main__":
    which = ("max",) if sys.argv[1] == "quick" else (*FAMILIES, *REFUSED)
    for target in sys.argv[2:]:
        with config.override(target=target):
            check(target, which)

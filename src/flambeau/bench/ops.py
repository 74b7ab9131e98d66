"""Single operators on a million elements and more, by family: forward, and forward with backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.bench.harness import Row, compiled, timed
from flambeau.bench.models import ACTIVATIONS

F32, BF16 = torch.float32, torch.bfloat16
Make = Callable[[torch.dtype], tuple[Tensor, ...]]
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """A case. `run` takes what `make` draws and returns a tensor, or a tuple whose first element is differentiated."""

    name: str
    family: str
    make: Make
    run: Callable[..., Any]
    backward: bool = True
    dtypes: tuple[torch.dtype, ...] = (F32,)


def normal(*shape: int) -> Make:
    return lambda dtype: (torch.randn(shape).to(dtype),)


def near_one(*shape: int) -> Make:
    """Draws numbers near one, for products, which would overflow otherwise."""
    return lambda dtype: ((1 + 0.01 * torch.randn(shape)).to(dtype),)


def indexed(*shape: int, count: int, rows: int, like: bool = False) -> Make:
    """Draws values of `shape`, indices below `rows`, and as many source values as the operator takes."""
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        index = torch.randint(rows, (count, *shape[1:]) if like else (count,))
        return torch.randn(shape).to(dtype), index, torch.randn(count, *shape[1:]).to(dtype)
    return make


def bags(rows: int, dim: int, count: int, length: int) -> Make:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        total = count * length
        offsets = torch.randint(total, (count,)).sort().values
        offsets[0] = 0
        table, weights = torch.randn(rows, dim).to(dtype), torch.rand(total).to(dtype)
        return table, torch.randint(rows, (total,)), offsets, weights
    return make


def grids(*shape: int) -> Make:
    """Draws images and a jittered identity grid: neighbours read neighbours, and some points lie outside."""
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        batch, _, *space = shape
        axes = torch.meshgrid(*(torch.linspace(-1.1, 1.1, n) for n in space), indexing="ij")
        grid = torch.stack(axes[::-1], dim=-1).expand(batch, *space, len(space))
        return torch.randn(shape).to(dtype), (grid + 0.02 * torch.randn(grid.shape)).to(dtype)
    return make


SQUARE, IMAGE, VOLUME = (2048, 1024), (8, 32, 96, 96), (2, 16, 32, 64, 64)
BOTH = (F32, BF16)

CASES: list[Case] = [
    *(Case(f"{name} {where}", "scan", near_one(*SQUARE) if name == "cumprod" else normal(*SQUARE),
           lambda x, name=name, axis=axis: getattr(torch, name)(x, axis),
           dtypes=BOTH if name == "cumsum" else (F32,))
      for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
      for where, axis in (("rows", 1), ("columns", 0))),
    Case("cumsum flat", "scan", normal(1 << 21), lambda x: x.cumsum(0)),

    Case("max_pool1d", "pooling", normal(8, 64, 4096), lambda x: F.max_pool1d(x, 3, 2, 1)),
    Case("max_pool2d", "pooling", normal(*IMAGE), lambda x: F.max_pool2d(x, 3, 2, 1), dtypes=BOTH),
    Case("max_pool2d indices", "pooling", normal(*IMAGE), lambda x: F.max_pool2d(x, 2, return_indices=True)),
    Case("max_pool3d", "pooling", normal(*VOLUME), lambda x: F.max_pool3d(x, 3, 2, 1)),
    Case("avg_pool1d", "pooling", normal(8, 64, 4096), lambda x: F.avg_pool1d(x, 3, 2, 1)),
    Case("avg_pool2d", "pooling", normal(*IMAGE), lambda x: F.avg_pool2d(x, 3, 2, 1), dtypes=BOTH),
    Case("avg_pool3d", "pooling", normal(*VOLUME), lambda x: F.avg_pool3d(x, 3, 2, 1)),
    Case("adaptive_avg_pool2d", "pooling", normal(*IMAGE), lambda x: F.adaptive_avg_pool2d(x, 7)),
    Case("adaptive_max_pool2d", "pooling", normal(*IMAGE), lambda x: F.adaptive_max_pool2d(x, 7)),
    Case("max_unpool2d", "pooling",
         lambda dtype: F.max_pool2d(torch.randn(4, 32, 128, 128).to(dtype), 2, return_indices=True),
         lambda x, i: F.max_unpool2d(x, i, [2, 2])),

    *(Case(f"grid_sample2d {mode}", "sampling", grids(4, 16, 128, 128),
           lambda x, g, mode=mode: F.grid_sample(x, g, mode=mode, align_corners=False))
      for mode in ("bilinear", "nearest", "bicubic")),
    Case("grid_sample3d", "sampling", grids(1, 4, 64, 64, 64),
         lambda x, g: F.grid_sample(x, g, align_corners=False)),
    *(Case(f"upsample {mode}", "sampling",
           normal(4, 16, *((16, 32, 32) if mode == "trilinear" else (128, 128))),
           lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode),
           dtypes=BOTH if mode == "bilinear" else (F32,))
      for mode in ("nearest", "bilinear", "bicubic", "trilinear")),
    Case("pixel_shuffle", "sampling", normal(4, 64, 64, 64), lambda x: F.pixel_shuffle(x, 2)),

    Case("embedding", "embedding", indexed(20000, 64, count=16384, rows=20000),
         lambda w, i, _: F.embedding(i, w), dtypes=BOTH),
    *(Case(f"embedding_bag {mode}", "embedding", bags(20000, 64, 2048, 16),
           lambda w, i, o, _, mode=mode: F.embedding_bag(i, w, o, mode=mode))
      for mode in ("sum", "mean", "max")),
    Case("embedding_bag weights", "embedding", bags(20000, 64, 2048, 16),
         lambda w, i, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s)),

    *(Case(name, "activation", normal(*SQUARE), function,
           dtypes=BOTH if name in ("gelu", "silu", "mish") else (F32,))
      for name, function in ACTIVATIONS.items()),
    Case("prelu", "activation", lambda dtype: (torch.randn(SQUARE).to(dtype), torch.rand(1024).to(dtype)),
         F.prelu),
    Case("glu", "activation", normal(*SQUARE), F.glu),

    Case("index_select", "indexing", indexed(20000, 64, count=16384, rows=20000),
         lambda x, i, _: x.index_select(0, i)),
    Case("gather", "indexing", indexed(16384, 64, count=16384, rows=16384, like=True),
         lambda x, i, _: x.gather(0, i)),
    Case("index_add", "indexing", indexed(4096, 64, count=16384, rows=4096),
         lambda x, i, s: x.index_add(0, i, s)),
    Case("index_put add", "indexing", indexed(4096, 64, count=16384, rows=4096),
         lambda x, i, s: x.index_put((i,), s, accumulate=True)),
    Case("scatter_add", "indexing", indexed(4096, 64, count=16384, rows=4096, like=True),
         lambda x, i, s: x.scatter_add(0, i, s)),
    Case("scatter_reduce amax", "indexing", indexed(4096, 64, count=16384, rows=4096, like=True),
         lambda x, i, s: x.scatter_reduce(0, i, s, "amax")),
    Case("where", "indexing", normal(*SQUARE), lambda x: torch.where(x > 0, x, x * 0.5)),
    Case("masked_fill triangle", "indexing", normal(1024, 1024), lambda x: x.tril().masked_fill(x > 2, -1.0)),
    Case("roll and flip", "indexing", normal(*SQUARE), lambda x: x.roll(3, 1).flip(0)),
    Case("topk", "indexing", normal(*SQUARE), lambda x: x.topk(8)),

    Case("sum all", "reduction", normal(*SQUARE), lambda x: x.sum(), dtypes=BOTH),
    Case("sum rows", "reduction", normal(*SQUARE), lambda x: x.sum(1)),
    Case("sum columns", "reduction", normal(*SQUARE), lambda x: x.sum(0)),
    Case("var", "reduction", normal(*SQUARE), lambda x: x.var(1)),
    Case("amax columns", "reduction", normal(*SQUARE), lambda x: x.amax(0)),
    Case("max with index", "reduction", normal(*SQUARE), lambda x: x.max(1)),
    Case("argmax", "reduction", normal(*SQUARE), lambda x: x.argmax(1), backward=False),
    Case("prod", "reduction", near_one(*SQUARE), lambda x: x.prod(1)),
    Case("logsumexp", "reduction", normal(*SQUARE), lambda x: x.logsumexp(1)),
    Case("norm", "reduction", normal(*SQUARE), lambda x: torch.linalg.vector_norm(x, dim=1)),

    Case("softmax rows", "softmax", normal(*SQUARE), lambda x: x.softmax(1), dtypes=BOTH),
    Case("softmax columns", "softmax", normal(*SQUARE), lambda x: x.softmax(0)),
    Case("log_softmax", "softmax", normal(*SQUARE), lambda x: x.log_softmax(1)),
    Case("cross_entropy", "softmax",
         lambda dtype: (torch.randn(1024, 2048).to(dtype), torch.randint(2048, (1024,))), F.cross_entropy),

    Case("layer_norm", "norm", normal(*SQUARE), lambda x: F.layer_norm(x, (1024,)), dtypes=BOTH),
    Case("rms_norm", "norm", normal(*SQUARE), lambda x: F.rms_norm(x, (1024,))),
    Case("group_norm", "norm", normal(*IMAGE), lambda x: F.group_norm(x, 8)),
    Case("instance_norm", "norm", normal(*VOLUME), F.instance_norm),
    Case("batch_norm", "norm", normal(*IMAGE), lambda x: F.batch_norm(x, None, None, training=True)),
]


def variants(only: str | None = None) -> list[tuple[Case, torch.dtype, str]]:
    """Returns every case, with each of its dtypes and directions, whose name or family contains `only`."""
    cases = [case for case in CASES if not only or only in f"{case.family}/{case.name}"]
    return [(case, dtype, direction) for case in cases for dtype in case.dtypes for direction in DIRECTIONS
            if case.backward or direction == "forward"]


def operator_step(case: Case, inputs: tuple[Tensor, ...], direction: str, backend: str) -> Callable[[], Any]:
    run = compiled(case.run, backend)
    if direction == "forward":
        return torch.no_grad()(lambda: run(*inputs))
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    with torch.no_grad():
        sample = first(case.run(*inputs))
    tangent = torch.randn_like(sample)
    wanted = [x for x in leaves if x.requires_grad]
    # Not every case uses everything its maker draws, hence allow_unused.
    return lambda: torch.autograd.grad(first(run(*leaves)), wanted, tangent, allow_unused=True)


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def measure_op(case: Case, dtype: torch.dtype, direction: str, backends: Sequence[str],
               limit: float = 1.0) -> Row:
    torch.compiler.reset()
    torch.manual_seed(0)
    inputs = case.make(dtype)
    name = case.name if dtype == F32 else f"{case.name} bf16"
    steps = {backend: operator_step(case, inputs, direction, backend) for backend in backends}
    return timed(Row(name, case.family, direction), steps, limit)

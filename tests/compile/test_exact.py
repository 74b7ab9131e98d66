"""Eager numerics: the bits of eager's kernels, for single operators, for chains, and for a model that trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo, UnaryUfuncInfo

from flambeau.bench import chains
from flambeau.bench.bits import check_chains
from flambeau.debug import collect
from flambeau.ops import ops_loaded
from flambeau.ops.facts import is_exact
from flambeau.testing.opinfo import OPS, check_opinfo, differing

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
POINTWISE = [name for name, op in OPS.items() if isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo))]
# Examples of operators that eager numerics leave to eager's kernels, and of those that are fused around them.
OTHERS = ("sum", "softmax", "nn_functional_layer_norm", "nn_functional_dropout", "nn_functional_batch_norm", "cumsum",
          "nn_functional_avg_pool2d", "nn_functional_max_pool2d", "nn_functional_cross_entropy", "bernoulli", "norm",
          "nn_functional_embedding", "index_put", "scatter_reduce_sum", "var_mean", "uniform", "amax",
          "nn_functional_gelu", "nn_functional_silu", "lerp", "addcmul", "addcdiv", "nn_functional_group_norm", "prod",
          "cumprod")


def compiled(f: Any) -> Any:
    return torch.compile(f, backend="flambeau", options={"numerics": "eager"})


def cases(names: Any, dtypes: Any) -> list[Any]:
    return [pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=[
        pytest.mark.slow if name in OTHERS or dtype is torch.float32 else pytest.mark.sweep])
        for name in names for dtype in dtypes if dtype in OPS[name].supported_dtypes("cpu")]


@pytest.mark.parametrize(("name", "dtype"), [*cases(POINTWISE, (torch.float32, *HALF)),
                                             *cases(OTHERS, (torch.float32, torch.bfloat16))])
def test_samples_have_the_bits_of_eager(name: str, dtype: torch.dtype) -> None:
    report = check_opinfo(name, dtype, limit=4, numerics="eager")
    assert report.ok and not report.unequal, "\n".join(report.failures)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_chains_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    assert [f for f in check_chains(dtype, range(6), 4099, "cpu") if f.unequal or f.error] == []


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(100, 400, 20))
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_many_chains_have_the_bits_of_eager(dtype: torch.dtype, first: int) -> None:
    assert [f for f in check_chains(dtype, range(first, first + 20), 4099, "cpu") if f.unequal or f.error] == []


def test_a_chain_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a planted fault: the reference uses another formula for one operator."""
    name, run = chains.chain(3)
    inputs = chains.inputs_of(3, torch.float32, "cpu", 256)
    right = run(*inputs)
    for table in (chains.UNARY, chains.BINARY):
        for op in table:
            if op == name.split(", ")[-1]:
                exact = table[op]
                monkeypatch.setitem(table, op, lambda *x, f=exact: f(*x) * (1 + 2e-7))
    assert differing(run(*inputs)[1], right[1])[0] > 0


@pytest.mark.parametrize(("ours", "eager", "unequal"), [
    ([1.0, 2.0], [1.0, 2.0], (0, 0)),
    ([1.0, 2.0], [1.0, 2.0000002384185791], (1, 1)),
    ([0.0, 1.0], [-0.0, 1.0], (1, 0)),
    ([float("nan"), 1.0], [float("nan"), 1.0], (0, 0)),
    ([float("nan"), 1.0], [1.0, 1.0], (1, 0)),
    ([-1e-45, 1.0], [1e-45, 1.0], (1, 2)),
])
def test_bits_are_compared(ours: list[float], eager: list[float], unequal: tuple[int, int]) -> None:
    assert differing(torch.tensor(ours), torch.tensor(eager)) == unequal


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_sign_of_zeros_is_eagers(dtype: torch.dtype) -> None:
    def f(x: Tensor) -> Any:
        return (x.amax(1), x.max(1).values, x.max(), x.cummax(0).values, torch.relu(x), torch.maximum(x, x.flip(0)),
                x.clamp(max=0.0), torch.clamp(x, min=x.flip(1)), F.max_pool2d(x[None, None], 3, 2, 1), F.relu6(-x))

    x = torch.tensor([0.0, -0.0, -1.0], dtype=dtype)[torch.randint(3, (37, 53))]
    assert [differing(a, b)[0] for a, b in zip(compiled(f)(x), f(x), strict=True)] == [0] * 10


def test_random_numbers_and_the_generator_are_eagers() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (F.dropout(x, 0.3) * 2, torch.rand_like(x) + x, torch.randn_like(x), torch.bernoulli(x.sigmoid()),
                x.clone().exponential_(), x.clone().uniform_(-1, 1))

    x, g = torch.randn(33, 5), compiled(f)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected, state = f(x), torch.get_rng_state()
        torch.manual_seed(seed)
        got = g(x)
        assert [differing(a, b)[0] for a, b in zip(got, expected, strict=True)] == [0] * 6
        assert torch.equal(torch.get_rng_state(), state)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.batch = nn.Conv2d(3, 8, 3), nn.LayerNorm(6), nn.BatchNorm2d(8)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.drop(F.gelu(self.norm(self.batch(self.conv(x)))))
        x = F.silu(x) + F.max_pool2d(x, 3, 1, 1) / 3
        return F.cross_entropy(self.last(x.mean((2, 3))), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}), ("Adam", {"weight_decay": 0.1}), ("AdamW", {"foreach": True}),
    ("RMSprop", {"momentum": 0.5}), ("Adagrad", {}), ("AdamW", {"fused": True}), ("NAdam", {}),
    ("NAdam", {"foreach": True}), ("ASGD", {"weight_decay": 0.1}),
], ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_steps_have_the_bits_of_eager(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n, 7).to(dtype)) for n in (1, 3, 64)]
    eager = copy.deepcopy(ours)
    optimizers = [getattr(torch.optim, name)(p, lr=0.05, **options) for p in (ours, eager)]
    clip = compiled(torch.nn.utils.clip_grad_norm_)
    steps = compiled(optimizers[0].step), optimizers[1].step
    for _ in range(3):
        for p, q in zip(ours, eager, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        clip(ours, 1.0), torch.nn.utils.clip_grad_norm_(eager, 1.0)
        for step in steps:
            step()
    states = [[t for s in o.state.values() for t in s.values() if isinstance(t, Tensor)] for o in optimizers]
    pairs = zip([*ours, *states[0]], [*eager, *states[1]], strict=True)
    assert not any(differing(a.detach(), b.detach())[0] for a, b in pairs)


@pytest.mark.parametrize("weight", [0.1, 0.7, -2])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_averages_that_follow_have_the_bits_of_eager(dtype: torch.dtype, weight: float) -> None:
    """Several on a line, in a loop, and beside what only looks like one."""

    def follow(averages: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        for _ in range(2):
            torch._foreach_lerp_(averages, values, weight), torch._foreach_lerp_(averages[:1], values[:1], weight)
        steps = torch._foreach_mul(torch._foreach_sub(values, averages), weight)
        torch._foreach_add_(averages, steps)
        return [a * 2 for a in averages]

    torch.manual_seed(0)
    values = [torch.randn(n, 7).to(dtype) for n in (1, 3, 64, 517)]
    starts = [torch.randn_like(v) for v in values]
    ours, eager = ([s.clone() for s in starts] for _ in range(2))
    pairs = zip([*compiled(follow)(ours, values), *ours], [*follow(eager, values), *eager], strict=True)
    assert not any(differing(a, b)[0] for a, b in pairs)


@pytest.mark.parametrize("dtype", HALF)
def test_lists_of_which_an_element_is_left_to_eager(dtype: torch.dtype) -> None:
    """A multiple of a small float is added on the CPU by eager's kernel: then the whole list is."""

    def f(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        shifted = torch._foreach_add(torch._foreach_sqrt(xs), 1e-3)
        return torch._foreach_addcdiv(ys, torch._foreach_sub(ys, xs, alpha=0.3), shifted)

    xs, ys = ([torch.rand(n, 7).to(dtype) for n in (1, 3, 64)] for _ in range(2))
    torch._dynamo.reset()
    assert [differing(a, b)[0] for a, b in zip(compiled(f)(xs, ys), f(xs, ys), strict=True)] == [0] * 3


def updates(x: Tensor, y: Tensor, z: Tensor, scalar: Tensor) -> list[Tensor]:
    """Updates that Dynamo would decompose; with scalars and with lists, some of which are calls in half precision."""
    made = [torch.addcdiv(x, y, z, value=0.3), x.clone().addcdiv_(y, z, value=-0.3), torch.addcdiv(x, y, z),
            x.clone().addcmul_(y, z, value=0.3), x.clone().add_(y, alpha=0.7), x * scalar, x / scalar, scalar * x,
            x + scalar, *(torch.add(x, b, alpha=0.7) for b in (scalar, 0.3, y[:, :1]))]
    for f in (torch._foreach_add, torch._foreach_sub, torch._foreach_mul, torch._foreach_div):
        made += [*f([x, y], 0.3), *f([x, y], [0.3, 0.4]), *f([x], [y])]
    return [*made, *torch._foreach_mul([x, y], scalar), *torch._foreach_add([x, y], [y, x], alpha=0.3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, z = (torch.randn(37, 13).to(dtype) for _ in range(3))  # rows that are no multiple of a vector
    scalar = torch.tensor(0.3)
    ours, eager = compiled(updates)(x, y, z, scalar), updates(x, y, z, scalar)
    assert [differing(a, b)[0] for a, b in zip(ours, eager, strict=True)] == [0] * len(eager)


def test_a_scalar_is_not_rounded_before_it_multiplies() -> None:
    """In fast numerics too: eager does not, so that rounding it would make our error larger."""
    x, scalar = torch.arange(1.0, 200).bfloat16(), torch.tensor(0.3)
    ours = torch.compile(lambda x, s: (x * s, x / s), backend="flambeau")(x, scalar)
    assert all(torch.equal(a, b) for a, b in zip(ours, (x * scalar, x / scalar), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_trains_to_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    models = [Small().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    x, y = torch.randn(4, 3, 8, 8, dtype=dtype), torch.randint(0, 5, (4,))
    ends = []
    for model, run in zip(models, (models[0], compiled(models[1])), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(5)
        for _ in range(3):
            optimizer.zero_grad()
            run(x, y).backward()
            optimizer.step()
        ends.append({**model.state_dict(), "generator": torch.get_rng_state()})
    assert {name: differing(t, ends[0][name])[0] for name, t in ends[1].items()} == dict.fromkeys(ends[0], 0)


WIDE, SMALL, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(("op", "dtype", "devices"), [
    (aten.add.Tensor, WIDE, ["cpu", "cuda"]), (aten.lerp.Scalar, SMALL, ["cuda"]), (aten.sum.default, WIDE, []),
    (aten.scatter.src, WIDE, ["cpu", "cuda"]), (aten.scatter.reduce, WIDE, []),
    (aten.max.dim, SMALL, ["cpu", "cuda"]), (aten.max.default, WIDE, []), (aten.maximum.default, WIDE, ["cuda"]),
    (aten.clamp_min.Tensor, WIDE, ["cuda"]), (aten.clamp_min.default, WIDE, ["cpu", "cuda"]),
    (aten.argmax.default, SMALL, ["cpu", "cuda"]), (aten.gelu.default, WIDE, ["cuda"]),
    (aten.rand.default, WIDE, []), (aten._foreach_lerp.Scalar, WIDE, ["cpu", "cuda"]),
    (aten.native_layer_norm.default, WIDE, []), (aten.copysign.Tensor, SMALL, ["cpu", "cuda"]),
    (aten.copysign.Tensor, HALF, ["cpu"]), (aten.signbit.default, HALF, ["cpu"]),
], ids=lambda x: str(x))
def test_which_lowerings_are_exact(op: Any, dtype: torch.dtype, devices: list[str]) -> None:
    ops_loaded()
    assert [d for d in ("cpu", "cuda") if is_exact(op, d, {dtype, torch.bool})] == devices


class Normed(nn.Module):
    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.norm, self.twice = nn.BatchNorm2d(3), twice

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(x))
        return self.norm(x * 2) if self.twice else x


@pytest.mark.parametrize(("twice", "operators"), [(False, {"aten._native_batch_norm_legit.default"}),
                                                  (True, {"aten._native_batch_norm_legit_functional.default"})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_are_written_by_the_call(twice: bool, operators: set[str], dtype: torch.dtype) -> None:
    """Unless somebody else reads them before or after."""
    ours, eager = Normed(twice).to(dtype), Normed(twice).to(dtype)
    x = torch.randn(4, 3, 5, 5, dtype=dtype)
    torch._dynamo.reset()
    with collect() as seen:
        run = compiled(ours)
        for _ in range(2):
            assert not differing(run(x).detach(), eager(x).detach())[0]
    called = {str(op) for c in seen for op in c.captured.externs}
    assert operators <= called
    assert {name: differing(t, eager.state_dict()[name])[0] for name, t in ours.state_dict().items()} == dict.fromkeys(
        ours.state_dict(), 0)


@pytest.mark.parametrize("sizes", [(1, 2, 16), (1, 8, 16), (3, 5, 1), (1, 4, 40)], ids=str)
def test_calls_see_the_strides_of_eager_in_dimensions_of_size_one(sizes: tuple[int, ...]) -> None:
    """A product of one row is a dot product, whose order of sums depends on the steps that the library is given."""

    def products(x: Tensor) -> tuple[Tensor, ...]:
        v = torch.var_mean(x, 1)[0]
        return torch.addmm(v @ v.t(), v, v.t(), beta=0.5), v @ v.t()

    torch._dynamo.reset()
    run = compiled(products)
    for seed in range(8):
        x = torch.randn(sizes[:2], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))[..., None]
        x = x.expand(sizes)
        assert [differing(a, b)[0] for a, b in zip(run(x), products(x), strict=True)] == [0, 0]


def test_a_whole_number_has_no_negative_zero() -> None:
    """g++ takes the way to an integer and back for a truncation, which keeps the sign of a zero."""
    x = torch.tensor([-0.3, -0.0, 1.5, -2.5] * 5)
    for dtype in (torch.int64, torch.int32, torch.int8):
        ours = torch.compile(lambda x, d=dtype: x.to(d).to(torch.float32), backend="flambeau")(x)
        assert not ours[0].signbit() and torch.equal(ours, x.to(dtype).float())

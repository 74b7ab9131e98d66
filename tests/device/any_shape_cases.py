"""Eager operators of the device at many shapes: one program serves those of a class, and computes what the CPU does."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flambeau.cli import main
from flambeau.config import config
from flambeau.device import operators
from flambeau.device.enable import enable_device
from flambeau.eager import any_shape, one_call, usual
from flambeau.eager.kept_programs import Kept
from flambeau.eager.operator_forms import OperatorForm
from flambeau.targets.opencl.compile import ClCompiler

enable_device()
DEV = "flambeau"
ROUNDS = int(os.environ.get("FLAMBEAU_TEST_ROUNDS", "1"))
SEED = os.environ.get("FLAMBEAU_TEST_SEED", "0")
SHAPES = 4  # of a round, which are of one class


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are compiled, as they are."""
    names: list[str] = []
    compile_all = ClCompiler._compile

    def counted(self: ClCompiler, unit: Any, disk: Any) -> None:
        names.extend(kernel.symbol for kernel in unit)
        compile_all(self, unit, disk)

    monkeypatch.setattr(ClCompiler, "_compile", counted)
    return names


# ---- drawn tensors -----------------------------------------------------------------------------------------


class Draw(random.Random):
    """Ranks, layouts and which sizes are zero or one follow from the seed; other sizes from a second one, and some of
    these are one as well."""

    def __init__(self, seed: str, sizes: str) -> None:
        super().__init__(seed)
        self.sizes = random.Random(sizes)

    def size(self) -> int:
        return self.choice((0, 1, 1, *[self.other(30)] * 12))

    def large(self, least: int, most: int) -> int:
        return max(least, self.other(most)) if most > 1 else most

    def other(self, most: int) -> int:
        large = self.sizes.randint(2, most)
        return 1 if self.sizes.random() < 0.15 else large

    def shape(self, least: int = 1, most: int = 4) -> list[int]:
        return [self.size() for _ in range(self.randint(least, most))]

    def tensor(self, shape: list[int], dtype: torch.dtype = torch.float32, high: int = 0) -> torch.Tensor:
        """On the CPU, of some layout: packed in an order, with gaps, or with elements that share places."""
        rank = len(shape)
        order = self.choice((list(range(rank)), self.sample(range(rank), rank), [0, *range(2, rank), 1][:rank]))
        outer = [shape[d] + self.choice((0, 0, 0, 3)) for d in order]
        if self.random() < 0.15 and rank:
            outer[self.randrange(rank)] = 1
        made = torch.randint(0, high, outer) if high else torch.randn(outer, dtype=torch.float64)
        made = made.to(dtype)[tuple(slice(0, shape[d]) for d in order)].expand([shape[d] for d in order])
        return made.permute([order.index(d) for d in range(rank)])

    def broadcast(self, shape: list[int]) -> list[int]:
        return [1 if self.random() < 0.2 else n for n in shape][self.choice((0, 0, 0, 1)):]


def moved(x: Any) -> Any:
    """The same tensors on the device, with the same strides."""
    if isinstance(x, (list, tuple)):
        return type(x)(moved(y) for y in x)
    if not isinstance(x, torch.Tensor):
        return x
    span = 0 if x.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((span,), (1,)).to(DEV)
    return memory.as_strided(x.shape, x.stride())


Case = Callable[[Draw], tuple[Callable[..., Any], tuple[Any, ...]]]


def unary(function: Callable[..., Any], *rest: Any) -> Case:
    return lambda d: (function, (d.tensor(d.shape()), *rest))


def binary(function: Callable[..., Any], count: int = 2) -> Case:
    def case(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        shape = d.shape()
        return function, tuple(d.tensor(shape if k == 0 else d.broadcast(shape)) for k in range(count))

    return case


def along(function: Callable[..., Any], *rest: Any) -> Case:
    """With a dimension."""

    def case(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        x = d.tensor(d.shape())
        return function, (x, d.randrange(-x.dim(), x.dim()), *rest)

    return case


def where(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape = d.shape()
    return torch.where, (d.tensor(shape, torch.bool, 2), d.tensor(d.broadcast(shape)), d.tensor(shape))


def cat(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape = d.shape()
    dim = d.randrange(len(shape))
    return torch.cat, ([d.tensor([d.size() if k == dim else n for k, n in enumerate(shape)]) for _ in range(2)], dim)


def product(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    m, k, n = d.size(), d.size(), d.size()
    batch = d.choice(([], [], [d.size()]))
    return torch.matmul, (d.tensor([*batch, m, k]), d.tensor([*batch, k, n]))


def linear(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    k, n = d.size(), d.size()
    return F.linear, (d.tensor([*d.shape(1, 2), k]), d.tensor([n, k]), d.tensor([n]))


def convolution(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    cin, cout = d.large(1, 5), d.large(1, 5)
    return F.conv2d, (d.tensor([d.large(1, 3), cin, d.large(3, 9), d.large(3, 9)]),
                      d.tensor([cout, cin, 3, 3]), d.tensor([cout]), 1, 1)


def image(function: Callable[..., Any], *rest: Any) -> Case:
    return lambda d: (function, (d.tensor([d.large(1, 3), d.large(1, 4), d.large(2, 9), d.large(2, 9)]), *rest))


def layer_norm(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape = [*d.shape(1, 2), max(d.size(), 1)]
    return F.layer_norm, (d.tensor(shape), shape[-1:], d.tensor(shape[-1:]), d.tensor(shape[-1:]))


def group_norm(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return F.group_norm, (d.tensor([d.large(1, 3), 2 * d.large(1, 3), d.large(1, 9)]), 2)


def indexed(function: Callable[..., Any], values: bool = False) -> Case:
    """With an index for each element."""

    def case(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        shape = [max(n, 1) for n in d.shape(1, 3)]
        dim = d.randrange(len(shape))
        few = [d.large(1, n) for n in shape]
        index = d.tensor(few, torch.int64, shape[dim])
        return function, (d.tensor(shape), dim, index, *([d.tensor(few)] if values else []))

    return case


def placed(d: Draw, function: Callable[..., Any], values: bool = True) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """With indices of some dimensions, which are broadcast to each other, and values that are broadcast to them."""
    shape = [max(n, 1) for n in d.shape(2, 4)]
    used = sorted(d.sample(range(len(shape)), d.randint(1, 2)))
    common = [max(n, 1) for n in d.shape(1, 2)]
    indices = tuple(d.tensor(d.broadcast(common), torch.int64, shape[k]) if k in used else None
                    for k in range(used[-1] + 1))
    result = torch.empty(shape)[tuple(slice(None) if i is None else i for i in indices)].shape
    given = d.tensor(d.broadcast([*result]))
    return function, (d.tensor(shape), indices, *([given] if values else []))


def taken(x: torch.Tensor, indices: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    return x[tuple(slice(None) if i is None else i for i in indices)]


def put(x: torch.Tensor, indices: tuple[torch.Tensor | None, ...], values: torch.Tensor) -> torch.Tensor:
    """The last value at a place stays, on the CPU; where several would be, they are made one."""
    out = x.clone()
    out[tuple(slice(None) if i is None else i for i in indices)] = values[(0,) * values.dim()]
    return out


def joined(x: torch.Tensor, indices: tuple[torch.Tensor | None, ...], values: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_put(x, indices, values, True)


def selected(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape = [max(n, 1) for n in d.shape(1, 3)]
    dim = d.randrange(len(shape))
    return torch.index_select, (d.tensor(shape), dim, d.tensor([d.size()], torch.int64, shape[dim]))


def embedding(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rows = d.large(1, 20)
    return F.embedding, (d.tensor(d.shape(1, 2), torch.int64, rows), d.tensor([rows, d.size()]))


def copied(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape = d.shape()
    given = d.tensor(d.broadcast(shape), d.choice((torch.float32, torch.int32)))
    return lambda x, y: x.contiguous().copy_(y), (d.tensor(shape), given)


def into(d: Draw) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`out` is resized, or has another layout."""
    shape = d.shape()
    out = torch.empty(d.choice((shape, shape[::-1], [0])))
    return lambda x, out: torch.exp(x, out=out), (d.tensor(shape), out)


CASES: dict[str, Case] = {
    "neg": unary(torch.neg), "gelu": unary(F.gelu), "clamp": unary(torch.clamp, -0.5),
    "to int": unary(torch.Tensor.to, torch.int32), "relu_": unary(lambda x: x.contiguous().relu_()),
    "add": binary(torch.add), "mul": binary(torch.mul),
    "lt": binary(torch.lt), "atan2": binary(torch.atan2), "addcmul": binary(torch.addcmul, 3),
    "lerp": binary(torch.lerp, 3), "where": where, "masked_fill": lambda d: (torch.masked_fill, (
        d.tensor(shape := d.shape()), d.tensor(d.broadcast(shape), torch.bool, 2), -1.5)),
    "sum": along(torch.sum), "amax": along(torch.amax), "argmax": along(torch.argmax),
    "var": along(torch.var), "keepdim": along(torch.sum, True), "sum all": unary(torch.sum),
    "logsumexp": along(torch.logsumexp), "softmax": along(torch.softmax),
    "cumsum": along(torch.cumsum), "max": along(torch.max), "cat": cat,
    "stack": lambda d: (torch.stack, ([d.tensor(shape := d.shape(1, 3)), d.tensor(shape)], 1)),
    "roll": along(lambda x, dim: x.roll(1, dim)),
    "pad": unary(F.pad, (1, 2)), "contiguous": unary(torch.Tensor.contiguous),
    "tril": lambda d: (torch.tril, (d.tensor(d.shape(2, 3)),)), "repeat": unary(lambda x: x.repeat(*(2,) * x.dim())),
    "gather": indexed(torch.gather), "scatter_add": indexed(torch.scatter_add, True), "index_select": selected,
    "index": lambda d: placed(d, taken, values=False), "index_put": lambda d: placed(d, put),
    "index_put, joined": lambda d: placed(d, joined),
    "embedding": embedding, "copy_": copied, "out=": into, "matmul": product, "linear": linear,
    "conv2d": convolution, "max_pool2d": image(F.max_pool2d, 2), "avg_pool2d": image(F.avg_pool2d, 2),
    "upsample": image(lambda x: F.interpolate(x, scale_factor=2.0)), "layer_norm": layer_norm, "group_norm": group_norm,
    "sort": along(torch.sort), "arange": lambda d: (lambda n, x: torch.arange(n, device=x.device), (
        d.size(), torch.ones(1))),
}


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        made = function(*args)
    except Exception as error:
        return error
    return list(made) if isinstance(made, (list, tuple)) else [made]


@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(name: str) -> None:
    """Values, strides and errors, at sizes and layouts of all kinds."""
    torch.manual_seed(0)
    for k in range(ROUNDS * SHAPES):
        function, args = CASES[name](Draw(f"{SEED} {name} {k // SHAPES}", f"{SEED} {k}"))
        given = [(list(t.shape), t.stride()) for x in args for t in (x if isinstance(x, list) else [x])
                 if isinstance(t, torch.Tensor)]
        there = moved(args)
        wanted, got = outcome(function, args), outcome(function, there)
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            assert type(wanted) is type(got), f"{given}: {wanted} {got}"
            continue
        for a, b in zip(wanted, got, strict=True):
            torch.testing.assert_close(b.cpu(), a, rtol=2e-5, atol=2e-5, equal_nan=True,
                                       msg=f"{given}: values differ")
            assert a.numel() == 0 or b.stride() == a.stride(), (
                f"{given}: {b.stride()} for {a.stride()}")


# ---- how many kernels there are -----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [
    lambda a, b: a + b[0], lambda a, b: a.softmax(-1), lambda a, b: torch.cat([a, b], 1), lambda a, b: a @ b.t(),
], ids=["add", "softmax", "cat", "mm"])
def test_fifty_shapes(kernels: list[str], function: Callable[..., torch.Tensor]) -> None:
    d = random.Random(7)
    for _ in range(50):
        shape = [d.randint(2, 40), d.randint(2, 40)]
        x, y = torch.rand(2, *shape)
        torch.testing.assert_close(function(x.to(DEV), y.to(DEV)).cpu(), function(x, y))
    assert len({*kernels}) <= 3, kernels


def test_dimensions_that_are_one_row(kernels: list[str]) -> None:
    """Elementwise kernels serve any number of dimensions, and any of size one."""
    for shape in ((4, 5), (3, 2, 7), (1, 9), (40,), (2, 1, 3, 2)):
        x, there = torch.rand(shape), torch.rand(shape).to(DEV)
        got = there.copy_(x).mul(there).sub_(there)
        torch.testing.assert_close(got.cpu(), x * x - x)
        assert got.stride() == x.stride()
    assert len({*kernels}) <= 6


def test_decoding_with_a_growing_cache(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a compiler after the fourth token; what always has one shape gets kernels in the background."""
    monkeypatch.setattr(operators.PROGRAMS, "hot", lambda *call: None)
    torch.manual_seed(0)
    heads, width = 3, 8
    weights = [torch.randn(heads * width, heads * width) / 5 for _ in range(4)]

    def token(weights: list[torch.Tensor], x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = ((x @ w).view(1, heads, 1, width) for w in weights[:3])
        cache[:] = [torch.cat([old, new], 2) for old, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
        length = cache[0].shape[2]
        seen = torch.arange(length, device=x.device) >= length - 6
        scores = (q @ cache[0].transpose(2, 3)) * width ** -0.5
        weighted = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ cache[1]
        return F.layer_norm(F.gelu(weighted.reshape(1, heads * width) @ weights[3]), (heads * width,)) + x

    start, there = torch.randn(1, heads * width), [w.to(DEV) for w in weights]
    wanted, got = start, start.to(DEV)
    caches: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for n in range(24):
        wanted, got = token(weights, wanted, caches[0]), token(there, got, caches[1])
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)
        if n == 3:
            kernels.clear()
    assert not kernels


def test_the_tables_are_bounded() -> None:
    for n in range(2, 1200):
        torch.full((n,), 1.5, device=DEV)
    assert max(operators.load().entries(k) for k in range(len(operators._FORMS))) <= 1024
    assert len(operators.PROGRAMS._classes) <= any_shape.MOST_CLASSES


def test_a_shape_that_many_calls_have(kernels: list[str]) -> None:
    """It gets a program of its own after a number of calls, which computes the same."""
    torch.rand(5, 9, device=DEV).logsumexp(0)
    x = torch.rand(7, 11)
    there = x.to(DEV)
    counts = []
    for _ in range(200):
        y = there.logsumexp(0)
        counts.append(len(kernels))
        torch.testing.assert_close(y.cpu(), x.logsumexp(0))
    assert counts[0] == counts[60] and counts[127] == counts[-1] == counts[0] + 1


def test_a_number_that_many_calls_have(kernels: list[str]) -> None:
    """A row is as fast at any size. Of numbers that change from call to call, one that many have gets a program."""
    x = torch.rand(30)
    there = x.to(DEV)
    counts = []
    for k in range(200):
        for power in (2.0, 3.0):
            torch.testing.assert_close(there[:k % 3 + 9].pow(power).cpu(), x[:k % 3 + 9].pow(power))
        counts.append(len(kernels))
    assert counts[0] == counts[60] == 2
    for _ in range(200):
        torch.testing.assert_close(there.pow(3.0).cpu(), x.pow(3.0))
    assert len(kernels) == 3


def test_numbers_that_change_with_the_shape(kernels: list[str]) -> None:
    for n in range(2, 12):
        x = torch.rand(n)
        torch.testing.assert_close((x.to(DEV) / (n + 0.5)).cpu(), x / (n + 0.5))
    assert len(kernels) <= 4


def test_strides_where_numbers_change() -> None:
    """A program whose numbers are arguments asks eager for strides with some number."""
    for shape in ((10, 3, 1, 1), (4, 3, 8, 8), (7, 3, 1, 1), (5, 1, 4, 4)):
        x = torch.rand(shape, dtype=torch.float64).to(memory_format=torch.channels_last)
        for n in (3, 5, 7, 11):
            got = x.to(DEV) * n
            assert got.stride() == (x * n).stride(), (shape, n)
            torch.testing.assert_close(got.cpu(), x * n)


def test_roots_where_exponents_change() -> None:
    x = torch.tensor([-math.inf, math.inf, -0.0, 0.0, -1.0, 4.0, math.nan])
    for e in (0.3, 0.5, 0.7, -0.5, -1.5):
        torch.testing.assert_close(1 / (x.to(DEV) ** e).cpu(), 1 / x**e, equal_nan=True)


def test_the_operators_that_are_made_for_one_shape() -> None:
    """All others that ran here are made for many."""
    assert {*any_shape.FIXED} <= {"aten.addcmul", "aten.lerp.Tensor"}, any_shape.FIXED


def test_sizes_that_do_not_fit_together() -> None:
    """An operator that trusts its caller: torch's rule for its result does not look at all sizes, its kernel does."""
    def call(indices: tuple[int, ...], device: str) -> torch.Tensor:
        x, grad = torch.rand(indices[0], 3, 6, 6, device=device), torch.rand(indices[0], 3, 2, 2, device=device)
        return torch.ops.aten.adaptive_max_pool2d_backward(grad, x, torch.zeros(indices, dtype=torch.int64).to(device))

    for n in range(2, 5):
        assert call((n, 3, 2, 2), DEV).shape == (n, 3, 6, 6)
    for wrong in ((4, 3, 2, 3), (6, 4, 2, 2), (7, 3, 2, 3)):
        with pytest.raises(RuntimeError) as wanted:
            call(wrong, "cpu")
        with pytest.raises(RuntimeError) as got:
            call(wrong, DEV)
        assert str(got.value) == str(wanted.value)


def test_a_new_shape_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(n: int) -> torch.Tensor:
        grad, result = torch.rand(2, n, 7)
        return torch.ops.aten._softmax_backward_data(grad.to(DEV), result.to(DEV), 1, torch.float32)

    for n in range(5, 8):
        call(n)
    monkeypatch.setattr(one_call, "graph_of", None)
    assert call(9).shape == (9, 7)


# ---- kept on disk ------------------------------------------------------------------------------------------


def test_a_later_process_lowers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one with a program that takes numbers, or indices."""
    def calls(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.softmax(-1), x * 2.5, x.clone().mul_(3.5), x.t().contiguous(), x.gather(0, x.long()), x.sum(0)]

    monkeypatch.setattr(any_shape, "FIXED", {})
    x, y = torch.rand(6, 7), torch.rand(5, 9)
    with config.override(verify=False, graph_cache=True):
        calls(x.to(DEV))
        monkeypatch.setattr(operators, "PROGRAMS", any_shape.Programs())
        monkeypatch.setattr(any_shape, "made", None)
        torch.testing.assert_close([t.cpu() for t in calls(y.to(DEV))], calls(y))
    assert not any_shape.FIXED


def test_warming(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--only", "norms"]) == 0
    assert "1 parts of models on flambeau" in capsys.readouterr().out
    assert main(["warm", "--only", "weather"]) == 1
    assert main(["warm", "--dtype", "int32"]) == 1


def test_a_model_at_many_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels an operator, whatever the batch and the length."""
    built: Counter[str] = Counter()

    def counted(form: OperatorForm, *call: Any, **options: Any) -> Any:
        made = one_call.build(form, *call, **options)
        built[form.name] += 1
        return made

    monkeypatch.setattr(any_shape, "build", counted)
    monkeypatch.setattr(operators, "PROGRAMS", any_shape.Programs())
    monkeypatch.setattr(Kept, "places", lambda self: [])
    sizes = random.Random(3)
    for _ in range(8):
        place = usual.Place(torch.device(DEV), torch.float32, ((sizes.randint(2, 5), sizes.randint(2, 40)),))
        usual.USUAL["words"](place)
        (batch, length), = place.sizes
        q, k, v = usual.data(place, batch, length, 3, 4, 12).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        (made * made).sum().backward()
    assert max(built.values()) <= 3, built

"""Kernels of products in Triton's interpreter: every way to divide tiles among programs, and all that follows a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from agreement import agree, through
from flambeau.capture.decompositions import table
from flambeau.codegen.source import TensorMap
from flambeau.codegen.triton.tensor_cores import contractions
from flambeau.config import config
from flambeau.ir.program import ContractKernel
from flambeau.ir.tuning import ProductTile
from flambeau.pipeline import Compiled, compile_graph
from flambeau.targets.cuda import interpreter

DOUBLE, HALF = torch.float64, torch.bfloat16
SMALL = ProductTile(64, (16,), 128, 3, 4)
TILES = {"once": ProductTile(64, (32, 16), 128, 3, 4), "turns": ProductTile(64, (32,), 128, 3, 4, ends=2),
         "roles": ProductTile(128, (16,), 128, 3, 4), "shares": ProductTile(64, (16, 32), 128, 2, 4),
         "pieces": ProductTile(64, (32, 16), 128, 3, 4)}


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interpreter, "UNITS", 5)
    with config.override(target="interpreter", contractions="own", verify="passes"):
        yield


@pytest.fixture(params=[*TILES])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, request.param, TILES[request.param])
    return str(request.param)


@pytest.fixture(params=["pointers", "engine"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors that come by pointers alone, and by the copy engine where it can read them."""
    if request.param == "pointers":
        monkeypatch.setattr(TensorMap, "there", lambda *_: False)


def use(monkeypatch: pytest.MonkeyPatch, way: str, tile: ProductTile) -> None:
    monkeypatch.setattr(contractions, "WAYS", (way,))
    monkeypatch.setattr(contractions, "TILES", (tile,))


def random(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b.t()


def compiled(fn: Callable[..., Any], *args: torch.Tensor) -> Compiled:
    def several(*given: torch.Tensor) -> list[torch.Tensor]:
        made = fn(*given)
        return list(made) if isinstance(made, tuple) else [made]

    graph = make_fx(several, tracing_mode="fake", decomposition_table=table(False))(*args)
    made: Compiled = compile_graph(graph).compiled
    assert not made.captured.externs
    return made


def check(fn: Callable[..., Any], *args: torch.Tensor, kernels: int | None = 1, rtol: float = 1e-2) -> Compiled:
    """Against float64, by norms; `kernels`: how many there are, a product's first."""
    made = compiled(fn, *args)
    wanted = fn(*(a.double() if a.is_floating_point() else a for a in args))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for got, want in zip(made.finish()(list(args)), wanted, strict=True):
        assert got.shape == want.shape
        assert (got.double() - want.double()).norm() <= rtol * want.double().norm() + 1e-12
    assert kernels is None or len(made.program.kernels) == kernels
    return made


@pytest.mark.parametrize("sizes", [(150, 70, 64), (65, 49, 1000), (64, 48, 2048), (70, 50, 333), (1, 40, 300),
                                   (9, 1, 77)])
def test_sizes(way: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    made = check(lambda a, b: torch.tanh(product(a, b)), random(m, k), random(n, k), kernels=None)
    if min(m, n) > 1:
        assert len(made.program.kernels) == 1 and isinstance(made.program.kernels[0], ContractKernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF, DOUBLE])
def test_dtypes_are_exact_where_sums_are(way: str, access: None, dtype: torch.dtype) -> None:
    a, b = (torch.randint(-3, 4, (n, 1032)).to(dtype) for n in (70, 40))
    (got,) = compiled(product, a, b).finish()([a, b])
    assert torch.equal(got, product(a.double(), b.double()).to(dtype))


def test_int8(way: str, access: None) -> None:
    a, b = (torch.randint(-128, 128, (n, 520), dtype=torch.int8) for n in (24, 16))
    (got,) = compiled(lambda a, b: torch._int_mm(a, b.t()), a, b).finish()([a, b])
    assert torch.equal(got, product(a.long(), b.long()).int())


def test_layouts(way: str, access: None) -> None:
    a, b = random(520, 72), random(520, 40)
    check(lambda a, b: a.t() @ b, a, b)
    check(lambda a, b: a[::2].t() @ b[1::2], a, b)
    check(lambda a, b: a.t()[:33, :515] @ b[:515, 3:20], a, b)
    check(torch.bmm, random(3, 70, 264), random(3, 264, 41))
    check(lambda a, b: torch.bmm(a.transpose(1, 2), b), random(2, 264, 70), random(2, 264, 24))


def test_nothing_and_one(way: str) -> None:
    for m, n, k in (0, 5, 40), (5, 0, 40), (5, 7, 0), (5, 7, 1):
        a, b = random(m, k), random(n, k)
        (got,) = compile_graph(make_fx(lambda a, b: [product(a, b)], tracing_mode="fake")(a, b))([a, b])
        torch.testing.assert_close(got, product(a, b))


def test_sizes_of_the_run(way: str) -> None:
    run = through(lambda a, b: product(a, b).relu(), dynamic=True)
    for rows, columns, depth in (70, 40, 520), (33, 25, 260), (2, 3, 100), (5, 40, 1001), (4, 9, 0):
        a, b = random(rows, depth, dtype=DOUBLE), random(columns, depth, dtype=DOUBLE)
        torch.testing.assert_close(run(a, b), product(a, b).relu())


def test_gradients(way: str) -> None:
    agree(lambda a, b: torch.sigmoid(product(a, b)), random(70, 200, dtype=DOUBLE).requires_grad_(),
          random(40, 200, dtype=DOUBLE).requires_grad_())


@pytest.mark.parametrize("way", ["shares", "pieces"])
def test_sums_of_several_programs_are_the_same_each_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, way, TILES[way])
    a, b = random(70, 3000, dtype=torch.float32), random(40, 3000, dtype=torch.float32)
    run = compiled(product, a, b).finish()
    assert torch.equal(run([a, b])[0], run([a, b])[0])
    text = compiled(product, a, b).texts[0]
    assert text.signals == (way == "shares") and not text.cleared and "atomic" not in text.text
    assert len(text.parts) == (2 if way == "pieces" else 1) and all(part.waits for part in text.parts)


# ---- what follows --------------------------------------------------------------------------------------------

TAILS: dict[str, Callable[..., Any]] = {
    "bias of columns": lambda x, w, b, r: F.linear(x, w, b),
    "bias of rows": lambda x, w, b, r: product(x, w) + r[:, :1],
    "residual": lambda x, w, b, r: r + torch.tanh(F.linear(x, w, b)),
    "gelu": lambda x, w, b, r: F.gelu(F.linear(x, w, b)),
    "gelu tanh": lambda x, w, b, r: F.gelu(F.linear(x, w, b), approximate="tanh"),
    "several results": lambda x, w, b, r: ((y := F.linear(x, w, b)), F.silu(y), torch.exp(-y.abs()).float()),
    "broadcast and cast": lambda x, w, b, r: (torch.sigmoid(product(x, w)) * b).float(),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails_are_in_the_kernel(way: str, name: str) -> None:
    check(TAILS[name], random(70, 136), random(50, 136), random(50), random(70, 50))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf, "silu": F.silu, "gelu": F.gelu}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_halves_are_as_exact_as_halves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "once", SMALL)
    ends = torch.tensor([0.0, -0.0, 1e-4, -1e-4, 1e-7, 60000, -60000, float("nan")])
    x, b = torch.cat([torch.linspace(-9, 9, 4096 - len(ends)), ends]).half(), torch.ones(16, 16, dtype=torch.float16)
    a, function = F.pad(x[:, None], (0, 15)), FUNCTIONS[name]  # sums of one element and zeros are exact
    made = compiled(lambda a, b: function(a @ b), a, b)
    assert "rough_" in made.texts[0].text
    got, want = made.finish()([a, b])[0][:, 0].double(), function(x.double())
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().sum() == 1
    off = ((got - want).abs() / want.abs().clamp_min(2e-4)).nan_to_num()
    assert off.max() <= 2 ** -11 + (8e-4 if name == "gelu" else 2e-5)  # gelu: 1 + erf loses digits, as in eager


@pytest.mark.parametrize("activation", [F.silu, F.gelu, torch.sigmoid])
def test_gated_units_are_one_kernel(way: str, activation: Callable[..., torch.Tensor]) -> None:
    if way in ("turns", "roles"):
        pytest.skip("two sums are not summed in turns")
    made = check(lambda x, a, b, c: activation(F.linear(x, a, c)) * product(x, b), random(70, 136), random(50, 136),
                 random(50, 136), random(50))
    assert len(made.program.kernels[0].products) == 2
    assert made.texts[0].text.count("tl.dot") == 2 * len(TILES[way].wides)


def test_products_of_other_shapes_stay_apart() -> None:
    made = compiled(lambda x, a, b: product(x, a)[:, :40] * product(x, b), random(70, 136), random(50, 136),
                    random(40, 136))
    assert all(len(k.products) == 1 for k in made.program.kernels if isinstance(k, ContractKernel))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "amax of all": lambda y: y.float().abs().amax(),
    "amax of rows": lambda y: y.float().amax(-1),
    "sum of columns": lambda y: y.float().reshape(-1, y.shape[-1]).sum(0),
    "squares of rows": lambda y: (y.float() ** 2).sum(-1),
}


@pytest.mark.parametrize("rows", [(150,), (3, 50)])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("way", ["once", "shares"])
def test_results_are_reduced_tile_by_tile(way: str, name: str, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
                                          ) -> None:
    use(monkeypatch, way, ProductTile(128, (64, 64), 128, 2, 4))
    made = check(lambda x, w, b: ((y := F.linear(x, w, b).relu()), REDUCTIONS[name](y)), random(*rows, 200),
                 random(200, 200), random(200), kernels=2)
    assert len(made.program.kernels[0].reductions) == 1


def test_a_batch_is_reduced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "once", ProductTile(64, (64,), 128, 2, 4))
    check(lambda a, b: ((y := torch.bmm(a, b)), y.float().abs().amax(), y.float().abs().amax((1, 2))),
          random(3, 70, 64), random(3, 64, 80), kernels=None)


def test_nan_is_seen_by_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "once", ProductTile(64, (64,), 128, 2, 4))
    x, w = random(70, 64), random(80, 64)
    x[69, 3] = float("nan")
    made, largest = compiled(lambda x, w: ((y := product(x, w)), y.float().abs().amax()), x, w).finish()([x, w])
    assert largest.isnan() and made[69].isnan().all() and not made[:69].isnan().any()


def test_a_reduction_of_a_part_of_the_rows_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "once", ProductTile(64, (64,), 128, 2, 4))
    made = check(lambda x, w: ((y := product(x, w)), y.float().view(7, 10, 80).sum(1)), random(70, 64), random(80, 64),
                 kernels=None)
    assert not made.program.kernels[0].reductions


# ---- before the product ----------------------------------------------------------------------------------------


def test_few_rows_read_weights_as_they_are_stored(way: str) -> None:
    x, scale, w = random(40, 136), random(70), torch.randint(-9, 9, (70, 136), dtype=torch.int8)
    check(lambda x, w, s: product(x, w.to(x.dtype) * s[:, None]), x, w, scale)
    check(lambda x, w, s: product(x, (w.to(x.dtype) - s[:, None]) * s[:, None]), x, w, scale)
    many = check(lambda x, w, s: product(x, w.to(x.dtype) * s[:, None]), random(200, 136), w, scale, kernels=2)
    assert isinstance(many.program.kernels[1], ContractKernel)  # which would compute each of them again and again

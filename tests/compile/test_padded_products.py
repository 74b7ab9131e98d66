"""Products with padded rows: eager's values and strides, and no more copies than needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.compile import partition
from flambeau.compile.padded_products import pad_products, product_of
from flambeau.config import config
from flambeau.ir.tuning import BLOCKS
from flambeau.ops.facts import facts
from flambeau.targets.cpu.target import CpuTarget

ALWAYS = {"product_line": 16, "product_rate_else": 1, "memory_rate": 10**9, "launch": 0}
SLOW = replace(BLOCKS, **ALWAYS)


@pytest.fixture(autouse=True)
def padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Graph]]:
    """The rewritten graphs, with a CPU target for which every unpadded product is slow."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    known, seen = CpuTarget.capabilities, []

    def capabilities(self: Any) -> Any:
        told = known(self)
        return replace(told, tuning=replace(told.tuning, **ALWAYS))

    def observed(graph: fx.Graph, tuning: Any) -> None:
        pad_products(graph, tuning)
        graph.lint()
        seen.append(graph)

    monkeypatch.setattr(CpuTarget, "capabilities", capabilities)
    monkeypatch.setattr(partition, "pad_products", observed)
    monkeypatch.setattr("flambeau.compile.padded_products.pad_products", observed)
    with config.override(graph_cache=False):
        yield seen


def names(graph: fx.Graph) -> list[str]:
    return [n.target.__name__.partition(".")[0] for n in graph.nodes if n.op == "call_function"]


def sizes(graph: fx.Graph) -> list[list[int]]:
    """The sizes of the factors and the result of each product."""
    products = [n for n in graph.nodes if n.op == "call_function" and "mm" in n.target.__name__]
    return [[m for x in (*n.args, n) if isinstance(x, fx.Node) for m in x.meta["val"].shape] for n in products]


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def trained(f: Callable[..., Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    out = f(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1) / 64)]


CASES: list[tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = [
    ("columns", lambda x, w: x @ w, ((16, 8), (8, 13))),
    ("depth", lambda x, w: x @ w, ((16, 13), (13, 8))),
    ("rows lie across", lambda x, w: x.t() @ w, ((8, 13), (8, 16))),
    ("all", lambda x, w: x @ w, ((5, 13), (13, 3))),
    ("linear", lambda x, w, b: F.linear(x, w, b), ((2, 4, 8), (13, 8), (13,))),
    ("addmm", lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2), ((16, 13), (16, 9), (9, 13))),
    ("one addend", lambda c, x, w: torch.addmm(c, x, w), ((16, 1), (16, 9), (9, 13))),
    ("bmm", lambda x, w: x @ w, ((2, 16, 9), (2, 9, 13))),
    ("baddbmm", lambda c, x, w: torch.baddbmm(c, x.mT, w), ((2, 1, 13), (2, 9, 16), (2, 9, 13))),
    ("viewed", lambda x, w: (x @ w).view(-1).sin(), ((16, 8), (8, 13))),
    ("of a view", lambda x, w: (x * 2)[1:, 2:].t() @ w, ((9, 15), (8, 16))),
    ("transposed result", lambda x, w: (x @ w).t(), ((16, 8), (8, 13))),
    ("two readers", lambda x, w: (x.sin() @ w).sum() + x.sin(), ((16, 13), (13, 8))),
    ("chain", lambda x, w: torch.relu(x @ w) @ w.t(), ((16, 8), (8, 13))),
]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride() and a.dtype is b.dtype and a.storage_offset() == 0
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(("f", "shapes"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_values_and_strides_are_eagers(f: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]) -> None:
    """Of forward and backward in one graph."""
    given = tuple(of(*s) for s in shapes)
    gm = make_fx(lambda *xs: trained(f, xs), tracing_mode="fake")(*given)
    pad_products(gm.graph, SLOW)
    gm.graph.lint()
    gm.recompile()
    same(gm(*given), trained(f, given))
    for n in gm.graph.nodes:
        if n.op == "call_function" and facts(n.target).factors is not None:
            assert product_of(n, SLOW) is None, "a line is not whole"


@pytest.mark.parametrize("name", ["linear", "viewed", "transposed result", "two readers"])
def test_compiled(name: str, padding: list[fx.Graph]) -> None:
    f, shapes = next(c[1:] for c in CASES if c[0] == name)
    given = tuple(of(*s) for s in shapes)
    same(trained(torch.compile(f, backend="flambeau"), given), trained(f, given))
    assert any("constant_pad_nd" in names(graph) for graph in padding)


@pytest.mark.parametrize(("dtype", "precision", "unit"), [
    (torch.float16, "highest", 8), (torch.float32, "high", 4), (torch.float32, "highest", 0),
    (torch.float64, "high", 0)])
def test_which_dtypes(dtype: torch.dtype, precision: str, unit: int, padding: list[fx.Graph]) -> None:
    """TensorFloat-32 has lines of 16 bytes; what tensor cores do not take is left alone."""
    x, w = of(4, 8, dtype=dtype), of(8, 9, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        torch.testing.assert_close(torch.compile(torch.mm, backend="flambeau")(x, w), x @ w)
    finally:
        torch.set_float32_matmul_precision(before)
    columns = 9 + -9 % unit if unit else 9
    assert sizes(padding[0]) == [[4, 8, 8, columns, 4, columns]]


def test_eager_numerics_are_left_alone(padding: list[fx.Graph]) -> None:
    x, w = of(4, 8), of(8, 9)
    got = torch.compile(torch.mm, backend="flambeau", options={"numerics": "eager"})(x, w)
    assert torch.equal(got, x @ w)
    assert sizes(padding[0]) == [[4, 8, 8, 9, 4, 9]]


def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float().view(-1, w.shape[0]), y)


def test_a_loss_over_a_vocabulary(padding: list[fx.Graph]) -> None:
    """The weights are copied once; the gradient of the logits is padded by the kernel that computes it; logits are kept
    padded."""
    x, w, y = of(16, 8).requires_grad_(), of(51, 8).requires_grad_(), torch.randint(51, (16,))
    got = torch.compile(loss, backend="flambeau")(x, w, y)
    want = loss(x, w, y)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    graph, = padding
    assert names(graph).count("constant_pad_nd") == 2
    assert sizes(graph) == [[16, 8, 8, 56, 16, 56], [56, 16, 16, 8, 56, 8], [16, 56, 56, 8, 16, 8]]


def gains(f: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether products are padded under the costs of a GPU's tuning table."""
    gm = make_fx(f, tracing_mode="fake")(*(torch.empty(s, dtype=dtype) for s in shapes))
    pad_products(gm.graph, BLOCKS)
    return "slice" in names(gm.graph) or "constant_pad_nd" in names(gm.graph)


@pytest.mark.parametrize(("f", "shapes", "pays"), [
    (lambda x, w: torch.exp(x @ w.t()), ((4096, 768), (50257, 768)), True),
    (lambda x, w: x @ w.t(), ((4096, 768), (50257, 768)), True),
    (lambda x, w: x.sin() @ w, ((4096, 50257), (50257, 768)), True),
    (lambda x, w: torch.exp(x @ w.t()), ((4096, 768), (50264, 768)), False),  # already aligned
    (lambda x, w: torch.exp(x @ w.t()), ((1, 768), (50257, 768)), False),  # memory-bound with or without padding
    (lambda x, w: torch.exp(x @ w), ((64, 64), (64, 63)), False),  # takes less time than a launch
    (lambda x, w: x @ w, ((100000, 16), (16, 1001)), False),  # the copy of the result takes longer
])
def test_where_it_pays(f: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], pays: bool) -> None:
    assert gains(f, *shapes) == pays

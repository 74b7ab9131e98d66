"""torch.use_deterministic_algorithms: results are reproducible on targets whose points write in no fixed order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flambeau import pipeline
from flambeau.codegen.source import BlockSource
from flambeau.compile.disk_cache import keepers, stats
from flambeau.ir.tuning import BLOCKS
from flambeau.schedule.rewrites import ordered_scatters

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]

# Sums of these depend on their order, in every digit.
LARGE = (1e8, 1.0, -1e8, 3.0, 1e8, -1e8, 0.5, -7.0)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[BlockSource]:
    """The sources of all kernels that are compiled."""
    seen: list[BlockSource] = []
    monkeypatch.setattr(pipeline, "OBSERVERS", [lambda made: seen.extend(made.texts)])
    return seen


def compiled(f: Any, **kwargs: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="flambeau", options={"target": "interpreter"}, **kwargs)


def adversarial(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values in which no element equals its neighbours, in any direction."""
    n = int(torch.tensor(shape).prod())
    at = torch.randint(len(LARGE), (n,), generator=torch.Generator().manual_seed(n))
    return torch.tensor(LARGE, dtype=dtype)[at].reshape(shape)


def places(size: int, *shape: int) -> torch.Tensor:
    """Indices of which some repeat, and some never occur."""
    return torch.randint(max(size // 2, 1), shape, generator=torch.Generator().manual_seed(size))


def adds_floats(source: BlockSource) -> bool:
    """Whether a source adds floats atomically, so that the order matters."""
    found = re.findall(r"tl\.atomic_\w+\((?:tl\.broadcast_to\()?\(?p(\d+)", source.text)
    return any(source.pointers[int(k)].startswith(("*fp", "*bf")) for k in found)


SCATTERS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "index_add rows": (lambda x, i, s: x.index_add(0, i, s), (
        adversarial(7, 5), places(7, 23), adversarial(23, 5))),
    "index_add columns": (lambda x, i, s: x.index_add(1, i, s, alpha=2), (
        adversarial(3, 9), places(9, 40), adversarial(3, 40))),
    "index_put": (lambda x, i, j, s: x.index_put((i, j), s, accumulate=True), (
        adversarial(6, 8), places(6, 60), places(8, 60), adversarial(60))),
    "index_put broadcast": (lambda x, i, s: torch.ops.aten.index_put(x, [None, i], s, True), (
        adversarial(2, 6, 3), places(6, 30), adversarial(2, 30, 3))),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (
        adversarial(4, 11), places(11, 4, 30), adversarial(4, 30))),
    "scatter_reduce sum": (lambda x, i, s: x.scatter_reduce(0, i, s, "sum"), (
        adversarial(9, 4), places(9, 30, 4), adversarial(30, 4))),
    "scatter_reduce mean": (lambda x, i, s: x.scatter_reduce(0, i, s, "mean", include_self=False), (
        adversarial(9), places(9, 50), adversarial(50))),
    "scatter_reduce prod": (lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), (
        adversarial(9), places(9, 20), adversarial(20) / 3)),
    "put": (lambda x, i, s: x.put(i, s, accumulate=True), (
        adversarial(4, 5), places(20, 70), adversarial(70))),
    "doubles": (lambda x, i, s: x.index_add(0, i, s), (
        adversarial(7, dtype=torch.float64), places(7, 90), adversarial(90, dtype=torch.float64) * 1e9)),
    "longer than a tile": (lambda x, i, s: x.index_add(0, i, s), (
        adversarial(9), places(9, 1200), adversarial(1200))),
    "set rows": (lambda x, i, s: x.index_copy(0, i, s), (
        adversarial(7, 5), places(7, 23), adversarial(23, 5))),
    "set": (lambda x, i, s: x.index_put((i,), s), (adversarial(9), places(9, 70), torch.arange(70.0))),
    "set along a dimension": (lambda x, i, s: x.scatter(1, i, s), (
        torch.zeros(3, 9, dtype=torch.int64), places(9, 3, 40), torch.arange(120).reshape(3, 40))),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_join_in_the_order_of_the_source(name: str, texts: list[BlockSource]) -> None:
    f, inputs = SCATTERS[name]
    want = f(*(x.clone() for x in inputs))
    assert torch.equal(compiled(f)(*inputs), want)
    assert texts and not any(adds_floats(t) for t in texts)


@pytest.mark.parametrize("name", [n for n in SCATTERS if not n.startswith(("set", "scatter_reduce prod"))])
def test_without_the_wish_atomics_do_it(name: str, texts: list[BlockSource]) -> None:
    torch.use_deterministic_algorithms(False)
    f, inputs = SCATTERS[name]
    compiled(f)(*(x * 0 if x.is_floating_point() else x for x in inputs))
    assert any(adds_floats(t) for t in texts)


@pytest.mark.parametrize("mask", [False, True])
def test_long_runs_are_taken_in_stretches(mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_scatters, "STRETCH", 8)
    x, s = adversarial(5, 3), adversarial(300, 3)
    i = torch.cat([torch.full((100,), 2), places(8, 100), torch.full((37,), 2), torch.full((63,), 3)])
    f = compiled(lambda x, i, s: torch.ops.aten._unsafe_masked_index_put_accumulate(x, (i < 3)[:, None], [i], s) if mask
                 else x.index_add(0, i, s))
    want = x.clone()
    for row in range(5):
        values = s[(i == row) & (i < 3 if mask else i >= 0)]
        for at in range(0, len(values), 8):
            part = want[row] if at == 0 else torch.zeros(3)
            for value in values[at:at + 8]:
                part = part + value
            want[row] = part if at == 0 else want[row] + part
    assert torch.equal(f(x, i, s), want)


def test_sums_of_half_precision_round_once(texts: list[BlockSource]) -> None:
    i, s = places(5, 200), torch.randn(200, generator=torch.Generator().manual_seed(3)).half()
    got = compiled(lambda s: torch.zeros(5, dtype=torch.float16).index_add(0, i, s))(s)
    want = torch.zeros(5)
    for k in range(200):
        want[i[k]] += s[k].float()
    assert torch.equal(got, want.half()) and not any(adds_floats(t) for t in texts)


def test_an_update_in_place_reads_and_writes_its_own_elements(texts: list[BlockSource]) -> None:
    def f(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> None:
        x.index_add_(0, i, s)

    i, s = places(7, 23), adversarial(23, 5)
    x, want = adversarial(7, 5), adversarial(7, 5)
    f(want, i, s)
    compiled(f)(x, i, s)
    assert torch.equal(x, want)
    assert all(len(t.parts) == 1 for t in texts), "the target is not copied first"


def test_indices_are_checked() -> None:
    f = compiled(lambda x, i, s: x.index_add(0, i, s))
    with pytest.raises(IndexError):
        f(torch.zeros(4), torch.tensor([0, 4]), torch.ones(2))


def test_run_time_sizes() -> None:
    f = compiled(lambda x, i, s: x.index_add(0, i, s), dynamic=True)
    x, s = adversarial(6, 3), adversarial(40, 3)
    for k in (40, 2, 0):
        i = places(6, k)
        assert torch.equal(f(x, i, s[:k]), x.index_add(0, i, s[:k]))


# ---- gradients -----------------------------------------------------------------------------------------


def sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, grid, align_corners=False)


GRADIENTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], bool]] = {
    "embedding": (lambda w, i: F.embedding(i, w), (torch.randn(9, 4), places(9, 6, 5)), True),
    "embedding with padding": (lambda w, i: F.embedding(i, w, padding_idx=1), (torch.randn(9, 4), places(9, 40)), True),
    "bags": (lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 3, 3, 20]), mode="sum"), (
        torch.randn(9, 4), places(9, 40)), True),
    "bags, greatest": (lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 3, 3, 20]), mode="max"), (
        torch.randn(9, 4), places(9, 40)), True),
    "gather": (lambda x, i: x.gather(1, i), (torch.randn(3, 9), places(9, 3, 50)), True),
    "index_select": (lambda x, i: x.index_select(0, i), (torch.randn(9, 3), places(9, 50)), True),
    "indexing": (lambda x, i: x[i], (torch.randn(9, 3), places(9, 50)), True),
    "grid_sample": (sampled, (torch.randn(2, 3, 5, 6), torch.rand(2, 4, 7, 2) * 2 - 1), False),
    "grid_sample of volumes": (sampled, (torch.randn(1, 2, 3, 4, 3), torch.rand(1, 3, 3, 2, 3) * 2 - 1), False),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, texts: list[BlockSource]) -> None:
    f, (x, i), exact = GRADIENTS[name]
    x = x.clone().requires_grad_()
    y = f(x, i)
    g = adversarial(*y.shape) if exact else torch.randn(y.shape)
    want, = torch.autograd.grad(y, x, g)
    got, = torch.autograd.grad(compiled(f)(x, i), x, g)
    if exact:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want)
    assert texts and not any(adds_floats(t) for t in texts)


# ---- scans -----------------------------------------------------------------------------------------------


SCANS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], int]] = {
    "row": (lambda x: x.cumsum(0), (8192 * 3 + 5,), 8192),
    "row, backwards": (lambda x: x.flip(0).cumsum(0).flip(0), (8192 * 3 + 5,), 8192),
    "few rows": (lambda x: x.cumsum(1), (2, 8192 * 2 + 9), 8192),
    "columns": (lambda x: x.cumsum(0), (64 * 5 + 3, 20), 64),
    "logarithms": (lambda x: x.logcumsumexp(0), (8192 * 2 + 5,), 8192),
}


@pytest.mark.parametrize("name", SCANS)
def test_scans_join_pieces_in_groups(name: str, texts: list[BlockSource]) -> None:
    f, shape, _ = SCANS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.use_deterministic_algorithms(False)
    want = f(x.double())
    torch.use_deterministic_algorithms(True)
    torch.testing.assert_close(compiled(f)(x).double(), want, rtol=1e-5, atol=1e-3)
    assert any("begin = step //" in t.text for t in texts) and not any("flag == 2" in t.text for t in texts)


def test_scans_of_more_pieces_than_a_group(monkeypatch: pytest.MonkeyPatch, texts: list[BlockSource]) -> None:
    from flambeau.codegen.triton import scans

    small = replace(BLOCKS, scan_alone=16, scan_window=4, scan_group=4, scan_row=16, scan_piece=64)
    monkeypatch.setattr(scans, "BLOCKS", small)
    x, y = torch.arange(1.0, 16 * 11), torch.arange(1.0, 601).reshape(100, 6)
    torch.use_deterministic_algorithms(False)
    want = x.cumsum(0), x.flip(0).cumsum(0).flip(0), y.cumsum(0)
    torch.use_deterministic_algorithms(True)
    got = compiled(lambda x, y: (x.cumsum(0), x.flip(0).cumsum(0).flip(0), y.cumsum(0)))(x, y)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))  # whole numbers: the order does not matter
    assert sum("begin = step // 4 * 4" in t.text for t in texts) >= 2


def test_integers_are_scanned_as_ever(texts: list[BlockSource]) -> None:
    compiled(lambda x: x.cumsum(0))(torch.arange(323 * 20).reshape(323, 20))
    assert any("flag == 2" in t.text for t in texts)


# ---- who gets which ------------------------------------------------------------------------------------


def test_a_function_is_compiled_for_either_wish(texts: list[BlockSource]) -> None:
    x, i, s = torch.zeros(4), places(4, 20), adversarial(20)
    f = compiled(lambda x, i, s: x.index_add(0, i, s))
    f(x, i, s)
    assert texts and not any(adds_floats(t) for t in texts)
    torch.use_deterministic_algorithms(False)
    f(x, i, s)
    assert any(adds_floats(t) for t in texts)


def test_a_backward_has_the_order_of_its_forward(texts: list[BlockSource]) -> None:
    w = torch.randn(9, 4, requires_grad=True)
    y = compiled(lambda w, i: F.embedding(i, w))(w, places(9, 30))
    torch.use_deterministic_algorithms(False)
    y.sum().backward()
    assert texts and not any(adds_floats(t) for t in texts)


def test_cached_graphs_are_apart(monkeypatch: pytest.MonkeyPatch, texts: list[BlockSource]) -> None:
    from flambeau.config import config

    def f(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, i, s) * 3

    x, i, s = adversarial(4), places(4, 20), adversarial(20)
    with config.override(verify=False):  # otherwise nothing is stored
        for wish in (True, False):
            torch.use_deterministic_algorithms(wish)
            before = stats["hit"], len(texts)
            compiled(f)(x, i, s)
            for keeper in list(keepers):
                keeper.join()
            assert (stats["hit"], len(texts) > before[1]) == (before[0], True), "the first of its kind is compiled"
            compiled(f)(x, i, s)
            assert stats["hit"] == before[0] + 1
        torch.use_deterministic_algorithms(True)
        assert torch.equal(compiled(f)(x, i, s), f(x, i, s))



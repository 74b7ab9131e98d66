"""Products of parts whose ends are data, as those of experts: against float64, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.codegen.source import TensorMap
from flambeau.codegen.triton.tensor_cores import contractions
from flambeau.config import config
from flambeau.ir.program import ContractKernel
from flambeau.ir.tuning import ProductTile
from flambeau.pipeline import compile_graph

HALF = torch.bfloat16
aten = torch.ops.aten
ENDS = {"uneven": [30, 30, 95, 200, 208], "all in one": [0, 0, 208, 208, 208],
        "the last rows are nobody's": [3, 70, 70, 150, 190], "nothing": [0, 0, 0, 0, 0]}


# A tile of 128 rows is halved where a part ends.
TILES = {"once": ProductTile(128, (32, 16), 128, 2, 4), "turns": ProductTile(64, (16,), 128, 2, 4)}


@pytest.fixture(params=[*TILES], autouse=True)
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(contractions, "TILES", (TILES[request.param],))
    monkeypatch.setattr(contractions, "WAYS", (request.param,))
    with config.override(target="interpreter", contractions="own", verify="passes"):
        yield


@pytest.fixture(params=["pointers", "engine"], autouse=True)
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pointers":
        monkeypatch.setattr(TensorMap, "there", lambda *_: False)


def by_parts(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    spans = [slice(start, end) for start, end in zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True)]
    if a.dim() == b.dim():
        return torch.stack([a[:, s] @ b[s] for s in spans])
    if a.dim() == 2:
        return torch.cat([a[s] @ b[k] for k, s in enumerate(spans)])
    return torch.cat([a[k] @ b[:, s] for k, s in enumerate(spans)], 1)


def check(a: torch.Tensor, b: torch.Tensor, ends: list[int],
          tail: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
    args = a, b, torch.tensor(ends, dtype=torch.int32)
    made = compile_graph(make_fx(lambda *x: [tail(aten._grouped_mm(*x))], tracing_mode="fake")(*args)).compiled
    (kernel,) = made.program.kernels
    assert isinstance(kernel, ContractKernel) and kernel.ragged is not None and not made.captured.externs
    (got,) = made.finish()(list(args))
    want = tail(by_parts(a.double(), b.double(), args[2]))
    got = got if a.dim() == b.dim() else got[:want.shape[0], :want.shape[1]]
    assert (got.double() - want).norm() <= 5e-3 * want.norm()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(HALF)


@pytest.mark.parametrize("name", ENDS)
def test_rows(name: str) -> None:
    check(random(208, 136), random(5, 136, 56), ENDS[name], torch.relu)
    check(random(208, 136), random(5, 56, 136).transpose(1, 2), ENDS[name])


@pytest.mark.parametrize("name", ENDS)
def test_columns(name: str) -> None:
    check(random(5, 40, 136), random(136, 208), ENDS[name])


@pytest.mark.parametrize("name", ENDS)
def test_depth(name: str) -> None:
    """As gradients of weights are."""
    check(random(208, 40).t(), random(208, 56), ENDS[name])
    check(random(40, 208), random(208, 56), ENDS[name])


def test_ends_beyond_the_rows_write_nothing_there() -> None:
    a, b, ends = random(100, 64), random(2, 64, 48), torch.tensor([50, 1000], dtype=torch.int32)
    made = compile_graph(make_fx(lambda *x: [aten._grouped_mm(*x)], tracing_mode="fake")(a, b, ends))
    with config.override(verify=True):  # accesses are checked
        (got,) = made([a, b, ends])
    want = torch.cat([a[:50].double() @ b[0].double(), a[50:].double() @ b[1].double()])
    assert (got.double() - want).norm() <= 5e-3 * want.norm()

"""Attention is one call in a graph: of a library's kernel, or of our operator where no library takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flambeau import pipeline
from flambeau.config import config
from flambeau.ops import attention_calls as attention
from flambeau.ops.attention import LARGEST
from flambeau.ops.attention_calls import Asked

HEADS, LENGTH, SIZE = 4, 8, 16
OURS = ["flambeau.attention.default", "flambeau.attention_backward.default"]
LIBRARY = "aten._scaled_dot_product_flash_attention_for_cpu"


def taken(a: Asked) -> bool:
    """The CPU's kernel for attention stands for one that takes no more than a GPU's do."""
    lines = all(x is None or x.stride(-1) == 1 for x in (a.query, a.key, a.value, a.mask))
    return lines and a.query.dim() == 4 and a.query.shape[-1] % 4 == 0 and not a.grouped


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Node]]:
    """What computes attention in the graphs that are compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    seen: list[fx.Node] = []
    monkeypatch.setattr(attention, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(attention, "is_taken", taken)
    monkeypatch.setattr(pipeline, "OBSERVERS", [lambda c: seen.extend(
        n for n in c.gm.graph.nodes if n.op == "call_function" and any(
            word in str(n.target) for word in ("attention", "softmax", "bmm")))])
    with config.override(graph_cache=False):
        yield seen


def names(calls: list[fx.Node]) -> list[str]:
    return [str(n.target) for n in calls]


def heads(size: int = SIZE, count: int = HEADS) -> Tensor:
    """As a projection leaves them, with the heads of a place next to each other."""
    return torch.randn(2, LENGTH, count, size).transpose(1, 2)


def padding() -> Tensor:
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3]])


attend = F.scaled_dot_product_attention
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "padding for all queries": (attend, (heads(), heads(), heads(),
                                         torch.randn(LENGTH, 2).t()[:, None, None].expand(2, 1, LENGTH, LENGTH))),
    "crossed mask": (attend, (heads(), heads(), heads(),
                              padding()[:, None, :, None].expand(2, 1, -1, LENGTH).clone().mT)),
    "crossed heads": (attend, (heads().mT.contiguous().mT, heads(), heads())),
    "odd heads": (attend, (heads(6), heads(6), heads(7), padding()[:, None, None, :])),
    "grouped": (partial(attend, enable_gqa=True),
                (heads(), heads(count=2), heads(count=2), padding()[:, None, None, :])),
    "three dimensions": (partial(attend, is_causal=True), (heads()[0], heads()[0], heads()[0])),
}


def trained(f: Callable[..., Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
    out = f(*leaves)
    return [out, *torch.autograd.grad(out.cos().sum(), [x for x in leaves if x.requires_grad])]


@pytest.mark.parametrize("name", CASES)
def test_what_no_library_takes_is_one_call_of_ours(name: str, calls: list[fx.Node]) -> None:
    f, given = CASES[name]
    got = trained(torch.compile(f, backend="flambeau"), given)
    with sdpa_kernel(SDPBackend.MATH):  # what eager does where no library takes a call
        wanted = trained(f, given)
    torch.testing.assert_close(got, wanted)
    assert got[0].stride() == wanted[0].stride()
    assert names(calls) == OURS


def test_what_a_library_takes_is_one_call_of_it(calls: list[fx.Node]) -> None:
    given = heads(), heads(), heads(), padding()[:, None, None, :]
    got = trained(torch.compile(attend, backend="flambeau"), given)
    torch.testing.assert_close(got, trained(attend, given))
    assert names(calls) == [f"{LIBRARY}.default", f"{LIBRARY}_backward.default"]


def test_chosen_before_a_library_its_result_lies_as_the_librarys(calls: list[fx.Node],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_ours", lambda asked: True)
    given = heads(), heads(), heads()
    got, wanted = trained(torch.compile(attend, backend="flambeau"), given), trained(attend, given)
    torch.testing.assert_close(got, wanted)
    assert got[0].stride() == wanted[0].stride() and not wanted[0].is_contiguous()
    assert names(calls) == OURS


def test_whoever_chooses_sees_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Asked] = []

    def choose(asked: Asked) -> bool:
        seen.append(asked)
        return False

    q, k, v, mask = heads(), heads().requires_grad_(), heads(), padding()[:, None, None, :]
    with attention.choosing(choose):
        attention.whole_attention(q, k, v, mask, scale=0.5)
        attention.whole_attention(q, k, v, mask, enable_gqa=True)  # no library takes it: nothing is asked
    assert [(a.mask is mask, a.scale, a.grouped, a.wants) for a in seen] == [
        (True, 0.5, False, (False, True, False, False))]


def test_what_is_the_same_for_all_queries_stays_so(calls: list[fx.Node]) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, mask[:, None, None].expand(2, HEADS, LENGTH, LENGTH))

    given = heads(6), heads(6), heads(6), padding()
    torch.testing.assert_close(trained(torch.compile(f, backend="flambeau"), given), trained(f, given))
    assert names(calls) == OURS
    for n, place in zip(calls, (3, 4), strict=True):
        mask = n.args[place]
        assert isinstance(mask, fx.Node) and mask.meta["val"].stride()[1:3] == (0, 0)


@pytest.mark.parametrize("name", ["crossed heads", "grouped"])
def test_torch_decides_for_eagers_bits(name: str, calls: list[fx.Node]) -> None:
    f, given = CASES[name]
    got = trained(torch.compile(f, backend="flambeau", options={"numerics": "eager"}), given)
    wanted = trained(f, given)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert [x.stride() for x in got] == [x.stride() for x in wanted]
    assert names(calls) and not set(names(calls)) & set(OURS)


def test_torch_decides_where_heads_are_too_large_for_ours(calls: list[fx.Node]) -> None:
    for size in (LARGEST + 1, LARGEST):
        del calls[:]
        given = tuple(heads(size).mT.contiguous().mT for _ in range(3))
        torch.testing.assert_close(torch.compile(attend, backend="flambeau", dynamic=False)(*given), attend(*given))
        assert (names(calls) == OURS[:1]) == (size == LARGEST)
        assert names(calls)

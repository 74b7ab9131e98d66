"""Attention in kernels of its own, in Triton's interpreter: every form against float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'flambeau[cuda]'")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attended import hold, in_double, leaf, reference, trained
from flambeau import pipeline
from flambeau.config import config
from flambeau.ir.program import AttentionKernel, Program
from flambeau.ops import attention_calls

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls are ours on CPU tensors too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(attention_calls, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(attention_calls, "is_taken", lambda asked: False)
    with config.override(target="interpreter", graph_cache=False):
        yield


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    seen: list[Program] = []
    monkeypatch.setattr(pipeline, "OBSERVERS", [lambda c: seen.append(c.program)])
    return seen


def heads(batch: int, count: int, length: int, size: int, dtype: torch.dtype = torch.float32, laid: bool = False
          ) -> Tensor:
    """`laid`: as a projection leaves them, with the heads of a place next to each other."""
    x = torch.randn(batch, length, count, size).transpose(1, 2) if laid else torch.randn(batch, count, length, size)
    return leaf(x.to(dtype))


def compiled(dynamic: bool | None = None, **how: Any) -> Callable[..., Tensor]:
    return torch.compile(lambda q, k, v, mask=None: F.scaled_dot_product_attention(q, k, v, mask, **how),
                         backend="flambeau", dynamic=dynamic)


def shown(mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask of booleans."""
    if is_causal:
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return mask if mask is not None and mask.dtype is torch.bool else None


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dynamic: bool | None = None, **how: Any) -> None:
    leaves = [q, k, v, *([mask] if mask is not None and mask.requires_grad else [])]
    given = () if mask is None or mask.requires_grad else (mask,)
    got = trained(compiled(dynamic, **how), leaves, given)
    added = mask is not None and mask.dtype is not torch.bool

    def exactly(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None) -> Tensor:
        m = mask.double() if m is None and mask is not None and added else m
        return reference(q, k, v, how.get("scale"), (lambda s: s + m) if added else None,
                         shown(mask, how.get("is_causal", False), q, k))

    hold(got, trained(exactly, in_double(leaves)), q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes(dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v = heads(2, 2, 70, 16, dtype), heads(2, 2, 90, 16, dtype), heads(2, 2, 90, 24, dtype)
    check(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("size", [1, 5, 40, 72, 96, 160, 256])
def test_sizes_of_heads(size: int) -> None:
    q, k, v = heads(1, 1, 20, size, torch.bfloat16), heads(1, 1, 30, size, torch.bfloat16), \
        heads(1, 1, 30, max(size // 2, 1), torch.bfloat16)
    check(q, k, v, scale=0.3)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 65), (65, 1), (64, 128), (3, 0), (0, 3)])
def test_lengths(rows: int, columns: int) -> None:
    check(heads(2, 2, rows, 16), heads(2, 2, columns, 16), heads(2, 2, columns, 16))


def test_no_batch() -> None:
    check(heads(0, 2, 5, 16), heads(0, 2, 5, 16), heads(0, 2, 5, 16))


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads_as_projections_leave_them(is_causal: bool) -> None:
    q, k, v = heads(2, 6, 70, 16, laid=True), heads(2, 2, 70, 16, laid=True), heads(2, 2, 70, 16, laid=True)
    check(q, k, v, is_causal=is_causal, enable_gqa=True)


def test_heads_across_memory_and_expanded() -> None:
    q = leaf(torch.randn(2, 2, 16, 40).mT)
    k = leaf(torch.randn(2, 1, 50, 16).expand(2, 2, 50, 16))
    v = leaf(torch.randn(2, 2, 1, 16).expand(2, 2, 50, 16))
    check(q, k, v)


def test_heads_of_one_number() -> None:
    """Expanded along the head, which has fewer elements than a tile."""
    q, k = (leaf(torch.randn(1, 2, n, 1).expand(1, 2, n, 5)) for n in (20, 30))
    check(q, k, leaf(torch.randn(1, 2, 30, 1).expand(1, 2, 30, 5)))


def test_infinity_in_what_is_expanded() -> None:
    """Beyond the last column there is nothing: not zero times infinity."""
    q, k, v = torch.randn(1, 1, 20, 16), torch.randn(1, 1, 30, 16), torch.randn(1, 1, 1, 16)
    v[..., 3] = torch.inf
    v = v.expand(1, 1, 30, 16)
    got = compiled()(q, k, v)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v))
    assert got[..., 3].isposinf().all()


def test_three_dimensions() -> None:
    q, k, v = (torch.randn(2, 20, 16) for _ in range(3))
    got = torch.compile(F.scaled_dot_product_attention, backend="flambeau")(q, k, v)
    assert got.shape == q.shape
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v))


def some(*shape: int) -> Tensor:
    """Rows of which nothing counts among them."""
    mask = torch.rand(shape) > 0.3
    if shape[-2] > 1:
        mask[..., 3, :] = False
    return mask


MASKS: dict[str, Callable[[], Tensor]] = {
    "all": lambda: some(2, 2, 70, 200), "for all heads": lambda: some(2, 1, 70, 200),
    "columns": lambda: some(2, 1, 1, 200),
    "matrix": lambda: some(70, 200), "crossed": lambda: some(200, 70).t(), "nothing": lambda: some(70, 200) & False,
    "padding": lambda: (torch.arange(200) < torch.tensor([[30], [200]]))[:, None, None],
    "blocks": lambda: (torch.arange(70)[:, None] // 40 == torch.arange(200) // 40),
    "one row": lambda: some(1, 200),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    check(heads(2, 2, 70, 16), heads(2, 2, 200, 16), heads(2, 2, 200, 16), MASKS[name]())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 2, 70, 90), (1, 2, 70, 90), (2, 1, 1, 90), (70, 90), (70, 1), (1, 1)])
def test_biases_and_their_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (heads(2, 2, n, 16, dtype) for n in (70, 90, 90))
    check(q, k, v, leaf(torch.randn(shape).to(dtype)))


def test_a_bias_that_hides() -> None:
    bias = torch.randn(2, 1, 70, 90)
    bias[:, :, 5] = -torch.inf
    bias[:, :, 7, 3:] = -torch.inf
    check(heads(2, 2, 70, 16), heads(2, 2, 90, 16), heads(2, 2, 90, 16), bias)


def test_a_bias_in_float32_beside_halves() -> None:
    check(*(heads(2, 2, n, 16, torch.float16) for n in (20, 30, 30)), torch.randn(20, 30))


@pytest.mark.parametrize("scale", [0.7, -0.7, 0.0])
def test_scales(scale: float) -> None:
    check(heads(1, 2, 40, 16), heads(1, 2, 50, 16), heads(1, 2, 50, 16), scale=scale)


def test_a_mask_of_the_graph_is_no_memory(programs: list[Program]) -> None:
    """A window over documents, computed in the function: it becomes a part of the kernels."""
    which = torch.arange(150) // 60

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        near = (at[:, None] >= at) & (at[:, None] - at < 40)
        return F.scaled_dot_product_attention(q, k, v, (which[:, None] == which) & near)

    leaves = [heads(1, 2, 150, 16) for _ in range(3)]
    got = trained(torch.compile(attend, backend="flambeau"), leaves)
    at = torch.arange(150)
    mask = (which[:, None] == which) & (at[:, None] >= at) & (at[:, None] - at < 40)
    hold(got, trained(lambda q, k, v: reference(q, k, v, mask=mask), in_double(leaves)), torch.float32)
    sizes = [b for p in programs for b in p.buffers if b.shape and all(n.is_const for n in b.shape)]
    assert not any([n.const for n in b.shape][-2:] == [150, 150] for b in sizes)
    kernels = [k for p in programs for k in p.kernels if isinstance(k, AttentionKernel)]
    assert {k.role for k in kernels} == {"out", "keys", "queries"}
    assert all(len(k.below) == len(k.since) == 1 and k.rest is not None for k in kernels)


def test_sizes_of_the_run_compile_once(programs: list[Program]) -> None:
    run = compiled(True, is_causal=True)
    for length in (40, 70, 33):
        q, k, v = (heads(2, 2, length, 16) for _ in range(3))
        got = trained(run, [q, k, v])
        hold(got, trained(lambda q, k, v: reference(q, k, v, mask=torch.ones(q.shape[2], q.shape[2]).tril().bool()),
                          in_double([q, k, v])), torch.float32)
    assert len(programs) == 2  # a forward and a backward


def test_dropout(programs: list[Program]) -> None:
    q, k, v = (heads(2, 2, 64, 16) for _ in range(3))
    run = compiled(dropout_p=0.3)
    ones = run(q, k, torch.ones_like(v))
    assert abs(ones.mean() - 1) < 0.03 and 0.05 < ones.std() < 0.3  # what is kept makes up for what is not
    assert not run(q, k, v).equal(run(q, k, v))

    def again(*given: Tensor) -> Tensor:
        torch.manual_seed(3)
        return run(*given)

    assert again(q, k, v).equal(again(q, k, v))
    # The result is linear in v, and the gradients are those of what was drawn: a step in each direction tells.
    gradients = torch.autograd.grad(again(q, k, v).double().sum(), (q, k, v))
    for place, g in enumerate(gradients):
        step = 1e-2 * torch.randn_like(g)
        ends = [again(*(x + sign * step if i == place else x for i, x in enumerate((q, k, v)))) for sign in (1, -1)]
        slope = (ends[0] - ends[1]).double().sum() / 2
        assert abs(slope - (g * step).sum()) < 2e-2 * (g * step).norm() + 1e-3


def test_dropout_of_all() -> None:
    q, k, v = (heads(1, 1, 20, 16) for _ in range(3))
    assert not compiled(dropout_p=1.0)(q, k, v).any()


def test_not_a_number_spreads() -> None:
    q, k, v = (heads(1, 1, 20, 16) for _ in range(3))
    with torch.no_grad():
        k[0, 0, 7] = torch.nan
    assert compiled()(q, k, v).isnan().all()


def test_what_eager_refuses() -> None:
    q, k, v = (heads(1, 2, 20, 16) for _ in range(3))
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k[..., :8], v], {}), ([q, k, v[:, :, :7]], {}), ([q, k.half(), v], {}),
        ([q, k, v, some(20, 7)], {}), ([q, k, v, some(20, 20)], {"is_causal": True})]
    # The CPU's own kernel takes some of these; where no library's kernel does, as on GPUs, eager refuses all of them.
    with sdpa_kernel(SDPBackend.MATH):
        for given, how in calls:
            for f in (partial(F.scaled_dot_product_attention, **how), compiled(**how)):
                torch._dynamo.reset()
                with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
                    f(*given)


def test_a_mask_beside_a_causal_one_is_eagers() -> None:
    """The CPU's own kernel computes both; since torch 2.15 it is an error."""
    q, k, v = (heads(1, 2, 20, 16) for _ in range(3))
    for mask in (some(20, 20), torch.randn(20, 20)):
        try:
            expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match="attn_mask should not be set"):
                compiled(is_causal=True)(q, k, v, mask)
            assert "attn_mask should not be set" in str(error)
        else:
            torch.testing.assert_close(compiled(is_causal=True)(q, k, v, mask), expected)


@pytest.mark.parametrize("target", ["cpu", "opencl"])
def test_other_machines_compose_it(target: str) -> None:
    if target == "opencl":
        pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
    with config.override(target=target):
        q, k, v = heads(2, 4, 40, 16), heads(2, 2, 50, 16), heads(2, 2, 50, 24)
        check(q, k, v, leaf(torch.randn(2, 1, 40, 50)), enable_gqa=True)


def test_in_a_fixed_order_gradients_that_meet_are_composed(programs: list[Program],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (heads(2, 2, n, 16) for n in (20, 30, 30))
    torch.use_deterministic_algorithms(True)
    try:
        check(q, k, v, leaf(torch.randn(1, 2, 20, 30)))
    finally:
        torch.use_deterministic_algorithms(False)
    roles = [k.role for p in programs for k in p.kernels if isinstance(k, AttentionKernel)]
    assert roles == ["out"]  # that of the result alone

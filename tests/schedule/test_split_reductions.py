"""Reductions cut into pieces: which variables, in which order, and what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.capture.decompositions import table
from flambeau.capture.graph import capture
from flambeau.codegen.triton.dialect import CAPABILITIES
from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, Op
from flambeau.ir.program import Launch, LoopKernel, Program
from flambeau.ops import ops_loaded
from flambeau.schedule.plan import schedule

aten = torch.ops.aten
ops_loaded()


def images(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").to(memory_format=torch.channels_last)


def for_blocks(f: Any, *inputs: Tensor) -> Program:
    """The program of f for a machine of many small programs, from tensors that are not there."""
    graph = make_fx(lambda *x: [*f(*x)], decomposition_table=table(False))(*inputs)
    return schedule(capture(graph, CAPABILITIES, device=torch.device("meta")).graph, CAPABILITIES, True)


def pieces(p: Program, at: int) -> tuple[int, ...]:
    """The sizes of what the first of a launch's results counts."""
    step = p.steps[at]
    assert isinstance(step, Launch)
    made = next(a for a, x in zip(step.args, p.kernels[step.kernel].params, strict=True) if x.written)
    return tuple(n.const for n in p.places[made].shape)


@pytest.mark.parametrize(("channels", "side", "parts"), [
    (64, 112, (128, 64, 8)),  # images alone would be too few
    (256, 56, (128, 256)),
    (1024, 14, (64, 1024)),
])
def test_channels_are_summed_in_as_many_pieces_as_there_are_programs(channels: int, side: int, parts: tuple[int, ...]
                                                                     ) -> None:
    p = for_blocks(lambda x: [x.sum((0, 2, 3), dtype=torch.float32)], images(128, channels, side, side))
    assert len(p.steps) == 2 and pieces(p, 0) == parts


def norm_slope(grad: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor]:
    return list(aten.native_batch_norm_backward(grad, x, w, w, w, mean, rstd, True, 1e-5, [True, True, True]))


@pytest.mark.parametrize("channels", [64, 1024, 2048])
def test_two_norms_of_one_gradient_are_summed_together(channels: int) -> None:
    """And not one beside the map of the other, whose points are the same in number alone."""
    side = {64: 56, 1024: 14, 2048: 7}[channels]
    grad, x, y = (images(128, channels, side, side) for _ in range(3))
    w, mean, rstd = (torch.empty(channels, dtype=d, device="meta") for d in (torch.bfloat16, *[torch.float32] * 2))
    p = for_blocks(lambda *t: norm_slope(t[0], t[1], *t[3:]) + norm_slope(t[0], t[2], *t[3:]), grad, x, y, w,
                   mean, rstd)
    for step in p.steps:
        assert isinstance(step, Launch)
        large = [a for a in step.args if len(p.places[a].shape) == 4]
        maps = [a for a in large if p.places[a].place in ("output", "over")]
        assert len(large) <= 3 or not maps, "a map that reads other tensors than the sums beside it"


def test_windows_have_tiles_of_their_own() -> None:
    def slope(grad: Tensor, places: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor]:
        full = aten.max_pool2d_with_indices_backward(grad, x, [3, 3], [2, 2], [1, 1], [1, 1], False, places)
        return norm_slope(full, x, w, mean, rstd)

    w, mean, rstd = (torch.empty(64, dtype=d, device="meta") for d in (torch.bfloat16, *[torch.float32] * 2))
    small = images(128, 64, 56, 56), images(128, 64, 56, 56, dtype=torch.int64)
    p = for_blocks(slope, *small, images(128, 64, 112, 112), w, mean, rstd)
    first = p.steps[0]
    assert isinstance(first, Launch) and set(first.origins) == {"max_pool2d_with_indices_backward"}


def test_planes_that_pieces_do_not_divide_are_one_line() -> None:
    """Nor is what all pieces of a row need read by each of its points."""
    p = for_blocks(lambda x: aten.native_group_norm(x, None, None, 2, 6, 311 * 197, 2, 1e-5),
                   torch.empty(2, 6, 311, 197, device="meta"))
    first = p.kernels[0]
    assert isinstance(first, LoopKernel) and len(first.inner) == 1
    assert not [a for e in first.everything() for i in e.own_indices() for a in i.atoms() if isinstance(a, Op)]
    inner, = first.inner
    reads = loads(*first.everything())
    assert len(reads) == 4 and [bool(e.args) for e in reads] == [inner in e.symbols() for e in reads]


@pytest.mark.parametrize("f", [lambda x: torch.stack([x.sum((0, 2, 3)), x.amax((0, 2, 3))]), torch.sum,
                               lambda x: x.reshape(30, 270).t().softmax(0).contiguous(),
                               lambda x: x.sum((0, 1, 2))])
def test_pieces_come_to_what_the_whole_does(f: Any) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    x = torch.randn(5, 3, 270, 2, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    ours = torch.compile(f, backend="flambeau", options={"target": "interpreter"})(x)
    torch.testing.assert_close(ours, f(x.double()).float(), rtol=1e-5, atol=1e-4)


def across(columns: int, rows: int) -> Tensor:
    """Rows one after the other in memory, as columns of a matrix."""
    return torch.empty(columns, rows, device="meta").t()


@pytest.mark.parametrize(("x", "launches"), [
    (across(1224, 37325), 2),  # reduced as rows, and written across in tiles
    (across(300, 40), 1),  # held whole
    (across(40_000, 300), 1),  # columns enough
    (torch.empty_strided((2888, 5425), (10850, 2), device="meta"), 3),  # columns, although none lie side by side
])
def test_few_columns_are_reduced_in_kernels_of_their_own(x: Tensor, launches: int) -> None:
    p = for_blocks(lambda x: [torch.softmax(x, 0).contiguous()], x)
    assert len(p.steps) == launches


def test_pieces_read_what_their_row_shares_once() -> None:
    """The mean of a group is the same for all of its points, so it is loaded once, without a mask."""
    p = for_blocks(lambda x: [torch.var(x, (1, 2), correction=0)], torch.empty(44, 569, 696, dtype=torch.bfloat16,
                                                                              device="meta"))
    reads = [e for k in p.kernels if isinstance(k, LoopKernel) for e in loads(*k.everything())]
    shared = [e for e in reads if not any(v in e.symbols() for k in p.kernels for v in k.inner)]
    assert shared and not any(e.args for e in shared)
    assert all(len(k.inner) == 1 for k in p.kernels), "a limit of rows keeps nothing from being walked as one"


def test_pieces_are_stretches_of_memory() -> None:
    """What lies farthest apart is cut, whichever dimension that is."""
    x = torch.empty(43319, 536, device="meta")
    in_order, across = (for_blocks(lambda x: [(x * 2).sum()], given) for given in (x, x.t()))
    assert pieces(across, 0) == pieces(in_order, 0) and across.kernels == in_order.kernels


@pytest.mark.parametrize("length", [40_000, 40_001])
def test_short_ends_of_lines_are_columns(length: int) -> None:
    """Channels of a group lie beside those of the next: all of them are summed side by side, and then those of each."""
    x = torch.empty(2, length, 16, 3, device="meta")
    p = for_blocks(lambda x: [x.sum((1, 3))], x)
    first, _ = kernels = [p.kernels[s.kernel] for s in p.steps if isinstance(s, Launch)]
    assert isinstance(first, LoopKernel) and first.vector in first.outer and len(kernels) == 2
    assert first.vector is not None and any(a.coefficient(first.vector) is ONE for _, a in first.accesses())
    assert pieces(p, 0)[-2:] == (16, 3)


def test_a_transposition_reads_whole_lines_whose_parts_share_statistics() -> None:
    def norm(x: Tensor, mean: Tensor) -> list[Tensor]:
        return [(x.view(7, 16, 3, -1) - mean[:, :, None, None]).reshape(7, 48, -1).clone(
            memory_format=torch.contiguous_format)]

    x = torch.empty(7, 9001, 48, device="meta").transpose(1, 2)
    p = for_blocks(norm, x, torch.empty(7, 16, device="meta"))
    kernel = p.kernels[0]
    assert isinstance(kernel, LoopKernel) and kernel.tile is not None and kernel.tile.size.const == 48


def test_sums_that_read_nothing_along_their_rows_stay_with_them() -> None:
    """The gradient of a loss over classes: the sum depends only on the class of a row, and is not split."""
    def slope(grad: Tensor, target: Tensor, out: Tensor) -> list[Tensor]:
        picked = torch.where(torch.arange(336, device="meta") == target[:, None], grad, 0.0)
        return [picked - out.exp() * picked.sum(1, keepdim=True)]

    p = for_blocks(slope, torch.empty((), device="meta"), torch.empty(8897, dtype=torch.int64, device="meta"),
                   torch.empty(8897, 336, device="meta"))
    assert len(p.steps) == 1


@pytest.mark.parametrize("shape", [(5659, 1704), (16384, 1001)])
def test_the_sums_of_a_layer_norm_gradient_are_cut_alike(shape: tuple[int, int]) -> None:
    """One of them reads a number for each row as well, which does not make rows of its columns."""
    grad, x = (torch.empty(shape, device="meta") for _ in range(2))
    mean, rstd = (torch.empty(shape[0], 1, device="meta") for _ in range(2))
    w = torch.empty(shape[1], device="meta")
    p = for_blocks(lambda *t: aten.native_layer_norm_backward(*t[:2], [shape[1]], *t[2:], t[4], [True] * 3),
                   grad, x, mean, rstd, w)
    assert len(p.steps) == 4  # the gradient of x; the pieces of both sums; each of the sums

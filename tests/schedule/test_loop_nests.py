"""The shape of loops: the vector variable, and which variables are split, merged, ordered and tiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flambeau.ir.expr import walk
from flambeau.ir.index import ONE, Op
from flambeau.ir.program import LoopKernel, ScanKernel, ScatterKernel
from flambeau.schedule.loop_nests import locals_in
from schedule.programs import launches, program


def only(fn: Callable[..., Any], *args: Tensor) -> LoopKernel:
    (k,) = launches(program(fn, *args))
    assert isinstance(k, LoopKernel)
    return k


def extents(vars: Any) -> list[int]:
    return [int(v.extent) for v in vars]


# ---- merging -------------------------------------------------------------------------------------------


def test_contiguous_dimensions_become_one_loop() -> None:
    k = only(lambda x, y: x * y + 1, torch.randn(4, 5, 6, 7), torch.randn(4, 5, 6, 7))
    assert extents(k.outer) == [840] and k.vector is k.outer[0]


def test_a_broadcast_keeps_the_loops_apart_that_it_must() -> None:
    k = only(lambda x, b: x + b, torch.randn(4, 5, 6, 7), torch.randn(7))
    assert extents(k.outer) == [120, 7]
    k = only(lambda x, b: x + b, torch.randn(4, 5, 6, 7), torch.randn(5, 1, 1))
    assert extents(k.outer) == [4, 5, 42]


def test_layouts_that_agree_are_walked_in_memory_order() -> None:
    """If all tensors are channels-last, loops follow that order, not the order of dimensions."""
    x, y = (torch.randn(4, 5, 6, 7).contiguous(memory_format=torch.channels_last) for _ in range(2))
    k = only(lambda x, y: x * y, x, y)
    assert extents(k.outer) == [840]


def test_sizes_of_the_run_that_are_sums_keep_dimensions_together() -> None:
    """Those of a convolution's result are quotients and ones, and its strides hold the larger of a size and one."""
    k, = launches(program(lambda x, w: torch.conv2d(x, w, stride=2).exp(), torch.randn(2, 3, 9, 11),
                          torch.randn(4, 3, 3, 3), dynamic=True))
    assert isinstance(k, LoopKernel) and len(k.outer) == 1
    (_, address), = k.stores
    assert address.atom() is k.vector


def test_dimensions_of_size_one_vanish() -> None:
    k = only(lambda x: x * 2, torch.randn(1, 30, 1, 1, 20, 1))
    assert extents(k.outer) == [600]


def test_reductions_merge_inside_and_outside() -> None:
    k = only(lambda x: x.sum((2, 3)), torch.randn(40, 5, 6, 7))
    assert extents(k.outer) == [200] and extents(k.inner) == [42]
    k = only(lambda x: x.sum((0, 1)), torch.randn(4, 5, 6, 7))
    assert extents(k.outer) == [42] and extents(k.inner) == [20]


def test_short_dimensions_that_merge_into_a_long_one_vectorise() -> None:
    """A mean over 7 x 7 pixels walks 49 neighbours, not one pixel of each image."""
    k = only(lambda x: x.mean((2, 3)), torch.randn(40, 5, 7, 7))
    assert k.vector is k.inner[-1] and extents(k.inner) == [49]


# ---- the vector variable -------------------------------------------------------------------------------


@pytest.mark.parametrize(("fn", "shape", "where"), [
    (lambda x: x.sum(1), (64, 100), "inner"), (lambda x: x.sum(0), (64, 100), "outer"),
    (lambda x: x.t().sum(0), (64, 100), "inner"), (lambda x: x.softmax(-1), (64, 100), "inner"),
    (lambda x: x.softmax(0), (64, 100), "outer"), (lambda x: x.sum(), (64, 100), "inner"),
    (lambda x: x.sum(1), (64, 30, 50), "outer"),
])
def test_the_contiguous_variable_vectorises(fn: Callable[..., Any], shape: tuple[int, ...], where: str) -> None:
    k = only(fn, torch.randn(shape))
    assert k.vector in getattr(k, where)
    assert k.vector is getattr(k, where)[-1]


def test_a_transposition_is_tiled() -> None:
    k = only(lambda x, y: x.t().exp() * y, torch.randn(64, 100), torch.randn(100, 64))
    assert k.tile is not None and k.tile is not k.vector and {k.tile, k.vector} <= set(k.outer)
    assert only(lambda x, y: x * y, torch.randn(64, 100), torch.randn(64, 100)).tile is None


@pytest.mark.parametrize("shape", [(2000, 13), (40, 2000, 13)])
@pytest.mark.parametrize("beside", [1, 13])
def test_lines_shorter_than_a_vector_are_tiled_where_tiles_are_walked_as_one(shape: tuple[int, ...], beside: int
                                                                              ) -> None:
    """Values that all rows share are copied into the order of the rows, like transposed ones."""
    y = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    k = only(lambda x, y, z: (x + z) * y.exp(), torch.randn(shape), y, torch.randn(beside))
    assert k.tile is not None and k.vector is not None and k.vector.size.const == 13 and k.form.name == "flat tiles"


@pytest.mark.parametrize(("columns", "gap", "fn", "flat"), [
    (31, 0, lambda x, z: (x + z).tanh(), True), (31, 7, lambda x, z: x.tanh(), True),
    (32, 0, lambda x, z: (x + z).tanh(), False),  # two vectors
    (31, 0, lambda x, z: x + z, False),  # to bring z into this order takes as long as to add it
    (1001, 0, lambda x, z: (x + z).tanh(), False),  # little of a row is left after whole vectors
])
def test_ends_of_short_lines_are_not_computed_one_by_one(columns: int, gap: int, fn: Callable[..., Any], flat: bool
                                                         ) -> None:
    """Results lie one after the other, and so do the rows of a tile that is walked as one: no row has an end."""
    x, z = torch.randn(3, 500, columns + gap)[..., :columns], torch.randn(columns)
    k = only(fn, x, z)
    assert (k.form.name == "flat tiles") == flat
    if flat:
        assert extents(k.outer) == [1500, columns]


@pytest.mark.parametrize(("shape", "inner"), [
    ((32, 13264), [13264, 32]),  # lines of 13264 across the others would be gone before they are read again
    ((14808, 15), [617, 15, 24]),  # three vectors, then the next of the 15
    ((997, 1009), [997, 1009]),  # primes
])
def test_what_is_reduced_along_two_variables_goes_in_blocks_of_one(shape: tuple[int, int], inner: list[int]) -> None:
    x, y = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[::-1], dtype=torch.float64).t()
    k = only(lambda x, y: (x * y).sum(), x, y)
    assert extents(k.inner) == inner and k.vector is k.inner[-1]


# ---- splitting -----------------------------------------------------------------------------------------


def divisions(k: LoopKernel) -> list[Op]:
    found = [a for _, address in k.stores for a in address.atoms() if isinstance(a, Op)]
    for stage in k.stages:
        for item in stage:
            found += [a for e in walk(*item.exprs) for i in e.own_indices() for a in i.atoms() if isinstance(a, Op)]
    return found


@pytest.mark.parametrize(("name", "fn", "shape"), [
    ("split heads", lambda x: x.view(4, 16, 5, 20).transpose(1, 2).contiguous(), (64, 100)),
    ("merge heads", lambda x: x.transpose(1, 2).reshape(4, 16, 100) * 2, (4, 5, 16, 20)),
    ("pixel shuffle", lambda x: torch.nn.functional.pixel_shuffle(x, 2) + 1, (2, 12, 5, 7)),
    ("channel shuffle", lambda x: torch.nn.functional.channel_shuffle(x, 3) * 2, (2, 12, 5, 7)),
    ("patches", lambda x: x.reshape(2, 3, 4, 8, 4, 8).permute(0, 2, 4, 1, 3, 5).reshape(2, 16, 192) + 1,
     (2, 3, 32, 32)),
    ("repeat interleave", lambda x: x[:, :, None].expand(4, 6, 3, 10).reshape(4, 18, 10) + 1, (4, 6, 10)),
])
def test_no_division_inside_the_loops(name: str, fn: Callable[..., Any], shape: tuple[int, ...]) -> None:
    assert not divisions(only(fn, torch.randn(shape)))


def test_sizes_of_the_run_are_divided_into_equal_parts_too() -> None:
    """A row three times over is three loops along it, whatever its length."""
    k, = launches(program(lambda x: x.repeat(1, 3) + 1, torch.randn(6, 10), dynamic=True))
    assert isinstance(k, LoopKernel) and not divisions(k) and len(k.outer) == 3


def test_what_each_stage_reads_again_counts_more_than_what_is_written_once() -> None:
    """A norm over a transposed tensor: its statistics and its map read along the columns that lie side by side."""
    def norm(x: Tensor) -> Tensor:
        y = x - x.mean((0, 2), keepdim=True)
        return (y / y.square().mean((0, 2), keepdim=True).sqrt()).contiguous()

    k = only(norm, torch.randn(3, 202, 224).transpose(1, 2))
    assert k.vector in k.outer and k.form.name.endswith("columns")


def test_a_short_line_that_is_read_by_two_stages_is_still_a_poor_vector() -> None:
    k = only(lambda x: x.std(), torch.randn(8, 63, 43, 3).permute(1, 2, 0, 3))
    assert k.vector is not None and k.vector.size.const >= 8
    assert extents(k.inner) == [8 * 63 * 43 * 3]  # in the order of memory, which no store says


def test_what_is_on_its_way_has_the_order_of_run_time_strides_and_tables_do_not_choose_the_vector() -> None:
    """The gradient of a resizing, one dimension after the other: channels stay side by side, and are the vector."""
    def gradient(g: Tensor, like: Tensor) -> Tensor:
        return torch.ops.aten.upsample_nearest2d_backward(g, g.shape[2:], like.shape)

    g, like = (torch.randn(2, 24, *side).to(memory_format=torch.channels_last) for side in ((30, 31), (20, 22)))
    *_, last, = loops = launches(program(gradient, g, like, dynamic=True))
    big = [k for k in loops if len(k.outer) > 1]
    assert len(big) == 2 and last is big[-1]
    for k in big:
        assert isinstance(k, LoopKernel) and k.vector is k.outer[-1]
        assert all(a.coefficient(k.vector).const == 1 for _, a in k.stores)
        assert k.vector.name.endswith("g1"), k.vector


# ---- stages --------------------------------------------------------------------------------------------


def test_of_variables_that_are_kept_the_long_one_vectorises_at_sizes_of_the_run_too() -> None:
    """All stages read lines of two, and write lines of 300: no sum depends on which of the two has vectors."""
    (k,) = launches(program(lambda x: x.log_softmax(0), torch.randn(37, 300, 2).transpose(1, 2), dynamic=True))
    assert isinstance(k, LoopKernel) and k.vector is not None
    (at,) = dict(k.stores).values()
    assert k.vector in k.outer and at.coefficient(k.vector) is ONE


def test_stages_of_softmax() -> None:
    """max, then the sum of exponentials, then the map: each reads what the ones before it made."""
    k = only(lambda x: x.softmax(-1), torch.randn(64, 100))
    made: set[str] = set()
    for stage in k.stages:
        for item in stage:
            assert locals_in(item.exprs) <= made | {n for i in stage for n in i.names}
        made |= {n for i in stage for n in i.names}
    assert [bool(s[0].combine) for s in k.stages][:2].count(True) >= 1 and len(k.stores) == 1


def shares(x: Tensor) -> Tensor:
    y = (x.exp().sin() * x.cos()).tanh()
    return y / y.sum(-1, keepdim=True)


def test_what_several_stages_need_and_is_dear_stays_in_a_row_of_fast_memory() -> None:
    k = only(shares, torch.randn(64, 100))
    assert len(k.scratch) == 1 and len(k.stores) == 1


def test_what_is_too_long_for_fast_memory_is_not_kept_there() -> None:
    p = program(shares, torch.randn(40, 200_000))
    assert all(not k.scratch for k in launches(p) if isinstance(k, LoopKernel))


# ---- parameters ----------------------------------------------------------------------------------------


def test_parameters_are_named_once_and_marked_when_written() -> None:
    k = only(lambda x, y: x * y + x.sin() * y, torch.randn(64, 100), torch.randn(64, 100))
    assert len({p.name for p in k.params}) == len(k.params) == 3
    assert [p.written for p in k.params].count(True) == 1
    assert k.sizes == ()


def test_sizes_are_run_time_arguments_when_dynamic() -> None:
    p = program(lambda x: x.exp().sum(1), torch.randn(64, 100), dynamic=True)
    (k,) = launches(p)
    assert {s.name for s in k.sizes} <= {s.name for s, _ in p.numbers} and k.sizes


def test_scans_and_scatters() -> None:
    """A scan waits for itself at every step: rows go side by side, if there are enough of them."""
    (k,) = launches(program(lambda x: x.cumsum(1), torch.randn(3, 100)))
    assert isinstance(k, ScanKernel) and k.vector is None and int(k.axis.extent) == 100
    (k,) = launches(program(lambda x: x.cumsum(1), torch.randn(64, 100)))
    assert isinstance(k, ScanKernel) and k.vector is not None and int(k.vector.extent) == 64
    (k,) = launches(program(lambda x: x.cumsum(0), torch.randn(64, 100)))
    assert isinstance(k, ScanKernel) and k.vector is not None and int(k.axis.extent) == 64
    args = torch.randn(64, 100), torch.arange(5), torch.randn(5, 100)
    (k,) = launches(program(lambda x, i, s: x.index_add(0, i, s), *args))
    assert isinstance(k, ScatterKernel) and k.mode == "add" and extents(k.free) == [100]
    assert k.owner is not None and k.vars[-1] in k.free

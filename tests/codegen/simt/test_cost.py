"""The static model of cost: what it says of kernels whose bytes can be counted by hand, and that all kernels of the
suites keep to what is promised: no more than 1.5 times the bytes that must move, no long reduction in one work-item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from codegen.c.test_loops import softmax, sums, swapped
from codegen.programs import graph_of
from flambeau.bench.models import SUITE
from flambeau.codegen.simt.metal import SHAPE, Metal, capabilities
from flambeau.ir import build
from flambeau.ir.nodes import Value
from flambeau.ir.program import Form, Kernel, Launch, LoopKernel, TableKernel
from flambeau.schedule.plan import schedule
from targets.kernel_costs import CACHE, Cost, costs, program_costs
from targets.metal_costs import MOST, SERIAL, cliffs, models, programs

MACHINE = capabilities("metal")


def kernels(make: Callable[..., Sequence[Value]], *shapes: tuple[int, ...]) -> list[Kernel]:
    graph = graph_of(make, *(torch.empty(shape, device="meta") for shape in shapes))
    return [k for k in schedule(graph, MACHINE).kernels if not hasattr(k, "body")]


def one(make: Callable[[Value], Value], *shape: int) -> Cost:
    kernel, = kernels(lambda x: [make(x)], shape)
    cost, = costs(kernel, Metal, SHAPE)
    return cost


def doubled(x: Value) -> Value:
    return build.pointwise(x.shape, lambda i: x.load(i) * 2)


def test_bytes_of_a_map() -> None:
    cost = one(doubled, 256, 1000)
    assert (cost.must, cost.moved, cost.passes, cost.alone) == (2_048_000, 2_048_000, 1, 0)
    assert cost.groups * cost.threads == 256_000 / 4


def test_what_all_rows_read_counts_once() -> None:
    kernel, = kernels(lambda x, y: [build.pointwise(x.shape, lambda i: x.load(i) + y.load(i[1:]))], (5000, 512), (512,))
    cost, = costs(kernel, Metal, SHAPE)
    assert cost.must == cost.moved == 2 * 5000 * 512 * 4 + 512 * 4


def test_a_transposition_by_tiles_moves_lines_once_and_one_by_points_many_times(monkeypatch) -> None:  # type: ignore
    kernel, = kernels(lambda x: [swapped(x)], (20_000, 20_000))
    tiled, = costs(kernel, Metal, SHAPE)
    points = replace(kernel, form=Form("points"))
    in_bands, = costs(points, Metal, SHAPE)
    monkeypatch.setattr("flambeau.codegen.simt.points.bands", lambda *_: None)
    by_points, = costs(points, Metal, SHAPE)
    assert tiled.ratio == 1 and in_bands.ratio < 1.1 and by_points.ratio > 4


def test_rows_in_registers_are_read_once() -> None:
    assert one(lambda x: softmax(x, 1), 2000, 5000).ratio == 1
    long = one(lambda x: softmax(x, 1), 2000, 200_000)  # a pass for the statistics, and one for the results
    assert long.passes == 2 and 1.3 < long.ratio <= 1.5
    kernel, = kernels(lambda x: [softmax(x, 1)], (2000, 5000))
    by_points, = costs(replace(kernel, form=Form("points"), scratch=frozenset()), Metal, SHAPE)
    assert by_points.passes == 3 and by_points.ratio == 2 and by_points.alone == 5000


def test_values_take_fewer_registers_than_what_they_are_computed_from() -> None:
    def shifted(a: Value, b: Value, c: Value) -> Value:
        return build.pointwise(a.shape, lambda i: a.load(i) * b.load(i) + c.load(i))

    def centred(a: Value, b: Value, c: Value) -> list[Value]:
        h = shifted(a, b, c)
        m = sums(h, [1])
        return [build.pointwise(h.shape, lambda i: h.load(i) - m.load(i[:1]))]

    whole, = (costs(k, Metal, SHAPE)[0] for k in kernels(centred, *[(2000, 30_000)] * 3))
    assert whole.passes == 1 and whole.ratio == 1  # three reads of four bytes would leave room for a third of a row
    long, = (costs(k, Metal, SHAPE)[0] for k in kernels(centred, *[(2000, 65_536)] * 3))
    found = CACHE / (32 * 4 * 4 * 65_536)  # by each of 32 groups at once: three inputs and the result, backwards
    assert abs(long.moved / long.must - (3 + 3 * (1 / 2 - found) + 1) / 4) < 1e-3


def test_columns_are_shared() -> None:
    assert one(lambda x: sums(x, [0]), 1000, 200_000).alone == 0
    assert one(lambda x: sums(x, [0]), 60, 200_000).alone == 60
    kernel, = kernels(lambda x: [sums(x, [0])], (1000, 200_000))
    by_points, = costs(replace(kernel, form=Form("points")), Metal, SHAPE)
    assert by_points.alone == 1000


def test_products_are_held_against_what_a_cache_allows() -> None:
    for make, shapes in ((product, ((4096, 4096), (4096, 4096))), (product, ((64, 64), (64, 64)))):
        kernel, = kernels(lambda x, y, make=make: [make(x, y)], *shapes)
        cost, = costs(kernel, Metal, SHAPE)
        assert cost.ratio <= MOST and 0 < cost.occupancy <= 1 and cost.local > 0


def product(x: Value, y: Value) -> Value:
    return build.contract((x.shape[0], y.shape[1]), (x.shape[1],), lambda i: x.load((i[0], i[2])),
                          lambda i: y.load((i[2], i[1])), torch.float32)


def test_a_scan_goes_over_its_rows_once() -> None:
    for axis in (0, 1):
        cost = one(lambda x, axis=axis: build.scan(x.shape, axis, build.simple_combine("sum", x.dtype), x.load)[0],
                   3072, 3072)
        assert cost.ratio == 1 and cost.alone == 0


def both_ways(x: Value, y: Value) -> Value:
    return build.pointwise(x.shape, lambda i: x.load(i) * y.load(i[::-1]))


def test_what_lies_across_the_rows_moves_once() -> None:
    for rows, length in ((300, 3000), (3000, 60_000), (5, 400_000)):
        for cost in (cost for k in kernels(lambda x, y: [sums(both_ways(x, y), [1])], (rows, length), (length, rows))
                     for cost in costs(k, Metal, SHAPE)):
            assert cost.ratio <= MOST and cost.alone <= SERIAL, (rows, length, str(cost))
    kernel, = kernels(lambda x, y: [sums(both_ways(x, y), [1])], (3000, 60_000), (60_000, 3000))
    by_rows, = costs(replace(kernel, form=Form("rows")), Metal, SHAPE)
    assert kernel.form.name == "columns" and by_rows.ratio > 4


def test_a_scan_across_its_rows_moves_lines_once() -> None:
    x = torch.empty((100_000, 300), device="meta").t()
    graph = graph_of(lambda v: [build.scan(v.shape, 1, build.simple_combine("sum", v.dtype), v.load)[0]], x)
    for kernel in schedule(graph, MACHINE).kernels:
        cost, = costs(kernel, Metal, SHAPE)
        assert cost.ratio <= 1.1 and cost.alone == 0


def test_a_scan_of_few_in_bands_counts_its_axis() -> None:
    x = torch.empty((16, 1992, 936), device="meta").transpose(1, 2)
    graph = graph_of(lambda v: [build.scan(v.shape, 0, build.simple_combine("sum", v.dtype), v.load)[0]], x)
    for kernel in schedule(graph, MACHINE).kernels:
        cost, = costs(kernel, Metal, SHAPE)
        assert cost.must < 1.1 * 2 * 4 * x.numel() and cost.ratio <= MOST


def interleaved(x: Value, y: Value) -> Value:
    """Products of a batch, one factor of which has those of all of them side by side."""
    return build.contract((x.shape[2], x.shape[0], y.shape[2]), (x.shape[1],), lambda i: x.load((i[1], i[3], i[0])),
                          lambda i: y.load((i[0], i[3], i[2])), torch.float32)


def test_products_that_share_lines_move_them_once() -> None:
    kernel, = kernels(lambda x, y: [interleaved(x, y)], (70_000, 31, 4), (4, 31, 24))
    assert costs(kernel, Metal, SHAPE)[0].ratio < 1.1


def test_a_sum_of_what_lies_two_ways_is_cut_between_lines() -> None:
    every = kernels(lambda x, y: [sums(both_ways(x, y), [0, 1])], (50_000, 1100), (1100, 50_000))
    assert all(cost.ratio <= 1.1 for k in every for cost in costs(k, Metal, SHAPE))


def test_all_rows_that_lie_in_each_others_lines_come_side_by_side() -> None:
    x = torch.empty((4500, 9, 8), device="meta").permute(2, 1, 0)
    graph = graph_of(lambda v: [build.pointwise(v.shape, lambda i: v.load(i) * 2)], x)
    kernel, = schedule(graph, MACHINE).kernels
    assert isinstance(kernel, LoopKernel)
    points, = costs(replace(kernel, form=Form("points")), Metal, SHAPE)
    assert points.ratio < 1.1


@pytest.mark.parametrize(("length", "rows"), [(300_000, 4), (30_000, 500)])
def test_rows_that_share_lines_at_places_that_are_computed_come_side_by_side(length: int, rows: int) -> None:
    def resized(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, scale_factor=2.01, mode="linear")

    with FakeTensorMode():
        x = torch.empty(1, length, rows).mT
        (_, program), = programs("interpolate", lambda compile: compile(resized)(x))
    (_, cost), = program_costs(program, Metal, SHAPE)
    assert cost.ratio < 1.1


@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_of_rows_that_lie_in_each_others_lines(dynamic: bool) -> None:
    """A channel's windows touch more lines than a cache holds, though its points are few."""
    pooled = lambda x: torch.nn.functional.adaptive_max_pool2d(x, (48, 57), return_indices=True)  # noqa: E731
    with FakeTensorMode():
        x = torch.empty(106, 1, 151, 57, dtype=torch.bfloat16).permute(1, 3, 0, 2)
        found = programs("pool", lambda compile: compile(pooled, dynamic=dynamic)(x))
    every = [cost for _, program in found for _, cost in program_costs(program, Metal, SHAPE)]
    assert every and all(cost.ratio < 1.1 for cost in every)


def test_reductions_whose_results_lie_the_other_way_move_lines_once() -> None:
    with FakeTensorMode():
        x = torch.empty(96, 7568, 13).permute(2, 1, 0)
        (_, program), = programs("min", lambda compile: compile(lambda x: x.min(0))(x))
    (_, cost), = program_costs(program, Metal, SHAPE)
    assert cost.ratio < 1.1


def test_tiles_that_read_the_same_come_side_by_side() -> None:
    def scaled(x: Value, y: Value, z: Value) -> list[Value]:
        return [build.pointwise(x.shape, lambda i: x.load(i) * y.load((i[2], i[1])) * z.load(i[1:]))]

    kernel, = kernels(scaled, (157, 4840, 32), (32, 4840), (4840, 32))
    cost, = costs(kernel, Metal, SHAPE)
    assert cost.ratio < 1.1


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_read_under_a_mask_is_transposed_by_tiles(dynamic: bool) -> None:
    with FakeTensorMode():
        x, y = torch.empty(11, 6095, 232).permute(2, 0, 1), torch.empty(232, 6095, 11).transpose(1, 2)
        joined = lambda x, y: torch.cat((x, y, x))  # noqa: E731
        (_, program), = programs("cat", lambda compile: compile(joined, dynamic=dynamic)(x, y))
    (_, cost), = program_costs(program, Metal, SHAPE)
    assert cost.ratio < 1.1


def test_a_sum_over_what_is_contiguous_here_and_there_reads_lines_once() -> None:
    def weight(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return torch.nn.grad.conv3d_weight(x, (24, 1, 5, 5, 5), g, padding=2)

    with FakeTensorMode():
        x, g = torch.empty(47, 87, 62, 17).movedim(3, 0).unsqueeze(1), torch.empty(17, 24, 47, 87, 62)
        (_, program), = programs("weight", lambda compile: compile(weight)(x, g))
    found = [cost for _, cost in program_costs(program, Metal, SHAPE)]
    assert found and all(cost.ratio < 1.1 for cost in found)


def test_what_a_call_reads_has_to_be_written() -> None:
    """A kernel that prepares what ATen computes with moves nothing in vain."""
    x = torch.randn(300, 40)
    (_, program), = programs("lgamma", lambda compile: compile(lambda x: torch.lgamma(x * 2))(x))
    (_, cost), = program_costs(program, Metal, SHAPE)
    assert cost.must == cost.moved >= 2 * 4 * 300 * 40


def test_what_a_cache_holds_is_read_once() -> None:
    def with_itself(x: Value) -> Value:
        return build.contract((3, 4, 4), (8,), lambda i: x.load((i[0], i[1], i[3])),
                              lambda i: x.load((i[0], i[2], i[3])), torch.float32)

    assert one(with_itself, 3, 4, 8).moved == 4 * 3 * (4 * 8 + 4 * 4)


def keeps(programs: list) -> None:
    found = [(name, kernel, cost) for name, program in programs
             for kernel, cost in program_costs(program, Metal, SHAPE)]
    launched = [program.kernels[s.kernel] for _, program in programs for s in program.steps if isinstance(s, Launch)]
    assert {id(kernel) for _, kernel, _ in found} == {id(k) for k in launched if not isinstance(k, TableKernel)}
    for name, kernel, cost in found:
        assert cost.ratio <= MOST and cost.alone <= SERIAL, (name, kernel.origins, str(cost), cost.alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(900, 1000))
def test_random_cases_keep_to_it(seed: int) -> None:
    keeps(cliffs(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_models_keep_to_it(name: str) -> None:
    keeps(models(name))

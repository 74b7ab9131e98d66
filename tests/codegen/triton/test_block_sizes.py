"""Sizes of blocks and their order, as texts show them: what fits a product, few reads, shared lines, and a softmax."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.capture.decompositions import table
from flambeau.capture.graph import capture
from flambeau.codegen.triton.dialect import CAPABILITIES
from flambeau.codegen.triton.kernel import render
from flambeau.ir.tuning import ProductTile
from flambeau.schedule.plan import schedule


def texts(fn: Callable[..., Any], *args: torch.Tensor, own: bool = False, mode: str = "fake") -> list[str]:
    graph = make_fx(lambda *given: [fn(*given)], decomposition_table=table(False), tracing_mode=mode)(*args)
    names = frozenset(n.name for n in graph.graph.nodes) if own else frozenset[str]()
    captured = capture(graph, CAPABILITIES, frozenset(), own=names)
    return [render(k, "k").text for k in schedule(captured.graph, CAPABILITIES).kernels]


def tiles(text: str) -> list[int]:
    """The blocks of each variable of a tile."""
    return [int(block) for block in re.findall(r"tl\.arange\(0, (\d+)\)\[", text)]


def test_a_tile_is_no_deeper_than_the_sum() -> None:
    tile = ProductTile(128, (128,), 128, 4, 8)
    cut = tile.cut(19, 2)
    assert (cut.deep, cut.stages) == (64, 1)
    assert tile.cut(3, 1).deep == 32, "tensor cores take so many bytes at least"
    assert tile.cut(4096, 2) == tile


def test_tiles_of_thin_products_are_thin() -> None:
    x, w = torch.empty(133688, 19, dtype=torch.bfloat16), torch.empty(31, 19, dtype=torch.bfloat16)
    text, = texts(lambda x, w: F.mish(x @ w.t()), x, w, own=True)
    sides = re.search(r"tl\.zeros\(\[(\d+), (\d+)\]", text)
    assert sides is not None and int(sides[2]) == 32


def test_threads_that_read_little_have_several_points() -> None:
    text, = texts(lambda x: x.repeat(1, 3), torch.empty(8000, 1088))
    assert "tl.arange(0, 512)" in text and text.count("tl.load(") == 1


def test_what_is_repeated_is_transposed_in_tiles() -> None:
    x = torch.empty(8, 500, 112).transpose(1, 2)
    text, = texts(lambda x: x.repeat_interleave(2, 2), x)
    assert sorted(tiles(text)) == [2, 16, 32]


def test_what_is_written_side_by_side_is_a_point_of_a_gather() -> None:
    x = torch.empty(58, 65, 76, 1, 25).permute(3, 4, 2, 1, 0)
    size = (138, 101, 58)
    text, = texts(lambda x: F.interpolate(x, size, mode="trilinear", align_corners=False).contiguous(), x)
    assert re.search(r"g3 = \(pid % 2\) \* 32 \+ tl\.arange", text)


def test_lines_that_are_shared_come_one_after_the_other() -> None:
    text = texts(lambda x, y: (x * y[:, None]).sum(), torch.empty(3000000, 23)[:, :7], torch.empty(3000000))[0]
    assert re.search(r"= q\d+ % 7\n", text)


def test_statistics_of_a_softmax_join_by_their_largest() -> None:
    text, = texts(lambda x: F.softmax(x, 1), torch.empty(300, 40000))
    assert "tl.reduce((" not in text and text.count("tl.reduce(") == 2


def test_few_columns_leave_programs_for_a_gpu() -> None:
    text, = texts(lambda x: F.softmax(x, 0), torch.empty(200, 1984), mode="symbolic")
    assert "* 16 + tl.arange(0, 16)" in text


@pytest.mark.parametrize("mode", ("fake", "symbolic"))
def test_a_softmax_written_across_its_rows_is_a_map_in_tiles(mode: str) -> None:
    rows, across = texts(lambda x: F.softmax(x, 0).contiguous(), torch.empty(1984, 2607).t(), mode=mode)
    assert "tl.reduce(" in rows and not tiles(rows)
    assert "tl.reduce(" not in across and tiles(across) == [64, 64]


def test_a_softmax_written_across_its_columns_is_a_map() -> None:
    columns, across = texts(lambda x: F.softmax(x, 0).contiguous(), torch.empty(568, 5, 6104).transpose(1, 2))
    assert "tl.reduce(" in columns and "tl.reduce(" not in across


@pytest.mark.parametrize("x", (torch.empty(500, 300).t(), torch.empty(96, 7, 300).transpose(1, 2)))
def test_small_or_short_crossings_stay_in_one_kernel(x: torch.Tensor) -> None:
    text, = texts(lambda x: F.softmax(x, 0).contiguous(), x)
    assert text.count("tl.store(") == 1


def test_short_lines_that_follow_one_another_are_transposed_in_tiles() -> None:
    """Read along the first dimension, and written along the last two or three."""
    together = torch.empty(80, 336, 13, 56).permute(3, 0, 1, 2)
    text, = texts(lambda x: (x * 2).contiguous(), together)
    assert tiles(text) == [64, 64]
    apart = torch.empty(15, 16, 12, 13, 64).permute(2, 4, 3, 1, 0)
    text, = texts(lambda x: (x * 2).contiguous(), apart)
    assert tiles(text) == [32, 32] and re.search(r"// 15\b", text), "few tiles are smaller"


def test_short_lines_of_few_elements_stay_lines() -> None:
    text, = texts(lambda x: (x * 2).contiguous(), torch.empty(8, 3, 5000).transpose(1, 2))
    assert not tiles(text)


def test_tiles_of_several_transposed_reads_are_smaller() -> None:
    x, y = torch.empty(53, 209895), torch.empty(209895, 53).t()
    text, = texts(lambda x, y, z: x * y * z, x, y, torch.empty_like(y))
    assert tiles(text) == [32, 32]
    text, = texts(lambda y: (y * 2).contiguous(), y)
    assert tiles(text) == [64, 64]


def test_columns_of_several_short_lines_are_scanned_side_by_side() -> None:
    text, = texts(lambda x: x.logcumsumexp(0), torch.empty(131, 65723, 6)[:, :, :5])
    assert tiles(text) == [32, 32] and re.search(r"% 5\b", text)
    text, = texts(lambda x: x.logcumsumexp(0), torch.empty(131, 65723, 9)[:, :, :8])
    assert tiles(text) == [8, 4, 32]


def test_tiles_that_share_what_they_read_lie_on_top_of_one_another() -> None:
    x, y = torch.empty(80, 40, 49, 63).permute(1, 3, 0, 2), torch.empty(40, 49, 63).transpose(1, 2)
    text, = texts(lambda x, y: (x - y[:, :, None]).contiguous(), x, y)
    assert sorted(tiles(text)) == [4, 32, 32]


def test_lines_that_data_decide_are_read_in_tiles() -> None:
    x = torch.empty(3000, 4, 24).permute(1, 2, 0)
    text, = texts(lambda x: F.interpolate(x, 4100, mode="nearest"), x)
    assert sorted(tiles(text)) == [32, 32]


def test_data_crossed_within_rows_is_read_in_tiles() -> None:
    text = texts(lambda x, y: F.smooth_l1_loss(x, y), torch.empty(3661255, 6), torch.empty(6, 3661255).t())[0]
    assert "tl.full([8, 256]" in text


def test_reads_apart_and_short_lines_have_adjacent_threads() -> None:
    text, = texts(lambda x, y: x * y[..., 0], torch.empty(4000000).half(), torch.empty(4000000, 18).half())
    assert "* 512 + tl.arange(0, 512)" in text
    text, = texts(lambda x, y: x + y, torch.empty(928416, 3, 9).half(), torch.empty(928416, 1, 1).half())
    assert not tiles(text), "27 of 32 lanes, each with an access of its own"


def test_one_program_of_the_last_columns_reads_more_at_once() -> None:
    _, final = texts(lambda x: x.amax(0), torch.empty(1146233, 17))
    assert "tl.full([512, 16]" in final


def test_tiles_cross_the_large_operand_rather_than_a_small_table() -> None:
    """The operand is contiguous along the second dimension, and a table along the first."""
    x, table = torch.empty(24, 27, 11, 208).permute(0, 3, 1, 2), torch.empty(208, 24).t()[:, :, None, None]
    text, = texts(lambda x, y: (x + y).contiguous(), x, table)
    axes = re.findall(r"(\w+) = .*tl\.arange", text)
    assert sorted(axes) == ["g1", "g2g3"]

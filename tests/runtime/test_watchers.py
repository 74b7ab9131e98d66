"""NVTX ranges: one around each call of a program and one around each launch, by the names of the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from flambeau.pipeline import compile_graph
from flambeau.runtime import launch_plan, watchers


def graph() -> fx.GraphModule:
    """Two kernels: a row is not known before all of the column is."""
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten.cumsum.default(torch.ops.aten.cumsum.default(x, 0), 1)]

    gm = fx.symbolic_trace(f)
    for n in gm.graph.nodes:
        n.meta["val"] = torch.empty(5, 7)
    return gm


@pytest.mark.parametrize("on", [True, False])
def test_ranges(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    if on:
        nvtx = watchers.ranged(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
        monkeypatch.setattr(launch_plan, "watching", lambda device: [nvtx])
    x = torch.rand(5, 7)
    got, = compile_graph(graph())([x])
    torch.testing.assert_close(got, x.cumsum(0).cumsum(1))
    if not on:
        assert not seen
        return
    whole, first, end, second, *ends = seen
    assert whole == f"{first} and 1 more" and "cumsum" in first and "cumsum" in second
    assert [end, *ends] == ["end", "end", "end"]

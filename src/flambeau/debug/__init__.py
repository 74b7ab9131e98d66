"""Tools to look into compiled programs: collect graphs, explain, compare with eager, trace.

    with flambeau.debug.collect() as graphs:
        torch.compile(function, backend="flambeau")(x)
    for graph in graphs:
        print(graph.program.notes, graph.texts[0].text)

    graph, groups = flambeau.debug.regions(model, x)
    for tally in flambeau.debug.recordings():
        print(tally.label, tally.replayed, tally.recorded, tally.uncaptured)
    print(flambeau.debug.compare(model, x, numerics="eager"))
    print(flambeau.debug.explain(model, x))
    with flambeau.debug.trace("out"): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx

from flambeau.compare.comparison import Comparison, compare
from flambeau.compare.recorded_calls import observed
from flambeau.compile.regions import cut as region_search
from flambeau.compile.regions.cut import Pieces
from flambeau.compile.regions.pieces import in_pieces
from flambeau.compile.subgraphs import calls_subgraphs, written_out
from flambeau.pipeline import Compiled
from flambeau.report.program import Explanation, summarise
from flambeau.runtime.recording import RECORDED, Tally
from flambeau.torch_compat import pytree
from flambeau.torch_compat.dynamo import compilation_time_metrics

from .session import held
from .trace import trace

__all__ = ["Comparison", "Explanation", "collect", "collect_regions", "compare", "compile_once", "explain",
           "recordings", "regions", "trace"]


@contextmanager
def collect() -> Iterator[list[Compiled]]:
    """Collect the graphs that are compiled inside the block, by any thread, in order."""
    found: list[Compiled] = []
    with observed(found.append):
        yield found


@contextmanager
def collect_regions() -> Iterator[list[Pieces]]:
    """Collect how graphs were cut into pieces inside the block, to compile repeated regions once."""
    found: list[Pieces] = []
    with held(region_search.OBSERVERS, found.append):
        yield found


def recordings() -> list[Tally]:
    """Counts of recorded and replayed calls of each graph in use that was compiled with the option `graphs`."""
    return [r.tally for r in sorted(RECORDED, key=lambda r: r.number)]


def regions(function: Callable[..., Any], *args: Any) -> tuple[fx.Graph, list[list[list[fx.Node]]]]:
    """The graph that Dynamo captures for a call, and its repeated regions: for each region, the nodes of each instance.

    If there are several graphs, this is the largest. Nothing is compiled; the call runs as in eager mode.
    """
    found: list[Pieces] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = written_out(gm) if calls_subgraphs(gm) else gm
        found.append(cut := region_search.cut(gm, inputs))
        return in_pieces(cut, lambda piece, _: piece.forward) if cut.pieces else gm.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*args)
    largest = max(found, key=lambda f: len(f.gm.graph.nodes), default=None)
    return (largest.gm.graph, largest.groups()) if largest is not None else (fx.Graph(), [])


def explain(function: Callable[..., Any], *args: Any, numerics: str = "fast", backward: bool = True) -> Explanation:
    """Compile a function for these arguments, and show its graphs, kernels, library calls and memory."""
    return Explanation([summarise(g) for g in compile_once(function, args, numerics=numerics, backward=backward)])


def compile_once(function: Callable[..., Any], inputs: Sequence[Any], *, backward: bool = True,
                 numerics: str = "fast", graphs: bool = False, calls: int = 1) -> list[Compiled]:
    """Compile a function for these inputs, run it (and its backward, if it has one), and return its graphs."""
    torch.compiler.reset()  # otherwise graphs of earlier calls would be reused, and not be seen here
    compilation_time_metrics.clear()
    compiled = torch.compile(function, backend="flambeau", options={"numerics": numerics, "graphs": graphs})
    with collect() as found:
        for _ in range(calls):
            outputs = compiled(*inputs)
            wanted = [o for o in pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]
            if backward and wanted:
                torch.autograd.backward(wanted, [torch.ones_like(o) for o in wanted])
            del outputs, wanted
    return found

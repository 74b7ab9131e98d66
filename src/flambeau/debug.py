"""Looking inside: every graph that Flambeau compiles in a block, and what became of it.

    with flambeau.debug.collect() as graphs:
        torch.compile(function, backend="flambeau")(x)
    for graph in graphs:
        print(graph.program.notes, graph.texts[0].text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flambeau.config import config
from flambeau.frontends import pipeline
from flambeau.frontends.pipeline import Compiled


@contextmanager
def collect() -> Iterator[list[Compiled]]:
    """The graphs compiled inside the block, by whichever thread, in the order of their compilation."""
    found: list[Compiled] = []
    observer = found.append
    pipeline.OBSERVERS.append(observer)
    try:
        # A graph that is found on disk would not be compiled, and not be seen.
        with config.override(graph_cache=False):
            yield found
    finally:
        pipeline.OBSERVERS.remove(observer)


def compile_once(function: Callable[..., Any], inputs: Sequence[Any], *, backward: bool = True,
                 numerics: str = "fast") -> list[Compiled]:
    """The graphs of a function, compiled for these inputs and run once, with its backward if it has one."""
    torch._dynamo.reset()  # what an earlier call left compiled would not be compiled, and seen, again
    with collect() as graphs:
        outputs = torch.compile(function, backend="flambeau", options={"numerics": numerics})(*inputs)
        wanted = [o for o in pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]
        if backward and wanted:
            torch.autograd.backward(wanted, [torch.ones_like(o) for o in wanted])
    return graphs

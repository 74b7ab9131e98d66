"""Graphs written by hand, scheduled, rendered, built and run: the kernels themselves, without torch's tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from flambeau.ir import build
from flambeau.ir.index import IndexLike, Sym, as_index
from flambeau.ir.nodes import Graph, Host, Value
from flambeau.ir.program import AnyKernel, LoopKernel, Program, ScanKernel, ScatterKernel
from flambeau.runtime.executor import write
from flambeau.schedule.plan import schedule
from flambeau.targets.base import get_target

Make = Callable[..., Sequence[Value]]


@dataclass
class Built:
    program: Program
    texts: list[str]
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]]

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        return self.run(list(args))

    @property
    def forms(self) -> set[str]:
        return {form(k, t) for k, t in zip(self.program.kernels, self.texts, strict=True)}


def graph_of(make: Make, *args: torch.Tensor, dynamic: bool = False) -> Graph:
    """The graph for arguments of these shapes, strides and dtypes; dynamic: contiguous ones of any size."""
    g = Graph()
    with build.building(g):
        values = []
        for k, t in enumerate(args):
            shape: Sequence[IndexLike] = t.shape
            if dynamic:
                sizes = [Sym(f"s{k}_{d}") for d in range(t.dim())]
                g.numbers |= {s: Host(f"in{k}.shape[{d}]", frozenset((f"in{k}",))) for d, s in enumerate(sizes)}
                shape = [as_index(s) for s in sizes]
            values.append(g.add_input(shape, t.dtype, None if dynamic else t.stride()))
        g.outputs = list(make(*values))
    return g


def built(make: Make, *args: torch.Tensor, dynamic: bool = False, on: str = "cpu") -> Built:
    """The program that computes make(values), ready to run."""
    target = get_target(on)
    g = graph_of(make, *args, dynamic=dynamic)
    # Graphs here are many small ones side by side: each kernel by itself, not all of one form along a table.
    program = schedule(g, replace(target.capabilities(), tables=False), True)
    kernels = [target.render(k, f"k{i}") for i, k in enumerate(program.kernels)]
    package = write(program, target.name, kernels)
    return Built(program, [k.text for k in kernels], package.load())


def run(make: Make, *args: torch.Tensor, on: str = "cpu") -> list[torch.Tensor]:
    return built(make, *args, on=on)(*args)


def form(k: AnyKernel, text: str) -> str:
    """What kind of loops a kernel has."""
    if isinstance(k, ScatterKernel):
        free = [v for v in k.vars if v in k.free]
        return f"scatter {k.mode} {'owned' if 'fl::threads()' in text else 'free' if free else 'serial'}"
    if isinstance(k, ScanKernel):
        return f"scan {'row' if k.vector is None else 'column'}{' reversed' if k.reverse else ''}"
    assert isinstance(k, LoopKernel), k
    if k.bounds is not None:
        return "segment"
    if not k.inner:
        return "tiled" if k.tile is not None else "map"
    return f"{'chunked ' if 'part' in text else ''}{'column' if k.vector in k.outer else 'row'}"

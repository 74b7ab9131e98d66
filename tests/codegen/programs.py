"""Graphs written by hand, scheduled, rendered, built and run: the kernels themselves, without torch's tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flambeau.codegen.cpp import render
from flambeau.errors import CompileError
from flambeau.frontends.executor import Runner
from flambeau.ir import build
from flambeau.ir.nodes import Graph, Value
from flambeau.ir.program import Kernel, LoopKernel, Program, ScanKernel, ScatterKernel
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


def graph_of(make: Make, *args: torch.Tensor) -> Graph:
    g = Graph()
    with build.building(g):
        g.outputs = list(make(*(g.add_input(t.shape, t.dtype, t.stride()) for t in args)))
    return g


def built(make: Make, *args: torch.Tensor, numerics: str = "fast") -> Built:
    """The program that computes make(values) for arguments of these shapes, strides and dtypes."""
    target = get_target("cpu")
    program = schedule(graph_of(make, *args), target.capabilities(), numerics, True)
    sources = [render(k, f"k{i}") for i, k in enumerate(program.kernels)]
    kernels = target.build(sources).wait() if sources else {}
    for k in kernels.values():
        if isinstance(k, CompileError):
            raise k
    runner = Runner(program, target, {}, list(range(len(args))), len(args))
    return Built(program, [s.text for s in sources], runner.build(lambda step: kernels[f"k{step.kernel}"]))


def run(make: Make, *args: torch.Tensor) -> list[torch.Tensor]:
    return built(make, *args)(*args)


def form(k: Kernel, text: str) -> str:
    """What kind of loops a kernel has."""
    if isinstance(k, ScatterKernel):
        free = [v for v in k.vars if v in k.free]
        return f"scatter {k.mode} {'owned' if 'fl::threads()' in text else 'free' if free else 'serial'}"
    if isinstance(k, ScanKernel):
        return f"scan {'row' if k.vector is None else 'column'}{' reversed' if k.reverse else ''}"
    assert isinstance(k, LoopKernel)
    if k.bounds is not None:
        return "segment"
    if not k.inner:
        return "tiled" if k.tile is not None else "map"
    return f"{'chunked ' if 'part' in text else ''}{'column' if k.vector in k.outer else 'row'}"


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Calls of a function as nodes of a graph, by a mode that belongs to its thread."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from flambeau.capture.decompositions import table
from flambeau.eager.call_recorder import CallRecorder
from flambeau.errors import UnsupportedError
from flambeau.torch_compat.fake import FakeTensorMode

aten = torch.ops.aten


def recorded(function, *examples: torch.Tensor) -> fx.Graph:
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) for x in examples]
        recorder = CallRecorder(graph, table(False))
        for k, x in enumerate(given):
            recorder.add(x, graph.placeholder(f"x{k}"))
        with recorder:
            made = function(*given)
        graph.output([recorder.node(x) for x in (made if isinstance(made, tuple) else (made,))])
    return graph


def test_calls_and_their_parts_are_nodes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.nn.functional.linear(x, y).max(1)  # autograd would see a product
        return values.tanh(), indices

    x, y = torch.randn(3, 4), torch.randn(5, 4)
    graph = recorded(function, x, y)
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    assert aten.linear.default not in targets and aten.max.dim in targets
    for made, wanted in zip(fx.Interpreter(fx.GraphModule({}, graph)).run(x, y), function(x, y), strict=True):
        torch.testing.assert_close(made, wanted)


def test_symbolic_sizes_are_arguments() -> None:
    graph, mode, real = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv()), torch.randn(3, 4)
    with mode, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2))
        recorder = CallRecorder(graph, {})
        recorder.add(x, graph.placeholder("x"))
        with recorder:
            made = x.view(x.shape[1], x.shape[0])
    call = recorder.node(made)
    assert not said and isinstance(x.shape[0], torch.SymInt)
    assert call.target is aten.view.default and call.args[1] == [x.shape[1], x.shape[0]]


def test_tensors_from_outside_are_refused() -> None:
    outside = torch.ones(3)
    with pytest.raises(UnsupportedError, match="tensors of its own"):
        recorded(lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + outside.sum(), torch.randn(3))


def test_compiled_functions_run_in_other_threads_meanwhile() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="flambeau")
    given = torch.randn(8)

    def function(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:  # make_fx: "using FX to symbolically trace a dynamo-optimized function"
            results.append(pool.submit(compiled, given).result())
        return x.cos()

    results = [compiled(given)]
    assert [n.target for n in recorded(function, torch.randn(3)).nodes if n.op == "call_function"] == [aten.cos.default]
    torch.testing.assert_close(results[0], results[1])

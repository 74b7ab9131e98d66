"""The verifier: every rule of the language, broken once on purpose, is reported in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flambeau.ir import build
from flambeau.ir.build import make_combine, simple_combine
from flambeau.ir.expr import Expr, const, load
from flambeau.ir.faults import Fault
from flambeau.ir.index import Sym, as_index
from flambeau.ir.nodes import Graph, Pointwise, Reduce, Scatter, Segment, Value, as_indices, dim_vars
from flambeau.ir.verify import VerificationError, verify

F32, F64, I64, BOOL = torch.float32, torch.float64, torch.int64, torch.bool


@pytest.fixture
def graph() -> Graph:
    """in0: float32[4, 6]; b1 = in0 + 1; b2 = sum of b1 over axis 1; b3 = a scatter; b4 = a segment."""
    g = Graph()
    with build.building(g, "test"):
        x = g.add_input((4, 6), F32)
        y = build.pointwise(x.shape, lambda i: x.load(i) + 1.0)
        total, = build.reduce(y.shape, [1], simple_combine("sum", F32), lambda i: y.load(i))
        z = build.scatter((4,), lambda i: total.load(i), (4,), lambda j: j, lambda j: total.load(j), "add")
        s, = build.segment((4, 6), 1, lambda i: const(0, I64), lambda i: const(3, I64), simple_combine("sum", F32),
                           lambda i: y.load(i))
        g.outputs = [z, s]
    return g


def change(g: Graph, position: int, **fields: object) -> None:
    g.nodes[position] = replace(g.nodes[position], **fields)  # type: ignore[type-var]


def body(g: Graph, e: Expr) -> None:
    change(g, 0, body=e)


V = dim_vars((as_index(4), as_index(6)))
AT = as_indices(V)
X = load("in0", AT, F32)


def twice(g: Graph) -> None:
    g.nodes.append(g.nodes[0])


def unlisted(g: Graph) -> None:
    change(g, 0, names=("b99",))


def too_early(g: Graph) -> None:
    g.nodes[0], g.nodes[1] = g.nodes[1], g.nodes[0]


def never_made(g: Graph) -> None:
    g.outputs.append(Value("b77", (), F32, ()))


def wrong_mode(g: Graph) -> None:
    change(g, 2, mode="xor")


def mixed_scatter(g: Graph) -> None:
    n = g.nodes[2]
    assert isinstance(n, Scatter)
    change(g, 2, value=const(1, I64))


def mixed_combine(g: Graph) -> None:
    change(g, 1, inputs=(const(1, I64),))


def combine_that_returns_another_dtype(g: Graph) -> None:
    c = make_combine("odd", (F32,), (0,), lambda a, b: (a[0] < b[0],))
    change(g, 1, combine=c)


def two_axes(g: Graph) -> None:
    n = g.nodes[3]
    assert isinstance(n, Segment)
    g.buffers[n.names[0]].shape = ()
    change(g, 3, axes=frozenset((0, 1)))


def kept_shape(g: Graph) -> None:
    n = g.nodes[1]
    assert isinstance(n, Reduce)
    change(g, 1, axes=frozenset((0,)))


def other_shape(g: Graph) -> None:
    n = g.nodes[0]
    assert isinstance(n, Pointwise)
    change(g, 0, vars=dim_vars((as_index(6), as_index(4))), body=const(1.0, F32))


VIOLATIONS: dict[str, tuple[Callable[[Graph], None], str]] = {
    "a buffer computed twice": (twice, "b1 is computed twice"),
    "a buffer without an entry": (unlisted, "b99 is not in the buffer table"),
    "a read before the write": (too_early, "reads b1, which is not computed before"),
    "an output nobody computes": (never_made, "output b77 is never computed"),
    "a stray symbol": (lambda g: body(g, load("in0", (as_index(Sym("q", 4)), AT[1]), F32)), r"symbols \['q'\]"),
    "another shape": (other_shape, r"shape \(6, 4\) into b1 of shape \(4, 6\)"),
    "another kept axis": (kept_shape, r"computes shape \(6,\) into b2"),
    "another dtype": (lambda g: body(g, const(1, I64)), "computes torch.int64 into b1 of torch.float32"),
    "an unknown buffer": (lambda g: body(g, load("b1", AT, F32)), "reads b1"),
    "too few indices": (lambda g: body(g, load("in0", (AT[0],), F32)), "indexes in0 of rank 2 with 1"),
    "a load as another dtype": (lambda g: body(g, Expr("cast", F32, (load("in0", AT, F64),))),
                                "loads in0 of torch.float32 as"),
    "a read past the end": (lambda g: body(g, load("in0", (AT[0] + 4, AT[1]), F32)),
                            "outside its size 4, without a mask"),
    "a read before the start": (lambda g: body(g, load("in0", (AT[0] - 9, AT[1]), F32)), "outside its size"),
    "a mask that is no bool": (lambda g: body(g, Expr("load", F32, (X,), ("in0", AT))),
                               "mask of a load is torch.float32"),
    "too many arguments": (lambda g: body(g, Expr("neg", F32, (X, X))), "neg takes 1 arguments, not 2"),
    "mixed dtypes": (lambda g: body(g, Expr("add", F32, (X, const(1, I64)))), "add mixes"),
    "a requirement that is a number": (lambda g: body(g, Expr("require", F32, (X, X), Fault.INDEX)), "require needs"),
    "a where without a condition": (lambda g: body(g, Expr("where", F32, (X, X, X))), "where needs a bool"),
    "an operation that is none": (lambda g: body(g, Expr("frobnicate", F32, (X,))), "'frobnicate' does not exist"),
    "a scatter mode that is none": (wrong_mode, "scatter mode 'xor' does not exist"),
    "a scatter of another dtype": (mixed_scatter, "scatters torch.int64 into torch.float32"),
    "a combine fed another dtype": (mixed_combine, "to a combine of"),
    "a combine that returns another dtype": (combine_that_returns_another_dtype, "combine odd returns torch.bool"),
    "a segment over two axes": (two_axes, "exactly one axis"),
}


def test_a_sound_graph_passes(graph: Graph) -> None:
    verify(graph)
    assert "reduce sum" in str(graph) and "# test" in str(graph)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation(graph: Graph, name: str) -> None:
    break_it, words = VIOLATIONS[name]
    break_it(graph)
    with pytest.raises(VerificationError, match=words) as caught:
        verify(graph, "after breaking it")
    assert "after breaking it" in str(caught.value)


def test_the_message_shows_the_node(graph: Graph) -> None:
    change(graph, 2, mode="xor")
    with pytest.raises(VerificationError, match=r"in b3 = scatter xor"):
        verify(graph)


def test_a_masked_read_may_point_anywhere(graph: Graph) -> None:
    mask = Expr("lt", BOOL, (const(1.0, F32), const(2.0, F32)))
    body(graph, Expr("load", F32, (mask,), ("in0", (AT[0] + 400, AT[1]))))
    verify(graph)

"""Loops that are cut where masks change and where indices meet a border."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from codegen.programs import built
from flambeau.codegen.c.loop_splitting import pieces
from flambeau.ir import build
from flambeau.ir.expr import Expr, index_value, load, where
from flambeau.ir.index import Sym, as_index, maximum, minimum
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import fold_over
from flambeau.ir.scalar import maximum as larger

F32 = torch.float32


def read(at: object) -> Expr:
    return load("x", (at,), F32)  # type: ignore[arg-type]


def test_a_loop_is_cut_where_a_comparison_turns() -> None:
    v = Sym("v", 20)
    mask = (index_value(v) >= 3) & (index_value(v) < 17)
    assert pieces([where(mask, read(as_index(v)), 0)], v) == [(0, 3), (3, 17), (17, 20)]


def test_a_loop_is_cut_where_an_index_meets_a_border() -> None:
    v = Sym("v", 20)
    near = read(maximum(minimum(as_index(v) - 2, 19 - 4), 0))
    assert len(pieces([near], v)) == 1
    inner = [(a, b) for a, b in pieces([near], v, addresses=True) if b - a > 8]
    assert len(inner) == 1 and inner[0][0] in (1, 2) and inner[0][1] in (17, 18)


@pytest.mark.parametrize("n", [1, 2, 5, 40, 9000])
@pytest.mark.parametrize("width", [3, 7])
def test_windows_that_stop_at_the_borders(n: int, width: int) -> None:
    x = torch.randn(3, n)

    def make(x: Value) -> list[Value]:
        def body(i: tuple) -> Expr:  # type: ignore[type-arg]
            def at(w: object) -> Expr:
                return x.load((i[0], maximum(minimum(i[1] + w - width // 2, x.shape[1] - 1), 0)))  # type: ignore[operator]

            return fold_over([(1, width)], (at(0),), lambda w, c: (larger(c[0], at(w[0])),))[0]

        return [build.pointwise(x.shape, body)]

    b = built(make, x)
    torch.testing.assert_close(b(x)[0], F.max_pool1d(x, width, 1, width // 2))
    if n >= 40:  # the long part reads in order
        long = b.texts[0].split("#pragma omp simd")[-1].split("{")[1].split("}")[0]
        assert "imin" not in long and "imax" not in long

"""Windows that stay loops inside a vector loop: points go through them in step."""

from __future__ import annotations

import pytest
import torch

from codegen.programs import built
from flambeau.ir import build
from flambeau.ir.expr import cast, computed, const, index_value, where
from flambeau.ir.index import as_index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import fold_over


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_windows_over_rows(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(60, columns).to(dtype)

    def make(x: Value) -> list[Value]:
        """The greatest of 50 rows, and which it was."""
        def body(i: tuple, which: int):  # type: ignore[no-untyped-def, type-arg]
            def step(w, c):  # type: ignore[no-untyped-def]
                v = cast(x.load((i[0] + w[0], i[1])), torch.float32)
                return where(v > c[0], v, c[0]), where(v > c[0], index_value(w[0], torch.int32), c[1])

            return fold_over([(0, 50)], (const(-1e9, torch.float32), const(-1, torch.int32)), step)[which]

        return [build.pointwise((11, x.shape[1]), lambda i, k=k: body(i, k)) for k in range(2)]

    b = built(make, x)
    values, places = b(x)
    best = torch.stack([x[k:k + 50].float().max(0).values for k in range(11)])
    torch.testing.assert_close(values, best)
    chosen = torch.stack([x[k:k + 50].float().gather(0, places[k:k + 1].long())[0] for k in range(11)])
    torch.testing.assert_close(chosen, best)
    assert any("[64]" in text for text in b.texts)


def test_windows_whose_ends_are_known_at_the_run() -> None:
    x, ends = torch.randn(40, 70), torch.tensor([3, 0, 40, 7])

    def make(x: Value, ends: Value) -> list[Value]:
        def body(i: tuple):  # type: ignore[no-untyped-def, type-arg]
            end = computed(ends.load((i[0],)), 0, 40)
            return fold_over([(as_index(0), end)], (const(0, torch.float32),),
                             lambda w, c: (c[0] + x.load((w[0], i[1])),))[0]

        return [build.pointwise((ends.shape[0], x.shape[1]), body)]

    out, = built(make, x, ends)(x, ends)
    torch.testing.assert_close(out, torch.stack([x[:e].sum(0) for e in ends.tolist()]))

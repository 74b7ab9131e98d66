"""Indices out of range in compiled graphs: eager's error, which names the index, the size and the dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agreement import through
from flambeau.config import config
from flambeau.ir.faults import KIND, MESSAGES, Bound, Fault, error_of, head, heads, size_of
from flambeau.ir.index import as_index

X, M = torch.arange(5.0), torch.arange(15.0).view(5, 3)
Case = tuple[Callable[[Tensor, Tensor, Tensor], Any], int]
# Functions of one index, and the first that is out of range. What eager does not name, we add behind a colon.
CASES: dict[str, Case] = {
    "index": (lambda x, m, i: x[i], 5),
    "index from the end": (lambda x, m, i: m[:, i], -4),
    "second index": (lambda x, m, i: m[torch.tensor([0]), i], 3),
    "index of nothing": (lambda x, m, i: m[:, :0][:, i], 0),
    "index_put": (lambda x, m, i: x.index_put((i,), torch.ones(1)), 7),
    "gather": (lambda x, m, i: x.gather(0, i), 7),
    "gather of columns": (lambda x, m, i: m.gather(1, i[:, None]), -1),
    "scatter": (lambda x, m, i: x.scatter(0, i, 1.0), 9),
    "scatter_add": (lambda x, m, i: x.scatter_add(0, i, torch.ones(1)), -1),
    "scatter_reduce": (lambda x, m, i: x.scatter_reduce(0, i, torch.ones(1), "amax"), 5),
    "index_select": (lambda x, m, i: m.index_select(0, i), 5),
    "index_select of columns": (lambda x, m, i: m.index_select(1, i), 3),
    "rows that are one": (lambda x, m, i: x.expand(4, 5).index_select(0, i), 4),
    "index_add": (lambda x, m, i: x.index_add(0, i, torch.ones(1)), 5),
    "index_add of rows": (lambda x, m, i: m.index_add(0, i, torch.ones(1, 3)), 6),
    "index_add of planes": (lambda x, m, i: m.view(1, 5, 3).index_add(1, i, torch.ones(1, 1, 3)), 5),
    "index_add of a short index": (lambda x, m, i: m.index_add(0, i.int(), torch.ones(1, 3)), 5),
    "index_add of a factor": (lambda x, m, i: m.index_add(0, i, torch.ones(1, 3), alpha=2), 5),
    "index_copy": (lambda x, m, i: x.index_copy(0, i, torch.ones(1)), 5),
    "index_fill": (lambda x, m, i: m.index_fill(1, i, 2.0), -5),
    "take": (lambda x, m, i: m.take(i), 15),
    "put": (lambda x, m, i: m.put(i, torch.ones(1)), -16),
    "embedding": (lambda x, m, i: F.embedding(i, m), 5),
    "nll_loss": (lambda x, m, i: F.nll_loss(m[:1], i), 3),
    "gather of nothing": (lambda x, m, i: x[:1][:0].gather(0, i), 3),
    "gather of what is expanded": (lambda x, m, i: x[:1].expand(5).gather(0, i), 5),
    "gather of a constant": (lambda x, m, i: torch.zeros(5).gather(0, i), 5),
    "a large index": (lambda x, m, i: x.gather(0, i), 2**40 + 3),
}


def raised(f: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        f(*args)
    return caught.value


def test_an_input_that_is_expanded_has_its_indices_checked() -> None:
    """Its stride is zero, so that its address does not depend on the index."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, i: x.index_select(0, i) + 1, backend="flambeau")
    x = torch.ones(1).expand(5)
    assert compiled(x, torch.tensor([4, 0])).tolist() == [2, 2]
    with pytest.raises(IndexError, match="index out of range in self: index 5 is out of bounds for dimension 0"):
        compiled(x, torch.tensor([4, 5]))


@pytest.mark.parametrize("name", CASES)
def test_errors_are_eagers(name: str) -> None:
    f, bad = CASES[name]
    compiled = through(f)
    ours, eager = (raised(g, X, M, torch.tensor([bad])) for g in (compiled, f))
    assert type(ours) is type(eager)
    assert str(ours).startswith(str(eager))
    assert str(bad) in str(ours) or "with size 0" in str(ours)
    if not name.endswith("of nothing"):  # what is empty is eager's call, and so is its error
        assert any("reported by the kernel of" in note for note in ours.__notes__)


@pytest.mark.parametrize("target", ["opencl", "opencl-points", "interpreter"])
def test_errors_of_other_targets(target: str) -> None:
    import opencl_forms  # noqa: F401  (makes the second form a target)

    with config.override(target=target):
        # Two sizes of one kind in one kernel, and many points: the one that is out of range is named.
        f = through(lambda x, y, i: x.gather(0, i) + y.gather(0, i))
        y, at = torch.arange(9.0), torch.arange(1000) % 5
        at[777] = 7
        assert str(raised(f, X, y, at)) == "index 7 is out of bounds for dimension 0 with size 5"
        at[777] = 12
        assert str(raised(f, X, y, at)).startswith("index 12 is out of bounds for dimension 0 with size")
        at[777] = 0
        torch.testing.assert_close(f(X, y, at), X[at] + at)  # nothing is left of it


def test_vectors_report_the_index() -> None:
    f = through(lambda x, i: (x[i] * 2).sum(1))
    x, at = torch.randn(50, 40), torch.arange(100) % 50
    f(x, at)
    at[37] = -51
    assert str(raised(f, x, at)) == "index -51 is out of bounds for dimension 0 with size 50"


def test_sizes_of_the_run_are_named() -> None:
    f = through(lambda x, i: x.gather(0, i) + 1, dynamic=True)
    for n in (6, 9):
        assert str(raised(f, torch.ones(n), torch.tensor([n, 0, 1]))).endswith(f"dimension 0 with size {n}")


def test_numbers_that_kernels_return() -> None:
    assert set(MESSAGES) == set(Fault) - {Fault.MEMORY} and max(Fault) < 32
    bounds = [Bound(as_index(n), Fault.ELEMENT, 2) for n in (5, 7)]
    first, second = (heads(bounds)[b] for b in bounds)
    assert first >> KIND == Fault.ELEMENT and first != second
    sites = ((first, "5"), (second, "(n0 + 1)"))
    code = second | 9
    assert size_of(code, sites, [6]) == 7 and size_of(first | 9, sites, [6]) == 5
    assert str(error_of(code, 7)) == "index 9 is out of bounds for dimension 2 with size 7"
    assert str(error_of(head(Fault.ELEMENT) | ((1 << 50) - 3))) == \
        "index -3 is out of bounds for dimension 0 with size unknown"

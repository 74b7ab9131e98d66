"""Views by their index arithmetic: random chains against torch, and no division where none is needed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from agreement import agree
from flambeau.ir import build
from flambeau.ir.index import Op, Sym, as_index, product
from flambeau.ir.nodes import Graph, Value
from flambeau.ops import shape as S
from flambeau.ops import view as V
from flambeau.ops.registry import LOWERINGS

aten = torch.ops.aten


def whole(*sizes) -> Value:
    return Graph().add_input(sizes, torch.float32)


def is_identity(v: Value, of: Value) -> bool:
    return v.shape == of.shape and v.index == of.index


def divisions(v: Value) -> list[Op]:
    return [a for i in v.index for a in i.atoms() if isinstance(a, Op) and a.kind in ("div", "mod")]


def evaluate(v: Value, data: torch.Tensor) -> torch.Tensor:
    sizes = [int(n) for n in v.shape]
    points = itertools.product(*map(range, sizes))
    values = [int(data[tuple(int(i) for i in v.at(p))]) for p in points]
    return torch.tensor(values, dtype=data.dtype).reshape(sizes)


def random_sizes(r: random.Random, numel: int) -> list[int]:
    out = []
    while numel > 1 and len(out) < 4:
        out.append(r.choice([d for d in range(1, numel + 1) if numel % d == 0]))
        numel //= out[-1]
    return [*out, numel]


def random_step(r: random.Random, v: Value, t: torch.Tensor) -> tuple[Value, torch.Tensor]:
    rank = t.dim()
    dim = r.randrange(rank) if rank else 0
    kind = r.choice(["reshape", "reshape", "permute", "expand", "slice", "unsqueeze", "select", "flip",
                     "squeeze", "diagonal", "unfold"])
    if kind == "reshape":
        sizes = random_sizes(r, t.numel())
        return V.reshape(v, sizes), t.reshape(sizes)
    if kind == "unsqueeze":
        at = r.randrange(-rank - 1, rank + 1)
        return V.unsqueeze(v, at), t.unsqueeze(at)
    if kind == "squeeze":
        return V.squeeze(v), t.squeeze()
    if kind == "expand" and t.numel() <= 60:
        sizes = [2, *(3 if n == 1 else -1 for n in t.shape)]
        return V.expand(v, sizes), t.expand(sizes)
    if rank == 0:
        return v, t
    if kind == "permute":
        order = r.sample(range(rank), rank)
        return V.permute(v, order), t.permute(order)
    if kind == "slice":
        start, end, step = r.randrange(-4, 3), r.choice([None, -1, 2, 5, 99]), r.randrange(1, 4)
        return V.slice_(v, dim, start, end, step), aten.slice(t, dim, start, end, step)
    if kind == "select" and t.shape[dim]:
        at = r.randrange(-t.shape[dim], t.shape[dim])
        return V.select(v, dim, at), t.select(dim, at)
    if kind == "flip":
        return S.flip(v, [dim]), t.flip([dim])
    if kind == "diagonal" and rank >= 2:
        offset = r.randrange(-2, 3)
        return V.diagonal(v, offset, 0, -1), t.diagonal(offset, 0, -1)
    if kind == "unfold" and t.shape[dim] >= 2:
        return V.unfold(v, dim, 2, 1), t.unfold(dim, 2, 1)
    return v, t


@pytest.mark.parametrize("seed", range(150))
def test_chains_agree_with_torch(seed: int) -> None:
    r = random.Random(seed)
    sizes = random_sizes(r, r.choice([12, 24, 36, 60]))
    data = torch.arange(product(sizes).const).reshape(sizes)
    v, t = whole(*sizes), data
    for _ in range(6):
        v, t = random_step(r, v, t)
        assert [int(n) for n in v.shape] == list(t.shape)
        assert torch.equal(evaluate(v, data), t)
        if t.numel() == 0:
            break


def grouped(r: random.Random, factors: list) -> list:
    """The factors multiplied together in runs."""
    out, k = [], 0
    while k < len(factors):
        end = r.randrange(k + 1, len(factors) + 1)
        out.append(product(factors[k:end]))
        k = end
        if r.random() < 0.2:
            out.append(as_index(1))
    return out


@pytest.mark.parametrize("seed", range(150))
def test_reshapes_there_and_back_are_nothing(seed: int) -> None:
    r = random.Random(seed)
    factors = [as_index(r.choice([2, 3, 4, 5])) for _ in range(r.randrange(2, 6))]
    x = whole(*grouped(r, factors))
    v = x
    for _ in range(4):
        sizes = grouped(r, factors)
        v = V.reshape(v, sizes)
        assert v.index == V.reshape(x, sizes).index  # the way does not matter
    assert is_identity(V.reshape(v, x.shape), x)


def test_reshape_divides_only_what_it_splits() -> None:
    x = whole(4, 6, 5, 7)
    merged = V.reshape(x, (4, 30, 7))
    assert {a.key for a in divisions(merged)} == {"div(d1,5)", "mod(d1,5)"}
    assert not divisions(V.reshape(x, (4, 2, 3, 1, 5, 7)))  # splitting only multiplies
    assert not divisions(V.reshape(V.permute(V.reshape(x, (24, 35)), (1, 0)), (5, 7, 4, 6)))


def test_permute_then_back_is_nothing() -> None:
    x = whole(4, 6, 8)
    heads = V.permute(V.reshape(x, (4, 6, 2, 4)), (0, 2, 1, 3))
    folded = V.reshape(heads, (8, 6, 4))
    back = V.reshape(V.permute(V.reshape(folded, (4, 2, 6, 4)), (0, 2, 1, 3)), (4, 6, 8))
    assert is_identity(back, x)
    shuffled = V.reshape(V.permute(V.reshape(whole(2, 8, 3, 5), (2, 2, 2, 2, 3, 5)), (0, 1, 4, 2, 5, 3)), (2, 2, 6, 10))
    pixels = V.reshape(V.permute(V.reshape(shuffled, (2, 2, 3, 2, 5, 2)), (0, 1, 3, 5, 2, 4)), (2, 8, 3, 5))
    assert is_identity(pixels, whole(2, 8, 3, 5))
    assert is_identity(S.flip(S.flip(x, [0, 2]), [2, 0]), x)
    assert is_identity(V.t(V.t(whole(3, 4))), whole(3, 4))


def test_run_time_sizes() -> None:
    n = as_index(Sym("s0", lo=2))
    x = whole(n, 12)
    flat = V.reshape(x, (-1,))
    assert flat.shape == (n * 12,)
    assert {a.key for a in divisions(flat)} == {"div(d0,12)", "mod(d0,12)"}
    assert is_identity(V.reshape(flat, (n, 12)), x)
    assert is_identity(V.reshape(V.reshape(x, (n, 3, 4)), (-1, 12)), x)
    assert V.reshape(x, (n * 2, -1)).shape == (n * 2, as_index(6))
    rows = whole(n + 1, 4)
    assert V.reshape(rows, (-1, n + 1)).shape == (as_index(4), n + 1)
    halves = V.split(whole(n * 2, 3), n, 0)
    assert [h.shape[0] for h in halves] == [n, n]
    assert V.slice_(x, 0, -1).shape[0] is as_index(1)
    assert V.slice_(x, 0, 0, 2**63 - 1) == x


def test_remainders_over_run_time_sizes_keep_their_range() -> None:
    # The last point of the loop is 8*s0, whose remainder is 0: not the largest that occurs.
    n = as_index(Sym("s0", lo=2))
    v = V.flat(whole(2, 2)).view((n * 8 + 1,), lambda i: [i[0] % 4])
    assert [tuple(map(int, v.at([k]))) for k in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]


# ---- as_strided --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "stride", "offset"), [
    ((3, 2), (1, 3), 0), ((2, 2), (5, 2), 3), ((4,), (4,), None), ((2, 3, 2), (0, 6, 1), 1), ((), (), 7),
    ((0, 3), (1, 1), 100), ((24,), (1,), 0), ((4, 5), (4, 1), 0)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_as_strided(size, stride, offset, layout) -> None:
    plain = torch.arange(24).view(4, 6)
    x = {"contiguous": plain, "transposed": plain.t()}[layout]
    g = Graph()
    with build.building(g):
        v = V.as_strided(own(g, x), size, stride, offset)
    assert torch.equal(evaluate(v, x), x.as_strided(size, stride, offset))


def own(g: Graph, x: torch.Tensor) -> Value:
    """Memory of the graph's own, which is where its storage begins."""
    shape, strides = (tuple(map(as_index, numbers)) for numbers in (x.shape, x.stride()))
    return g.whole(g.add_buffer(shape, x.dtype, strides=strides).name)


def test_as_strided_of_an_argument() -> None:
    """Where an argument begins in its storage, from which an offset counts, is not known before the run."""
    g, x = Graph(), torch.arange(24).view(4, 6)[1:]
    with build.building(g):
        v = g.add_input(x.shape, x.dtype, x.stride())
        assert torch.equal(evaluate(V.as_strided(v, (4,), (4,)), x), x.as_strided((4,), (4,)))
        assert V.as_strided(v, (4,), (4,), 6) is NotImplemented


def test_as_strided_of_a_buffer_with_gaps() -> None:
    x = torch.arange(24).view(4, 6)[:, :4]
    g = Graph()
    with build.building(g):
        v = own(g, x)
        assert torch.equal(evaluate(V.as_strided(v, (4, 2), (6, 1), 2), x), x[:, 2:])
        assert V.as_strided(v, (5,), (1,), 0) is NotImplemented


# ---- through the pipeline: the operators that OpInfo does not reach ----------------------------------


def test_scatter_forms_and_backwards() -> None:
    def fn(x, g):
        y = x * 2
        y[1:, ::2].fill_(3)
        y[:, -1] += x[:, 0]
        y.diagonal(1).mul_(2)
        y.as_strided((3,), (6,), 1).fill_(7)
        part = y.unfold(1, 3, 2)
        return y, part, (part * g).sum(), y.view(torch.int32), y.flatten()[3:17:4]

    agree(fn, torch.randn(5, 6, requires_grad=False), torch.randn(5, 2, 3))


def test_overlapping_windows_add_their_gradients() -> None:
    agree(lambda x: (x.unfold(0, 4, 1).sin(), x.unfold(1, 2, 3).cos()), torch.randn(7, 9, requires_grad=True))


def test_views_under_run_time_sizes() -> None:
    def fn(x):
        y = x.reshape(-1, 3, 4).transpose(0, 1).reshape(-1, 4)
        a, b = x.split(6, 1)
        joined = a.reshape(-1) - b.flatten()
        return y.exp(), y[1:-1, None].flatten(), x[-3:].t() + 1, joined, x.unfold(0, 2, 1) * 2

    for n in (5, 8):
        agree(fn, torch.randn(n, 12, requires_grad=True), dynamic=True)


def test_every_view_has_a_lowering() -> None:
    """Operators that return an alias and are not taken apart by torch before we see them."""
    elsewhere = ("nested", "sparse", "indices", "values", "dual", "primal", "test", "complex", "real",
                 "_conj", "_neg_view", "slice_inverse")
    missing = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "aten" or any(part in rest for part in elsewhere):
            continue
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        aliases = any(a.alias_info is not None for a in op._schema.arguments)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if aliases and not op._schema.is_mutable and not composite and op not in LOWERINGS:
            missing.append(name)
    assert not missing

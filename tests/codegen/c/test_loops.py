"""Every form of kernel on odd sizes, dtypes and layouts against float64; and bits that no number of threads changes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flambeau.debug
from codegen.native import FLAGS
from codegen.programs import Built, built, run
from flambeau.codegen.source import LIBRARY
from flambeau.ir import build
from flambeau.ir.build import arg_combine, make_combine, simple_combine
from flambeau.ir.expr import Expr, cast, check, const, index_value, where
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import eq, exp, sin
from threads import threads

SIZES = (0, 1, 7, 31, 33, 127, 1000, 8193, 10007)
F32, F64, I64 = torch.float32, torch.float64, torch.int64


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- one function for every form -----------------------------------------------------------------------


def sums(x: Value, axes: Sequence[int]) -> Value:
    wide = F64 if x.dtype is F64 else F32 if x.dtype.is_floating_point else I64
    return build.reduce(x.shape, axes, simple_combine("sum", wide), lambda i: cast(x.load(i), wide))[0]


def softmax(x: Value, axis: int) -> Value:
    """Two reductions and a map that needs both."""
    wide = F64 if x.dtype is F64 else F32
    top, = build.reduce(x.shape, [axis], simple_combine("max", wide), lambda i: cast(x.load(i), wide))
    at = lambda v, i: v.load([n for k, n in enumerate(i) if k != axis])  # noqa: E731
    power = lambda i: exp(cast(x.load(i), wide) - at(top, i))  # noqa: E731
    total, = build.reduce(x.shape, [axis], simple_combine("sum", wide), power)
    return build.pointwise(x.shape, lambda i: power(i) / at(total, i), x.dtype)


def arg_max(x: Value, axis: int) -> tuple[Value, ...]:
    return build.reduce(x.shape, [axis], arg_combine("max", x.dtype), lambda i: (x.load(i), index_value(i[axis])))


def moments(x: Value, axes: Sequence[int]) -> tuple[Value, ...]:
    """Welford's: mean, sum of squared deviations and count."""

    def join(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (am, a2, an), (bm, b2, bn) = a, b
        delta, share = bm - am, where(eq(an + bn, 0), const(0, x.dtype), bn / (an + bn))
        return am + delta * share, a2 + b2 + delta * delta * an * share, an + bn

    return build.reduce(x.shape, axes, make_combine("welford", (x.dtype,) * 3, (0, 0, 0), join),
                        lambda i: (x.load(i), const(0, x.dtype), const(1, x.dtype)))


def running(x: Value, axis: int, reverse: bool = False) -> Value:
    out, = build.scan(x.shape, axis, simple_combine("sum", F64), lambda i: cast(x.load(i), F64), reverse, (x.dtype,))
    return out


def swapped(x: Value) -> Value:
    """x transposed, in memory of its own."""
    return build.pointwise((x.shape[1], x.shape[0]), lambda i: sin(x.load((i[1], i[0]))))


def close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours, exact.to(ours.dtype), equal_nan=True)


def close_sum(ours: Tensor, x: Tensor, dims: int | tuple[int, ...]) -> None:
    """A sum's error is measured by the size of what was added: terms of both signs may cancel."""
    exact, size = x.double().sum(dims), x.double().abs().sum(dims)
    assert ((ours.double() - exact).abs() <= 5e-7 * size).all(), f"{list(x.shape)} over {dims}"


def each(make: Callable[[Value], Sequence[Value]], args: Sequence[Tensor], on: str = "cpu"
         ) -> tuple[Built, list[list[Tensor]]]:
    """make for every argument, all in one program."""
    counts: list[int] = []

    def every(*values: Value) -> list[Value]:
        out: list[Value] = []
        for v in values:
            made = list(make(v))
            counts.append(len(made))
            out += made
        return out

    b = built(every, *args, on=on)
    results = b(*args)
    split, at = [], 0
    for n in counts:
        split.append(results[at:at + n])
        at += n
    return b, split


# ---- reductions ----------------------------------------------------------------------------------------


def test_rows() -> None:
    args = [torch.randn(shape) for n in SIZES for shape in ((3, n), (70, n))]
    b, results = each(lambda x: (sums(x, [1]), softmax(x, 1), *arg_max(x, 1)), args)
    assert {"row", "chunked row"} <= b.forms
    for x, (total, soft, top, at) in zip(args, results, strict=True):
        close_sum(total, x, 1)
        close(soft, x.double().softmax(1))
        if x.shape[1]:
            assert torch.equal(top, x.amax(1)) and torch.equal(at, x.argmax(1))
        else:
            assert (top == -torch.inf).all()


def test_columns() -> None:
    args = [torch.randn(shape) for n in SIZES for shape in ((n, 40), (n, 700)) if n < 9000] + [torch.randn(3, 9, 65)]
    b, results = each(lambda x: (sums(x, [0]), softmax(x, 0), *moments(x, [0])[:2]), args)
    assert {"column", "chunked column"} <= b.forms
    for x, (total, soft, mean, spread) in zip(args, results, strict=True):
        exact = x.double()
        close_sum(total, x, 0)
        close(soft, exact.softmax(0))
        if len(x):
            torch.testing.assert_close(mean, exact.mean(0).float(), rtol=1e-5, atol=1e-6)
            close(spread, exact.var(0, correction=0) * len(x))


def test_columns_of_small_width_and_middle_axes() -> None:
    args = [torch.randn(shape) for shape in ((9, 33, 5), (9, 5, 33), (130, 1, 7), (2, 300, 2), (1, 40, 1), (5, 0, 3))]
    b, results = each(lambda x: (sums(x, [1]), sums(x, [0, 2]), sums(x, [0]), sums(x, [0, 1, 2])), args)
    for x, (middle, ends, first, whole) in zip(args, results, strict=True):
        for ours, dims in ((middle, 1), (ends, (0, 2)), (first, 0), (whole, (0, 1, 2))):
            close_sum(ours, x, dims)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_ties_and_nans(kind: str) -> None:
    """The first of equal elements; a NaN before everything, the first of several."""
    x = torch.randint(4, (40, 1001)).float()
    x[3, 500:502] = torch.nan
    x[4] = torch.nan
    x[5] = -torch.inf if kind == "max" else torch.inf
    combine = arg_combine(kind, F32)
    for y in (x, x[:3].repeat(1, 20), x.t().contiguous()):
        axis = 0 if y.shape[1] == 40 else 1
        best, at = run(lambda v, axis=axis: build.reduce(
            v.shape, [axis], combine, lambda i: (v.load(i), index_value(i[axis]))), y)
        expected = getattr(y, kind)(axis)
        torch.testing.assert_close(best, expected.values, equal_nan=True, rtol=0, atol=0)
        assert torch.equal(at, getattr(y, f"arg{kind}")(axis))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.bool],
                         ids=str)
def test_dtypes_of_reductions(dtype: torch.dtype) -> None:
    args = [(torch.randn(shape) * 3).to(dtype) for shape in ((3, 33), (40, 127), (2, 8193), (8193, 3))]
    b, results = each(lambda x: (sums(x, [0]), sums(x, [1]), sums(x, [0, 1])), args)
    for x, made in zip(args, results, strict=True):
        for ours, dims in zip(made, ((0,), (1,), (0, 1)), strict=True):
            close(ours, x.double().sum(dims))


@pytest.mark.parametrize("n", [10**6, 10**6 + 3])
def test_a_million_floats_add_up(n: int) -> None:
    """In parts: the error of a float32 sum stays near its last place instead of growing with the length."""
    x = torch.rand(n) + 0.5
    for y in (x, x.reshape(-1, 1), x[:10**6].reshape(1000, 1000), x[:10**6].reshape(10, -1), x[:10**6].reshape(-1, 10)):
        axes = list(range(y.dim()))
        total, = run(lambda v, axes=axes: [sums(v, axes)], y)
        assert abs(total.double() - y.double().sum()) <= 4e-7 * y.double().sum(), list(y.shape)
        first, = run(lambda v: [sums(v, [0])], y)
        torch.testing.assert_close(first.double(), y.double().sum(0), rtol=4e-6, atol=0)


@pytest.mark.parametrize("shape, axes", [
    ((48, 2048), [0]), ((515, 1024), [0]), ((2048, 1536), [0]), ((8195, 64), [0]), ((9000, 8), [0]),
    ((8, 28, 28, 256), [0, 1, 2]), ((70, 3, 9, 1000), [0, 1, 2]), ((1000, 1000), [1]), ((128, 65536), [1]),
    ((16, 64, 28, 28), [0, 2, 3]), ((64, 300, 7, 7), [0, 2, 3]), ((3, 100003), [1])])
def test_sums_err_no_more_than_those_of_eager(shape: tuple[int, ...], axes: list[int]) -> None:
    """Column, row and shared forms alike: eager adds up no more than sixteen numbers one after the other."""
    x, y = torch.rand(shape), torch.rand(shape)

    def both(a: Value, b: Value) -> list[Value]:
        product, = build.reduce(a.shape, axes, simple_combine("sum", F32), lambda i: a.load(i) * b.load(i))
        return [sums(a, axes), product]

    def error(result: Tensor, values: Tensor) -> float:
        return float((result.double() - values.double().sum(axes)).square().mean().sqrt())

    for ours, values in zip(run(both, x, y), (x, x * y), strict=True):
        few = 2.0 if ours.numel() < 32 else 1.1  # results, whose errors are a matter of luck
        assert error(ours, values) <= few * error(values.sum(axes), values)


# ---- maps ----------------------------------------------------------------------------------------------


def test_maps() -> None:
    args = [torch.randn(n) for n in SIZES] + [torch.randn(3, 5, 7), torch.randn(100, 1000), torch.randn(())]
    _, results = each(lambda x: [build.pointwise(x.shape, lambda i: sin(x.load(i)) * 2)], args)
    for x, (y,) in zip(args, results, strict=True):
        close(y, x.double().sin() * 2)


def test_tiles() -> None:
    args = [torch.randn(n, m) for n in (1, 7, 31, 33, 127) for m in (1, 8, 31, 33, 1000)] + [torch.randn(0, 5)]
    b, results = each(lambda x: [swapped(x)], args)
    assert "tiled" in b.forms
    for x, (y,) in zip(args, results, strict=True):
        close(y, x.double().sin().t())


# ---- layouts -------------------------------------------------------------------------------------------


def layouts() -> dict[str, Tensor]:
    base = torch.randn(12, 34, 56)
    image = torch.randn(4, 6, 7, 9).contiguous(memory_format=torch.channels_last)
    return {
        "transposed": base.transpose(0, 2), "permuted": base.permute(1, 2, 0), "every other": base[::2, 1::3, ::5],
        "offset": base[3:, 5:, 7:], "one row": base[5], "one column": base[:, :, 3],
        "broadcast": base[:1].expand(9, 34, 56), "broadcast last": base[:, :, :1].expand(12, 34, 33),
        "a number": base[0, 0, 0].expand(5, 6), "channels last": image,
        "windows": base.reshape(-1)[5:].as_strided((20, 9), (3, 1)), "flat offset": base.reshape(-1)[17:8000],
        "size one": base[:, 3:4, :], "big stride": base.reshape(-1)[::409],
    }


def test_layouts() -> None:
    cases = layouts()

    def everything(x: Value) -> list[Value]:
        last = len(x.shape) - 1
        return [build.pointwise(x.shape, lambda i: sin(x.load(i))), sums(x, [last]), sums(x, [0]), softmax(x, 0),
                softmax(x, last), running(x, last), running(x, 0)]

    _, results = each(everything, list(cases.values()))
    for (name, x), made in zip(cases.items(), results, strict=True):
        e = x.double()
        expected = [e.sin(), e.sum(-1), e.sum(0), e.softmax(0), e.softmax(-1), e.cumsum(-1), e.cumsum(0)]
        for k, (ours, exact) in enumerate(zip(made, expected, strict=True)):
            torch.testing.assert_close(ours, exact.float(), msg=lambda m, k=k, name=name: f"{name}, result {k}: {m}")


def test_flipped_views() -> None:
    """Negative steps in the index algebra: torch has no such layout, lowerings make them."""
    x = torch.randn(30, 41)
    flip = lambda v: v.view(v.shape, lambda i: (v.shape[0] - 1 - i[0], v.shape[1] - 1 - i[1]))  # noqa: E731
    out = run(lambda v: [build.pointwise(v.shape, lambda i: flip(v).load(i)), sums(flip(v), [1]), running(flip(v), 1),
                         flip(v)], x)
    y = x.flip(0, 1)
    for ours, exact in zip(out, (y, y.double().sum(1), y.double().cumsum(1), y), strict=True):
        close(ours, exact)


# ---- scans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_scans(reverse: bool) -> None:
    args = [torch.randn(shape) for n in SIZES for shape in ((3, n), (n, 3), (n, 65))] + [torch.randn(3, 40, 5)]
    b, results = each(lambda x: (running(x, 1, reverse), running(x, 0, reverse)), args)
    suffix = " reversed" if reverse else ""
    assert {f"scan row{suffix}", f"scan column{suffix}"} <= b.forms
    for x, made in zip(args, results, strict=True):
        for ours, axis in zip(made, (1, 0), strict=True):
            e = x.double()
            close(ours, e.flip(axis).cumsum(axis).flip(axis) if reverse else e.cumsum(axis))


@pytest.mark.parametrize("n", [1 << 15, 100_003])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_of_long_rows_go_in_parts(reverse: bool, n: int) -> None:
    args = [torch.randn(n), torch.randn(3, n), torch.randn(2, n).to(torch.bfloat16)]
    b, results = each(lambda x: (running(x, len(x.shape) - 1, reverse),), args)
    assert sum("/ 65 / 16" in t for t in b.texts) == len(args)
    for x, (ours,) in zip(args, results, strict=True):
        e = x.double()
        exact = e.flip(-1).cumsum(-1).flip(-1) if reverse else e.cumsum(-1)
        torch.testing.assert_close(ours.double(), exact, **({"rtol": 1e-5, "atol": 1e-2} if x.dtype is F32 else
                                                            {"rtol": 1e-2, "atol": 1}))


def affine(a: Value, b: Value, reverse: bool) -> Value:
    """t[i] = a[i] * t[i - 1] + b[i]: a product that no element asks for by itself, but two stretches do."""
    combine = build.make_combine("affine", (F64, F64), (1, 0), lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]))
    return build.scan(a.shape, 0, combine, lambda i: (cast(a.load(i), F64), cast(b.load(i), F64)), reverse, (F32,),
                      lambda c: (cast(c[1], F32),))[0]


@pytest.mark.parametrize("n", [100, 50_000])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_computes_what_is_asked_for(reverse: bool, n: int) -> None:
    a, b = torch.rand(n), torch.randn(n)
    ours, = run(lambda a, b: [affine(a, b, reverse)], a, b)
    t, exact = 0.0, []
    for x, y in zip(*(v.tolist()[::-1 if reverse else 1] for v in (a, b)), strict=True):
        exact.append(t := x * t + y)
    close(ours, torch.tensor(exact[::-1 if reverse else 1], dtype=F64))


# ---- rows by index -------------------------------------------------------------------------------------


def rows_at(table: Value, index: Value) -> Value:
    r = len(index.shape)
    return build.pointwise((*index.shape, table.shape[1]),
                           lambda i: table.load((check(index.load(i[:r]), table.shape[0]), i[r])))


def test_rows_of_a_large_table_are_asked_for_early() -> None:
    """Those past the last index too: the last one stands for them. A small table is in the caches anyway."""
    for rows, width, shape, early in ((20_000, 33, (100, 7), True), (20_000, 33, (3,), True), (100, 33, (500,), False),
                                      (2_000, 1024, (500,), False)):
        table, index = torch.randn(rows, width), torch.randint(rows, shape)
        b = built(lambda t, i: [rows_at(t, i)], table, index)
        assert ("fl::prefetch" in b.texts[0]) is early
        assert torch.equal(b(table, index)[0], table[index])


def test_an_index_of_columns_is_checked_once() -> None:
    x, index = torch.randn(64, 300), torch.randint(300, (200,))

    def make(x: Value, index: Value) -> list[Value]:
        return [build.pointwise((64, 200), lambda i: x.load((i[0], check(index.load((i[1],)), 300))))]

    b = built(make, x, index)
    assert "if (bad) return bad;" in b.texts[0]
    assert torch.equal(b(x, index)[0], x[:, index])
    index[77] = 300
    with pytest.raises(IndexError):
        b(x, index)


# ---- segments ------------------------------------------------------------------------------------------


def bags(table: Value, ends: Value) -> Value:
    """Row b of the result: the sum of the table's rows ends[b] to ends[b + 1]."""
    count = ends.shape[0] - 1
    return build.segment((count, table.shape[0], table.shape[1]), 1, lambda i: ends.load((i[0],)),
                         lambda i: ends.load((i[0] + 1,)), simple_combine("sum", table.dtype),
                         lambda i: table.load((i[1], i[2])))[0]


@pytest.mark.parametrize("width", [1, 7, 33, 1000])
@pytest.mark.parametrize("rows", [1, 31, 1000])
def test_segments(rows: int, width: int) -> None:
    table = torch.randn(rows, width)
    ends = torch.cat((torch.tensor([0, 0]), torch.randint(rows + 1, (20,)).sort().values, torch.tensor([rows, rows])))
    b = built(lambda t, e: [bags(t, e)], table, ends)
    assert b.forms == {"segment"}
    exact = torch.stack([table[a:z].double().sum(0) for a, z in zip(ends, ends[1:], strict=False)])
    close(b(table, ends)[0], exact)


# ---- scatters ------------------------------------------------------------------------------------------

MODES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda x, i, s: x.index_add(0, i, s),
    "mul": lambda x, i, s: x.index_reduce(0, i, s, "prod"),
    "max": lambda x, i, s: x.index_reduce(0, i, s, "amax"),
    "min": lambda x, i, s: x.index_reduce(0, i, s, "amin"),
}


def scattered(x: Value, index: Value, source: Value, mode: str) -> Value:
    """x[index[j]] joined with source[j], rows of any number of dimensions."""
    return build.scatter(x.shape, lambda i: x.load(i), source.shape,
                         lambda j: (check(index.load((j[0],)), x.shape[0]), *j[1:]), lambda j: source.load(j), mode)


@pytest.mark.parametrize("mode", [*MODES, "set"])
def test_scatters(mode: str) -> None:
    """Rows (threads divide the columns), numbers (each thread owns a part of the target), few (one thread)."""
    torch.manual_seed(1)
    cases = [(rows, count, tail) for rows in (1, 7, 1000) for count, tail in (
        (0, ()), (1, ()), (33, ()), (30011, ()), (33, (5,)), (1000, (33,)), (301, (127, 3)))]
    args: list[Tensor] = []
    for rows, count, tail in cases:
        args += [torch.randn(rows, *tail), torch.randint(rows, (count,)), torch.rand(count, *tail) + 0.5]
    b = built(lambda *v: [scattered(*v[k:k + 3], mode) for k in range(0, len(v), 3)], *args)
    results = b(*args)
    assert {f"scatter {mode} {how}" for how in ("free", "owned", "serial")} <= b.forms
    for k, ours in enumerate(results):
        x, i, s = args[3 * k:3 * k + 3]
        if mode == "set":
            exact = x.clone()
            for j, at in enumerate(i.tolist()):  # the last one stays, as in a loop
                exact[at] = s[j]
        else:
            exact = MODES[mode](x.double(), i, s.double())
        torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=1e-4, equal_nan=True,
                                   msg=lambda m, k=k: f"{cases[k]}: {m}")


@pytest.mark.parametrize("mode", ["add", "max", "set"])
@pytest.mark.parametrize("width", [5, 33, 128])
def test_scatters_of_elements(mode: str, width: int) -> None:
    """Each element goes to a row of its own in its column: threads divide the columns."""
    x, i, s = torch.randn(50, width), torch.randint(50, (8000, width)), torch.randn(8000, width)

    def make(x: Value, i: Value, s: Value) -> list[Value]:
        return [build.scatter(x.shape, lambda k: x.load(k), s.shape, lambda j: (check(i.load(j), x.shape[0]), j[1]),
                              lambda j: s.load(j), mode)]

    b = built(make, x, i, s)
    assert b.forms == {f"scatter {mode} owned"}
    exact = {"add": lambda: x.double().scatter_add(0, i, s.double()).float(),
             "max": lambda: x.scatter_reduce(0, i, s, "amax"), "set": lambda: x.scatter(0, i, s)}[mode]()
    for n in (1, 2, 3):
        with threads(n):
            torch.testing.assert_close(b(x, i, s)[0], exact, rtol=1e-5, atol=1e-4)


def test_masked_scatter() -> None:
    """Points that the mask leaves out neither write nor are checked."""
    x, i = torch.zeros(10), torch.tensor([3, 99, 3, -5, 7])

    def make(x: Value, i: Value) -> list[Value]:
        ok = lambda j: (i.load(j) >= 0) & (i.load(j) < 10)  # noqa: E731
        return [build.scatter(x.shape, lambda k: x.load(k), i.shape, lambda j: (check(i.load(j), 10, ok(j)),),
                              lambda j: const(1.0, F32), "add", ok)]

    out, = run(make, x, i)
    assert torch.equal(out, torch.tensor([0, 0, 0, 2, 0, 0, 0, 1, 0, 0.0]))


# ---- symbolic sizes ------------------------------------------------------------------------------------


def test_one_program_for_every_size() -> None:
    """Sizes are run-time arguments: the same kernels serve rows, columns and squares, short and long."""

    def make(x: Value, y: Value) -> list[Value]:
        return [sums(x, [1]), sums(x, [0]), sums(x, [0, 1]), softmax(x, 1), softmax(x, 0), running(x, 1), running(x, 0),
                swapped(x), *arg_max(x, 1), sums(y, [0]), running(y, 0)]

    b = built(make, torch.randn(2, 2), torch.randn(2), dynamic=True)
    for n, m in ((1, 1), (7, 33), (33, 7), (1, 8193), (8193, 1), (3, 10007), (10007, 3), (127, 129), (0, 5),
                 (600, 700)):
        x, y = torch.randn(n, m), torch.randn(n * m)
        rows, columns, whole, soft1, soft0, run1, run0, transposed, top, at, line, run_line = b(x, y)
        close_sum(rows, x, 1)
        close_sum(columns, x, 0)
        close_sum(whole, x, (0, 1))
        close_sum(line, y, 0)
        e = x.double()
        for ours, exact in ((soft1, e.softmax(1)), (soft0, e.softmax(0)), (run1, e.cumsum(1)), (run0, e.cumsum(0)),
                            (transposed, e.sin().t()), (run_line, y.double().cumsum(0))):
            close(ours, exact)
        assert torch.equal(top, x.amax(1)) and torch.equal(at, x.argmax(1))


# ---- threads -------------------------------------------------------------------------------------------


def test_the_number_of_threads_changes_no_bit() -> None:
    """Chunks depend on sizes alone, writes to one place come in the order of the source."""
    shapes = ((400_003,), (70, 3001), (3001, 70), (5, 40_009), (40_009, 5), (40_009, 9), (64, 33, 40))
    args = [torch.randn(s) for s in shapes]

    def everything(x: Value) -> list[Value]:
        rank = len(x.shape)
        out = [sums(x, list(range(rank))), build.pointwise(x.shape, lambda i: sin(x.load(i))), running(x, 0)]
        for axis in range(rank):
            out += [sums(x, [axis]), softmax(x, axis), running(x, axis), *moments(x, [axis])[:2]]
        return out

    table, index, source = torch.randn(100), torch.randint(100, (100_003,)), torch.randn(100_003)
    wide, rows = torch.randn(100, 65), torch.randn(3001, 65)
    extra = [table, index, source, wide, index[:3001], rows]

    def make(*values: Value) -> list[Value]:
        *xs, t, i, s, w, j, r = values
        return [o for x in xs for o in everything(x)] + [scattered(t, i, s, "add"), scattered(w, j, r, "add")]

    b = built(make, *args, *extra)
    assert {"chunked row", "chunked column", "row", "column", "scan row", "scan column"} <= b.forms
    found = []
    for n in (1, 2, 3):
        with threads(n):
            found.append(b(*args, *extra))
    for other in found[1:]:
        for k, (x, y) in enumerate(zip(found[0], other, strict=True)):
            assert torch.equal(x, y), f"result {k}"


def test_many_column_sums_fit_the_stack() -> None:
    """Every state of a block of columns is on the stack of its thread: forty sums of 512 doubles in 64 chunks."""
    x = torch.randn(9001, 512, dtype=F64)
    out = run(lambda v: [build.reduce(v.shape, [0], simple_combine("sum", F64), lambda i, k=k: v.load(i) * (k + 1.0))[0]
                         for k in range(40)], x)
    for k, ours in enumerate(out):
        close(ours, x.sum(0) * (k + 1))


# ---- shapes that nobody listed -----------------------------------------------------------------------------


def text_of(function: Callable[..., object], *args: Tensor, dynamic: bool = False) -> str:
    """Of the first kernel, after its results were compared with eager's."""
    torch.compiler.reset()
    with flambeau.debug.collect() as graphs:
        got = torch.compile(function, backend="flambeau", dynamic=dynamic)(*args)
    torch.testing.assert_close(got, function(*args))
    return graphs[0].texts[0].text


def test_positions_of_extrema_go_row_by_row() -> None:
    """Several rows joined first would be selects that wait for each other, which compilers write as branches."""
    x = torch.randn(33, 600)
    assert " + 4 <= " in text_of(lambda x: x.sum(0), x)
    assert " + 4 <= " not in text_of(lambda x: x.argmin(0), x)


def test_columns_counted_at_the_run_have_no_states_beside_them() -> None:
    text = text_of(lambda x: x.softmax(1), torch.randn(5, 40, 9), dynamic=True)
    assert "l < 512" not in text and "l < w" in text


def test_a_scatter_fills_memory_in_order_also_where_steps_are_symbols() -> None:
    x, index, source = torch.randn(50, 30), torch.tensor([3, 3, 7]), torch.randn(3, 30)
    lines = text_of(lambda x, i, s: x.index_add(0, i, s), x, index, source, dynamic=True).splitlines()
    first = next(k for k, line in enumerate(lines) if "p3[" in line)
    assert "p3[o0" in lines[first]  # one loop over all of it, or rows of it
    assert "for (int64_t o0" in lines[first - 2]


@pytest.mark.parametrize("columns", (1, 2, 3, 4, 5))
def test_scans_of_few_columns(columns: int) -> None:
    text_of(lambda x: x.cumsum(0), torch.randn(1000, columns))
    text_of(lambda x: x.cummax(0), torch.randn(1000, columns))


def test_flags_beside_narrow_floats_are_vectors(tmp_path: Path) -> None:
    """In memory they are bytes: where a loop stores bools between selects of bfloat16, g++ keeps it scalar."""
    def masks(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.maximum(x, y)
        low = F.hardswish(z).clamp(max=0.8)
        return z, low, low <= 0.7

    x = torch.randn(37, 992).bfloat16()
    source = tmp_path / "kernel.cpp"
    source.write_text('#include "prelude.h"\n' + text_of(masks, x, x.flip(0)).replace("KERNEL_NAME", "kernel"))
    done = subprocess.run(["g++", *FLAGS, "-fno-thread-jumps", "-march=native", f"-I{LIBRARY}", "-c", str(source), "-o",
                           str(tmp_path / "kernel.o"), "-fopt-info-vec-optimized"], capture_output=True, text=True)
    assert done.returncode == 0 and "loop vectorized" in done.stderr, done.stderr


def test_short_lines_of_a_transposed_operand_are_walked_as_one() -> None:
    x, y = torch.randn(2000, 13), torch.randn(13, 2000)
    text = text_of(lambda x, y: (x + 1) * y.t().exp(), x, y)
    vector = text[text.index("#pragma omp simd"):]
    assert "transposed" in text and vector.count("for (") == 1 and "%" not in vector and "/" not in vector

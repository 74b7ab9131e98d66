"""OpenCL kernels of every kind, in both shapes, on odd sizes, dtypes and layouts against float64."""

from __future__ import annotations

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

import torch

from codegen.c.test_loops import (
    F32,
    MODES,
    affine,
    arg_max,
    bags,
    close,
    close_sum,
    each,
    layouts,
    moments,
    rows_at,
    running,
    scattered,
    softmax,
    sums,
    swapped,
)
from codegen.programs import built, run
from flambeau.codegen.simt.opencl import OpenCL, bits_of
from flambeau.codegen.source import host_text
from flambeau.ir import build
from flambeau.ir.expr import check, const, unary
from flambeau.ir.index import Sym, as_index, ceildiv
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import sin
from opencl_forms import FORMS, POINTS, THREADS

SIZES = (0, 1, 33, 257, 3000)
form = pytest.mark.parametrize("on", FORMS)
# PoCL takes a second for a kernel whose work-items wait for each other, so that of these only a sample is drawn.
sampled = pytest.mark.parametrize("on", [THREADS, pytest.param(POINTS, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- the dialect -----------------------------------------------------------------------------------------


def test_constants() -> None:
    d = OpenCL()
    assert d.constant(-(2**63), torch.int64) == "LONG_MIN" and d.constant(-5, torch.int64) == "(-5L)"
    assert d.constant(2**64 - 1, torch.uint64) == "((ulong)(18446744073709551615UL))"
    assert d.constant(1.0, torch.bfloat16) == "((ushort)0x3f80)" and bits_of(-2.0, torch.float16) == 0xC000
    assert OpenCL().constant(float("-inf"), torch.float64) == "((double)(-INFINITY))"
    assert OpenCL().constant(-0.0, F32) == "(-0.0f)" and OpenCL().constant(1e300, F32) == "INFINITY"


def test_the_launch_counts_in_python() -> None:
    n = Sym("n")
    text = host_text(ceildiv(as_index(n) * 3 + 1, 4), {n: "n0"})
    assert [eval(text, {"n0": k}) for k in (0, 1, 5)] == [1, 1, 4]


def test_indices_are_narrow_where_they_fit() -> None:
    small = built(lambda x: [sums(x, [0])], torch.randn(300, 30), on=POINTS)
    assert "const long d0" not in small.texts[0] and "get_group_id(0)" in small.texts[0]
    wide = built(lambda x: [sums(x, [0])], torch.randn(2, 2), dynamic=True, on=POINTS)
    assert "const long" in wide.texts[0]


def test_a_row_is_a_groups_work_on_gpus_and_a_threads_on_cpus() -> None:
    x = torch.randn(70, 300)
    assert "barrier(" in built(lambda v: [softmax(v, 1)], x, on=POINTS).texts[0]
    assert "barrier(" in built(lambda v: [softmax(v, 0)], x, on=POINTS).texts[0]
    assert "barrier(" not in built(lambda v: [sums(v, [0])], x[:64], on=POINTS).texts[0]
    text = built(lambda v: [softmax(v, 1)], x, on=THREADS).texts[0]
    assert "barrier(" not in text and "fl_threads()" in text and "clang loop vectorize" in text


# ---- maps and reductions ---------------------------------------------------------------------------------


@form
def test_maps(on: str) -> None:
    args = [torch.randn(n) for n in SIZES] + [torch.randn(3, 5, 7), torch.randn(100, 300), torch.randn(())]
    _, results = each(lambda x: [build.pointwise(x.shape, lambda i: sin(x.load(i)) * 2)], args, on)
    for x, (y,) in zip(args, results, strict=True):
        close(y, x.double().sin() * 2)


@form
def test_tiles(on: str) -> None:
    args = [torch.randn(n, m) for n, m in ((1, 8), (7, 33), (33, 31), (127, 200), (0, 5))]
    _, results = each(lambda x: [swapped(x)], args, on)
    for x, (y,) in zip(args, results, strict=True):
        close(y, x.double().sin().t())


@sampled
def test_rows(on: str) -> None:
    args = [torch.randn(shape) for n in SIZES for shape in ((3, n), (70, n)) if n < 3000 or shape[0] == 3]
    _, results = each(lambda x: (sums(x, [1]), softmax(x, 1), *arg_max(x, 1)), args, on)
    for x, (total, soft, top, at) in zip(args, results, strict=True):
        close_sum(total, x, 1)
        close(soft, x.double().softmax(1))
        if x.shape[1]:
            assert torch.equal(top, x.amax(1)) and torch.equal(at, x.argmax(1))
        else:
            assert (top == -torch.inf).all()


@sampled
def test_columns(on: str) -> None:
    args = [torch.randn(n, 40) for n in SIZES] + [torch.randn(257, 300), torch.randn(3, 9, 65)]
    _, results = each(lambda x: (sums(x, [0]), softmax(x, 0), *moments(x, [0])[:2]), args, on)
    for x, (total, soft, mean, spread) in zip(args, results, strict=True):
        exact = x.double()
        close_sum(total, x, 0)
        close(soft, exact.softmax(0))
        if len(x):
            torch.testing.assert_close(mean, exact.mean(0).float(), rtol=1e-5, atol=1e-6)
            close(spread, exact.var(0, correction=0) * len(x))


@sampled
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8,
                                   torch.bool], ids=str)
def test_dtypes_of_reductions(dtype: torch.dtype, on: str) -> None:
    args = [(torch.randn(shape).abs() * 3).to(dtype) for shape in ((40, 127), (3000, 3))]
    _, results = each(lambda x: (sums(x, [0]), sums(x, [1]), sums(x, [0, 1])), args, on)
    for x, made in zip(args, results, strict=True):
        for ours, dims in zip(made, ((0,), (1,), (0, 1)), strict=True):
            close(ours, x.double().sum(dims))


@sampled
def test_a_million_floats_add_up(on: str) -> None:
    x = torch.rand(10**6) + 0.5
    for y in (x, x.reshape(1000, 1000), x.reshape(10, -1), x.reshape(-1, 10)):
        axes = list(range(y.dim()))
        total, = run(lambda v, axes=axes: [sums(v, axes)], y, on=on)
        assert abs(total.double() - y.double().sum()) <= 4e-7 * y.double().sum(), list(y.shape)


@sampled
def test_layouts(on: str) -> None:
    cases = layouts()

    def everything(x: Value) -> list[Value]:
        last = len(x.shape) - 1
        return [build.pointwise(x.shape, lambda i: sin(x.load(i))), sums(x, [0]), softmax(x, last), running(x, last)]

    _, results = each(everything, list(cases.values()), on)
    for (name, x), made in zip(cases.items(), results, strict=True):
        e = x.double()
        for k, (ours, exact) in enumerate(zip(made, (e.sin(), e.sum(0), e.softmax(-1), e.cumsum(-1)), strict=True)):
            torch.testing.assert_close(ours, exact.float(), msg=lambda m, k=k, name=name: f"{name}, result {k}: {m}")


# ---- scans and segments ----------------------------------------------------------------------------------


@sampled
@pytest.mark.parametrize("reverse", [False, True])
def test_scans(reverse: bool, on: str) -> None:
    args = [torch.randn(3, n) for n in SIZES] + [torch.randn(300, 65), torch.randn(3, 40, 5)]
    _, results = each(lambda x: (running(x, 1, reverse), running(x, 0, reverse)), args, on)
    for x, made in zip(args, results, strict=True):
        for ours, axis in zip(made, (1, 0), strict=True):
            e = x.double()
            close(ours, e.flip(axis).cumsum(axis).flip(axis) if reverse else e.cumsum(axis))


@form
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_that_does_not_commute(reverse: bool, on: str) -> None:
    a, b = torch.rand(1000), torch.randn(1000)
    ours, = run(lambda a, b: [affine(a, b, reverse)], a, b, on=on)
    t, exact = 0.0, []
    for x, y in zip(*(v.tolist()[::-1 if reverse else 1] for v in (a, b)), strict=True):
        exact.append(t := x * t + y)
    close(ours, torch.tensor(exact[::-1 if reverse else 1], dtype=torch.float64))


@form
@pytest.mark.parametrize("width", [1, 33])
def test_segments(width: int, on: str) -> None:
    table = torch.randn(200, width)
    ends = torch.cat((torch.tensor([0, 0]), torch.randint(201, (20,)).sort().values, torch.tensor([200, 200])))
    ours, = run(lambda t, e: [bags(t, e)], table, ends, on=on)
    close(ours, torch.stack([table[a:z].double().sum(0) for a, z in zip(ends, ends[1:], strict=False)]))


# ---- scatters --------------------------------------------------------------------------------------------


@form
@pytest.mark.parametrize("mode", [*MODES, "set"])
def test_scatters(mode: str, on: str) -> None:
    cases = [(rows, count, tail) for rows in (1, 100) for count, tail in ((0, ()), (33, ()), (3011, ()), (300, (33,)))]
    args: list[torch.Tensor] = []
    for rows, count, tail in cases:
        places = torch.randint(rows, (count,)) if mode != "set" else torch.arange(count) % rows
        args += [torch.randn(rows, *tail), places, torch.rand(count, *tail) + 0.5]
    results = run(lambda *v: [scattered(*v[k:k + 3], mode) for k in range(0, len(v), 3)], *args, on=on)
    for k, ours in enumerate(results):
        x, i, s = args[3 * k:3 * k + 3]
        if mode == "set":
            if on == POINTS and len(i) > len(x):
                continue  # of several writes to one place any may stay
            exact = x.clone()
            for j, at in enumerate(i.tolist()):
                exact[at] = s[j]
        else:
            exact = MODES[mode](x.double(), i, s.double())
        torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=1e-4, equal_nan=True,
                                   msg=lambda m, k=k: f"{cases[k]}: {m}")


@form
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64], ids=str)
def test_dtypes_that_are_swapped(dtype: torch.dtype, on: str) -> None:
    x, i, s = torch.zeros(9, dtype=dtype), torch.randint(9, (5000,)), torch.randint(-9, 9, (5000,)).to(dtype)
    ours, = run(lambda x, i, s: [scattered(x, i, s, "add")], x, i, s, on=on)
    assert torch.equal(ours, x.index_add(0, i, s))


@form
def test_masked_scatter(on: str) -> None:
    x, i = torch.zeros(10), torch.tensor([3, 99, 3, -5, 7])

    def make(x: Value, i: Value) -> list[Value]:
        ok = lambda j: (i.load(j) >= 0) & (i.load(j) < 10)  # noqa: E731
        return [build.scatter(x.shape, lambda k: x.load(k), i.shape, lambda j: (check(i.load(j), 10, ok(j)),),
                              lambda j: const(1.0, F32), "add", ok)]

    out, = run(make, x, i, on=on)
    assert torch.equal(out, torch.tensor([0, 0, 0, 2, 0, 0, 0, 1, 0, 0.0]))


@form
def test_indices_are_checked(on: str) -> None:
    table, index = torch.randn(50, 7), torch.randint(50, (3, 11))
    b = built(lambda t, i: [rows_at(t, i)], table, index, on=on)
    assert torch.equal(b(table, index)[0], table[index])
    for wrong in (-1, 50):
        index[1, 3] = wrong
        with pytest.raises(IndexError, match="out of range"):
            b(table, index)
    index[1, 3] = 0
    assert torch.equal(b(table, index)[0], table[index])


# ---- symbolic sizes --------------------------------------------------------------------------------------


@sampled
def test_one_program_for_every_size(on: str) -> None:
    def make(x: Value, y: Value) -> list[Value]:
        return [sums(x, [1]), sums(x, [0]), softmax(x, 1), softmax(x, 0), running(x, 1), running(x, 0), swapped(x),
                *arg_max(x, 1), sums(y, [0])]

    b = built(make, torch.randn(2, 2), torch.randn(2), dynamic=True, on=on)
    for n, m in ((1, 1), (7, 33), (1, 8193), (3000, 3), (127, 129), (0, 5)):
        x, y = torch.randn(n, m), torch.randn(n * m)
        rows, columns, soft1, soft0, run1, run0, transposed, top, at, line = b(x, y)
        close_sum(rows, x, 1)
        close_sum(columns, x, 0)
        close_sum(line, y, 0)
        e = x.double()
        for ours, exact in ((soft1, e.softmax(1)), (soft0, e.softmax(0)), (run1, e.cumsum(1)), (run0, e.cumsum(0)),
                            (transposed, e.sin().t())):
            close(ours, exact)
        assert torch.equal(top, x.amax(1)) and torch.equal(at, x.argmax(1))


@pytest.mark.parametrize("on", FORMS)
def test_functions_and_comparisons_of_halves(on: str) -> None:
    """Which are bits in memory, and no numbers of the language."""
    x = torch.tensor([1.5, -2.0, float("nan"), -0.0, 0.0, float("inf")]).bfloat16()
    y = x.flip(0)

    def make(x: Value, y: Value) -> list[Value]:
        return [build.pointwise(x.shape, lambda i: unary("isnan", x.load(i))),
                build.pointwise(x.shape, lambda i: x.load(i) < y.load(i))]

    for ours, exact in zip(run(make, x, y, on=on), (x.isnan(), x < y), strict=True):
        assert torch.equal(ours, exact)

"""OpenCL kernels whose work-items take several elements: wide accesses, and where those cannot be; tails; tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

import torch
from torch import Tensor

from codegen.c.test_loops import affine, close, close_sum, each, running, softmax, sums
from codegen.programs import Built, built, run
from flambeau.ir import build
from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, cast, index_value, masked, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.tuning import POINTS as TUNED
from flambeau.targets.opencl.compile import library
from flambeau.targets.opencl.device import host_device
from opencl_forms import POINTS, THREADS

N = TUNED.streamed_points + 1  # odd: the last work-item has a part of its elements


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def doubled(x: Value) -> Value:
    wide = opmath(x.dtype)
    return build.pointwise(x.shape, lambda i: cast(cast(x.load(i), wide) + cast(x.load(i), wide), x.dtype))


def transposed(x: Value) -> Value:
    return build.pointwise((x.shape[1], x.shape[0]), lambda i: x.load((i[1], i[0])))


def test_elements_side_by_side_are_one_access() -> None:
    def text(x: Tensor) -> str:
        return built(lambda v: [doubled(v)], x, on=POINTS).texts[0]

    assert "float4" in text(torch.randn(N)) and "ushort8" in text(torch.randn(N).bfloat16())
    assert "long2" in text(torch.arange(N)) and "uchar16" in text(torch.ones(N, dtype=torch.uint8))
    rows = torch.randn(200, 130)
    assert "float4" in text(rows[:, :128].clone()) and "float2" in text(rows[:, :126])
    for apart in (torch.randn(200, 131)[:, :128], torch.randn(2 * N)[::2], torch.randn(100)):
        assert "vstore" not in text(apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_maps_at_every_offset(dtype: torch.dtype) -> None:
    """Which the kernel sees when it runs: one text serves all of them."""
    x = (torch.randn(N + 9) * 50).to(dtype)
    b = built(lambda v: [doubled(v)], x[:N], on=POINTS)
    for k in range(9):
        assert torch.equal(b(x[k:k + N])[0], x[k:k + N] + x[k:k + N]), k


def test_maps_of_odd_layouts() -> None:
    base = torch.randn(130, 260)
    cases = [base, base[:, 1:], base[1:, :256], base[:, :1].expand(130, 260), base[:1].expand(130, 260), base[::2, ::2],
             base.t()[3:], base.unflatten(1, (20, 13)).transpose(0, 1), base[:0], torch.randn(7, 51, 53)[:, :, :51]]
    _, results = each(lambda x: [doubled(x)], cases, POINTS)
    for x, (y,) in zip(cases, results, strict=True):
        assert torch.equal(y, x + x), (x.shape, x.stride())


def test_factors_of_different_width_and_shape() -> None:
    x, row = torch.randn(130, 260), torch.randn(260)
    mask, half = x > 0.3, torch.randn(130, 260).bfloat16()

    def make(x: Value, row: Value, mask: Value, half: Value) -> list[Value]:
        return [build.pointwise(x.shape, lambda i: x.load(i) * row.load((i[1],))),
                build.pointwise(x.shape, lambda i: where(mask.load(i), x.load(i), cast(half.load(i), torch.float32))),
                build.pointwise(x.shape, lambda i: x.load((i[0], 259 - i[1])) + x.load(i))]

    ours = run(make, x, row, mask, half, on=POINTS)
    for y, exact in zip(ours, (x * row, torch.where(mask, x, half.float()), x.flip(1) + x), strict=True):
        assert torch.equal(y, exact)


def test_sizes_of_the_run() -> None:
    b = built(lambda x: [doubled(x), transposed(x)], torch.randn(2, 2), dynamic=True, on=POINTS)
    for shape in ((1, 1), (3, 5), (64, 64), (63, 65), (129, 200), (0, 4)):
        x = torch.randn(shape)
        twice, other = b(x)
        assert torch.equal(twice, x + x) and torch.equal(other, x.t())


@pytest.mark.parametrize("on", [POINTS, THREADS, "cpu"])
def test_transpositions(on: str) -> None:
    base = torch.randn(131, 300)
    cases = [base, base[3:, 5:], base[:128, :256], base.bfloat16(), base.double(), base > 0, (base * 9).to(torch.int8),
             torch.randn(17, 1000), torch.randn(1000, 17)]
    b, results = each(lambda x: [transposed(x)], cases, on)
    assert all("transposed" in text for text in b.texts) and len(b.texts) == len(cases)
    for x, (y,) in zip(cases, results, strict=True):
        assert torch.equal(y, x.t()), (x.shape, x.dtype)


@pytest.mark.parametrize("on", [POINTS, THREADS, "cpu"])
def test_sums_with_transposed_factors(on: str) -> None:
    x, y, z = torch.randn(131, 200), torch.randn(131, 200), torch.randn(3, 70, 90)

    def make(x: Value, y: Value, z: Value) -> list[Value]:
        product = build.pointwise((200, 131), lambda i: x.load((i[1], i[0])) - y.load((i[1], i[0]))
                                  * x.load((i[1], 199 - i[0])))
        return [product, build.pointwise((90, 3, 70), lambda i: z.load((i[1], i[2], i[0])))]

    ours, other = run(make, x, y, z, on=on)
    torch.testing.assert_close(ours, (x - y * x.flip(1)).t())
    assert torch.equal(other, z.permute(2, 0, 1))


@pytest.mark.parametrize("on", [POINTS, THREADS, "cpu"])
@pytest.mark.parametrize("shape", [(131, 200), (64, 320), (1000, 17)])
def test_transpositions_of_what_is_read_under_a_mask(shape: tuple[int, int], on: str) -> None:
    x, y = torch.randn(shape), torch.randn(shape)
    rows = shape[1]

    def make(x: Value, y: Value) -> list[Value]:
        def one(i: Sequence[Index]) -> Expr:
            first = index_value(i[0]) < index_value(rows)
            later = index_value(i[0]) >= index_value(rows)
            return where(first, masked(x.load((i[1], i[0])), first), masked(y.load((i[1], i[0] - rows)), later))

        return [build.pointwise((2 * rows, shape[0]), one)]

    b = built(make, x, y, on=on)
    assert on != POINTS or all("transposed" in text for text in b.texts)
    assert torch.equal(b(x, y)[0], torch.cat((x.t(), y.t())))


def rows(b: Built, x: Tensor) -> None:
    soft, total = b(x)
    close(soft, x.double().softmax(1))
    close_sum(total, x, 1)


def test_rows_in_registers_at_every_offset() -> None:
    base = torch.randn(3, 520)
    b = built(lambda v: [softmax(v, 1), sums(v, [1])], base[:, :512], on=POINTS)
    assert all("float4" in text and "reqd_work_group_size(32," in text for text in b.texts)
    for k in (0, 1, 4, 6):
        rows(b, base[:, k:k + 512])


def test_a_row_that_does_not_fit() -> None:
    b = built(lambda v: [softmax(v, 1), sums(v, [1])], torch.randn(2, 2), dynamic=True, on=POINTS)
    for n in (1, 300, 5003):
        rows(b, torch.randn(2, n))


@pytest.mark.parametrize("n", [4096, 4100])
def test_rows_read_what_they_do_not_keep_some_at_a_time(n: int) -> None:
    base, weight, bias = torch.randn(3, n + 4), torch.randn(n + 4), torch.randn(n + 4)

    def make(x: Value, weight: Value, bias: Value) -> list[Value]:
        scaled = build.pointwise(x.shape, lambda i: x.load(i) * weight.load((i[1],)))
        soft = softmax(scaled, 1)
        return [build.pointwise(x.shape, lambda i: soft.load(i) * weight.load((i[1],)) + bias.load((i[1],)))]

    b = built(make, base[:, :n], weight[:n], bias[:n], on=POINTS)
    text, = b.texts
    assert text.count("float4*)(p2") == -(-n // 4 // 256 * 4 // TUNED.part)
    for k in (0, 1):
        x, w, c = base[:, k:k + n], weight[k:k + n], bias[k:k + n]
        close(b(x, w, c)[0], (x * w).double().softmax(1) * w + c)


def test_columns_with_a_factor_of_each_row_are_cut_into_pieces() -> None:
    x, rows = torch.randn(1024, 64), torch.randn(1024)
    b = built(lambda x, rows: [sums(build.pointwise(x.shape, lambda i: x.load(i) * rows.load((i[0],))), [0])], x, rows,
              on=POINTS)
    assert len(b.texts) == 2
    close_sum(b(x, rows)[0], x * rows[:, None], 0)


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, 3e38, -1.0]


def test_quotients_by_what_is_the_same_for_many_have_the_bits_of_a_division() -> None:
    """But near zero, where they may miss the last place."""
    x = torch.randint(-2**31, 2**31, (32, 600)).to(torch.int32).view(torch.float32)
    x[x.abs() < 1e-25] = 1.5
    x[:, :8] = torch.tensor(SPECIAL)
    shared = torch.cat((torch.tensor(SPECIAL), x[1, 8:32]))[:, None].repeat(1, 600)
    numbers = (9.0, 0.1, -1.7, 1e-38, 0.0, math.inf)

    def make(x: Value, shared: Value) -> list[Value]:
        most = [build.pointwise(x.shape, lambda i, c=c: x.load(i) / c) for c in numbers]
        top, = build.reduce(shared.shape, [1], build.simple_combine("max", torch.float32), shared.load)
        return [*most, build.pointwise(x.shape, lambda i: x.load(i) / top.load((i[0],)))]

    b = built(make, x, shared, on=POINTS)
    assert sum(text.count("fl_over") for text in b.texts) >= 4
    for ours, by in zip(b(x, shared), (*numbers, shared), strict=True):
        exact = x / by
        assert torch.equal(ours.isnan(), exact.isnan())
        near_zero = (x != 0) & (x.abs() < 1e-25) | (exact != 0) & (exact.abs() < 1e-35)
        apart = (ours.nan_to_num(7).view(torch.int32).long() - exact.nan_to_num(7).view(torch.int32).long()).abs()
        assert not apart[~near_zero].any() and apart.max() <= 1, by


def test_functions_of_the_language() -> None:
    """Halves and exponentials, as on devices whose compiler is not known to be clang."""
    import numpy
    import pyopencl

    kernel = ("__kernel void k(__global const ushort* halves, __global const float* x, __global float* wide, "
              "__global ushort* narrow, __global float* power, __global float* power2) {\n"
              "  const int i = get_global_id(0);\n  wide[i] = fl_from_half(halves[i]);\n"
              "  narrow[i] = fl_to_half(x[i]);\n  power[i] = fl_exp_f(x[i]);\n  power2[i] = fl_exp2_f(x[i]);\n}\n")
    device = host_device()
    program = pyopencl.Program(device.context, library("opencl.h") + kernel).build(["-w"])
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    between = halves.float() + torch.randn(2**16).sign() * torch.where(halves.isinf(), 0, 2.0**-25)
    x = torch.cat((between[::2], torch.randn(2**15) * 2.0 ** torch.randint(-30, 18, (2**15,))))
    flags = pyopencl.mem_flags
    inputs = [pyopencl.Buffer(device.context, flags.COPY_HOST_PTR, hostbuf=t.numpy()) for t in (halves, x)]
    arrays = [numpy.empty(2**16, kind) for kind in (numpy.float32, numpy.float16, numpy.float32, numpy.float32)]
    outputs = [pyopencl.Buffer(device.context, flags.WRITE_ONLY, a.nbytes) for a in arrays]
    program.k(device.queue, (2**16,), None, *inputs, *outputs)
    exact = (halves.float(), x.half(), x.double().exp().float(), x.double().exp2().float())
    for array, buffer, e, rtol in zip(arrays, outputs, exact, (0, 0, 4e-7, 4e-7), strict=True):
        pyopencl.enqueue_copy(device.queue, array, buffer)
        torch.testing.assert_close(torch.from_numpy(array), e, rtol=rtol, atol=3e-45 if rtol else 0, equal_nan=True)


def test_scans_of_several_components() -> None:
    """Over several lines of a group, whole and not."""
    for n in (1200, 601, 1030):
        a, b = torch.rand(n), torch.randn(n)
        ours, = run(lambda a, b: [affine(a, b, False)], a, b, on=POINTS)
        t, exact = 0.0, []
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            exact.append(t := x * t + y)
        close(ours, torch.tensor(exact, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_in_lines_parts_and_columns(reverse: bool) -> None:
    def exact(x: Tensor, axis: int) -> Tensor:
        e = x.double()
        return e.flip(axis).cumsum(axis).flip(axis) if reverse else e.cumsum(axis)

    lines = [torch.randn(600), torch.randn(601), torch.randn(3, 604)[:, 1:601], torch.randn(2, 600).bfloat16()]
    b, results = each(lambda x: [running(x, len(x.shape) - 1, reverse)], lines, POINTS)
    assert "vstore" in "".join(b.texts)
    for x, (y,) in zip(lines, results, strict=True):
        rtol = 1e-5 if x.dtype is torch.float32 else 1e-2
        torch.testing.assert_close(y, exact(x, -1).to(x.dtype), rtol=rtol, atol=1e-4)
    wide = built(lambda x: [running(x, 1, reverse), running(x, 0, reverse)], torch.randn(2, 2), dynamic=True, on=POINTS)
    for shape in ((2, 5000), (700, 33), (1, 1), (0, 3)):
        x = torch.randn(shape)
        for axis, y in zip((1, 0), wide(x), strict=True):
            close(y, exact(x, axis))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rows", [3, 17, 40])
def test_scans_of_long_rows_that_are_read_across(rows: int, reverse: bool) -> None:
    x = torch.randn(9000, rows).t()
    b = built(lambda v: [laid(running(v, 1, reverse))], x, on=POINTS)
    assert any(k.form.name == "columns" for k in b.program.kernels)
    e = x.double()
    torch.testing.assert_close(b(x)[0], (e.flip(1).cumsum(1).flip(1) if reverse else e.cumsum(1)).float(),
                               rtol=1e-5, atol=1e-3)


def laid(x: Value) -> Value:
    return build.pointwise(x.shape, lambda i: x.load(i) + 0)


@pytest.mark.parametrize("shape", [(40, 9000), (3, 70_000), (70, 300), (300, 9, 31)])
def test_sums_of_what_lies_both_ways(shape: tuple[int, ...]) -> None:
    """Long rows become columns, short ones share their lines."""
    x, y = torch.randn(shape), torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))

    def both(x: Value, y: Value) -> Value:
        return build.pointwise(x.shape, lambda i: x.load(i) * y.load(i))

    for axes in ([len(shape) - 1], [0], [*range(len(shape))]):
        ours, mapped = run(lambda x, y, axes=axes: [sums(both(x, y), axes), both(x, y)], x, y, on=POINTS)
        close_sum(ours, x.double() * y.double(), tuple(axes))
        assert torch.equal(mapped, x * y)


@pytest.mark.parametrize("on", [THREADS, "cpu"])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_strip_by_strip(reverse: bool, on: str) -> None:
    cases = [torch.randn(rows, n) for rows in (8, 11) for n in (1, 15, 16, 33, 64)]
    _, results = each(lambda x: [running(x, 1, reverse)], cases, on)
    for x, (y,) in zip(cases, results, strict=True):
        e = x.double()
        close(y, e.flip(1).cumsum(1).flip(1) if reverse else e.cumsum(1))

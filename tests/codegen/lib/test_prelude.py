"""The prelude of generated kernels: accuracy, vector loops, conversions, integers and random bits."""

from __future__ import annotations

import math
import platform
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from codegen.native import Native, float_kernels, kernel, special_values

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

X86 = platform.machine() == "x86_64"
LIBC, VERSION = platform.libc_ver()
LIBMVEC = X86 and LIBC == "glibc" and tuple(map(int, VERSION.split("."))) >= (2, 35)


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def libm(function: Callable[[float], float]) -> Callable[..., Any]:
    return np.vectorize(function, otypes=[np.float64])


# Reference in higher precision, and the largest error in units in the last place: (float, double). The error
# functions have no reference beyond double, so their double bounds hold its error as well.
OWN: dict[str, tuple[Callable[..., Any], float, float]] = {
    "exp": (np.exp, 0.8, 4),
    "exp2": (np.exp2, 1.1, 4),
    "expm1": (np.expm1, 1.5, 4),
    "log": (np.log, 1, 4),
    "log2": (np.log2, 2.1, 4),
    "log10": (np.log10, 2.1, 4),
    "log1p": (np.log1p, 1.8, 4),
    "tanh": (np.tanh, 1.1, 4),
    "sigmoid": (sigmoid, 2.5, 5),
    "erf": (libm(math.erf), 1.3, 5),
    "erfinv": (scipy.special.erfinv, 3, 6),
}
LIBM: dict[str, tuple[Callable[..., Any], float, float]] = {
    "sin": (np.sin, 4, 4),
    "cos": (np.cos, 4, 4),
    "tan": (np.tan, 4, 4),
    "sinh": (np.sinh, 4, 4),
    "cosh": (np.cosh, 0.9, 4),
    "asin": (np.arcsin, 1.2, 4),
    "acos": (np.arccos, 1.2, 4),
    "atan": (np.arctan, 1.2, 4),
    "asinh": (np.arcsinh, 4, 4),
    "acosh": (np.arccosh, 4, 4),
    "atanh": (np.arctanh, 1.1, 4),
    "erfc": (libm(math.erfc), 4, 5),
}
LIBM2 = {"pow": (np.power, 4, 4), "atan2": (np.arctan2, 4, 4), "hypot": (np.hypot, 4, 4)}
EXACT = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "abs": torch.abs,
    "sign": torch.sign,
    # numpy's: torch's own is off by one unit for some numbers
    "sqrt": lambda x: torch.from_numpy(np.sqrt(x.numpy())),
    "rsqrt": lambda x: torch.from_numpy(1 / np.sqrt(x.numpy())),
}
EXACT2 = {
    "min": torch.minimum,
    "max": torch.maximum,
    "fmin": torch.fmin,
    "fmax": torch.fmax,
    "copysign": torch.copysign,
    "nextafter": torch.nextafter,
    "floordiv": torch.floor_divide,
}
INTEGERS = {
    "i8": (np.int8, "int8_t"),
    "u8": (np.uint8, "uint8_t"),
    "i16": (np.int16, "int16_t"),
    "i32": (np.int32, "int32_t"),
    "i64": (np.int64, "int64_t"),
}
UNSIGNED = {"u16": (np.uint16, "uint16_t"), "u32": (np.uint32, "uint32_t"), "u64": (np.uint64, "uint64_t")}
TO_INT = {**INTEGERS, **UNSIGNED, "bool": (np.bool_, "bool")}
INTEGER_OPS = {
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "gcd": torch.gcd,
    "lcm": torch.lcm,
    "min": torch.minimum,
    "max": torch.maximum,
    "div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}
FLOATS = {"f32": (np.float32, "float"), "f64": (np.float64, "double")}
KERNELS = [
    *float_kernels([*OWN, *LIBM, *EXACT], 1),
    *float_kernels([*LIBM2, *EXACT2, "fmod", "remainder"], 2),
    *(
        kernel(f"{f}_to_{i}", [c], to, f"fl::to_int<{to}>(a)")
        for f, (_, c) in FLOATS.items()
        for i, (_, to) in TO_INT.items()
    ),
    *(
        kernel(f"{i}_{op}", [c, c], c, f"fl::{op}(a, b)")
        for i, (_, c) in INTEGERS.items()
        for op in INTEGER_OPS
    ),
    kernel("from_bf16", ["fl::bf16"], "float", "fl::to_float(a)"),
    kernel("from_half", ["fl::half"], "float", "fl::to_float(a)"),
    *(
        kernel(f"{f}_to_{s}", [c], f"fl::{s}", f"fl::to_{s}(a)")
        for f, (_, c) in FLOATS.items()
        for s in ("bf16", "half")
    ),
    *(kernel(f"philox{k}", ["uint64_t"] * 3, "uint32_t", f"fl::philox(a, b, c, {k})") for k in range(4)),
    kernel("branches", ["float"], "float", "a > 0 ? fl::exp(a) : a < -1 ? fl::erf(a) : fl::log1p(a)"),
    kernel("branches_libm", ["float"], "float", "a > 0 ? fl::sin(a) : fl::atan2(a, a)"),
    kernel("libm_expf", ["float"], "float", "__builtin_expf(a)"),
]


@pytest.fixture(
    scope="module",
    params=[
        "-march=native",
        pytest.param("-march=x86-64", marks=pytest.mark.skipif(not X86, reason="an x86 baseline")),
    ],
)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Native:
    return Native(tmp_path_factory.mktemp("prelude"), KERNELS, "prelude.h", request.param)


def samples(dtype: type, seed: int, count: int = 25_000) -> np.ndarray:
    """All exponents, ordinary sizes, the neighbourhoods of 0, 1 and overflow, and the special values."""
    rng = np.random.default_rng(seed)
    bits = np.dtype(dtype).itemsize * 8
    patterns = rng.integers(0, 2**bits, count, dtype=f"u{bits // 8}").view(dtype)
    wide = 110 if bits == 32 else 760
    return np.concatenate(
        [
            patterns[np.isfinite(patterns)],
            rng.normal(size=count) * 10.0 ** rng.uniform(-4, 2, count),
            rng.uniform(-1.2, 1.2, count),
            rng.uniform(-wide, wide, count),
            1 + rng.normal(size=count) * 1e-3,
            special_values(dtype),
        ]
    ).astype(dtype)


def pairs(dtype: type, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, rng = samples(dtype, seed, 20_000), np.random.default_rng(seed)
    small = rng.integers(-30, 30, 20_000).astype(dtype)
    a, b = np.meshgrid(special_values(dtype), special_values(dtype))
    return (
        np.concatenate([x, small, a.ravel()]),
        np.concatenate([rng.permutation(x), rng.permutation(small), b.ravel()]),
    )


def worst_ulp(got: np.ndarray, reference: np.ndarray) -> tuple[float, int]:
    """The largest error and where it is; infinite where one is NaN or infinite and the other is not."""
    rounded = reference.astype(got.dtype)
    error = np.abs(got - reference) / np.spacing(np.abs(rounded)).astype(reference.dtype)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    error = np.where(np.isfinite(got) & np.isfinite(rounded), error, np.where(same, 0, np.inf))
    # Where the true value is within rounding of overflow, the largest number and infinity are neighbours.
    largest = float(np.finfo(got.dtype).max)  # in double: in float the product is infinite
    error = np.where((np.abs(reference) < largest * 1.0000001) & (np.abs(got) >= largest), 1, error)
    return float(error.max()), int(error.argmax())


def check_ulp(
    native: Native,
    name: str,
    inputs: tuple[np.ndarray, ...],
    reference: Callable[..., Any],
    bound: float,
    higher: type,
) -> None:
    got = native(name, *inputs)
    worst, at = worst_ulp(got, np.asarray(reference(*(x.astype(higher) for x in inputs)), higher))
    assert worst <= bound, f"{name}: {worst:.3g} ulp at {[float(x[at]) for x in inputs]}: {got[at]}"


@pytest.mark.parametrize("name", [*OWN, *LIBM])
def test_unary_accuracy(native: Native, name: str) -> None:
    reference, bound32, bound64 = {**OWN, **LIBM}[name]
    check_ulp(native, f"f32_{name}", (samples(np.float32, 1),), reference, bound32, np.float64)
    higher = np.float64 if "erf" in name else np.longdouble
    check_ulp(native, f"f64_{name}", (samples(np.float64, 2, 10_000),), reference, bound64, higher)


# The root of the mean square of errors, beside that of results that are correctly rounded; the greater numbers are for
# machines without fused multiply-add.
SPREAD = {"exp": 1.02, "exp2": 1.12, "erf": 1.08, "tanh": 1.1, "asin": 1.2, "acos": 1.15, "atan": 1.08, "atanh": 1.08,
          "cosh": 1.2}


@pytest.mark.parametrize("name", SPREAD)
def test_errors_are_near_those_of_rounding(native: Native, name: str) -> None:
    rng = np.random.default_rng(9)
    x = np.concatenate([rng.normal(size=30_000), rng.uniform(-1, 1, 30_000), rng.uniform(-80, 80, 10_000)])
    x = x.astype(np.float32)
    got, exact = native(f"f32_{name}", x), {**OWN, **LIBM}[name][0](x.astype(np.float64))
    kept = np.isfinite(exact) & (np.abs(exact) > 1e-30)
    got, exact = got[kept], exact[kept]
    nearest = exact.astype(np.float32)
    ours, rounded = (np.sqrt(np.mean(((y - exact) / np.spacing(np.abs(nearest))) ** 2)) for y in (got, nearest))
    assert ours <= rounded * SPREAD[name], f"{ours / rounded:.3f} times"


@pytest.mark.parametrize("name", LIBM2)
def test_binary_accuracy(native: Native, name: str) -> None:
    reference, bound32, bound64 = LIBM2[name]
    check_ulp(native, f"f32_{name}", pairs(np.float32, 3), reference, bound32, np.float64)
    check_ulp(native, f"f64_{name}", pairs(np.float64, 4), reference, bound64, np.longdouble)


def assert_same(got: np.ndarray, expected: torch.Tensor, *inputs: np.ndarray) -> None:
    want = expected.numpy()
    wrong = ~((got == want) | ((got != got) & (want != want)))
    assert not wrong.any(), [(*(x[k] for x in inputs), got[k], want[k]) for k in np.flatnonzero(wrong)[:5]]


@pytest.mark.parametrize("kind", FLOATS)
def test_exact_functions_equal_torch(native: Native, kind: str) -> None:
    x = samples(FLOATS[kind][0], 5)
    for name, function in EXACT.items():
        assert_same(native(f"{kind}_{name}", x), function(torch.from_numpy(x)), x)
    a, b = pairs(FLOATS[kind][0], 6)
    for name, function in EXACT2.items():
        assert_same(native(f"{kind}_{name}", a, b), function(torch.from_numpy(a), torch.from_numpy(b)), a, b)


@pytest.mark.parametrize("kind", FLOATS)
def test_fmod_is_exact(native: Native, kind: str) -> None:
    a, b = pairs(FLOATS[kind][0], 7)
    assert_same(native(f"{kind}_fmod", a, b), torch.from_numpy(np.fmod(a, b)), a, b)
    rest = np.fmod(a, b)
    want = np.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)
    assert_same(native(f"{kind}_remainder", a, b), torch.from_numpy(want), a, b)


def test_signs_of_zero(native: Native) -> None:
    zero = np.array([-0.0], np.float32)
    for name in ("expm1", "log1p", "tanh", "erf", "erfinv", "sin", "asin", "atan", "atanh", "floor", "round", "trunc"):
        assert np.signbit(native(f"f32_{name}", zero))[0], name


def test_saturating_functions_stay_within_one(native: Native) -> None:
    """The square root of 1 - erf^2 and the logarithm of 1 - sigmoid rely on it."""
    x = np.linspace(3, 20, 500_000, dtype=np.float32)
    for name in ("tanh", "erf", "sigmoid"):
        for sign in (1, -1):
            assert np.abs(native(f"f32_{name}", np.float32(sign) * x)).max() <= 1, name


def test_hot_loops_are_vectors(native: Native) -> None:
    expected = {f"f32_{f}" for f in OWN} | {
        f"f32_{f}" for f in ("sqrt", "rsqrt", "abs", "min", "max", "fmin", "fmax")
    }
    expected |= {
        "from_bf16",
        "from_half",
        "f32_to_bf16",
        "f32_to_half",
        "f64_to_half",
        "philox0",
        "philox3",
        "branches",
        "f32_to_i8",
        "f32_to_bool",
        "i32_floordiv",
        "i32_mod",
        "i8_mod",
    }
    if LIBMVEC:
        expected |= {f"{kind}_{f}" for kind in FLOATS for f in (*LIBM, *LIBM2, *OWN)} | {"branches_libm"}
    missing = expected - native.vectorised
    assert not missing


def test_speed_of_exp(native: Native) -> None:
    x = np.random.default_rng(8).normal(size=1_000_000).astype(np.float32)

    def best(name: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            native(name, x)
            times.append(time.perf_counter() - start)
        return min(times)

    ours, libm = best("f32_exp"), best("libm_expf")
    print(f"fl::exp {ours * 1e3:.2f} ns per element, expf {libm * 1e3:.2f}: {libm / ours:.1f} times as fast")


@pytest.mark.skipif(not X86, reason="out of range, the results are those of x86")
@pytest.mark.parametrize("kind", FLOATS)
def test_float_to_integer_equals_torch(native: Native, kind: str) -> None:
    edges = [
        1e10,
        3e9 + 512,
        2.0**31,
        2.0**31 - 1,
        2.0**63,
        1e19,
        1e30,
        300.7,
        255.9,
        0.5,
        40000.9,
        np.inf,
        np.nan,
        0,
    ]
    dtype = FLOATS[kind][0]
    spread = np.random.default_rng(9).normal(size=5000) * 10.0 ** np.random.default_rng(10).uniform(
        -1, 20, 5000
    )
    x = np.concatenate([np.array(edges), -np.array(edges), spread]).astype(dtype)
    for name, (result, _) in TO_INT.items():
        # Negative numbers have no unsigned counterpart, and ATen's answer depends on which loop runs.
        values = x[(x >= 0) & (x < 2.0**31)] if name in UNSIGNED else x
        want = torch.from_numpy(values).to(getattr(torch, np.dtype(result).name))
        assert_same(native(f"{kind}_to_{name}", values, out=result), want, values)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", INTEGER_OPS)
def test_integers_equal_torch(native: Native, kind: str, name: str) -> None:
    dtype = INTEGERS[kind][0]
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    rng = np.random.default_rng(11)
    a = np.concatenate([rng.integers(low + 1, high, 2000), rng.integers(-9, 9, 2000), [low, high]]).astype(
        dtype
    )
    b = np.concatenate([rng.integers(low + 1, high, 2000), rng.integers(-9, 9, 2000), [7, 7]]).astype(dtype)
    b = np.where(b == 0, 3, b).astype(dtype)
    if name in ("gcd", "lcm"):
        a = np.where(a == low, 6, a).astype(dtype)  # has no absolute value
    want = INTEGER_OPS[name](torch.from_numpy(a), torch.from_numpy(b))
    assert_same(native(f"{kind}_{name}", a, b), want, a, b)


@pytest.mark.parametrize("kind", INTEGERS)
def test_division_never_traps(native: Native, kind: str) -> None:
    dtype = INTEGERS[kind][0]
    a = np.array([5, np.iinfo(dtype).min, 0], dtype)
    for divisor in (0, np.array(-1).astype(dtype)):
        for name in ("div", "floordiv", "mod", "fmod", "remainder"):
            native(f"{kind}_{name}", a, np.full(3, divisor, dtype))


STORAGE = {"bf16": torch.bfloat16, "half": torch.float16}


@pytest.mark.parametrize("name", STORAGE)
def test_storage_types_round_as_torch(native: Native, name: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    values = torch.from_numpy(patterns.view(np.int16)).view(STORAGE[name])
    widened = native(f"from_{name}", patterns, out=np.float32)
    assert_same(widened, values.float())
    numbers = ~np.isnan(widened)
    assert np.array_equal(native(f"f32_to_{name}", widened, out=np.uint16)[numbers], patterns[numbers])
    # Every number halfway between two neighbours, its own neighbours, and all the rest of the float range.
    middle = ((widened[:-1].astype(np.float64) + widened[1:]) / 2).astype(np.float32)
    near = np.concatenate(
        [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    )
    x = np.concatenate(
        [near, samples(np.float32, 13), np.array([65519.996, 65520, -65520, 2.0**-25], np.float32)]
    )
    for kind, wide in (("f32", x), ("f64", x.astype(np.float64)), ("f64", samples(np.float64, 14))):
        got = torch.from_numpy(native(f"{kind}_to_{name}", wide, out=np.uint16).view(np.int16)).view(
            STORAGE[name]
        )
        want = torch.from_numpy(wide).to(STORAGE[name])
        assert torch.equal(got.isnan(), want.isnan())
        real = ~got.isnan()
        assert torch.equal(got.view(torch.int16)[real], want.view(torch.int16)[real])


@pytest.mark.parametrize(
    "counter, stream, key, words",
    [
        (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, 2**64 - 1, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0x85A308D3243F6A88, 0x0370734413198A2E, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(native: Native, counter: int, stream: int, key: int, words: str) -> None:
    """The vectors published with Random123."""
    for lane, word in enumerate(words.split()):
        inputs = [np.full(37, x, np.uint64) for x in (key, stream, counter)]
        assert set(native(f"philox{lane}", *inputs, out=np.uint32).tolist()) == {int(word, 16)}

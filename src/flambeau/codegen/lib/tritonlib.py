"""Device functions that Triton kernels call as `fl.name`, for operations that Triton does not have.

Kernels import this file by itself, without the package around it: the processes that compile them need no torch.
Functions see float32 or float64 (smaller floats are computed in float32) or integers.
"""

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:
    import libdevice_cpu as libdevice
else:
    from triton.language.extra.cuda import libdevice

acos, acosh, asin, asinh, atan, atanh = (getattr(libdevice, n) for n in (
    "acos", "acosh", "asin", "asinh", "atan", "atanh"))
cos, cosh, sin, sinh, tan, tanh = (getattr(libdevice, n) for n in ("cos", "cosh", "sin", "sinh", "tan", "tanh"))
exp, exp2, expm1, log, log2, log10, log1p = (getattr(libdevice, n) for n in (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"))
erf, erfc, erfinv, erfcx, lgamma = (getattr(libdevice, n) for n in ("erf", "erfc", "erfinv", "erfcx", "lgamma"))
atan2, hypot, copysign, nextafter = (getattr(libdevice, n) for n in ("atan2", "hypot", "copysign", "nextafter"))
floor, ceil, trunc, rsqrt = (getattr(libdevice, n) for n in ("floor", "ceil", "trunc", "rsqrt"))
rough_log2 = libdevice.fast_log2f
round = libdevice.rint  # halves to even, as torch.round
ndtri = libdevice.normcdfinv
i0, i1 = libdevice.cyl_bessel_i0, libdevice.cyl_bessel_i1
bessel_j0, bessel_j1, bessel_y0, bessel_y1 = libdevice.j0, libdevice.j1, libdevice.y0, libdevice.y1


if triton.knobs.runtime.interpret:
    fma = libdevice.fma  # the interpreter's own rounds twice
else:
    @triton.jit
    def fma(a, b, c):
        return tl.fma(a, b, c)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def neg(x):
    if x.dtype.is_floating():
        return x * -1.0
    else:
        return -x


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def sqrt(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return libdevice.sqrt(x)


@triton.jit
def sign(x):
    """The sign of x; NaN gives 0."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def sigmoid(x):
    one = tl.full((), 1, x.dtype)
    return div(one, one + libdevice.exp(-x))


# Without denormals these two are one instruction each; with them, five.
if triton.knobs.runtime.interpret:
    @triton.jit
    def rough_exp2(x):
        return tl.exp2(x)

    @triton.jit
    def rough_reciprocal(x):
        return 1 / x
else:
    @triton.jit
    def rough_exp2(x):
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                         pack=1)

    @triton.jit
    def rough_reciprocal(x):
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                         pack=1)


@triton.jit
def rough_sigmoid(x):
    return rough_reciprocal(1 + rough_exp2(x * -1.4426950408889634))


@triton.jit
def rough_tanh(x):
    """Off by 2e-5 of its value at most; there are no branches, and a series where the quotient would lose digits."""
    s = x * x
    near = x * fma(s, fma(s, fma(s, -17 / 315, 2 / 15), -1 / 3), 1.0)
    far = fma(rough_reciprocal(1 + rough_exp2(x * 2.8853900817779268)), -2.0, 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def rough_erf(x):
    """Off by 2e-5 of its value at most, and so is 1 - |erf|: a polynomial in 1 / (1 + 0.52 |x|), times exp(-x * x),
    fitted to that. The device library's function has branches, which vary from element to element."""
    s, y = x * x, tl.abs(x)
    near = x * fma(s, fma(s, fma(s, -0.02438968, 0.11245642), -0.37610735), 1.12837902)
    t = rough_reciprocal(fma(y, 0.52, 1.0))
    rest = t * fma(t, fma(t, fma(t, fma(t, -0.18775318, 0.44645774), 0.13036414), 0.31969226), 0.29122403)
    far = fma(rest, -rough_exp2(s * -1.4426950408889634), 1.0)
    return tl.where(y < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit
def rough_div(a, b):
    return a / b


@triton.jit
def isnan(x):
    return x != x


@triton.jit
def isinf(x):
    return tl.abs(x) == float("inf")


@triton.jit
def signbit(x):
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    elif x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) < 0
    else:
        return x < 0


@triton.jit
def min(a, b):
    """The minimum; NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fmin(a, b):
    """The minimum; if one is NaN, the other one."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def fmax(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def imin(a, b):
    return tl.minimum(a, b)


@triton.jit
def imax(a, b):
    return tl.maximum(a, b)


# ---- division --------------------------------------------------------------------------------------------


@triton.jit
def div(a, b):
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    elif a.dtype.is_floating():
        return a / b
    else:
        return a // b


@triton.jit
def fmod(a, b):
    if a.dtype.is_floating():
        return libdevice.fmod(a, b)
    else:
        return a % b


@triton.jit
def mod(a, b):
    """The remainder with the sign of the divisor, as in Python; for floats as torch.remainder."""
    rest = fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


remainder = mod


@triton.jit
def floordiv(a, b):
    if a.dtype.is_floating():
        # As torch.floor_divide: from the exact remainder, so that the quotient cannot be off by one.
        rest = libdevice.fmod(a, b)
        whole = div(a - rest, b)
        whole = tl.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
        near = libdevice.floor(whole)
        near = tl.where(whole - near > 0.5, near + 1, near)
        near = tl.where(whole == 0, libdevice.copysign(tl.zeros_like(a), div(a, b)), near)
        return tl.where(b == 0, div(a, b), near)
    else:
        rest = a % b
        return a // b - ((rest != 0) & ((rest < 0) != (b < 0))).to(a.dtype)


# ---- powers and divisors ---------------------------------------------------------------------------------


@triton.jit
def pow(a, b):
    if a.dtype.is_floating():
        return libdevice.pow(a, b)
    else:
        one = tl.full((), 1, a.dtype)
        result = tl.zeros_like(a + b) + one
        base = a + tl.zeros_like(result)
        left = tl.where(b < 0, tl.zeros_like(b), b) + tl.zeros_like(result)
        for _ in range(64):
            result = tl.where(left % 2 == 1, result * base, result)
            base = base * base
            left = left // 2
        odd = (b % 2) != 0
        negative = tl.where(a == 1, one, tl.where(a == -1, tl.where(odd, -one, one), tl.zeros_like(result)))
        return tl.where(b < 0, negative, result)


@triton.jit
def gcd(a, b):
    x = tl.abs(a + tl.zeros_like(b))
    y = tl.abs(b + tl.zeros_like(a))
    for _ in range(96):  # Euclid's algorithm needs no more steps for 64 bits
        rest = fmod(x, y)
        more = y != 0
        x = tl.where(more, y, x)
        y = tl.where(more, rest, y)
    return x


@triton.jit
def lcm(a, b):
    return tl.abs(div(a, gcd(a, b)) * b)


if triton.knobs.runtime.interpret:
    def wait():
        pass

    def release():
        pass
else:
    from triton.language.extra.cuda import gdc_launch_dependents as release  # noqa: F401  what is next may come, and wait
    from triton.language.extra.cuda import gdc_wait as wait  # noqa: F401  until all kernels before it are done


@triton.jit
def e4m3(x):
    """Converts to e4m3, which has no infinity: values beyond the range become the largest number."""
    return x.to(tl.float8e4nv)


@triton.jit
def e5m2(x):
    """Converts to e5m2. Values beyond the middle between the largest number and the next power of two become infinity;
    Triton's conversion saturates. The converted bits must not be examined: Triton 3.6 takes those of each second number
    twice."""
    infinity = tl.full(x.shape, 0x7C, tl.uint8).to(tl.float8e5, bitcast=True)
    negative = tl.full(x.shape, 0xFC, tl.uint8).to(tl.float8e5, bitcast=True)
    return tl.where(x >= 61440, infinity, tl.where(x <= -61440, negative, x.to(tl.float8e5)))


@triton.jit
def place(tile, high, wide, group: tl.constexpr):
    """Returns row and column of a tile, where `group` rows of tiles are visited together: they share columns in the
    cache."""
    first = tile // (group * wide) * group
    rows = tl.minimum(high - first, group)
    rest = tile % (group * wide)
    return first + rest % rows, rest // rows


@triton.jit
def pieces(begins, ends, side: tl.constexpr):
    """The number of tiles of each part of the rows; tiles begin afresh with each part."""
    return tl.maximum(ends - begins + (side - 1), 0) // side


@triton.jit
def share(tile, wide, begins, ends, side: tl.constexpr, group: tl.constexpr):
    """For rows in parts: returns the part of a tile, its first row, where the rows of the part end, and its column.
    The tiles of a part are visited together, as its columns are read by no other part."""
    tiles = pieces(begins, ends, side)
    upto = tl.cumsum(tiles, 0)
    part = tl.sum((upto * wide <= tile).to(tl.int32), 0)
    here = tl.arange(0, upto.shape[0]) == part
    high = tl.sum(tl.where(here, tiles, 0), 0)
    before = tl.sum(tl.where(here, upto - tiles, 0), 0)
    row, column = place(tile - before * wide, tl.maximum(high, 1), wide, group)
    begin, end = tl.sum(tl.where(here, begins, 0), 0), tl.sum(tl.where(here, ends, 0), 0)
    return part, begin + row * side, end, column


@triton.jit
def portion(total, program):
    """Where the steps of a program begin, when `total` steps are divided among all programs."""
    return total * program // tl.num_programs(0)


@triton.jit
def tell(flag):
    """Signals that everything this program has written is visible to the program that waits for the flag."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release")


@triton.jit
def hear(flag):
    """Waits for another program's signal, and resets the flag."""
    said = tl.atomic_add(flag, 0, sem="acquire")
    while said == 0:
        said = tl.atomic_add(flag, 0, sem="acquire")
    tl.debug_barrier()
    tl.store(flag, 0)


# ---- random bits -----------------------------------------------------------------------------------------


if triton.knobs.runtime.interpret:
    @triton.jit
    def product(a, b):
        return tl.umulhi(a, b), a * b
else:
    @triton.jit
    def product(a, b):
        """Both halves of a product of two uint32. Left alone, the compiler makes two multiplications of it."""
        return tl.inline_asm_elementwise("{.reg .b64 w; mul.wide.u32 w, $2, $3; mov.b64 {$1, $0}, w;}", "=r,=r,r,r",
                                         [a, b], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)


@triton.jit
def philox(seed, subsequence, counter, word: tl.constexpr):
    """One word of Philox 4x32-10, as an int64 in [0, 2^32)."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32)
    c2 = subsequence.to(tl.uint32)
    c3 = (subsequence >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = product(c0, tl.full((), 0xD2511F53, tl.uint32))
        high1, low1 = product(c2, tl.full((), 0xCD9E8D57, tl.uint32))
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    if word == 0:
        return c0.to(tl.int64)
    elif word == 1:
        return c1.to(tl.int64)
    elif word == 2:
        return c2.to(tl.int64)
    else:
        return c3.to(tl.int64)

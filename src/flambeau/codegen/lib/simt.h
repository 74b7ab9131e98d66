// What kernels in the C languages of GPUs may call: storage types, arithmetic, elementary functions, random bits.
//
// C has no overloads: a function's name ends in the type it works on (fl_min_f, fl_min_l). A language's own header
// (opencl.h, metal.h) includes this file after it has said
//
//     FL_INLINE            a function that is inlined
//     FL_THREAD            before a pointer to a variable of a work-item
//     FL_LIB_F(name)       how instructions of the machine on floats are called
//     as_int(x) and so on  the same bits as another type
//     fl_madd_f(a, b, c)   a * b + c, fused where the machine can
//     FL_HAS_EXP           if it has functions fl_exp_f and fl_exp2_f of its own

// ---- storage types -------------------------------------------------------------------------------------

FL_INLINE float fl_from_bf16(ushort x) { return as_float((uint)x << 16); }

FL_INLINE ushort fl_to_bf16(float x) {
  const uint bits = as_uint(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (ushort)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// ---- sizes and indices ----------------------------------------------------------------------------------

FL_INLINE long fl_imin(long a, long b) { return a < b ? a : b; }
FL_INLINE long fl_imax(long a, long b) { return a > b ? a : b; }
FL_INLINE long fl_past(long i, long a, long b) { return i >= a && i < b ? b : i; }  // i, or the end of [a, b)

// What is reported (ir/faults.py): the worse of two faults; and one of an index, which has the low 50 bits.
FL_INLINE long fl_worse(long a, long b) { return a > b ? a : b; }
FL_INLINE long fl_fault(long site, long at) { return site | (at & ((1L << 50) - 1)); }

// An index that is reported where it is not below the size, and zero then.
#define fl_checked(at, size, bad, site) fl_checked_or_zero(at, size, &(bad), site)
FL_INLINE long fl_checked_or_zero(long at, long size, FL_THREAD long* bad, long site) {
  const bool inside = (ulong)at < (ulong)size;
  *bad = fl_worse(*bad, inside ? 0 : fl_fault(site, at));
  return inside ? at : 0;
}

// Whether an access stays in its buffer, of a kernel that looks at all of them.
#define fl_within(at, first, end, bad, site) fl_is_within(at, first, end, &(bad), site)
FL_INLINE bool fl_is_within(long at, long first, long end, FL_THREAD long* bad, long site) {
  const bool inside = at >= first && at < end;
  *bad = fl_worse(*bad, inside ? 0 : fl_fault(site, at));
  return inside;
}

// ---- integers ------------------------------------------------------------------------------------------

// The quotient toward zero, and its rest. Dividing by zero, or the most negative number by -1, must not trap.
FL_INLINE int fl_quotient_i(int a, int b) {
  const int safe = a / ((b == 0) | (b == -1) ? 1 : b);
  return b == -1 ? (int)(0u - (uint)a) : b == 0 ? 0 : safe;
}
FL_INLINE long fl_quotient_l(long a, long b) {
  const long safe = a / ((b == 0) | (b == -1) ? 1 : b);
  return b == -1 ? (long)(0ul - (ulong)a) : b == 0 ? 0 : safe;
}
FL_INLINE ulong fl_quotient_ul(ulong a, ulong b) { return b == 0 ? 0 : a / (b == 0 ? 1 : b); }
FL_INLINE int fl_rest_i(int a, int b) { return (int)((uint)a - (uint)fl_quotient_i(a, b) * (uint)b); }
FL_INLINE long fl_rest_l(long a, long b) { return (long)((ulong)a - (ulong)fl_quotient_l(a, b) * (ulong)b); }
FL_INLINE ulong fl_rest_ul(ulong a, ulong b) { return a - fl_quotient_ul(a, b) * b; }

#define FL_ORDER(T, S)                                                                       \
  FL_INLINE T fl_min_##S(T a, T b) { const T least = b < a ? b : a; return b != b ? b : least; } \
  FL_INLINE T fl_max_##S(T a, T b) { const T most = b > a ? b : a; return b != b ? b : most; }   \
  FL_INLINE T fl_fmin_##S(T a, T b) { return (b != b) | (a < b) ? a : b; }                   \
  FL_INLINE T fl_fmax_##S(T a, T b) { return (b != b) | (a > b) ? a : b; }                   \
  FL_INLINE T fl_sign_##S(T x) { return (T)((T)(x > 0) - (T)(x < 0)); }

// T, as functions' names end for it; the type W it is divided in, as names end for that.
#define FL_INTEGERS(T, S, W, V)                                                                          \
  FL_ORDER(T, S)                                                                                         \
  FL_INLINE T fl_abs_##S(T x) { return x < 0 ? (T)(0 - (ulong)x) : x; }                                  \
  FL_INLINE T fl_div_##S(T a, T b) { return (T)fl_quotient_##V((W)a, (W)b); }                            \
  FL_INLINE T fl_fmod_##S(T a, T b) { return (T)fl_rest_##V((W)a, (W)b); }                               \
  FL_INLINE T fl_floordiv_##S(T a, T b) {                                                                \
    const W r = fl_rest_##V((W)a, (W)b);                                                                 \
    return (T)(fl_quotient_##V((W)a, (W)b) - (W)((r != 0) & ((r < 0) != ((W)b < 0))));                   \
  }                                                                                                      \
  FL_INLINE T fl_mod_##S(T a, T b) {                                                                     \
    const W r = fl_rest_##V((W)a, (W)b);                                                                 \
    return (T)(r + ((r != 0) & ((r < 0) != ((W)b < 0)) ? (W)b : (W)0));                                  \
  }                                                                                                      \
  FL_INLINE T fl_remainder_##S(T a, T b) { return fl_mod_##S(a, b); }                                    \
  FL_INLINE T fl_pow_##S(T base, T exponent) { /* a negative exponent gives the truncated true result */ \
    if (exponent < 0) return base == 1 ? 1 : base == (T)-1 ? (exponent & 1 ? (T)-1 : 1) : 0;             \
    ulong result = 1, power = (ulong)base;                                                               \
    for (ulong left = (ulong)exponent; left; left >>= 1, power *= power) result *= left & 1 ? power : 1; \
    return (T)result;                                                                                    \
  }                                                                                                      \
  FL_INLINE T fl_gcd_##S(T a, T b) {                                                                     \
    a = fl_abs_##S(a), b = fl_abs_##S(b);                                                                \
    while (b != 0) {                                                                                     \
      const T r = fl_fmod_##S(a, b);                                                                     \
      a = b, b = r;                                                                                      \
    }                                                                                                    \
    return a;                                                                                            \
  }                                                                                                      \
  FL_INLINE T fl_lcm_##S(T a, T b) {                                                                     \
    const T divisor = fl_gcd_##S(a, b);                                                                  \
    return divisor == 0 ? 0 : (T)fl_abs_##V((W)((ulong)fl_div_##S(a, divisor) * (ulong)b));              \
  }

FL_INTEGERS(int, i, int, i)
FL_INTEGERS(long, l, long, l)
FL_INTEGERS(ulong, ul, ulong, ul)
FL_INTEGERS(char, c, int, i)
FL_INTEGERS(uchar, uc, int, i)
FL_INTEGERS(short, s, int, i)
FL_INTEGERS(ushort, us, int, i)
FL_INTEGERS(uint, ui, long, l)

// Of indices.
#define fl_floordiv(a, b) fl_floordiv_l(a, b)
#define fl_mod(a, b) fl_mod_l(a, b)

FL_INLINE bool fl_min_b(bool a, bool b) { return a & b; }
FL_INLINE bool fl_max_b(bool a, bool b) { return a | b; }
FL_INLINE bool fl_mul_b(bool a, bool b) { return a & b; }

// ---- floats --------------------------------------------------------------------------------------------

// T, as names end for it; its bits as a signed number; how instructions of the machine are called.
#define FL_FLOATS(T, S, I, LIB)                                                                      \
  FL_ORDER(T, S)                                                                                     \
  FL_INLINE bool fl_isnan_##S(T x) { return x != x; }                                                \
  FL_INLINE bool fl_signbit_##S(T x) { return as_##I(x) < 0; }                                       \
  FL_INLINE T fl_abs_##S(T x) { return LIB(fabs)(x); }                                               \
  FL_INLINE bool fl_isinf_##S(T x) { return fl_abs_##S(x) == (T)INFINITY; }                          \
  FL_INLINE T fl_copysign_##S(T x, T y) { return LIB(copysign)(x, y); }                              \
  FL_INLINE T fl_floor_##S(T x) { return LIB(floor)(x); }                                            \
  FL_INLINE T fl_ceil_##S(T x) { return LIB(ceil)(x); }                                              \
  FL_INLINE T fl_trunc_##S(T x) { return LIB(trunc)(x); }                                            \
  FL_INLINE T fl_round_##S(T x) { return LIB(rint)(x); } /* halves to even, as torch.round */        \
  FL_INLINE T fl_sqrt_##S(T x) { return LIB(sqrt)(x); }                                              \
  FL_INLINE T fl_rsqrt_##S(T x) { return 1 / LIB(sqrt)(x); }                                         \
  FL_INLINE T fl_fma_##S(T a, T b, T c) { return fma(a, b, c); }                                     \
  FL_INLINE T fl_nextafter_##S(T x, T y) { return nextafter(x, y); }                                 \
  FL_INLINE T fl_atan2_##S(T x, T y) { return atan2(x, y); }                                         \
  FL_INLINE T fl_hypot_##S(T x, T y) { return hypot(x, y); }                                         \
  FL_INLINE T fl_fmod_##S(T a, T b) { return fmod(a, b); }                                           \
  FL_INLINE T fl_remainder_##S(T a, T b) { /* the sign of the divisor */                             \
    const T r = fmod(a, b);                                                                          \
    return (r != 0) & ((b < 0) != (r < 0)) ? r + b : r;                                              \
  }                                                                                                  \
  /* Divides what the exact rest leaves, so that the quotient is within rounding of an integer. */   \
  FL_INLINE T fl_floordiv_##S(T a, T b) {                                                            \
    const T r = fmod(a, b);                                                                          \
    T q = (a - r) / b;                                                                               \
    q = (r != 0) & ((b < 0) != (r < 0)) ? q - 1 : q;                                                 \
    const T below = fl_floor_##S(q);                                                                 \
    T result = q - below > (T)0.5f ? below + 1 : below;                                              \
    result = q == 0 ? fl_copysign_##S(0, a / b) : result;                                            \
    return b == 0 ? a / b : result;                                                                  \
  }                                                                                                  \
  /* The upper half of an unsigned range is reached by moving it onto the signed one. */             \
  FL_INLINE uint fl_to_ui_##S(T x) {                                                                 \
    const uint moved = (uint)(int)(x - (T)0x1p31f) ^ 0x80000000u;                                    \
    return x >= (T)0x1p31f ? moved : (uint)(int)x;                                                   \
  }                                                                                                  \
  FL_INLINE ulong fl_to_ul_##S(T x) {                                                                \
    const ulong moved = (ulong)(long)(x - (T)0x1p63f) ^ 0x8000000000000000ul;                        \
    return x >= (T)0x1p63f ? moved : (ulong)(long)x;                                                 \
  }

FL_FLOATS(float, f, int, FL_LIB_F)

// x / s, where r = 1 / s is known already: what the rounded product leaves is exact, and corrects it to the quotient's own
// rounding (where it is not a number near zero, of which digits are missing). GPUs would take a reciprocal and a branch
// for each x. Of zeros, infinities and NaNs the product is right.
FL_INLINE float fl_over_f(float x, float s, float r) {
  const float q = x * r, rest = fma(-q, s, x), corrected = fma(rest, r, q);
  return (fl_abs_f(q) < INFINITY) & (fl_abs_f(rest) > 0.0f) ? corrected : q;
}
// A factor for both numbers, with which 1 / s does not overflow.
FL_INLINE float fl_lift_f(float s) { return fl_abs_f(s) < 0x1p-100f ? 0x1p64f : 1.0f; }

#define FL_F(name) fl_##name##_f
#define FL_AS_FLOAT(bits) as_float(bits)
#define FL_AS_BITS(x) as_uint(x)
#define FL_BITS uint
#define FL_INT int
#define FL_INF INFINITY
#define FL_NAN NAN
#include "elementary_float.h"
FL_INLINE float fl_rough_log2_f(float x) { return fl_log2_f(x); }  // of OpenCL's own nobody says how rough it is

// ---- random bits ---------------------------------------------------------------------------------------

// Philox 4x32-10 (Salmon et al., 2011): word `lane` of block `counter` in stream `subsequence` of `seed`.
FL_INLINE uint fl_philox(ulong seed, ulong subsequence, ulong counter, int lane) {
  uint k0 = (uint)seed, k1 = (uint)(seed >> 32), c0 = (uint)counter, c1 = (uint)(counter >> 32);
  uint c2 = (uint)subsequence, c3 = (uint)(subsequence >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const ulong p0 = (ulong)0xD2511F53u * c0, p1 = (ulong)0xCD9E8D57u * c2;
    c0 = (uint)(p1 >> 32) ^ c1 ^ k0, c2 = (uint)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint)p1, c3 = (uint)p0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return lane == 0 ? c0 : lane == 1 ? c1 : lane == 2 ? c2 : c3;
}

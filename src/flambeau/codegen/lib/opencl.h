// What every generated OpenCL kernel may call: storage types, arithmetic, elementary functions, random bits.
//
// C has no overloads: a function's name ends in the type it works on (fl_min_f, fl_min_l). The target sets
// FL_DOUBLE where the device has doubles, and FL_CLANG where the compiler is clang for a CPU: its own builtins
// become instructions there, where those of OpenCL are calls that keep a loop from becoming vectors.
#pragma OPENCL FP_CONTRACT OFF
#ifdef FL_DOUBLE
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
#ifdef cl_khr_int64_base_atomics
#pragma OPENCL EXTENSION cl_khr_int64_base_atomics : enable
#endif

#ifdef __clang__
#define FL_INLINE static inline __attribute__((always_inline))
#else
#define FL_INLINE static inline
#define __builtin_expect(x, usual) (x)
#endif
#define alignas(n) __attribute__((aligned(n)))
typedef int int32_t;
typedef long int64_t;

#ifdef FL_CLANG
#define FL_LIB_F(name) __builtin_##name##f
#define FL_LIB_D(name) __builtin_##name
#else
#define FL_LIB_F(name) name
#define FL_LIB_D(name) name
#endif

// ---- storage types -------------------------------------------------------------------------------------

FL_INLINE float fl_from_bf16(ushort x) { return as_float((uint)x << 16); }

FL_INLINE ushort fl_to_bf16(float x) {
  const uint bits = as_uint(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (ushort)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

#ifdef FL_CLANG
FL_INLINE float fl_from_half(ushort x) {
  const uint magnitude = ((uint)x & 0x7fffu) << 13, sign = ((uint)x & 0x8000u) << 16;
  // A subnormal becomes the fraction of a number in [2^-14, 2^-13); the subtraction normalises it exactly.
  const float subnormal = as_float(magnitude + (113u << 23)) - 0x1p-14f;
  uint bits = magnitude < (1u << 23) ? as_uint(subnormal) : magnitude + (112u << 23);
  bits = magnitude >= (31u << 23) ? magnitude | (255u << 23) : bits;
  return as_float(bits | sign);
}

FL_INLINE ushort fl_to_half(float x) {
  const uint all = as_uint(x), bits = all & 0x7fffffffu, sign = (all >> 16) & 0x8000u;
  const uint normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the subnormal half in the low bits, rounded to nearest even by the adder.
  const uint subnormal = as_uint(as_float(bits) + 0.5f) - 0x3f000000u;
  uint result = bits < (113u << 23) ? subnormal : normal;
  result = bits >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above
  result = bits > 0x7f800000u ? 0x7e00u : result;
  return (ushort)(result | sign);
}
#else  // a GPU has instructions for it, which these become
FL_INLINE float fl_from_half(ushort x) { return vload_half(0, (const half*)&x); }

FL_INLINE ushort fl_to_half(float x) {
  ushort bits;
  vstore_half_rte(x, 0, (half*)&bits);
  return bits;
}
#endif

// ---- sizes, indices, threads ---------------------------------------------------------------------------

FL_INLINE long fl_imin(long a, long b) { return a < b ? a : b; }
FL_INLINE long fl_imax(long a, long b) { return a > b ? a : b; }
FL_INLINE long fl_past(long i, long a, long b) { return i >= a && i < b ? b : i; }  // i, or the end of [a, b)

// What is reported (ir/faults.py): the worse of two faults; and one of an index, which has the low 50 bits.
FL_INLINE long fl_worse(long a, long b) { return a > b ? a : b; }
FL_INLINE long fl_fault(long site, long at) { return site | (at & ((1L << 50) - 1)); }

// The record of a launch: whether there is one (1: it is being written, 2: it is there), the launcher's number of the
// kernel, the fault, the size exceeded. The first work-item that finds something writes it. `at`: the record's place in
// the low half, that number in the high one.
FL_INLINE void fl_report(__global int* faults, long at, long bad, long size) {
  __global int* record = faults + 6 * (at & 0xffffffffL);
  if (atomic_cmpxchg(record, 0, 1) != 0) return;
  record[1] = (int)(at >> 32);
  record[2] = (int)bad;
  record[3] = (int)(bad >> 32);
  record[4] = (int)size;
  record[5] = (int)(size >> 32);
  mem_fence(CLK_GLOBAL_MEM_FENCE);
  atomic_xchg(record, 2);
}

// An index that is reported where it is not below the size, and zero then.
#define fl_checked(at, size, bad, site) fl_checked_or_zero(at, size, &(bad), site)
FL_INLINE long fl_checked_or_zero(long at, long size, long* bad, long site) {
  const bool inside = (ulong)at < (ulong)size;
  *bad = fl_worse(*bad, inside ? 0 : fl_fault(site, at));
  return inside ? at : 0;
}

// Whether an access stays in its buffer, of a kernel that looks at all of them.
#define fl_within(at, first, end, bad, site) fl_is_within(at, first, end, &(bad), site)
FL_INLINE bool fl_is_within(long at, long first, long end, long* bad, long site) {
  const bool inside = at >= first && at < end;
  *bad = fl_worse(*bad, inside ? 0 : fl_fault(site, at));
  return inside;
}

#define fl_thread() ((long)get_global_id(0))
#define fl_threads() ((long)get_global_size(0))

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

#define FL_CALLS1(CALL) \
  CALL(asin) CALL(acos) CALL(atan) CALL(sinh) CALL(cosh) CALL(asinh) CALL(acosh) CALL(atanh) CALL(erfc) CALL(lgamma)

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
#define FL_CALL(name) FL_INLINE float fl_##name##_f(float x) { return name(x); }
FL_CALLS1(FL_CALL)
#if defined(FL_CLANG) && defined(FL_DOUBLE)
#include "opencl_vector.h"
#else
FL_CALL(sin) FL_CALL(cos) FL_CALL(tan)
FL_INLINE float fl_pow_f(float x, float y) { return pow(x, y); }
#endif
#undef FL_CALL

// a * b + c, fused where the machine can.
#if defined(FL_CLANG) && (defined(__FMA__) || defined(__ARM_FEATURE_FMA))
FL_INLINE float fl_madd_f(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif !defined(FL_CLANG) && defined(FP_FAST_FMAF)
FL_INLINE float fl_madd_f(float a, float b, float c) { return fma(a, b, c); }
#else
FL_INLINE float fl_madd_f(float a, float b, float c) { return a * b + c; }
#endif

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
#ifndef FL_CLANG  // a GPU has an instruction for powers of two; the language promises errors of 3 ulp at most
#define FL_HAS_EXP
FL_INLINE float fl_exp_f(float x) { return exp(x); }
FL_INLINE float fl_exp2_f(float x) { return exp2(x); }
#endif
#define FL_INF INFINITY
#define FL_NAN NAN
#include "elementary_float.h"
FL_INLINE float fl_rough_log2_f(float x) { return fl_log2_f(x); }  // of OpenCL's own nobody says how rough it is

#ifdef FL_DOUBLE
FL_FLOATS(double, d, long, FL_LIB_D)
#define FL_CALL(name) FL_INLINE double fl_##name##_d(double x) { return name(x); }
FL_CALLS1(FL_CALL)
FL_CALL(exp) FL_CALL(exp2) FL_CALL(expm1) FL_CALL(log) FL_CALL(log2) FL_CALL(log10) FL_CALL(log1p) FL_CALL(tanh)
FL_CALL(erf) FL_CALL(sin) FL_CALL(cos) FL_CALL(tan)
#undef FL_CALL
FL_INLINE double fl_pow_d(double x, double y) { return pow(x, y); }
FL_INLINE double fl_sigmoid_d(double x) {
  const double e = exp(-fl_abs_d(x));
  return (x < 0 ? e : 1) / (1 + e);
}
// Halley's method takes the float's guess to full precision: near 1, where that has few digits, in three steps.
FL_INLINE double fl_erfinv_d(double x) {
  const double a = fl_abs_d(x);
  const float guess = fl_erfinv_f((float)a);
  double y = guess > 5 ? 5 : guess;  // infinite where the float is one
  for (int step = 0; step < 3; ++step) {
    const double residual = a > 0.5 ? (1 - a) - erfc(y) : erf(y) - a;
    const double newton = residual * 0x1.c5bf891b4ef6bp-1 * exp(y * y);  // sqrt(pi) / 2
    y -= newton / (1 + y * newton);
  }
  return a == 1 ? x * (double)INFINITY : fl_copysign_d(y, x);
}
#endif

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

// What every generated C++ kernel may call: storage types, casts, integer and float arithmetic, random bits.
//
// Everything is inlined by force and free of branches, so that a loop over it vectorises; the transcendental
// functions are in elementary.h, which this file includes. No C++ standard header is included: parsing one
// costs more than compiling the kernel. Needs -fno-math-errno and -fno-trapping-math to vectorise, and
// -ffp-contract=off where results must not depend on which products the compiler happens to fuse.
#pragma once
#include <stdint.h>

#define FL_INLINE static inline __attribute__((always_inline))

extern "C" double fmod(double, double) noexcept;
extern "C" float fmodf(float, float) noexcept;

namespace fl {

template <class To, class From> FL_INLINE To bitcast(From x) { return __builtin_bit_cast(To, x); }

template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };

// ---- storage types -------------------------------------------------------------------------------------

// Both are bare 16-bit patterns: g++ 12 and 13 convert _Float16 one element at a time, while the integer
// forms below vectorise on every target.
struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

FL_INLINE float to_float(float x) { return x; }
FL_INLINE float to_float(bf16 x) { return bitcast<float>(uint32_t(x.bits) << 16); }

FL_INLINE float to_float(half x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  // A subnormal becomes the fraction of a number in [2^-14, 2^-13); the subtraction normalises it exactly.
  const float subnormal = bitcast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t infinite = magnitude | (255u << 23);
  uint32_t bits = magnitude < (1u << 23) ? bitcast<uint32_t>(subnormal) : normal;
  bits = magnitude >= (31u << 23) ? infinite : bits;
  return bitcast<float>(bits | sign);
}

FL_INLINE bf16 to_bf16(float x) {
  const uint32_t bits = bitcast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

FL_INLINE half to_half(float x) {
  const uint32_t all = bitcast<uint32_t>(x), bits = all & 0x7fffffffu, sign = (all >> 16) & 0x8000u;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the subnormal half in the low bits, rounded to nearest even by the adder.
  const uint32_t subnormal = bitcast<uint32_t>(bitcast<float>(bits) + 0.5f) - 0x3f000000u;
  uint32_t result = bits < (113u << 23) ? subnormal : normal;
  result = bits >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above
  result = bits > 0x7f800000u ? 0x7e00u : result;
  return {uint16_t(result | sign)};
}

// ATen rounds twice, through float; so do these.
FL_INLINE bf16 to_bf16(double x) { return to_bf16(float(x)); }
FL_INLINE half to_half(double x) { return to_half(float(x)); }

// ---- casts ---------------------------------------------------------------------------------------------

// The upper half of an unsigned range is reached by moving it onto the signed one.
template <class To, class Signed, class From> FL_INLINE To to_unsigned(From x) {
  const From half = sizeof(To) == 4 ? From(0x1p31) : From(0x1p63);
  const To moved = To(To(Signed(x - half)) ^ (To(1) << (8 * sizeof(To) - 1)));
  return x >= half ? moved : To(Signed(x));
}

// fl::cast<To>(x) between any two element types. Out of range the integers are those of ATen on x86, where a
// conversion answers the most negative int32 or int64 and never traps, and narrower types keep its low bits.
template <class To, class From> FL_INLINE To cast(From x) {
  constexpr bool from_16_bits = same<From, bf16>::value || same<From, half>::value;
  constexpr bool from_double = same<From, double>::value;
  constexpr bool from_float = same<From, float>::value || from_double;
  if constexpr (same<To, From>::value) return x;
  else if constexpr (from_16_bits) return cast<To>(to_float(x));
  else if constexpr (same<To, bf16>::value) return to_bf16(float(x));
  else if constexpr (same<To, half>::value) return to_half(float(x));
  else if constexpr (same<To, bool>::value) return x != From(0);
  else if constexpr (from_double && same<To, uint8_t>::value) return To(int64_t(x));
  else if constexpr (from_float && sizeof(To) < 4) return To(int32_t(x));
  else if constexpr (from_float && same<To, uint32_t>::value) return to_unsigned<To, int32_t>(x);
  else if constexpr (from_float && same<To, uint64_t>::value) return to_unsigned<To, int64_t>(x);
  else return To(x);
}

// ---- comparisons and selections ------------------------------------------------------------------------

FL_INLINE bool isnan(float x) { return x != x; }
FL_INLINE bool isnan(double x) { return x != x; }
FL_INLINE bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
FL_INLINE bool isinf(double x) { return __builtin_fabs(x) == __builtin_inf(); }
FL_INLINE bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
FL_INLINE bool isfinite(double x) { return __builtin_fabs(x) < __builtin_inf(); }

// torch.minimum and torch.maximum: NaN if either is NaN.
template <class T> FL_INLINE T min(T a, T b) { return (a != a) | (a < b) ? a : b; }
template <class T> FL_INLINE T max(T a, T b) { return (a != a) | (a > b) ? a : b; }
// torch.fmin and torch.fmax: the other one if one is NaN.
template <class T> FL_INLINE T fmin(T a, T b) { return (b != b) | (a < b) ? a : b; }
template <class T> FL_INLINE T fmax(T a, T b) { return (b != b) | (a > b) ? a : b; }

// torch.sign: NaN gives 0.
template <class T> FL_INLINE T sign(T x) { return T(T(x > T(0)) - T(x < T(0))); }
template <class T> FL_INLINE T abs(T x) { return x < T(0) ? T(-x) : x; }
FL_INLINE float abs(float x) { return __builtin_fabsf(x); }
FL_INLINE double abs(double x) { return __builtin_fabs(x); }

FL_INLINE float copysign(float x, float y) { return __builtin_copysignf(x, y); }
FL_INLINE double copysign(double x, double y) { return __builtin_copysign(x, y); }

// ---- rounding and roots --------------------------------------------------------------------------------

FL_INLINE float floor(float x) { return __builtin_floorf(x); }
FL_INLINE double floor(double x) { return __builtin_floor(x); }
FL_INLINE float ceil(float x) { return __builtin_ceilf(x); }
FL_INLINE double ceil(double x) { return __builtin_ceil(x); }
FL_INLINE float trunc(float x) { return __builtin_truncf(x); }
FL_INLINE double trunc(double x) { return __builtin_trunc(x); }
FL_INLINE float round(float x) { return __builtin_rintf(x); }  // halves to even, as torch.round
FL_INLINE double round(double x) { return __builtin_rint(x); }
FL_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
FL_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
FL_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
FL_INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }

// a * b + c, fused where the machine can. -ffp-contract=off leaves it to us to ask for it.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FL_FMA 1
FL_INLINE float madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FL_INLINE double madd(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
#define FL_FMA 0
FL_INLINE float madd(float a, float b, float c) { return a * b + c; }
FL_INLINE double madd(double a, double b, double c) { return a * b + c; }
#endif

// c[0] + c[1] x + c[2] x^2 + ...
template <class T, class C, int N> FL_INLINE T horner(T x, const C (&c)[N]) {
  T sum = T(c[N - 1]);
#pragma GCC unroll 32
  for (int k = N - 2; k >= 0; --k) sum = madd(sum, x, T(c[k]));
  return sum;
}

// ---- division ------------------------------------------------------------------------------------------

// Quotient toward zero. Division by zero, and of the most negative number by -1, must not end the process.
FL_INLINE int32_t truncdiv(int32_t a, int32_t b) {
  return int32_t(double(a) / double(b));  // exact, and doubles vectorise where idiv cannot
}
FL_INLINE int64_t truncdiv(int64_t a, int64_t b) {
  const int64_t quotient = a / ((b == 0) | (b == -1) ? 1 : b);
  return b == -1 ? int64_t(0 - uint64_t(a)) : b == 0 ? 0 : quotient;
}

// The rest that belongs to truncdiv; unsigned because the products at the edges wrap.
FL_INLINE int32_t truncmod(int32_t a, int32_t b) {
  return int32_t(uint32_t(a) - uint32_t(truncdiv(a, b)) * uint32_t(b));
}
FL_INLINE int64_t truncmod(int64_t a, int64_t b) {
  return int64_t(uint64_t(a) - uint64_t(truncdiv(a, b)) * uint64_t(b));
}

// Python's // and %: the rest has the sign of the divisor. Narrow integers go through int32.
template <class T> struct wide { using type = int32_t; };
template <> struct wide<int64_t> { using type = int64_t; };
template <> struct wide<long long> { using type = int64_t; };

template <class T> FL_INLINE T floordiv(T a, T b) {
  using W = typename wide<T>::type;
  const W rest = truncmod(W(a), W(b));
  return T(truncdiv(W(a), W(b)) - W((rest != 0) & ((rest < 0) != (b < 0))));
}
template <class T> FL_INLINE T mod(T a, T b) {
  using W = typename wide<T>::type;
  const W rest = truncmod(W(a), W(b));
  return T(rest + ((rest != 0) & ((rest < 0) != (b < 0)) ? W(b) : W(0)));
}

FL_INLINE double fmod(double a, double b) { return ::fmod(a, b); }

#if FL_FMA
// Exact, as fmod must be. Each step takes away a multiple of b that leaves less than 2^-50 of the dividend;
// the difference has few enough bits to be a double, so the fused step rounds nothing. The exponents of two
// floats differ by at most 277, hence six steps.
FL_INLINE float fmod(float a, float b) {
  const double divisor = __builtin_fabs(double(b)), inverse = 1.0 / divisor;
  double rest = __builtin_fabs(double(a));
#pragma GCC unroll 6
  for (int step = 0; step < 6; ++step) rest = madd(-__builtin_rint(rest * inverse), divisor, rest);
  rest = rest < 0 ? rest + divisor : rest;
  const bool unchanged = isinf(b) & isfinite(a);
  return __builtin_copysignf(unchanged ? a : float(rest), a);
}
#else
FL_INLINE float fmod(float a, float b) { return ::fmodf(a, b); }
#endif

// torch.remainder: the sign of the divisor.
template <class T> FL_INLINE T remainder(T a, T b) {
  const T rest = fmod(a, b);
  return (rest != 0) & ((b < 0) != (rest < 0)) ? rest + b : rest;
}

// torch.floor_divide. Divides what the exact rest leaves, so that the quotient is within rounding of an
// integer; x // 0 is x / 0 and a zero keeps the sign of the true quotient.
template <class T> FL_INLINE T floordiv_float(T a, T b) {
  const T rest = fmod(a, b);
  T quotient = (a - rest) / b;
  quotient = (rest != 0) & ((b < 0) != (rest < 0)) ? quotient - 1 : quotient;
  const T below = floor(quotient);
  T result = quotient - below > T(0.5) ? below + 1 : below;
  result = quotient == 0 ? copysign(T(0), a / b) : result;
  return b == 0 ? a / b : result;
}
FL_INLINE float floordiv(float a, float b) { return floordiv_float(a, b); }
FL_INLINE double floordiv(double a, double b) { return floordiv_float(a, b); }

// Integer power, wrapping. A negative exponent gives the truncated true result: 0 unless the base is 1 or -1.
template <class T> FL_INLINE T ipow(T base, T exponent) {
  if (exponent < 0) return base == T(1) ? T(1) : base == T(-1) ? (exponent & 1 ? T(-1) : T(1)) : T(0);
  uint64_t result = 1, power = uint64_t(base);
  for (uint64_t rest = uint64_t(exponent); rest; rest >>= 1, power *= power) result *= rest & 1 ? power : 1;
  return T(result);
}

// ---- random bits ---------------------------------------------------------------------------------------

// Philox 4x32-10 (Salmon et al., 2011): word `lane` of block `counter` in stream `subsequence` of `seed`.
struct philox_block { uint32_t word[4]; };

FL_INLINE philox_block philox4(uint64_t seed, uint64_t subsequence, uint64_t counter) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32);
  uint32_t c2 = uint32_t(subsequence), c3 = uint32_t(subsequence >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

FL_INLINE uint32_t philox(uint64_t seed, uint64_t subsequence, uint64_t counter, int lane) {
  const philox_block b = philox4(seed, subsequence, counter);
  const uint32_t low = lane & 1 ? b.word[1] : b.word[0], high = lane & 1 ? b.word[3] : b.word[2];
  return lane & 2 ? high : low;
}

// In [0, 1): 24 bits for a float, 53 for a double. Signed conversions, because those vectorise everywhere.
FL_INLINE float uniform(uint32_t bits) { return float(int32_t(bits >> 8)) * 0x1p-24f; }
FL_INLINE double uniform53(uint32_t high, uint32_t low) {
  return (double(int32_t(high >> 5)) * 0x1p26 + double(int32_t(low >> 6))) * 0x1p-53;
}

}  // namespace fl

// `#pragma omp simd reduction(fl_max : acc)` keeps NaN, which OpenMP's own min and max lose. Each lane starts
// from the value the accumulator has before the loop, which is neutral whatever it is.
#pragma omp declare reduction(fl_min : float, double : omp_out = fl::min(omp_out, omp_in)) \
    initializer(omp_priv = omp_orig)
#pragma omp declare reduction(fl_max : float, double : omp_out = fl::max(omp_out, omp_in)) \
    initializer(omp_priv = omp_orig)

#include "elementary.h"

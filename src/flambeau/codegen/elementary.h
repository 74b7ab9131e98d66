// Exponentials, logarithms, hyperbolic and error functions, and the door to libm and libmvec.
//
// In float, the functions that models spend their time in are our own polynomials, which treat every input
// alike: libmvec leaves the vector path for special values, and a masked softmax feeds exp with -inf. The
// others, and all of double, call libm; on x86-64 Linux the compiler replaces such a call in a loop by
// glibc's vector version (within 4 ulp). The coefficients are weighted minimax fits.
#pragma once
#include "prelude.h"

// libmvec has sin, cos, exp, log and pow since glibc 2.22, the others since 2.35. Linking with -lm finds it.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FL_SINCE_2_22 _Pragma("omp declare simd notinbranch")
#if __GLIBC_PREREQ(2, 35)
#define FL_SINCE_2_35 _Pragma("omp declare simd notinbranch")
#endif
#endif
#ifndef FL_SINCE_2_22
#define FL_SINCE_2_22
#endif
#ifndef FL_SINCE_2_35
#define FL_SINCE_2_35
#endif

#define FL_DOUBLE1(simd, name)                     \
  extern "C" { simd double name(double) noexcept; } \
  namespace fl { FL_INLINE double name(double x) { return ::name(x); } }
#define FL_FLOAT1(simd, name)                        \
  extern "C" { simd float name##f(float) noexcept; } \
  namespace fl { FL_INLINE float name(float x) { return ::name##f(x); } }
#define FL_BOTH1(simd, name) FL_DOUBLE1(simd, name) FL_FLOAT1(simd, name)
#define FL_BOTH2(simd, name)                                                              \
  extern "C" { simd double name(double, double) noexcept; }                               \
  extern "C" { simd float name##f(float, float) noexcept; }                               \
  namespace fl { FL_INLINE double name(double x, double y) { return ::name(x, y); } }     \
  namespace fl { FL_INLINE float name(float x, float y) { return ::name##f(x, y); } }

FL_DOUBLE1(FL_SINCE_2_22, exp)
FL_DOUBLE1(FL_SINCE_2_35, exp2)
FL_DOUBLE1(FL_SINCE_2_35, expm1)
FL_DOUBLE1(FL_SINCE_2_22, log)
FL_DOUBLE1(FL_SINCE_2_35, log2)
FL_DOUBLE1(FL_SINCE_2_35, log10)
FL_DOUBLE1(FL_SINCE_2_35, log1p)
FL_DOUBLE1(FL_SINCE_2_35, tanh)
FL_DOUBLE1(FL_SINCE_2_35, erf)
FL_BOTH1(FL_SINCE_2_22, sin)
FL_BOTH1(FL_SINCE_2_22, cos)
FL_BOTH1(FL_SINCE_2_35, tan)
FL_BOTH1(FL_SINCE_2_35, sinh)
FL_BOTH1(FL_SINCE_2_35, cosh)
FL_BOTH1(FL_SINCE_2_35, asin)
FL_BOTH1(FL_SINCE_2_35, acos)
FL_BOTH1(FL_SINCE_2_35, atan)
FL_BOTH1(FL_SINCE_2_35, asinh)
FL_BOTH1(FL_SINCE_2_35, acosh)
FL_BOTH1(FL_SINCE_2_35, atanh)
FL_BOTH1(FL_SINCE_2_35, erfc)
FL_BOTH2(FL_SINCE_2_22, pow)
FL_BOTH2(FL_SINCE_2_35, atan2)
FL_BOTH2(FL_SINCE_2_35, hypot)

namespace fl {

// ---- exponentials --------------------------------------------------------------------------------------

// Adding 1.5 * 2^23 rounds to an integer, and leaves that integer in the low bits of the sum.
static constexpr float round_shift = 0x1.8p23f;

struct exp_parts { float rest; int32_t power; };  // x = rest + power * ln 2, |rest| <= ln 2 / 2

FL_INLINE exp_parts split_exp(float x) {
  const float shifted = madd(x, 0x1.715476p0f, round_shift), power = shifted - round_shift;
  float rest = madd(power, -0x1.63p-1f, x);  // ln 2 in two parts, the first short enough to multiply exactly
  rest = madd(power, 0x1.bd0106p-13f, rest);
  return {rest, int32_t(bitcast<uint32_t>(shifted) - bitcast<uint32_t>(round_shift))};
}

// 2^n for a normal result; n = 128 gives infinity.
FL_INLINE float power_of_two(int32_t n) { return bitcast<float>(uint32_t(n + 127) << 23); }

// y * 2^n in two factors, so that the result may be subnormal or overflow.
FL_INLINE float scale(float y, int32_t n) {
  const int32_t first = n >> 1;
  return y * power_of_two(first) * power_of_two(n - first);
}

// A clamp that lets NaN through.
FL_INLINE float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

FL_INLINE float exp_of_rest(float r) {
  const float c[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b4p-5f, 0x1.1239a0p-7f, 0x1.6a495cp-10f};
  return madd(r * r, horner(r, c), r) + 1.0f;
}

// Below the subnormals the factor is made 0 before it is scaled: an underflow costs Intel hundreds of cycles,
// and half of what a masked softmax sees is -inf.
FL_INLINE float exp(float x) {
  const exp_parts p = split_exp(clamp(x, -105.0f, 100.0f));
  return scale(x < -104.0f ? 0.0f : exp_of_rest(p.rest), p.power);
}

// For arguments in [-87, 88] alone.
FL_INLINE float exp_normal(float x) {
  const exp_parts p = split_exp(x);
  return exp_of_rest(p.rest) * power_of_two(p.power);
}

FL_INLINE float exp2(float x) {
  const float c[] = {0x1.62e430p-1f, 0x1.ebfbe0p-3f, 0x1.c6af78p-5f, 0x1.3b2a32p-7f, 0x1.5f0aa6p-10f,
                     0x1.443cf2p-13f};
  const float clamped = clamp(x, -151.0f, 140.0f);
  const float shifted = clamped + round_shift, rest = clamped - (shifted - round_shift);
  const uint32_t power = bitcast<uint32_t>(shifted) - bitcast<uint32_t>(round_shift);
  return scale(x < -150.0f ? 0.0f : madd(rest, horner(rest, c), 1.0f), int32_t(power));
}

FL_INLINE float expm1_of_rest(float r) {
  const float c[] = {0x1p-1f,        0x1.555556p-3f,  0x1.5554f6p-5f,
                     0x1.111004p-7f, 0x1.6d3cacp-10f, 0x1.a242e8p-13f};
  return madd(r * r, horner(r, c), r);
}

FL_INLINE float expm1(float x) {
  const exp_parts p = split_exp(clamp(x, -20.0f, 88.9f));
  const float half_power = power_of_two(p.power - 1);  // 2^128 is not a float
  const float half = madd(half_power, expm1_of_rest(p.rest), half_power - 0.5f);
  return copysign(half + half, x);  // the sign of -0
}

FL_INLINE float tanh(float x) {
  const float near_zero[] = {-0x1.555534p-2f, 0x1.110760p-3f, -0x1.b84340p-5f, 0x1.52509ep-6f,
                             -0x1.76922ap-8f};  // (tanh(x) - x) / x^3, in x^2
  const float a = abs(x), square = x * x;
  const float far = 1.0f - 2.0f / (exp_normal(2.0f * (a > 10.0f ? 10.0f : a)) + 1.0f);
  return copysign(a < 0.625f ? madd(a * square, horner(square, near_zero), a) : far, x);
}

// exp of a negative number alone, which cannot overflow.
FL_INLINE float sigmoid(float x) {
  const float e = exp(-abs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
FL_INLINE double sigmoid(double x) {
  const double e = exp(-abs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// ---- logarithms ----------------------------------------------------------------------------------------

struct log_parts { float rest, power; };  // x = (1 + rest) * 2^power, 1 + rest in [2/3, 4/3)

FL_INLINE int32_t log_power(float x) { return int32_t(bitcast<uint32_t>(x) - 0x3f2aaaabu) >> 23; }

FL_INLINE log_parts split_log(float x) {
  const bool subnormal = x < 0x1p-126f;
  const float normal = subnormal ? x * 0x1p23f : x;
  const int32_t power = log_power(normal);
  const float mantissa = bitcast<float>(bitcast<uint32_t>(normal) - (uint32_t(power) << 23));
  return {mantissa - 1.0f, float(subnormal ? power - 23 : power)};
}

// log(1 + f) - f for f in [-1/3, 1/3)
FL_INLINE float log_of_rest(float f) {
  const float c[] = {-0x1p-1f,        0x1.555506p-2f,  -0x1.fffefap-3f, 0x1.99d05cp-3f, -0x1.559c2ep-3f,
                     0x1.1ed452p-3f, -0x1.f33c66p-4f, 0x1.1e72a2p-3f,  -0x1.07aa6cp-3f};
  return f * f * horner(f, c);
}

// The logarithm at the ends: infinity, NaN, negative numbers and zero.
FL_INLINE float log_ends(float x, float inside) {
  const float right = x < __builtin_inff() ? inside : x;
  return x > 0.0f ? right : x == 0.0f ? -__builtin_inff() : __builtin_nanf("");
}

FL_INLINE float log_sum(log_parts p) {
  const float low = madd(p.power, -0x1.bd0106p-13f, log_of_rest(p.rest));
  return madd(p.power, 0x1.63p-1f, p.rest + low);
}

FL_INLINE float log(float x) { return log_ends(x, log_sum(split_log(x))); }

// log(x) / log(base), where 1 / log(base) = high + low and log(2) / log(base) = p_high + p_low
FL_INLINE float log_base(float x, float high, float low, float p_high, float p_low) {
  const log_parts p = split_log(x);
  float sum = madd(log_of_rest(p.rest), high, p.rest * low);
  sum = madd(p.power, p_low, sum);
  return log_ends(x, madd(p.power, p_high, madd(p.rest, high, sum)));
}
FL_INLINE float log2(float x) { return log_base(x, 0x1.715476p+0f, 0x1.4ae0c0p-26f, 1.0f, 0.0f); }
FL_INLINE float log10(float x) {
  return log_base(x, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f, 0x1.344p-2f, 0x1.3509f8p-18f);
}

// The power of two comes from the rounded 1 + x, the rest from x itself: x * s + (s - 1) rounds once.
FL_INLINE float log1p(float x) {
  const int32_t power = log_power(1.0f + x);
  const float s = 0.25f * power_of_two(2 - power);  // 2^-128 is subnormal
  const float sum = log_sum({x * s + (s - 1.0f), float(power)});
  return copysign(log_ends(1.0f + x, sum), x);
}

// ---- error functions -----------------------------------------------------------------------------------

FL_INLINE float erf(float x) {
  const float near_zero[] = {0x1.06eba8p-3f,  -0x1.81273ep-2f, 0x1.ce2ce6p-4f, -0x1.b7f71ap-6f,
                             0x1.53f224p-8f, -0x1.a3515ep-11f, 0x1.4771fcp-14f};  // erf(x) / x - 1, in x^2
  const float log_erfc[] = {-0x1.661a16p-12f, -0x1.2088ecp+0f, -0x1.46bae6p-1f, -0x1.a65372p-4f,
                            0x1.65cbdep-6f,   -0x1.825be2p-9f, 0x1.86df46p-13f};  // on [1, 4], where erf is 1
  const float a = abs(x), capped = a > 4.0f ? 4.0f : a;
  const float far = copysign(1.0f - exp_normal(horner(capped, log_erfc)), x);
  return a < 1.0f ? madd(x, horner(x * x, near_zero), x) : far;
}

// erfinv(x) / x as a polynomial in w = -log(1 - x^2) below 5 and in its root above.
template <class T, int N> FL_INLINE T erfinv_guess(T x, const float (&tail)[N]) {
  const float central[] = {0x1.805c5ep+0f,  0x1.f91e8ap-3f,   -0x1.11c99ap-8f,  -0x1.4866fap-10f,
                           0x1.ca617cp-13f, -0x1.4bcbf8p-18f, -0x1.d8bde4p-19f, 0x1.ee1362p-22f,
                           0x1.e1e62ep-26f, -0x1.1b9014p-27f};
  const T w = -log((T(1) - x) * (T(1) + x));
  return x * (w < T(5) ? horner(w - T(2.5), central) : horner(sqrt(w) - T(3), tail));
}

FL_INLINE float erfinv(float x) {
  const float tail[] = {0x1.6a9efep+1f,  0x1.006dc6p+0f,  0x1.352fdcp-7f,  -0x1.f42158p-8f, 0x1.79adf8p-8f,
                        -0x1.ddc8f6p-9f, 0x1.52efaep-10f, 0x1.36725ap-14f, -0x1.49210cp-13f};
  return abs(x) == 1.0f ? x * __builtin_inff() : erfinv_guess(x, tail);
}

// One step of Halley's method takes the guess from 2^-19 to full precision. Above a half the residual is
// taken from erfc, where erf has lost its digits.
FL_INLINE double erfinv(double x) {
  const float tail[] = {0x1.6a9efcp+1f,  0x1.006f38p+0f,  0x1.3593d0p-7f,   -0x1.000e4ep-7f, 0x1.79a574p-8f,
                        -0x1.a6f19ap-9f, 0x1.2b78ecp-10f, -0x1.d0bffep-13f, 0x1.2b328cp-16f};
  const double a = abs(x), y = erfinv_guess(a, tail);
  const double residual = a > 0.5 ? (1.0 - a) - erfc(y) : erf(y) - a;
  const double newton = residual * 0x1.c5bf891b4ef6bp-1 * exp(y * y);  // sqrt(pi) / 2
  return a == 1.0 ? x * __builtin_inf() : copysign(y - newton / (1.0 + y * newton), x);
}

}  // namespace fl

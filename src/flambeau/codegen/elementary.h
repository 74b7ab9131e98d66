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

// Adding 1.5 * 2^23 rounds to an integer n and leaves it in the low bits of the sum, together with what else
// was added, a bias. Moved up by 23 bits, they are the exponent of a float: 2^(n + bias - 127).
template <int bias> struct shift { static constexpr float value = 0x1.8p23f + bias; };
FL_INLINE float power_of_two(float shifted) { return bitcast<float>(bitcast<uint32_t>(shifted) << 23); }

struct exp_parts { float rest, power; };  // x = rest + n * step * ln 2, 2^(n + bias - 127)

template <int step, int bias> FL_INLINE exp_parts split_exp(float x) {
  const float shifted = madd(x, 0x1.715476p0f / step, shift<bias>::value), n = shifted - shift<bias>::value;
  // ln 2 in two parts, the first short enough to multiply exactly
  const float rest = madd(n, 0x1.bd0106p-13f * step, madd(n, -0x1.63p-1f * step, x));
  return {rest, power_of_two(shifted)};
}

// The formulas below compute nonsense where they do not apply: a choice at the end is cheaper than a clamp
// before, and lets NaN through. Nor does -inf, of which a masked softmax is full, cost more than a number: it
// becomes NaN at the first step, and not an underflow, which takes Intel hundreds of cycles.
FL_INLINE float choose_ends(float x, float low, float below, float inside, float high, float above) {
  const float left = x > high ? above : inside;
  return x < low ? below : left;
}

// With steps of 2 ln 2, scaling twice by the same power gives subnormal results and overflows alike.
FL_INLINE float exp(float x) {
  const float c[] = {0x1.00000cp-1f, 0x1.555510p-3f,  0x1.5549d4p-5f,
                     0x1.1127c8p-7f, 0x1.71c7bap-10f, 0x1.9b813cp-13f};
  const exp_parts p = split_exp<2, 127>(x);
  const float y = madd(p.rest * p.rest, horner(p.rest, c), p.rest) + 1.0f;
  return choose_ends(x, -104.0f, 0.0f, y * p.power * p.power, 89.0f, __builtin_inff());
}

FL_INLINE float exp2(float x) {
  const float c[] = {0x1.62e432p-1f,  0x1.ebfbf8p-3f,  0x1.c6afa2p-5f, 0x1.3b1fe0p-7f,
                     0x1.5dbcf2p-10f, 0x1.481fecp-13f, 0x1.f517e0p-17f};
  const float shifted = madd(x, 0.5f, shift<127>::value), n = shifted - shift<127>::value;
  const float rest = madd(n, -2.0f, x), power = power_of_two(shifted);
  const float y = madd(rest, horner(rest, c), 1.0f);
  return choose_ends(x, -150.0f, 0.0f, y * power * power, 128.0f, __builtin_inff());
}

// (e^x - 1) / 2 for x in [-87, 88.9]; half, because 2^128 is not a float.
FL_INLINE float half_expm1(float x) {
  const float c[] = {0x1p-1f,        0x1.555556p-3f,  0x1.5554f6p-5f,
                     0x1.111004p-7f, 0x1.6d3cacp-10f, 0x1.a242e8p-13f};
  const exp_parts p = split_exp<1, 126>(x);
  return madd(p.power, madd(p.rest * p.rest, horner(p.rest, c), p.rest), p.power - 0.5f);
}

FL_INLINE float expm1(float x) {
  const float half = half_expm1(x);
  return copysign(choose_ends(x, -18.0f, -1.0f, half + half, 88.9f, __builtin_inff()), x);  // the sign of -0
}

// h / (h + 1): where the quotient is close to one, the errors of h cancel.
FL_INLINE float tanh(float x) {
  const float a = abs(x), half = half_expm1(a + a), ratio = half / (half + 1.0f);
  return copysign(a > 9.1f ? 1.0f : ratio, x);
}

// 2^-32 / (2^-32 + 2^-32 e^-x): the scaled e^-x does not overflow where the result is subnormal.
FL_INLINE float sigmoid(float x) {
  const float c[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b4p-5f, 0x1.1239a0p-7f, 0x1.6a495cp-10f};
  const exp_parts p = split_exp<1, 95>(-x);
  const float y = madd(p.rest * p.rest, horner(p.rest, c), p.rest) + 1.0f;
  return choose_ends(x, -104.0f, 0.0f, 0x1p-32f / madd(y, p.power, 0x1p-32f), 60.0f, 1.0f);
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
  const float s = 0.25f * bitcast<float>(uint32_t(129 - power) << 23);  // 2^-128 is subnormal
  const float sum = log_sum({x * s + (s - 1.0f), float(power)});
  return copysign(log_ends(1.0f + x, sum), x);
}

// ---- error functions -----------------------------------------------------------------------------------

// 2 t / (1 + t^2) for t = x P(x^2) / Q(x^2), with one division. As the result approaches 1, so does t, where
// the formula is flat and the errors of P and Q vanish.
FL_INLINE float erf(float x) {
  const float p[] = {0x1.e8962ep-1f, 0x1.018a08p-2f, 0x1.bf4848p-6f, 0x1.19a2b6p-9f};
  const float q[] = {0x1.b0ffa6p+0f, 0x1.e27fb8p-2f, 0x1.4fb162p-4f, 0x1.4f3dd6p-7f, 0x1.5ee3ecp-13f};
  const float square = x * x, a = x * horner(square, p), b = horner(square, q);
  const float ratio = 2.0f * (a * b) / madd(b, b, a * a);
  return square > 14.06f ? copysign(1.0f, x) : ratio;  // from 3.75 on, within two units
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

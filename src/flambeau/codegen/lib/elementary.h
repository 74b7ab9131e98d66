// Exponentials, logarithms, hyperbolic and error functions, and the door to libm and libmvec.
//
// In float, the functions that models spend their time in are our own polynomials (elementary_float.h). The
// others, and all of double, call libm; on x86-64 Linux the compiler replaces such a call in a loop by
// glibc's vector version (within 4 ulp).
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
FL_DOUBLE1(FL_SINCE_2_35, cosh)
FL_DOUBLE1(FL_SINCE_2_35, asin)
FL_DOUBLE1(FL_SINCE_2_35, acos)
FL_DOUBLE1(FL_SINCE_2_35, atan)
FL_BOTH1(FL_SINCE_2_35, asinh)
FL_BOTH1(FL_SINCE_2_35, acosh)
FL_DOUBLE1(FL_SINCE_2_35, atanh)
FL_BOTH1(FL_SINCE_2_35, erfc)
FL_BOTH2(FL_SINCE_2_22, pow)
FL_BOTH2(FL_SINCE_2_35, atan2)
FL_BOTH2(FL_SINCE_2_35, hypot)

namespace fl {

#define FL_F(name) name
#define FL_AS_FLOAT(bits) bitcast<float>(bits)
#define FL_AS_BITS(x) bitcast<uint32_t>(x)
#define FL_BITS uint32_t
#define FL_INT int32_t
#define FL_INF __builtin_inff()
#define FL_NAN __builtin_nanf("")
#include "elementary_float.h"
#include "circular_float.h"

FL_INLINE double sigmoid(double x) {
  const double e = exp(-abs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// One step of Halley's method takes the guess from 2^-19 to full precision. Above a half the residual is
// taken from erfc, where erf has lost its digits.
FL_INLINE double erfinv(double x) {
  const float tail[] = {0x1.6a9efcp+1f,  0x1.006f38p+0f,  0x1.3593d0p-7f,   -0x1.000e4ep-7f, 0x1.79a574p-8f,
                        -0x1.a6f19ap-9f, 0x1.2b78ecp-10f, -0x1.d0bffep-13f, 0x1.2b328cp-16f};
  const float central[] = FL_ERFINV_CENTRAL;
  const double a = abs(x), w = -log((1.0 - a) * (1.0 + a));
  const double y = a * (w < 5.0 ? horner(w - 2.5, central) : horner(sqrt(w) - 3.0, tail));
  const double residual = a > 0.5 ? (1.0 - a) - erfc(y) : erf(y) - a;
  const double newton = residual * 0x1.c5bf891b4ef6bp-1 * exp(y * y);  // sqrt(pi) / 2
  return a == 1.0 ? x * __builtin_inf() : copysign(y - newton / (1.0 + y * newton), x);
}

}  // namespace fl

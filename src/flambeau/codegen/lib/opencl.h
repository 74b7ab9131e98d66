// What every generated OpenCL kernel may call: the words of the language around simt.h.
//
// The target sets FL_DOUBLE where the device has doubles, and FL_CLANG where the compiler is clang for a CPU: its own
// builtins become instructions there, where those of OpenCL are calls that keep a loop from becoming vectors.
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
#define FL_THREAD
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

// a * b + c, fused where the machine can.
#if defined(FL_CLANG) && (defined(__FMA__) || defined(__ARM_FEATURE_FMA))
FL_INLINE float fl_madd_f(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif !defined(FL_CLANG) && defined(FP_FAST_FMAF)
FL_INLINE float fl_madd_f(float a, float b, float c) { return fma(a, b, c); }
#else
FL_INLINE float fl_madd_f(float a, float b, float c) { return a * b + c; }
#endif

#ifndef FL_CLANG  // a GPU has an instruction for powers of two; the language promises errors of 3 ulp at most
#define FL_HAS_EXP
FL_INLINE float fl_exp_f(float x) { return exp(x); }
FL_INLINE float fl_exp2_f(float x) { return exp2(x); }
#endif

#include "simt.h"

#define FL_CALLS1(CALL) \
  CALL(asin) CALL(acos) CALL(atan) CALL(sinh) CALL(cosh) CALL(asinh) CALL(acosh) CALL(atanh) CALL(erfc) CALL(lgamma)

#define FL_CALL(name) FL_INLINE float fl_##name##_f(float x) { return name(x); }
FL_CALLS1(FL_CALL)
#if defined(FL_CLANG) && defined(FL_DOUBLE)
#include "opencl_vector.h"
#else
FL_CALL(sin) FL_CALL(cos) FL_CALL(tan)
FL_INLINE float fl_pow_f(float x, float y) { return pow(x, y); }
#endif
#undef FL_CALL

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

// ---- work-items ------------------------------------------------------------------------------------------

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

#define fl_thread() ((long)get_global_id(0))
#define fl_threads() ((long)get_global_size(0))

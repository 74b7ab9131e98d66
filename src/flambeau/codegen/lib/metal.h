// What every generated Metal kernel may call: the words of the language around simt.h, and what it has no function for.
//
// Metal has no doubles, no atomics but on 32-bit words, and few functions beyond those of graphics. Half precision and
// bfloat16 are stored as bits and computed in float, so that any version of the language will do.
#pragma once
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#pragma METAL fp contract(off)  // two roundings, as in eager

#define FL_INLINE static inline __attribute__((always_inline))
#define FL_THREAD thread
#define FL_LIB_F(name) precise::name
#define as_float(x) as_type<float>(x)
#define as_int(x) as_type<int>(x)
#define as_uint(x) as_type<uint>(x)

FL_INLINE float fl_from_half(ushort x) { return (float)as_type<half>(x); }
FL_INLINE ushort fl_to_half(float x) { return as_type<ushort>((half)x); }

FL_INLINE float fl_madd_f(float a, float b, float c) { return fma(a, b, c); }
#define FL_HAS_EXP
FL_INLINE float fl_exp_f(float x) { return precise::exp(x); }
FL_INLINE float fl_exp2_f(float x) { return precise::exp2(x); }

// A number of the run, which comes as the bits of a double: to the nearest float, ties to even.
FL_INLINE float fl_from_double(ulong bits) {
  const uint sign = (uint)(bits >> 32) & 0x80000000u;
  const int power = (int)(bits >> 52 & 0x7ff) - 896;  // of a normal float, from 1 to 254
  const ulong fraction = bits & 0xfffffffffffffUL;
  if (power >= 255) return as_float(sign | 0x7f800000u | (uint)(power == 1151 && fraction != 0) << 22);
  if (power < -24) return as_float(sign);
  const ulong mantissa = fraction | 1UL << 52;
  const int lost = power > 0 ? 29 : 30 - power;
  const ulong kept = mantissa >> lost, rest = mantissa & ((1UL << lost) - 1), tie = 1UL << (lost - 1);
  const uint rounded = (uint)kept + (uint)(rest > tie || (rest == tie && (kept & 1) != 0));
  return as_float(sign | (rounded + (power > 0 ? (uint)(power - 1) << 23 : 0u)));
}

// The rest of a division is exact: shifts and remainders of whole numbers, 40 bits at a time.
FL_INLINE float fl_exact_fmod(float x, float y) {
  const uint a = as_uint(x) & 0x7fffffffu, b = as_uint(y) & 0x7fffffffu;
  if (b == 0 || a >= 0x7f800000u || b > 0x7f800000u) return NAN;
  if (a < b) return x;
  const int b_power = b < 0x800000u ? 1 : (int)(b >> 23);
  const ulong divisor = (b & 0x7fffffu) | (b < 0x800000u ? 0u : 0x800000u);
  ulong rest = ((a & 0x7fffffu) | (a < 0x800000u ? 0u : 0x800000u)) % divisor;
  for (int left = (a < 0x800000u ? 1 : (int)(a >> 23)) - b_power; left > 0; left -= 40)
    rest = (rest << (left < 40 ? left : 40)) % divisor;
  int power = b_power;
  for (; rest != 0 && rest < 0x800000u && power > 1; --power) rest <<= 1;
  const uint bits = (uint)rest + (rest < 0x800000u ? 0u : (uint)(power - 1) << 23);
  return as_float(bits | (as_uint(x) & 0x80000000u));
}

FL_INLINE float fl_next_after(float x, float y) {
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  if (x == 0.0f) return as_float((as_uint(y) & 0x80000000u) | 1u);
  return as_float(as_uint(x) + ((x < y) == (x > 0.0f) ? 1u : 0xffffffffu));
}

FL_INLINE float fl_length(float x, float y) {
  const float a = precise::fabs(x), b = precise::fabs(y), most = a > b ? a : b, least = a > b ? b : a;
  if (a == INFINITY || b == INFINITY) return INFINITY;
  const float ratio = most == 0.0f ? 0.0f : least / most;
  return x != x || y != y ? NAN : most * precise::sqrt(fma(ratio, ratio, 1.0f));
}

#define fmod fl_exact_fmod
#define nextafter fl_next_after
#define hypot fl_length
#define atan2 precise::atan2
#include "simt.h"
#undef fmod
#undef nextafter
#undef hypot
#undef atan2

#define FL_CALL(name) FL_INLINE float fl_##name##_f(float x) { return precise::name(x); }
FL_CALL(asin) FL_CALL(acos) FL_CALL(atan) FL_CALL(sinh) FL_CALL(cosh) FL_CALL(asinh) FL_CALL(acosh) FL_CALL(atanh)
FL_CALL(sin) FL_CALL(cos) FL_CALL(tan)
#undef FL_CALL
FL_INLINE float fl_pow_f(float x, float y) { return precise::pow(x, y); }

// Below 1/2 from erf; above, t e^(-x^2) P(t) of t = 1 / (1 + x / 2), x^2 in two parts: it grows to 100, and so would its
// rounding.
FL_INLINE float fl_erfc_f(float x) {
  const float c[] = {-1.26551223f, 1.00002368f, 0.37409196f, 0.09678418f, -0.18628806f,
                     0.27886807f, -1.13520398f, 1.48851587f, -0.82215223f, 0.17087277f};
  const float a = precise::fabs(x), t = 1.0f / fma(0.5f, a, 1.0f), square = a * a, rest = fma(a, a, -square);
  const float far = t * (precise::exp(-square) * precise::exp(FL_HORNER10(t, c) - rest));
  const float above = a > 11.0f ? 0.0f : far, both = x < 0.0f ? 2.0f - above : above;
  return a < 0.5f ? 1.0f - fl_erf_f(x) : x != x ? x : both;
}

// ---- threads in step -----------------------------------------------------------------------------------

// What the thread has whose number differs in these bits, and what the one of this number has: of 64 bits word by word.
#define FL_EXCHANGE(T, narrow)                                                                             \
  FL_INLINE T fl_across(T x, int bits) { return (T)simd_shuffle_xor((narrow)x, (ushort)bits); }            \
  FL_INLINE T fl_of_one(T x, int lane) { return (T)simd_shuffle((narrow)x, (ushort)lane); }
#define FL_EXCHANGE_WIDE(T)                                                                                \
  FL_INLINE T fl_across(T x, int bits) {                                                                   \
    return (T)((ulong)fl_across((uint)((ulong)x >> 32), bits) << 32 | fl_across((uint)x, bits));           \
  }                                                                                                        \
  FL_INLINE T fl_of_one(T x, int lane) {                                                                   \
    return (T)((ulong)fl_of_one((uint)((ulong)x >> 32), lane) << 32 | fl_of_one((uint)x, lane));           \
  }
FL_EXCHANGE(float, float) FL_EXCHANGE(int, int) FL_EXCHANGE(uint, uint) FL_EXCHANGE(bool, uint) FL_EXCHANGE(short, int)
FL_EXCHANGE(ushort, uint) FL_EXCHANGE(char, int) FL_EXCHANGE(uchar, uint) FL_EXCHANGE_WIDE(long) FL_EXCHANGE_WIDE(ulong)

// ---- atomics -------------------------------------------------------------------------------------------

// 64 bits in two steps: what the low word carries goes to the high one. Nobody reads before the kernel ends.
FL_INLINE void fl_add_long(device long* element, long value) {
  device atomic_uint* words = reinterpret_cast<device atomic_uint*>(element);
  const uint low = (uint)value, before = atomic_fetch_add_explicit(words, low, memory_order_relaxed);
  const uint high = (uint)(value >> 32) + (uint)(before + low < low);
  if (high != 0) atomic_fetch_add_explicit(words + 1, high, memory_order_relaxed);
}

// The record of a launch (opencl.h says what is in it). The first thread that finds something writes it.
FL_INLINE void fl_report(device atomic_int* faults, long bad, long size) {
  int none = 0;
  while (!atomic_compare_exchange_weak_explicit(faults, &none, 2, memory_order_relaxed, memory_order_relaxed))
    if (none != 0) return;
  const int words[] = {0, (int)bad, (int)(bad >> 32), (int)size, (int)(size >> 32)};
  for (int k = 0; k < 5; ++k) atomic_store_explicit(faults + 1 + k, words[k], memory_order_relaxed);
}

// What every generated C++ kernel may call: storage types, casts, integer and float arithmetic, random bits.
//
// Everything is inlined by force and, but for the integer loops of pow and gcd, free of branches, so that a
// loop over it vectorises; the transcendental functions are in elementary.h, which this file includes. No C++
// standard header is included: parsing one costs more than compiling the kernel. Needs -fno-math-errno and
// -fno-trapping-math to vectorise, and -ffp-contract=off where results must not depend on which products the
// compiler happens to fuse.
#pragma once
#include <stdint.h>

#define FL_INLINE static inline __attribute__((always_inline))

extern "C" {
double fmod(double, double) noexcept;
float fmodf(float, float) noexcept;
int omp_get_thread_num() noexcept;
int omp_get_num_threads() noexcept;
int omp_get_max_threads() noexcept;
}

namespace fl {

template <class To, class From> FL_INLINE To bitcast(From x) { return __builtin_bit_cast(To, x); }

// Several numbers side by side, which may lie in an array of one kind.
template <class T, int lanes> struct vector {
  typedef T type __attribute__((vector_size(lanes * sizeof(T)), may_alias));
  typedef T loose __attribute__((vector_size(lanes * sizeof(T)), aligned(sizeof(T)), may_alias));  // anywhere
};

// The sum of all lanes, halves added first.
template <class T, int lanes> FL_INLINE T total(typename vector<T, lanes>::type v) {
  if constexpr (lanes == 2) {
    return v[0] + v[1];
  } else {
    struct halves { typename vector<T, lanes / 2>::type low, high; };
    const halves h = __builtin_bit_cast(halves, v);
    return total<T, lanes / 2>(h.low + h.high);
  }
}

template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };

// ---- storage types -------------------------------------------------------------------------------------

// Both are bare 16-bit patterns: g++ 12 converts _Float16 one element at a time, while the integer
// forms below vectorise on every target. They are enums because a struct as a local variable of an
// `omp simd` loop keeps the loop scalar.
enum class bf16 : uint16_t {};
enum class half : uint16_t {};

FL_INLINE float to_float(float x) { return x; }
FL_INLINE float to_float(bf16 x) { return bitcast<float>(uint32_t(x) << 16); }

FL_INLINE float to_float(half x) {
  const uint32_t magnitude = (uint32_t(x) & 0x7fffu) << 13;
  const uint32_t sign = (uint32_t(x) & 0x8000u) << 16;
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
  return bf16((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

FL_INLINE half to_half(float x) {
  const uint32_t all = bitcast<uint32_t>(x), bits = all & 0x7fffffffu, sign = (all >> 16) & 0x8000u;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the subnormal half in the low bits, rounded to nearest even by the adder.
  const uint32_t subnormal = bitcast<uint32_t>(bitcast<float>(bits) + 0.5f) - 0x3f000000u;
  uint32_t result = bits < (113u << 23) ? subnormal : normal;
  result = bits >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above
  result = bits > 0x7f800000u ? 0x7e00u : result;
  return half(result | sign);
}

// ATen rounds twice, through float; so do these.
FL_INLINE bf16 to_bf16(double x) { return to_bf16(float(x)); }
FL_INLINE half to_half(double x) { return to_half(float(x)); }

// ---- from float to integer -----------------------------------------------------------------------------

// The upper half of an unsigned range is reached by moving it onto the signed one.
template <class To, class Signed, class From> FL_INLINE To to_unsigned(From x) {
  const From half = sizeof(To) == 4 ? From(0x1p31) : From(0x1p63);
  const To moved = To(To(Signed(x - half)) ^ (To(1) << (8 * sizeof(To) - 1)));
  return x >= half ? moved : To(Signed(x));
}

// fl::to_int<To>(x). Out of range the results are those of ATen on x86, where a conversion answers the most
// negative int32 or int64 and never traps, and narrower types keep its low bits.
template <class To, class From> FL_INLINE To to_int(From x) {
  if constexpr (same<To, bool>::value) return x != From(0);
  else if constexpr (same<To, uint8_t>::value && same<From, double>::value) return To(int64_t(x));
  else if constexpr (sizeof(To) < 4) return To(int32_t(x));
  else if constexpr (same<To, uint32_t>::value) return to_unsigned<To, int32_t>(x);
  else if constexpr (same<To, uint64_t>::value) return to_unsigned<To, int64_t>(x);
  else return To(x);
}

// ---- comparisons and selections ------------------------------------------------------------------------

#define FL_BOTH(name, builtin)                                            \
  FL_INLINE float name(float x) { return __builtin_##builtin##f(x); }     \
  FL_INLINE double name(double x) { return __builtin_##builtin(x); }
#define FL_BOTH_OF_TWO(name)                                                              \
  FL_INLINE float name(float x, float y) { return __builtin_##name##f(x, y); }            \
  FL_INLINE double name(double x, double y) { return __builtin_##name(x, y); }

template <class T> FL_INLINE T abs(T x) { return x < T(0) ? T(-x) : x; }
FL_BOTH(abs, fabs)
FL_INLINE float infinity(float) { return __builtin_inff(); }
FL_INLINE double infinity(double) { return __builtin_inf(); }
template <class T> FL_INLINE bool isnan(T x) { return x != x; }
template <class T> FL_INLINE bool isinf(T x) { return abs(x) == infinity(x); }
template <class T> FL_INLINE bool isfinite(T x) { return abs(x) < infinity(x); }
FL_INLINE bool signbit(float x) { return bitcast<int32_t>(x) < 0; }
FL_INLINE bool signbit(double x) { return bitcast<int64_t>(x) < 0; }

template <int bytes> struct bits_of;
template <> struct bits_of<1> { using type = uint8_t; };
template <> struct bits_of<2> { using type = uint16_t; };
template <> struct bits_of<4> { using type = uint32_t; };
template <> struct bits_of<8> { using type = uint64_t; };
// cond ? a : b without a branch.
template <class T> FL_INLINE T choose(bool cond, T a, T b) {
  using Bits = typename bits_of<sizeof(T)>::type;
  const Bits all = Bits(-Bits(cond));
  return bitcast<T>(Bits((bitcast<Bits>(a) & all) | (bitcast<Bits>(b) & Bits(~all))));
}
FL_INLINE bool choose(bool cond, bool a, bool b) { return (cond & a) | (!cond & b); }

// For sizes and indices, whatever integers they are written as.
FL_INLINE int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
FL_INLINE int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }
FL_INLINE int64_t past(int64_t i, int64_t a, int64_t b) { return i >= a && i < b ? b : i; }  // i, or the end of [a, b)

// What is reported (ir/faults.py): the worse of two faults; and one of an index, which has the low 50 bits.
FL_INLINE int64_t worse(int64_t a, int64_t b) { return a > b ? a : b; }
FL_INLINE int64_t fault(int64_t site, int64_t at) { return site | (at & ((INT64_C(1) << 50) - 1)); }

// An index that is reported where it is not below the size, and zero then. The processor foresees that it is, and reads
// on: with a choice in place of the branch, every read would wait for the comparison.
FL_INLINE int64_t checked(int64_t at, int64_t size, int64_t& bad, int64_t site) {
  if (__builtin_expect(uint64_t(at) >= uint64_t(size), 0)) {
    bad = worse(bad, fault(site, at));
    at = 0;
  }
  return at;
}

// Whether an access stays in its buffer, of a kernel that looks at all of them.
FL_INLINE bool within(int64_t at, int64_t first, int64_t end, int64_t& bad, int64_t site) {
  const bool inside = at >= first && at < end;
  bad = worse(bad, inside ? 0 : fault(site, at));
  return inside;
}

// Ask for a row of so many bytes that will be read soon. The address need not exist.
template <int bytes, class T> FL_INLINE void prefetch(const T* row) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)row + at);
}

// torch.minimum and torch.maximum: NaN if either is NaN. The first choice is one machine instruction, which
// answers its last operand where one is NaN; the second looks at b alone, because a is often an accumulator
// that the next element waits for.
template <class T> FL_INLINE T min(T a, T b) {
  const T least = b < a ? b : a;
  return b != b ? b : least;
}
template <class T> FL_INLINE T max(T a, T b) {
  const T greatest = b > a ? b : a;
  return b != b ? b : greatest;
}
// torch.fmin and torch.fmax: the other one if one is NaN.
template <class T> FL_INLINE T fmin(T a, T b) { return (b != b) | (a < b) ? a : b; }
template <class T> FL_INLINE T fmax(T a, T b) { return (b != b) | (a > b) ? a : b; }

// torch.sign: NaN gives 0.
template <class T> FL_INLINE T sign(T x) { return T(T(x > T(0)) - T(x < T(0))); }
FL_BOTH_OF_TWO(copysign)

// ---- rounding and roots --------------------------------------------------------------------------------

FL_BOTH(floor, floor)
FL_BOTH(ceil, ceil)
FL_BOTH(trunc, trunc)
FL_BOTH(round, rint)  // halves to even, as torch.round
FL_BOTH(sqrt, sqrt)
template <class T> FL_INLINE T rsqrt(T x) { return T(1) / sqrt(x); }
FL_BOTH_OF_TWO(nextafter)

// a * b + c with one rounding, in software where the machine has no such instruction.
FL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FL_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

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

// ---- integer arithmetic --------------------------------------------------------------------------------

// Integers are divided as int32 or int64, whichever holds them; uint64 as it is.
template <class T> struct wide { using type = int32_t; };
template <> struct wide<uint32_t> { using type = int64_t; };
template <> struct wide<int64_t> { using type = int64_t; };
template <> struct wide<uint64_t> { using type = uint64_t; };

// The quotient toward zero, and its rest; unsigned products wrap where signed ones may not. Dividing by zero,
// or the most negative number by -1, must not end the process.
FL_INLINE int32_t quotient(int32_t a, int32_t b) {
  return int32_t(double(a) / double(b));  // exact, and doubles vectorise where idiv cannot
}
FL_INLINE int64_t quotient(int64_t a, int64_t b) {
  const int64_t safe = a / ((b == 0) | (b == -1) ? 1 : b);
  return b == -1 ? int64_t(0 - uint64_t(a)) : b == 0 ? 0 : safe;
}
FL_INLINE uint64_t quotient(uint64_t a, uint64_t b) { return b == 0 ? 0 : a / (b == 0 ? 1 : b); }
FL_INLINE int32_t rest(int32_t a, int32_t b) {
  return int32_t(uint32_t(a) - uint32_t(quotient(a, b)) * uint32_t(b));
}
FL_INLINE int64_t rest(int64_t a, int64_t b) {
  return int64_t(uint64_t(a) - uint64_t(quotient(a, b)) * uint64_t(b));
}
FL_INLINE uint64_t rest(uint64_t a, uint64_t b) { return a - quotient(a, b) * b; }

template <class T> FL_INLINE T div(T a, T b) {
  using W = typename wide<T>::type;
  return T(quotient(W(a), W(b)));
}

// Python's // and %: the rest has the sign of the divisor.
template <class T> FL_INLINE T floordiv(T a, T b) {
  using W = typename wide<T>::type;
  const W r = rest(W(a), W(b));
  return T(quotient(W(a), W(b)) - W((r != 0) & ((r < 0) != (W(b) < 0))));
}
template <class T> FL_INLINE T mod(T a, T b) {
  using W = typename wide<T>::type;
  const W r = rest(W(a), W(b));
  return T(r + ((r != 0) & ((r < 0) != (W(b) < 0)) ? W(b) : W(0)));
}
// For indices, where one of the two may be a plain literal.
FL_INLINE int64_t floordiv(int64_t a, int64_t b) { return floordiv<int64_t>(a, b); }
FL_INLINE int64_t mod(int64_t a, int64_t b) { return mod<int64_t>(a, b); }

template <class T> FL_INLINE T fmod(T a, T b) {
  using W = typename wide<T>::type;
  return T(rest(W(a), W(b)));
}
template <class T> FL_INLINE T remainder(T a, T b) { return mod<T>(a, b); }

// Wrapping. A negative exponent gives the truncated true result: 0 unless the base is 1 or -1.
template <class T> FL_INLINE T pow(T base, T exponent) {
  if (exponent < 0) return base == T(1) ? T(1) : base == T(-1) ? (exponent & 1 ? T(-1) : T(1)) : T(0);
  uint64_t result = 1, power = uint64_t(base);
  for (uint64_t left = uint64_t(exponent); left; left >>= 1, power *= power) result *= left & 1 ? power : 1;
  return T(result);
}

template <class T> FL_INLINE T gcd(T a, T b) {
  a = abs(a), b = abs(b);
  while (b != 0) {
    const T r = T(a % b);
    a = b, b = r;
  }
  return a;
}
template <class T> FL_INLINE T lcm(T a, T b) {
  const T divisor = gcd(a, b);
  return divisor == 0 ? T(0) : T(abs(div(a, divisor) * b));  // gcd(INT64_MIN, 7) is -1
}

// ---- division of floats --------------------------------------------------------------------------------

#if FL_FMA
// What is left of |a|, and how many |b| were taken away. A quotient below 2^50 is found by one division, at most one too
// large (then what is left is negative), and the fused step rounds nothing. No answer where it is larger, or no number.
FL_INLINE bool divided(double a, double b, double& whole, double& left) {
  const double x = __builtin_fabs(a), y = __builtin_fabs(b);
  whole = __builtin_trunc(x / y);
  left = whole == 0 ? x : madd(-whole, y, x);  // an infinite b leaves a
  return __builtin_expect(whole < 0x1p50, 1);
}

FL_INLINE double fmod(double a, double b) {
  double whole, left;
  if (!divided(a, b, whole, left)) return ::fmod(a, b);
  return __builtin_copysign(left < 0 ? left + __builtin_fabs(b) : left, a);
}

// Exact, as fmod must be. Each step takes away a multiple of b that leaves less than 2^-50 of the dividend;
// the difference has few enough bits to be a double, so the fused step rounds nothing. The exponents of two
// floats differ by at most 277, hence six steps.
FL_INLINE float fmod(float a, float b) {
  const double divisor = __builtin_fabs(double(b)), inverse = 1.0 / divisor;
  double left = __builtin_fabs(double(a));
#pragma GCC unroll 6
  for (int step = 0; step < 6; ++step) left = madd(-__builtin_rint(left * inverse), divisor, left);
  left = left < 0 ? left + divisor : left;
  const bool unchanged = isinf(b) & isfinite(a);
  return __builtin_copysignf(unchanged ? a : float(left), a);
}
#else
FL_INLINE double fmod(double a, double b) { return ::fmod(a, b); }
FL_INLINE float fmod(float a, float b) { return ::fmodf(a, b); }
#endif

// torch.remainder: the sign of the divisor.
template <class T> FL_INLINE T remainder_of(T a, T b) {
  const T r = fmod(a, b);
  return choose((r != 0) & ((b < 0) != (r < 0)), r + b, r);  // nobody foresees signs: no branch
}
FL_INLINE float remainder(float a, float b) { return remainder_of(a, b); }
FL_INLINE double remainder(double a, double b) { return remainder_of(a, b); }

// torch.floor_divide. Divides what the exact rest leaves, so that the quotient is within rounding of an
// integer; x // 0 is x / 0, and a zero has the sign of the true quotient.
template <class T> FL_INLINE T floordiv_of(T a, T b) {
  const T r = fmod(a, b);
  const T near = (a - r) / b, q = choose((r != 0) & ((b < 0) != (r < 0)), near - 1, near);
  const T below = floor(q), result = choose(q - below > T(0.5), below + 1, below);
  return choose(b == 0, a / b, choose(q == 0, copysign(T(0), a / b), result));
}
FL_INLINE float floordiv(float a, float b) { return floordiv_of(a, b); }
FL_INLINE double floordiv(double a, double b) {
#if FL_FMA
  double whole, left;
  if (divided(a, b, whole, left)) {
    const bool apart = signbit(a) != signbit(b);
    const double below = whole - double(left < 0) + double(apart & (left != 0));
    return choose(apart, -below, below);
  }
#endif
  return floordiv_of(a, b);
}

// ---- random bits ---------------------------------------------------------------------------------------

// Philox 4x32-10 (Salmon et al., 2011): word `lane` of block `counter` in stream `subsequence` of `seed`.
struct philox_block { uint32_t word[4]; };

// A round needs all 64 bits of a product of 32-bit words. Where vectors multiply as 64 bits, words that wide
// spare the moves between lanes of two sizes; what their upper halves hold does not matter.
#ifdef __AVX512DQ__
using philox_word = uint64_t;
#else
using philox_word = uint32_t;
#endif

FL_INLINE philox_block philox4(uint64_t seed, uint64_t subsequence, uint64_t counter) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  philox_word c0 = philox_word(counter), c1 = philox_word(counter >> 32);
  philox_word c2 = philox_word(subsequence), c3 = philox_word(subsequence >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * uint32_t(c0), p1 = uint64_t(0xCD9E8D57u) * uint32_t(c2);
    c0 = philox_word(p1 >> 32) ^ c1 ^ k0, c2 = philox_word(p0 >> 32) ^ c3 ^ k1;
    c1 = philox_word(p1), c3 = philox_word(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{uint32_t(c0), uint32_t(c1), uint32_t(c2), uint32_t(c3)}};
}

FL_INLINE uint32_t philox(uint64_t seed, uint64_t subsequence, uint64_t counter, int lane) {
  const philox_block b = philox4(seed, subsequence, counter);
  const uint32_t low = lane & 1 ? b.word[1] : b.word[0], high = lane & 1 ? b.word[3] : b.word[2];
  return lane & 2 ? high : low;
}

// ---- threads -------------------------------------------------------------------------------------------

#ifdef _OPENMP
FL_INLINE int64_t thread() { return ::omp_get_thread_num(); }
FL_INLINE int64_t threads() { return ::omp_get_num_threads(); }
FL_INLINE int64_t most_threads() { return ::omp_get_max_threads(); }  // that the next parallel part can have
#else
FL_INLINE int64_t thread() { return 0; }
FL_INLINE int64_t threads() { return 1; }
FL_INLINE int64_t most_threads() { return 1; }
#endif

}  // namespace fl

#include "elementary.h"

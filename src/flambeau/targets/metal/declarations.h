// Declarations of Metal's library for a compiler front end, with address spaces as attributes (checker.py).
//
// Address spaces (thread, device, threadgroup) do not convert into each other, nor into none: each function has an
// overload for every one that it accepts.
#pragma once
#define thread
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define kernel
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));

namespace metal {
typedef _Float16 half;
template <typename T, typename U> T as_type(U);
template <typename T> T min(T, T);
template <typename T> T max(T, T);
float fma(float, float, float);

namespace precise {
float fabs(float), floor(float), ceil(float), trunc(float), rint(float), sqrt(float), exp(float), exp2(float), log(float),
    log2(float), log10(float), sin(float), cos(float), tan(float), asin(float), acos(float), atan(float), sinh(float),
    cosh(float), tanh(float), asinh(float), acosh(float), atanh(float);
float copysign(float, float), atan2(float, float), pow(float, float);
}  // namespace precise

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);

enum memory_order { memory_order_relaxed };
template <typename T> struct atomic;
template <> struct atomic<int> { int value; };
template <> struct atomic<uint> { uint value; };
template <> struct atomic<float> { float value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
template <typename T> struct same { typedef T type; };
#define ATOMICS(space)                                                                                       \
  template <typename T> T atomic_load_explicit(const space atomic<T>*, memory_order);                       \
  template <typename T> void atomic_store_explicit(space atomic<T>*, typename same<T>::type, memory_order); \
  template <typename T>                                                                                     \
  bool atomic_compare_exchange_weak_explicit(space atomic<T>*, T*, typename same<T>::type, memory_order, memory_order); \
  template <typename T> T atomic_fetch_add_explicit(space atomic<T>*, typename same<T>::type, memory_order); \
  template <typename T> T atomic_fetch_min_explicit(space atomic<T>*, typename same<T>::type, memory_order); \
  template <typename T> T atomic_fetch_max_explicit(space atomic<T>*, typename same<T>::type, memory_order);
ATOMICS(device)
ATOMICS(threadgroup)

template <typename T> T simd_shuffle(T, ushort);
template <typename T> T simd_shuffle_xor(T, ushort);
template <typename T> T simd_broadcast(T, ushort);
template <typename T> T simd_sum(T);

template <typename T, int Rows, int Columns> struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
#define MATRICES(space)                                                                                                 \
  template <typename T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong = 0, bool = false); \
  template <typename T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong = 0, bool = false);
MATRICES(device)
MATRICES(threadgroup)
template <typename T>
void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>&, simdgroup_matrix<T, 8, 8>, simdgroup_matrix<T, 8, 8>,
                                   simdgroup_matrix<T, 8, 8>);
}  // namespace metal

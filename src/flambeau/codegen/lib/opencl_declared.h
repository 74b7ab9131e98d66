// The builtin functions that kernels call, declared for PoCL: to read those of the whole language takes it longer than to
// compile a kernel. It leaves them out where it is told that they are there (-D_OPENCL_H_).
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef uint cl_mem_fence_flags;
#define CLK_LOCAL_MEM_FENCE 1
#define CLK_GLOBAL_MEM_FENCE 2
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define LONG_MIN (-0x7fffffffffffffffL - 1)
#define as_float(x) __builtin_astype((x), float)
#define as_double(x) __builtin_astype((x), double)
#define as_int(x) __builtin_astype((x), int)
#define as_uint(x) __builtin_astype((x), uint)
#define as_long(x) __builtin_astype((x), long)
#define as_ulong(x) __builtin_astype((x), ulong)

#define FL_PURE __attribute__((overloadable, const))
#define FL_MEETS __attribute__((overloadable, convergent))
size_t FL_PURE get_global_id(uint);
size_t FL_PURE get_global_size(uint);
size_t FL_PURE get_local_id(uint);
size_t FL_PURE get_group_id(uint);
void FL_MEETS barrier(cl_mem_fence_flags);
void __attribute__((overloadable)) mem_fence(cl_mem_fence_flags);
int __attribute__((overloadable)) atomic_cmpxchg(volatile __global int*, int, int);
int __attribute__((overloadable)) atomic_xchg(volatile __global int*, int);
long __attribute__((overloadable)) atom_cmpxchg(volatile __global long*, long, long);

#define FL_DECLARE1(name, type) type FL_PURE name(type);
#define FL_DECLARE2(name, type) type FL_PURE name(type, type);
#define FL_DECLARE(type) \
  FL_DECLARE1(exp, type) FL_DECLARE1(exp2, type) FL_DECLARE1(expm1, type) FL_DECLARE1(log, type) \
  FL_DECLARE1(log2, type) FL_DECLARE1(log10, type) FL_DECLARE1(log1p, type) FL_DECLARE1(sin, type) \
  FL_DECLARE1(cos, type) FL_DECLARE1(tan, type) FL_DECLARE1(asin, type) FL_DECLARE1(acos, type) \
  FL_DECLARE1(atan, type) FL_DECLARE1(sinh, type) FL_DECLARE1(cosh, type) FL_DECLARE1(tanh, type) \
  FL_DECLARE1(asinh, type) FL_DECLARE1(acosh, type) FL_DECLARE1(atanh, type) FL_DECLARE1(erf, type) \
  FL_DECLARE1(erfc, type) FL_DECLARE1(lgamma, type) FL_DECLARE2(pow, type) FL_DECLARE2(atan2, type) \
  FL_DECLARE2(fmod, type) FL_DECLARE2(hypot, type) FL_DECLARE2(nextafter, type) \
  type FL_PURE fma(type, type, type);
FL_DECLARE(float)
#ifdef FL_DOUBLE
FL_DECLARE(double)
#endif

int FL_PURE min(int, int);
long FL_PURE min(long, long);
#define FL_LINE(n, type) \
  typedef type type##n __attribute__((ext_vector_type(n))); \
  type##n __attribute__((overloadable, pure)) vload##n(size_t, const __private type*); \
  void __attribute__((overloadable)) vstore##n(type##n, size_t, __private type*);
#define FL_LINES(type) FL_LINE(2, type) FL_LINE(4, type) FL_LINE(8, type) FL_LINE(16, type)
FL_LINES(float) FL_LINES(int) FL_LINES(long) FL_LINES(short) FL_LINES(ushort) FL_LINES(char) FL_LINES(uchar)
FL_LINES(uint) FL_LINES(ulong)
#ifdef FL_DOUBLE
FL_LINES(double)
#endif

// Orthogonal polynomials by their three-term recurrences, with ATen's conventions.
//
// A negative degree gives 0. Chebyshev polynomials of high degree inside (-1, 1) come from the cosine, where
// the recurrence would cost n steps; the degrees at which ATen changes over are arguments here.
#pragma once
#include "prelude.h"

namespace fl {

// p0 = 1, p1 = first, p(k) = 2 x p(k-1) - p(k-2). Stops at NaN, which no further step can leave.
template <class T> static inline T chebyshev_recurrence(T x, T first, int64_t n) {
  T previous = T(1), current = first;
  if (n == 0) return previous;
  for (int64_t k = 2; (k <= n) & (current == current); ++k) {
    const T next = (x + x) * current - previous;
    previous = current, current = next;
  }
  return current;
}

template <class T> static inline T alternating(int64_t n, T value) { return n % 2 == 0 ? value : -value; }

template <class T> static inline T chebyshev_t(T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return T(0);
  if (abs(x) == T(1)) return x > 0 ? T(1) : alternating(n, T(1));
  if (n > cosine_from && abs(x) < T(1)) return cos(T(n) * acos(x));
  return chebyshev_recurrence(x, x, n);
}

template <class T> static inline T chebyshev_u(T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return T(0);
  if (abs(x) == T(1)) return x > 0 ? T(n + 1) : alternating(n, T(n + 1));
  if (n > cosine_from && abs(x) < T(1)) {
    const T angle = acos(x), below = sin(angle);
    return below != T(0) ? sin(T(n + 1) * angle) / below : T(n + 1) * cos(T(n + 1) * angle) / x;
  }
  return chebyshev_recurrence(x, x + x, n);
}

template <class T> static inline T chebyshev_v(T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return T(0);
  if (abs(x) == T(1)) return x > 0 ? T(1) : alternating(n, T(n + n + 1));
  if (n > cosine_from && abs(x) < T(1)) {
    const T half = acos(x) / T(2);
    return sin(half) != T(1) ? cos(T(n + n + 1) * half) / cos(half) : alternating(n, T(n + n + 1));
  }
  return chebyshev_recurrence(x, x + x - T(1), n);
}

template <class T> static inline T chebyshev_w(T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return T(0);
  if (abs(x) == T(1)) return x > 0 ? T(n + n + 1) : alternating(n, T(1));
  if (n > cosine_from && abs(x) < T(1)) {
    const T half = acos(x) / T(2);
    return cos(half) != T(1) ? sin(T(n + n + 1) * half) / sin(half) : T(n + n + 1);
  }
  return chebyshev_recurrence(x, x + x + T(1), n);
}

template <class T> static inline T chebyshev_polynomial_t(T x, T n) {
  return chebyshev_t(x, to_int<int64_t>(n), 6);
}
template <class T> static inline T chebyshev_polynomial_u(T x, T n) {
  return chebyshev_u(x, to_int<int64_t>(n), 8);
}
template <class T> static inline T chebyshev_polynomial_v(T x, T n) {
  return chebyshev_v(x, to_int<int64_t>(n), 8);
}
template <class T> static inline T chebyshev_polynomial_w(T x, T n) {
  return chebyshev_w(x, to_int<int64_t>(n), 8);
}

template <class T> static inline T shifted_chebyshev_polynomial_t(T x, T n) {
  return chebyshev_t(x + x - T(1), to_int<int64_t>(n), 6);
}
template <class T> static inline T shifted_chebyshev_polynomial_u(T x, T n) {
  return chebyshev_u(x + x - T(1), to_int<int64_t>(n), 6);
}
template <class T> static inline T shifted_chebyshev_polynomial_v(T x, T n) {
  return chebyshev_v(x + x - T(1), to_int<int64_t>(n), 6);
}
template <class T> static inline T shifted_chebyshev_polynomial_w(T x, T n) {
  return chebyshev_w(x + x - T(1), to_int<int64_t>(n), 4);
}

// Above these degrees the Hermite polynomials overflow almost everywhere, and ATen answers NaN.
template <class T> struct hermite_limit { static constexpr int64_t value = 512; };
template <> struct hermite_limit<float> { static constexpr int64_t value = 128; };

// h(k+1) = factor * (x h(k) - k h(k-1)): factor 2 for the physicists' polynomials, 1 for the probabilists'.
template <class T> static inline T hermite(T x, T degree, T factor) {
  const int64_t n = to_int<int64_t>(degree);
  if (n < 0) return T(0);
  if (n == 0) return T(1);
  if (n == 1) return factor * x;
  if (n > hermite_limit<T>::value) return T(__builtin_nan(""));
  T previous = T(1), current = factor * x;
  for (int64_t k = 1; k < n; ++k) {
    const T next = (factor * x) * current - T(factor * T(k)) * previous;
    previous = current, current = next;
  }
  return current;
}
template <class T> static inline T hermite_polynomial_h(T x, T n) { return hermite(x, n, T(2)); }
template <class T> static inline T hermite_polynomial_he(T x, T n) { return hermite(x, n, T(1)); }

template <class T> static inline T laguerre_polynomial_l(T x, T degree) {
  const int64_t n = to_int<int64_t>(degree);
  if (n < 0) return T(0);
  if (n == 0 || x == T(0)) return T(1);
  T previous = T(1), current = T(1) - x;
  for (int64_t k = 1; (k < n) & (current == current); ++k) {
    const T next = ((T(k + k) + (T(1) - x)) * current - T(k) * previous) / T(k + 1);
    previous = current, current = next;
  }
  return current;
}

template <class T> static inline T legendre_polynomial_p(T x, T degree) {
  const int64_t n = to_int<int64_t>(degree);
  if (n < 0) return T(0);
  if (abs(x) == T(1)) return x > 0 ? T(1) : alternating(n, T(1));
  if (n == 0) return T(1);
  T previous = T(1), current = x;
  for (int64_t k = 1; (k < n) & (current == current); ++k) {
    const T next = (T(k + k + 1) * x * current - T(k) * previous) / T(k + 1);
    previous = current, current = next;
  }
  return current;
}

}  // namespace fl

// Orthogonal polynomials by their three-term recurrences, with ATen's conventions.
//
// A negative degree gives 0. Chebyshev polynomials of high degree inside (-1, 1) come from the cosine, where
// the recurrence would cost n steps; the degrees at which ATen changes over are arguments here.
//
// The text is C++ and OpenCL C. It is included once for each type: FL_T is that type, FL_P(name) the name of a
// function on it, FL_HERMITE_LIMIT the degree above which ATen answers NaN for the Hermite polynomials, as these
// overflow almost everywhere.

// p0 = 1, p1 = first, p(k) = 2 x p(k-1) - p(k-2). Stops at NaN, which no further step can leave.
static inline FL_T FL_P(chebyshev_recurrence)(FL_T x, FL_T first, int64_t n) {
  FL_T previous = 1, current = first;
  if (n == 0) return previous;
  for (int64_t k = 2; (k <= n) & (current == current); ++k) {
    const FL_T next = (x + x) * current - previous;
    previous = current, current = next;
  }
  return current;
}

static inline FL_T FL_P(alternating)(int64_t n, FL_T value) { return n % 2 == 0 ? value : -value; }

static inline FL_T FL_P(chebyshev_t)(FL_T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return 0;
  if (FL_P(abs)(x) == 1) return x > 0 ? 1 : FL_P(alternating)(n, (FL_T)1);
  if (n > cosine_from && FL_P(abs)(x) < 1) return FL_P(cos)((FL_T)n * FL_P(acos)(x));
  return FL_P(chebyshev_recurrence)(x, x, n);
}

static inline FL_T FL_P(chebyshev_u)(FL_T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return 0;
  if (FL_P(abs)(x) == 1) return x > 0 ? (FL_T)(n + 1) : FL_P(alternating)(n, (FL_T)(n + 1));
  if (n > cosine_from && FL_P(abs)(x) < 1) {
    const FL_T angle = FL_P(acos)(x), below = FL_P(sin)(angle);
    const FL_T count = (FL_T)(n + 1);
    return below != 0 ? FL_P(sin)(count * angle) / below : count * FL_P(cos)(count * angle) / x;
  }
  return FL_P(chebyshev_recurrence)(x, x + x, n);
}

static inline FL_T FL_P(chebyshev_v)(FL_T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return 0;
  if (FL_P(abs)(x) == 1) return x > 0 ? 1 : FL_P(alternating)(n, (FL_T)(n + n + 1));
  if (n > cosine_from && FL_P(abs)(x) < 1) {
    const FL_T halved = FL_P(acos)(x) / 2;
    const FL_T count = (FL_T)(n + n + 1);
    return FL_P(sin)(halved) != 1 ? FL_P(cos)(count * halved) / FL_P(cos)(halved) : FL_P(alternating)(n, count);
  }
  return FL_P(chebyshev_recurrence)(x, x + x - 1, n);
}

static inline FL_T FL_P(chebyshev_w)(FL_T x, int64_t n, int64_t cosine_from) {
  if (n < 0) return 0;
  if (FL_P(abs)(x) == 1) return x > 0 ? (FL_T)(n + n + 1) : FL_P(alternating)(n, (FL_T)1);
  if (n > cosine_from && FL_P(abs)(x) < 1) {
    const FL_T halved = FL_P(acos)(x) / 2;
    const FL_T count = (FL_T)(n + n + 1);
    return FL_P(cos)(halved) != 1 ? FL_P(sin)(count * halved) / FL_P(sin)(halved) : count;
  }
  return FL_P(chebyshev_recurrence)(x, x + x + 1, n);
}

static inline FL_T FL_P(chebyshev_polynomial_t)(FL_T x, FL_T n) { return FL_P(chebyshev_t)(x, (int64_t)n, 6); }
static inline FL_T FL_P(chebyshev_polynomial_u)(FL_T x, FL_T n) { return FL_P(chebyshev_u)(x, (int64_t)n, 8); }
static inline FL_T FL_P(chebyshev_polynomial_v)(FL_T x, FL_T n) { return FL_P(chebyshev_v)(x, (int64_t)n, 8); }
static inline FL_T FL_P(chebyshev_polynomial_w)(FL_T x, FL_T n) { return FL_P(chebyshev_w)(x, (int64_t)n, 8); }

static inline FL_T FL_P(shifted_chebyshev_polynomial_t)(FL_T x, FL_T n) {
  return FL_P(chebyshev_t)(x + x - 1, (int64_t)n, 6);
}
static inline FL_T FL_P(shifted_chebyshev_polynomial_u)(FL_T x, FL_T n) {
  return FL_P(chebyshev_u)(x + x - 1, (int64_t)n, 6);
}
static inline FL_T FL_P(shifted_chebyshev_polynomial_v)(FL_T x, FL_T n) {
  return FL_P(chebyshev_v)(x + x - 1, (int64_t)n, 6);
}
static inline FL_T FL_P(shifted_chebyshev_polynomial_w)(FL_T x, FL_T n) {
  return FL_P(chebyshev_w)(x + x - 1, (int64_t)n, 4);
}

// h(k+1) = factor * (x h(k) - k h(k-1)): factor 2 for the physicists' polynomials, 1 for the probabilists'.
static inline FL_T FL_P(hermite)(FL_T x, FL_T degree, FL_T factor) {
  const int64_t n = (int64_t)degree;
  if (n < 0) return 0;
  if (n == 0) return 1;
  if (n == 1) return factor * x;
  if (n > FL_HERMITE_LIMIT) return (FL_T)FL_DNAN;
  FL_T previous = 1, current = factor * x;
  for (int64_t k = 1; k < n; ++k) {
    const FL_T next = (factor * x) * current - (FL_T)(factor * (FL_T)k) * previous;
    previous = current, current = next;
  }
  return current;
}
static inline FL_T FL_P(hermite_polynomial_h)(FL_T x, FL_T n) { return FL_P(hermite)(x, n, (FL_T)2); }
static inline FL_T FL_P(hermite_polynomial_he)(FL_T x, FL_T n) { return FL_P(hermite)(x, n, (FL_T)1); }

static inline FL_T FL_P(laguerre_polynomial_l)(FL_T x, FL_T degree) {
  const int64_t n = (int64_t)degree;
  if (n < 0) return 0;
  if (n == 0 || x == 0) return 1;
  FL_T previous = 1, current = 1 - x;
  for (int64_t k = 1; (k < n) & (current == current); ++k) {
    const FL_T next = (((FL_T)(k + k) + (1 - x)) * current - (FL_T)k * previous) / (FL_T)(k + 1);
    previous = current, current = next;
  }
  return current;
}

static inline FL_T FL_P(legendre_polynomial_p)(FL_T x, FL_T degree) {
  const int64_t n = (int64_t)degree;
  if (n < 0) return 0;
  if (FL_P(abs)(x) == 1) return x > 0 ? 1 : FL_P(alternating)(n, (FL_T)1);
  if (n == 0) return 1;
  FL_T previous = 1, current = x;
  for (int64_t k = 1; (k < n) & (current == current); ++k) {
    const FL_T next = ((FL_T)(k + k + 1) * x * current - (FL_T)k * previous) / (FL_T)(k + 1);
    previous = current, current = next;
  }
  return current;
}

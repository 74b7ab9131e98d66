// Special functions with ATen's conventions: gamma and zeta, Bessel and Airy, the normal distribution.
//
// All are computed in double, those of floats too, which is simpler and closer than a second set of
// approximations; none needs to vectorise. Where ATen and mathematics differ at infinity, ATen wins.
//
// The text after this first part is C++ and OpenCL C; opencl_special.h is that part for the second.
#ifdef __cplusplus
#pragma once
#include "prelude.h"

#define FL_TABLE static const double
#define FL_IN_TABLE const double*
#define FL_DINF __builtin_inf()
#define FL_DNAN __builtin_nan("")
#define FL_SERIES(x, c) horner(x, c)
#define FL_FLOAT(name) static inline float name(float x) { return (float)name((double)x); }
#define FL_FLOAT2(name) static inline float name(float x, float y) { return (float)name((double)x, (double)y); }

extern "C" {
double lgamma_r(double, int*) noexcept;
double j0(double) noexcept;
double j1(double) noexcept;
double y0(double) noexcept;
double y1(double) noexcept;
}

namespace fl {

static inline double lgamma(double x) {
  int sign;  // lgamma itself writes it to a global, which threads would share
  return ::lgamma_r(x, &sign);
}

static inline double bessel_j0(double x) { return isinf(x) ? FL_DNAN : ::j0(x); }
static inline double bessel_j1(double x) { return isinf(x) ? FL_DNAN : ::j1(x); }
static inline double bessel_y0(double x) { return x < 0 || isinf(x) ? FL_DNAN : x == 0 ? -FL_DINF : ::y0(x); }
static inline double bessel_y1(double x) { return x < 0 || isinf(x) ? FL_DNAN : x == 0 ? -FL_DINF : ::y1(x); }
FL_FLOAT(lgamma) FL_FLOAT(bessel_j0) FL_FLOAT(bessel_j1) FL_FLOAT(bessel_y0) FL_FLOAT(bessel_y1)

#define FL_P(name) name
#define FL_T float
#define FL_HERMITE_LIMIT 128
#include "special_polynomials.h"
#undef FL_T
#undef FL_HERMITE_LIMIT
#define FL_T double
#define FL_HERMITE_LIMIT 512
#include "special_polynomials.h"
#endif

#include "special_tables.h"

#define FL_PI 0x1.921fb54442d18p1
#define FL_SQRT_HALF 0x1.6a09e667f3bcdp-1

// Clenshaw's sum of c[k] T_k over [low, high].
#define FL_CHEBYSHEV(x, low, high, c) chebyshev_sum(x, low, high, c, sizeof(c) / sizeof(double))
static inline double chebyshev_sum(double x, double low, double high, FL_IN_TABLE c, int count) {
  const double t = (x + x - (low + high)) / (high - low);
  double b0 = 0, b1 = 0;
  for (int k = count - 1; k > 0; --k) {
    const double next = 2 * t * b0 - b1 + c[k];
    b1 = b0, b0 = next;
  }
  return t * b0 - b1 + c[0];
}

// ---- gamma and zeta ------------------------------------------------------------------------------------

// The recurrence up to 10, then the asymptotic series of Bernoulli numbers.
static inline double digamma_positive(double x) {
  if (isinf(x)) return x;
  double sum = 0;
  for (; x < 10; x += 1) sum -= 1 / x;
  const double series[] = {1.0 / 12, -1.0 / 120, 1.0 / 252, -1.0 / 240, 1.0 / 132, -691.0 / 32760, 1.0 / 12};
  const double z = 1 / (x * x);
  return sum + log(x) - 0.5 / x - z * FL_SERIES(z, series);
}

// Below 0, reflection.
static inline double digamma(double x) {
  if (x == 0) return copysign(FL_DINF, -x);
  if (!(x < 0)) return digamma_positive(x);
  const double rest = x - trunc(x);
  return rest == 0 || isinf(x) ? FL_DNAN : digamma_positive(1 - x) - FL_PI / tan(FL_PI * rest);
}

static inline double trigamma_positive(double x) {
  double sum = 0;
  for (; x < 10; x += 1) sum += 1 / (x * x);
  const double series[] = {1.0 / 6, -1.0 / 30, 1.0 / 42, -1.0 / 30, 5.0 / 66, -691.0 / 2730, 7.0 / 6};
  const double z = 1 / (x * x);
  return sum + 1 / x + 0.5 * z + z / x * FL_SERIES(z, series);
}

static inline double trigamma(double x) {
  if (!(x < 0.5)) return trigamma_positive(x);
  if (isinf(x)) return FL_DNAN;
  const double s = sin(FL_PI * (x - round(x)));
  return FL_PI * FL_PI / (s * s) - trigamma_positive(1 - x);
}

// Hurwitz zeta, sum of (q + k)^-x: nine or more terms, then Euler and Maclaurin.
static inline double zeta_positive(double x, double q) {
  double sum = 0;
  for (int k = 0; k < 10 || q < 10; ++k, q += 1) {
    const double term = pow(q, -x);
    sum += term;
    if (term < 0x1p-54 * sum) return sum;
  }
  const double last = pow(q, -x);
  sum += last * q / (x - 1) + 0.5 * last;
  const double bernoulli[] = {1.0 / 6, -1.0 / 30, 1.0 / 42, -1.0 / 30, 5.0 / 66, -691.0 / 2730, 7.0 / 6,
                              -3617.0 / 510, 43867.0 / 798, -174611.0 / 330};
  double factor = x / (2 * q);  // x (x+1) ... (x+2j-2) / ((2j)! q^(2j-1))
  for (int j = 1; j <= 10; ++j) {
    const double term = last * factor * bernoulli[j - 1];
    sum += term;
    if (abs(term) < 0x1p-54 * abs(sum)) break;
    factor *= (x + 2 * j - 1) * (x + 2 * j) / ((2 * j + 1) * (2 * j + 2) * q * q);
  }
  return sum;
}

static inline double zeta(double x, double q) {
  if (x == 1) return FL_DINF;
  if (x < 1) return FL_DNAN;
  if (q <= 0 && q == floor(q)) return FL_DINF;
  if (isnan(x) || isnan(q) || isinf(q)) return FL_DNAN;
  if (isinf(x)) return q < 1 ? FL_DINF : q == 1 ? 1.0 : FL_DNAN;
  if (q > 0) return zeta_positive(x, q);
  if (x != floor(x)) return FL_DNAN;
  if (q > -1000) {
    double sum = 0;
    for (; q < 0; q += 1) sum += pow(q, -x);
    return sum + zeta_positive(x, q);
  }
  // The sum over all integers depends on the fraction alone; take away the terms left of q.
  const double fraction = q - floor(q), sign = fmod(x, 2.0) == 0 ? 1 : -1;
  return zeta_positive(x, fraction) + sign * (zeta_positive(x, 1 - fraction) - zeta_positive(x, 1 - q));
}

static inline double polygamma_of(int64_t n, double x) {
  if (n == 0) return digamma(x);
  if (n == 1) return trigamma(x);
  const double factorial = exp(lgamma((double)n + 1));
  return (n % 2 ? factorial : -factorial) * zeta((double)n + 1, x);
}

// log(x / a) - (x - a) / a without cancellation around x = a: with u = (x - a) / a and s = u / (2 + u),
// log1p(u) = 2 atanh(s) and u - 2s = s u.
static inline double log_ratio_minus(double x, double a) {
  const double u = (x - a) / a;
  if (abs(u) > 0.4) return log(x / a) - u;
  const double s = u / (2 + u), z = s * s;
  double sum = 0, power = 2 * s * z;
  for (int k = 3; k < 45; k += 2, power *= z) sum += power / k;
  return sum - s * u;
}

// log(gamma(1 + a)); near 0 by its Taylor series, where 1 + a would lose a.
static inline double lgamma_of_next(double a) {
  const double series[] = {-0x1.2788cfc6fb619p-1, 0x1.a51a6625307d3p-1, -0x1.9a4d55beab2d7p-2,
                           0x1.151322ac7d848p-2,  -0x1.a8b9c17aa6149p-3, 0x1.5b40cb100c306p-3};
  return a < 0.005 ? a * FL_SERIES(a, series) : lgamma(1 + a);
}

// x^a exp(-x) / gamma(a + 1); for large a around x = a, where the logarithms would cancel.
static inline double gamma_density(double a, double x) {
  if (a < 20) return exp(a * log(x) - x - lgamma_of_next(a));
  const double series[] = {1.0 / 12, -1.0 / 360, 1.0 / 1260, -1.0 / 1680, 1.0 / 1188};
  const double stirling = FL_SERIES(1 / (a * a), series) / a;
  return exp(a * log_ratio_minus(x, a) - stirling) / sqrt(2 * FL_PI * a);
}

static inline double igamma_series(double a, double x) {
  double sum = 1, term = 1;
  for (double k = a + 1; term > 0x1p-54 * sum && k < a + 10000; k += 1) sum += term *= x / k;
  return gamma_density(a, x) * sum;
}

static inline double igammac_fraction(double a, double x) {
  double b = x + 1 - a, c = 1e300, d = 1 / b, result = d;  // Lentz's method
  for (int k = 1; k < 10000; ++k) {
    const double numerator = -k * (k - a);
    b += 2;
    d = 1 / (numerator * d + b);
    c = b + numerator / c;
    result *= c * d;
    if (abs(c * d - 1) < 0x1p-53) break;
  }
  return gamma_density(a, x) * a * result;
}

// For small x where 1 - P would cancel (DLMF 8.7.3).
static inline double igammac_series(double a, double x) {
  double sum = 0, power = 1;
  for (int k = 1; k < 60; ++k) {
    power *= -x / k;
    sum += power / (a + k);
  }
  const double exponent = a * log(x) - lgamma_of_next(a);
  return -expm1(exponent) - a * exp(exponent) * sum;
}

// Temme's uniform expansion, for a above 1e5 and x near a: the upper function, or the lower for side = -1.
static inline double igamma_uniform(double a, double x, double side) {
  const double half_square = -log_ratio_minus(x, a);
  const double eta = copysign(sqrt(2 * half_square), x - a);
  const double c0[] = {-1.0 / 3, 1.0 / 12, -2.0 / 135, 1.0 / 864, 1.0 / 2835, -139.0 / 777600, 1.0 / 25515};
  const double c1[] = {-1.0 / 540, -1.0 / 288, 1.0 / 378};
  const double density = exp(-a * half_square) / sqrt(2 * FL_PI * a);
  return 0.5 * erfc(side * eta * sqrt(a / 2)) + side * density * (FL_SERIES(eta, c0) + FL_SERIES(eta, c1) / a);
}

static inline bool igamma_is_uniform(double a, double x) { return a > 1e5 && abs(x - a) < 0.1 * a; }

static inline double igamma(double a, double x) {
  if (x < 0 || a < 0) return FL_DNAN;
  if (a == 0) return x > 0 ? 1 : FL_DNAN;
  if (x == 0) return 0;
  if (isinf(a)) return isinf(x) ? FL_DNAN : 0;
  if (isinf(x)) return 1;
  if (isnan(a) || isnan(x)) return FL_DNAN;
  if (igamma_is_uniform(a, x)) return igamma_uniform(a, x, -1);
  return x <= 1.1 || x < a ? igamma_series(a, x) : 1 - igammac_fraction(a, x);
}

static inline double igammac(double a, double x) {
  if (x < 0 || a < 0) return FL_DNAN;
  if (a == 0) return x > 0 ? 0 : FL_DNAN;
  if (x == 0) return 1;
  if (isinf(a)) return isinf(x) ? FL_DNAN : 1;
  if (isinf(x)) return 0;
  if (isnan(a) || isnan(x)) return FL_DNAN;
  if (igamma_is_uniform(a, x)) return igamma_uniform(a, x, 1);
  const bool lower_is_small = x > 1.1 ? x < a : x > 0.5 ? 1.1 * x < a : -0.4 / log(x) < a;
  if (lower_is_small) return 1 - igamma_series(a, x);
  return x <= 1.1 ? igammac_series(a, x) : igammac_fraction(a, x);
}

// ---- Bessel and Airy -----------------------------------------------------------------------------------

static inline double i0e(double x) {
  const double a = abs(x);
  return a <= 8 ? FL_CHEBYSHEV(a, 0, 8, i0e_small) : FL_CHEBYSHEV(1 / a, 0, 0.125, i0e_large) / sqrt(a);
}
static inline double i1e(double x) {
  const double a = abs(x);
  return a <= 8 ? x * FL_CHEBYSHEV(a, 0, 8, i1e_small)
                : copysign(FL_CHEBYSHEV(1 / a, 0, 0.125, i1e_large) / sqrt(a), x);
}
static inline double i0(double x) { return exp(abs(x)) * i0e(x); }
static inline double i1(double x) { return exp(abs(x)) * i1e(x); }

// exp(scaled * x) K(x)
static inline double bessel_k0(double x, bool scaled) {
  if (x == 0) return FL_DINF;
  if (x < 0) return FL_DNAN;
  if (x <= 2) return (FL_CHEBYSHEV(x * x, 0, 4, k0_small) - log(0.5 * x) * i0(x)) * (scaled ? exp(x) : 1);
  return FL_CHEBYSHEV(1 / x, 0, 0.5, k0e_large) / sqrt(x) * (scaled ? 1 : exp(-x));
}
static inline double bessel_k1(double x, bool scaled) {
  if (x == 0) return FL_DINF;
  if (x < 0) return FL_DNAN;
  if (x <= 2)
    return (FL_CHEBYSHEV(x * x, 0, 4, k1_small) / x + log(0.5 * x) * i1(x)) * (scaled ? exp(x) : 1);
  return FL_CHEBYSHEV(1 / x, 0, 0.5, k1e_large) / sqrt(x) * (scaled ? 1 : exp(-x));
}
static inline double modified_bessel_k0(double x) { return bessel_k0(x, false); }
static inline double modified_bessel_k1(double x) { return bessel_k1(x, false); }
static inline double scaled_modified_bessel_k0(double x) { return bessel_k0(x, true); }
static inline double scaled_modified_bessel_k1(double x) { return bessel_k1(x, true); }

static inline double spherical_bessel_j0(double x) { return isinf(x) ? 0 : x == 0 ? 1 : sin(x) / x; }

static inline double airy_ai(double x) {
  if (isinf(x)) return FL_DNAN;
  const double a = abs(x), z = 2.0 / 3 * a * sqrt(a);
  const double scale = 0x1.20dd750429b6dp-1 / sqrt(sqrt(a));  // 1 / sqrt(pi)
  if (x > 2) return 0.5 * scale * exp(-z) * FL_CHEBYSHEV(1 / z, 0, 0x1.0f876ccdf6cd9p-1, airy_decay);
  if (x < -4) {
    const double u = 1 / (z * z), angle = z - FL_PI / 4, top = 9.0 / 256;
    const double cosine = FL_CHEBYSHEV(u, 0, top, airy_cos), sine = FL_CHEBYSHEV(u, 0, top, airy_sin);
    return scale * (cos(angle) * cosine + sin(angle) / z * sine);
  }
  double even = 1, odd = x, f = 1, g = x;  // Maclaurin
  for (int k = 1; k <= 30; ++k) {
    even *= x * x * x / (3 * k * (3 * k - 1));
    odd *= x * x * x / (3 * k * (3 * k + 1));
    f += even, g += odd;
  }
  return 0x1.6b8c7962715b8p-2 * f - 0x1.0907f42b70f8bp-2 * g;  // Ai(0), -Ai'(0)
}

// ---- the normal distribution ---------------------------------------------------------------------------

static inline double erfcx(double x) {
  const double a = abs(x);
  const double right = FL_CHEBYSHEV(1 - 6 / (a + 3), -1, 1, erfcx_table) / (1 + 2 * a);
  return x < 0 ? 2 * exp(x * x) - right : right;
}

// Inverse of the distribution function. In the tails Newton's method on log(erfc), which is nearly a parabola.
static inline double ndtri(double p) {
  if (p == 0) return -FL_DINF;
  if (p == 1) return FL_DINF;
  if (!(p > 0 && p < 1)) return FL_DNAN;
  if (abs(p - 0.5) <= 0.375) return erfinv(2 * p - 1) / FL_SQRT_HALF;
  const double target = log(2 * (p < 0.5 ? p : 1 - p));
  double y = sqrt(-target - 0.5 * log(-FL_PI * target));
  for (int step = 0; step < 4; ++step) {
    const double e = erfcx(y);
    y += (log(e) - y * y - target) * e * 0x1.c5bf891b4ef6bp-1;  // sqrt(pi) / 2
  }
  return copysign(y / FL_SQRT_HALF, p - 0.5);
}

// ---- on floats -----------------------------------------------------------------------------------------

FL_FLOAT(digamma) FL_FLOAT(i0) FL_FLOAT(i0e) FL_FLOAT(i1) FL_FLOAT(i1e)
FL_FLOAT(modified_bessel_k0) FL_FLOAT(modified_bessel_k1)
FL_FLOAT(scaled_modified_bessel_k0) FL_FLOAT(scaled_modified_bessel_k1) FL_FLOAT(spherical_bessel_j0)
FL_FLOAT(airy_ai) FL_FLOAT(erfcx) FL_FLOAT(ndtri)
FL_FLOAT2(zeta) FL_FLOAT2(igamma) FL_FLOAT2(igammac)

#ifdef __cplusplus
template <class N> static inline double polygamma(N order, double x) { return polygamma_of((int64_t)order, x); }
template <class N> static inline float polygamma(N order, float x) { return (float)polygamma_of((int64_t)order, x); }

}  // namespace fl
#endif

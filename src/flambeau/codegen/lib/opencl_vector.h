// Sine, cosine, tangent and powers of floats by way of doubles, without calls: on CPUs they become vectors.

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FL_DMADD(a, b, c) __builtin_fma(a, b, c)
#else
#define FL_DMADD(a, b, c) ((a) * (b) + (c))
#endif

// ---- angles --------------------------------------------------------------------------------------------

// The first 256 bits of 2 / pi.
__constant uint fl_two_over_pi[] = {0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u,
                                    0xdb629599u, 0x3c439041u, 0xfe5163abu, 0xdebbc561u};

FL_INLINE uint fl_bits_at(int start) {
  const ulong both = (ulong)fl_two_over_pi[start >> 5] << 32 | fl_two_over_pi[(start >> 5) + 1];
  return (uint)(both >> (32 - (start & 31)));
}

typedef struct { double rest; int quarter; } fl_angle;  // x = rest + quarter * pi / 2, |rest| <= pi / 4

FL_INLINE fl_angle fl_split_angle(float x) {
  const uint bits = as_uint(x) & 0x7fffffffu;
  const bool far = bits >= 0x4d800000u;  // 2^28
  // Near: pi / 2 in two parts.
  const double shifted = FL_DMADD((double)x, 0x1.45f306dc9c883p-1, 0x1.8p52), n = shifted - 0x1.8p52;
  const double near = FL_DMADD(n, -0x1.1a62633145c07p-54, FL_DMADD(n, -0x1.921fb54442d18p+0, (double)x));
  // Far (Payne and Hanek, 1983): the mantissa times those 96 bits of 2 / pi that decide the product modulo 4.
  const ulong mantissa = (bits & 0x7fffffu) | 0x800000u;
  const int start = far ? (int)(bits >> 23) - 152 : 3;
  const ulong turns = (mantissa * fl_bits_at(start) << 32) + mantissa * fl_bits_at(start + 32)
                      + (mantissa * fl_bits_at(start + 64) >> 32);
  const ulong whole = turns + (1ul << 61) & 3ul << 62;
  const double part = (double)(long)(turns - whole) * 0x1.921fb54442d18p-62;
  fl_angle a;
  a.rest = far ? x < 0 ? -part : part : near;
  const int quarter = (int)(whole >> 62);
  a.quarter = far ? x < 0 ? -quarter : quarter : (int)as_long(shifted);
  return a;
}

// The sine of the angle and so many quarters more.
FL_INLINE double fl_sine_of(fl_angle a, int more) {
  const double r = a.rest, z = r * r;
  double s = FL_DMADD(z, 0x1.6124613a86d09p-33, -0x1.ae64567f544e4p-26);  // 1 / 13!, -1 / 11!, ...
  s = FL_DMADD(FL_DMADD(s, z, 0x1.71de3a556c734p-19), z, -0x1.a01a01a01a01ap-13);
  s = FL_DMADD(FL_DMADD(s, z, 0x1.1111111111111p-7), z, -0x1.5555555555555p-3);
  double c = FL_DMADD(z, 0x1.1eed8eff8d898p-29, -0x1.27e4fb7789f5cp-22);  // 1 / 12!, -1 / 10!, ...
  c = FL_DMADD(FL_DMADD(c, z, 0x1.a01a01a01a01ap-16), z, -0x1.6c16c16c16c17p-10);
  c = FL_DMADD(FL_DMADD(c, z, 0x1.5555555555555p-5), z, -0.5);
  const int quarter = a.quarter + more;
  const double y = quarter & 1 ? FL_DMADD(c, z, 1.0) : FL_DMADD(s * z, r, r);
  return quarter & 2 ? -y : y;
}

FL_INLINE float fl_sin_f(float x) {
  const float a = fl_abs_f(x), y = (float)fl_sine_of(fl_split_angle(x), 0);
  return a < 0x1p-12f ? x : a < INFINITY ? y : NAN;  // -0 is its own sine
}
FL_INLINE float fl_cos_f(float x) {
  const float y = (float)fl_sine_of(fl_split_angle(x), 1);
  return fl_abs_f(x) < INFINITY ? y : NAN;
}
FL_INLINE float fl_tan_f(float x) {
  const fl_angle angle = fl_split_angle(x);
  const float a = fl_abs_f(x), y = (float)(fl_sine_of(angle, 0) / fl_sine_of(angle, 1));
  return a < 0x1p-12f ? x : a < INFINITY ? y : NAN;
}

// ---- powers --------------------------------------------------------------------------------------------

// 2^(y log2 |x|). The logarithm is the power of two and 2 atanh(s) / ln 2 of the mantissa in [0.71, 1.41].
FL_INLINE double fl_power_of_magnitude(float x, float y) {
  const long bits = as_long((double)fl_abs_f(x)), above = bits - as_long(0x1.6a09e667f3bcdp-1);
  const double n = as_double((above >> 52) + as_long(0x1.8p52)) - 0x1.8p52;
  const double m = as_double(bits - (above >> 52 << 52)), s = (m - 1) / (m + 1), z = s * s;
  double sum = FL_DMADD(z, 1.0 / 17, 1.0 / 15);
  sum = FL_DMADD(FL_DMADD(sum, z, 1.0 / 13), z, 1.0 / 11);
  sum = FL_DMADD(FL_DMADD(sum, z, 1.0 / 9), z, 1.0 / 7);
  sum = FL_DMADD(FL_DMADD(sum, z, 1.0 / 5), z, 1.0 / 3);
  const double logarithm = FL_DMADD(FL_DMADD(sum, z, 1.0), s * 0x1.71547652b82fep+1, n);
  double p = (double)y * logarithm;
  p = p > 200 ? 200 : p < -200 ? -200 : p;
  const double shifted = p + 0x1.8p52, f = p - (shifted - 0x1.8p52);
  double e = FL_DMADD(f, 0x1.e4cf5158b8ecap-28, 0x1.b5253d395e7c4p-24);  // (ln 2)^k / k!
  e = FL_DMADD(FL_DMADD(e, f, 0x1.62c0223a5c824p-20), f, 0x1.ffcbfc588b0c7p-17);
  e = FL_DMADD(FL_DMADD(e, f, 0x1.430912f86c787p-13), f, 0x1.5d87fe78a6731p-10);
  e = FL_DMADD(FL_DMADD(e, f, 0x1.3b2ab6fba4e77p-7), f, 0x1.c6b08d704a0c0p-5);
  e = FL_DMADD(FL_DMADD(e, f, 0x1.ebfbdff82c58fp-3), f, 0x1.62e42fefa39efp-1);
  return FL_DMADD(e, f, 1.0) * as_double(as_long(shifted) + 1023 << 52);
}

FL_INLINE float fl_pow_f(float x, float y) {
  const float a = fl_abs_f(x), halved = 0.5f * y;
  const bool whole = fl_trunc_f(y) == y, odd = whole & (fl_trunc_f(halved) != halved);
  float r = (float)fl_power_of_magnitude(x, y);
  r = (a == 0) | (a == INFINITY) ? (a == 0) == (y > 0) ? 0.0f : INFINITY : r;
  r = (x < 0) & !whole & (a < INFINITY) ? NAN : r;
  r = odd ? fl_copysign_f(r, x) : r;
  r = (x != x) | (y != y) ? NAN : r;
  return (x == 1) | (y == 0) | ((a == 1) & (fl_abs_f(y) == INFINITY)) ? 1.0f : r;
}

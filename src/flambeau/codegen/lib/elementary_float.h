// The functions that models spend their time in, in float: our own polynomials, in what C++ and OpenCL C share.
//
// They treat every input alike: libraries leave the vector path for special values, and a masked softmax feeds exp
// with -inf. The coefficients are weighted minimax fits. Who includes this file says how the two languages write
//
//     FL_INLINE            a function that is inlined
//     FL_F(name)           the name of a function on floats
//     FL_AS_FLOAT(bits)    a float from its bits, and FL_AS_BITS(x) those as a 32-bit unsigned number
//     FL_BITS, FL_INT      that type, and the signed one
//     FL_INF, FL_NAN       infinity, and what is no number
//     FL_HAS_EXP           if it has functions exp and exp2 of its own

// c[0] + c[1] x + c[2] x^2 + ... Written out: of a loop inside theirs, some compilers make no vectors.
#define FL_STEP(x, c, k, rest) FL_F(madd)(rest, x, c[k])
#define FL_HORNER4(x, c) FL_STEP(x, c, 0, FL_STEP(x, c, 1, FL_STEP(x, c, 2, c[3])))
#define FL_HORNER5(x, c) FL_STEP(x, c, 0, FL_STEP(x, c, 1, FL_STEP(x, c, 2, FL_STEP(x, c, 3, c[4]))))
#define FL_FROM(x, c, k, rest) FL_STEP(x, c, k, FL_STEP(x, c, k + 1, FL_STEP(x, c, k + 2, rest)))
#define FL_HORNER6(x, c) FL_FROM(x, c, 0, FL_STEP(x, c, 3, FL_STEP(x, c, 4, c[5])))
#define FL_HORNER7(x, c) FL_FROM(x, c, 0, FL_FROM(x, c, 3, c[6]))
#define FL_HORNER9(x, c) FL_FROM(x, c, 0, FL_FROM(x, c, 3, FL_STEP(x, c, 6, FL_STEP(x, c, 7, c[8]))))
#define FL_HORNER10(x, c) FL_FROM(x, c, 0, FL_FROM(x, c, 3, FL_FROM(x, c, 6, c[9])))

// ---- exponentials --------------------------------------------------------------------------------------

// Adding 1.5 * 2^23 rounds to an integer n and leaves it in the low bits of the sum, together with what else
// was added, a bias. Moved up by 23 bits, they are the exponent of a float: 2^(n + bias - 127).
FL_INLINE float FL_F(power_of_two)(float shifted) { return FL_AS_FLOAT(FL_AS_BITS(shifted) << 23); }

typedef struct { float rest, power; } exp_parts;  // x = rest + n * ln 2, 2^(n + bias - 127)

FL_INLINE exp_parts FL_F(split_exp)(float x, float bias) {
  const float shift = 0x1.8p23f + bias, shifted = FL_F(madd)(x, 0x1.715476p0f, shift), n = shifted - shift;
  exp_parts p;
  // ln 2 in two parts, the first short enough to multiply exactly
  p.rest = FL_F(madd)(n, 0x1.bd0106p-13f, FL_F(madd)(n, -0x1.63p-1f, x));
  p.power = FL_F(power_of_two)(shifted);
  return p;
}

// The formulas below compute nonsense where they do not apply: a choice at the end is cheaper than a clamp
// before, and lets NaN through. Nor does -inf, of which a masked softmax is full, cost more than a number: it
// becomes NaN at the first step, and not an underflow, which takes Intel hundreds of cycles.
FL_INLINE float FL_F(choose_ends)(float x, float low, float below, float inside, float high, float above) {
  const float left = x > high ? above : inside;
  return x < low ? below : left;
}

// e^r = 1 + r + r^2 P(r) for r in [-ln 2 / 2, ln 2 / 2]
#define FL_EXP {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558c0p-5f, 0x1.1239e0p-7f, 0x1.6a3d7ap-10f}

#ifndef FL_HAS_EXP
// y 2^n by two powers, which gives subnormal results and overflows alike. The low bits of `whole` hold n + 254, those of
// `halved` 127 and one of two parts of n.
FL_INLINE float FL_F(scale)(float y, float whole, float halved) {
  return y * FL_F(power_of_two)(halved) * FL_AS_FLOAT((FL_AS_BITS(whole) - FL_AS_BITS(halved)) << 23);
}

// The rest of x is kept in two parts, and 1 + its high part as a sum and what that rounds away: what is left to round
// is small beside the result.
FL_INLINE float FL_F(exp)(float x) {
  const float c[] = FL_EXP;
  const float most = x > 89.0f ? 89.0f : x;  // of which the result overflows: to clamp is cheaper than to choose
  const float shift = 0x1.8p23f + 254, whole = FL_F(madd)(most, 0x1.715476p0f, shift), n = whole - shift;
  const float halved = FL_F(madd)(most, 0x1.715476p-1f, 0x1.8p23f + 127);
  const float high = FL_F(madd)(n, -0x1.63p-1f, most), low = n * 0x1.bd0106p-13f, r = high + low;
  // in pairs: half as many steps that wait for one another
  const float square = r * r, upper = FL_F(madd)(FL_F(madd)(c[4], r, c[3]), r, c[2]);
  const float terms = FL_F(madd)(square, FL_F(madd)(upper, square, FL_F(madd)(c[1], r, c[0])), low);
  const float sum = 1.0f + high, lost = (1.0f - sum) + high;
  return x < -104.0f ? 0.0f : FL_F(scale)(sum + (lost + terms), whole, halved);
}

FL_INLINE float FL_F(exp2)(float x) {
  const float c[] = {0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6af7ap-5f, 0x1.3b2de0p-7f, 0x1.5f09a6p-10f, 0x1.416d18p-13f};
  const float shift = 0x1.8p23f + 254, whole = x + shift, n = whole - shift, rest = x - n;
  const float halved = FL_F(madd)(x, 0.5f, 0x1.8p23f + 127);
  const float y = FL_F(madd)(rest, FL_HORNER6(rest, c), 1.0f);
  return FL_F(choose_ends)(x, -150.0f, 0.0f, FL_F(scale)(y, whole, halved), 128.0f, FL_INF);
}
#endif

// (e^x - 1) / 2 for x in [-87, 88.9]; half, because 2^128 is not a float.
FL_INLINE float FL_F(half_expm1)(float x) {
  const float c[] = {0x1p-1f,        0x1.555556p-3f,  0x1.5554f6p-5f,
                     0x1.111004p-7f, 0x1.6d3cacp-10f, 0x1.a242e8p-13f};
  const exp_parts p = FL_F(split_exp)(x, 126);
  return FL_F(madd)(p.power, FL_F(madd)(p.rest * p.rest, FL_HORNER6(p.rest, c), p.rest), p.power - 0.5f);
}

FL_INLINE float FL_F(expm1)(float x) {
  const float twice = FL_F(half_expm1)(x);
  // the sign of -0
  return FL_F(copysign)(FL_F(choose_ends)(x, -18.0f, -1.0f, twice + twice, 88.9f, FL_INF), x);
}

// Near zero x + x^3 P(x^2), elsewhere 1 - 2 / (e^2x + 1): what is added to an exact number is less than half of it.
FL_INLINE float FL_F(tanh)(float x) {
  const float near[] = {-0x1.55553ep-2f, 0x1.110b58p-3f,  -0x1.b92b2ep-5f,
                        0x1.5d160ep-6f,  -0x1.e5e53ep-8f, 0x1.a008c0p-10f};
  const float c[] = FL_EXP;
  const float a = FL_F(abs)(x), square = x * x, small = FL_F(madd)(a * square, FL_HORNER6(square, near), a);
  const exp_parts p = FL_F(split_exp)(a + a, 126);
  const float e = FL_F(madd)(p.rest * p.rest, FL_HORNER5(p.rest, c), p.rest);
  const float large = 1.0f - 1.0f / (FL_F(madd)(p.power, e, p.power) + 0.5f);
  const float outer = a > 9.1f ? 1.0f : large;
  return FL_F(copysign)(a < 0.8f ? small : outer, x);
}

// 2^-32 / (2^-32 + 2^-32 e^-x): the scaled e^-x does not overflow where the result is subnormal.
FL_INLINE float FL_F(sigmoid)(float x) {
  const float c[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b4p-5f, 0x1.1239a0p-7f, 0x1.6a495cp-10f};
  const exp_parts p = FL_F(split_exp)(-x, 95);
  const float y = FL_F(madd)(p.rest * p.rest, FL_HORNER5(p.rest, c), p.rest) + 1.0f;
  return FL_F(choose_ends)(x, -104.0f, 0.0f, 0x1p-32f / FL_F(madd)(y, p.power, 0x1p-32f), 60.0f, 1.0f);
}

// ---- logarithms ----------------------------------------------------------------------------------------

typedef struct { float rest, power; } log_parts;  // x = (1 + rest) * 2^power, 1 + rest in [2/3, 4/3)

FL_INLINE FL_INT FL_F(log_power)(float x) { return (FL_INT)(FL_AS_BITS(x) - 0x3f2aaaabu) >> 23; }

FL_INLINE log_parts FL_F(split_log)(float x) {
  const bool subnormal = x < 0x1p-126f;
  const float normal = subnormal ? x * 0x1p23f : x;
  const FL_INT power = FL_F(log_power)(normal);
  log_parts p;
  p.rest = FL_AS_FLOAT(FL_AS_BITS(normal) - ((FL_BITS)power << 23)) - 1.0f;
  p.power = (float)(subnormal ? power - 23 : power);
  return p;
}

// log(1 + f) - f for f in [-1/3, 1/3)
FL_INLINE float FL_F(log_of_rest)(float f) {
  const float c[] = {-0x1p-1f,        0x1.555506p-2f,  -0x1.fffefap-3f, 0x1.99d05cp-3f, -0x1.559c2ep-3f,
                     0x1.1ed452p-3f, -0x1.f33c66p-4f, 0x1.1e72a2p-3f,  -0x1.07aa6cp-3f};
  return f * f * FL_HORNER9(f, c);
}

// The logarithm at the ends: infinity, NaN, negative numbers and zero.
FL_INLINE float FL_F(log_ends)(float x, float inside) {
  const float right = x < FL_INF ? inside : x;
  return x > 0.0f ? right : x == 0.0f ? -FL_INF : FL_NAN;
}

FL_INLINE float FL_F(log_sum)(float rest, float power) {
  const float low = FL_F(madd)(power, -0x1.bd0106p-13f, FL_F(log_of_rest)(rest));
  return FL_F(madd)(power, 0x1.63p-1f, rest + low);
}

FL_INLINE float FL_F(log)(float x) {
  const log_parts p = FL_F(split_log)(x);
  return FL_F(log_ends)(x, FL_F(log_sum)(p.rest, p.power));
}

// log(x) / log(base), where 1 / log(base) = high + low and log(2) / log(base) = p_high + p_low
FL_INLINE float FL_F(log_base)(float x, float high, float low, float p_high, float p_low) {
  const log_parts p = FL_F(split_log)(x);
  float sum = FL_F(madd)(FL_F(log_of_rest)(p.rest), high, p.rest * low);
  sum = FL_F(madd)(p.power, p_low, sum);
  return FL_F(log_ends)(x, FL_F(madd)(p.power, p_high, FL_F(madd)(p.rest, high, sum)));
}
FL_INLINE float FL_F(log2)(float x) { return FL_F(log_base)(x, 0x1.715476p+0f, 0x1.4ae0c0p-26f, 1.0f, 0.0f); }
FL_INLINE float FL_F(log10)(float x) {
  return FL_F(log_base)(x, 0x1.bcb7b2p-2f, -0x1.5b235ep-27f, 0x1.344p-2f, 0x1.3509f8p-18f);
}

// The power of two comes from the rounded 1 + x, the rest from x itself: x * s + (s - 1) rounds once.
FL_INLINE float FL_F(log1p)(float x) {
  const FL_INT power = FL_F(log_power)(1.0f + x);
  const float s = 0.25f * FL_AS_FLOAT((FL_BITS)(129 - power) << 23);  // 2^-128 is subnormal
  const float sum = FL_F(log_sum)(x * s + (s - 1.0f), (float)power);
  return FL_F(copysign)(FL_F(log_ends)(1.0f + x, sum), x);
}

// ---- error functions -----------------------------------------------------------------------------------

// Near zero x + x P(x^2), elsewhere 1 - e^-R(x): what is added to an exact number is small beside the result.
FL_INLINE float FL_F(erf)(float x) {
  const float near[] = {0x1.06eba8p-3f, -0x1.81273ep-2f, 0x1.ce2ce6p-4f, -0x1.b7f71ap-6f,
                        0x1.53f224p-8f, -0x1.a3515ep-11f, 0x1.4771fcp-14f};
  const float far[] = {0x1.72e404p-12f, 0x1.2085b2p+0f, 0x1.46c588p-1f, 0x1.a60a4ap-4f,
                       -0x1.654170p-6f, 0x1.814ad4p-9f, -0x1.8528d0p-13f};
  const float c[] = FL_EXP;
  const float a = FL_F(abs)(x), most = a > 4.0f ? 4.0f : a, square = x * x;  // from 3.92 on it is one
  const float shift = 0x1.8p23f + 127, minus = -FL_HORNER7(most, far);
  const float shifted = FL_F(madd)(minus, 0x1.715476p0f, shift), power = FL_F(power_of_two)(shifted);
  const float rest = FL_F(madd)(shifted - shift, -0x1.62e430p-1f, minus);  // where n is large, the power is small
  const float e = FL_F(madd)(rest * rest, FL_HORNER5(rest, c), rest), large = FL_F(madd)(-power, e, 1.0f - power);
  return a < 1.0f ? FL_F(madd)(x, FL_HORNER7(square, near), x) : FL_F(copysign)(large, x);
}

// Near zero x + x P(x^2), elsewhere erfinv(x) / x as a polynomial in w = -log(1 - x^2) below 5 and in its root above.
#define FL_ERFINV_CENTRAL                                                                \
  {0x1.805c5ep+0f,  0x1.f91e8ap-3f,   -0x1.11c99ap-8f,  -0x1.4866fap-10f, 0x1.ca617cp-13f, \
   -0x1.4bcbf8p-18f, -0x1.d8bde4p-19f, 0x1.ee1362p-22f, 0x1.e1e62ep-26f, -0x1.1b9014p-27f}

FL_INLINE float FL_F(erfinv)(float x) {
  const float near[] = {-0x1.d203b8p-4f, 0x1.db2b48p-3f, 0x1.04f998p-3f, 0x1.6b7098p-4f, 0x1.907768p-5f, 0x1.a2f418p-4f};
  const float central[] = FL_ERFINV_CENTRAL;
  const float tail[] = {0x1.6a9efep+1f,  0x1.006dc6p+0f,  0x1.352fdcp-7f,  -0x1.f42158p-8f, 0x1.79adf8p-8f,
                        -0x1.ddc8f6p-9f, 0x1.52efaep-10f, 0x1.36725ap-14f, -0x1.49210cp-13f};
  const float w = -FL_F(log)((1.0f - x) * (1.0f + x)), low = w - 2.5f, high = FL_F(sqrt)(w) - 3.0f;
  const float guess = w < 5.0f ? FL_HORNER10(low, central) : FL_HORNER9(high, tail), square = x * x;
  const float outer = FL_F(abs)(x) == 1.0f ? x * FL_INF : x * guess;
  return FL_F(copysign)(square < 0.25f ? FL_F(madd)(x, FL_HORNER6(square, near), x) : outer, x);  // the sign of -0
}

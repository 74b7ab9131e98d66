// Inverse circular and hyperbolic functions, and the hyperbolic cosine, in float: closer than glibc's vector versions.
//
// Each is a large part that is exact, or kept as a sum and what that rounds away, and a small polynomial.

// asin(x) - x for x^2 = square in [0, 1/4]
FL_INLINE float asin_rest(float x, float square) {
  const float c[] = {0x1.5555c8p-3f, 0x1.330204p-4f, 0x1.747bb8p-5f, 0x1.8c3e50p-6f, 0x1.595c60p-5f};
  return x * square * FL_HORNER5(square, c);
}

// base + less + x + rest, where base is the largest and less is what base leaves of a constant
FL_INLINE float sum_of_parts(float base, float less, float x, float rest) {
  const float sum = base + x, lost = (base - sum) + x + less;
  return sum + (lost + rest);
}

// Above one half, pi/2 - 2 asin(sqrt((1 - x) / 2)).
FL_INLINE float asin(float x) {
  const float a = abs(x);
  const bool large = a > 0.5f;
  const float square = large ? madd(a, -0.5f, 0.5f) : x * x, part = large ? -2.0f * sqrt(square) : a;
  const float rest = asin_rest(part, square), far = sum_of_parts(0x1.921fb6p0f, -0x1.777a5cp-25f, part, rest);
  return copysign(large ? far : part + rest, x);
}

FL_INLINE float acos(float x) {
  const float a = abs(x);
  const bool large = a > 0.5f;
  const float square = large ? madd(a, -0.5f, 0.5f) : x * x, part = large ? 2.0f * sqrt(square) : x;
  const float rest = asin_rest(part, square), base = large ? 0x1.921fb6p1f : 0x1.921fb6p0f;
  const float far = sum_of_parts(base, large ? -0x1.777a5cp-24f : -0x1.777a5cp-25f, -part, -rest);
  return x > 0.5f ? part + rest : far;
}

// Above one, pi/2 - atan(1 / x).
FL_INLINE float atan(float x) {
  const float c[] = {-0x1.55553ep-2f, 0x1.9991eap-3f,  -0x1.2420fap-3f, 0x1.c092dep-4f,  -0x1.5820f8p-4f,
                     0x1.da8a34p-5f,  -0x1.fe581cp-6f, 0x1.652948p-7f,  -0x1.d5581ap-10f};
  const float a = abs(x);
  const bool large = a > 1.0f;
  const float part = large ? -1.0f / a : a, square = part * part, rest = part * square * FL_HORNER9(square, c);
  return copysign(sum_of_parts(large ? 0x1.921fb6p0f : 0.0f, large ? -0x1.777a5cp-25f : 0.0f, part, rest), x);
}

FL_INLINE float atanh(float x) {
  const float c[] = {0x1.555540p-2f, 0x1.99a676p-3f, 0x1.234d9ap-3f, 0x1.e3ffcap-4f, 0x1.a6be30p-5f, 0x1.693922p-3f};
  const float a = abs(x), square = x * x, large = 0.5f * log1p(2.0f * a / (1.0f - a));
  return a < 0.5f ? madd(x * square, FL_HORNER6(square, c), x) : copysign(large, x);
}

// (e^x + e^-x) / 2 from a quarter of e^x: half of the largest one is no float. Kept in parts as in exp.
FL_INLINE float cosh(float x) {
  const float c[] = FL_EXP;
  const float a = abs(x), most = a > 90.0f ? 90.0f : a;
  const float shift = 0x1.8p23f + 125, shifted = madd(most, 0x1.715476p0f, shift), n = shifted - shift;
  const float high = madd(n, -0x1.63p-1f, most), low = n * 0x1.bd0106p-13f, r = high + low;
  const float sum = 1.0f + high, rest = ((1.0f - sum) + high) + madd(r * r, FL_HORNER5(r, c), low);
  const float power = power_of_two(shifted), other = 0.0625f / (power * (sum + rest));
  const float half = madd(power, sum, madd(power, rest, other));
  return half + half;
}

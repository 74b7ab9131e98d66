// The special functions of special.h in OpenCL C: what its names stand for there. Needs doubles.

FL_INLINE double fl_horner_d(double x, const double* c, int count) {
  double sum = c[count - 1];
#pragma unroll
  for (int k = count - 2; k >= 0; --k) sum = sum * x + c[k];
  return sum;
}

#define FL_TABLE __constant double
#define FL_IN_TABLE __constant const double*
#define FL_DINF ((double)INFINITY)
#define FL_DNAN ((double)NAN)
#define FL_SERIES(x, c) fl_horner_d(x, c, sizeof(c) / sizeof(double))
#define FL_FLOAT(name) static inline float fl_##name##_f(float x) { return (float)name((double)x); }
#define FL_FLOAT2(name) \
  static inline float fl_##name##_f(float x, float y) { return (float)name((double)x, (double)y); }

#define FL_P(name) fl_##name##_f
#define FL_T float
#define FL_HERMITE_LIMIT 128
#include "special_polynomials.h"
#undef FL_P
#undef FL_T
#undef FL_HERMITE_LIMIT
#define FL_P(name) fl_##name##_d
#define FL_T double
#define FL_HERMITE_LIMIT 512
#include "special_polynomials.h"

#define abs fl_abs_d
#define copysign fl_copysign_d
#define cos fl_cos_d
#define erf fl_erf_d
#define erfc fl_erfc_d
#define erfinv fl_erfinv_d
#define exp fl_exp_d
#define expm1 fl_expm1_d
#define floor fl_floor_d
#define fmod fl_fmod_d
#define isinf fl_isinf_d
#define isnan fl_isnan_d
#define lgamma fl_lgamma_d
#define log fl_log_d
#define log1p fl_log1p_d
#define pow fl_pow_d
#define round fl_round_d
#define sin fl_sin_d
#define sqrt fl_sqrt_d
#define tan fl_tan_d
#define trunc fl_trunc_d

#define airy_ai fl_airy_ai_d
#define digamma fl_digamma_d
#define erfcx fl_erfcx_d
#define i0 fl_i0_d
#define i0e fl_i0e_d
#define i1 fl_i1_d
#define i1e fl_i1e_d
#define igamma fl_igamma_d
#define igammac fl_igammac_d
#define modified_bessel_k0 fl_modified_bessel_k0_d
#define modified_bessel_k1 fl_modified_bessel_k1_d
#define ndtri fl_ndtri_d
#define scaled_modified_bessel_k0 fl_scaled_modified_bessel_k0_d
#define scaled_modified_bessel_k1 fl_scaled_modified_bessel_k1_d
#define spherical_bessel_j0 fl_spherical_bessel_j0_d
#define zeta fl_zeta_d

#include "special.h"

FL_INLINE double fl_polygamma_d(double order, double x) { return polygamma_of((long)order, x); }
FL_INLINE float fl_polygamma_f(float order, float x) { return (float)polygamma_of((long)order, (double)x); }

// Names that kernels give to their own variables.
#undef i0
#undef i1

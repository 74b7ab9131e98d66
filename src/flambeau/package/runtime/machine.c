/* Whether this CPU has the instructions that the machine code of a package was compiled for. */
#include "internal.h"

#if defined(__x86_64__)
#define ARCHITECTURE "x86_64"
#define HAS(name) {#name, __builtin_cpu_supports(#name) != 0}
#else
#define ARCHITECTURE "aarch64"
#endif

static _Atomic(flam_caller) caller;
void flam_set_caller(flam_caller given) { atomic_store(&caller, given); }
flam_caller fl_caller(void) { return atomic_load(&caller); }

int fl_supports(const char* features, char* missing, size_t size) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const struct {
    const char* name;
    int there;
  } known[] = {{ARCHITECTURE, 1}, {"torch", fl_caller() != NULL}, HAS(sse3), HAS(ssse3), {"sse4_1", __builtin_cpu_supports("sse4.1") != 0},
               {"sse4_2", __builtin_cpu_supports("sse4.2") != 0}, HAS(popcnt), HAS(avx), HAS(avx2), HAS(fma), HAS(bmi),
               HAS(bmi2), HAS(avx512f), HAS(avx512cd), HAS(avx512bw), HAS(avx512dq), HAS(avx512vl), HAS(avx512vbmi),
               HAS(avx512vnni), HAS(avx512vbmi2), HAS(avx512bitalg), HAS(avx512vpopcntdq), HAS(avx512ifma)};
#else
  const struct {
    const char* name;
    int there;
  } known[] = {{ARCHITECTURE, 1}, {"torch", fl_caller() != NULL}};
#endif
  for (const char* at = features; *at;) {
    size_t length = strcspn(at, " ");
    int there = 0;
    for (size_t k = 0; k < sizeof known / sizeof *known; ++k) {
      if (strlen(known[k].name) == length && !memcmp(known[k].name, at, length)) there = known[k].there;
    }
    if (!there) {
      snprintf(missing, size, "%.*s", (int)(length < 60 ? length : 60), at);
      return 0;
    }
    at += length + strspn(at + length, " ");
  }
  return 1;
}

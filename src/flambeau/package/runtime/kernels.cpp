// In the machine code of every package: OpenMP's calls go to the runtime that loaded it, and to no library.
#include "kernels.h"

static const flam_host* host;
extern "C" {
extern const flam_code flam_table __attribute__((visibility("hidden")));

__attribute__((visibility("default"))) const flam_code* flam_bind(const flam_host* given) {
  host = given;
  return &flam_table;
}

#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN void GOMP_parallel(void (*part)(void*), void* data, unsigned members, unsigned flags) {
  (void)flags;
  host->parallel(part, data, members);
}
HIDDEN int omp_get_thread_num() noexcept { return host->member(); }
HIDDEN int omp_get_num_threads() noexcept { return host->members(); }
HIDDEN int omp_get_max_threads() noexcept { return host->threads(); }
}

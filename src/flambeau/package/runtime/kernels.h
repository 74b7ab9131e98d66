/* Between the runtime and the machine code of a package: what kernels ask for, and what they are. */
#ifndef FLAMBEAU_KERNELS_H
#define FLAMBEAU_KERNELS_H
#include <stdint.h>

typedef struct {
  void (*parallel)(void (*part)(void*), void* data, unsigned members); /* 0: as many as there are threads */
  int (*member)(void);
  int (*members)(void);
  int (*threads)(void);
} flam_host;

typedef struct {
  int64_t (*run)(void** pointers, const int64_t* sizes); /* 0, or what is wrong with the data */
  int64_t pointers, sizes;
} flam_kernel;

typedef struct {
  int64_t count;
  const flam_kernel* kernels;
} flam_code;

#endif

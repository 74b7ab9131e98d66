/* The interface between the runtime and the machine code of a package. */
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
  int64_t (*run)(void** pointers, const int64_t* sizes); /* returns 0, or the fault that it found in the data */
  int64_t pointers, sizes;
} flam_kernel;

typedef struct {
  int64_t count;
  const flam_kernel* kernels;
} flam_code;

#endif

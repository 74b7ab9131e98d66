/* A device, as a table of functions for the runtime. flambeau_cuda.c, flambeau_opencl.c and flambeau_metal.mm each
   provide one. They look for their driver when a package is loaded, and are linked or loaded only where needed. */
#ifndef FLAMBEAU_DEVICE_H
#define FLAMBEAU_DEVICE_H
#include <stddef.h>
#include <stdint.h>

#define FLAM_DEVICE_VERSION 1 /* of these structures */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  uint64_t memory; /* an address of the device, or the driver's handle of a buffer */
  int64_t offset, itemsize; /* in bytes; itemsize: of the dtype that a kernel uses */
} flam_place;

/* A module of code: a cubin for CUDA; for others the source of all functions, or a driver's binary of it for the device
   `of`. */
typedef struct {
  const char* of;
  const uint8_t* data;
  size_t size;
} flam_module;

typedef struct {
  int64_t module;
  const char* name;
  int64_t threads, shared, scratch; /* threads of a group; bytes of local memory; bytes of memory for each group */
} flam_function;

typedef struct {
  int64_t function;
  int64_t groups[3];
  const flam_place* places; /* the pointers */
  int64_t place_count;
  const int64_t* sizes;
  int64_t size_count;
  flam_place work, scratch, faults; /* memory 0: the kernel has no such argument */
  int64_t record;                   /* the index of this launch among the faults */
} flam_launch;

/* Functions that can fail return NULL, or the driver's error. A stream of NULL means none: `open` creates no queue. */
typedef struct flam_device {
  int64_t version;
  const char* name;              /* the first word of a target's features */
  int64_t record_bytes, fault_at; /* the size of a record of faults, and the offset of the fault in it */
  int64_t alignment;              /* of addresses, which kernels rely on; 0: memory has handles instead */
  /* Opens the device with this number, and loads its code; NULL, with the reason. `features`: the words after the name. */
  void* (*open)(const char* features, int number, const flam_module* modules, int64_t module_count,
                const flam_function* functions, int64_t function_count, char* why, size_t room);
  void (*close)(void* device);
  int64_t (*units)(void* device); /* the number of cores, for kernels that ask */
  void (*enter)(void* device);    /* called before all functions below, in any thread */
  void (*leave)(void* device);
  uint64_t (*allocate)(void* device, size_t bytes); /* 0: there is not enough */
  void (*release)(void* device, uint64_t memory);
  void* (*stream)(void* device); /* a new stream; NULL: streams are not supported */
  void (*drop_stream)(void* device, void* stream);
  const char* (*upload)(void* device, void* stream, flam_place to, const void* from, size_t bytes); /* copies `from` */
  const char* (*download)(void* device, void* stream, void* to, flam_place from, size_t bytes);     /* waits */
  const char* (*copy)(void* device, void* stream, flam_place to, flam_place from, size_t bytes);
  const char* (*zero)(void* device, void* stream, flam_place at, size_t bytes);
  const char* (*launch)(void* device, void* stream, const flam_launch* launch);
  const char* (*wait)(void* device, void* stream);
  /* Orders work: everything enqueued on one stream so far runs before later work on another. */
  void* (*mark)(void* device, void* stream, void* mark); /* records a new mark, or this one again */
  void (*after)(void* device, void* stream, void* mark);
  void (*drop_mark)(void* device, void* mark);
} flam_device;

__attribute__((visibility("default"))) const flam_device* flam_cuda(void);
__attribute__((visibility("default"))) const flam_device* flam_opencl(void);
__attribute__((visibility("default"))) const flam_device* flam_metal(void);

#ifdef __cplusplus
}
#endif
#endif

/* What a device is to the runtime: a table of functions. flambeau_cuda.c, flambeau_opencl.c and flambeau_metal.mm each
   fill one, find their driver when a package is loaded, and are linked (or loaded out of the package) where wanted. */
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
  int64_t offset, itemsize; /* in bytes; itemsize: of what a kernel takes it for */
} flam_place;

/* Of the code in a package: for CUDA a module is a cubin, for the others the text of all functions, or what a driver made
   of it for the device `of`. */
typedef struct {
  const char* of;
  const uint8_t* data;
  size_t size;
} flam_module;

typedef struct {
  int64_t module;
  const char* name;
  int64_t threads, shared, scratch; /* of a group; bytes of local memory; bytes of memory for each group */
} flam_function;

typedef struct {
  int64_t function;
  int64_t groups[3];
  const flam_place* places; /* the pointers */
  int64_t place_count;
  const int64_t* sizes;
  int64_t size_count;
  flam_place work, scratch, faults; /* memory 0: the kernel takes none */
  int64_t record;                   /* which one of the faults is this launch's */
} flam_launch;

/* A function that can fail returns 0, or what the driver said. A stream of NULL is none: `open` makes no queue by itself. */
typedef struct flam_device {
  int64_t version;
  const char* name;              /* the first word of a target's features */
  int64_t record_bytes, fault_at; /* of a record of faults; where the fault is in it */
  int64_t alignment;              /* that kernels count on, of addresses; 0: memory goes by handles */
  /* The device of that number, with the code; NULL, and why. `features`: what follows the name. */
  void* (*open)(const char* features, int number, const flam_module* modules, int64_t module_count,
                const flam_function* functions, int64_t function_count, char* why, size_t room);
  void (*close)(void* device);
  int64_t (*units)(void* device); /* cores, as far as kernels ask */
  void (*enter)(void* device);    /* around all that follows, in any thread */
  void (*leave)(void* device);
  uint64_t (*allocate)(void* device, size_t bytes); /* 0: there is not enough */
  void (*release)(void* device, uint64_t memory);
  void* (*stream)(void* device); /* a new one; NULL: there is none */
  void (*drop_stream)(void* device, void* stream);
  const char* (*upload)(void* device, void* stream, flam_place to, const void* from, size_t bytes); /* `from` is free then */
  const char* (*download)(void* device, void* stream, void* to, flam_place from, size_t bytes);     /* waits */
  const char* (*copy)(void* device, void* stream, flam_place to, flam_place from, size_t bytes);
  const char* (*zero)(void* device, void* stream, flam_place at, size_t bytes);
  const char* (*launch)(void* device, void* stream, const flam_launch* launch);
  const char* (*wait)(void* device, void* stream);
  /* What was put into one stream so far comes before what will be put into another. */
  void* (*mark)(void* device, void* stream, void* mark); /* a new mark, or that one again */
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

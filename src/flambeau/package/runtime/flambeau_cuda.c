/* NVIDIA GPUs for the runtime of packages, through the CUDA driver, which is found when a package is loaded: neither the
   toolkit nor its headers are needed. Functions are those that Triton makes: their arguments are pointers, sizes, memory to
   work in where they take some, the word for a fault, and two pieces of memory that the compiler may ask for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

typedef int result;
typedef void* handle;
typedef unsigned long long address;

/* Names of the driver's functions. */
#define DRIVER(F)                                                                                                        \
  F(cuInit, (unsigned))                                                                                                  \
  F(cuGetErrorString, (result, const char**))                                                                            \
  F(cuDeviceGet, (int*, int))                                                                                            \
  F(cuDeviceGetAttribute, (int*, int, int))                                                                              \
  F(cuDevicePrimaryCtxRetain, (handle*, int))                                                                            \
  F(cuDevicePrimaryCtxRelease_v2, (int))                                                                                 \
  F(cuCtxPushCurrent_v2, (handle))                                                                                       \
  F(cuCtxPopCurrent_v2, (handle*))                                                                                       \
  F(cuModuleLoadData, (handle*, const void*))                                                                            \
  F(cuModuleUnload, (handle))                                                                                            \
  F(cuModuleGetFunction, (handle*, handle, const char*))                                                                 \
  F(cuFuncSetAttribute, (handle, int, int))                                                                              \
  F(cuMemAlloc_v2, (address*, size_t))                                                                                   \
  F(cuMemFree_v2, (address))                                                                                             \
  F(cuMemcpyHtoDAsync_v2, (address, const void*, size_t, handle))                                                        \
  F(cuMemcpyDtoHAsync_v2, (void*, address, size_t, handle))                                                              \
  F(cuMemcpyDtoDAsync_v2, (address, address, size_t, handle))                                                            \
  F(cuMemsetD8Async, (address, unsigned char, size_t, handle))                                                           \
  F(cuStreamCreate, (handle*, unsigned))                                                                                 \
  F(cuStreamDestroy_v2, (handle))                                                                                        \
  F(cuStreamSynchronize, (handle))                                                                                       \
  F(cuStreamWaitEvent, (handle, handle, unsigned))                                                                       \
  F(cuEventCreate, (handle*, unsigned))                                                                                  \
  F(cuEventRecord, (handle, handle))                                                                                     \
  F(cuEventDestroy_v2, (handle))                                                                                         \
  F(cuLaunchKernel, (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void**, void**))

#define DECLARED(name, arguments) static result(*name) arguments;
DRIVER(DECLARED)

enum { MAJOR = 75, MINOR = 76, PROCESSORS = 16 };            /* CU_DEVICE_ATTRIBUTE_... */
enum { MAX_DYNAMIC_SHARED = 8, USUAL_SHARED = 48 << 10 };    /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
enum { NON_BLOCKING = 1, DISABLE_TIMING = 2, MOST_ARGUMENTS = 1024 };

typedef struct {
  int device, processors;
  handle context, *modules, *functions;
  int64_t module_count;
  const flam_function* known;
} gpu;

static const char* missing = "cuInit was not called";

static void find_driver(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  missing = library ? NULL : "there is no NVIDIA driver (libcuda.so.1)";
#define FOUND(name, arguments)                                   \
  if (!missing && !(*(void**)&name = dlsym(library, #name))) missing = "the NVIDIA driver has no " #name;
  DRIVER(FOUND)
  if (!missing && cuInit(0)) missing = "the NVIDIA driver finds no GPU";
}

static const char* said(result code) {
  if (!code) return NULL;
  const char* text = NULL;
  cuGetErrorString(code, &text);
  return text ? text : "an error without a name";
}

static void enter(void* given) { cuCtxPushCurrent_v2(((gpu*)given)->context); }
static void leave(void* given) {
  handle before;
  (void)given;
  cuCtxPopCurrent_v2(&before);
}

static void close_gpu(void* given) {
  gpu* g = given;
  if (g->context) {
    enter(g);
    for (int64_t k = 0; g->modules && k < g->module_count; ++k) {
      if (g->modules[k]) cuModuleUnload(g->modules[k]);
    }
    leave(g);
    cuDevicePrimaryCtxRelease_v2(g->device);
  }
  free(g->modules);
  free(g->functions);
  free(g);
}

static const char* load(gpu* g, const flam_module* modules, const flam_function* functions, int64_t function_count) {
  const char* bad = NULL;
  for (int64_t k = 0; !bad && k < g->module_count; ++k) bad = said(cuModuleLoadData(g->modules + k, modules[k].data));
  for (int64_t k = 0; !bad && k < function_count; ++k) {
    const flam_function* f = functions + k;
    bad = said(cuModuleGetFunction(g->functions + k, g->modules[f->module], f->name));
    if (!bad && f->shared > USUAL_SHARED) bad = said(cuFuncSetAttribute(g->functions[k], MAX_DYNAMIC_SHARED, (int)f->shared));
  }
  return bad;
}

/* Machine code runs on later GPUs of the same generation. */
static void* open_gpu(const char* features, int number, const flam_module* modules, int64_t module_count,
                      const flam_function* functions, int64_t function_count, char* why, size_t room) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find_driver);
  if (missing) return snprintf(why, room, "does not run: %s", missing), NULL;
  int wanted = 0, major = 0, minor = 0, device = 0;
  sscanf(features, "sm_%d", &wanted);
  if (cuDeviceGet(&device, number)) return snprintf(why, room, "does not run: there is no GPU number %d", number), NULL;
  cuDeviceGetAttribute(&major, MAJOR, device);
  cuDeviceGetAttribute(&minor, MINOR, device);
  if (wanted / 10 != major || wanted % 10 > minor) {
    return snprintf(why, room, "needs sm_%d, and this GPU is sm_%d%d", wanted, major, minor), NULL;
  }
  gpu* g = calloc(1, sizeof *g);
  if (!g) return snprintf(why, room, "has not enough memory"), NULL;
  g->device = device, g->module_count = module_count, g->known = functions;
  g->modules = calloc((size_t)module_count + 1, sizeof(handle));
  g->functions = calloc((size_t)function_count + 1, sizeof(handle));
  cuDeviceGetAttribute(&g->processors, PROCESSORS, device);
  const char* bad = g->modules && g->functions ? said(cuDevicePrimaryCtxRetain(&g->context, device)) : "not enough memory";
  if (!bad) {
    enter(g);
    bad = load(g, modules, functions, function_count);
    leave(g);
  }
  if (!bad) return g;
  snprintf(why, room, "does not load: %s", bad);
  close_gpu(g);
  return NULL;
}

static int64_t units(void* given) { return ((gpu*)given)->processors; }

static uint64_t allocate(void* given, size_t bytes) {
  address found = 0;
  (void)given;
  return cuMemAlloc_v2(&found, bytes) ? 0 : found;
}
static void release(void* given, uint64_t memory) { (void)given, cuMemFree_v2(memory); } /* waits for kernels that use it */

static void* stream(void* given) {
  handle found = NULL;
  (void)given;
  return cuStreamCreate(&found, NON_BLOCKING) ? NULL : found;
}
static void drop_stream(void* given, void* s) { (void)given, cuStreamDestroy_v2(s); }
static const char* wait_for(void* given, void* s) { return (void)given, said(cuStreamSynchronize(s)); }

static const char* upload(void* given, void* s, flam_place to, const void* from, size_t bytes) {
  (void)given;
  result code = cuMemcpyHtoDAsync_v2(to.memory + (address)to.offset, from, bytes, s);
  if (!code && !s) code = cuStreamSynchronize(s); /* other streams do not wait for the default stream */
  return said(code);
}
static const char* download(void* given, void* s, void* to, flam_place from, size_t bytes) {
  (void)given;
  result code = cuMemcpyDtoHAsync_v2(to, from.memory + (address)from.offset, bytes, s);
  return said(code ? code : cuStreamSynchronize(s));
}
static const char* copy(void* given, void* s, flam_place to, flam_place from, size_t bytes) {
  (void)given;
  return said(cuMemcpyDtoDAsync_v2(to.memory + (address)to.offset, from.memory + (address)from.offset, bytes, s));
}
static const char* zero(void* given, void* s, flam_place at, size_t bytes) {
  (void)given;
  return said(cuMemsetD8Async(at.memory + (address)at.offset, 0, bytes, s));
}

static const char* launch(void* given, void* s, const flam_launch* l) {
  gpu* g = given;
  int64_t words[MOST_ARGUMENTS];
  void* arguments[MOST_ARGUMENTS];
  int64_t count = 0;
  if (l->place_count + l->size_count + 4 > MOST_ARGUMENTS) return "a kernel has too many arguments";
  for (int64_t k = 0; k < l->place_count; ++k) words[count++] = (int64_t)l->places[k].memory + l->places[k].offset;
  for (int64_t k = 0; k < l->size_count; ++k) words[count++] = l->sizes[k]; /* 32 bits are the first half of 64 */
  if (l->work.memory) words[count++] = (int64_t)l->work.memory + l->work.offset;
  words[count++] = (int64_t)l->faults.memory + 8 * l->record;
  words[count++] = l->scratch.memory ? (int64_t)l->scratch.memory + l->scratch.offset : 0;
  words[count++] = 0; /* for profiling */
  for (int64_t k = 0; k < count; ++k) arguments[k] = words + k;
  const flam_function* f = g->known + l->function;
  return said(cuLaunchKernel(g->functions[l->function], (unsigned)l->groups[0], (unsigned)l->groups[1], (unsigned)l->groups[2],
                             (unsigned)f->threads, 1, 1, (unsigned)f->shared, s, arguments, NULL));
}

static void* mark(void* given, void* s, void* known) {
  (void)given;
  if (!known && cuEventCreate(&known, DISABLE_TIMING)) known = NULL;
  if (known) cuEventRecord(known, s);
  else cuStreamSynchronize(s);
  return known;
}
static void after(void* given, void* s, void* known) { (void)given, cuStreamWaitEvent(s, known, 0); }
static void drop_mark(void* given, void* known) { (void)given, cuEventDestroy_v2(known); }

const flam_device* flam_cuda(void) {
  static const flam_device found = {
      FLAM_DEVICE_VERSION, "cuda", 8, 0, 16, open_gpu, close_gpu, units, enter, leave, allocate, release, stream, drop_stream,
      upload, download, copy, zero, launch, wait_for, mark, after, drop_mark};
  return &found;
}

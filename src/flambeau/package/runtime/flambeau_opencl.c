/* OpenCL devices of any vendor for the runtime of packages, through the library of the system, which is found when a
   package is loaded. Texts are built by the device's driver; what a driver made of them for the very same device may be in
   the package, and is taken then. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

typedef int32_t result;
typedef void* handle;

#define DRIVER(F)                                                                                                      \
  F(result, clGetPlatformIDs, (uint32_t, handle*, uint32_t*))                                                          \
  F(result, clGetPlatformInfo, (handle, uint32_t, size_t, void*, size_t*))                                             \
  F(result, clGetDeviceIDs, (handle, uint64_t, uint32_t, handle*, uint32_t*))                                          \
  F(result, clGetDeviceInfo, (handle, uint32_t, size_t, void*, size_t*))                                               \
  F(handle, clCreateContext, (const intptr_t*, uint32_t, const handle*, void*, void*, result*))                        \
  F(result, clReleaseContext, (handle))                                                                                \
  F(handle, clCreateCommandQueue, (handle, handle, uint64_t, result*))                                                 \
  F(result, clReleaseCommandQueue, (handle))                                                                           \
  F(handle, clCreateProgramWithSource, (handle, uint32_t, const char**, const size_t*, result*))                       \
  F(handle, clCreateProgramWithBinary, (handle, uint32_t, const handle*, const size_t*, const uint8_t**, result*, result*)) \
  F(result, clBuildProgram, (handle, uint32_t, const handle*, const char*, void*, void*))                              \
  F(result, clGetProgramBuildInfo, (handle, handle, uint32_t, size_t, void*, size_t*))                                 \
  F(result, clReleaseProgram, (handle))                                                                                \
  F(handle, clCreateKernel, (handle, const char*, result*))                                                            \
  F(result, clReleaseKernel, (handle))                                                                                 \
  F(result, clSetKernelArg, (handle, uint32_t, size_t, const void*))                                                   \
  F(handle, clCreateBuffer, (handle, uint64_t, size_t, void*, result*))                                                \
  F(result, clReleaseMemObject, (handle))                                                                              \
  F(result, clEnqueueWriteBuffer, (handle, handle, uint32_t, size_t, size_t, const void*, uint32_t, void*, void*))     \
  F(result, clEnqueueReadBuffer, (handle, handle, uint32_t, size_t, size_t, void*, uint32_t, void*, void*))            \
  F(result, clEnqueueCopyBuffer, (handle, handle, handle, size_t, size_t, size_t, uint32_t, void*, void*))             \
  F(result, clEnqueueFillBuffer, (handle, handle, const void*, size_t, size_t, size_t, uint32_t, void*, void*))        \
  F(result, clEnqueueNDRangeKernel, (handle, handle, uint32_t, void*, const size_t*, const size_t*, uint32_t, void*, void*)) \
  F(result, clFinish, (handle))

#define DECLARED(returns, name, arguments) static returns(*name) arguments;
DRIVER(DECLARED)

enum { CPU = 2, GPU = 4, ACCELERATOR = 8 };
enum { KIND = 0x1000, UNITS = 0x1002, LARGEST_GROUP = 0x1004, DEVICE_NAME = 0x102B, DRIVER_VERSION = 0x102D, DEVICE_VERSION = 0x102F,
       EXTENSIONS = 0x1030, SINGLE_CONFIG = 0x101B, ROUNDED_DIVIDE = 1 << 7, PLATFORM = 0x1031, PLATFORM_NAME = 0x902,
       BUILD_LOG = 0x1183, READ_WRITE = 1 };

typedef struct {
  handle device, context, queue, program, *kernels;
  const flam_function* known;
  int64_t kernel_count;
  uint32_t units;
  pthread_mutex_t lock; /* held from setting a kernel's arguments to its launch */
} machine;

static char library_path[1024] = "libOpenCL.so.1";
static const char* missing = NULL;

/* Uses another library than the system's. Call it before the first package is loaded. */
__attribute__((visibility("default"))) void flam_opencl_library(const char* path) { snprintf(library_path, sizeof library_path, "%s", path); }

static void find_driver(void) {
  void* library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  missing = library ? NULL : "there is no OpenCL library (libOpenCL.so.1)";
#define FOUND(returns, name, arguments) \
  if (!missing && !(*(void**)&name = dlsym(library, #name))) missing = "the OpenCL library has no " #name;
  DRIVER(FOUND)
}

static const char* said(result code) {
  static __thread char text[32];
  if (!code) return NULL;
  snprintf(text, sizeof text, "OpenCL error %d", code);
  return text;
}

static void text_of(handle device, uint32_t what, char* out, size_t room) {
  out[0] = 0;
  clGetDeviceInfo(device, what, room - 1, out, NULL);
  out[room - 1] = 0;
  for (size_t n = strlen(out); n && out[n - 1] == ' ';) out[--n] = 0;
}

/* The device and driver that a binary is for. */
static void identity(handle device, const char* options, char* out, size_t room) {
  char name[128], version[128], driver[128], platform_name[128] = "";
  handle platform = NULL;
  text_of(device, DEVICE_NAME, name, sizeof name);
  text_of(device, DEVICE_VERSION, version, sizeof version);
  text_of(device, DRIVER_VERSION, driver, sizeof driver);
  if (!clGetDeviceInfo(device, PLATFORM, sizeof platform, &platform, NULL)) {
    clGetPlatformInfo(platform, PLATFORM_NAME, sizeof platform_name - 1, platform_name, NULL);
  }
  snprintf(out, room, "%s|%s|%s|%s|%s", platform_name, name, version, driver, options);
}

static int has(handle device, const char* extension) {
  size_t size = 0;
  char* all = clGetDeviceInfo(device, EXTENSIONS, 0, NULL, &size) ? NULL : calloc(1, size + 1);
  int found = all && !clGetDeviceInfo(device, EXTENSIONS, size, all, NULL) && strstr(all, extension);
  free(all);
  return found;
}

/* The device with this number, where devices of the wanted kind come first. */
static handle find(const char* features, int number) {
  handle platforms[16], found[64];
  uint32_t platform_count = 0, count = 0;
  int all = 0;
  if (clGetPlatformIDs(16, platforms, &platform_count)) platform_count = 0;
  const uint64_t wanted = strncmp(features, "cpu", 3) ? GPU : CPU, kinds[] = {wanted, (CPU | GPU | ACCELERATOR) & ~wanted};
  for (int pass = 0; pass < 2; ++pass) {
    for (uint32_t k = 0; k < platform_count && k < 16; ++k) {
      if (clGetDeviceIDs(platforms[k], kinds[pass], 64, found, &count)) continue;
      for (uint32_t i = 0; i < count && i < 64; ++i) {
        if (all++ == number) return found[i];
      }
    }
  }
  return NULL;
}

static void close_machine(void* given) {
  machine* m = given;
  for (int64_t k = 0; m->kernels && k < m->kernel_count; ++k) {
    if (m->kernels[k]) clReleaseKernel(m->kernels[k]);
  }
  if (m->program) clReleaseProgram(m->program);
  if (m->queue) clReleaseCommandQueue(m->queue);
  if (m->context) clReleaseContext(m->context);
  pthread_mutex_destroy(&m->lock);
  free(m->kernels);
  free(m);
}

static const char* build(machine* m, const flam_module* modules, int64_t module_count, const char* options, char* log, size_t room) {
  char here[700];
  result code = 0, binary = 0;
  identity(m->device, options, here, sizeof here);
  for (int64_t k = 1; k < module_count && !m->program; ++k) {
    if (strcmp(modules[k].of, here)) continue;
    m->program = clCreateProgramWithBinary(m->context, 1, &m->device, &modules[k].size, (const uint8_t**)&modules[k].data, &binary, &code);
    if (m->program && !code && !binary && !clBuildProgram(m->program, 1, &m->device, "", NULL, NULL)) return NULL;
    if (m->program) clReleaseProgram(m->program);
    m->program = NULL; /* the text can still be compiled */
  }
  const char* text = (const char*)modules[0].data;
  m->program = clCreateProgramWithSource(m->context, 1, &text, &modules[0].size, &code);
  if (!m->program || code) return said(code);
  code = clBuildProgram(m->program, 1, &m->device, options, NULL, NULL);
  if (code) clGetProgramBuildInfo(m->program, m->device, BUILD_LOG, room - 1, log, NULL);
  return said(code);
}

static void* open_machine(const char* features, int number, const flam_module* modules, int64_t module_count,
                          const flam_function* functions, int64_t function_count, char* why, size_t room) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find_driver);
  if (missing) return snprintf(why, room, "does not run: %s", missing), NULL;
  handle device = find(features, number);
  if (!device) return snprintf(why, room, "does not run: there is no OpenCL device number %d", number), NULL;
  int doubles = has(device, "cl_khr_fp64");
  for (const char* at = strstr(features, "cl_"); at; at = strstr(at + 1, " cl_")) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "%.*s", (int)strcspn(at + (*at == ' '), " "), at + (*at == ' '));
    if (!has(device, wanted)) return snprintf(why, room, "needs a device with %s", wanted), NULL;
  }
  size_t largest = 0, needed = 0;
  clGetDeviceInfo(device, LARGEST_GROUP, sizeof largest, &largest, NULL);
  for (int64_t k = 0; k < function_count; ++k) {
    if ((size_t)functions[k].threads > needed) needed = (size_t)functions[k].threads;
  }
  if (needed > largest) return snprintf(why, room, "needs groups of %zu work-items, and the device has %zu", needed, largest), NULL;
  machine* m = calloc(1, sizeof *m);
  if (!m || !(m->kernels = calloc((size_t)function_count + 1, sizeof(handle)))) {
    free(m);
    return snprintf(why, room, "has not enough memory"), NULL;
  }
  pthread_mutex_init(&m->lock, NULL);
  m->device = device, m->known = functions, m->kernel_count = function_count;
  uint64_t config = 0;
  char options[160], platform[64] = "", log[2000] = "";
  handle of = NULL;
  clGetDeviceInfo(device, UNITS, sizeof m->units, &m->units, NULL);
  clGetDeviceInfo(device, SINGLE_CONFIG, sizeof config, &config, NULL);
  clGetDeviceInfo(device, PLATFORM, sizeof of, &of, NULL);
  clGetPlatformInfo(of, PLATFORM_NAME, sizeof platform - 1, platform, NULL);
  uint64_t kind = 0;
  clGetDeviceInfo(device, KIND, sizeof kind, &kind, NULL);
  snprintf(options, sizeof options, "-w%s%s%s", config & ROUNDED_DIVIDE ? " -cl-fp32-correctly-rounded-divide-sqrt" : "",
           doubles ? " -DFL_DOUBLE" : "", kind & CPU && !strcmp(platform, "Portable Computing Language") ? " -DFL_CLANG" : "");
  result code = 0;
  m->context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
  const char* bad = said(code);
  if (!bad) m->queue = clCreateCommandQueue(m->context, device, 0, &code), bad = said(code);
  if (!bad && function_count) bad = build(m, modules, module_count, options, log, sizeof log);
  for (int64_t k = 0; !bad && k < function_count; ++k) {
    m->kernels[k] = clCreateKernel(m->program, functions[k].name, &code);
    bad = said(code);
  }
  if (!bad) return m;
  snprintf(why, room, "does not load: %s %.200s", bad, log);
  close_machine(m);
  return NULL;
}

static int64_t units(void* given) { return ((machine*)given)->units; }
static void nothing(void* given) { (void)given; }
static void drop_mark(void* given, void* known) { (void)given, (void)known; }

static uint64_t allocate(void* given, size_t bytes) {
  result code = 0;
  handle found = clCreateBuffer(((machine*)given)->context, READ_WRITE, bytes, NULL, &code);
  return code ? 0 : (uint64_t)(uintptr_t)found;
}
static void release(void* given, uint64_t memory) { (void)given, clReleaseMemObject((handle)(uintptr_t)memory); }

static void* stream(void* given) {
  machine* m = given;
  result code = 0;
  handle found = clCreateCommandQueue(m->context, m->device, 0, &code);
  return code ? NULL : found;
}
static void drop_stream(void* given, void* s) { (void)given, clReleaseCommandQueue(s); }
static handle queue_of(void* given, void* s) { return s ? s : ((machine*)given)->queue; }
static handle buffer_of(flam_place at) { return (handle)(uintptr_t)at.memory; }

static const char* upload(void* given, void* s, flam_place to, const void* from, size_t bytes) {
  return said(clEnqueueWriteBuffer(queue_of(given, s), buffer_of(to), 1, (size_t)to.offset, bytes, from, 0, NULL, NULL));
}
static const char* download(void* given, void* s, void* to, flam_place from, size_t bytes) {
  return said(clEnqueueReadBuffer(queue_of(given, s), buffer_of(from), 1, (size_t)from.offset, bytes, to, 0, NULL, NULL));
}
static const char* copy(void* given, void* s, flam_place to, flam_place from, size_t bytes) {
  return said(clEnqueueCopyBuffer(queue_of(given, s), buffer_of(from), buffer_of(to), (size_t)from.offset, (size_t)to.offset, bytes, 0, NULL, NULL));
}
static const char* zero(void* given, void* s, flam_place at, size_t bytes) {
  uint8_t none = 0;
  return said(clEnqueueFillBuffer(queue_of(given, s), buffer_of(at), &none, 1, (size_t)at.offset, bytes, 0, NULL, NULL));
}
static const char* wait_for(void* given, void* s) { return said(clFinish(queue_of(given, s))); }

static const char* launch(void* given, void* s, const flam_launch* l) {
  machine* m = given;
  handle kernel = m->kernels[l->function], memory;
  uint32_t at = 0;
  result code = 0;
  pthread_mutex_lock(&m->lock);
  for (int64_t k = 0; !code && k < l->place_count; ++k) {
    const flam_place* p = l->places + k;
    int64_t offset = p->offset / p->itemsize;
    memory = buffer_of(*p);
    code = p->offset % p->itemsize ? -30 : clSetKernelArg(kernel, at++, sizeof memory, &memory);
    if (!code) code = clSetKernelArg(kernel, at++, sizeof offset, &offset);
  }
  for (int64_t k = 0; !code && k < l->size_count; ++k) code = clSetKernelArg(kernel, at++, sizeof(int64_t), l->sizes + k);
  memory = buffer_of(l->faults);
  if (!code) code = clSetKernelArg(kernel, at++, sizeof memory, &memory);
  if (!code) code = clSetKernelArg(kernel, at, sizeof(int64_t), &l->record);
  size_t group = (size_t)m->known[l->function].threads, items = (size_t)l->groups[0] * group;
  if (!code) code = clEnqueueNDRangeKernel(queue_of(given, s), kernel, 1, NULL, &items, &group, 0, NULL, NULL);
  pthread_mutex_unlock(&m->lock);
  return said(code);
}

/* All queues belong to this runtime, and each call waits for its own. */
static void* mark(void* given, void* s, void* known) { return wait_for(given, s), known; }
static void after(void* given, void* s, void* known) { (void)given, (void)s, (void)known; }

const flam_device* flam_opencl(void) {
  static const flam_device found = {
      FLAM_DEVICE_VERSION, "opencl", 24, 8, 0, open_machine, close_machine, units, nothing, nothing, allocate, release, stream,
      drop_stream, upload, download, copy, zero, launch, wait_for, mark, after, drop_mark};
  return &found;
}

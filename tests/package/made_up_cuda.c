/* A CUDA driver whose GPU is this process: memory is memory, and launches are told to whoever asked for them. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void* handle;
typedef unsigned long long address;
typedef int (*told)(int function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared, void** arguments);

static told tell;
intptr_t functions; /* found so far: the number of the next */
static int arch = 90;
void driver_tells(told who) { tell = who; }
void driver_is(int given) { arch = given; }

int cuInit(unsigned flags) { return flags != 0; }
int cuGetErrorString(int code, const char** text) { return *text = code == 700 ? "an illegal address" : "made up", 0; }
int cuDeviceGet(int* handle, int number) { return *handle = number, number != 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? arch / 10 : attribute == 76 ? arch % 10 : 4;
  return device;
}
int cuDevicePrimaryCtxRetain(handle* context, int device) { return *context = (handle)1, device; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxPushCurrent_v2(handle context) { return context == NULL; }
int cuCtxPopCurrent_v2(handle* context) { return *context = NULL, 0; }
int cuModuleLoadData(handle* module, const void* data) { return *module = (handle)data, memcmp(data, "\177ELF", 4) != 0; }
int cuModuleUnload(handle module) { return module == NULL; }
int cuModuleGetFunction(handle* function, handle module, const char* name) {
  *function = (handle)++functions;
  return module == NULL || name[0] == 0;
}
int cuFuncSetAttribute(handle function, int attribute, int value) { return function == NULL || attribute != 8 || value < 0; }
int cuMemAlloc_v2(address* memory, size_t bytes) {
  void* found = NULL;
  int code = posix_memalign(&found, 256, bytes);
  return *memory = (address)(uintptr_t)found, code;
}
int cuMemFree_v2(address memory) { return free((void*)(uintptr_t)memory), 0; }
int cuMemcpyHtoDAsync_v2(address to, const void* from, size_t bytes, handle s) { return memcpy((void*)to, from, bytes), (void)s, 0; }
int cuMemcpyDtoHAsync_v2(void* to, address from, size_t bytes, handle s) { return memcpy(to, (void*)from, bytes), (void)s, 0; }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, handle s) { return memmove((void*)to, (void*)from, bytes), (void)s, 0; }
int cuMemsetD8Async(address to, unsigned char value, size_t bytes, handle s) { return memset((void*)to, value, bytes), (void)s, 0; }
int cuStreamCreate(handle* s, unsigned flags) { return *s = malloc(1), flags != 1; }
int cuStreamDestroy_v2(handle s) { return free(s), 0; }
int cuStreamSynchronize(handle s) { return (void)s, 0; }
int cuStreamWaitEvent(handle s, handle event, unsigned flags) { return (void)s, event == NULL || flags; }
int cuEventCreate(handle* event, unsigned flags) { return *event = malloc(1), flags != 2; }
int cuEventRecord(handle event, handle s) { return (void)s, event == NULL; }
int cuEventDestroy_v2(handle event) { return free(event), 0; }
int cuLaunchKernel(handle function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c, unsigned shared,
                   handle s, void** arguments, void** extra) {
  (void)s, (void)extra;
  return b != 1 || c != 1 ? 1 : tell((int)(intptr_t)function - 1, x, y, z, threads, shared, arguments);
}

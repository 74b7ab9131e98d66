// Apple GPUs for the runtime of packages. Compile it with the program that uses packages, on a Mac:
//
//     clang -c checksums.c threads.c machine.c read.c run.c weights.c device.c
//     clang++ -fobjc-arc -c flambeau_metal.mm && clang++ *.o main.o -framework Metal -framework Foundation
//
// It was written without a Mac and has not run on one: it relies only on Metal's documentation.
// A kernel takes its pointers as buffers 0, 1, ...; then, if they are more than 28, the others as addresses in one buffer;
// then all sizes as an array of 64-bit words; then its record of faults (codegen/simt/metal.py).
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <cstdio>
#include <cstring>
#include <vector>

#include "device.h"

namespace {

constexpr int kBuffers = 31;

struct Machine {
  id<MTLDevice> device;
  std::vector<id<MTLComputePipelineState>> kernels;
  const flam_function* known;
};

// Work on a stream goes into one command buffer until somebody waits.
struct Stream {
  id<MTLCommandQueue> queue;
  id<MTLCommandBuffer> commands;

  id<MTLCommandBuffer> open() {
    if (commands == nil) commands = [queue commandBuffer];
    return commands;
  }
  const char* wait() {
    if (commands == nil) return nullptr;
    [commands commit];
    [commands waitUntilCompleted];
    bool failed = commands.status == MTLCommandBufferStatusError;
    commands = nil;
    return failed ? "a command buffer ended with an error" : nullptr;
  }
};

id<MTLBuffer> buffer_of(flam_place at) { return (__bridge id<MTLBuffer>)(void*)at.memory; }
uint8_t* bytes_of(flam_place at) { return static_cast<uint8_t*>(buffer_of(at).contents) + at.offset; }

void close_machine(void* given) { delete static_cast<Machine*>(given); }

void* open_machine(const char*, int number, const flam_module* modules, int64_t, const flam_function* functions, int64_t count,
                   char* why, size_t room) {
  @autoreleasepool {
    NSArray<id<MTLDevice>>* all = MTLCopyAllDevices();
    if (number < 0 || NSUInteger(number) >= all.count) {
      snprintf(why, room, "does not run: there is no GPU number %d", number);
      return nullptr;
    }
    auto* m = new Machine{all[NSUInteger(number)], {}, functions};
    NSError* error = nil;
    NSString* text = [[NSString alloc] initWithBytes:modules[0].data length:modules[0].size encoding:NSUTF8StringEncoding];
    MTLCompileOptions* options = [MTLCompileOptions new];
    options.fastMathEnabled = NO;
    id<MTLLibrary> library = count ? [m->device newLibraryWithSource:text options:options error:&error] : nil;
    for (int64_t k = 0; k < count && (library != nil); ++k) {
      id<MTLFunction> function = [library newFunctionWithName:[NSString stringWithUTF8String:functions[k].name]];
      id<MTLComputePipelineState> made =
          function == nil ? nil : [m->device newComputePipelineStateWithFunction:function error:&error];
      if (made == nil || NSInteger(made.maxTotalThreadsPerThreadgroup) < functions[k].threads) break;
      m->kernels.push_back(made);
    }
    if (int64_t(m->kernels.size()) == count) return m;
    snprintf(why, room, "does not load: %s", error ? error.localizedDescription.UTF8String : "a kernel takes too many threads");
    close_machine(m);
    return nullptr;
  }
}

int64_t units(void*) { return 1; }
void nothing(void*) {}

uint64_t allocate(void* given, size_t bytes) {
  id<MTLBuffer> made = [static_cast<Machine*>(given)->device newBufferWithLength:bytes options:MTLResourceStorageModeShared];
  return (uint64_t)(__bridge_retained void*)made;
}
void release(void*, uint64_t memory) { (void)(__bridge_transfer id<MTLBuffer>)(void*)memory; }

void* stream(void* given) { return new Stream{[static_cast<Machine*>(given)->device newCommandQueue], nil}; }
void drop_stream(void*, void* s) { delete static_cast<Stream*>(s); }
const char* wait_for(void*, void* s) { return s ? static_cast<Stream*>(s)->wait() : nullptr; }

// The host can access this memory too, so work that uses it must have finished.
const char* upload(void* given, void* s, flam_place to, const void* from, size_t bytes) {
  const char* said = wait_for(given, s);
  memcpy(bytes_of(to), from, bytes);
  return said;
}
const char* download(void* given, void* s, void* to, flam_place from, size_t bytes) {
  const char* said = wait_for(given, s);
  memcpy(to, bytes_of(from), bytes);
  return said;
}
const char* copy(void* given, void* s, flam_place to, flam_place from, size_t bytes) {
  const char* said = wait_for(given, s);
  memmove(bytes_of(to), bytes_of(from), bytes);
  return said;
}
const char* zero(void* given, void* s, flam_place at, size_t bytes) {
  const char* said = wait_for(given, s);
  memset(bytes_of(at), 0, bytes);
  return said;
}

const char* launch(void* given, void* s, const flam_launch* l) {
  @autoreleasepool {
    auto* m = static_cast<Machine*>(given);
    id<MTLComputeCommandEncoder> encoder = [static_cast<Stream*>(s)->open() computeCommandEncoder];
    [encoder setComputePipelineState:m->kernels[size_t(l->function)]];
    int64_t direct = l->place_count + 2 <= kBuffers ? l->place_count : kBuffers - 3;
    NSUInteger at = 0;
    for (int64_t k = 0; k < direct; ++k) [encoder setBuffer:buffer_of(l->places[k]) offset:NSUInteger(l->places[k].offset) atIndex:at++];
    if (direct < l->place_count) {
      std::vector<uint64_t> more;
      for (int64_t k = direct; k < l->place_count; ++k) {
        more.push_back(buffer_of(l->places[k]).gpuAddress + uint64_t(l->places[k].offset));
        [encoder useResource:buffer_of(l->places[k]) usage:MTLResourceUsageRead | MTLResourceUsageWrite];
      }
      [encoder setBytes:more.data() length:more.size() * 8 atIndex:at++];
    }
    const int64_t none = 0;
    [encoder setBytes:l->size_count ? l->sizes : &none length:NSUInteger(l->size_count ? l->size_count : 1) * 8 atIndex:at++];
    [encoder setBuffer:buffer_of(l->faults) offset:NSUInteger(24 * l->record) atIndex:at++];
    [encoder dispatchThreadgroups:MTLSizeMake(NSUInteger(l->groups[0]), 1, 1)
            threadsPerThreadgroup:MTLSizeMake(NSUInteger(m->known[l->function].threads), 1, 1)];
    [encoder endEncoding];
    return nullptr;
  }
}

void* mark(void* given, void* s, void* known) { return wait_for(given, s), known; }
void after(void*, void*, void*) {}
void drop_mark(void*, void*) {}

}  // namespace

const flam_device* flam_metal(void) {
  static const flam_device found = {
      FLAM_DEVICE_VERSION, "metal", 24, 8, 0, open_machine, close_machine, units, nothing, nothing, allocate, release, stream,
      drop_stream, upload, download, copy, zero, launch, wait_for, mark, after, drop_mark};
  return &found;
}

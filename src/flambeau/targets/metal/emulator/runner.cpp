// Runs Metal kernels on a CPU, and checks every memory access.
//
// Each thread of a group is a fibre: it runs until it ends, or until it has to wait at a barrier or for its simdgroup.
// Kernels are compiled with g++'s instrumentation for races (-fsanitize=thread), and this file implements the calls that
// it inserts. An access must be inside a buffer of the launch or in threadgroup memory; buffers are copied, with unused
// memory around each copy. Errors that a Mac would ignore (a group that is too large, a read of uninitialised memory) are
// reported.
#undef _FORTIFY_SOURCE  // its checks of longjmp reject jumps between the stacks of fibres
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <mutex>

namespace {

constexpr int MOST_THREADS = 1024, WIDTH = 32, MOST_POINTERS = 1024, ARRAYS = 64;
constexpr size_t STACK = 256 << 10, SHARED = 32 << 10, GAP = 64, ROOM = 64, WATCHED = 64 << 20;

// ---- passed by the generated wrapper (binding.py) ----------------------------------------------------

struct Ids { uint32_t lane, group, item, size, groups, threads; };
struct Buffer { void* pointer; int64_t first, end; int32_t itemsize, written; };  // first, end: in bytes from the pointer
struct Part { void (*run)(void** arguments, const Ids* ids); const char* name; int64_t threads; int32_t group, limit; };

// ---- state of a launch -------------------------------------------------------------------------------------

enum State { IDLE, READY, BARRIER, SIMD, DONE };

struct Fibre {
  jmp_buf place;
  ucontext_t begin;
  bool started;
  State state;
  int line, turn;
};

// The last write and read of an element: the thread (counted from 1; MANY: several threads), and the number of barriers
// before it.
struct Access { uint32_t writer, wrote, reader, read; };
constexpr uint32_t MANY = 0xffffffffu, ATOMIC = 0xfffffffeu;

struct Region {
  uintptr_t from, to;  // bounds of the copy
  char* original;
  char* memory;
  int32_t granule;
  bool written;
  Access* seen;
};

struct Array { uint32_t offset, bytes; };

Fibre fibres[MOST_THREADS];
char *stacks, *unset;  // unset: 1 for each byte of the stacks that is in an uninitialised array
jmp_buf scheduler;
char box[MOST_THREADS / WIDTH][2][WIDTH][16];
Ids ids;
const Part* part;
void** given;
int current;
// Barriers of this group for threadgroup memory; all barriers for device memory, and their number when the group began
uint32_t passed, passed_device, group_begin;
int barrier_flags;
bool failed, collides;
char message[1024];
std::mutex one_launch;

Region regions[MOST_POINTERS];
int region_count, last_region;

alignas(64) char shared_memory[2 * SHARED + ARRAYS * (GAP + 16)];
uint8_t shared_owner[sizeof(shared_memory)];
Access shared_seen[sizeof(shared_memory)];
Array arrays[ARRAYS];
uint32_t shared_used, shared_bytes;

void fail(const char* format, ...) {
  char what[640];
  va_list rest;
  va_start(rest, format);
  vsnprintf(what, sizeof(what), format, rest);
  va_end(rest);
  snprintf(message, sizeof(message), "%s, group %u, thread %d: %s", part ? part->name : "a launch", ids.group, current, what);
  failed = true;
  _longjmp(scheduler, 2);
}

// ---- fibres ------------------------------------------------------------------------------------------------

void body() {
  for (;;) {
    const Ids mine = ids;
    part->run(given, &mine);
    Fibre& f = fibres[current];
    f.state = DONE;
    if (!_setjmp(f.place)) _longjmp(scheduler, 1);
  }
}

void enter(int k) {  // runs a thread until it waits or ends
  Fibre& f = fibres[k];
  current = k;
  ids.lane = (uint32_t)k;
  ids.item = ids.group * (uint32_t)part->group + ids.lane;
  if (_setjmp(scheduler)) return;
  f.state = READY;
  if (f.started) _longjmp(f.place, 1);
  f.started = true;
  getcontext(&f.begin);
  f.begin.uc_stack.ss_sp = stacks + STACK * (size_t)k;
  f.begin.uc_stack.ss_size = STACK;
  f.begin.uc_link = nullptr;
  makecontext(&f.begin, body, 0);
  setcontext(&f.begin);
}

void wait(State state, int line) {
  Fibre& f = fibres[current];
  f.state = state, f.line = line;
  if (!_setjmp(f.place)) _longjmp(scheduler, 1);
}

bool alike(int from, int to, State state) {  // whether all threads are in this state, at the same line
  for (int k = from; k < to; ++k)
    if (fibres[k].state != state || (state != DONE && fibres[k].line != fibres[from].line)) return false;
  return true;
}

void diverged(int size) {
  for (int k = 0; k < size; ++k) {
    const Fibre &f = fibres[k], &g = fibres[(k + 1) % size];
    if (f.state == g.state && (f.state == DONE || f.line == g.line)) continue;
    current = k;
    const char* words[] = {"idle", "ready", "at a barrier", "in a simdgroup function", "at its end"};
    snprintf(message, sizeof(message), "%s, group %u: divergent threads: %d is %s (line %d), %d is %s (line %d)", part->name,
             ids.group, k, words[f.state], f.line, (k + 1) % size, words[g.state], g.line);
    failed = true;
    return;
  }
}

// Runs all threads, starting with a random one, in ascending or descending order: kernels must not depend on the order.
void enter_all(int from, int to) {
  static uint32_t drawn = 1;
  drawn = drawn * 1664525u + 1013904223u;
  const int count = to - from, first = (int)(drawn >> 8) % count, up = drawn >> 31 ? 1 : count - 1;
  for (int k = 0, at = first; k < count && !failed; ++k, at = (at + up) % count) enter(from + at);
}

void run_group(int size) {
  enter_all(0, size);
  while (!failed) {
    bool moved = false;
    for (int first = 0; first < size && !failed; first += WIDTH) {
      const int end = first + WIDTH < size ? first + WIDTH : size;
      while (!failed && alike(first, end, SIMD)) {
        moved = true;
        enter_all(first, end);
      }
    }
    if (failed || alike(0, size, DONE)) break;
    if (alike(0, size, BARRIER)) {
      passed_device += barrier_flags & 1;
      passed += barrier_flags >> 1 & 1;
      enter_all(0, size);
    } else if (!moved) {
      diverged(size);
    }
  }
  if (failed)
    for (Fibre& f : fibres) f.started = false, f.turn = 0;  // the next launch starts new fibres
}

// ---- memory --------------------------------------------------------------------------------------------------

bool ordered(uint32_t other, uint32_t when, uint32_t now, bool device) {
  if (other == MANY) return when < now && (!device || when >= group_begin);
  const bool together = !device || (other - 1) / (uint32_t)part->group == ids.group;
  return together && when < now;
}

void touch(Access& a, uint32_t me, bool write, bool device, uint32_t now, const char* what, int64_t at) {
  if (me == ATOMIC && (a.writer == 0 || a.writer == ATOMIC) && a.reader == 0) {
    a.writer = ATOMIC, a.wrote = now;
    return;
  }
  if (a.writer && a.writer != me && !(device && collides && write) && !ordered(a.writer, a.wrote, now, device))
    fail("race: %s byte %ld of %s, which thread %ld wrote with no barrier between", write ? "writes" : "reads", (long)at, what,
         a.writer == ATOMIC ? -1L : (long)a.writer - 1);
  if (write && a.reader && a.reader != me && !ordered(a.reader, a.read, now, device))
    fail("race: writes byte %ld of %s, which thread %ld read with no barrier between", (long)at, what,
         a.reader == MANY ? -1L : (long)a.reader - 1);
  if (write && a.writer == me && a.wrote == now && !a.reader && !collides) fail("writes byte %ld of %s twice, which nobody read", (long)at, what);
  if (write) a.writer = me, a.wrote = now, a.reader = 0;
  else if (device && a.reader && a.reader != me && (a.reader == MANY ? a.read < group_begin : (a.reader - 1) / (uint32_t)part->group != ids.group))
    a.reader = MANY, a.read = 0;  // readers are in different groups, which no barrier orders
  else a.reader = a.reader && a.reader != me && a.read == now ? MANY : me, a.read = now;
}

void access(const void* pointer, uint32_t bytes, bool write, bool atomic = false) {
  const uintptr_t at = (uintptr_t)pointer;
  if (const size_t k = at - (uintptr_t)stacks; k < STACK * MOST_THREADS) {
    if (write) memset(unset + k, 0, bytes);
    else if (memchr(unset + k, 1, bytes)) fail("uninitialised: reads an element of an array of a thread, which it did not write");
    return;
  }
  if (at - (uintptr_t)given < MOST_POINTERS * sizeof(void*)) return;  // the array of pointers that several buffers share
  if (at - (uintptr_t)shared_memory < sizeof(shared_memory)) {
    const size_t k = at - (uintptr_t)shared_memory;
    for (size_t j = k; j < k + bytes; ++j) {
      const int owner = shared_owner[j];
      if (!owner || owner != shared_owner[k] || atomic)
        fail("out of bounds: %s threadgroup memory that belongs to no array", write ? "writes" : "reads");
      if (!write && !shared_seen[j].writer)
        fail("uninitialised: reads byte %ld of threadgroup array %d, which nobody wrote", (long)(j - arrays[owner - 1].offset),
             owner - 1);
      touch(shared_seen[j], (uint32_t)current + 1, write, false, passed, "threadgroup memory", (int64_t)(j - arrays[owner - 1].offset));
    }
    return;
  }
  for (int tries = 0, k = last_region; tries < region_count; ++tries, k = k + 1 == region_count ? 0 : k + 1) {
    Region& r = regions[k];
    // An atomic access to a word that contains a small element may extend beyond the buffer.
    const uintptr_t around = atomic ? bytes - 1 : 0;
    if (at + around < r.from || at >= r.to) continue;
    last_region = k;
    if (at + bytes > r.to + around) break;
    if (at % (bytes < 16 ? bytes : 16)) fail("misaligned: an access of %u bytes at a multiple of %u", bytes, (unsigned)(at & -at));
    if (write && !r.written) fail("writes a buffer that it only reads");
    if (!r.seen) return;
    const uint32_t me = atomic ? ATOMIC : ids.group * (uint32_t)part->group + (uint32_t)current + 1;
    for (uint32_t j = 0; j < bytes; j += (uint32_t)r.granule)
      if (at + j >= r.from && at + j < r.to) touch(r.seen[(at - r.from + j) / (uint32_t)r.granule], me, write, true, passed_device, "a buffer", (int64_t)(at - r.from + j));
    return;
  }
  int64_t nearest = INT64_MAX, which = 0;
  for (int k = 0; k < region_count; ++k) {
    const int64_t off = at >= regions[k].to ? (int64_t)(at - regions[k].to) + 1 : -(int64_t)(regions[k].from - at);
    if (llabs(off) < llabs(nearest)) nearest = off, which = k;
  }
  fail("out of bounds: %s %u bytes %ld beside memory %ld of its buffers", write ? "writes" : "reads", bytes, (long)nearest, (long)which);
}

// Copies the buffers, with the same alignment and unused memory around each copy. Buffers that overlap share a copy.
void take(const Buffer* buffers, int count, void** arguments) {
  region_count = last_region = 0;
  size_t watched = 0;
  for (int k = 0; k < count; ++k) watched += (size_t)(buffers[k].end - buffers[k].first);
  struct Span { char *from, *to; bool written; int32_t size; } spans[MOST_POINTERS];
  int n = 0;
  for (int k = 0; k < count; ++k) {
    const Buffer& b = buffers[k];
    Span s = {(char*)b.pointer + b.first, (char*)b.pointer + b.end, b.written != 0, b.itemsize};
    for (int j = 0; j < n;) {
      if (spans[j].from < s.to && s.from < spans[j].to) {
        s = {s.from < spans[j].from ? s.from : spans[j].from, s.to > spans[j].to ? s.to : spans[j].to,
             s.written || spans[j].written, s.size < spans[j].size ? s.size : spans[j].size};
        spans[j] = spans[--n];
        j = 0;
      } else ++j;
    }
    spans[n++] = s;
  }
  for (int k = 0; k < n; ++k) {
    const Span& s = spans[k];
    const size_t bytes = (size_t)(s.to - s.from);
    Region r;
    r.memory = (char*)malloc(bytes + 4 * ROOM);
    char* to = r.memory + ROOM;
    to += ((uintptr_t)s.from - (uintptr_t)to) % ROOM;
    if (bytes) memcpy(to, s.from, bytes);
    r.from = (uintptr_t)to, r.to = r.from + bytes, r.original = s.from, r.written = s.written;
    r.granule = s.size < 4 ? s.size : 4;
    r.seen = s.written && watched < WATCHED ? (Access*)calloc(bytes / (size_t)r.granule + 4, sizeof(Access)) : nullptr;
    regions[region_count++] = r;
  }
  for (int k = 0; k < count; ++k) {
    arguments[k] = buffers[k].pointer;
    for (int j = 0; j < region_count; ++j) {
      const Region& r = regions[j];
      char *from = (char*)buffers[k].pointer + buffers[k].first, *to = (char*)buffers[k].pointer + buffers[k].end;
      if (from >= r.original && to <= r.original + (r.to - r.from) && from < to)
        arguments[k] = (char*)r.from + ((char*)buffers[k].pointer - r.original);
    }
  }
}

void give_back() {
  for (int k = 0; k < region_count; ++k) {
    Region& r = regions[k];
    if (r.written && !failed) memcpy(r.original, (void*)r.from, r.to - r.from);
    free(r.memory);
    free(r.seen);
  }
  region_count = 0;
}

void dispatch(const Part& p, void** arguments) {
  part = &p, given = arguments;
  current = 0, ids.group = 0;
  if (_setjmp(scheduler)) return;  // an error was found before a thread ran
  if (p.limit <= 0) fail("no [[max_total_threads_per_threadgroup]]: a group that is too large would be skipped silently");
  if (p.group > p.limit || p.limit > MOST_THREADS)
    fail("a group of %d threads, of a kernel for %d (%d at most): it would be skipped silently", p.group, p.limit, MOST_THREADS);
  for (int k = 0; k < region_count; ++k)
    if (regions[k].seen)
      memset(regions[k].seen, 0, ((regions[k].to - regions[k].from) / (size_t)regions[k].granule + 4) * sizeof(Access));
  memset(shared_owner, 0, sizeof(shared_owner));
  memset(arrays, 0, sizeof(arrays));
  shared_used = GAP, shared_bytes = 0;
  passed_device = 0;
  const int64_t groups = (p.threads + p.group - 1) / p.group;
  ids.size = (uint32_t)p.group, ids.groups = (uint32_t)groups, ids.threads = (uint32_t)p.threads;
  for (int64_t g = 0; g < groups && !failed; ++g) {
    ids.group = (uint32_t)g;
    passed = 0;
    group_begin = ++passed_device;
    memset(shared_seen, 0, shared_used * sizeof(Access));
    const int64_t left = p.threads - g * p.group;
    run_group((int)(left < p.group ? left : p.group));
  }
}

}  // namespace

extern "C" {

// ---- called by kernels ---------------------------------------------------------------------------------------

void flm_barrier(int flags, int line) {
  barrier_flags = flags;
  wait(BARRIER, line);
}

const char* flm_simd(const void* mine, uint32_t bytes, int line) {
  const int group = current / WIDTH, turn = fibres[current].turn ^= 1;
  memcpy(box[group][turn][current % WIDTH], mine, bytes);
  wait(SIMD, line);
  return box[group][turn][0];
}

uint32_t flm_lane() { return (uint32_t)current % WIDTH; }

void flm_no_lane(int lane) { fail("asks lane %d of its simdgroup, which has %d", lane, WIDTH); }

void flm_atomic(const void* place, uint32_t bytes) { access(place, bytes, true, true); }

void* flm_shared(int number, uint32_t bytes) {
  if (number >= ARRAYS) fail("more than %d threadgroup arrays", ARRAYS);
  Array& a = arrays[number];
  if (!a.bytes) {
    shared_bytes += (bytes + 15) / 16 * 16;
    if (shared_bytes > SHARED) fail("%u bytes of threadgroup memory: there are %zu", shared_bytes, SHARED);
    a.offset = shared_used, a.bytes = bytes;
    memset(shared_owner + a.offset, number + 1, bytes);
    memset(shared_seen + a.offset, 0, bytes * sizeof(Access));
    shared_used = (uint32_t)((a.offset + bytes + GAP + 15) / 16 * 16);
  }
  return shared_memory + a.offset;
}

void flm_unset(const void* array, uint32_t bytes) { memset(unset + ((char*)array - stacks), 1, bytes); }

// ---- called by the wrapper, and by Python ----------------------------------------------------------------------

// Returns the fault that a kernel reported, 0 if there is none, or -1 if the kernel itself has an error (flm_message).
int64_t flm_launch(const Buffer* buffers, int count, const Part* parts, int part_count, int collisions) {
  std::lock_guard<std::mutex> lock(one_launch);
  if (!stacks) {
    stacks = (char*)mmap(nullptr, 2 * STACK * MOST_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unset = stacks + STACK * MOST_THREADS;
  }
  void* arguments[MOST_POINTERS];
  failed = false, collides = collisions != 0;
  take(buffers, count, arguments);
  for (int k = 0; k < part_count && !failed; ++k)
    if (parts[k].threads > 0) dispatch(parts[k], arguments);
  give_back();
  const int32_t* record = (const int32_t*)buffers[count - 1].pointer;
  int64_t bad = 0;
  if (record[0]) memcpy(&bad, record + 2, sizeof(bad));
  return failed ? -1 : bad;
}

const char* flm_message() { return message; }

// ---- g++'s instrumentation -------------------------------------------------------------------------------------

struct Place { const char* file; uint32_t line, column; };
void __ubsan_handle_out_of_bounds(const Place* place, uint64_t index) {
  fail("out of bounds: element %ld of an array of a thread (line %u)", (long)index, place->line);
}
void __tsan_init() {}
#define ACCESS(n)                                                   \
  void __tsan_read##n(void* p) { access(p, n, false); }             \
  void __tsan_write##n(void* p) { access(p, n, true); }             \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false); }   \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void* p, size_t n) { for (size_t k = 0; k < n; ++k) access((char*)p + k, 1, false); }
void __tsan_write_range(void* p, size_t n) { for (size_t k = 0; k < n; ++k) access((char*)p + k, 1, true); }
}

// What the wrapper of a kernel hands to the runner (runner.cpp).
#pragma once
namespace flm {
struct Ids { uint lane, group, item, size, groups, threads; };
struct Buffer { void* pointer; int64_t first, end; int written_size, written; };
struct Part { void (*run)(void** arguments, const Ids* ids); const char* name; int64_t threads; int group, limit; };
}  // namespace flm
extern "C" int64_t flm_launch(const flm::Buffer* buffers, int count, const flm::Part* parts, int parts_count, int collides);

// The native core of the device "flambeau": memory, streams, events, generators and views, as PyTorch asks for them.
//
// PyTorch sees the backend PrivateUse1. It calls a driver, a table of functions that Python fills, but only for slow
// operations: new memory, copies, waiting. A storage's address is only a name for device memory. It is in a range of
// addresses that cannot be read or written, so that a stray access crashes where it happens.
//
// Functions of the driver take the interpreter's lock. They are never called while a lock of this file is held, because
// another thread may hold the interpreter's lock and wait for ours.

#define NDEBUG  // as PyTorch is built: the layout of some of its classes depends on it

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "known.h"

// From libtorch_python; its own headers take long to compile.
struct _object;
_object* THPGenerator_Wrap(const at::Generator& generator);

namespace {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;
constexpr StreamId kPooledStreams = 32;  // of each device, given out in turn, because queues have a cost
constexpr StreamId kAllStreams = -1;     // for the driver: the whole device, or the host

// ---------------------------------------------------------------------------------------------------- the driver

enum Status : int { kFine = 0, kFailed = 1, kFull = 2, kIndex = 3 };

struct Driver {
  int devices;
  int (*alloc)(int device, uint64_t address, uint64_t bytes);
  int (*free)(int device, uint64_t address);
  int (*copy)(int device, int64_t stream, uint64_t to, uint64_t from, uint64_t bytes);
  int (*synchronise)(int device, int64_t stream);
  int (*idle)(int device, int64_t stream, int* answer);
  int (*record)(int device, int64_t stream, int64_t event);
  int (*query)(int64_t event, int* answer);
  int (*wait)(int64_t event, int device, int64_t stream);
  int (*elapsed)(int64_t from, int64_t to, double* milliseconds);
  int (*forget)(int64_t event);
  int (*memory)(int device, uint64_t* free, uint64_t* total);
  int (*complaint)(char* text, uint64_t size);
};

Driver driver{};
// Tensors may outlive the interpreter, and with it the driver's functions.
std::atomic<bool> stopped{false};

std::string complaint() {
  std::array<char, 1024> text{};
  driver.complaint(text.data(), text.size() - 1);
  return text.data();
}

template <class Function, class... Args>
int ask(Function function, Args... args) {
  TORCH_CHECK(!stopped, "flambeau: the interpreter has ended");
  int status = function(args...);
  TORCH_CHECK_INDEX(status != kIndex, complaint());
  TORCH_CHECK(status != kFailed, complaint());
  return status;
}

void check_index(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < driver.devices, "flambeau:", int(device), " does not exist: there ",
              driver.devices == 1 ? "is " : "are ", driver.devices, driver.devices == 1 ? " device" : " devices");
}

struct Current {
  DeviceIndex device = 0;
  std::array<StreamId, kMostDevices> streams{};
};
thread_local Current current;

DeviceIndex index_of(Device device) { return device.index() < 0 ? current.device : device.index(); }

// Makes another device the current one within a scope.
class On {
 public:
  explicit On(std::optional<Device> device) {
    if (!device.has_value() || device->index() < 0) return;
    check_index(device->index());
    current.device = device->index();
  }
  ~On() { current.device = before_; }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  DeviceIndex before_ = current.device;
};

std::atomic<int64_t> last_event{0};

int64_t record(DeviceIndex device, StreamId stream, int64_t event = 0) {
  if (event == 0) event = ++last_event;
  ask(driver.record, int(device), stream, event);
  return event;
}

bool is_done(int64_t event) {
  int answer = 0;
  ask(driver.query, event, &answer);
  return answer != 0;
}

// ---------------------------------------------------------------------------------------------------- the memory

// Addresses that name device memory: the process reserves them, but cannot access them.
class Addresses {
 public:
  // Returns 0 if none are left.
  uint64_t take(size_t bytes) {
    auto& again = given_back_[bytes];
    if (!again.empty()) {
      uint64_t address = again.back();
      again.pop_back();
      return address;
    }
    if (next_ == 0) reserve();
    if (bytes > end_ - next_ - 2 * kGap) return 0;
    uint64_t address = next_;
    next_ += (bytes + kGap - 1) / kGap * kGap + kGap;
    return address;
  }

  void give_back(uint64_t address, size_t bytes) { given_back_[bytes].push_back(address); }

 private:
  static constexpr size_t kRange = size_t(1) << 43, kGap = 4096;

  void reserve() {
    void* range = mmap(nullptr, kRange, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(range != MAP_FAILED, "flambeau: the system gives no range of addresses: ", std::strerror(errno));
    next_ = reinterpret_cast<uint64_t>(range);
    end_ = next_ + kRange;
  }

  uint64_t next_ = 0, end_ = 0;
  std::unordered_map<size_t, std::vector<uint64_t>> given_back_;
};

struct Block {
  uint64_t address;
  size_t size, requested;
  DeviceIndex device;
  StreamId stream;                       // memory is reused in this stream's order
  std::unordered_set<StreamId> users;    // other streams that use it
  std::vector<int64_t> events;           // of those streams, recorded when it was freed
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr size_t kSmallest = 512, kLarge = size_t(1) << 20;

// Rounds sizes, so that the driver is asked for few different ones.
size_t rounded(size_t bytes) {
  if (bytes > kLarge) return (bytes + kLarge - 1) / kLarge * kLarge;
  size_t size = kSmallest;
  while (size < bytes) size *= 2;
  return size;
}

void count(StatArray& stats, int64_t change, size_t size) {
  for (auto type : {StatType::AGGREGATE, size > kLarge ? StatType::LARGE_POOL : StatType::SMALL_POOL}) {
    auto& stat = stats[size_t(type)];
    change < 0 ? stat.decrease(size_t(-change)) : stat.increase(size_t(change));
  }
}

// The caching allocator. Freed memory is kept for the stream that it was allocated on. If another stream uses it too
// (`recordStream`), it is only reused after the work that was enqueued on that stream when it was freed.
class Memory final : public c10::DeviceAllocator {
 public:
  DataPtr allocate(size_t bytes) override {
    DeviceIndex device = current.device;
    check_index(device);
    if (bytes == 0) return {nullptr, nullptr, &release, Device(kType, device)};
    StreamId stream = current.streams[size_t(device)];
    size_t size = rounded(bytes);
    settle(false);
    Block* block = cached(device, stream, size);
    if (block == nullptr) block = fresh(device, stream, size);
    if (block == nullptr) {
      settle(true);
      emptyCache({0, 0});
      block = fresh(device, stream, size);
      std::lock_guard<std::mutex> hold(lock_);
      ++stats_[size_t(device)].num_alloc_retries;
      if (block == nullptr) ++stats_[size_t(device)].num_ooms;
    }
    if (block == nullptr) refuse(device, bytes);
    std::lock_guard<std::mutex> hold(lock_);
    block->requested = bytes;
    live_.emplace(block->address, block);
    use(*block, 1);
    auto* data = reinterpret_cast<void*>(block->address);
    return {data, data, &release, Device(kType, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    DeviceIndex device = device_of(to);
    ask(driver.copy, int(device), current.streams[size_t(device)], reinterpret_cast<uint64_t>(to),
        reinterpret_cast<uint64_t>(from), uint64_t(bytes));
  }

  bool initialized() override { return driver.devices > 0; }

  void emptyCache(c10::MempoolId_t) override {
    std::vector<Block*> unused;
    {
      std::lock_guard<std::mutex> hold(lock_);
      for (auto& [place, pool] : pools_)
        for (auto& [size, block] : pool) unused.push_back(block);
      pools_.clear();
    }
    for (Block* block : unused) {
      ask(driver.free, int(block->device), block->address);
      std::lock_guard<std::mutex> hold(lock_);
      Stats& stats = stats_[size_t(block->device)];
      count(stats.segment, -1, block->size);
      count(stats.reserved_bytes, -int64_t(block->size), block->size);
      ++stats.num_device_free;
      addresses_.give_back(block->address, block->size);
      delete block;
    }
  }

  void recordStream(const DataPtr& data, Stream stream) override {
    std::lock_guard<std::mutex> hold(lock_);
    auto found = live_.find(reinterpret_cast<uint64_t>(data.get()));
    if (found != live_.end() && found->second->stream != stream.id()) found->second->users.insert(stream.id());
  }

  Stats getDeviceStats(DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> hold(lock_);
    return stats_[size_t(device)];
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> hold(lock_);
    each(stats_[size_t(device)], [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> hold(lock_);
    each(stats_[size_t(device)], [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    check_index(device);
    uint64_t free = 0, total = 0;
    ask(driver.memory, int(device), &free, &total);
    return {free, total};
  }

  DeviceIndex device_of(const void* data) const {
    std::lock_guard<std::mutex> hold(lock_);
    auto address = reinterpret_cast<uint64_t>(data);
    auto after = live_.upper_bound(address);
    if (after != live_.begin()) {
      const Block& block = *std::prev(after)->second;
      if (address < block.address + block.size) return block.device;
    }
    TORCH_CHECK(false, "flambeau: ", data, " is not in memory of the device");
  }

 private:
  using Place = std::pair<DeviceIndex, StreamId>;

  static void release(void* data);

  static void each(Stats& stats, void (*change)(c10::CachingAllocator::Stat&)) {
    for (StatArray* array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
                             &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      std::for_each(array->begin(), array->end(), change);
  }

  void use(const Block& block, int sign) {
    Stats& stats = stats_[size_t(block.device)];
    count(stats.allocation, sign, block.size);
    count(stats.active, sign, block.size);
    count(stats.allocated_bytes, sign * int64_t(block.size), block.size);
    count(stats.active_bytes, sign * int64_t(block.size), block.size);
    count(stats.requested_bytes, sign * int64_t(block.requested), block.size);
  }

  Block* cached(DeviceIndex device, StreamId stream, size_t size) {
    std::lock_guard<std::mutex> hold(lock_);
    auto pool = pools_.find({device, stream});
    if (pool == pools_.end()) return nullptr;
    auto found = pool->second.lower_bound(size);
    if (found == pool->second.end() || found->first > size + size / 4) return nullptr;  // most of it would be wasted
    found = std::prev(pool->second.upper_bound(found->first));  // the one freed last may still be in the caches
    Block* block = found->second;
    pool->second.erase(found);
    return block;
  }

  // Returns null if the device is full.
  Block* fresh(DeviceIndex device, StreamId stream, size_t size) {
    uint64_t address;
    {
      std::lock_guard<std::mutex> hold(lock_);
      address = addresses_.take(size);
      if (address == 0) return nullptr;
    }
    TORCH_CHECK(!stopped, "flambeau: the interpreter has ended");
    int status = driver.alloc(int(device), address, uint64_t(size));
    std::string said = status == kFailed ? complaint() : "";
    std::lock_guard<std::mutex> hold(lock_);
    if (status != kFine) {
      addresses_.give_back(address, size);
      TORCH_CHECK(status == kFull, said);
      return nullptr;
    }
    Stats& stats = stats_[size_t(device)];
    count(stats.segment, 1, size);
    count(stats.reserved_bytes, int64_t(size), size);
    ++stats.num_device_alloc;
    return new Block{address, size, 0, device, stream, {}, {}};
  }

  [[noreturn]] void refuse(DeviceIndex device, size_t bytes) {
    std::string reason = complaint();
    Stats stats = getDeviceStats(device);
    auto now = [](const StatArray& array) { return array[size_t(StatType::AGGREGATE)].current; };
    TORCH_CHECK_WITH(OutOfMemoryError, false, "flambeau:", int(device), " is out of memory: ", bytes,
                     " bytes were asked for, ", now(stats.allocated_bytes), " are in use and ",
                     now(stats.reserved_bytes), " reserved. ", reason);
  }

  // Returns memory to its pool if other streams are done with it. `wait`: waits for them.
  void settle(bool wait) {
    std::vector<Block*> blocks;
    {
      std::lock_guard<std::mutex> hold(lock_);
      blocks.swap(pending_);
    }
    while (!blocks.empty()) {
      Block* block = blocks.back();
      try {
        finish(*block, wait);
      } catch (...) {
        std::lock_guard<std::mutex> hold(lock_);
        pending_.insert(pending_.end(), blocks.begin(), blocks.end());
        throw;
      }
      blocks.pop_back();
      std::lock_guard<std::mutex> hold(lock_);
      if (block->events.empty()) pools_[{block->device, block->stream}].emplace(block->size, block);
      else pending_.push_back(block);
    }
  }

  static void finish(Block& block, bool wait) {
    auto& events = block.events;
    while (!events.empty() && (wait || is_done(events.back()))) {
      if (wait) ask(driver.wait, events.back(), int(block.device), kAllStreams);
      ask(driver.forget, events.back());
      events.pop_back();
    }
  }

  mutable std::mutex lock_;
  Addresses addresses_;
  std::map<uint64_t, Block*> live_;
  std::map<Place, std::multimap<size_t, Block*>> pools_;
  std::vector<Block*> pending_;
  std::array<Stats, kMostDevices> stats_;
};

Memory& memory() {
  static auto* only = new Memory;  // never destroyed: tensors may be freed after everything else
  return *only;
}

void Memory::release(void* data) {
  if (data == nullptr) return;
  Memory& m = memory();
  std::unique_lock<std::mutex> hold(m.lock_);
  auto found = m.live_.find(reinterpret_cast<uint64_t>(data));
  if (found == m.live_.end()) return;
  Block* block = found->second;
  m.live_.erase(found);
  m.use(*block, -1);
  if (block->users.empty()) {
    m.pools_[{block->device, block->stream}].emplace(block->size, block);
    return;
  }
  hold.unlock();
  if (stopped) return;  // the memory is never used again
  try {
    for (StreamId user : block->users) block->events.push_back(record(block->device, user));
  } catch (const std::exception& error) {
    TORCH_WARN("flambeau: ", block->size, " bytes are lost, since their use cannot be followed: ", error.what());
    return;
  }
  block->users.clear();
  hold.lock();
  m.pending_.push_back(block);
}

// Pinned memory of the host, for asynchronous copies. The caller of such a copy keeps its tensor alive.
class Pinned final : public at::HostAllocator {
 public:
  DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::kCPU};
    void* data = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "flambeau: no ", bytes, " bytes of pinned memory");
    std::lock_guard<std::mutex> hold(lock_);
    ends_[reinterpret_cast<uint64_t>(data)] = reinterpret_cast<uint64_t>(data) + bytes;
    return {data, data, &release, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  // Nothing is cached, so there is nothing to wait for, to empty or to count.
  bool record_event(void*, void*, Stream) override { return false; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool owns(const void* data) const {
    std::lock_guard<std::mutex> hold(lock_);
    auto address = reinterpret_cast<uint64_t>(data);
    auto after = ends_.upper_bound(address);
    return after != ends_.begin() && address < std::prev(after)->second;
  }

 private:
  static constexpr size_t kPage = 4096;
  static void release(void* data);
  mutable std::mutex lock_;
  std::map<uint64_t, uint64_t> ends_;
};

Pinned& pinned() {
  static auto* only = new Pinned;
  return *only;
}

void Pinned::release(void* data) {
  if (data == nullptr) return;
  {
    std::lock_guard<std::mutex> hold(pinned().lock_);
    pinned().ends_.erase(reinterpret_cast<uint64_t>(data));
  }
  std::free(data);
}

// ------------------------------------------------------------------------------------------- streams and events

std::atomic<uint64_t> streams_taken{0};

int64_t id(const void* event) { return reinterpret_cast<int64_t>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(driver.devices); }

  Device getDevice() const override { return {kType, current.device}; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    if (device.index() < 0) return;
    check_index(device.index());
    current.device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current.device = device.index();
  }

#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }  // all dtypes
#endif

  static Stream stream(DeviceIndex device, StreamId id) {
    check_index(device);
    return Stream(Stream::UNSAFE, Device(kType, device), id);
  }
  Stream getStream(Device device) const override {
    DeviceIndex index = index_of(device);
    check_index(index);
    return stream(index, current.streams[size_t(index)]);
  }
  Stream getDefaultStream(Device device) const override { return stream(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    return stream(index_of(device), StreamId(streams_taken++ % kPooledStreams) + 1);
  }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    current.streams[size_t(next.device_index())] = next.id();
    return before;
  }
  bool queryStream(const Stream& s) const override {
    int answer = 0;
    ask(driver.idle, int(s.device_index()), s.id(), &answer);
    return answer != 0;
  }
  void synchronizeStream(const Stream& s) const override { ask(driver.synchronise, int(s.device_index()), s.id()); }
  void synchronizeDevice(const DeviceIndex device) const override {
    ask(driver.synchronise, int(device < 0 ? current.device : device), kAllStreams);
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& s) const override { memory().recordStream(data, s); }

  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(::record(s.device_index(), s.id(), id(*event)));
  }
  void block(void* event, const Stream& s) const override {
    if (event != nullptr) ask(driver.wait, id(event), int(s.device_index()), s.id());
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_done(id(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) ask(driver.wait, id(event), int(current.device), kAllStreams);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "flambeau: both events must be recorded before time is measured");
    double milliseconds = 0;
    ask(driver.elapsed, id(from), id(to), &milliseconds);
    return milliseconds;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event != nullptr && !stopped) driver.forget(id(event));
  }
};

// -------------------------------------------------------------------------------------------------- the profiler

// The device time of an operator: between two events on its stream, before and after it.
struct Times final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;

  void record(DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    DeviceIndex here = current.device;
    if (device != nullptr) *device = here;
    if (cpu_ns != nullptr) *cpu_ns = c10::getTime();
    auto* number = reinterpret_cast<void*>(::record(here, current.streams[size_t(here)]));
    *event = Event(number, [](void* given) { Guard().destroyEvent(given, 0); });
  }
  // In microseconds.
  float elapsed(const Event* from, const Event* to) const override {
    Guard().synchronizeEvent(to->get());
    return float(Guard().elapsedTime(from->get(), to->get(), 0) * 1e3);
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override {
    On before(std::nullopt);
    for (int device = 0; device < driver.devices; ++device) {
      current.device = DeviceIndex(device);
      op(device);
    }
  }
  void synchronize() const override { Guard().synchronizeDevice(current.device); }
};

// ----------------------------------------------------------------------------------------------- random numbers

// A generator's state: the seed, and how many numbers were drawn. Each number is a function of both.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state(at::detail::empty_cpu({sizeof(State)}, at::kByte));
    State words{seed_, offset_};
    std::memcpy(state.mutable_data_ptr(), &words, sizeof words);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == at::kByte && state.is_contiguous() &&
                    state.numel() == int64_t(sizeof(State)),
                "the state of a flambeau generator is ", sizeof(State), " bytes on the CPU");
    State words;
    std::memcpy(&words, state.data(), sizeof words);
    std::tie(seed_, offset_) = std::pair(words.seed, words.offset);
  }

 private:
  struct State {
    uint64_t seed, offset;
  };

  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < driver.devices; ++i) made->push_back(at::make_generator<Generator>(DeviceIndex(i)));
    return made;
  }();
  check_index(device);
  return (*all)[size_t(device)];
}

// --------------------------------------------------------------------------------------------------- the hooks

void resize_storage(const c10::Storage& storage, size_t bytes) {
  On on(storage.device());
  DataPtr data = memory().allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes())) memory().copy_data(data.get(), storage.data(), kept);
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return driver.devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }

  DeviceIndex deviceCount() const override { return DeviceIndex(driver.devices); }
  DeviceIndex getCurrentDevice() const override { return current.device; }
  void setCurrentDevice(DeviceIndex device) const override {
    check_index(device);
    current.device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = current.device;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? current.device : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    DeviceIndex index = device < 0 ? current.device : device;
    check_index(index);
    return at::make_generator<Generator>(index);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  bool isPinnedPtr(const void* data) const override { return pinned().owns(data); }
  Device getDeviceFromPtr(void* data) const override { return {kType, memory().device_of(data)}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

// ----------------------------------------------------------------------------------------------- the operators

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "flambeau: only strided tensors, not ", *layout);
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
}

// With deterministic algorithms, new memory is filled, so that it is the same in every run. Memory that this package
// allocates for itself (`Unseen` in gate.h) is not: it is written before it is read.
template <class Fill>
void fill_unwritten(Fill&& fill) {
  static thread_local bool filling = false;  // the kernel that fills may allocate memory itself
  const auto& context = at::globalContext();
  if (!context.deterministicAlgorithms() || !context.deterministicFillUninitializedMemory() || filling ||
      at::impl::PythonTorchFunctionTLS::get_disabled_state() == at::impl::TorchFunctionDisabledState::ALL_DISABLED)
    return;
  struct Inside {
    Inside() { filling = true; }
    ~Inside() { filling = false; }
  } inside;
  fill();
}

Tensor unwritten(at::TensorBase made) {
  Tensor out(std::move(made));
  fill_unwritten([&] { at::native::fill_empty_deterministic_(out); });
  return out;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_options(layout, pin);
  On on(device);
  return unwritten(at::detail::empty_generic(size, &memory(), kKeys, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  On on(device);
  return unwritten(at::detail::empty_strided_generic(size, stride, &memory(), kKeys, c10::dtype_or_default(dtype)));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytesContiguous(size, impl->itemsize(), size_t(impl->storage_offset()));
  int64_t before = int64_t(impl->storage().nbytes());
  impl->set_sizes_contiguous(size);
  if (impl->numel() > 0 && needed > impl->storage().nbytes()) resize_storage(impl->storage(), needed);
  if (format.has_value()) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "resize_: there is no format to preserve");
    impl->empty_tensor_restride(*format);
  }
  fill_unwritten([&] { at::native::fill_resize_deterministic_(self, before); });
  return self;
}

// What the host knows about a tensor's elements also holds for a view of all of them.
Tensor shared(const Tensor& self, Tensor view) {
  auto meta = self.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  if (meta != nullptr) view.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
  return view;
}

Tensor view(const Tensor& self, at::IntArrayRef size) { return shared(self, at::native::view(self, size)); }

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return shared(self, at::native::_reshape_alias(self, size, stride));
}

// The dimensions longer than one, in the order of their strides.
std::vector<std::pair<int64_t, int64_t>> steps(at::IntArrayRef size, at::IntArrayRef stride) {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (size_t i = 0; i < size.size(); ++i)
    if (size[i] != 1) found.emplace_back(stride[i], size[i]);
  std::sort(found.begin(), found.end());
  return found;
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  Tensor made = at::native::as_strided_tensorimpl(self, size, stride, offset);
  if (self.unsafeGetTensorImpl()->get_backend_meta() == nullptr || made.storage_offset() != self.storage_offset() ||
      steps(made.sizes(), made.strides()) != steps(self.sizes(), self.strides()))
    return made;
  return shared(self, std::move(made));
}

// Whether `tensor.data = from` keeps the tensor and replaces its memory, as it does between the CPU and CUDA. Sparse
// tensors only accept their own kind.
bool can_take_over(const Tensor& self, const Tensor& from) {
  static const Tensor& host = *new Tensor(at::detail::empty_cpu({0}, at::kFloat));
  auto dense = [](const Tensor& t) {
    return (t.device().type() == kType && t.layout() == at::kStrided && t.key_set().has(c10::DispatchKey::Dense)) ||
           host.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(t.key_set());
  };
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set()) || (dense(self) && dense(from));
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  // ATen's own function would grow a storage that is too small with a copy on the host.
  size_t needed = stride.empty()
      ? at::detail::computeStorageNbytesContiguous(size, self.itemsize(), size_t(offset))
      : at::detail::computeStorageNbytes(size, stride, self.itemsize(), size_t(offset));
  if (c10::multiply_integers(size) > 0 && needed > storage.nbytes()) resize_storage(storage, needed);
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t elements = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

Tensor& set_nothing(Tensor& self) {
  On on(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &memory(), true), 0, {0}, {1});
}

void record_stream(Tensor& self, Stream stream) { memory().recordStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(can_take_over));
}

// ----------------------------------------------------------------------------------------------- mixed precision

// Autocast has the policies of CUDA, from PyTorch's lists. Operators that CUDA refuses are in none of them. Fourier
// transforms run on the CPU, and have its policy, because they do not support bfloat16.
namespace mixed {

using namespace at;  // the lists need it

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_BY_OPTION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

#define FOR_FOURIER(_)                                                                           \
  _(fft_fft) _(fft_ifft) _(fft_fft2) _(fft_ifft2) _(fft_fftn) _(fft_ifftn) _(fft_rfft) _(fft_irfft) \
  _(fft_rfft2) _(fft_irfft2) _(fft_rfftn) _(fft_irfftn) _(fft_hfft) _(fft_ihfft)

Tensor refused(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
              "Use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which are safe, "
              "on what goes into the sigmoid.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  FOR_FOURIER(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_BY_OPTION)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
  m.impl("binary_cross_entropy", TORCH_FN(refused));
}

}  // namespace mixed
}  // namespace

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#include "device_profiler.h"
#else  // this torch cannot record ranges of external devices
namespace ranges {
void register_profiler() {}
}  // namespace ranges
#endif

// --------------------------------------------------------------------------------------------------- backward

namespace {

// Autograd's engine has a thread for each device, started at the first backward of the process. If that was before this
// device was registered, there is none for it, and the engine does not look again.
struct Threads : torch::autograd::Engine {
  static void add(int devices) {
    auto& engine = torch::autograd::Engine::get_default_engine();
    if (!(engine.*(&Threads::thread_pool_shared_))) return;  // not started yet: it will count the devices then
    auto& queues = engine.*(&Threads::device_ready_queues_);
    while (queues.size() < size_t(devices)) {
      queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
      std::thread(&torch::autograd::Engine::thread_init, &engine, int(queues.size()) - 1, queues.back(), true).detach();
    }
  }
};

}  // namespace

// -------------------------------------------------------------------------------------------------- for Python

extern "C" {

void flambeau_start(const Driver* given) {
  driver = *given;
  driver.devices = std::min(driver.devices, kMostDevices);
  c10::SetAllocator(kType, &memory(), 1);
  c10::impl::registerDeviceGuard(kType, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, &pinned(), 1);
  torch::profiler::impl::registerPrivateUse1Methods(new Times);
  ranges::register_profiler();
  Threads::add(driver.devices);
}

void flambeau_stop() { stopped = true; }

int64_t flambeau_stream(int device) { return current.streams[size_t(device)]; }

// Notes the smallest and largest of a tensor's integers, which were just copied from the host.
void flambeau_know(void* tensor, int64_t least, int64_t most) {
  know(*static_cast<c10::TensorImpl*>(tensor), least, most);
}

// Called with the interpreter's lock.
_object* flambeau_generator(int device) { return THPGenerator_Wrap(default_generator(DeviceIndex(device))); }
}

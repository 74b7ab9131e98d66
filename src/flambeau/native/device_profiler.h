// Ranges on the device for torch.profiler: for each operator that takes tensors of the device and calls no other such
// operator, the time between two events on its stream. device_core.cpp includes this file.
//
// PyTorch's profiler gives each operator a number while it runs; ranges refer to it.

#define FMT_HEADER_ONLY
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <kineto/libkineto.h>

#include <chrono>
#include <set>
#include <string_view>

// From torch/csrc/profiler/standalone/privateuse1_profiler.h, which needs the flags of PyTorch's own build.
namespace torch::profiler::impl {
class PrivateUse1ProfilerRegistry {
 public:
  static PrivateUse1ProfilerRegistry& instance();
  void registerFactory(std::function<std::unique_ptr<libkineto::IActivityProfiler>()> factory);
};
}  // namespace torch::profiler::impl

namespace {
namespace ranges {

struct Range {
  std::string name;
  DeviceIndex device;
  StreamId stream;
  int64_t from, to;  // events; after the end, nanoseconds since the epoch
  int64_t correlation;
};

struct Call {
  bool on_device = false, calls_another = false;
  DeviceIndex device = 0;
  StreamId stream = 0;
  int64_t from = 0;
};

struct Base {
  int64_t event, time;
};

std::mutex lock;
std::vector<Range> all;
std::map<DeviceIndex, Base> bases;  // for each device, an event and its time on the host's clock
thread_local std::vector<Call> calls;
thread_local std::vector<uint64_t> correlations;

int64_t now() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
}

// Operators without work on the device: views, and empty memory.
bool does_nothing(const at::RecordFunction& function) {
  if (std::string_view(function.name()).starts_with("aten::empty")) return true;
  auto name = function.operator_name();
  auto op = name.has_value() ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!op.has_value()) return false;
  for (const auto& result : op->schema().returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  return false;
}

std::optional<DeviceIndex> device_of(const at::RecordFunction& function) {
  for (const c10::IValue& value : function.inputs()) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kType)
      return value.toTensor().device().index();
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector())
        if (tensor.defined() && tensor.device().type() == kType) return tensor.device().index();
  }
  return std::nullopt;
}

void mark_base(DeviceIndex device, StreamId stream) {
  {
    std::lock_guard<std::mutex> hold(lock);
    if (bases.count(device) != 0) return;
  }
  int64_t event = record(device, stream);
  ask(driver.wait, event, int(device), kAllStreams);
  std::lock_guard<std::mutex> hold(lock);
  bases.emplace(device, Base{event, now()});
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  auto device = device_of(function);
  bool wanted = device.has_value() && !stopped && !does_nothing(function);
  if (wanted)
    for (Call& outer : calls) outer.calls_another = true;
  calls.emplace_back();  // `leave` removes it, even after an error
  if (!wanted) return nullptr;
  StreamId stream = current.streams[size_t(*device)];
  mark_base(*device, stream);
  calls.back() = {true, false, *device, stream, record(*device, stream)};
  return nullptr;
}

void leave(const at::RecordFunction& function, at::ObserverContext*) {
  if (calls.empty()) return;  // it began before the profiler
  Call call = calls.back();
  calls.pop_back();
  if (!call.on_device || stopped) return;
  if (call.calls_another) {
    driver.forget(call.from);
    return;
  }
  int64_t to = record(call.device, call.stream);
  std::lock_guard<std::mutex> hold(lock);
  all.push_back({function.name(), call.device, call.stream, call.from, to,
                 correlations.empty() ? 0 : int64_t(correlations.back())});
}

class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    status_ = libkineto::TraceStatus::RECORDING;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&enter, &leave).needsInputs(true).scopes(
        {at::RecordScope::FUNCTION}));
  }

  // Converts events to times: the device's clock counts from an event whose time on the host is known.
  void stop() override {
    at::removeCallback(handle_);
    std::map<DeviceIndex, Base> known;
    {
      std::lock_guard<std::mutex> hold(lock);
      ranges_.swap(all);
      known.swap(bases);
    }
    for (Range& range : ranges_) {
      const Base& base = known.at(range.device);
      ask(driver.wait, range.to, int(range.device), kAllStreams);
      for (int64_t* event : {&range.from, &range.to}) {
        double milliseconds = 0;
        ask(driver.elapsed, base.event, *event, &milliseconds);
        driver.forget(*event);
        *event = base.time + int64_t(milliseconds * 1e6);
      }
    }
    for (const auto& [device, base] : known) driver.forget(base.event);
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  std::vector<std::string> errors() override { return {}; }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }

  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t,
                    int64_t) override {
    buffer_->span = libkineto::TraceSpan(0, 0, "flambeau");
    for (const Range& range : ranges_) {
      buffer_->emplace_activity(buffer_->span, libkineto::ActivityType::CONCURRENT_KERNEL, range.name);
      auto& activity = *buffer_->activities.back();
      activity.startTime = range.from;
      activity.endTime = range.to;
      activity.device = range.device;
      activity.resource = int32_t(range.stream);
      activity.id = int32_t(range.correlation);
      activity.linked = linked(int32_t(range.correlation));
      activity.flow.id = uint32_t(range.correlation);
      activity.flow.type = libkineto::kLinkAsyncCpuGpu;
      activity.flow.start = 0;
      activity.log(logger);
    }
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }

  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::set<std::pair<DeviceIndex, StreamId>> used;
    for (const Range& range : ranges_) used.emplace(range.device, range.stream);
    std::vector<libkineto::ResourceInfo> found;
    for (const auto& [device, stream] : used) {
      auto name = "flambeau:" + std::to_string(device) + " stream " + std::to_string(stream);
      found.push_back({stream, stream, device, name});
    }
    return found;
  }

  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

  void pushCorrelationId(uint64_t id) override { correlations.push_back(id); }
  void popCorrelationId() override {
    if (!correlations.empty()) correlations.pop_back();
  }

 private:
  at::CallbackHandle handle_ = 0;
  std::vector<Range> ranges_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<libkineto::ActivityType>& availableActivities() const override { return types_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<libkineto::ActivityType>& types,
                                                                 const libkineto::Config&) override {
    if (types.count(libkineto::ActivityType::CONCURRENT_KERNEL) == 0) return nullptr;
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(int64_t, int64_t,
                                                                 const std::set<libkineto::ActivityType>& types,
                                                                 const libkineto::Config& config) override {
    return configure(types, config);
  }

 private:
  std::string name_ = "flambeau";
  std::set<libkineto::ActivityType> types_{libkineto::ActivityType::CONCURRENT_KERNEL};
};

void register_profiler() {
  torch::profiler::impl::PrivateUse1ProfilerRegistry::instance().registerFactory(
      [] { return std::make_unique<Profiler>(); });
}

}  // namespace ranges
}  // namespace

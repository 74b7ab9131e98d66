// Gates before ATen operators: a call goes on to the kernel that was there, or to one of ours.
//
// A gate stands in the dispatch table at a backend's key, in the operator's own C++ signature: a call below the
// operator's threshold costs a look at its sizes and a counter, some ten nanoseconds, and no Python. Larger calls are
// looked up by what a kernel depends on (dtypes, sizes, strides, scalars). What is found there says whose turn it is;
// Python is entered to ask for a kernel that is not there yet, and to run one that is.

#include "gate.h"

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <tuple>

// OPERATOR HEADERS

namespace {

// ------------------------------------------------------------------------------------------------- the states

enum Turn : int {
  kOriginal,  // ours is not built, not for this call, or slower
  kOurs,
  kTrial,  // both in turns, timed
};

constexpr int kTrials = 4;  // calls of each

// Which of the two is faster, by the best of some calls. On a device that runs behind its host, by its own clock.
struct Trial {
  std::mutex lock;
  int calls = 0, running = -1;
  double best[2] = {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  int timed[2] = {0, 0};
  std::optional<c10::Event> from, to;
  std::vector<int64_t> layout;  // of the original's results
};

struct Entry {
  Words key;
  std::atomic<int> turn{kOriginal};
  std::atomic<int> seen{0};
  std::atomic<bool> asked{false};
  PyObject* run = nullptr;  // takes the list of the call's tensors, returns that of the results
  Trial trial;
};

constexpr size_t kSlots = 512;  // a power of two; when most are taken, new calls are the original's

struct State : Place {
  c10::DispatchKey dispatch_key;
  c10::DeviceType device;
  c10::DispatchKeySet usual;

  int64_t threshold = 0;
  uint64_t measured = ~uint64_t(0);  // arguments whose elements count
  int patience = 1;  // calls of one kind before a kernel is asked for
  PyObject* ask = nullptr;  // (slot, arguments): answers through `resolve`, now or later
  PyObject* capturing = nullptr;  // whether a stream is being recorded; null: never

  std::atomic<int64_t> ours{0}, originals{0};
  // Entries appear under the GIL and stay; they are found without it.
  std::atomic<Entry*> slots[kSlots] = {};
  size_t taken = 0;

  State(c10::OperatorHandle handle, c10::DispatchKey key, c10::DeviceType type)
      : Place(handle), dispatch_key(key), device(type), usual(usual_keys(key)) {}
};

// ---------------------------------------------------------------------------------------- what a call looks like

int64_t elements(const Tensor& t) { return t.defined() ? t.numel() : 0; }
int64_t elements(const std::optional<Tensor>& t) { return t.has_value() ? elements(*t) : 0; }
template <class T>
int64_t elements(const T&) { return 0; }

struct LargeCall : Call {
  c10::SmallVector<Tensor*, 4> targets;  // that the operator writes

  LargeCall(const State& s, const torch::jit::Stack& args) : Call(s.usual, false) {
    for (const IValue& x : args) look(x, false, false);
    plain = plain && !generator.defined();  // ours draw from the default one
  }

  // A reference that is not const is an argument that the operator writes.
  template <class T>
  void note(T& x) {
    if constexpr (std::is_same_v<T, Tensor>) targets.push_back(&x);
  }

  // Kernels are made for arguments in memory of their own, those that are read may share it.
  bool overlaps() const {
    for (Tensor* target : targets) {
      size_t shared = 0;
      for (const Tensor& t : tensors) shared += t.storage().data() == target->storage().data();
      if (shared > 1) return true;
    }
    return false;
  }
};

// -------------------------------------------------------------------------------------------------- the results

void describe(const Tensor& t, std::vector<int64_t>& out) {
  if (!t.defined()) return;
  out.push_back(int64_t(t.scalar_type()));
  for (int64_t k = 0; k < t.dim(); ++k) {
    out.push_back(t.size(k));
    if (t.size(k) > 1) out.push_back(t.stride(k));  // else it says nothing
  }
}

template <class T>
struct Results;

template <>
struct Results<Tensor> {
  static Tensor of(std::vector<Tensor>& made, const LargeCall&) { return std::move(made.at(0)); }
  static void layout(const Tensor& t, std::vector<int64_t>& out) { describe(t, out); }
};

template <>
struct Results<Tensor&> {
  static Tensor& of(std::vector<Tensor>&, const LargeCall& call) { return *call.targets[0]; }
  static void layout(const Tensor&, std::vector<int64_t>&) {}
};

template <class... T>
struct Results<std::tuple<T...>> {
  template <size_t... I>
  static std::tuple<T...> pick(std::vector<Tensor>& made, const LargeCall& call, std::index_sequence<I...>) {
    if constexpr ((std::is_reference_v<T> || ...)) return std::tuple<T...>(*call.targets[I]...);
    else return std::tuple<T...>(std::move(made.at(I))...);
  }
  static std::tuple<T...> of(std::vector<Tensor>& made, const LargeCall& call) {
    return pick(made, call, std::index_sequence_for<T...>());
  }
  static void layout(const std::tuple<T...>& all, std::vector<int64_t>& out) {
    if constexpr (!(std::is_reference_v<T> || ...))
      std::apply([&](const auto&... t) { (describe(t, out), ...); }, all);
  }
};

// ------------------------------------------------------------------------------------------------ the decisions

bool is_capturing(State& s) {
  if (s.capturing == nullptr) return false;
  Gil gil;
  Owned answer(PyObject_CallNoArgs(s.capturing));
  bool yes = answer == nullptr || PyObject_IsTrue(answer.get()) != 0;
  PyErr_Clear();
  return yes;
}

Entry* find(State& s, const LargeCall& call, size_t& slot) {
  for (slot = hash(call.words) % kSlots;; slot = (slot + 1) % kSlots) {
    Entry* e = s.slots[slot].load(std::memory_order_acquire);
    if (e == nullptr || e->key == call.words) return e;
  }
}

// The entry of a call; null when there is no room for it.
Entry* entry(State& s, const LargeCall& call, size_t& slot) {
  if (Entry* e = find(s, call, slot)) return e;
  Gil gil;
  if (Entry* e = find(s, call, slot)) return e;
  if (s.taken >= kSlots * 3 / 4) return nullptr;
  auto* e = new Entry;
  e->key = call.words;
  ++s.taken;
  s.slots[slot].store(e, std::memory_order_release);
  return e;
}

void ask(State& s, size_t slot, const torch::jit::Stack& args) {
  Gil gil;
  Private guard;
  const auto& schema = s.op.schema().arguments();
  Owned given(PyTuple_New(Py_ssize_t(args.size())));
  for (size_t i = 0; i < args.size(); ++i) {
    bool dtype = schema[i].real_type()->str().rfind("ScalarType", 0) == 0;
    PyTuple_SET_ITEM(given.get(), Py_ssize_t(i), python(args[i], dtype));
  }
  Owned number(PyLong_FromSize_t(slot));
  Owned answer(PyObject_CallFunctionObjArgs(s.ask, number.get(), given.get(), nullptr));
  if (answer == nullptr) PyErr_WriteUnraisable(s.ask);
}

// The results of our kernel, or what Python said against it.
bool run(Entry& e, const LargeCall& call, std::vector<Tensor>& out, Failure& failure) {
  Gil gil;
  Private guard;
  PyObject* list = PyList_New(Py_ssize_t(call.tensors.size()));
  for (size_t i = 0; i < call.tensors.size(); ++i)
    PyList_SET_ITEM(list, Py_ssize_t(i), THPVariable_Wrap(call.tensors[i]));
  Owned given(list);
  return answer(PyObject_CallOneArg(e.run, given.get()), out, failure);
}

// One timed call of a trial, and the verdict once there are enough.
class Turns {
 public:
  Turns(State& s, Entry& e, const LargeCall& call) : entry_(e) {
    if (e.turn.load(std::memory_order_acquire) != kTrial) return;
    behind_ = s.device != c10::kCPU;
    if (behind_ && is_capturing(s)) return;
    Trial& trial = e.trial;
    std::lock_guard<std::mutex> hold(trial.lock);
    if (trial.running >= 0) {
      if (!behind_ || !trial.to.has_value() || !trial.to->query()) return;  // another thread's, or still to come
      settle(trial.from->elapsedTime(*trial.to));
      trial.to.reset();
      if (e.turn.load() != kTrial) return;
    }
    which_ = trial.calls++ % 2;
    trial.running = which_;
    if (behind_) {
      c10::impl::VirtualGuardImpl guard(s.device);
      stream_ = guard.getStream(c10::Device(s.device, call.device));
      trial.from.emplace(s.device, c10::EventFlag::BACKEND_DEFAULT);
      trial.from->record(*stream_);
    } else {
      from_ = std::chrono::steady_clock::now();
    }
  }

  bool ours() const {
    return which_ == 1 || (which_ < 0 && entry_.turn.load(std::memory_order_acquire) == kOurs);
  }

  // `layout` is that of the results, which must not depend on whose they are.
  void done(const std::vector<int64_t>& layout) {
    if (which_ < 0) return;
    Trial& trial = entry_.trial;
    std::lock_guard<std::mutex> hold(trial.lock);
    if (which_ == 0) trial.layout = layout;
    else if (layout != trial.layout) entry_.turn.store(kOriginal, std::memory_order_release);
    if (behind_) {
      trial.to.emplace(entry_.trial.from->device_type(), c10::EventFlag::BACKEND_DEFAULT);
      trial.to->record(*stream_);
    } else {
      settle(std::chrono::duration<double>(std::chrono::steady_clock::now() - from_).count());
    }
    which_ = -1;
  }

  ~Turns() {
    if (which_ < 0) return;  // else the call failed: its time says nothing
    std::lock_guard<std::mutex> hold(entry_.trial.lock);
    entry_.trial.running = -1;
  }

 private:
  void settle(double time) {
    Trial& trial = entry_.trial;
    int which = trial.running;
    trial.running = -1;
    trial.best[which] = std::min(trial.best[which], time);
    ++trial.timed[which];
    if (trial.timed[0] < kTrials || trial.timed[1] < kTrials) return;
    int expected = kTrial;
    entry_.turn.compare_exchange_strong(expected, trial.best[1] < trial.best[0] ? kOurs : kOriginal);
  }

  Entry& entry_;
  int which_ = -1;
  bool behind_ = false;
  std::optional<c10::Stream> stream_;
  std::chrono::steady_clock::time_point from_;
};

// Within a call that one gate has looked at, others do not look: an original that calls operators calls originals.
struct Inside {
  static thread_local bool now;
  Inside() { now = true; }
  ~Inside() { now = false; }
};
thread_local bool Inside::now = false;

// The entry of a call that is not, or not only, the original's.
Entry* decide(State& s, const LargeCall& call, const torch::jit::Stack& args) {
  if (!call.plain || call.overlaps() || at::globalContext().deterministicAlgorithms() || at::in_parallel_region())
    return nullptr;
  size_t slot = 0;
  Entry* e = entry(s, call, slot);
  if (e == nullptr) return nullptr;
  if (!e->asked.load(std::memory_order_relaxed) && !is_capturing(s) && ++e->seen >= s.patience &&
      !e->asked.exchange(true))
    ask(s, slot, args);
  return e->turn.load(std::memory_order_acquire) == kOriginal ? nullptr : e;
}

// ------------------------------------------------------------------------------------------------------ the gate

template <class Schema>
struct Gate;

template <class Ret, class... Args>
struct Gate<Ret(Args...)> final : c10::OperatorKernel {
  explicit Gate(State* state) : s(*state) {}

  Ret operator()(c10::DispatchKeySet keys, Args... args) {
    uint64_t measured = s.measured;
    int64_t most = 0;
    ((most = std::max(most, measured & 1 ? elements(args) : 0), measured >>= 1), ...);
    if (C10_LIKELY(most < s.threshold)) return original(keys, args...);
    return large(keys, args...);
  }

 private:
  C10_ALWAYS_INLINE Ret original(c10::DispatchKeySet keys, Args&... args) {
    s.originals.fetch_add(1, std::memory_order_relaxed);
    return s.original.template call<Ret, Args...>(s.op, keys, std::forward<Args>(args)...);
  }

  C10_NOINLINE Ret large(c10::DispatchKeySet keys, Args&... args) {
    if (Inside::now) return original(keys, args...);
    Inside inside;
    torch::jit::Stack stack = c10::impl::boxArgs<Args...>(args...);
    LargeCall call(s, stack);
    (call.note(args), ...);
    Entry* e = decide(s, call, stack);
    if (e == nullptr) return original(keys, args...);

    Turns turns(s, *e, call);
    std::vector<int64_t> layout;
    if (!turns.ours()) {
      Ret result = original(keys, args...);
      Results<Ret>::layout(result, layout);
      turns.done(layout);
      return result;
    }
    std::vector<Tensor> made;
    Failure failure;
    if (run(*e, call, made, failure)) {
      s.ours.fetch_add(1, std::memory_order_relaxed);
      for (const Tensor& t : made) describe(t, layout);
      turns.done(layout);
      return Results<Ret>::of(made, call);
    }
    // Behind its host a device reports an earlier call, which only ours can tell.
    if (s.device != c10::kCPU && !failure.memory) failure.raise();
    if (call.targets.empty() || failure.memory) return original(keys, args...);  // raises what its users know
    original(keys, args...);
    failure.raise();  // if that did not: ours has written, in part, to what was to be changed
  }

  State& s;
};

// --------------------------------------------------------------------------------------------------- the module

struct Row {
  const char* name;
  const char* overload;
  c10::KernelFunction (*make)(State*);
};

template <class Op>
Row row() {
  return {Op::name, Op::overload_name, [](State* state) {
            using Kernel = Gate<typename Op::schema>;
            return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(std::make_unique<Kernel>(state));
          }};
}

const Row kRows[] = {
// OPERATOR ROWS
};

State* state_at(Py_ssize_t at) {
  if (at >= 0 && size_t(at) < gates<State>().size()) return gates<State>()[size_t(at)].get();
  PyErr_SetString(PyExc_IndexError, "no such gate");
  return nullptr;
}

// make(name, overload, dispatch key, device) -> number of the gate
PyObject* make(PyObject*, PyObject* args) {
  const char *name, *overload, *key, *device;
  if (!PyArg_ParseTuple(args, "ssss", &name, &overload, &key, &device)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    gates<State>().push_back(std::make_unique<State>(op, c10::parseDispatchKey(key), c10::Device(device).type()));
    return PyLong_FromSize_t(gates<State>().size() - 1);
  });
}

// open(gate, threshold, measured arguments, patience, ask, capturing or None)
PyObject* open(PyObject*, PyObject* args) {
  Py_ssize_t at;
  long long threshold;
  unsigned long long measured;
  int patience;
  PyObject *ask, *capturing;
  if (!PyArg_ParseTuple(args, "nLKiOO", &at, &threshold, &measured, &patience, &ask, &capturing)) return nullptr;
  State* s = state_at(at);
  if (s == nullptr) return nullptr;
  s->threshold = threshold;
  s->measured = measured;
  s->patience = patience;
  Py_XSETREF(s->ask, Py_NewRef(ask));
  Py_XSETREF(s->capturing, capturing == Py_None ? nullptr : Py_NewRef(capturing));
  if (s->registration.has_value()) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    const auto& name = s->op.operator_name();
    for (const Row& row : kRows) {
      if (name.name != row.name || name.overload_name != row.overload) continue;
      s->take(s->dispatch_key, row.make(s));
      Py_RETURN_NONE;
    }
    PyErr_Format(PyExc_LookupError, "no gate for %s.%s was compiled", name.name.c_str(), name.overload_name.c_str());
    return nullptr;
  });
}

PyObject* close(PyObject*, PyObject* number) {
  State* s = state_at(PyLong_AsSsize_t(number));
  if (s == nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    s->registration.reset();
    Py_RETURN_NONE;
  });
}

// resolve(gate, slot, run or None, trial): what the calls of that slot get from now on
PyObject* resolve(PyObject*, PyObject* args) {
  Py_ssize_t at, slot;
  PyObject* run;
  int trial;
  if (!PyArg_ParseTuple(args, "nnOp", &at, &slot, &run, &trial)) return nullptr;
  State* s = state_at(at);
  if (s == nullptr) return nullptr;
  Entry* e = slot >= 0 && size_t(slot) < kSlots ? s->slots[slot].load() : nullptr;
  if (e == nullptr) return PyErr_SetString(PyExc_IndexError, "no such slot"), nullptr;
  if (run != Py_None) {
    if (e->run == nullptr) e->run = Py_NewRef(run);  // once: a call may be inside the one that is there
    e->turn.store(trial ? kTrial : kOurs, std::memory_order_release);
  }
  Py_RETURN_NONE;
}

// usage(gate) -> (calls of ours, calls of the original, [(turn, best of the original, best of ours)])
PyObject* usage(PyObject*, PyObject* number) {
  State* s = state_at(PyLong_AsSsize_t(number));
  if (s == nullptr) return nullptr;
  Owned kinds(PyList_New(0));
  for (const auto& slot : s->slots) {
    Entry* e = slot.load(std::memory_order_acquire);
    if (e == nullptr || e->run == nullptr) continue;
    std::lock_guard<std::mutex> hold(e->trial.lock);
    Owned item(Py_BuildValue("(idd)", e->turn.load(), e->trial.best[0], e->trial.best[1]));
    if (item == nullptr || PyList_Append(kinds.get(), item.get()) < 0) return nullptr;
  }
  return Py_BuildValue("(LLN)", (long long)s->ours.load(), (long long)s->originals.load(), kinds.release());
}

PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, nullptr},       {"open", open, METH_VARARGS, nullptr},
    {"close", close, METH_O, nullptr},           {"resolve", resolve, METH_VARARGS, nullptr},
    {"usage", usage, METH_O, nullptr},           {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "gate", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_gate() { return PyModule_Create(&module); }

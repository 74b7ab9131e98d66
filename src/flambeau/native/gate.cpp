// Gates before ATen operators: a call goes on to the kernel that was there, or to one of ours.
//
// A gate stands in the dispatch table at a backend's key, in the operator's own C++ signature: a call below the
// operator's threshold costs a look at its sizes and a counter, some ten nanoseconds, and no Python. Larger calls, of
// whatever signature, are looked up by what a kernel depends on (dtypes, sizes, strides, scalars). What is found there says whose turn it is;
// Python is entered to ask for a kernel that is not there yet, and to run one that is.

#include "gate.h"

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <limits>

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

struct Entry : Kind {
  std::atomic<int> seen{0};
  std::atomic<bool> asked{false};
  Trial trial;
};

constexpr size_t kMost = 384;  // kinds of calls; further ones are the original's

struct State : Place {
  c10::DispatchKey dispatch_key;
  c10::DeviceType device;
  c10::DispatchKeySet usual;

  int64_t threshold = 0;
  uint64_t measured = ~uint64_t(0);  // arguments whose elements count
  int patience = 1;  // calls of one kind before a kernel is asked for
  PyObject* ask = nullptr;  // (number of the kind, arguments): answers through `resolve`, now or later
  PyObject* capturing = nullptr;  // whether a stream is being recorded; null: never

  std::atomic<int64_t> ours{0}, originals{0};
  Table<Entry> entries;
  c10::KernelFunction large;  // for calls from the threshold on

  State(c10::OperatorHandle handle, c10::DispatchKey key, c10::DeviceType type)
      : Place(handle), dispatch_key(key), device(type), usual(usual_keys(key)) {}
};

// ---------------------------------------------------------------------------------------- what a call looks like

int64_t elements(const Tensor& t) { return t.defined() ? t.numel() : 0; }
int64_t elements(const std::optional<Tensor>& t) { return t.has_value() ? elements(*t) : 0; }
template <class T>
int64_t elements(const T&) { return 0; }

struct LargeCall : Call {
  LargeCall(const State& s, c10::ArrayRef<IValue> args) : Call(s.usual, false) {
    for (size_t i = 0; i < args.size(); ++i) look(args[i], false, s.writes[i]);
    plain = plain && !generator.defined();  // ours draw from the default one
    if (plain) share();
    plain = plain && !shares;  // kernels are made for arguments in memory of their own; what is read may share it
  }
};

void describe(const Tensor& t, std::vector<int64_t>& out) {
  if (!t.defined()) return;
  out.push_back(int64_t(t.scalar_type()));
  for (int64_t k = 0; k < t.dim(); ++k) {
    out.push_back(t.size(k));
    if (t.size(k) > 1) out.push_back(t.stride(k));  // else it says nothing
  }
}

// ------------------------------------------------------------------------------------------------ the decisions

bool is_capturing(State& s) {
  if (s.capturing == nullptr) return false;
  Gil gil;
  Owned answer(PyObject_CallNoArgs(s.capturing));
  bool yes = answer == nullptr || PyObject_IsTrue(answer.get()) != 0;
  PyErr_Clear();
  return yes;
}

void ask(State& s, const Entry& e, c10::ArrayRef<IValue> args) {
  Gil gil;
  Private guard;
  Owned given = s.arguments(args, python);
  Owned number(PyLong_FromSize_t(e.number));
  Owned answer(PyObject_CallFunctionObjArgs(s.ask, number.get(), given.get(), nullptr));
  if (answer != nullptr) return;
  if (ends()) pass_on();
  PyErr_WriteUnraisable(s.ask);
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

  bool timed() const { return which_ >= 0; }

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
Entry* decide(State& s, const LargeCall& call, c10::ArrayRef<IValue> args) {
  if (!call.plain || at::globalContext().deterministicAlgorithms() || at::in_parallel_region())
    return nullptr;
  Entry* e = s.entries.at(call.words, kMost);
  if (e == nullptr) return nullptr;
  if (!e->asked.load(std::memory_order_relaxed) && !is_capturing(s) && ++e->seen >= s.patience &&
      !e->asked.exchange(true))
    ask(s, *e, args);
  return e->turn.load(std::memory_order_acquire) == kOriginal ? nullptr : e;
}

// ------------------------------------------------------------------------------------------------------ the gate

// Calls that a gate looks at, whatever the operator.
struct Large final : c10::OperatorKernel {
  explicit Large(State* state) : s(*state) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    if (Inside::now) return original(keys, stack);
    Inside inside;
    auto args = torch::jit::last(*stack, s.writes.size());
    LargeCall call(s, args);
    Entry* e = decide(s, call, args);
    if (e == nullptr) return original(keys, stack);

    Turns turns(s, *e, call);
    std::vector<int64_t> layout;
    if (!turns.ours()) {
      original(keys, stack);
      for (size_t i = 0; i < s.returns.size(); ++i)
        if (s.returns[i] < 0) describe(torch::jit::peek(*stack, i, s.returns.size()).toTensor(), layout);
      return turns.done(layout);
    }
    Tensors made;
    Failure failure;
    if (run(e->run, call, 0, nullptr, made, failure)) {
      s.ours.fetch_add(1, std::memory_order_relaxed);
      for (size_t i = 0; turns.timed() && i < made.size(); ++i) describe(made[i], layout);
      turns.done(layout);
      return s.give(*stack, made);
    }
    // Behind its host a device reports an earlier call, which only ours can tell.
    if (s.device != c10::kCPU && !failure.memory) failure.raise();
    original(keys, stack);  // raises what its users know
    // If it did not: ours has written, in part, to what was to be changed.
    if (call.writes() && !failure.memory) failure.raise();
  }

 private:
  void original(c10::DispatchKeySet keys, Stack* stack) {
    s.originals.fetch_add(1, std::memory_order_relaxed);
    s.original.callBoxed(s.op, keys, stack);
  }

  State& s;
};

template <class Schema>
struct Gate;

template <class Ret, class... Args>
struct Gate<Ret(Args...)> final : c10::OperatorKernel {
  explicit Gate(State* state) : s(*state) {}

  Ret operator()(c10::DispatchKeySet keys, Args... args) {
    uint64_t measured = s.measured;
    int64_t most = 0;
    ((most = std::max(most, measured & 1 ? elements(args) : 0), measured >>= 1), ...);
    if (most >= s.threshold) return s.large.template call<Ret, Args...>(s.op, keys, std::forward<Args>(args)...);
    s.originals.fetch_add(1, std::memory_order_relaxed);
    return s.original.template call<Ret, Args...>(s.op, keys, std::forward<Args>(args)...);
  }

 private:
  State& s;
};

// Before operators of other libraries, whose signatures nobody compiled.
struct BoxedGate final : c10::OperatorKernel {
  explicit BoxedGate(State* state) : s(*state) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    uint64_t measured = s.measured;
    int64_t most = 0;
    for (const IValue& x : torch::jit::last(*stack, s.writes.size())) {
      if ((measured & 1) && x.isTensor()) most = std::max(most, elements(x.toTensor()));
      measured >>= 1;
    }
    if (most >= s.threshold) return s.large.callBoxed(s.op, keys, stack);
    s.originals.fetch_add(1, std::memory_order_relaxed);
    s.original.callBoxed(s.op, keys, stack);
  }

 private:
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
    State* s = gates<State>().back().get();
    s->large = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Large>(s));
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
    s->take(s->dispatch_key, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<BoxedGate>(s)));
    Py_RETURN_NONE;
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

// resolve(gate, kind, run or None, trial): what the calls of that kind get from now on
PyObject* resolve(PyObject*, PyObject* args) {
  Py_ssize_t at, kind;
  PyObject* run;
  int trial;
  if (!PyArg_ParseTuple(args, "nnOp", &at, &kind, &run, &trial)) return nullptr;
  State* s = state_at(at);
  if (s == nullptr) return nullptr;
  auto entries = s->entries.all();
  if (kind < 0 || size_t(kind) >= entries.size()) return PyErr_SetString(PyExc_IndexError, "no such kind"), nullptr;
  Entry* e = entries[size_t(kind)];
  if (run != Py_None) {
    if (e->run == nullptr) e->run = Py_NewRef(run);  // once: a call may be inside the one that is there
    e->turn.store(trial ? kTrial : kOurs, std::memory_order_release);
  }
  Py_RETURN_NONE;
}

// aside(on): whether calls of this thread pass all gates
PyObject* aside(PyObject*, PyObject* on) {
  Inside::now = PyObject_IsTrue(on) != 0;
  Py_RETURN_NONE;
}

// usage(gate) -> (calls of ours, calls of the original, [(turn, best of the original, best of ours)])
PyObject* usage(PyObject*, PyObject* number) {
  State* s = state_at(PyLong_AsSsize_t(number));
  if (s == nullptr) return nullptr;
  Owned kinds(PyList_New(0));
  for (Entry* e : s->entries.all()) {
    if (e->run == nullptr) continue;
    std::lock_guard<std::mutex> hold(e->trial.lock);
    Owned item(Py_BuildValue("(idd)", e->turn.load(), e->trial.best[0], e->trial.best[1]));
    if (item == nullptr || PyList_Append(kinds.get(), item.get()) < 0) return nullptr;
  }
  return Py_BuildValue("(LLN)", (long long)s->ours.load(), (long long)s->originals.load(), kinds.release());
}

PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, nullptr},       {"open", open, METH_VARARGS, nullptr},
    {"close", close, METH_O, nullptr},           {"resolve", resolve, METH_VARARGS, nullptr},
    {"usage", usage, METH_O, nullptr},           {"watch", watch, METH_VARARGS, nullptr},
    {"aside", aside, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "gate", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_gate() { return PyModule_Create(&module); }

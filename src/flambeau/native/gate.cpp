// Gates before ATen operators: they pass a call to the original kernel, or to one of ours.
//
// A gate is registered in the dispatch table for a backend's key, with the operator's own C++ signature. A call below
// the operator's threshold only pays for reading its sizes and a counter, some ten nanoseconds, and calls no Python.
// Larger calls are looked up like those of the device (gate.h). The entry says which kernel serves them; Python is
// called for new entries, and to run our programs.

#include "gate.h"

#include <ATen/Parallel.h>

// OPERATOR HEADERS

namespace {

// ------------------------------------------------------------------------------------------------- the states

struct State : Asking {
  c10::DispatchKey dispatch_key;
  c10::DeviceType device;
  c10::DispatchKeySet usual;

  int64_t threshold = 0;
  uint64_t measured = ~uint64_t(0);  // bit mask of the arguments whose elements are compared with the threshold

  std::atomic<int64_t> ours{0}, originals{0};
  c10::KernelFunction large;  // serves calls from the threshold on

  State(c10::OperatorHandle handle, c10::DispatchKey key, c10::DeviceType type)
      : Asking(handle), dispatch_key(key), device(type), usual(usual_keys(key)) {}
};

// ---------------------------------------------------------------------------------------------- keys of calls

int64_t elements(const Tensor& t) { return t.defined() ? t.numel() : 0; }
int64_t elements(const std::optional<Tensor>& t) { return t.has_value() ? elements(*t) : 0; }
template <class T>
int64_t elements(const T&) { return 0; }

struct LargeCall : Call {
  LargeCall(const State& s, c10::ArrayRef<IValue> args) : Call(s.usual, false) {
    for (size_t i = 0; i < args.size(); ++i) look(args[i], s.numbers[i], s.writes[i]);
    plain = plain && !generator.defined();  // our kernels draw from the default generator
    if (plain) share();
    plain = plain && !shares;  // our kernels need memory of their own for written arguments
  }
};

// ------------------------------------------------------------------------------------------------ the decisions

// Set while a call is inside a gate: operators that it calls pass other gates without a look.
struct Inside {
  static thread_local bool now;
  Inside() { now = true; }
  ~Inside() { now = false; }
};
thread_local bool Inside::now = false;

void count_original(State& s) {
  if (!Inside::now) s.originals.fetch_add(1, std::memory_order_relaxed);
}

// The entry of a call that we serve; null if the original does.
Entry* served(State& s, const LargeCall& call, c10::ArrayRef<IValue> args) {
  if (!call.plain || at::globalContext().deterministicAlgorithms() || at::in_parallel_region())
    return nullptr;
  Entry* e = decide(s, call, args);
  if (e->many) count(s, *e, call, args);
  return e->turn.load(std::memory_order_acquire) == kOurs ? e : nullptr;
}

// ------------------------------------------------------------------------------------------------------ the gate

// The kernel for large calls of any operator.
struct Large final : c10::OperatorKernel {
  explicit Large(State* state) : s(*state) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    if (Inside::now) return s.original.callBoxed(s.op, keys, stack);
    Inside inside;
    Table<Entry>::Visit visit(s.entries);
    auto args = torch::jit::last(*stack, s.writes.size());
    LargeCall call(s, args);
    Entry* e = served(s, call, args);
    if (e == nullptr) return original(keys, stack);

    Tensors made;
    Failure failure;
    if (run(*e, call, nullptr, made, failure)) {
      s.ours.fetch_add(1, std::memory_order_relaxed);
      return s.give(*stack, made);
    }
    // On a device, the error may belong to an earlier call of ours, which the original would not repeat.
    if (s.device != c10::kCPU && !failure.memory) failure.raise();
    original(keys, stack);  // raises the error that users know
    // If it did not raise, our kernel may have changed the arguments in part.
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
    count_original(s);
    return s.original.template call<Ret, Args...>(s.op, keys, std::forward<Args>(args)...);
  }

 private:
  State& s;
};

// A gate before operators of other libraries, whose signatures are not known here.
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
    count_original(s);
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
    s->number = gates<State>().size() - 1;
    s->large = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Large>(s));
    return PyLong_FromSize_t(s->number);
  });
}

// open(gate, threshold, measured arguments, capturing or None)
PyObject* open(PyObject*, PyObject* args) {
  Py_ssize_t at;
  long long threshold;
  unsigned long long measured;
  PyObject* capturing;
  if (!PyArg_ParseTuple(args, "nLKO", &at, &threshold, &measured, &capturing)) return nullptr;
  State* s = state_at(at);
  if (s == nullptr) return nullptr;
  s->threshold = threshold;
  s->measured = measured;
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

// aside(on) lets calls of this thread pass all gates -> whether they did before
PyObject* aside(PyObject*, PyObject* on) {
  bool before = std::exchange(Inside::now, PyObject_IsTrue(on) != 0);
  return PyBool_FromLong(before);
}

// usage(gate) -> (calls of ours, calls of the original, kinds of calls with a program, those of them that it serves)
PyObject* usage(PyObject*, PyObject* number) {
  State* s = state_at(PyLong_AsSsize_t(number));
  if (s == nullptr) return nullptr;
  Py_ssize_t programs = 0, serving = 0;
  for (Entry* e : s->entries.all()) programs += e->run != nullptr, serving += e->turn.load() == kOurs;
  return Py_BuildValue("(LLnn)", (long long)s->ours.load(), (long long)s->originals.load(), programs, serving);
}

PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, nullptr},   {"open", open, METH_VARARGS, nullptr},
    {"close", close, METH_O, nullptr},       {"start", start, METH_VARARGS, nullptr},
    {"usage", usage, METH_O, nullptr},       {"watch", watch, METH_VARARGS, nullptr},
    {"aside", aside, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "gate", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_gate() { return PyModule_Create(&module); }

// Gates of the device's operators: a call runs a program that was compiled for its like, or goes on to the kernel that
// was there, which computes on the CPU.
//
// One boxed kernel stands before every operator; the schema says what is read, written and returned. A call is looked
// up by what a program depends on: dtypes, sizes, strides, plain arguments, and which tensors are one. Numbers are in
// the program at first; where they change from call to call, one with numbers as arguments takes its place. Python has
// programs for many shapes; a shape that many calls have gets one of its own, after a number of calls that does not
// depend on the clock, because sums may be taken in another order.
//
// A program checks the indices that it is given, and what it finds is raised when somebody waits for it. Where the host
// knows that one is out of range, the CPU is asked instead, which says so at once.

#include "gate.h"
#include "known.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

// Its own header takes long to compile.
namespace at::native {
bool resize_output(const Tensor& output, IntArrayRef shape);
}

namespace {

// (gate, arguments, which of its tensors are one, which of its numbers are arguments, as bits) -> a program with the
// ranges of the indices and of the numbers that it takes, which numbers are arguments, whether it is one for many
// shapes; or shapes to resize to; or None
PyObject* ask_python = nullptr;
PyObject* hot_python = nullptr;  // (the same, whether to wait for it) -> a program for this shape alone, or None
PyObject* with_generator = nullptr;  // (program, its list, generator) -> what the program returns

constexpr int kPatience = 2;  // kinds of numbers that get programs of their own
constexpr size_t kEntries = 1024;  // of a gate
// Calls after which a program for one shape is made in the background, and after which it serves.
constexpr uint32_t kBegin = 64, kServe = 128;

// ------------------------------------------------------------------------------------------------- the states

enum Turn : int { kUnknown, kOriginal, kOurs, kResize };

// The values that a tensor of indices may have.
struct Range {
  long long tensor, least, most;
};

// Numbers of a call that a program may take: eager refuses others, or has not been asked.
struct Interval {
  size_t number;
  bool real;
  double least, most;  // of real ones
  long long low, high; // of whole ones

  bool has(int64_t word) const {
    if (!real) return low <= word && word <= high;
    double x;
    std::memcpy(&x, &word, sizeof x);
    return least <= x && x <= most;
  }
};

struct Entry : Kind {
  std::vector<Range> ranges;
  std::vector<Interval> numbers;             // of those that are arguments of the program, some for each
  uint64_t lifted = 0;                       // the numbers that are arguments of the program, as bits
  bool many = false;                         // the program serves many shapes
  std::atomic<uint32_t> calls{};             // while it does
  std::vector<std::vector<int64_t>> shapes;  // that the written tensors should have: sizes, then strides
  // Of calls that are alike but for their numbers, which the key is without:
  Words first;
  uint64_t changed = 0;  // positions at which other numbers were seen, as bits
  int kinds = 0;
};

struct State : Place {
  using Place::Place;
  size_t number = 0;

  Table<Entry> entries;
  std::mutex numbers_lock;
};

const c10::DispatchKeySet kUsual = usual_keys(c10::DispatchKey::PrivateUse1);

// ---------------------------------------------------------------------------------------- what a call looks like

struct DeviceCall : Call {
  DeviceCall(const State& s, c10::ArrayRef<IValue> args) : Call(kUsual, true) {
    word(at::globalContext().deterministicAlgorithms());
    for (size_t i = 0; i < args.size() && plain; ++i) look(args[i], s.numbers[i], s.writes[i]);
    plain = plain && device >= 0;
    if (plain) share();
  }
};

// ------------------------------------------------------------------------------------------------ the decisions

// Python's view of an argument: numbers that PyTorch wrapped are numbers again.
PyObject* shown(const IValue& x, bool dtype) {
  if (x.isTensor() && x.toTensor().defined() && x.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
    at::Scalar value = value_of(x.toTensor());
    if (value.isBoolean()) return python(value.toBool());
    return value.isFloatingPoint() ? python(value.toDouble()) : python(value.toLong());
  }
  return python(x, dtype);
}

bool shapes_of(PyObject* list, std::vector<std::vector<int64_t>>& out) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!PyTuple_Check(item)) return false;
    auto& shape = out.emplace_back();
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(item); ++k)
      shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(item, k)));
  }
  return !PyErr_Occurred();
}

// The rows of a tuple.
template <class Row, class Parse>
bool rows_of(PyObject* tuple, std::vector<Row>& out, Parse&& parse) {
  std::vector<Row> found(size_t(PyTuple_GET_SIZE(tuple)));
  for (size_t i = 0; i < found.size(); ++i)
    if (!parse(PyTuple_GET_ITEM(tuple, Py_ssize_t(i)), found[i])) return false;
  out = std::move(found);
  return true;
}

// A tuple (program, ((tensor, least, most), ...), ((number, is real, least, most), ...), lifted, for many shapes).
bool program_of(PyObject* said, Entry& e) {
  PyObject *run, *ranges, *numbers;
  unsigned long long lifted;
  int many;
  if (!PyArg_ParseTuple(said, "OO!O!Kp", &run, &PyTuple_Type, &ranges, &PyTuple_Type, &numbers, &lifted, &many))
    return false;
  e.lifted = lifted;
  e.many = many;
  bool parsed = rows_of(ranges, e.ranges, [](PyObject* row, Range& r) {
    return PyArg_ParseTuple(row, "LLL", &r.tensor, &r.least, &r.most);
  }) && rows_of(numbers, e.numbers, [](PyObject* row, Interval& n) {
    int real;
    PyObject *least, *most;
    if (!PyArg_ParseTuple(row, "npOO", &n.number, &real, &least, &most)) return 0;
    n.real = real;
    if (real) n.least = PyFloat_AsDouble(least), n.most = PyFloat_AsDouble(most);
    else n.low = PyLong_AsLongLong(least), n.high = PyLong_AsLongLong(most);
    return int(PyErr_Occurred() == nullptr);
  });
  if (parsed) e.run = Py_NewRef(run);
  return parsed;
}

// What Python says about a call; null where it failed.
Owned said_by(PyObject* function, State& s, const DeviceCall& call, c10::ArrayRef<IValue> args, uint64_t lift,
              PyObject* last = nullptr) {
  // As in a thread of its own: no mode and no guard of the caller's is there while something is compiled.
  c10::impl::ForceDispatchKeyGuard keys(c10::default_included_set, c10::default_excluded_set);
  Owned given = s.arguments(args, shown);
  Owned number(PyLong_FromSize_t(s.number)), which(PyLong_FromUnsignedLongLong(lift));
  Owned same(PyTuple_New(Py_ssize_t(call.same.size())));
  for (size_t i = 0; i < call.same.size(); ++i) PyTuple_SET_ITEM(same.get(), Py_ssize_t(i), python(call.same[i]));
  Silent silent;  // what a trial or torch's rules for shapes warn of is said again where it is meant
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  Owned said(PyObject_CallFunctionObjArgs(function, number.get(), given.get(), same.get(), which.get(), last, nullptr));
  if (said == nullptr) {
    if (ends()) pass_on();  // the next call asks again
    PyErr_WriteUnraisable(function);
  }
  return said;
}

// What serves calls like this one from now on.
void ask(State& s, Entry& e, const DeviceCall& call, c10::ArrayRef<IValue> args, uint64_t lift = 0) {
  Gil gil;
  Owned said = said_by(ask_python, s, call, args, lift);
  Turn turn = kOriginal;
  if (said != nullptr && PyList_Check(said.get())) {
    if (e.shapes.empty() && shapes_of(said.get(), e.shapes)) turn = kResize;
    PyErr_Clear();
  } else if (said != nullptr && said.get() != Py_None) {
    // Once: a call may be inside the one that is there.
    if (e.run != nullptr || program_of(said.get(), e)) turn = kOurs;
    else PyErr_WriteUnraisable(ask_python);
  }
  e.turn.store(turn, std::memory_order_release);
}

// One more call of a shape whose program serves many.
void count(State& s, Entry& e, const DeviceCall& call, c10::ArrayRef<IValue> args) {
  uint32_t calls = e.calls.fetch_add(1, std::memory_order_relaxed) + 1;
  if (calls != kBegin && calls != kServe) return;
  Gil gil;
  Owned said = said_by(hot_python, s, call, args, e.lifted, calls == kServe ? Py_True : Py_False);
  if (said == nullptr || said.get() == Py_None) return;
  Owned before(e.run);
  e.run = said.release();
}

// The positions of the numbers that change from call to call, as bits; none while few calls were seen.
uint64_t changing(State& s, Entry& alike, const Words& values) {
  if (values.size() > 64) return 0;
  std::lock_guard<std::mutex> hold(s.numbers_lock);
  if (alike.first.empty()) alike.first = values;
  for (size_t i = 0; i < values.size(); ++i) alike.changed |= uint64_t(values[i] != alike.first[i]) << i;
  return alike.kinds < kPatience ? 0 : alike.changed;
}

// Whether a program was made for such numbers.
bool takes(const Entry& e, const Words& values) {
  for (size_t i = 0; e.lifted >> i; ++i)
    if (e.lifted >> i & 1 && std::none_of(e.numbers.begin(), e.numbers.end(), [&](const Interval& n) {
          return n.number == i && n.has(values[i]);
        })) return false;
  return true;
}

Entry* decide(State& s, DeviceCall& call, c10::ArrayRef<IValue> args) {
  Entry* e = s.entries.visited(call.words, kEntries);
  if (!call.values.empty()) {
    Entry& alike = *e;
    if (uint64_t lift = changing(s, alike, call.values)) {
      Words key = call.words;
      key.append({-2, int64_t(lift)});
      for (size_t i = 0; i < call.values.size(); ++i)
        if (!(lift >> i & 1)) key.push_back(call.values[i]);
      e = s.entries.visited(key, kEntries);
      if (e->turn.load(std::memory_order_acquire) == kUnknown) ask(s, *e, call, args, lift);
      if (e->turn.load(std::memory_order_acquire) == kOurs && takes(*e, call.values)) return e;
    }
    Words key = call.words;
    key.append(call.values.begin(), call.values.end());
    key.push_back(-1);
    e = s.entries.visited(key, kEntries);
    if (e->turn.load(std::memory_order_acquire) == kUnknown) {
      std::lock_guard<std::mutex> hold(s.numbers_lock);
      ++alike.kinds;
    }
  }
  if (e->turn.load(std::memory_order_acquire) == kUnknown) ask(s, *e, call, args);
  return e;
}

// ------------------------------------------------------------------------------------------------------ the gate

struct Gate final : c10::OperatorKernel {
  explicit Gate(State* state) : s(*state) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!ours(*stack)) s.original.callBoxed(op, keys, stack);
  }

 private:
  bool ours(Stack& stack) {
    Table<Entry>::Visit visit(s.entries);
    for (bool again : {true, false}) {
      auto args = torch::jit::last(stack, s.numbers.size());
      DeviceCall call(s, args);
      if (!call.plain) return false;
      Entry* e = decide(s, call, args);
      int turn = e->turn.load(std::memory_order_acquire);
      if (turn == kResize && again) {
        resize(*e, call);
        continue;
      }
      if (turn != kOurs || outside(*e, call)) return false;
      if (e->many) count(s, *e, call, args);
      Tensors made;
      Failure failure;
      if (!run(e->run, call, e->lifted, with_generator, made, failure)) {
        TORCH_CHECK_WITH(OutOfMemoryError, !failure.memory, failure.text);
        failure.raise();
      }
      s.give(stack, made);
      return true;
    }
    return false;
  }

  // Whether the host knows of an index that is out of range.
  static bool outside(const Entry& e, const DeviceCall& call) {
    for (const Range& range : e.ranges) {
      const auto* held = known(*call.tensors[size_t(range.tensor)].unsafeGetTensorImpl());
      if (held != nullptr && (held->least < range.least || held->most > range.most)) return true;
    }
    return false;
  }

  static void resize(const Entry& e, const DeviceCall& call) {
    size_t next = 0;
    for (size_t i = 0; i < call.tensors.size() && next < e.shapes.size(); ++i) {
      if (!call.written[i]) continue;
      at::IntArrayRef row = e.shapes[next++], sizes = row.slice(0, row.size() / 2);
      if (at::native::resize_output(call.tensors[i], sizes)) call.tensors[i].as_strided_(sizes, row.slice(sizes.size()));
    }
  }

  State& s;
};

// --------------------------------------------------------------------------------------------------- the module

// start(ask, hot, with_generator)
PyObject* start(PyObject*, PyObject* args) {
  PyObject *ask, *hot, *generator;
  if (!PyArg_ParseTuple(args, "OOO", &ask, &hot, &generator)) return nullptr;
  Py_XSETREF(ask_python, Py_NewRef(ask));
  Py_XSETREF(hot_python, Py_NewRef(hot));
  Py_XSETREF(with_generator, Py_NewRef(generator));
  Py_RETURN_NONE;
}

// open(name, overload) -> number of the gate, which stands from now on
PyObject* open(PyObject*, PyObject* args) {
  const char *name, *overload;
  if (!PyArg_ParseTuple(args, "ss", &name, &overload)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    gates<State>().push_back(std::make_unique<State>(op));
    State* s = gates<State>().back().get();
    s->number = gates<State>().size() - 1;
    s->take(c10::DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Gate>(s)));
    return PyLong_FromSize_t(s->number);
  });
}

// entries(gate) -> how many kinds of calls a gate knows
PyObject* entries(PyObject*, PyObject* args) {
  Py_ssize_t gate;
  if (!PyArg_ParseTuple(args, "n", &gate)) return nullptr;
  if (gate < 0 || size_t(gate) >= gates<State>().size()) return PyErr_SetString(PyExc_IndexError, "no such gate"), nullptr;
  return PyLong_FromSize_t(gates<State>()[size_t(gate)]->entries.all().size());
}

PyMethodDef methods[] = {
    {"entries", entries, METH_VARARGS, nullptr},
    {"start", start, METH_VARARGS, nullptr}, {"open", open, METH_VARARGS, nullptr}, {"watch", watch, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "device_gate", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_device_gate() { return PyModule_Create(&module); }

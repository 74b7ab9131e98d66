// Gates of the device's operators: a call runs a compiled program, or goes on to the original kernel, which computes on
// the CPU.
//
// One boxed kernel is registered for every operator; the schema says what is read, written and returned. The key of a
// call has all that a program depends on: dtypes, sizes, strides, plain arguments, and which tensors are the same.
// Numbers are constants in the first programs. If they change from call to call, a program that takes them as arguments
// serves. Programs are for many shapes; a shape that is used often gets one of its own. That depends on the number of
// calls and not on time, because the order of additions may differ.
//
// A program checks its indices, and errors are raised when somebody waits for it. If the host knows of an index out
// of range, the call goes to the CPU instead, which raises the error at once.

#include "gate.h"
#include "known.h"

// Declared here, because its header takes long to compile.
namespace at::native {
bool resize_output(const Tensor& output, IntArrayRef shape);
}

namespace {

using State = Asking;

const c10::DispatchKeySet kUsual = usual_keys(c10::DispatchKey::PrivateUse1);

// ---------------------------------------------------------------------------------------------- keys of calls

struct DeviceCall : Call {
  DeviceCall(const State& s, c10::ArrayRef<IValue> args) : Call(kUsual, true) {
    word(at::globalContext().deterministicAlgorithms());
    for (size_t i = 0; i < args.size() && plain; ++i) look(args[i], s.numbers[i], s.writes[i]);
    plain = plain && device >= 0;
    if (plain) share();
  }
};

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
      if (!run(*e, call, with_generator, made, failure)) {
        TORCH_CHECK_WITH(OutOfMemoryError, !failure.memory, failure.text);
        failure.raise();
      }
      s.give(stack, made);
      return true;
    }
    return false;
  }

  // Whether the host knows that an index is out of range.
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

// open(name, overload) registers a gate -> its number
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

// entries(gate) -> the number of a gate's entries
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

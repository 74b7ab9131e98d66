// Calls kernels from Python: `Launch` one, `Plan` several in a row, both without the GIL.
//
// A ctypes call of the same function takes several microseconds, most of it to convert the arguments.

#include "launcher.h"

namespace {

using Kernel = int64_t (*)(void**, const int64_t*);

// ---------------------------------------------------------------------------------------------------- Launch

struct Launch {
  LaunchHead head;
  Kernel kernel;
};

PyObject* launch_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Words pointers, sizes;
  if (!read_arguments(nargsf, names, args, pointers, sizes)) return nullptr;
  Kernel kernel = reinterpret_cast<Launch*>(self)->kernel;
  int64_t code;
  Py_BEGIN_ALLOW_THREADS
  code = kernel(reinterpret_cast<void**>(pointers.data), sizes.data);
  Py_END_ALLOW_THREADS
  return PyLong_FromLongLong(code);
}

PyObject* launch_new(PyTypeObject* type, PyObject* args, PyObject*) {
  unsigned long long address;
  PyObject* name;
  if (!PyArg_ParseTuple(args, "KU", &address, &name)) return nullptr;
  Launch* self = PyObject_New(Launch, type);
  if (self == nullptr) return nullptr;
  self->head.call = launch_call;
  self->kernel = reinterpret_cast<Kernel>(static_cast<uintptr_t>(address));
  self->head.name = Py_NewRef(name);
  return reinterpret_cast<PyObject*>(self);
}

void launch_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_DECREF(reinterpret_cast<LaunchHead*>(self)->name);
  PyObject_Free(self);
  Py_DECREF(type);
}

// ------------------------------------------------------------------------------------------------------ Plan

PyObject* plan_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Words pointers, sizes;
  if (!read_arguments(nargsf, names, args, pointers, sizes)) return nullptr;
  const Steps& plan = *reinterpret_cast<Plan*>(self)->steps;
  if (!plan.arguments.enough(pointers, sizes)) return nullptr;
  std::vector<int64_t> p(plan.arguments.pointers.size()), n(plan.arguments.sizes.size());
  int64_t code = 0;
  size_t at = 0;
  Py_BEGIN_ALLOW_THREADS
  for (; at < plan.steps.size(); ++at) {
    const Step& step = plan.steps[at];
    int64_t *first_p = p.data() + step.range.first_pointer, *first_n = n.data() + step.range.first_size;
    plan.arguments.pick(step.range, pointers, sizes, first_p, first_n);
    code = reinterpret_cast<Launch*>(step.launch)->kernel(reinterpret_cast<void**>(first_p), first_n);
    if (code != 0) break;
  }
  Py_END_ALLOW_THREADS
  if (code == 0) Py_RETURN_NONE;
  return Py_BuildValue("(nL)", static_cast<Py_ssize_t>(at), static_cast<long long>(code));
}

PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", nullptr, -1, nullptr, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_launcher() { return make_module(module, sizeof(Launch)); }

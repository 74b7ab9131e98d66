// Calls kernels from Python: `Launch` one, `Plan` several in a row, both without the GIL.
//
// A ctypes call of the same function takes several microseconds, most of it to convert the arguments.

#include "launcher.h"

namespace {

using Kernel = int64_t (*)(void**, const int64_t*);

// ---------------------------------------------------------------------------------------------------- Launch

struct Launch {
  PyObject_HEAD
  vectorcallfunc call;
  Kernel kernel;
  unsigned long long address;
  PyObject* name;
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
  self->call = launch_call;
  self->kernel = reinterpret_cast<Kernel>(static_cast<uintptr_t>(address));
  self->address = address;
  self->name = Py_NewRef(name);
  return reinterpret_cast<PyObject*>(self);
}

void launch_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_DECREF(reinterpret_cast<Launch*>(self)->name);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* launch_repr(PyObject* self) {
  return PyUnicode_FromFormat("<Launch %U>", reinterpret_cast<Launch*>(self)->name);
}

PyMemberDef launch_members[] = {
    {"name", T_OBJECT, offsetof(Launch, name), READONLY, nullptr},
    {"address", T_ULONGLONG, offsetof(Launch, address), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launch, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot launch_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(launch_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(launch_free)},
    {Py_tp_repr, reinterpret_cast<void*>(launch_repr)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, launch_members},
    {0, nullptr},
};

PyType_Spec launch_spec = {"flambeau.Launch", sizeof(Launch), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, launch_slots};

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

PyMODINIT_FUNC PyInit_launcher() { return make_module(module, launch_spec); }

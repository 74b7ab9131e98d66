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

PyTypeObject* launch_type = nullptr;

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

struct Step {
  Kernel kernel;
  Range range;
};

struct Steps {
  std::vector<Step> steps;
  Arguments arguments;
  size_t most_pointers = 0, most_sizes = 0;  // of any one step
};

struct Plan {
  PyObject_HEAD
  vectorcallfunc call;
  Steps* steps;
};

PyObject* plan_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Words pointers, sizes;
  if (!read_arguments(nargsf, names, args, pointers, sizes)) return nullptr;
  const Steps& plan = *reinterpret_cast<Plan*>(self)->steps;
  if (!plan.arguments.enough(pointers, sizes)) return nullptr;
  std::vector<int64_t> p(plan.most_pointers);
  std::vector<int64_t> n(plan.most_sizes);
  int64_t code = 0;
  size_t at = 0;
  Py_BEGIN_ALLOW_THREADS
  for (; at < plan.steps.size(); ++at) {
    const Step& step = plan.steps[at];
    plan.arguments.pick(step.range, pointers, sizes, p.data(), n.data());
    code = step.kernel(reinterpret_cast<void**>(p.data()), n.data());
    if (code != 0) break;
  }
  Py_END_ALLOW_THREADS
  if (code == 0) Py_RETURN_NONE;
  return Py_BuildValue("(nL)", static_cast<Py_ssize_t>(at), static_cast<long long>(code));
}

bool add_step(Steps& plan, PyObject* item) {
  PyObject *launch, *pointers, *sizes;
  if (!PyTuple_Check(item)) return PyErr_SetString(PyExc_TypeError, "a step is a tuple"), false;
  if (!PyArg_ParseTuple(item, "O!OO", launch_type, &launch, &pointers, &sizes)) return false;
  Step step = {reinterpret_cast<Launch*>(launch)->kernel, {}};
  if (!plan.arguments.add(pointers, sizes, step.range)) return false;
  plan.most_pointers = std::max(plan.most_pointers, step.range.pointer_count);
  plan.most_sizes = std::max(plan.most_sizes, step.range.size_count);
  plan.steps.push_back(step);
  return true;
}

PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* given;
  if (!PyArg_ParseTuple(args, "O", &given)) return nullptr;
  Owned items(PySequence_Tuple(given));
  if (!items) return nullptr;
  auto steps = std::make_unique<Steps>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    if (!add_step(*steps, PyTuple_GET_ITEM(items.get(), i))) return nullptr;
  }
  Plan* self = PyObject_New(Plan, type);
  if (self == nullptr) return nullptr;
  self->call = plan_call;
  self->steps = steps.release();
  return reinterpret_cast<PyObject*>(self);
}

void plan_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Plan*>(self)->steps;
  PyObject_Free(self);
  Py_DECREF(type);
}

PyMemberDef plan_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Plan, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot plan_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plan_free)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, plan_members},
    {0, nullptr},
};

PyType_Spec plan_spec = {"flambeau.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
                         plan_slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", nullptr, -1, nullptr, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_launcher() {
  launch_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&launch_spec));
  PyObject* plan_type = PyType_FromSpec(&plan_spec);
  PyObject* made = PyModule_Create(&module);
  if (launch_type == nullptr || plan_type == nullptr || made == nullptr) return nullptr;
  if (PyModule_AddObjectRef(made, "Launch", reinterpret_cast<PyObject*>(launch_type)) < 0) return nullptr;
  if (PyModule_AddObjectRef(made, "Plan", plan_type) < 0) return nullptr;
  return made;
}

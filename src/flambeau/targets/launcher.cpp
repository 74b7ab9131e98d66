// Calls kernels from Python: `Launch` one, `Plan` several in a row, both without the GIL.
//
// A ctypes call of the same function takes several microseconds, most of it to convert the arguments.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace {

using Kernel = int64_t (*)(void**, const int64_t*);

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// The integers of a list or tuple, on the stack where they are few.
class Words {
 public:
  bool read(PyObject* sequence) {
    if (!PyList_Check(sequence) && !PyTuple_Check(sequence)) {
      PyErr_Format(PyExc_TypeError, "expected a list or tuple of ints, not %s", Py_TYPE(sequence)->tp_name);
      return false;
    }
    count = PySequence_Fast_GET_SIZE(sequence);
    if (count > kFew) {
      many_.reset(new (std::nothrow) int64_t[count]);
      if (!many_) return PyErr_NoMemory(), false;
      data = many_.get();
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      // The size is read again each time: __index__ of an item could shorten the list.
      if (i >= PySequence_Fast_GET_SIZE(sequence)) {
        PyErr_SetString(PyExc_RuntimeError, "the list changed while it was read");
        return false;
      }
      data[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(sequence, i));
      if (data[i] == -1 && PyErr_Occurred()) return false;
    }
    return true;
  }

  Py_ssize_t count = 0;
  int64_t* data = few_;

 private:
  static constexpr Py_ssize_t kFew = 48;
  int64_t few_[kFew];
  std::unique_ptr<int64_t[]> many_;
};

bool read_arguments(size_t nargsf, PyObject* names, PyObject* const* args, Words& pointers, Words& sizes) {
  if (PyVectorcall_NARGS(nargsf) != 2 || names != nullptr) {
    PyErr_SetString(PyExc_TypeError, "expected two arguments: pointers and sizes");
    return false;
  }
  return pointers.read(args[0]) && sizes.read(args[1]);
}

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

struct Pointer {
  int64_t slot, offset;
};

struct Step {
  Kernel kernel;
  size_t first_pointer, pointer_count, first_size, size_count;
};

// All steps flattened: their arguments stand one after another in `pointers` and `sizes`.
struct Steps {
  std::vector<Step> steps;
  std::vector<Pointer> pointers;
  std::vector<int64_t> sizes;
  int64_t pointer_slots = 0, size_slots = 0;  // how long the caller's tables must be
  size_t most_pointers = 0, most_sizes = 0;   // of any one step
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
  if (pointers.count < plan.pointer_slots || sizes.count < plan.size_slots) {
    return PyErr_Format(PyExc_ValueError, "the plan needs %lld pointers and %lld sizes, got %zd and %zd",
                        (long long)plan.pointer_slots, (long long)plan.size_slots, pointers.count,
                        sizes.count);
  }
  std::vector<void*> p(plan.most_pointers);
  std::vector<int64_t> n(plan.most_sizes);
  int64_t code = 0;
  size_t at = 0;
  Py_BEGIN_ALLOW_THREADS
  for (; at < plan.steps.size(); ++at) {
    const Step& step = plan.steps[at];
    for (size_t i = 0; i < step.pointer_count; ++i) {
      const Pointer& pointer = plan.pointers[step.first_pointer + i];
      p[i] = reinterpret_cast<void*>(pointers.data[pointer.slot] + pointer.offset);
    }
    for (size_t i = 0; i < step.size_count; ++i) n[i] = sizes.data[plan.sizes[step.first_size + i]];
    code = step.kernel(p.data(), n.data());
    if (code != 0) break;
  }
  Py_END_ALLOW_THREADS
  if (code == 0) Py_RETURN_NONE;
  return Py_BuildValue("(nL)", static_cast<Py_ssize_t>(at), static_cast<long long>(code));
}

bool check_slot(int64_t slot) {
  if (slot >= 0) return true;
  PyErr_Format(PyExc_ValueError, "slot %lld is negative", (long long)slot);
  return false;
}

bool add_step(Steps& plan, PyObject* item) {
  PyObject *launch, *pointers, *sizes;
  if (!PyTuple_Check(item)) return PyErr_SetString(PyExc_TypeError, "a step is a tuple"), false;
  if (!PyArg_ParseTuple(item, "O!OO", launch_type, &launch, &pointers, &sizes)) return false;
  Words slots;
  if (!slots.read(sizes)) return false;
  Owned pairs(PySequence_Tuple(pointers));
  if (!pairs) return false;

  Step step = {reinterpret_cast<Launch*>(launch)->kernel, plan.pointers.size(),
               size_t(PyTuple_GET_SIZE(pairs.get())), plan.sizes.size(), size_t(slots.count)};
  for (size_t i = 0; i < step.pointer_count; ++i) {
    Words pair;
    if (!pair.read(PyTuple_GET_ITEM(pairs.get(), i))) return false;
    if (pair.count != 2) return PyErr_SetString(PyExc_ValueError, "a pointer is (slot, offset)"), false;
    if (!check_slot(pair.data[0])) return false;
    plan.pointers.push_back({pair.data[0], pair.data[1]});
    plan.pointer_slots = std::max(plan.pointer_slots, pair.data[0] + 1);
  }
  for (size_t i = 0; i < step.size_count; ++i) {
    if (!check_slot(slots.data[i])) return false;
    plan.sizes.push_back(slots.data[i]);
    plan.size_slots = std::max(plan.size_slots, slots.data[i] + 1);
  }
  plan.most_pointers = std::max(plan.most_pointers, step.pointer_count);
  plan.most_sizes = std::max(plan.most_sizes, step.size_count);
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

// The common part of all launchers: reading integers from Python's lists, and plans of several launches.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// The integers of a list or tuple, on the stack if there are few.
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

// ------------------------------------------------------------------------------------------------- arguments

struct Pointer {
  int64_t slot, offset;
};

// One step's part of the table below.
struct Range {
  size_t first_pointer, pointer_count, first_size, size_count;
};

// The arguments of all steps of a plan, one after the other, as indices into the caller's tables.
struct Arguments {
  std::vector<Pointer> pointers;
  std::vector<int64_t> sizes;
  int64_t pointer_slots = 0, size_slots = 0;  // the required length of the caller's tables

  bool add(PyObject* pairs_given, PyObject* slots_given, Range& range) {
    Words slots;
    if (!slots.read(slots_given)) return false;
    Owned pairs(PySequence_Tuple(pairs_given));
    if (!pairs) return false;
    range = {pointers.size(), size_t(PyTuple_GET_SIZE(pairs.get())), sizes.size(), size_t(slots.count)};
    for (size_t i = 0; i < range.pointer_count; ++i) {
      Words pair;
      if (!pair.read(PyTuple_GET_ITEM(pairs.get(), i))) return false;
      if (pair.count != 2) return PyErr_SetString(PyExc_ValueError, "a pointer is (slot, offset)"), false;
      if (!check_slot(pair.data[0])) return false;
      pointers.push_back({pair.data[0], pair.data[1]});
      pointer_slots = std::max(pointer_slots, pair.data[0] + 1);
    }
    for (size_t i = 0; i < range.size_count; ++i) {
      if (!check_slot(slots.data[i])) return false;
      sizes.push_back(slots.data[i]);
      size_slots = std::max(size_slots, slots.data[i] + 1);
    }
    return true;
  }

  bool enough(const Words& given_pointers, const Words& given_sizes) const {
    if (given_pointers.count >= pointer_slots && given_sizes.count >= size_slots) return true;
    PyErr_Format(PyExc_ValueError, "the plan needs %lld pointers and %lld sizes, got %zd and %zd",
                 (long long)pointer_slots, (long long)size_slots, given_pointers.count, given_sizes.count);
    return false;
  }

  // Reads a step's arguments from the caller's tables.
  void pick(const Range& range, const Words& from_pointers, const Words& from_sizes, int64_t* p, int64_t* n) const {
    for (size_t i = 0; i < range.pointer_count; ++i) {
      const Pointer& pointer = pointers[range.first_pointer + i];
      p[i] = from_pointers.data[pointer.slot] + pointer.offset;
    }
    for (size_t i = 0; i < range.size_count; ++i) n[i] = from_sizes.data[sizes[range.first_size + i]];
  }

 private:
  static bool check_slot(int64_t slot) {
    if (slot >= 0) return true;
    PyErr_Format(PyExc_ValueError, "slot %lld is negative", (long long)slot);
    return false;
  }
};

// --------------------------------------------------------------------------------------------------- Launch

// The first part of every launcher's Launch.
struct LaunchHead {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* name;
};

PyTypeObject* launch_type = nullptr;

PyObject* launch_new(PyTypeObject* type, PyObject* args, PyObject*);  // defined by each launcher, like the next function
void launch_free(PyObject* self);

PyObject* launch_repr(PyObject* self) {
  return PyUnicode_FromFormat("<Launch %U>", reinterpret_cast<LaunchHead*>(self)->name);
}

PyMemberDef launch_members[] = {
    {"name", T_OBJECT, offsetof(LaunchHead, name), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(LaunchHead, call), READONLY, nullptr},
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

// ----------------------------------------------------------------------------------------------------- Plan

struct Step {
  PyObject* launch;  // owned
  Range range;
};

struct Steps {
  std::vector<Step> steps;
  Arguments arguments;

  ~Steps() {
    for (const Step& step : steps) Py_DECREF(step.launch);
  }
};

struct Plan {
  PyObject_HEAD
  vectorcallfunc call;
  Steps* steps;
};

PyObject* plan_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names);  // defined by each launcher

PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* given;
  if (!PyArg_ParseTuple(args, "O", &given)) return nullptr;
  Owned items(PySequence_Tuple(given));
  if (!items) return nullptr;
  auto steps = std::make_unique<Steps>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    PyObject *item = PyTuple_GET_ITEM(items.get(), i), *launch, *pointers, *sizes;
    if (!PyTuple_Check(item)) return PyErr_SetString(PyExc_TypeError, "a step is a tuple"), nullptr;
    if (!PyArg_ParseTuple(item, "O!OO", launch_type, &launch, &pointers, &sizes)) return nullptr;
    Range range;
    if (!steps->arguments.add(pointers, sizes, range)) return nullptr;
    steps->steps.push_back({Py_NewRef(launch), range});
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

// ------------------------------------------------------------------------------------- launches by a driver

// For launchers that pass kernels to a driver: they check all launches of a call before they start the first.

struct Symbol {
  const char* name;
  void* place;  // where the pointer to it is
};

template <size_t count>
bool find_symbols(void* library, const char* path, const Symbol (&wanted)[count]) {
  for (const Symbol& symbol : wanted) {
    void* found = dlsym(library, symbol.name);
    if (found == nullptr) return PyErr_Format(PyExc_OSError, "%s has no %s", path, symbol.name), false;
    std::memcpy(symbol.place, &found, sizeof found);
  }
  return true;
}

// One launch with its arguments: the first part of a launcher's Work.
template <class Launch>
struct Given {
  Launch* launch;
  int64_t* p;
  size_t pointer_count;
  int64_t* n;
  size_t size_count;
};

// The launches of a call of a Launch, or of a Plan, and the memory of their arguments.
template <class Launch, class Work>
struct Works {
  std::vector<Work> all;

  bool of_launch(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
    if (!read_arguments(nargsf, names, args, pointers_, sizes_)) return false;
    add(self, pointers_.data, size_t(pointers_.count), sizes_.data, size_t(sizes_.count));
    return true;
  }

  bool of_plan(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
    if (!read_arguments(nargsf, names, args, pointers_, sizes_)) return false;
    const Steps& plan = *reinterpret_cast<Plan*>(self)->steps;
    if (!plan.arguments.enough(pointers_, sizes_)) return false;
    p_.resize(plan.arguments.pointers.size());
    n_.resize(plan.arguments.sizes.size());
    all.reserve(plan.steps.size());
    for (const Step& step : plan.steps) {
      int64_t *p = p_.data() + step.range.first_pointer, *n = n_.data() + step.range.first_size;
      plan.arguments.pick(step.range, pointers_, sizes_, p, n);
      add(step.launch, p, step.range.pointer_count, n, step.range.size_count);
    }
    return true;
  }

 private:
  void add(PyObject* launch, int64_t* p, size_t pointer_count, int64_t* n, size_t size_count) {
    Given<Launch>& given = all.emplace_back();
    given = {reinterpret_cast<Launch*>(launch), p, pointer_count, n, size_count};
  }

  Words pointers_, sizes_;
  std::vector<int64_t> p_, n_;
};

// Results of a Python function of a kernel's sizes, kept for the last few sizes. A Shape contains its `sizes`. Bit i of
// `words`: no shape depends on size i.
template <class Shape>
class Shapes {
 public:
  template <class Launch>
  std::shared_ptr<const Shape> find(const Given<Launch>& given, uint64_t words = 0) const {
    for (const auto& shape : kept_) {
      bool same = shape->sizes.size() == given.size_count;
      for (size_t i = 0; same && i < given.size_count; ++i) {
        same = shape->sizes[i] == given.n[i] || (i < 64 && (words >> i & 1));
      }
      if (same) return shape;
    }
    return nullptr;
  }

  template <class Launch>
  static bool ask(PyObject* function, const Given<Launch>& given, Words& answer) {
    Owned sizes(PyTuple_New(Py_ssize_t(given.size_count)));
    if (!sizes) return false;
    for (size_t i = 0; i < given.size_count; ++i) {
      PyObject* number = PyLong_FromLongLong(given.n[i]);
      if (number == nullptr) return false;
      PyTuple_SET_ITEM(sizes.get(), Py_ssize_t(i), number);
    }
    Owned said(PyObject_Call(function, sizes.get(), nullptr));
    return said && answer.read(said.get());
  }

  template <class Launch>
  std::shared_ptr<const Shape> keep(const Given<Launch>& given, std::shared_ptr<Shape> shape) {
    shape->sizes.assign(given.n, given.n + given.size_count);
    if (kept_.size() == kMost) kept_.clear();
    kept_.push_back(shape);
    return shape;
  }

 private:
  static constexpr size_t kMost = 8;
  std::vector<std::shared_ptr<const Shape>> kept_;  // never changed
};

// ----------------------------------------------------------------------------------------------- the module

// Makes the module, with the launcher's Launch (of this size) and its Plan.
PyObject* make_module(PyModuleDef& module, size_t launch_size) {
  PyType_Spec launch_spec = {"flambeau.Launch", int(launch_size), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, launch_slots};
  launch_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&launch_spec));
  PyObject* plan_type = PyType_FromSpec(&plan_spec);
  PyObject* made = PyModule_Create(&module);
  if (launch_type == nullptr || plan_type == nullptr || made == nullptr) return nullptr;
  if (PyModule_AddObjectRef(made, "Launch", reinterpret_cast<PyObject*>(launch_type)) < 0) return nullptr;
  if (PyModule_AddObjectRef(made, "Plan", plan_type) < 0) return nullptr;
  return made;
}

}  // namespace

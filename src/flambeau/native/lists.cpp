// Lists of thousands of tensors, at every step: have they changed, where is their memory, do they overlap?
//
// Torch's headers for tensors in Python take ten seconds to compile, and those for tensors in C++ one. So the offset at
// which a Python object keeps its tensor is found when this is loaded (`open`), from `_cdata` of some tensors.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/TensorBase.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "guarded.h"

namespace {

Py_ssize_t place = 0;  // offset of the tensor in its Python object

c10::TensorImpl* tensor_of(PyObject* object) {
  c10::TensorImpl* impl;
  std::memcpy(&impl, reinterpret_cast<const char*>(object) + place, sizeof impl);
  return impl;
}

PyObject* open(PyObject*, PyObject* samples) {
  if (!PyList_Check(samples)) return PyErr_SetString(PyExc_TypeError, "expected a list of tensors"), nullptr;
  for (Py_ssize_t at = sizeof(PyObject); at <= Py_ssize_t(sizeof(PyObject) + 2 * sizeof(void*)); at += sizeof(void*)) {
    place = at;
    bool all = PyList_GET_SIZE(samples) > 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); ++i) {
      PyObject* sample = PyList_GET_ITEM(samples, i);
      PyObject* address = PyObject_GetAttrString(sample, "_cdata");
      if (address == nullptr) return nullptr;
      all = all && Py_TYPE(sample)->tp_basicsize >= at + Py_ssize_t(sizeof(void*)) &&
            tensor_of(sample) == PyLong_AsVoidPtr(address);
      Py_DECREF(address);
    }
    if (all) Py_RETURN_NONE;
  }
  return PyErr_SetString(PyExc_ImportError, "tensors are kept in an unknown way"), nullptr;
}

// ------------------------------------------------------------------------------------------------------ Watch

// The properties of one tensor that kernels depend on.
struct Kind {
  PyTypeObject* type;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device;
  size_t first, dims;  // its sizes, then its strides

  bool operator==(const Kind& o) const {
    return type == o.type && keys == o.keys && dtype == o.dtype && device == o.device && first == o.first &&
           dims == o.dims;
  }
};

struct Watch {
  std::vector<size_t> lengths;  // of the lists
  std::vector<Kind> kinds;
  std::vector<int64_t> shapes, bytes, addresses;  // bytes: from a tensor's first to its last, with gaps
  std::vector<uint32_t> order;  // the tensors that are not empty, by address
};

Watch* watch_of(PyObject* capsule) { return static_cast<Watch*>(PyCapsule_GetPointer(capsule, "watch")); }

Kind kind_of(PyObject* object, const c10::TensorImpl* t, size_t first) {
  return {Py_TYPE(object), t->key_set(), t->dtype(), t->device(), first, size_t(t->dim())};
}

// The number of elements of memory from the first to the last.
int64_t reach(const c10::TensorImpl& t) {
  if (t.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return last + 1;
}

// Runs no Python code, so the lists cannot change meanwhile.
bool is_tensor(PyObject* object, PyObject* types) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == PyTuple_GET_ITEM(types, i)) return true;
  }
  return false;
}

PyObject* make(PyObject*, PyObject* args) {
  PyObject *lists, *types;
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &lists, &PyTuple_Type, &types)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto watch = std::make_unique<Watch>();
    for (Py_ssize_t l = 0; l < PyTuple_GET_SIZE(lists); ++l) {
      PyObject* list = PyTuple_GET_ITEM(lists, l);
      if (!PyList_Check(list)) return PyErr_SetString(PyExc_TypeError, "expected lists of tensors"), nullptr;
      watch->lengths.push_back(size_t(PyList_GET_SIZE(list)));
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        PyObject* item = PyList_GET_ITEM(list, i);
        if (!is_tensor(item, types)) return PyErr_SetString(PyExc_TypeError, "expected plain tensors"), nullptr;
        const c10::TensorImpl* t = tensor_of(item);
        watch->kinds.push_back(kind_of(item, t, watch->shapes.size()));
        watch->shapes.insert(watch->shapes.end(), t->sizes().begin(), t->sizes().end());
        watch->shapes.insert(watch->shapes.end(), t->strides().begin(), t->strides().end());
        watch->bytes.push_back(reach(*t) * int64_t(t->itemsize()));
        if (watch->bytes.back() > 0) watch->order.push_back(uint32_t(watch->kinds.size() - 1));
      }
    }
    watch->addresses.assign(watch->kinds.size(), -1);
    return PyCapsule_New(watch.release(), "watch", [](PyObject* capsule) { delete watch_of(capsule); });
  });
}

// Whether the lists are those of the watch, except for addresses. Writes all addresses.
PyObject* check(PyObject*, PyObject* args) {
  PyObject *capsule, *lists;
  unsigned long long out;
  if (!PyArg_ParseTuple(args, "OO!K", &capsule, &PyTuple_Type, &lists, &out)) return nullptr;
  Watch* watch = watch_of(capsule);
  if (watch == nullptr) return nullptr;
  enum { kOther, kMoved, kSame };
  return guarded([&]() -> PyObject* {
    bool same = true;
    size_t k = 0;
    if (size_t(PyTuple_GET_SIZE(lists)) != watch->lengths.size()) return PyLong_FromLong(kOther);
    for (size_t l = 0; l < watch->lengths.size(); ++l) {
      PyObject* list = PyTuple_GET_ITEM(lists, Py_ssize_t(l));
      if (!PyList_Check(list) || size_t(PyList_GET_SIZE(list)) != watch->lengths[l]) return PyLong_FromLong(kOther);
      for (size_t i = 0; i < watch->lengths[l]; ++i, ++k) {
        PyObject* item = PyList_GET_ITEM(list, Py_ssize_t(i));
        const Kind& known = watch->kinds[k];
        if (Py_TYPE(item) != known.type) return PyLong_FromLong(kOther);
        c10::TensorImpl* t = tensor_of(item);
        if (!(kind_of(item, t, known.first) == known) || !t->has_storage()) return PyLong_FromLong(kOther);
        const int64_t* shape = watch->shapes.data() + known.first;
        if (!std::equal(t->sizes().begin(), t->sizes().end(), shape) ||
            !std::equal(t->strides().begin(), t->strides().end(), shape + known.dims)) {
          return PyLong_FromLong(kOther);
        }
        int64_t address = reinterpret_cast<int64_t>(t->mutable_data());
        same = same && address == watch->addresses[k];
        watch->addresses[k] = address;
      }
    }
    std::copy(watch->addresses.begin(), watch->addresses.end(), reinterpret_cast<int64_t*>(out));
    return PyLong_FromLong(same ? kSame : kMoved);
  });
}

// Whether all tensors have memory, and no two share any. The order of addresses rarely changes.
PyObject* apart(PyObject*, PyObject* capsule) {
  Watch* watch = watch_of(capsule);
  if (watch == nullptr) return nullptr;
  const auto& a = watch->addresses;
  auto& order = watch->order;
  auto before = [&](uint32_t x, uint32_t y) { return a[x] < a[y]; };
  if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
  bool fine = order.empty() || a[order[0]] > 0;
  for (size_t i = 1; i < order.size(); ++i) fine = fine && a[order[i - 1]] + watch->bytes[order[i - 1]] <= a[order[i]];
  return PyBool_FromLong(fine);
}

// ------------------------------------------------------------------------------------------------------ others

// Tells autograd that the tensors of a list were changed.
PyObject* changed(PyObject*, PyObject* list) {
  if (!PyList_Check(list)) return PyErr_SetString(PyExc_TypeError, "expected a list of tensors"), nullptr;
  return guarded([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      c10::TensorImpl* t = tensor_of(PyList_GET_ITEM(list, i));
      if (!t->is_inference()) t->bump_version();
    }
    Py_RETURN_NONE;
  });
}

// Whether a dict holds these keys and values, the same objects in the same order.
bool holds(PyObject* dict, PyObject* items) {
  PyObject *key, *value;
  Py_ssize_t at = 0, k = 0;
  if (!PyDict_Check(dict) || 2 * PyDict_Size(dict) != PyTuple_GET_SIZE(items)) return false;
  for (; PyDict_Next(dict, &at, &key, &value); k += 2) {
    if (key != PyTuple_GET_ITEM(items, k) || value != PyTuple_GET_ITEM(items, k + 1)) return false;
  }
  return true;
}

// Returns the gradients of parameters, if parameters, the positions with gradients, and the dicts of states with their
// contents are the same as before; else None.
PyObject* gradients(PyObject*, PyObject* args) {
  PyObject *params, *known, *state, *dicts, *items;
  const char* mask;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "O!O!y#O!O!O!", &PyList_Type, &params, &PyList_Type, &known, &mask, &count, &PyDict_Type,
                        &state, &PyList_Type, &dicts, &PyList_Type, &items)) {
    return nullptr;
  }
  for (PyObject* list : {params, known, dicts, items}) {
    if (PyList_GET_SIZE(list) != count) Py_RETURN_NONE;
  }
  PyObject* name = PyUnicode_InternFromString("grad");
  PyObject* found = PyList_New(0);
  bool same = name != nullptr && found != nullptr;
  for (Py_ssize_t i = 0; same && i < count; ++i) {
    same = i < PyList_GET_SIZE(params) && PyList_GET_ITEM(params, i) == PyList_GET_ITEM(known, i);
    if (!same) break;
    PyObject* p = PyList_GET_ITEM(known, i);
    PyObject* grad = PyObject_GetAttr(p, name);
    same = grad != nullptr && (grad != Py_None) == (mask[i] != 0);
    if (same && mask[i]) {
      // a tensor's hash is its address (torch.Tensor.__hash__)
      PyObject* dict = _PyDict_GetItem_KnownHash(state, p, Py_hash_t(reinterpret_cast<uintptr_t>(p)));
      PyObject* before = PyList_GET_ITEM(dicts, i);
      same = (dict == nullptr ? Py_None : dict) == before && (dict == nullptr || holds(dict, PyList_GET_ITEM(items, i))) &&
             PyList_Append(found, grad) == 0;
    }
    Py_XDECREF(grad);
  }
  Py_XDECREF(name);
  if (same) return found;
  Py_XDECREF(found);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

template <class T>
PyObject* numbers_at(const int64_t* addresses, Py_ssize_t count) {
  auto at = [&](Py_ssize_t i) { return *reinterpret_cast<const T*>(addresses[i]); };
  bool one = true;
  for (Py_ssize_t i = 1; i < count; ++i) one = one && at(i) == at(0);
  Py_ssize_t length = one ? std::min<Py_ssize_t>(count, 1) : count;
  PyObject* made = PyList_New(length);
  for (Py_ssize_t i = 0; made != nullptr && i < length; ++i) PyList_SET_ITEM(made, i, PyFloat_FromDouble(double(at(i))));
  return made;
}

// The values of scalars in host memory, float or double: a list of one value if all are equal.
PyObject* numbers(PyObject*, PyObject* args) {
  unsigned long long addresses;
  Py_ssize_t count, size;
  if (!PyArg_ParseTuple(args, "Knn", &addresses, &count, &size)) return nullptr;
  auto* at = reinterpret_cast<const int64_t*>(addresses);
  return size == sizeof(float) ? numbers_at<float>(at, count) : numbers_at<double>(at, count);
}

PyMethodDef functions[] = {
    {"open", open, METH_O, "open(some tensors): find out how Python keeps them"},
    {"make", make, METH_VARARGS, "make(lists of tensors, their types) -> watch"},
    {"check", check, METH_VARARGS, "check(watch, lists, where to write addresses) -> 0 other lists, 1 moved, 2 same"},
    {"apart", apart, METH_O, "apart(watch): whether no two tensors shared memory at the last check"},
    {"changed", changed, METH_O, "changed(tensors): bump their versions"},
    {"gradients", gradients, METH_VARARGS,
     "gradients(parameters, those known, which have one, states, known dicts, their items) -> list or None"},
    {"numbers", numbers, METH_VARARGS, "numbers(where addresses are, how many, 4 or 8 bytes each) -> floats"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "lists", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_lists() { return PyModule_Create(&module); }

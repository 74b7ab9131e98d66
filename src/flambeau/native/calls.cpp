// Calls of operators whose arguments, except for the tensors, are known in advance.
//
// The other arguments are converted once. A call inserts its tensors, or views of them, and goes through the
// dispatcher, so that modes, autograd and profilers work as usual.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <exception>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "guarded.h"

// From libtorch_python; its own headers take long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

using at::Tensor;
using c10::IValue;

PyTypeObject* tensor_type = nullptr;  // torch.Tensor: subclasses may be given as well
PyObject* address_name = nullptr;     // "_cdata"

struct Released {
  PyThreadState* state = PyEval_SaveThread();
  ~Released() { PyEval_RestoreThread(state); }
};

// Keeps torch's warnings while the interpreter's lock is not held.
struct Warnings final : c10::WarningHandler {
  std::vector<c10::Warning> seen;
  void process(const c10::Warning& warning) override { seen.push_back(warning); }

  // False: a warning became an error.
  bool issue() const {
    for (const c10::Warning& w : seen) {
      bool old = std::holds_alternative<c10::Warning::DeprecationWarning>(w.type());
      if (PyErr_WarnEx(old ? PyExc_DeprecationWarning : PyExc_UserWarning, w.msg().c_str(), 1) < 0) return false;
    }
    return true;
  }
};

// The position of a tensor among the arguments.
struct Place {
  size_t argument;
  bool view = false;
  std::vector<int64_t> shape, strides;
  int64_t offset = 0;
  bool within = false;  // the offset counts from the start of the tensor, not of its storage

  // The number of elements of memory from the first to the last of a view.
  int64_t length() const {
    int64_t last = 1;
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 0) return 0;
      last += (shape[d] - 1) * strides[d];
    }
    return last;
  }
};

struct Prepared {
  c10::OperatorHandle op;
  std::vector<IValue> known;  // all arguments; None in place of tensors
  std::vector<Place> places;
  std::vector<size_t> outputs;
  bool single;  // one result is returned by itself, not in a tuple
};

// ---------------------------------------------------------------------------------------------------- constants

[[noreturn]] void refuse(const char* what) { throw std::invalid_argument(what); }

template <class T>
T converted(T value, const char* expected) {
  if (value == T(-1) && PyErr_Occurred()) {
    PyErr_Clear();
    refuse(expected);
  }
  return value;
}

int64_t integer(PyObject* x) { return converted<int64_t>(PyLong_AsLongLong(x), "expected an integer"); }
double real(PyObject* x) { return converted(PyFloat_AsDouble(x), "expected a number"); }

std::vector<int64_t> integers(PyObject* x) {
  std::vector<int64_t> out;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); ++i) out.push_back(integer(PyTuple_GET_ITEM(x, i)));
  return out;
}

template <class T, class Fn>
IValue list_of(PyObject* x, Fn&& element) {
  c10::List<T> out;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(x); ++i) out.push_back(T(element(PyList_GET_ITEM(x, i))));
  return out;
}

IValue constant(PyObject* x, const c10::Type* type) {
  if (type->kind() == c10::TypeKind::OptionalType) {
    if (x == Py_None) return {};
    type = type->containedType(0).get();
  }
  if (x == Py_None && type->kind() == c10::TypeKind::TensorType) return Tensor();
  switch (type->kind()) {
    case c10::TypeKind::IntType: return integer(x);
    case c10::TypeKind::FloatType: return real(x);
    case c10::TypeKind::BoolType: return x == Py_True;
    case c10::TypeKind::NumberType:
      return PyBool_Check(x) ? IValue(x == Py_True) : PyLong_Check(x) ? IValue(integer(x)) : IValue(real(x));
    case c10::TypeKind::StringType: return std::string(PyUnicode_AsUTF8(x));
    case c10::TypeKind::ListType: {
      if (!PyList_Check(x)) refuse("expected a list");
      switch (type->containedType(0)->kind()) {
        case c10::TypeKind::IntType: return list_of<int64_t>(x, integer);
        case c10::TypeKind::FloatType: return list_of<double>(x, real);
        case c10::TypeKind::BoolType: return list_of<bool>(x, [](PyObject* y) { return y == Py_True; });
        default: refuse("a list of something else");
      }
    }
    default: refuse("an argument of another kind");
  }
}

// -------------------------------------------------------------------------------------------------------- calls

Tensor tensor_of(PyObject* object) {
  if (!PyObject_TypeCheck(object, tensor_type)) refuse("expected a tensor");
  PyObject* address = PyObject_GetAttr(object, address_name);
  if (address == nullptr) refuse("a tensor without an address");
  auto* impl = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address));
  Py_DECREF(address);
  return Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

Tensor view_of(const Tensor& t, const Place& p) {
  int64_t offset = p.offset + (p.within ? t.storage_offset() : 0);
  if (t.unsafeGetTensorImpl()->is_python_dispatch() || !t.has_storage()) {
    static const auto as_strided = c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided", "");
    torch::jit::Stack stack{t, p.shape, p.strides, offset};
    as_strided.callBoxed(&stack);
    return stack[0].toTensor();
  }
  int64_t length = p.length();  // an empty tensor needs no memory
  if (length != 0 && size_t(offset + length) * t.itemsize() > t.storage().nbytes())
    refuse("a view beyond the end of its memory");
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(),
                                                       t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(p.shape, p.strides, offset);
  return made;
}

PyObject* result(const IValue& x) {
  return x.isTensor() && x.toTensor().defined() ? THPVariable_Wrap(x.toTensor()) : Py_NewRef(Py_None);
}

Prepared* prepared_in(PyObject* capsule) {
  return static_cast<Prepared*>(PyCapsule_GetPointer(capsule, "call"));
}

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Prepared* p = prepared_in(self);
  if (p == nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    if (size_t(count) != p->places.size()) refuse("another number of tensors");
    torch::jit::Stack stack = p->known;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const Place& place = p->places[size_t(i)];
      Tensor t = tensor_of(args[i]);
      stack[place.argument] = place.view ? view_of(t, place) : std::move(t);
    }
    Warnings warnings;
    {
      c10::WarningUtils::WarningHandlerGuard guard(&warnings);
      Released gil;
      p->op.callBoxed(&stack);
    }
    if (!warnings.issue()) return nullptr;
    if (p->single) return result(stack[0]);
    PyObject* made = PyTuple_New(Py_ssize_t(p->outputs.size()));
    for (size_t i = 0; made != nullptr && i < p->outputs.size(); ++i) {
      PyTuple_SET_ITEM(made, Py_ssize_t(i), result(stack[p->outputs[i]]));
    }
    return made;
  });
}

PyMethodDef calling = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr};

// ------------------------------------------------------------------------------------------------------- module

// (operator, overload, arguments, outputs): arguments are constants, `...` for a tensor, or a tuple (shape, strides,
// offset, whether it counts from the start of the tensor) for a view of one.
PyObject* make(PyObject*, PyObject* given) {
  const char *name, *overload;
  PyObject *args, *outputs;
  if (!PyArg_ParseTuple(given, "ssO!O", &name, &overload, &PyTuple_Type, &args, &outputs)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto p = std::make_unique<Prepared>(Prepared{c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)});
    const auto& arguments = p->op.schema().arguments();
    if (size_t(PyTuple_GET_SIZE(args)) != arguments.size()) refuse("another number of arguments");
    for (size_t k = 0; k < arguments.size(); ++k) {
      PyObject* x = PyTuple_GET_ITEM(args, Py_ssize_t(k));
      p->known.emplace_back();
      if (x == Py_Ellipsis) {
        p->places.push_back({k});
      } else if (PyTuple_Check(x)) {
        p->places.push_back({k, true, integers(PyTuple_GET_ITEM(x, 0)), integers(PyTuple_GET_ITEM(x, 1)),
                             integer(PyTuple_GET_ITEM(x, 2)), PyTuple_GET_ITEM(x, 3) == Py_True});
      } else {
        p->known[k] = constant(x, arguments[k].type().get());
      }
    }
    p->single = outputs == Py_None;
    if (!p->single) {
      for (int64_t k : integers(outputs)) p->outputs.push_back(size_t(k));
    }
    PyObject* capsule = PyCapsule_New(p.release(), "call", [](PyObject* held) { delete prepared_in(held); });
    if (capsule == nullptr) return nullptr;
    PyObject* made = PyCFunction_New(&calling, capsule);
    Py_DECREF(capsule);
    return made;
  });
}

PyObject* open(PyObject*, PyObject* type) {
  if (!PyType_Check(type)) return PyErr_SetString(PyExc_TypeError, "expected a type"), nullptr;
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  address_name = PyUnicode_InternFromString("_cdata");
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"open", open, METH_O, "open(torch.Tensor)"},
    {"make", make, METH_VARARGS, "make(operator, overload, arguments, outputs) -> a function of tensors"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "calls", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_calls() { return PyModule_Create(&module); }

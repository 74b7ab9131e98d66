// What all gates share: Python's view of a call's arguments, how a program in Python is run, and how an error comes back.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/List.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

// Of libtorch_python, whose own headers take long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch {
PyObject* getTHPDtype(at::ScalarType type);
}

struct Peek;
// The kernel that an operator has now: the dispatcher shows it to this class only.
template <>
class c10::TypedOperatorHandle<Peek> {
 public:
  static const KernelFunction& kernel(const OperatorHandle& op, DispatchKey key) {
    return op.operatorDef_->op.lookup(DispatchKeySet(key));
  }
};

namespace {

using at::Tensor;

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct Dropped {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Dropped>;

// What our Python does with tensors is not the user's: no subclass and no mode looks at it.
struct Private {
  at::impl::TorchFunctionDisabledState before = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  at::AutoDispatchBelowADInplaceOrView below;
  Private() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~Private() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before); }
};

PyObject* none() { return Py_NewRef(Py_None); }

PyObject* python(const Tensor& t) { return t.defined() ? THPVariable_Wrap(t) : none(); }
PyObject* python(bool x) { return PyBool_FromLong(x); }
PyObject* python(int64_t x) { return PyLong_FromLongLong(x); }
PyObject* python(double x) { return PyFloat_FromDouble(x); }
PyObject* python(const std::optional<Tensor>& t) { return t.has_value() ? python(*t) : none(); }

template <class T>
PyObject* python(const c10::List<T>& items) {
  PyObject* made = PyList_New(Py_ssize_t(items.size()));
  for (size_t i = 0; i < items.size(); ++i) PyList_SET_ITEM(made, Py_ssize_t(i), python(items.get(i)));
  return made;
}

PyObject* python(const c10::IValue& x, bool dtype) {
  if (x.isTensor()) return python(x.toTensor());
  if (x.isInt() && dtype) return Py_NewRef(torch::getTHPDtype(at::ScalarType(x.toInt())));
  if (x.isInt()) return python(x.toInt());
  if (x.isDouble()) return python(x.toDouble());
  if (x.isBool()) return python(x.toBool());
  if (x.isString()) return PyUnicode_FromString(x.toStringRef().c_str());
  if (x.isIntList()) return python(x.toIntList());
  if (x.isDoubleList()) return python(x.toDoubleList());
  if (x.isBoolList()) return python(x.toBoolList());
  if (x.isTensorList()) return python(x.toTensorList());
  if (x.isOptionalTensorList()) return python(x.toOptionalTensorList());
  return none();
}

struct Failure {
  std::string text;
  bool index = false, memory = false;

  [[noreturn]] void raise() const {
    TORCH_CHECK_INDEX(!index, text);
    TORCH_CHECK(false, text);
  }
};

// What a call of Python returned: a list of tensors, or null and an error.
bool answer(PyObject* returned, std::vector<Tensor>& out, Failure& failure) {
  Owned made(returned);
  if (made != nullptr) {
    out.reserve(size_t(PyList_GET_SIZE(made.get())));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(made.get()); ++i) {
      PyObject* item = PyList_GET_ITEM(made.get(), i);
      if (item == Py_None) {
        out.emplace_back();
        continue;
      }
      Owned address(PyObject_GetAttrString(item, "_cdata"));
      auto* impl = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get()));
      out.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
    }
    return true;
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Owned held_type(type), held(value), held_trace(trace);
  if (PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // it is the caller's
  Owned text(PyObject_Str(value));
  const char* said = text == nullptr ? nullptr : PyUnicode_AsUTF8(text.get());
  failure.text = said == nullptr ? "a kernel failed" : said;
  failure.index = PyErr_GivenExceptionMatches(type, PyExc_IndexError);
  failure.memory = std::strstr(reinterpret_cast<PyTypeObject*>(type)->tp_name, "OutOfMemoryError") != nullptr;
  PyErr_Clear();
  return false;
}

// The dispatcher warns of a second kernel for one key, which is what this is for.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

#include "guarded.h"

// What C++ throws, raised in Python. To be included where Python.h and <exception> are.

namespace {

template <class Fn>
PyObject* guarded(Fn&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace

// Raises C++ exceptions in Python. Include it after Python.h and <exception>.

// From libtorch_python; its own headers take long to compile.
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace {

template <class Fn>
PyObject* guarded(Fn&& body) {
  try {
    return body();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

}  // namespace

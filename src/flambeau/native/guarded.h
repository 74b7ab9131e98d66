// What C++ throws, raised in Python. To be included where Python.h and <exception> are.

// Of libtorch_python, whose own headers take long to compile.
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

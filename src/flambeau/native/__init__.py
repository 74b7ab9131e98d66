"""C++ code that uses torch's headers, and its build."""

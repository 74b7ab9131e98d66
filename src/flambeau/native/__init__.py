"""C++ against torch's own headers, and the build of it."""

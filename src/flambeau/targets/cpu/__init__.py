"""The CPU target: kernels in C++."""

"""Generates C++ for CPUs. OpenCL kernels for CPUs have the same loops (`simt/cpu_threads.py`)."""

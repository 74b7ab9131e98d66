"""C++ for CPUs. OpenCL on CPUs has the same loops (`simt/cpu_threads.py`)."""

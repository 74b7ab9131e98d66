"""NVIDIA GPUs: kernels in Triton, and Triton's interpreter."""

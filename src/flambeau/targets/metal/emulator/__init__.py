"""Runs Metal kernels on a CPU, as they are, and reports what a Mac would not."""

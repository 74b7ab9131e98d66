"""Runs Metal kernels on a CPU, and reports errors that a Mac would not."""

"""Generates the source code of kernels."""

"""Contractions: what their kernels share in all languages, and the kernels for CPUs."""

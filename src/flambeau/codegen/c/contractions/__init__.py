"""Contractions: what their kernels share in all languages, and those of CPUs."""

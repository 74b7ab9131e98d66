"""Kernels for tensor cores: contractions and attention."""

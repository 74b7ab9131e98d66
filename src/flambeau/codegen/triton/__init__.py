"""Generates Triton for NVIDIA GPUs: the same expressions, on blocks instead of scalars."""

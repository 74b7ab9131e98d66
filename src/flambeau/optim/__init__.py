"""Optimizer steps and gradient clipping, as kernels over tables of tensors."""

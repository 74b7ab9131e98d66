"""Steps of optimizers and clipping, as kernels along tables of tensors."""

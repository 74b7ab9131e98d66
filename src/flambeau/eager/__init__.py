"""flambeau.accelerate: eager operators on our kernels."""

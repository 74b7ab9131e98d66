"""`flambeau.accelerate`: runs eager operators on our kernels."""

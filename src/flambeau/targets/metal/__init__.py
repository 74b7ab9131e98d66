"""Apple GPUs: kernels in Metal Shading Language, and an emulator that runs them on a CPU."""

"""The machines: compile kernels, allocate memory, launch."""

"""Triton for NVIDIA GPUs, and its interpreter."""

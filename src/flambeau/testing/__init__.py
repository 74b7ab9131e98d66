"""Runs PyTorch's operator tests (OpInfo) with Flambeau."""

"""The doors from PyTorch."""

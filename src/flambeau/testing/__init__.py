"""PyTorch's operator database through Flambeau."""

"""Other libraries' operators and choices of devices."""

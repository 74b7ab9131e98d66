"""Writers for the C languages of GPUs. A dialect is a table that they read."""

"""Packages: a compiled model in one file, which runs without torch and without a compiler."""

"""Packages: a compiled model in one file, which runs without compiler, tracer and torch (docs/package-format.md)."""

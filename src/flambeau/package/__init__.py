"""Packages: a compiled model in one file, without compiler, tracer and torch (docs/reference/package-format.md)."""

"""Compares eager, compiled and float64 runs of a model."""

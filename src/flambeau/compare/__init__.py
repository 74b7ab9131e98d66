"""Eager, compiled and float64 side by side."""

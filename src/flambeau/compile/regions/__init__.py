"""Repeated layers of a graph, compiled once."""

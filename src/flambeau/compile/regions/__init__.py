"""Finds repeated layers of a graph, so that they are compiled once."""

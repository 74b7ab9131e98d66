"""Turns a captured FX graph, or a single call, into a Graph of the loop language."""

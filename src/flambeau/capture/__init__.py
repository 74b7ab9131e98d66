"""A captured FX graph, or one call, becomes a Graph."""

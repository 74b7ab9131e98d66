"""Reports on what was compiled, for people to read."""

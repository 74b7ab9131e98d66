"""Random programs against eager: `python -m fuzz --help` with tests/ on the path, or `make fuzz`."""

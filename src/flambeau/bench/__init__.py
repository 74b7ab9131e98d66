"""Benchmarks: Flambeau measured against eager, Inductor and other peers, in one run."""

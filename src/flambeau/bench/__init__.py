"""Benchmarks: Flambeau measured beside eager, Inductor and other peers, in one run."""

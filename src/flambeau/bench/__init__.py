"""The benchmark harness, which measures peers in the same run."""

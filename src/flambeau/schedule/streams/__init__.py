"""Several streams: waits between them, proofs of their order, overlap and offloading."""

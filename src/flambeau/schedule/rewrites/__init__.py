"""Passes that replace nodes or stages by equivalent ones."""

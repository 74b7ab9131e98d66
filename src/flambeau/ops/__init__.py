"""What each operator computes: one lowering per ATen operator, in files by family, with all that is known of it."""

from .facts import LOWERINGS, ops_loaded

__all__ = ["LOWERINGS", "ops_loaded"]

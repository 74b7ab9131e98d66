"""The operators: one lowering for each ATen operator, in files by family, and facts about operators."""

from .facts import LOWERINGS, ops_loaded

__all__ = ["LOWERINGS", "ops_loaded"]

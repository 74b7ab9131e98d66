"""Nested containers of tensors, as torch.compile and torch.export flatten them."""

from __future__ import annotations

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_map_only",
           "tree_unflatten"]

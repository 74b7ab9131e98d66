"""From scheduled nodes to kernel text."""

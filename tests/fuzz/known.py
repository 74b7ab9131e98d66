"""Findings that are open: signature and reason. A run does not fail on them."""

KNOWN: dict[str, str] = {}

"""The loop language: scalar expressions, index algebra, node kinds, dtype rules, and a verifier."""

"""Passes that put other nodes or stages in the place of some, by what they compute."""

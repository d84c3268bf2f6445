"""Commits one batch in one transaction: staged rows, source offsets and token become visible together."""

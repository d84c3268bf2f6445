"""Encodes group keys and rows as bytes, many at once, and the description that every store contains."""

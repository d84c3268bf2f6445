"""Vectorised state operators: aggregates, windows, deduplication and functions over Arrow columns."""

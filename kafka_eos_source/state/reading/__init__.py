"""Reads state without its operator: takes a snapshot of one committed batch, and decodes it."""

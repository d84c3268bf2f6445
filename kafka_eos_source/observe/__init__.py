"""Figures about running queries: measured in the process that commits, and shown live."""

"""Decides on the driver which offsets the next micro-batch reads, and splits them into tasks."""

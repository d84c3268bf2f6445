"""Decodes and encodes records whose schema lives in a Schema Registry."""

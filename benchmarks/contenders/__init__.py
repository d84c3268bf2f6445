"""The contenders, each a small module with one interface."""

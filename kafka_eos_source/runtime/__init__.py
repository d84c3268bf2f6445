"""Small helpers that import nothing else from this package but its errors."""

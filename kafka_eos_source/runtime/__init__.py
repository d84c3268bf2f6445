"""Small helpers that import nothing else from this package except its errors."""

"""Group keys and rows as bytes, many at once, and what a store says of itself."""

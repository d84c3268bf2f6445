"""A tour of operating a query: ``./dev tour``. It runs everything for real, and checks what it shows."""

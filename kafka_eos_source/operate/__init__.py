"""Ways out for people (docs/runbooks.md): look at a query, fence it, hand its name over, sweep after it."""

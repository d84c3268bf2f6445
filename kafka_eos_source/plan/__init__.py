"""Which offsets make the next batch: pure functions, no clock, no broker."""

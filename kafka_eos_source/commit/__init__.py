"""One batch, one transaction: what was staged becomes visible together with its offsets and its token."""

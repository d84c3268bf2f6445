"""State read by others than its operator: one committed batch, decoded."""

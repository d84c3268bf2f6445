"""State that commits with the micro-batch's transaction (KIP-892), and the operators that use it."""

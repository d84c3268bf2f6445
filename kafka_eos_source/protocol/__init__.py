"""What processes tell each other: tokens, identities, offset logs and packets. Pure, versioned formats."""

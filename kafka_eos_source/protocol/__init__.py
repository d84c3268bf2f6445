"""Versioned formats that processes exchange: tokens, identities, offset log entries and packets."""

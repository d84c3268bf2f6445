"""Compares kafka-eos with its peers on the same work: same records, same broker, same machine, in turn."""

"""kafka-eos and its peers at the same work: same records, same broker, same machine, one after the other."""

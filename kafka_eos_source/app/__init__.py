"""The front door for people: an `App` is one query whose id, brokers and checkpoint are said once."""

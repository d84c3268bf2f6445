"""The changelog topic of a store: made and checked, how far it is committed, and state restored from it."""

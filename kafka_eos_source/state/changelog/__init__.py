"""The changelog topic of a store: its checks and its committed offset (`topic`), and restores.

`recovery` decides what becomes of local state and opens a store, which `restore` restores. `move` moves state
to another number of shards.
"""

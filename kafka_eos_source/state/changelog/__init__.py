"""The changelog topic of a store: its checks, its committed offset, and restores.

`recovery` opens a store and restores it with `restore`, after `restore_plan` decided what to read. `move`
moves state to another number of shards.
"""

"""The changelog topic of a store: creating and checking it, its committed offset, and restoring from it.

`recovery` opens a store and restores it with `restore`, after `restore_plan` decided what to read. `move`
moves state to another number of shards.
"""

"""Faults on purpose. Ids (T01 …) are those of `docs/faults.md`, which this suite writes.

- `loop`: Spark's micro-batch loop without Spark, in a process of its own: the same calls on the same objects,
  the same files in the checkpoint, and a start of one second instead of ten. What it cannot show (tasks in
  other processes, Spark's own retries) the tests one folder up show with the real thing.
- `proxy`: stands between clients and a broker, knows requests by their API key, holds or drops them.
- `oracle`: what must be true at the end, whatever happened.
- `mutations`: rules of the product, switched off one at a time, to prove that the tests bite.
"""

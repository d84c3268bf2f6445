"""Fault injection: each test breaks one thing and proves that every record is still written exactly once.

The ids (T01 …) are those of `docs/faults.md`, whose table this suite generates.

- `scenario`: one query with its topics, and the processes that run it.
- `loop`: Spark's micro-batch loop without Spark, in a separate process. It makes the same calls on the same
  objects and writes the same checkpoint files, but starts in one second instead of ten. The tests one folder
  up use real Spark for what the loop cannot show: tasks in other processes, and Spark's own retries.
- `proxy`: a TCP proxy between clients and a broker that holds or drops requests by their API key.
- `oracle`: reads the topics afterwards and checks what must hold after every fault.
- `mutations`: switches off one safety rule of the product at a time, to prove that the tests can fail.
"""

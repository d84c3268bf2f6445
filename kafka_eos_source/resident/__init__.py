"""Resident workers: processes beside Spark's Python workers that keep something open between tasks.

Spark hands each task to whichever Python worker has been idle longest, so two tasks of the same shard seldom
meet in one process. A task can therefore pass its work to the resident worker of a *slot*, a small number
that the caller derives from the shard. The work of a slot always runs in the same process of this executor,
one after the other::

    Spark's Python worker                       resident worker of the slot
    ─────────────────────                       ───────────────────────────
    client.run(work, slot) ──── work ─────────▶ server: runs it
                           ◀─── batches ─────── …
    yields the batches to Spark

Resident workers are an optimisation. A task without a resident worker does its work itself, and starts one in
the background for the next task.
"""

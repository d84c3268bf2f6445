"""What keeps PySpark's workers quick from one small task to the next: each task of ours begins with it."""

from __future__ import annotations

from kafka_eos_source.cycles import spare_what_stays
from kafka_eos_source.prompt_ack import acknowledge


def task_begins() -> None:
    """Called in a worker where our code in a task begins, before it waits for what the JVM sends."""
    acknowledge()
    spare_what_stays()

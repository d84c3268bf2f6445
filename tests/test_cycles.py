"""A worker's long-lived objects are exempt from garbage collection; cycles that a task leaves are not."""

from __future__ import annotations

import subprocess
import sys

TASKS = """
import gc, weakref
from kafka_eos_source.spark.worker import freeze_loaded_objects

class Node:
    pass

def task():
    freeze_loaded_objects()
    node = Node()
    node.itself = node
    left.append(weakref.ref(node))

left = []
for number in range(1, 10):
    task()
    before = gc.get_freeze_count()
    gc.collect()  # as PySpark's daemon does after each task
    assert left[-1]() is None, f"the cycle of task {number} stays"
    print(before)
"""


def test_objects_that_survive_the_first_task_are_not_scanned_by_later_collections() -> None:
    spared = [
        int(line)
        for line in subprocess.run(
            [sys.executable, "-c", TASKS], check=True, capture_output=True, text=True
        ).stdout.split()
    ]
    assert spared[0] == 0, "the first task loads what stays"
    assert spared[1] > 1000
    assert [number for number in range(2, 10) if spared[number - 1] > spared[number - 2]] == [2, 4, 8]

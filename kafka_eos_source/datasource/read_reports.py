"""Reports of tasks that staged what they read: rows of a frame that contain commit messages.

A report travels from the process that reads to the one that writes, through Spark, as a signed row. The key
consists of what identifies one batch and one sink. So it protects against accidents, such as rows of another
batch or of another frame, and not against people: who can run code in the query knows the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kafka_eos_source.errors import StagedReadError
from kafka_eos_source.in_read.staged import STAGED, described
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.spark.pickled import from_row, to_row
from kafka_eos_source.spark.worker import StreamingTask


def report_of(message: Any, options: WriteOptions, task: StreamingTask) -> bytes:
    """Returns the commit message of a task that read, as a row for a task of the sink."""
    return to_row(message, _key(options, task))


def messages_in(reports: Iterable[memoryview], options: WriteOptions, task: StreamingTask) -> tuple[Any, ...]:
    """Returns the commit messages in the reports that a task of the sink received.

    Raises:
        StagedReadError: if a row of the frame is no report for the batch of the task and this sink.
    """
    key = _key(options, task)
    try:
        return tuple(from_row(each, key) for each in reports)
    except ValueError as error:
        raise StagedReadError(
            f"a row of column {STAGED!r} is no report of a task that read for batch {task.batch_id} with the "
            f"options of this sink: {error}.",
            fix="write the frame that map_in_read returned without changes: do not cache it, and combine it "
            "only with frames of map_in_read that have the same write=.",
        ) from error


def _key(options: WriteOptions, task: StreamingTask) -> bytes:
    known = (task.query_id, task.run_id, task.batch_id, described(options))
    return json.dumps(known, sort_keys=True).encode()

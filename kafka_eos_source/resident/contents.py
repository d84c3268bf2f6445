"""What the messages between a task and a resident worker carry: a request, or an error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from kafka_eos_source.spark.pickled import from_message, to_message
from kafka_eos_source.spark.task import StreamingTask

#: Work of a task: returns the batches for the task. It can be pickled.
Work = Callable[[], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Request:
    """What a task asks of a resident worker.

    Attributes:
        task: the task, which `running_task` returns during the work.
        work: what to do.
    """

    task: StreamingTask | None
    work: Work


class ResidentTracebackError(Exception):
    """Carries the traceback of an error in a resident worker; it is the cause of the error in the task."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def pack_error(error: BaseException) -> bytes:
    """Returns the message for an error, with its traceback as text.

    An error that cannot be pickled becomes a `RuntimeError` with its class and text.
    """
    trace = "".join(traceback.format_exception(error))
    try:
        packed = to_message((error, trace))
        from_message(packed)  # an exception class may accept pickling and refuse unpickling
    except Exception:  # noqa: BLE001 - whatever the user's class raises, its text must arrive
        return to_message((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return packed


def unpack_error(packed: memoryview) -> Exception:
    """Returns the error that `pack_error` packed. Its cause has the traceback in the resident worker."""
    error, trace = from_message(packed)
    assert isinstance(error, Exception)
    error.__cause__ = ResidentTracebackError(trace)
    return error

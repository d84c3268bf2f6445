"""Interface of the two classes that build Arrow columns from messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.read.runs import Run, where


class ColumnTooLargeError(Exception):
    """A column of the batch is larger than the limit."""


class Headers(NamedTuple):
    """Headers of several messages.

    Attributes:
        counts: number of headers of each message.
        names: names of all headers, message by message.
        values: their values.
    """

    counts: npt.NDArray[np.int32]
    names: pa.Array
    values: pa.Array


class Contents(Protocol):
    """Contents of messages as Arrow columns; each method builds its column.

    Raises:
        ColumnTooLargeError: from all methods but `timestamps`, if the column is larger than the limit.
    """

    def keys(self) -> pa.Array:
        """Returns the keys as binary column, which distinguishes null from empty."""

    def values(self) -> pa.Array:
        """Returns the values, like `keys`."""

    def timestamps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Returns timestamps in ms (-1 = none), and their types as Spark numbers them."""

    def headers(self) -> Headers:
        """Returns the headers.

        Raises:
            InvalidRecordError: if a header name is not UTF-8.
        """


def not_utf8(runs: Sequence[Run], index: int, failure: UnicodeDecodeError) -> InvalidRecordError:
    """Returns the error for the message at ``index``, which has a header name that is not UTF-8."""
    tp, offset = where(runs, index)
    return InvalidRecordError(
        f"the record at offset {offset} of {tp} has a header name that is not UTF-8: {failure}.",
        fix="set includeHeaders=false until the query has read the record, with nulls in place of the "
        "headers. startingOffsets has no effect on a query with a checkpoint.",
    )

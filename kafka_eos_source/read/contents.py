"""What the two makers of columns have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.read.runs import Run, where


class ColumnTooLargeError(Exception):
    """A column of the batch has more bytes than Arrow's 32-bit offsets, or a test, let it have."""


class Headers(NamedTuple):
    """Attributes:
    counts: how many each message has.
    names, values: of all, one behind the other.
    """

    counts: npt.NDArray[np.int32]
    names: pa.Array
    values: pa.Array


class Contents(Protocol):
    """The contents of messages, column by column; each is made when it is asked for.

    Raises:
        ColumnTooLargeError: by all but `timestamps`.
    """

    def keys(self) -> pa.Array:
        """Binary; null and empty are two things."""

    def values(self) -> pa.Array:
        """As `keys`."""

    def timestamps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Milliseconds, -1 where there is none, and Spark's numbers of their types."""

    def headers(self) -> Headers:
        """Raises:
        InvalidRecordError: a name is not UTF-8.
        """


def not_utf8(runs: Sequence[Run], index: int, failure: UnicodeDecodeError) -> InvalidRecordError:
    """The message at ``index`` has a header with such a name."""
    tp, offset = where(runs, index)
    return InvalidRecordError(
        f"record {tp} offset {offset} has a header name that is not UTF-8: {failure}.",
        fix="set includeHeaders=false, or skip the record with startingOffsets.",
    )

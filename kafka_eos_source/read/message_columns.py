"""Builds columns from message objects of confluent-kafka; see also `kernel_columns`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import methodcaller
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.read.contents import ColumnTooLargeError, Headers, not_utf8
from kafka_eos_source.read.runs import MessageList, Run

#: librdkafka numbers timestamp types 0 (none), 1 (create) and 2 (append); Spark numbers them -1, 0 and 1.
_TYPE_SHIFT = 1

#: If a header name is not UTF-8, confluent-kafka's ``headers()`` returns a list *and* leaves an exception
#: set. Python checks for that after a call from C, such as this one. After a call from Python, a later line
#: would fail.
_headers_of = methodcaller("headers")


class MessageContents:
    """Contents of message objects (`contents.Contents`)."""

    def __init__(self, runs: Sequence[Run], limit_bytes: int) -> None:
        self._runs = runs
        self._limit_bytes = limit_bytes
        self._messages: Sequence[Any] = MessageList.joined([cast(MessageList, run.messages) for run in runs])

    def keys(self) -> pa.Array:
        return self._fitting([message.key() for message in self._messages], pa.binary())

    def values(self) -> pa.Array:
        return self._fitting([message.value() for message in self._messages], pa.binary())

    def timestamps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        pairs = np.fromiter(
            chain.from_iterable([message.timestamp() for message in self._messages]),
            np.int64,
            2 * len(self._messages),
        )
        types, ms = pairs[0::2] - _TYPE_SHIFT, pairs[1::2]
        none = types < 0
        if none.any():
            ms = np.where(none, -1, ms)  # ConsumerRecord.NO_TIMESTAMP, as in Spark
        return ms, types.astype(np.int32)

    def headers(self) -> Headers:
        lists: list[list[tuple[str, bytes | None]] | None] = []
        for index, message in enumerate(self._messages):
            try:
                lists.append(_headers_of(message))
            except (UnicodeDecodeError, SystemError) as failure:
                cause = failure.__cause__ if isinstance(failure, SystemError) else failure
                if not isinstance(cause, UnicodeDecodeError):
                    raise
                raise not_utf8(self._runs, index, cause) from failure
        flat = [header for one in lists if one for header in one]
        return Headers(
            np.fromiter((len(one) if one else 0 for one in lists), np.int32, len(lists)),
            self._fitting([name for name, _ in flat], pa.string()),
            self._fitting([_as_bytes(value) for _, value in flat], pa.binary()),
        )

    def _fitting(self, values: list[Any], kind: pa.DataType) -> pa.Array:
        array = pa.array(values, kind)
        if isinstance(array, pa.ChunkedArray):  # Arrow returns this for more than 2 GiB
            raise ColumnTooLargeError
        data = array.buffers()[2]
        if data is not None and data.size > self._limit_bytes:
            raise ColumnTooLargeError
        return array


def _as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value

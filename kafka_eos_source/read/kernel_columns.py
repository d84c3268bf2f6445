"""Builds columns from messages that the C kernel has put into Arrow buffers; see also `message_columns`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.kafka.kernel_messages import Block, KernelMessages
from kafka_eos_source.read.contents import ColumnTooLargeError, Headers, not_utf8
from kafka_eos_source.read.runs import Run

Number = TypeVar("Number", np.int32, np.int64)


class KernelContents:
    """Contents of messages that the C kernel received (`contents.Contents`)."""

    def __init__(self, runs: Sequence[Run], limit_bytes: int) -> None:
        self._runs = runs
        self._limit_bytes = limit_bytes
        #: Messages of the runs; runs that are adjacent in a block are joined.
        self._pieces: list[KernelMessages] = []
        for run in runs:
            messages = cast(KernelMessages, run.messages)
            last = self._pieces[-1] if self._pieces else None
            if last is not None and last.block is messages.block and last.past == messages.first:
                self._pieces[-1] = KernelMessages(last.block, last.first, messages.past)
            else:
                self._pieces.append(messages)

    def keys(self) -> pa.Array:
        return self._joined([each.keys for each in self._pieces])

    def values(self) -> pa.Array:
        return self._joined([each.values for each in self._pieces])

    def timestamps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        return (
            self._numbers(lambda block: block.timestamps_ms),
            self._numbers(lambda block: block.timestamp_types),
        )

    def headers(self) -> Headers:
        counts = self._numbers(lambda block: block.header_counts)
        broken = np.flatnonzero(counts < 0)
        if len(broken):
            self._raise_not_utf8(int(broken[0]))
        spans = [
            (each.block, int(each.block.header_starts[each.first]), int(each.block.header_starts[each.past]))
            for each in self._pieces
        ]
        return Headers(
            counts,
            self._joined([block.header_names.slice(first, past - first) for block, first, past in spans]),
            self._joined([block.header_values.slice(first, past - first) for block, first, past in spans]),
        )

    def _raise_not_utf8(self, index: int) -> None:
        row = index
        for each in self._pieces:
            if row < len(each):
                try:
                    each.block.broken_name(each.first + row).decode()
                except UnicodeDecodeError as failure:
                    raise not_utf8(self._runs, index, failure) from failure
            row -= len(each)
        raise AssertionError("the C kernel reported a header name as invalid that Python decodes as UTF-8")

    def _numbers(self, of: Callable[[Block], npt.NDArray[Number]]) -> npt.NDArray[Number]:
        parts = [of(each.block)[each.first : each.past] for each in self._pieces]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _joined(self, parts: list[pa.Array]) -> pa.Array:
        if sum(map(_data_bytes, parts)) > self._limit_bytes:
            raise ColumnTooLargeError
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _data_bytes(array: pa.Array) -> int:
    offsets = array.buffers()[1]
    if offsets is None or not len(array):
        return 0
    first = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return int(first[-1]) - int(first[0])

"""Decodes columns of Avro payloads with native/avro.c."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.registry.avro.kernel import (
    ERROR,
    NO_MEMORY,
    AvroKernel,
    Input,
    Memory,
    buffer,
    columns,
)
from kafka_eos_source.registry.avro.messages import message
from kafka_eos_source.registry.avro.program import Column, Kind, Program
from kafka_eos_source.registry.codec import MOST_BYTES, Converted


class AvroDecoder:
    """Decodes the payloads of one writer schema into values of one reader schema."""

    def __init__(self, program: Program, kernel: AvroKernel) -> None:
        self._program = program
        self._kernel = kernel
        self._arrays = _arrays(program)

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of decoded values."""
        return self._program.columns[0].type

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes messages (see `codec.Decoder`)."""
        if isinstance(messages, pa.ChunkedArray):
            messages = messages.combine_chunks()
        if not (pa.types.is_binary(messages.type) or pa.types.is_large_binary(messages.type)):
            messages = messages.cast(pa.large_binary())
        validity, offsets, data = messages.buffers()
        given = Input(
            *(array.ctypes.data for array in self._arrays),
            len(self._program.columns),
            validity.address if validity else None,
            offsets.address if offsets else None,
            data.address if data else None,
            8 if pa.types.is_large_binary(messages.type) else 4,
            messages.offset,
            len(messages),
            start,
            most_bytes,
        )
        memory = Memory(self._kernel, self._kernel.decode(ctypes.byref(given)))
        block = memory.block
        if block.status == NO_MEMORY:
            raise MemoryError("not enough memory for a batch of Avro records")
        if not block.rows:
            return Converted(pa.array([], self.arrow_type))
        found = np.frombuffer(buffer(memory, block.errors), ERROR).tolist()
        errors = {row: self._message(*error) for row, *error, _ in found}
        return Converted(_Arrays(memory).array(self._program.columns[0]), errors)

    def _message(self, node: int, code: int, detail: int, more: int) -> str:
        return message(code, detail, more, self._program.paths[node], self._program.reasons.get(node, ""))


def _arrays(program: Program) -> list[npt.NDArray[Any]]:
    """Returns the program as the arrays that ``input_t`` refers to, in its order."""
    kinds = [
        (column.kind, program.column_links[column.index], len(column.children)) for column in program.columns
    ]
    return [
        np.array(program.nodes, np.int64),
        np.array(program.links or [0], np.int64),
        np.array(program.symbols or [0], np.int64),
        np.frombuffer(bytes(program.text) or b"\0", np.uint8),
        np.array(kinds, np.int64),
    ]


class _Arrays:
    """Turns the columns of a block into Arrow arrays, which refer to the block's memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._columns = columns(memory)

    def array(self, column: Column) -> pa.Array:
        found = self._columns[column.index]
        if column.kind is Kind.NONE:
            return pa.nulls(found.rows)
        buffers = [buffer(self._memory, found.validity)]
        if column.kind is not Kind.STRUCT:
            buffers.append(buffer(self._memory, found.values))
        if column.kind is Kind.TEXT:
            buffers.append(buffer(self._memory, found.heap))
        if pa.types.is_map(column.type):
            (entries,) = column.children
            keys, items = (self.array(child) for child in entries.children)
            children = [
                pa.StructArray.from_arrays(
                    [keys, items], fields=[column.type.key_field, column.type.item_field]
                )
            ]
        else:
            children = [self.array(child) for child in column.children]
        return pa.Array.from_buffers(column.type, found.rows, buffers, -1, 0, children)

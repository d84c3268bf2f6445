"""Encodes columns as Avro payloads with native/avro.c."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.registry.avro.encode_program import EncodeProgram
from kafka_eos_source.registry.avro.kernel import (
    ERROR,
    NO_MEMORY,
    AvroKernel,
    Memory,
    Values,
    array_pointer,
    buffer,
    columns,
)
from kafka_eos_source.registry.avro.messages import message
from kafka_eos_source.registry.codec import MOST_BYTES, Converted


class AvroEncoder:
    """Encodes values of one Arrow type with one schema."""

    def __init__(self, program: EncodeProgram, kernel: AvroKernel) -> None:
        self._program = program
        self._kernel = kernel
        self._arrays: list[npt.NDArray[Any]] = [
            np.array([node.numbers() for node in program.nodes], np.int64),
            np.array(program.links or [0], np.int64),
            np.array(program.symbols or [0], np.int64),
            np.frombuffer(bytes(program.text) or b"\0", np.uint8),
        ]

    def encode(self, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES) -> Converted:
        """Encodes values (see `codec.Encoder`)."""
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        if not values.type.equals(self._program.type):
            values = values.cast(self._program.type)
        capsules = values.__arrow_c_array__()  # keeps the exported array alive
        given = Values(
            *(array.ctypes.data for array in self._arrays),
            array_pointer(capsules[1]),
            self._program.array_count,
            prefix,
            len(prefix),
            most_bytes,
        )
        memory = Memory(self._kernel, self._kernel.encode(ctypes.byref(given)))
        block = memory.block
        if block.status == NO_MEMORY:
            raise MemoryError("not enough memory for a batch of Avro records")
        if not block.rows:
            return Converted(pa.array([], pa.binary()))
        errors = {}
        for row, node, code, detail, more, text in np.frombuffer(
            buffer(memory, block.errors), ERROR
        ).tolist():
            errors[row] = message(code, detail, more, self._program.paths[node], text=text)
        (column,) = columns(memory)
        parts = [buffer(memory, part) for part in (column.validity, column.values, column.heap)]
        return Converted(pa.Array.from_buffers(pa.binary(), block.rows, parts), errors)

"""Reads values of a state variable in every schema that the variable has had."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import types as t

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.processor import evolution
from kafka_eos_source.state.processor.codec import StructCodec, Value


class VersionedCodec:
    """Writes rows in the newest schema; reads rows of all schemas and converts them to the newest.

    Args:
        schemas: all schemas, oldest first; the first byte of a row is the position of its schema.

    Attributes:
        encode: encodes a row, see `StructCodec.encode`.
        decode: decodes a row and converts it to the newest schema, see `StructCodec.decode`.
        names: names of the fields in the newest schema.
    """

    def __init__(self, schemas: tuple[t.StructType, ...]) -> None:
        newest = StructCodec(schemas[-1], len(schemas) - 1)
        self.names = newest.names
        self.encode: Callable[[Value], bytes] = newest.encode
        self.decode: Callable[[bytes], Value] = self._decode if len(schemas) > 1 else newest.decode
        self._newest = newest
        self._version = len(schemas) - 1
        self._older = [
            (StructCodec(schema, version), evolution.converter(schema, schemas[-1]))
            for version, schema in enumerate(schemas[:-1])
        ]

    def _decode(self, data: bytes) -> Value:
        version = data[0] if data else -1
        if version == self._version:
            return self._newest.decode(data)
        if 0 <= version < self._version:
            codec, convert = self._older[version]
            return convert(codec.decode(data))
        raise StatefulProcessorError(
            f"STATE_STORE_VALUE: {data[:64]!r} has schema version {version}, expected 0 to {self._version}.",
            fix="run the newest version of the processor; if this is the newest, the state is damaged.",
        )

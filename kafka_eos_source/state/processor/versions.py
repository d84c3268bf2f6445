"""Values of a variable in every schema that it has had."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import types as t

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.processor import evolution
from kafka_eos_source.state.processor.codec import StructCodec, Value


class VersionedCodec:
    """Writes rows in the newest schema, reads them in the one they were written in, as rows of the newest.

    Args:
        schemas: oldest first; their number is the first byte of a row.

    Attributes:
        encode: a row as bytes, see `StructCodec.encode`.
        decode: the row of these bytes as one of the newest schema, see `StructCodec.decode`.
        names: the fields of the newest schema.
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
            f"STATE_STORE_VALUE: {data[:64]!r} has schema {version}, expected 0 to {self._version}",
            fix="the state is damaged, or was written by a newer version of the processor",
        )

"""Encodes a column of values into framed messages of one schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from kafka_eos_source.registry import formats
from kafka_eos_source.registry.codec import MOST_BYTES, Converted, Encoder, Schema
from kafka_eos_source.registry.framing import frame_prefix
from kafka_eos_source.registry.slices import slices


@dataclass(frozen=True)
class Encoding:
    """How to encode a column; travels to Spark's workers, which do not call the registry for it.

    Attributes:
        schema_id: id of the schema.
        schema: the schema.
        message: full name of the message type in a Protobuf schema; None = its first.
    """

    schema_id: int
    schema: Schema
    message: str | None = None

    def slices(self, values: pa.Array) -> Iterator[Converted]:
        """Encodes values slice by slice. Raises the errors of `encode`."""
        return slices(self.encode, values, "encoded")

    def encode(self, values: pa.Array | pa.ChunkedArray, most_bytes: int = MOST_BYTES) -> Converted:
        """Encodes values, or only the first if more would take more than `most_bytes`.

        Raises:
            InvalidSchemaError: if values of this type do not fit the schema.
        """
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        key = (self, values.type)
        known = _encoders.get(key)
        if known is None:
            prefix = frame_prefix(self.schema_id, formats.message_path(self.schema, self.message))
            known = _encoders[key] = (formats.encoder(self.schema, values.type, self.message), prefix)
        encoder, prefix = known
        return encoder.encode(values, prefix, most_bytes)


#: Encoders of this process, and the frame of their messages.
_encoders: dict[tuple[Encoding, pa.DataType], tuple[Encoder, bytes]] = {}

"""Encodes a column of values into framed messages of one schema."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from kafka_eos_source.registry import formats
from kafka_eos_source.registry.codec import Converted, Encoder, Schema
from kafka_eos_source.registry.framing import frame_prefix


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

    def encode(self, values: pa.Array | pa.ChunkedArray) -> Converted:
        """Encodes values.

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
        return encoder.encode(values, prefix)


#: Encoders of this process, and the frame of their messages.
_encoders: dict[tuple[Encoding, pa.DataType], tuple[Encoder, bytes]] = {}

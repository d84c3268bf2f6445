"""What a codec of one schema format offers: from a column of bytes to a column of values, and back.

Confluent's wire format puts a frame before each payload: a zero byte, the schema id (4 bytes, big endian),
and, for Protobuf only, the path of the message inside its file. Codecs do not know the frame. A decoder skips
`start` bytes of each message; an encoder puts `prefix` before each payload. Callers group messages by frame,
because all messages of one frame share one writer schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

SchemaFormat = Literal["AVRO", "PROTOBUF", "JSON"]


@dataclass(frozen=True)
class Reference:
    """A schema that another schema imports under a name (an Avro full name, or the path of a .proto file)."""

    name: str
    schema: Schema


@dataclass(frozen=True)
class Schema:
    """The text of a schema with everything that it refers to.

    Attributes:
        format: How records of this schema are encoded.
        text: The schema as the registry stores it.
        references: The imported schemas, themselves with their references.
    """

    format: SchemaFormat
    text: str
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True)
class Converted:
    """A converted column, and the rows that could not be converted.

    Attributes:
        values: One value per input row; null where the input is null or the row has an error.
        errors: Message by row number, for rows that do not fit their schema.
    """

    values: pa.Array
    errors: Mapping[int, str] = field(default_factory=dict)


class Decoder(Protocol):
    """Turns the payloads of one writer schema into a column of one Arrow type."""

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of decoded values, which the reader schema decides."""
        ...

    def decode(self, messages: pa.Array, start: int) -> Converted:
        """Decode messages (binary), each of which begins with `start` bytes that are not payload."""
        ...


class Encoder(Protocol):
    """Turns a column of values into the payloads of one schema."""

    def encode(self, values: pa.Array, prefix: bytes) -> Converted:
        """Encode each value, and put `prefix` before it. The values of the result are binary."""
        ...

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

#: The most memory, in bytes, of the column that one call of a decoder or an encoder makes. A record of a few
#: kilobytes can decode to gigabytes, and a batch has 10,000 records, so the limit is for the call. It is also
#: the most that a single record can take.
MOST_BYTES = 256 << 20

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
        values: One value per row that was converted; null where the input is null or the row has an error.
            If more would take too much memory, only the first rows were converted; none if the first row
            alone takes too much.
        errors: Message by row number, for rows that do not fit their schema.
    """

    values: pa.Array
    errors: Mapping[int, str] = field(default_factory=dict)

    def first(self, rows: int) -> Converted:
        """Returns only the first rows."""
        return self if rows >= len(self.values) else self.of(self.values.slice(0, rows), self.errors)

    @classmethod
    def of(cls, values: pa.Array, errors: Mapping[int, str]) -> Converted:
        """Returns values with the errors of their rows, and without those of rows behind them."""
        return cls(values, {row: text for row, text in errors.items() if row < len(values)})


class Decoder(Protocol):
    """Turns the payloads of one writer schema into a column of one Arrow type."""

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of decoded values, which the reader schema decides."""
        ...

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes messages (binary), each of which begins with `start` bytes that are not payload.

        The column that it makes takes at most `most_bytes`, so it may stop after some of the messages.
        """
        ...


class Encoder(Protocol):
    """Turns a column of values into the payloads of one schema."""

    def encode(self, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES) -> Converted:
        """Encodes values, and puts `prefix` before each. The values of the result are binary.

        The column that it makes takes at most `most_bytes`, so it may stop after some of the values.
        """
        ...

"""Decodes a column of framed messages into one column of the reader schema's type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry import formats
from kafka_eos_source.registry.catalog import catalog
from kafka_eos_source.registry.codec import MOST_BYTES, Converted, Decoder, Schema
from kafka_eos_source.registry.framing import Frame, Messages, Rows, frames, paths
from kafka_eos_source.registry.slices import slices

#: The most characters of the error of one row.
MOST_CHARACTERS = 1_000


@dataclass(frozen=True)
class Decoding:
    """How to decode a column; travels to Spark's workers.

    Attributes:
        registry: options of the registry.
        reader: the schema of the result.
        message: full name of the message type in the reader schema; for Protobuf.
        arrow_type: the type of the result, which can differ from the reader schema's in units of time.
        reader_id: id of the reader schema. Its messages can be decoded without a call of the registry.
    """

    registry: Mapping[str, Any] = field(repr=False)
    reader: Schema
    message: str | None
    arrow_type: pa.DataType
    reader_id: int | None = None

    def slices(self, column: pa.Array) -> Iterator[Converted]:
        """Decodes a column of messages slice by slice. Raises the errors of `decode`."""
        return slices(self.decode, column, "decoded")

    def decode(self, column: pa.Array | pa.ChunkedArray, most_bytes: int = MOST_BYTES) -> Converted:
        """Decodes a column of messages, or its first rows if more would take more than `most_bytes`.

        Raises:
            RegistryUnavailableError: if a writer schema is not cached, and the registry does not answer.
        """
        messages = Messages.of(column)
        while (found := self._decode(messages, most_bytes)) is None:
            messages = Messages.of(messages.column.slice(0, len(messages.column) // 2))
        return found

    def _decode(self, messages: Messages, most_bytes: int) -> Converted | None:
        groups, errors = frames(messages)
        known_schemas = catalog(self.registry)
        if self.reader_id is not None:
            known_schemas.add(self.reader_id, self.reader)
        schemas = known_schemas.of_ids(each.schema_id for each in groups) if groups else {}
        known: list[tuple[Frame, Decoder]] = []
        for group in groups:
            writer = schemas[group.schema_id]
            if isinstance(writer, str):
                errors.update(dict.fromkeys(group.rows.tolist(), writer))
                continue
            framed = [group]
            if writer.format == "PROTOBUF":
                framed, malformed = paths(messages, group)
                errors.update(malformed)
            for frame in framed:
                decoder = self._decoder(frame, writer)
                if isinstance(decoder, str):
                    errors.update(dict.fromkeys(frame.rows.tolist(), decoder))
                else:
                    known.append((frame, decoder))
        return self._in_order(messages, known, errors, most_bytes)

    def _decoder(self, frame: Frame, writer: Schema) -> Decoder | str:
        """Returns the decoder of a frame, which is kept; text if its schema does not fit the reader's."""
        decoders = _decoders.setdefault(self._key, {})
        place = (frame.schema_id, frame.path)
        found = decoders.get(place)
        if found is None:
            found = decoders[place] = self._new_decoder(frame, writer)
        return found

    @property
    def _key(self) -> tuple[object, ...]:
        options = tuple(sorted((name, str(value)) for name, value in self.registry.items()))
        return options, self.reader, self.message

    def _new_decoder(self, frame: Frame, writer: Schema) -> Decoder | str:
        if writer.format != self.reader.format:
            return (
                f"schema id {frame.schema_id} has the format {writer.format}; expected {self.reader.format}, "
                "the format of the reader schema"
            )
        try:
            return formats.decoder(writer, frame.path, self.reader, self.message)
        except InvalidSchemaError as error:  # the record cannot be read, however often the task is repeated
            return f"schema id {frame.schema_id} does not fit the reader schema: {error.message}"

    def _in_order(
        self,
        messages: Messages,
        known: Sequence[tuple[Frame, Decoder]],
        errors: dict[int, str],
        most_bytes: int,
    ) -> Converted | None:
        """Decodes each group, and puts the values into the order of the rows.

        A single group may end early, and the result with it. Returns None if several groups do not fit, where
        the rows of one end while those of others go on.
        """
        rows = len(messages.column)
        if len(known) == 1 and len(known[0][0].rows) == len(messages.present):
            frame, decoder = known[0]  # the usual case: nothing is copied
            decoded = decoder.decode(messages.column, frame.start, most_bytes)
            for row, text in decoded.errors.items():
                errors[row] = _of_schema(frame, text)
            return Converted.of(self._fit(decoded.values), errors)
        parts: list[pa.Array] = []
        place = np.full(rows, -1, np.int64)
        done, left = 0, most_bytes
        for frame, decoder in known:
            decoded = decoder.decode(_rows_of(messages.column, frame.rows), frame.start, left)
            for row, text in decoded.errors.items():
                errors[int(frame.rows[row])] = _of_schema(frame, text)
            made = len(decoded.values)
            if made < len(frame.rows):
                if len(known) > 1:
                    return None
                rows = int(frame.rows[made])
            left = max(0, left - decoded.values.nbytes)
            parts.append(self._fit(decoded.values))
            place[frame.rows[:made]] = np.arange(done, done + made)
            done += made
        place = place[:rows]
        if not parts:
            values = pa.nulls(rows, self.arrow_type)
        else:
            values = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
            if done < rows or not (place[:-1] < place[1:]).all():
                values = values.take(pa.array(place, mask=place < 0))
        if rows > 1 and values.nbytes > most_bytes:  # nulls for bad records take memory, too
            return None
        return Converted.of(values, errors)

    def _fit(self, values: pa.Array) -> pa.Array:
        if values.type.equals(self.arrow_type):
            return values
        if not _differ_only_in_time(values.type, self.arrow_type):  # a cast of structs goes by field names
            raise InvalidSchemaError(
                f"the decoder returns {values.type}; expected {self.arrow_type}, the type of the column.",
                fix="report this as a bug, with both schemas.",
            )
        return values.cast(self.arrow_type)


#: Decoders of this process: by what is decoded, then by schema id and path.
_decoders: dict[tuple[object, ...], dict[tuple[int, tuple[int, ...]], Decoder | str]] = {}


def _differ_only_in_time(one: pa.DataType, other: pa.DataType) -> bool:
    """Returns whether two types are the same except for units of time, and for what may be null."""
    if one.id != other.id:
        return False
    if pa.types.is_timestamp(one):
        return bool(one.tz == other.tz)
    if pa.types.is_time(one) or pa.types.is_duration(one):
        return True
    if one.num_fields != other.num_fields:
        return False
    if not one.num_fields:
        return bool(one.equals(other))
    pairs = [(one.field(at), other.field(at)) for at in range(one.num_fields)]
    has_names = pa.types.is_struct(one)
    return all(
        (not has_names or left.name == right.name) and _differ_only_in_time(left.type, right.type)
        for left, right in pairs
    )


def _rows_of(column: pa.Array, rows: Rows) -> pa.Array:
    """Returns some rows of a column: a slice if they follow each other, which needs no copy."""
    if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return column.slice(int(rows[0]), len(rows))
    return column.take(pa.array(rows))


def _of_schema(frame: Frame, text: str) -> str:
    """Returns the error of a row. It may quote the record, such as a key of a map, but not all of it."""
    shown = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
    return f"schema id {frame.schema_id}: {shown}"

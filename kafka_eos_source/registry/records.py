"""Decodes and encodes columns of keys or values, whose records name their schemas (`registry.frames`).

This module is the border between what somebody else wrote and the query. Each error is either about one
record, for which the options for bad records decide, or about the whole task::

    what happens                                                        whose error
    ------------------------------------------------------------------  -------------------------------------
    the registry says that it does not have the id                      the record's (after `catalog`'s wait)
    the registry says that it does not have a schema that is imported   the record's
    the imports are incomplete, a circle, too many, too deep            the record's
    the schema is larger than `schema.limit.bytes`, or not text         the record's
    more ids of a slice than `schema.limit.unknown.ids` are unknown     the record's, of further ids
    the schema has an unknown format, or another one than the reader's  the record's
    the schema cannot be compiled, or does not fit the reader schema    the record's
    compiling the schema takes too many steps, or protoc too long       the record's
    a compressed payload is damaged, or takes more than `MOST_BYTES`    the record's
    compiling, or decoding a payload, raises any other exception        the record's, and a warning is logged
    the registry cannot be reached, or answers HTTP 5xx, 408, 425, 429, the task's: RegistryUnavailableError
    or AWS throttles the request
    the registry refuses the login (401, 403), or AWS the action        the task's: AuthorizationError
    the answer is not that of a registry (HTML, wrong types, 404        the task's: OperatorError
    without a code)
    a library or protoc is missing, or the machine ends protoc          the task's
    memory or files are used up (MemoryError, OSError)                  the task's
    the query's own reader schema cannot be used                        the query's, when it is defined

An outage must not send good records to the dead letters, so everything counts as the task's that could be
different on another machine, or later. What a codec refuses depends only on the two schemas.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.documents.converted import MOST_BYTES, Converted, slices
from kafka_eos_source.errors import InvalidSchemaError, KafkaEosError
from kafka_eos_source.kafka.schema_registry import SchemaId
from kafka_eos_source.registry import codec, glue
from kafka_eos_source.registry.catalog import UnknownId, catalog
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema
from kafka_eos_source.registry.frames import Frame, Framed, Messages, Naming, Rows, frame_prefix

# -- decoding ------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

#: Errors of the machine or of this package, and never of a record.
_OF_TASK = (KafkaEosError, MemoryError, OSError, ImportError)
#: Schema id, and path or number of the message type.
_Place = tuple[SchemaId, tuple[int, ...] | int]
#: The most characters of the error of one row. Schemas of others can be large, and so can be what is wrong.
MOST_CHARACTERS = 1_000
#: How many decoders a process keeps for each column: each record can name a schema, and a message in it.
_MOST_DECODERS = 1000


@dataclass(frozen=True)
class Decoding:
    """How to decode a column; travels to Spark's workers.

    Attributes:
        registry: options of the registry.
        reader: the schema of the result.
        message: full name of the message type in the reader schema; for Protobuf.
        arrow_type: the type of the result, which can differ from the reader schema's in units of time.
        reader_ids: id and GUID of the reader schema, which need no call of the registry.
        naming: how records may name their schemas.
    """

    registry: Mapping[str, Any] = field(repr=False)
    reader: Schema
    message: str | None
    arrow_type: pa.DataType
    reader_ids: tuple[SchemaId, ...] = ()
    naming: Naming = field(default_factory=Naming)

    @property
    def takes_headers(self) -> bool:
        """Whether headers of the records may name their schemas."""
        return self.naming.header is not None

    def slices(self, column: pa.Array, headers: pa.Array | None = None) -> Iterator[Converted]:
        """Decodes a column of messages slice by slice, with the arguments and errors of `decode`."""
        if headers is None:
            return slices(self.decode, column, "decoded")
        both = pa.RecordBatch.from_arrays([column, headers], ["messages", "headers"])
        return slices(lambda some: self.decode(*some.columns), both, "decoded")

    def decode(
        self,
        column: pa.Array | pa.ChunkedArray,
        headers: pa.Array | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> Converted:
        """Decodes a column of messages, or its first rows if more would take more than `most_bytes`.

        Args:
            column: the messages: keys or values of records.
            headers: the headers of these records; None if they are not at hand.
            most_bytes: the most memory of the result.

        Raises:
            RegistryUnavailableError: if a writer schema is not cached, and the registry does not answer.
        """
        while True:
            framed = Framed.of(column, headers, self.naming, most_bytes)
            found = self._decode(framed, most_bytes)
            if found is not None:
                return found
            half = len(framed.messages.column) // 2
            column, headers = column.slice(0, half), None if headers is None else headers.slice(0, half)

    def _decode(self, framed: Framed, most_bytes: int) -> Converted | None:
        groups, errors = framed.frames()
        known_schemas = catalog(self.registry)
        for each in self.reader_ids:
            known_schemas.add(each, self.reader)
        # Ids of many records first: ids of garbage are all different.
        ids = [each.schema_id for each in sorted(groups, key=lambda group: -len(group.rows))]
        schemas = known_schemas.of_ids(ids) if ids else {}
        known: list[tuple[Frame, Decoder]] = []
        decoders = _decoders.setdefault(self._key, {})
        for group in groups:
            writer = schemas[group.schema_id]
            if isinstance(writer, str):
                suspicion = framed.suspicion(group) if isinstance(writer, UnknownId) else ""
                text = shortened(writer + suspicion)
                errors.update(dict.fromkeys(group.rows.tolist(), text))
                continue
            parts = [group]
            if writer.format == "PROTOBUF":
                parts, malformed = framed.paths(group)
                errors.update(malformed)
            for frame in parts:
                decoder = self._decoder(decoders, frame, writer)
                if isinstance(decoder, str):
                    errors.update(dict.fromkeys(frame.rows.tolist(), decoder))
                else:
                    known.append((frame, decoder))
        return self._in_order(framed.messages, known, errors, most_bytes)

    def _decoder(
        self,
        decoders: dict[tuple[SchemaId, tuple[int, ...] | int], Decoder | str],
        frame: Frame,
        writer: Schema,
    ) -> Decoder | str:
        """Returns the decoder of a frame, which is kept; text if its schema does not fit the reader's."""
        place = (frame.schema_id, frame.path)
        found = decoders.pop(place, None)
        if found is None:
            found = self._new_decoder(frame, writer)
            if len(decoders) >= _MOST_DECODERS:
                decoders.pop(next(iter(decoders)))
        decoders[place] = found  # the last, because it was used last
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
        return foreign_decoder(frame, writer, self.reader, self.message)

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
            decoded = decode_foreign(decoder, messages.column, frame.start, most_bytes)
            for row, text in decoded.errors.items():
                errors[row] = _of_schema(frame, text)
            return Converted.of(self._fit(decoded.values), errors)
        parts: list[pa.Array] = []
        place = np.full(rows, -1, np.int64)
        done, left = 0, most_bytes
        for frame, decoder in known:
            decoded = decode_foreign(decoder, _rows_of(messages.column, frame.rows), frame.start, left)
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
_decoders: dict[tuple[object, ...], dict[_Place, Decoder | str]] = {}


def foreign_decoder(
    frame: Frame, writer: Schema, reader: Schema | None, message: str | None
) -> Decoder | str:
    """Returns the decoder of a schema that a record names; the text of the record's error if there is none.

    Args:
        frame: what names the schema, and the message in it.
        writer: the schema.
        reader: the schema of the result; None = the writer's.
        message: full name of the message type in the reader's file; for Protobuf.
    """
    try:
        return codec.decoder(writer, frame.path, reader, message)
    except InvalidSchemaError as error:
        does_not = "does not fit the reader schema" if reader is not None else "cannot be used"
        return shortened(f"schema id {frame.schema_id} {does_not}: {error.message}")
    except _OF_TASK:
        raise
    except Exception as error:  # noqa: BLE001 - becomes the error of rows
        _log.warning("schema id %s cannot be compiled", frame.schema_id, exc_info=error)
        text = f"schema id {frame.schema_id} cannot be compiled: {type(error).__name__}: {error}"
        return shortened(text)


def decode_foreign(
    decoder: Decoder, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES
) -> Converted:
    """Decodes messages as `decoder` does; one for which it raises an exception has an error instead."""
    try:
        return decoder.decode(messages, start, most_bytes)
    except _OF_TASK:
        raise
    except Exception as error:  # noqa: BLE001 - becomes the error of a row
        _log.warning("records cannot be decoded together; they are decoded one by one", exc_info=error)
        return _by_halves(decoder, messages, start, most_bytes, error)


def _by_halves(
    decoder: Decoder, messages: pa.Array, start: int, most_bytes: int, error: Exception
) -> Converted:
    """Decodes messages for which a decoder raised an error, until it is known whose error that is."""
    if len(messages) == 1:
        text = f"the record cannot be decoded: {type(error).__name__}: {error}"
        return Converted(pa.nulls(1, decoder.arrow_type), {0: text})
    middle = len(messages) // 2
    parts: list[pa.Array] = []
    errors: dict[int, str] = {}
    done = 0
    for half in (messages[:middle], messages[middle:]):
        try:
            found = decoder.decode(half, start, most_bytes)
        except _OF_TASK:
            raise
        except Exception as failure:  # noqa: BLE001 - becomes the error of a row
            found = _by_halves(decoder, half, start, most_bytes, failure)
        parts.append(found.values)
        errors |= {done + row: text for row, text in found.errors.items()}
        done += len(found.values)
        most_bytes -= found.values.nbytes
        if len(found.values) < len(half) or most_bytes < 0:
            break
    return Converted.of(pa.concat_arrays(parts), errors)


def shortened(text: str) -> str:
    """Returns the beginning of the text of an error."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


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
    return shortened(f"schema id {frame.schema_id}: {text}")


# -- encoding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoding:
    """How to encode a column; travels to Spark's workers, which do not call the registry for it.

    Attributes:
        schema_id: id or GUID of the schema.
        schema: the schema.
        message: full name of the message type in a Protobuf schema; None = its first.
        header: name of the header that names the schema; None = its id is in front of each payload.
        glue_compression: ``none`` or ``zlib`` for the form of AWS Glue; None for Confluent's.
    """

    schema_id: SchemaId
    schema: Schema
    message: str | None = None
    header: str | None = None
    glue_compression: str | None = None

    @property
    def name(self) -> bytes:
        """What names the schema, and the message in it."""
        if self.glue_compression is None:
            return frame_prefix(self.schema_id, codec.message_path(self.schema, self.message))
        name = glue.header(self.schema_id, self.glue_compression)
        if self.schema.format != "PROTOBUF":
            return name
        return name + codec.varint(codec.message_number(self.schema, self.message))

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
            prefix = self.name if self.header is None else b""
            known = _encoders[key] = (codec.encoder(self.schema, values.type, self.message), prefix)
        encoder, prefix = known
        if self.glue_compression != "zlib":
            return encoder.encode(values, prefix, most_bytes)
        header, number = prefix[: glue.HEADER_BYTES], prefix[glue.HEADER_BYTES :]
        found = encoder.encode(values, number, most_bytes)
        return Converted(glue.compressed(found.values, header), found.errors)


#: Encoders of this process, and the frame of their messages.
_encoders: dict[tuple[Encoding, pa.DataType], tuple[Encoder, bytes]] = {}

"""Decodes and encodes columns of records, each of which begins with Confluent's frame.

::

    0          magic byte, always 0
    1 … 4      schema id, big-endian
    5 …        Protobuf only: the path of the message type inside its file, as zigzag varints: the number of
               indices, then the indices; a single 0 means the path [0]
    …          payload

Frames are taken off without Python code for each row. Rows are grouped by frame, because all messages of one
frame share one writer schema.

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
    compiling, or decoding a payload, raises any other exception        the record's, and a warning is logged
    the registry cannot be reached, or answers HTTP 5xx, 408, 425, 429  the task's: RegistryUnavailableError
    the registry refuses the login (401, 403)                           the task's: AuthorizationError
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
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.documents.converted import MOST_BYTES, Converted, slices
from kafka_eos_source.errors import InvalidSchemaError, KafkaEosError
from kafka_eos_source.registry import codec
from kafka_eos_source.registry.catalog import catalog
from kafka_eos_source.registry.codec import Decoder, Encoder, Schema, zigzag

#: Length of magic byte and schema id.
HEADER_BYTES = 5
#: Registries number schemas with Java's int. They answer a larger number as if their path was wrong.
_LARGEST_ID = (1 << 31) - 1
#: Message types are nested at most this deep; a longer path is no Protobuf frame.
_DEEPEST = 64
_LONGEST_VARINT = 5

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Frame:
    """Rows whose messages begin with the same bytes.

    Attributes:
        schema_id: id of the writer schema.
        start: length of the frame.
        rows: numbers of the rows, ascending.
        path: path of the message type inside its file; empty except for Protobuf.
    """

    schema_id: int
    start: int
    rows: Rows
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class Messages:
    """A column of framed messages with NumPy views of its buffers.

    Attributes:
        column: the messages; binary or large binary.
        begins: position of each message in ``data``.
        ends: position behind each message in ``data``.
        data: the bytes of all messages.
        present: rows that are not null.
    """

    column: pa.Array
    begins: Rows
    ends: Rows
    data: npt.NDArray[np.uint8]
    present: Rows

    @classmethod
    def of(cls, column: pa.Array | pa.ChunkedArray) -> Messages:
        """Returns views of a column of bytes, which may be a slice."""
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
            if isinstance(column, pa.ChunkedArray):  # older versions of PyArrow return a single chunk
                column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
            column = column.cast(pa.binary())
        number = len(column)
        large = pa.types.is_large_binary(column.type)
        _, offsets_buffer, data_buffer = column.buffers()
        if number:
            offsets = np.frombuffer(offsets_buffer, np.int64 if large else np.int32)
            offsets = offsets[column.offset : column.offset + number + 1].astype(np.int64)
        else:
            offsets = np.zeros(1, np.int64)
        empty = data_buffer is None or not data_buffer.size
        data = np.zeros(0, np.uint8) if empty else np.frombuffer(data_buffer, np.uint8)
        present = np.arange(number)
        if column.null_count:
            present = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        return cls(column, offsets[:-1], offsets[1:], data, present)


def frames(messages: Messages) -> tuple[list[Frame], dict[int, str]]:
    """Groups the rows of a column by schema id.

    Returns:
        The groups, and an error for each row that has no frame. Null rows are in neither.
    """
    rows = messages.present
    lengths = messages.ends[rows] - messages.begins[rows]
    short = lengths < HEADER_BYTES
    errors: dict[int, str] = {}
    if short.any():
        for row, length in zip(rows[short].tolist(), lengths[short].tolist(), strict=True):
            errors[row] = _too_short(length)
        rows = rows[~short]
    if not len(rows):
        return [], errors
    begins = messages.begins[rows]
    magic = messages.data[begins]
    if magic.any():
        wrong = magic != 0
        for row, byte in zip(rows[wrong].tolist(), magic[wrong].tolist(), strict=True):
            errors[row] = (
                "the message does not begin with the magic byte 0x00 of a schema registry, but with "
                f"{byte:#04x}"
            )
        rows, begins = rows[~wrong], begins[~wrong]
        if not len(rows):
            return [], errors
    ids = np.zeros(len(rows), np.int64)
    for place in range(1, HEADER_BYTES):
        ids = (ids << 8) | messages.data[begins + place]
    large = ids > _LARGEST_ID
    if large.any():
        for row, schema_id in zip(rows[large].tolist(), ids[large].tolist(), strict=True):
            errors[row] = f"the message has the schema id {schema_id}; ids of a registry end at {_LARGEST_ID}"
        rows, ids = rows[~large], ids[~large]
        if not len(rows):
            return [], errors
    return [Frame(int(ids[each[0]]), HEADER_BYTES, rows[each]) for each in _groups(ids)], errors


def paths(messages: Messages, frame: Frame) -> tuple[list[Frame], dict[int, str]]:
    """Groups the rows of a frame of Protobuf further, by the path of the message type.

    Returns:
        The groups, and an error for each row whose path is malformed.
    """
    rows = frame.rows
    position = messages.begins[rows] + frame.start
    ends = messages.ends[rows]
    if _all_zero(messages.data, position, ends):  # what serializers write for the first type of a file
        return [Frame(frame.schema_id, frame.start + 1, rows, (0,))], {}
    cursor = _Varints(messages.data, position.copy(), ends)
    every = np.arange(len(rows))
    counts = cursor.next(every)
    cursor.fail((counts < 0) | (counts > _DEEPEST), counts, "has {} message indices; expected 0 to 64")
    most = int(counts[cursor.good].max(initial=0))
    indices = np.full((len(rows), max(most, 1)), -1, np.int64)
    indices[counts == 0, 0] = 0
    for place in range(most):
        having = np.flatnonzero(cursor.good & (counts > place))
        found = cursor.next(having)
        indices[having, place] = found
        negative = np.zeros(len(rows), bool)
        negative[having] = found < 0
        cursor.fail(negative, indices[:, place], "has the message index {}; expected 0 or more")
    errors = {int(rows[at]): text for at, text in cursor.errors.items()}
    good = np.flatnonzero(cursor.good)
    starts = cursor.position[good] - messages.begins[rows[good]]
    keys = np.column_stack([starts, indices[good]])
    if not len(keys):
        return [], errors
    _, numbers = np.unique(keys, axis=0, return_inverse=True)
    groups = []
    for each in _groups(numbers.reshape(-1).astype(np.int64)):
        path = tuple(int(index) for index in indices[good[each[0]]] if index >= 0)
        groups.append(Frame(frame.schema_id, int(starts[each[0]]), rows[good[each]], path))
    return groups, errors


def frame_prefix(schema_id: int, path: Sequence[int] = ()) -> bytes:
    """Returns the frame of messages of a schema.

    Args:
        schema_id: id of the schema.
        path: path of the message type for Protobuf; empty for other formats.
    """
    header = b"\0" + schema_id.to_bytes(4, "big")
    if not path:
        return header
    if list(path) == [0]:
        return header + b"\0"
    return header + b"".join(zigzag(each) for each in (len(path), *path))


def _all_zero(data: npt.NDArray[np.uint8], position: Rows, ends: Rows) -> bool:
    return bool((position < ends).all()) and not data[position].any()


class _Varints:
    """Reads the next zigzag varint of many messages at once.

    Attributes:
        position: place of the next byte of each message.
        good: messages that were well-formed so far.
        errors: what is wrong with the others.
    """

    def __init__(self, data: npt.NDArray[np.uint8], position: Rows, ends: Rows) -> None:
        self._data = data
        self._ends = ends
        self.position = position
        self.good = np.ones(len(position), bool)
        self.errors: dict[int, str] = {}

    def next(self, which: Rows) -> Rows:
        """Reads one varint of each of these messages; the result is 0 where there is none."""
        raw = np.zeros(len(self.position), np.int64)
        more = which
        for place in range(_LONGEST_VARINT):
            over = more[self.position[more] >= self._ends[more]]
            self._fail_at(over, "ends inside the Protobuf message indices")
            more = more[self.position[more] < self._ends[more]]
            byte = self._data[self.position[more]].astype(np.int64)
            raw[more] |= (byte & 0x7F) << (7 * place)
            self.position[more] += 1
            more = more[byte >= 0x80]
            if not len(more):
                break
        self._fail_at(more, "has a Protobuf message index of more than 5 bytes")
        values = (raw >> 1) ^ -(raw & 1)
        return values[which]

    def fail(self, bad: npt.NDArray[np.bool_], values: Rows, text: str) -> None:
        """Sets messages aside; ``text`` has a place for the value that is wrong."""
        for at in np.flatnonzero(bad & self.good).tolist():
            self.errors[at] = f"the message {text.format(int(values[at]))}"
        self.good &= ~bad

    def _fail_at(self, which: Rows, text: str) -> None:
        for at in which.tolist():
            self.errors.setdefault(at, f"the message {text}")
        self.good[which] = False


def _groups(keys: Rows) -> list[Rows]:
    """Returns the positions of each distinct key, ascending, in the order of their first occurrence."""
    if (keys == keys[0]).all():
        return [np.arange(len(keys))]
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    return sorted(np.split(order, cuts), key=lambda each: int(each[0]))


def _too_short(length: int) -> str:
    if length == 0:
        return "the message is empty; expected the magic byte and a schema id"
    return f"the message has {length} bytes; expected at least {HEADER_BYTES} for magic byte and schema id"


# -- decoding ------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

#: Errors of the machine or of this package, and never of a record.
_OF_TASK = (KafkaEosError, MemoryError, OSError, ImportError)
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
        # Ids of many records first: ids of garbage are all different.
        ids = [each.schema_id for each in sorted(groups, key=lambda group: -len(group.rows))]
        schemas = known_schemas.of_ids(ids) if ids else {}
        known: list[tuple[Frame, Decoder]] = []
        decoders = _decoders.setdefault(self._key, {})
        for group in groups:
            writer = schemas[group.schema_id]
            if isinstance(writer, str):
                errors.update(dict.fromkeys(group.rows.tolist(), shortened(writer)))
                continue
            framed = [group]
            if writer.format == "PROTOBUF":
                framed, malformed = paths(messages, group)
                errors.update(malformed)
            for frame in framed:
                decoder = self._decoder(decoders, frame, writer)
                if isinstance(decoder, str):
                    errors.update(dict.fromkeys(frame.rows.tolist(), decoder))
                else:
                    known.append((frame, decoder))
        return self._in_order(messages, known, errors, most_bytes)

    def _decoder(
        self, decoders: dict[tuple[int, tuple[int, ...]], Decoder | str], frame: Frame, writer: Schema
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
_decoders: dict[tuple[object, ...], dict[tuple[int, tuple[int, ...]], Decoder | str]] = {}


def foreign_decoder(
    frame: Frame, writer: Schema, reader: Schema | None, message: str | None
) -> Decoder | str:
    """Returns the decoder of a schema that a record names; text, for the record's error, if there is none.

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
        _log.warning("schema id %d cannot be compiled", frame.schema_id, exc_info=error)
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
            prefix = frame_prefix(self.schema_id, codec.message_path(self.schema, self.message))
            known = _encoders[key] = (codec.encoder(self.schema, values.type, self.message), prefix)
        encoder, prefix = known
        return encoder.encode(values, prefix, most_bytes)


#: Encoders of this process, and the frame of their messages.
_encoders: dict[tuple[Encoding, pa.DataType], tuple[Encoder, bytes]] = {}

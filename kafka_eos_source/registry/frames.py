"""Finds out which schema each key or value of a column names, and where its payload begins.

A record names its schema in front of the payload, or in a header. Confluent's clients write one of two
forms::

    0x00  schema id, 4 bytes, big-endian   [message indices]
    0x01  GUID of the schema, 16 bytes     [message indices]

AWS Glue's clients name a version of a schema by its UUID::

    0x03  compression, 1 byte: 0 none, 5 zlib   UUID, 16 bytes   [message number]

Confluent's clients can also write one of their forms to the header ``__value_schema_id``, or
``__key_schema_id`` for the key. The value or key is then the payload alone. As for Confluent's deserializers,
the last header of that name decides, and one without a value does not count.

Message indices and message number are only there for Protobuf. The indices are the path of the message type
inside its file, as zigzag varints: the number of indices, then the indices; a single 0 means the path [0].
The number counts all message types of the file in the order of their full names, as a plain varint. It is
compressed together with the payload.

Names are read without Python code for each row. Rows are grouped by name, because all messages of one name
share one writer schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.documents.converted import MOST_BYTES
from kafka_eos_source.kafka.schema_registry import SchemaId
from kafka_eos_source.registry import glue
from kafka_eos_source.registry.codec import zigzag
from kafka_eos_source.spark.arrow import HEADERS_ARROW

#: Confluent's headers with the name of the schema.
VALUE_HEADER, KEY_HEADER = "__value_schema_id", "__key_schema_id"
#: First byte of a name: a schema id follows, or a GUID.
_ID, _GUID = 0, 1
_ID_BYTES, _GUID_BYTES = 4, 16
#: Schema ids are ints of Java. Registries answer a request for a larger id as if its path were wrong.
_LARGEST_ID = (1 << 31) - 1
#: Message types are nested at most this deep; a longer path is no Protobuf frame.
_DEEPEST = 64
_LONGEST_VARINT = 5

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Frame:
    """Rows whose messages name their schema with the same bytes.

    Attributes:
        schema_id: id or GUID of the writer schema.
        start: number of bytes in front of the payload.
        rows: numbers of the rows, ascending.
        path: path of the message type inside its file, or its number in Glue's form; empty except for
            Protobuf.
        in_header: whether the name is in a header, and not in front of the payload.
    """

    schema_id: SchemaId
    start: int
    rows: Rows
    path: tuple[int, ...] | int = ()
    in_header: bool = False


@dataclass(frozen=True)
class Messages:
    """A column of bytes with NumPy views of its buffers.

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
    data: Bytes
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

    def beginning(self, row: int, most: int = 40) -> bytes:
        """Returns the first bytes of a message."""
        begin = int(self.begins[row])
        return self.data[begin : min(begin + most, int(self.ends[row]))].tobytes()


@dataclass(frozen=True)
class Naming:
    """How the records of a column may name their schemas; travels to Spark's workers.

    Attributes:
        header: name of the header in which a name may be; None if headers are not looked at.
        id_bytes: length of the ids in front of payloads: 4; 8 as Apicurio's Legacy8ByteIdHandler writes them.
        is_glue: whether the records have the form of AWS Glue.
    """

    header: str | None = VALUE_HEADER
    id_bytes: int = _ID_BYTES
    is_glue: bool = False


_NAMING = Naming()
#: How records name versions of schemas of AWS Glue.
OF_GLUE = Naming(header=None, is_glue=True)


@dataclass(frozen=True)
class Framed:
    """A column of keys or values whose records name their schemas.

    Attributes:
        messages: the keys or values, without compression.
        naming: how they may name their schemas.
        has_headers: whether the headers of the records are at hand.
        named: numbers of the rows that have a header that names their schema, ascending.
        names: the distinct values of these headers; None if there are none.
        name_of: number among `names` for each row of `named`.
        foreign: rows whose headers name a schema of another registry, and which.
        damaged: errors of rows that cannot be decompressed; these are null in ``messages``.
    """

    messages: Messages
    naming: Naming = _NAMING
    has_headers: bool = False
    named: Rows | None = None
    names: Messages | None = None
    name_of: Rows | None = None
    foreign: dict[int, str] = field(default_factory=dict)
    damaged: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        column: pa.Array | pa.ChunkedArray,
        headers: pa.Array | None = None,
        naming: Naming = _NAMING,
        most_bytes: int = MOST_BYTES,
    ) -> Framed:
        """Returns a column of bytes, which may be a slice, with what the headers of its records say.

        Only the first rows are returned if the payloads of more would take more than `most_bytes` when they
        are decompressed.

        Args:
            column: the keys or values.
            headers: the headers of the same records, as the source's column; None if they are not at hand.
            naming: how the records may name their schemas.
            most_bytes: the most memory of payloads that are decompressed.
        """
        messages = Messages.of(column)
        if naming.is_glue:
            messages, damaged = _decompressed(messages, most_bytes)
            return cls(messages, naming, damaged=damaged)
        if headers is None or naming.header is None:
            return cls(messages, naming)
        found = _Headers(headers)
        if not len(found.entries):
            return cls(messages, naming, has_headers=True)
        is_present = np.zeros(len(messages.column), bool)
        is_present[messages.present] = True
        rows, values = found.last(naming.header)
        own = is_present[rows]
        is_present[rows] = False
        foreign = {row: text for row, text in _foreign(found, naming.header).items() if is_present[row]}
        if not own.any():
            return cls(messages, naming, True, foreign=foreign)
        distinct = (values if own.all() else values.filter(pa.array(own))).dictionary_encode()
        numbers = distinct.indices.to_numpy().astype(np.int64)
        return cls(messages, naming, True, rows[own], Messages.of(distinct.dictionary), numbers, foreign)

    def frames(self) -> tuple[list[Frame], dict[int, str]]:
        """Groups the rows by the schema that they name.

        Returns:
            The groups, and an error for each row that names none. Null rows are in neither.
        """
        rows = self.messages.present
        if self.naming.is_glue:
            return self._named_by_glue(rows)
        if self.foreign:
            rows = np.setdiff1d(rows, np.array(list(self.foreign)), assume_unique=True)
        if self.named is None:
            groups, errors = self._named_in_front(rows)
            return groups, errors | self.foreign
        groups, errors = self._named_in_front(np.setdiff1d(rows, self.named, assume_unique=True))
        more, others = self._named_in_headers(self.named)
        groups = sorted([*groups, *more], key=lambda each: int(each.rows[0]))
        return groups, errors | others | self.foreign

    def suspicion(self, frame: Frame) -> str:
        """Says what rows may be if the registry does not have the schema of their frame; "" if unknown."""
        if frame.in_header or self.naming.is_glue:
            return ""
        row = int(frame.rows[0])
        found = self.messages.beginning(row)
        if frame.schema_id == 0 and len(found) > 8 and any(found[5:9]):
            number = int.from_bytes(found[1:9], "big")
            return (
                f"; the message looks as if Apicurio's serializer had written the id {number} with 8 bytes "
                "(Legacy8ByteIdHandler): if so, set 'schema.id.bytes' of the registry to 8"
            )
        if _AZURE_FRAME.match(found):
            return "; the message looks as if it began with the frame of an old serializer of Azure"
        if not self.has_headers:
            return f"; {self._in_header()}"
        return ""

    def paths(self, frame: Frame) -> tuple[list[Frame], dict[int, str]]:
        """Groups the rows of a frame of Protobuf further, by the path of the message type.

        Returns:
            The groups, and an error for each row whose path is malformed.
        """
        if self.naming.is_glue:
            return _numbers(self.messages, frame)
        if not frame.in_header:
            return _paths(self.messages, frame.rows, frame.start, frame)
        assert self.names is not None
        assert self.named is not None
        assert self.name_of is not None
        length = 1 + (_ID_BYTES if isinstance(frame.schema_id, int) else _GUID_BYTES)
        numbers = self.name_of[np.searchsorted(self.named, frame.rows)]
        distinct, own = np.unique(numbers, return_inverse=True)
        of_names = replace(frame, rows=np.arange(len(distinct)))
        return _of_rows(*_paths(self.names, distinct, length, of_names), frame.rows, own.reshape(-1))

    def _named_in_front(self, rows: Rows) -> tuple[list[Frame], dict[int, str]]:
        """Groups rows whose names are in front of their payloads."""
        groups, unknown, errors = _names(self.messages, rows, rows, self.naming.id_bytes)
        for at in unknown.tolist():
            errors[at] = self._unknown(at)
        return groups, errors

    def _named_by_glue(self, rows: Rows) -> tuple[list[Frame], dict[int, str]]:
        """Groups rows with frames of Glue."""
        where = self.messages
        is_framed = where.ends[rows] - where.begins[rows] >= glue.HEADER_BYTES
        is_framed[is_framed] = where.data[where.begins[rows[is_framed]]] == glue.MAGIC
        is_framed[is_framed] = where.data[where.begins[rows[is_framed]] + 1] == glue.PLAIN
        errors = dict(self.damaged)
        for row in rows[~is_framed].tolist():
            errors[row] = _not_of_glue(where.beginning(row), int(where.ends[row] - where.begins[row]))
        rows = rows[is_framed]
        found = _guids(where, where.begins[rows] + 1, rows, in_header=False)
        return [replace(each, start=glue.HEADER_BYTES) for each in found], errors

    def _named_in_headers(self, rows: Rows) -> tuple[list[Frame], dict[int, str]]:
        """Groups rows whose names are in their headers."""
        names = self.names
        assert names is not None
        assert self.name_of is not None
        every = np.arange(len(names.column))
        groups, unknown, errors = _names(names, every, every, in_header=True)
        for at in unknown.tolist():
            found, length = names.beginning(at), int(names.ends[at] - names.begins[at])
            errors[at] = (
                f"the header {self.naming.header!r} has {length} bytes, 0x{found[:20].hex()}; expected 0x00 "
                f"and a schema id of {_ID_BYTES} bytes, or 0x01 and a GUID of {_GUID_BYTES} bytes"
            )
        return _of_rows(groups, errors, rows, self.name_of)

    def _unknown(self, row: int) -> str:
        """Returns the error of a row that names no schema in front of its payload."""
        length = int(self.messages.ends[row] - self.messages.begins[row])
        if not length:
            return f"the message is empty; expected the magic byte and a schema id; {self._in_header()}"
        found = self.messages.beginning(row)
        if found[0] in (_ID, _GUID):
            least = 1 + (self.naming.id_bytes if found[0] == _ID else _GUID_BYTES)
            text = f"the message has {length} bytes; expected at least {least} for magic byte and schema id"
            return f"{text}; {self._in_header()}"
        text = (
            "the message does not begin with the magic byte 0x00 of a schema registry, but with "
            f"{found[0]:#04x}"
        )
        looks, is_certain = _looks_like(found, length)
        text += f"; it looks like {looks}" if looks else ""
        return text if is_certain else f"{text}; {self._in_header()}"

    def _in_header(self) -> str:
        """Returns what is known about a header that may name the schema of a record."""
        if self.naming.header is None:
            return "headers are not looked at, because the registry has 'schema.id.location=payload'"
        if self.has_headers:
            return f"its record has no header {self.naming.header!r}, which could name its schema"
        return (
            f"an id in the header {self.naming.header!r} is not seen here: pass headers= to from_registry, "
            "or select the column 'headers' for map_in_read"
        )


_AZURE = (
    "Azure Schema Registry, whose interface is another one; read such records without registry=, and decode "
    "them in a function of map_in_read"
)
_APICURIO = (
    "Apicurio's headers, which kafka-eos does not read; the producer's settings "
    "'apicurio.registry.headers.enabled=false' and 'apicurio.registry.id-handler="
    "io.apicurio.registry.serde.Default4ByteIdHandler' name schemas as Confluent's serializers do"
)
_LEFT_OVER = "; if the header is left over, 'schema.id.location=payload' of the registry ignores all headers"
#: Headers in which other registries name schemas, by `Naming.header`; how the value begins; and whose it is.
_FOREIGN: dict[str, tuple[tuple[str, str, str], ...]] = {
    VALUE_HEADER: (
        ("content-type", "avro/binary+", _AZURE),
        ("apicurio.value.globalId", "", _APICURIO),
        ("apicurio.value.contentId", "", _APICURIO),
        ("apicurio.value.artifactId", "", _APICURIO),
    ),
    KEY_HEADER: (
        ("apicurio.key.globalId", "", _APICURIO),
        ("apicurio.key.contentId", "", _APICURIO),
        ("apicurio.key.artifactId", "", _APICURIO),
    ),
}
#: What serializers of Azure wrote before they wrote headers: four zeros, and the schema id as text.
_AZURE_FRAME = re.compile(rb"\0{4}[0-9a-f]{32}")


def _foreign(headers: _Headers, header: str) -> dict[int, str]:
    """Returns the rows whose headers name a schema of another registry, and which, for errors."""
    found: dict[int, str] = {}
    for name, beginning, whose in _FOREIGN[header]:
        places = headers.places(name)
        if beginning and len(places):  # many records have a header of this name for other purposes
            values = headers.entries.field("value").take(pa.array(places))
            places = places if pc.any(pc.starts_with(values, beginning)).as_py() else places[:0]
        if not len(places):
            continue
        rows, values = headers.last(name)
        rows = rows[pc.starts_with(values, beginning).to_numpy(zero_copy_only=False)]
        for row in rows.tolist():
            found.setdefault(row, f"the header {name!r} names the schema in {whose}{_LEFT_OVER}")
    return found


def _not_of_glue(found: bytes, length: int) -> str:
    """Returns the error of a message that does not begin with a frame of Glue.

    Args:
        found: its first bytes.
        length: its length in bytes.
    """
    if not length:
        return "the message is empty; expected the frame of AWS Glue"
    if found[0] != glue.MAGIC:
        looks = _looks_like(found, length)[0]
        if found[0] in (_ID, _GUID) and length > _ID_BYTES:
            looks = "a message of another schema registry than AWS Glue"
        text = f"the message does not begin with 0x03, the first byte of AWS Glue's, but with {found[0]:#04x}"
        return f"{text}; it looks like {looks}" if looks else text
    if length < glue.HEADER_BYTES:
        return f"the message has {length} bytes; expected at least {glue.HEADER_BYTES}, as AWS Glue's have"
    return f"the message has the compression byte {found[1]:#04x}; expected 0x00 (none) or 0x05 (zlib)"


def _looks_like(found: bytes, length: int) -> tuple[str, bool]:
    """Returns what a message without a known frame looks like, and whether that is certain.

    Args:
        found: its first bytes.
        length: its length in bytes.
    """
    if found[0] == glue.MAGIC and found[1:2] in (b"\0", b"\5") and length >= glue.HEADER_BYTES:
        fix = f"set 'url' of the registry to {glue.SCHEME} and its name"
        return f"a message of AWS Glue Schema Registry: {fix}", True
    if found.startswith(b"Obj\1"):
        return "an Avro container file, which contains its schema", True
    if found.startswith(b"\xc3\1") and length >= 10:
        return "Avro's single-object encoding, which names its schema by a fingerprint", True
    if found[1:13] == b"avro/binary+":
        return "a message of Azure Schema Registry, written by Kafka Streams", True
    if found.lstrip()[:1] in (b"{", b"["):
        return "a JSON document without a frame; app.read(schema=…) reads such documents", False
    if found[0] in (0x08, 0x0A) and length > 2 and (found[0] == 0x08 or found[1] <= length - 2):
        return "a Protobuf message without a frame", False
    return "", False


class _Headers:
    """A column of headers, searched by name without Python code for each row.

    Args:
        headers: the column; it has the type of the source's column ``headers``.

    Attributes:
        entries: the headers of all rows, one after the other.
    """

    def __init__(self, headers: pa.Array) -> None:
        if not headers.type.equals(HEADERS_ARROW):  # Spark has chosen others
            headers = headers.cast(HEADERS_ARROW)
        #: Where the entries of each row begin, and where those of the last row end.
        self._starts = _starts(headers)
        if headers.null_count and self._starts[-1] > self._starts[0]:
            is_null = headers.is_null().to_numpy(zero_copy_only=False)
            if np.diff(self._starts)[is_null].any():  # entries of rows that are null do not count
                headers = headers.take(pa.array(np.arange(len(headers))))
                self._starts = _starts(headers)
        first, past = int(self._starts[0]), int(self._starts[-1])
        self.entries = headers.values.slice(first, past - first)
        self._names = Messages.of(self.entries.field("key").view(pa.binary()))
        self._lengths = self._names.ends - self._names.begins

    @cached_property
    def rows(self) -> Rows:
        """The row of each entry."""
        return np.repeat(np.arange(len(self._starts) - 1), np.diff(self._starts))

    def last(self, name: str) -> tuple[Rows, pa.Array]:
        """Returns the rows that have a header of this name, ascending, and the last such header of each.

        Rows whose last header has no value are left out.
        """
        places = self.places(name)
        if not len(places):
            return places, pa.array([], pa.binary())
        rows = self.rows[places]
        is_last = np.append(rows[1:] != rows[:-1], True)
        rows, places = rows[is_last], places[is_last]
        values = self.entries.field("value").take(pa.array(places))
        if not values.null_count:
            return rows, values
        kept = values.is_valid()
        return rows[kept.to_numpy(zero_copy_only=False)], values.filter(kept)

    def places(self, name: str) -> Rows:
        """Returns the positions among `entries` of the headers of this name, ascending."""
        wanted = name.encode()
        found = np.flatnonzero(self._lengths == len(wanted))
        if not len(found):
            return found
        names = self._names.column
        is_same = pc.equal(names if len(found) == len(names) else names.take(pa.array(found)), wanted)
        if is_same.null_count or is_same.false_count:
            found = found[is_same.fill_null(False).to_numpy(zero_copy_only=False)]
        return found


def _starts(headers: pa.Array) -> npt.NDArray[np.int32]:
    """Returns where the entries of each row of a list begin, and where those of the last row end."""
    if not len(headers):
        return np.zeros(1, np.int32)
    starts = np.frombuffer(headers.buffers()[1], np.int32)
    return starts[headers.offset : headers.offset + len(headers) + 1]


def headers_naming(
    header: str, name: bytes | None, present: npt.NDArray[np.bool_], others: pa.Array | None = None
) -> pa.Array:
    """Returns the headers of records, of which one names their schema.

    Args:
        header: the header that names the schema.
        name: its value; None if the schema is named in front of the payload, so that no header may name one.
        present: which records have a payload; the others get no such header.
        others: their other headers, among which those of that name are left out; None if there are none.
    """
    rows = np.flatnonzero(present) if name is not None else np.zeros(0, np.int64)
    own = _repeated(header.encode(), len(rows), pa.string()), _repeated(name or b"", len(rows), pa.binary())
    entries = pa.StructArray.from_arrays(own, fields=list(HEADERS_ARROW.value_type))
    if others is not None:
        given = _Headers(others)
        kept = np.setdiff1d(np.arange(len(given.entries)), given.places(header), assume_unique=True)
        of_row = np.concatenate([given.rows[kept], rows])
        order = np.argsort(of_row, kind="stable")
        entries = pa.concat_arrays([given.entries.take(pa.array(kept)), entries]).take(pa.array(order))
        rows = of_row
    counts = np.bincount(rows, minlength=len(present))
    starts = np.zeros(len(present) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return pa.ListArray.from_arrays(pa.array(starts), entries, type=HEADERS_ARROW, mask=pa.array(counts == 0))


def _repeated(value: bytes, times: int, type_: pa.DataType) -> pa.Array:
    """Returns a column with the same text or bytes in each row."""
    ends = np.arange(times + 1, dtype=np.int32) * np.int32(len(value))
    return pa.Array.from_buffers(type_, times, [None, pa.py_buffer(ends), pa.py_buffer(value * times)])


def frame_prefix(schema_id: SchemaId, path: Sequence[int] = ()) -> bytes:
    """Returns the bytes with which messages, or their headers, name a schema.

    Args:
        schema_id: id or GUID of the schema.
        path: path of the message type for Protobuf; empty for other formats.
    """
    if isinstance(schema_id, UUID):
        name = bytes([_GUID]) + schema_id.bytes
    else:
        name = bytes([_ID]) + schema_id.to_bytes(_ID_BYTES, "big")
    if not path:
        return name
    if list(path) == [0]:
        return name + b"\0"
    return name + b"".join(zigzag(each) for each in (len(path), *path))


def _names(
    where: Messages, at: Rows, rows: Rows, id_bytes: int = _ID_BYTES, *, in_header: bool = False
) -> tuple[list[Frame], Rows, dict[int, str]]:
    """Groups rows by the names with which bytes begin.

    Args:
        where: bytes that begin with names.
        at: which of them to read.
        rows: the row for which each of these names a schema.
        id_bytes: length of an id.
        in_header: whether the bytes are headers.

    Returns:
        The groups; which of the bytes begin with no name; and an error for each row whose name is malformed.
    """
    if not len(at):
        return [], at, {}
    begins = where.begins[at]
    lengths = where.ends[at] - begins
    if lengths.all():
        magic = where.data[begins]
    else:
        magic = np.zeros(len(at), np.uint8)
        magic[lengths > 0] = where.data[begins[lengths > 0]]
    is_id = (magic == _ID) & (lengths > id_bytes)
    if is_id.all():
        groups, errors = _ids(where, begins, rows, id_bytes, in_header)
        return groups, at[:0], errors
    is_guid = (magic == _GUID) & (lengths > _GUID_BYTES)
    groups, errors = _ids(where, begins[is_id], rows[is_id], id_bytes, in_header)
    groups += _guids(where, begins[is_guid], rows[is_guid], in_header)
    return sorted(groups, key=lambda each: int(each.rows[0])), at[~(is_id | is_guid)], errors


def _of_rows(
    groups: list[Frame], errors: dict[int, str], rows: Rows, name_of: Rows
) -> tuple[list[Frame], dict[int, str]]:
    """Returns groups and errors of the rows that have some names.

    Args:
        groups, errors: those of the names: they contain numbers of names in place of numbers of rows.
        rows: numbers of the rows, ascending.
        name_of: number of the name of each of these.
    """
    if len(groups) == 1 and not errors:
        return [replace(groups[0], rows=rows)], {}
    order = np.argsort(name_of, kind="stable")
    bounds = np.searchsorted(name_of[order], np.arange(int(name_of.max(initial=-1)) + 2))

    def of_name(number: int) -> Rows:
        return rows[order[bounds[number] : bounds[number + 1]]]

    found = [
        replace(each, rows=np.sort(np.concatenate([of_name(number) for number in each.rows.tolist()])))
        for each in groups
    ]
    return found, {row: text for number, text in errors.items() for row in of_name(number).tolist()}


def _ids(
    where: Messages, begins: Rows, rows: Rows, id_bytes: int, in_header: bool
) -> tuple[list[Frame], dict[int, str]]:
    """Groups rows by the schema ids behind the magic bytes."""
    errors: dict[int, str] = {}
    ids = np.zeros(len(rows), np.int64)
    for place in range(1, 1 + id_bytes):
        ids = (ids << 8) | where.data[begins + place]
    large = (ids > _LARGEST_ID) | (ids < 0)
    if large.any():
        for row, schema_id in zip(rows[large].tolist(), ids[large].tolist(), strict=True):
            errors[row] = f"the message has the schema id {schema_id}; ids of a registry end at {_LARGEST_ID}"
        rows, ids = rows[~large], ids[~large]
    start = 0 if in_header else 1 + id_bytes
    found = [Frame(int(ids[each[0]]), start, rows[each], (), in_header) for each in _groups(ids)]
    return found, errors


def _guids(where: Messages, begins: Rows, rows: Rows, in_header: bool) -> list[Frame]:
    """Groups rows by the GUIDs behind the magic bytes."""
    if not len(rows):
        return []
    bytes_of = where.data[begins[:, None] + np.arange(1, 1 + _GUID_BYTES)]
    halves = np.ascontiguousarray(bytes_of).view(np.int64)
    numbers = np.zeros(len(rows), np.int64)
    for half in (0, 1):
        if (halves[:, half] != halves[0, half]).any():
            distinct, inverse = np.unique(halves[:, half], return_inverse=True)
            numbers = numbers * len(distinct) + inverse.reshape(-1)
    start = 0 if in_header else 1 + _GUID_BYTES
    return [
        Frame(UUID(bytes=bytes_of[each[0]].tobytes()), start, rows[each], (), in_header)
        for each in _groups(numbers)
    ]


def _paths(where: Messages, at: Rows, length: int, frame: Frame) -> tuple[list[Frame], dict[int, str]]:
    """Groups the rows of a frame by the path of the message type behind the names.

    Args:
        where: bytes that begin with names.
        at: which of them belong to the rows of the frame.
        length: length of the name in front of the path.
        frame: the frame.
    """
    rows = frame.rows
    position = where.begins[at] + length
    ends = where.ends[at]
    if _all_zero(where.data, position, ends):  # what serializers write for the first type of a file
        return [_of_path(frame, length + 1, rows, (0,))], {}
    cursor = _Varints(where.data, position.copy(), ends)
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
    errors = {int(rows[row]): text for row, text in cursor.errors.items()}
    good = np.flatnonzero(cursor.good)
    lengths = cursor.position[good] - where.begins[at[good]]
    keys = np.column_stack([lengths, indices[good]])
    if not len(keys):
        return [], errors
    _, numbers = np.unique(keys, axis=0, return_inverse=True)
    groups = []
    for each in _groups(numbers.reshape(-1).astype(np.int64)):
        path = tuple(int(index) for index in indices[good[each[0]]] if index >= 0)
        groups.append(_of_path(frame, int(lengths[each[0]]), rows[good[each]], path))
    return groups, errors


def _numbers(where: Messages, frame: Frame) -> tuple[list[Frame], dict[int, str]]:
    """Groups the rows of a frame of Glue by the number of the message type in front of the payloads."""
    begins = where.begins[frame.rows]
    cursor = _Varints(where.data, begins + frame.start, where.ends[frame.rows])
    numbers = cursor.unsigned(np.arange(len(frame.rows)))
    errors = {int(frame.rows[row]): text for row, text in cursor.errors.items()}
    good = np.flatnonzero(cursor.good)
    lengths = (cursor.position - begins)[good]  # a number may be written with more bytes than it needs
    return [
        replace(
            frame,
            start=int(lengths[each[0]]),
            rows=frame.rows[good[each]],
            path=int(numbers[good[each[0]]]),
        )
        for each in _groups((numbers[good] << 8) | lengths)
    ], errors


def _decompressed(messages: Messages, most_bytes: int) -> tuple[Messages, dict[int, str]]:
    """Returns messages without compression, and errors of those that are damaged, which are null.

    Args:
        messages: messages with frames of Glue, or with none.
        most_bytes: only the first messages are returned if the payloads of more would take more memory.
    """
    rows = messages.present
    rows = rows[messages.ends[rows] - messages.begins[rows] >= glue.HEADER_BYTES]
    rows = rows[messages.data[messages.begins[rows] + 1] == glue.ZLIB]
    rows = rows[messages.data[messages.begins[rows]] == glue.MAGIC]
    if not len(rows):
        return messages, {}
    errors: dict[int, str] = {}
    plain: list[bytes | None] = []
    end = len(messages.column)
    data = messages.data.data
    for row, begin, past in zip(
        rows.tolist(), messages.begins[rows].tolist(), messages.ends[rows].tolist(), strict=True
    ):
        found = glue.decompressed(data[begin:past], most_bytes)
        if found is None:
            end = row
            break
        if isinstance(found, str):
            errors[row] = found
            plain.append(None)
        else:
            most_bytes -= len(found)
            plain.append(found)
    column = messages.column.slice(0, end)
    replaced = pa.array(plain, pa.large_binary())
    if len(plain) < end:
        places = np.arange(end)
        places[rows[: len(plain)]] = end + np.arange(len(plain))
        replaced = pa.concat_arrays([column.cast(pa.large_binary()), replaced]).take(pa.array(places))
    return Messages.of(replaced), errors


def _of_path(frame: Frame, length: int, rows: Rows, path: tuple[int, ...]) -> Frame:
    """Returns the part of a frame whose names, of this length, end with a path."""
    return Frame(frame.schema_id, 0 if frame.in_header else length, rows, path, frame.in_header)


def _all_zero(data: npt.NDArray[np.uint8], position: Rows, ends: Rows) -> bool:
    return bool((position < ends).all()) and not data[position].any()


class _Varints:
    """Reads the next varint of many messages at once.

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
        """Reads one zigzag varint of each of these messages; the result is 0 where there is none."""
        raw = self.unsigned(which)
        return (raw >> 1) ^ -(raw & 1)

    def unsigned(self, which: Rows) -> Rows:
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
        return raw[which]

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
    if not len(keys):
        return []
    if (keys == keys[0]).all():
        return [np.arange(len(keys))]
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    return sorted(np.split(order, cuts), key=lambda each: int(each[0]))

"""Checks the rows of a frame and converts them to the staged columns.

The task refuses rows that cannot become Kafka records (a null topic, a negative partition, …), so the driver
does not begin a transaction for a batch that cannot succeed. Or it sets them aside (`InvalidRows`): it drops
them, or stages them as dead letters. Dead letters are a part of their own, which the driver sends in the same
transaction as the other records of the batch, so they are written exactly once, and never without the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import TimestampType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.bad_records import bad_record
from kafka_eos_source.model import StagedPart, TaskFigures, TopicRecords
from kafka_eos_source.protocol import packing, records
from kafka_eos_source.spark.arrow import (
    BAD_RECORDS,
    CHANGES,
    HEADERS_ARROW,
    STAGED_ARROW,
    unescaped_names,
)
from kafka_eos_source.spark.schema import (
    HEADERS,
    INVALID,
    INVALID_TYPE,
    KEY,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    VALUE,
    SinkColumns,
)
from kafka_eos_source.stage.files import PartStage
from kafka_eos_source.stage.row_rules import RULES, RecordLimits, check, is_utf8, record_bytes
from kafka_eos_source.stage.staging import TaskMeter

#: Number of rows that the row-based writer of PySpark 4.0 converts to one Arrow batch.
ROWS_PER_BATCH = 2000

#: Columns of staged dead letters.
SCHEMA = pa.schema(
    [
        pa.field(KEY, pa.binary()),
        pa.field(VALUE, pa.binary()),
        pa.field(TOPIC, pa.string()),
        pa.field(HEADERS, HEADERS_ARROW),
    ]
)

#: Classes of errors, as the header `protocol.records.ERROR` names them.
BROKEN_RULE, TOO_LARGE, MARKED = "InvalidRecord", "RecordTooLarge", "MarkedAsInvalid"

_LONGEST_MESSAGE = 1000
_LONGEST_NAME = 250
#: The most characters of the reason that a task passes on for the rows of a topic.
_LONGEST_REASON = 500
#: Room for the headers of a dead letter, in bytes.
_ROOM = 8192


def staged_schema(columns: SinkColumns) -> pa.Schema:
    """Returns the columns of `STAGED_ARROW` that the frame has."""
    return pa.schema([field for field in STAGED_ARROW if getattr(columns, field.name) is not None])


def from_batches(
    batches: Iterable[pa.RecordBatch], columns: SinkColumns, invalid: InvalidRows | None = None
) -> Iterator[pa.RecordBatch]:
    """Converts Spark's Arrow batches to staged batches; packets get separate batches.

    Bad records in packets become invalid rows.

    Args:
        batches: batches with the columns of the frame.
        columns: positions of the sink's columns.
        invalid: takes the rows that cannot become records; None = they are an error.

    Raises:
        InvalidRecordError: as `from_arrow`.
    """
    for batch in batches:
        if columns.changelog is None or batch.column(columns.changelog).null_count == batch.num_rows:
            yield from_arrow(batch, columns, invalid)
            continue
        packets = batch.column(columns.changelog)
        yield from_arrow(batch.filter(packets.is_null()), columns, invalid)
        yield _packets(packets.drop_null(), columns, invalid)


def from_arrow(
    batch: pa.RecordBatch, columns: SinkColumns, invalid: InvalidRows | None = None
) -> pa.RecordBatch:
    """Converts one of Spark's Arrow batches, which contains only records, to a staged batch.

    Raises:
        InvalidRecordError: if a row cannot become a record, and ``invalid`` is None. It names the column and
            the number of the row.
    """
    found = {name: batch.column(index) for name, index in _present(columns)}
    marks = None if columns.invalid is None else batch.column(columns.invalid)
    origins = None if columns.origin is None else batch.column(columns.origin)
    return _staged(found, columns, marks, origins, invalid)


def from_rows(
    rows: Iterable[Sequence[Any]], columns: SinkColumns, invalid: InvalidRows | None = None
) -> Iterator[pa.RecordBatch]:
    """Converts Spark's rows (`Row` or tuple) to staged batches, for the row-based writer of PySpark 4.0.

    Raises:
        InvalidRecordError: as `from_arrow`.
    """
    chunk: list[Sequence[Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_PER_BATCH:
            yield from _from_chunk(chunk, columns, invalid)
            chunk = []
    if chunk:
        yield from _from_chunk(chunk, columns, invalid)


def _packets(packets: pa.Array, columns: SinkColumns, invalid: InvalidRows | None) -> pa.RecordBatch:
    """Converts packets to staged rows without records, and passes on the bad records in them.

    Raises:
        InvalidRecordError: if there is a bad record, and ``invalid`` is None.
        StateError: if a packet is damaged.
    """
    kept = _binary(packets)
    values = list(packing.values(kept))
    found = list(map(packing.unpack_packet, values))
    if any(isinstance(each, packing.BadRecords) for each in found):
        for each in found:
            if isinstance(each, packing.BadRecords):
                for bad in each.batches():
                    _take_bad(bad, invalid)
        kept = packing.column(
            [
                each.without_records() if isinstance(each, packing.BadRecords) else value
                for value, each in zip(values, found, strict=True)
            ]
        )
    schema = staged_schema(columns)
    return pa.RecordBatch.from_arrays(
        [kept if name == CHANGES else pa.nulls(len(kept), schema.field(name).type) for name in schema.names],
        schema=schema,
    )


def _take_bad(bad: pa.RecordBatch, invalid: InvalidRows | None) -> None:
    """Passes on bad records as rows that are marked as invalid: key and value are those that were read.

    Raises:
        InvalidRecordError: if ``invalid`` is None.
    """
    if invalid is None:
        raise bad_record(bad, "set onInvalidRecord to 'dead-letter' (with deadLetter.topic) or 'drop'.")
    marks = pa.StructArray.from_arrays(
        [bad.column(name) for name in _MARK_OF_BAD], fields=[BAD_RECORDS.field(name) for name in _MARK_OF_BAD]
    )
    invalid.take({name: bad.column(name) for name in (KEY, VALUE, HEADERS)}, marks)


_MARK_OF_BAD = [name for name in BAD_RECORDS.names if name not in (KEY, VALUE, HEADERS)]


def _from_chunk(
    chunk: list[Sequence[Any]], columns: SinkColumns, invalid: InvalidRows | None
) -> Iterator[pa.RecordBatch]:
    if columns.changelog is not None:
        packets = [packet for row in chunk if (packet := row[columns.changelog]) is not None]
        if packets:
            yield _packets(_binary_of(packets), columns, invalid)
            chunk = [row for row in chunk if row[columns.changelog] is None]
    marks = None if columns.invalid is None else _marks_of([row[columns.invalid] for row in chunk])
    origins = None if columns.origin is None else _structs_of([row[columns.origin] for row in chunk])
    found = {name: _FROM_PYTHON[name]([row[index] for row in chunk]) for name, index in _present(columns)}
    yield _staged(found, columns, marks, origins, invalid)


def _present(columns: SinkColumns) -> list[tuple[str, int]]:
    return [(name, getattr(columns, name)) for name in staged_schema(columns).names]


def _staged(
    found: dict[str, pa.Array],
    columns: SinkColumns,
    marks: pa.Array | None,
    origins: pa.Array | None,
    invalid: InvalidRows | None,
) -> pa.RecordBatch:
    if invalid is not None:
        invalid.marked.add(marks, len(next(iter(found.values()), marks or ())))
        found = invalid.take(found, marks, origins)
    elif marks is not None and marks.null_count < len(marks):
        raise _marked(marks)
    for name, column in found.items():
        check(name, column)
    return pa.RecordBatch.from_arrays(
        [
            _headers(found[name], escaped_names=columns.escaped_names)
            if name == HEADERS
            else _STAGE[name](found[name])
            for name in found
        ],
        schema=staged_schema(columns),
    )


def _marked(marks: pa.Array) -> InvalidRecordError:
    """Returns the error for the first row that is marked as invalid."""
    first = pc.index(marks.is_valid(), True).as_py()
    why = marks[first].as_py()
    text = why if isinstance(why, str) else ", ".join(f"{name}={each!r}" for name, each in why.items())
    return InvalidRecordError(
        f"column {INVALID!r} marks row {first} of the Arrow batch as invalid: {text}.",
        fix="set onInvalidRecord to 'dead-letter' (with deadLetter.topic), which keeps such rows in another "
        "topic, or to 'drop', which loses them; or change the query so that it no longer marks the row.",
    )


def _binary(array: pa.Array) -> pa.Array:
    """Casts strings to their UTF-8 bytes, which does not copy them."""
    if pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
        array = array.cast(pa.string())
    return array.cast(pa.binary())


def _topic(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _partition(array: pa.Array) -> pa.Array:
    return array.cast(pa.int32())


def _headers(array: pa.Array, *, escaped_names: bool) -> pa.Array:
    """Converts headers by position, because the user's field names may be in another letter case."""
    if array.null_count == len(array):
        return pa.nulls(len(array), HEADERS_ARROW)
    entries = array.flatten()
    key = entries.field(0).cast(pa.string())
    if escaped_names:
        key = unescaped_names(key)
    struct = pa.StructArray.from_arrays(
        [key, entries.field(1).cast(pa.binary())], fields=list(HEADERS_ARROW.value_type)
    )
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    ends = pc.cumulative_sum(lengths).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, struct, type=HEADERS_ARROW, mask=array.is_null())


def _timestamp(array: pa.Array) -> pa.Array:
    """Converts Spark's microseconds to Kafka's milliseconds, rounded down."""
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    return pc.divide(array, 1000)


def _binary_of(values: list[Any]) -> pa.Array:
    return pa.array(values, pa.binary())


def _headers_of(values: list[Any]) -> pa.Array:
    return pa.array(
        [
            None if row is None else [None if h is None else {"key": h[0], "value": h[1]} for h in row]
            for row in values
        ],
        HEADERS_ARROW,
    )


def _marks_of(values: list[Any]) -> pa.Array:
    if any(isinstance(each, str) for each in values):
        return pa.array(values, pa.string())
    return _structs_of(values)


def _structs_of(values: list[Any]) -> pa.Array:
    """Returns structs with all fields of `INVALID_TYPE`; fields that a row does not have are null."""
    type_ = pa.struct([(field.name, _MARK_TYPES[field.name]) for field in INVALID_TYPE])
    return pa.array([None if each is None else _with_microseconds(each.asDict()) for each in values], type_)


def _with_microseconds(struct: dict[str, Any]) -> dict[str, Any]:
    """Returns a struct with its time in microseconds: Spark's rows have times in the local time zone."""
    at = struct.get("timestamp")
    return struct if at is None else {**struct, "timestamp": TimestampType().toInternal(at)}


def _microseconds_of(values: list[Any]) -> pa.Array:
    to_internal = TimestampType().toInternal
    return pa.array([None if value is None else to_internal(value) for value in values], pa.int64())


_MARK_TYPES = {
    "error": pa.string(),
    "message": pa.string(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "holds": pa.string(),
}

_STAGE = {
    KEY: _binary,
    VALUE: _binary,
    TOPIC: _topic,
    PARTITION: _partition,
    TIMESTAMP: _timestamp,
    CHANGES: _binary,
}

_FROM_PYTHON = {
    KEY: _binary_of,
    VALUE: _binary_of,
    TOPIC: lambda values: pa.array(values, pa.string()),
    PARTITION: lambda values: pa.array(values, pa.int32()),
    HEADERS: _headers_of,
    TIMESTAMP: _microseconds_of,
    CHANGES: _binary_of,
}


# -- Rows that are set aside -----------------------------------------------------------------------


class InvalidRows:
    """The invalid rows of one task attempt.

    Args:
        topic: the dead-letter topic; None = the rows are dropped.
        limits: what the topic of the write accepts.
        origin: headers that all dead letters of the task have.
        target: option ``topic`` of the write; None if each row names its topic.
        stage: creates the stage of the dead letters, on the first one.
        escaped_names: whether names of headers in the frame are escaped.

    Attributes:
        marked: counts the rows that the frame marks.
        count: number of invalid rows.
    """

    def __init__(
        self,
        topic: str | None,
        limits: RecordLimits,
        origin: Mapping[str, str],
        target: str | None,
        stage: Callable[[pa.Schema], PartStage],
        *,
        escaped_names: bool = False,
    ) -> None:
        self._topic = topic
        self._escaped_names = escaped_names
        self._limits = limits
        self._origin = origin
        self._target = target
        self._stage = stage
        self._part: PartStage | None = None
        self._meter = TaskMeter(topic)
        self.marked = MarkedRows()
        self.count = 0

    @property
    def dropped(self) -> int:
        """Number of rows that were dropped."""
        return 0 if self._topic is not None else self.count

    def take(
        self, columns: dict[str, pa.Array], marks: pa.Array | None, origins: pa.Array | None = None
    ) -> dict[str, pa.Array]:
        """Takes the invalid rows out of a batch.

        Args:
            columns: columns of the frame, by the names of the staged columns.
            marks: the column that marks invalid rows, text or struct; None if the frame has none.
            origins: the column with the origin of each row; None if the frame has none.

        Returns:
            The columns without the invalid rows; the same object if there are none.
        """
        if not columns:
            return columns
        reasons = self._reasons(columns, marks)
        if reasons is None:
            return columns
        errors, messages = reasons
        bad = errors.is_valid()
        self.count += len(bad) - bad.false_count
        if self._topic is not None:
            places = [each.filter(bad) for each in (marks, origins) if each is not None]
            self._write(columns, marks, places, errors, messages, bad)
        good = errors.is_null()
        return {name: each.filter(good) for name, each in columns.items()}

    def finish(self) -> StagedPart | None:
        """Makes the dead letters durable; None if there are none."""
        if self._part is None or self._topic is None:
            return None
        part, self._part = self._part.finish(), None
        return replace(
            part,
            topics=((self._topic, -1),),
            dead_letters=part.rows,
            measured=TaskFigures(topics=self._meter.figures().topics),
        )

    def discard(self) -> None:
        """Discards the dead letters, because the task attempt failed."""
        if self._part is not None:
            self._part.discard()

    # -- which rows are invalid --------------------------------------------------------------------

    def _reasons(
        self, columns: Mapping[str, pa.Array], marks: pa.Array | None
    ) -> tuple[pa.Array, pa.Array] | None:
        """Returns the error and the message of each row, null for valid rows; None if all are valid."""
        rows = len(next(iter(columns.values())))
        found: list[tuple[pa.Array, str, pa.Array | str]] = []
        if marks is not None and marks.null_count < rows:
            found.append((marks.is_valid(), MARKED, _text_of(marks)))
        rules = [rule for name in columns for rule in RULES.get(name, ())]
        rules += [rule for rule in self._limits.rules() if rule.column in columns]
        for rule in rules:
            broken = pc.fill_null(rule.broken(columns[rule.column]), False)
            if pc.any(broken).as_py():
                found.append((broken, BROKEN_RULE, f"{rule.text}."))
        sizes = record_bytes(columns)
        limit = self._limits.record_bytes
        if (pc.max(sizes).as_py() or 0) > limit:
            texts = pc.binary_join_element_wise(
                "the record has", sizes.cast(pa.string()), f"bytes; the largest allowed has {limit}.", " "
            )
            found.append((pc.greater(sizes, limit), TOO_LARGE, texts))
        if not found:
            return None
        errors = messages = pa.nulls(rows, pa.string())
        for broken, error, message in found:
            first = pc.and_(broken, errors.is_null())
            messages = pc.if_else(first, message, messages)
            errors = pc.if_else(first, error, errors)
        if marks is not None and pa.types.is_struct(marks.type) and "error" in marks.type.names:
            named = _field(marks, "error", pa.string())
            errors = pc.if_else(marks.is_valid(), pc.coalesce(named, errors), errors)
        return errors, messages

    # -- dead letters ------------------------------------------------------------------------------

    def _write(
        self,
        columns: Mapping[str, pa.Array],
        marks: pa.Array | None,
        places: list[pa.Array],
        errors: pa.Array,
        messages: pa.Array,
        bad: pa.Array,
    ) -> None:
        """Stages the dead letters of the invalid rows; ``places`` are structs that may name their origin."""
        kept = {name: each.filter(bad) for name, each in columns.items()}
        rows = len(bad) - bad.false_count
        value = _as_bytes(kept.get(VALUE), rows)
        key = _as_bytes(kept.get(KEY), rows)
        # a record that fits without the headers of a dead letter may not fit with them
        room = max(0, self._limits.record_bytes - _ROOM)
        large = pc.greater(record_bytes({KEY: key, VALUE: value, **_headers_in(kept)}), room)
        # a replay must not send what is incomplete, so the header is there even if the value is null
        contents, incomplete = _contents(marks, bad, rows)
        sizes = pc.if_else(pc.or_(large, incomplete), pc.fill_null(pc.binary_length(value), 0), None)
        headers = {
            records.ERROR: pc.utf8_slice_codeunits(errors.filter(bad), 0, _LONGEST_NAME),
            records.MESSAGE: pc.utf8_slice_codeunits(messages.filter(bad), 0, _LONGEST_MESSAGE),
            **_origin_of(places, rows),
            records.HOLDS: contents,
            **{name: pa.repeat(pa.scalar(text), rows) for name, text in self._origin.items()},
            records.TARGET_TOPIC: _target(kept.get(TOPIC), self._target, rows),
            records.TARGET_PARTITION: kept[PARTITION].cast(pa.string())
            if PARTITION in kept
            else pa.nulls(rows, pa.string()),
            records.VALUE_BYTES: sizes.cast(pa.string()),
        }
        original = kept.get(HEADERS, pa.nulls(rows, HEADERS_ARROW))
        original = pc.if_else(large, pa.scalar(None, original.type), original)
        batch = pa.RecordBatch.from_arrays(
            [
                pc.if_else(pc.and_(large, _longer(key, room // 4)), None, key),
                pc.if_else(large, pc.binary_slice(value, 0, room - room // 4), value),
                pa.repeat(pa.scalar(self._topic, pa.string()), rows),
                _with_headers(original, headers, rows, escaped_names=self._escaped_names),
            ],
            schema=SCHEMA,
        )
        if self._part is None:
            self._part = self._stage(SCHEMA)
        self._part.write(batch)
        self._meter.add(batch)


class MarkedRows:
    """Counts the rows that a frame marks as invalid, by the topic from which their records were read.

    Attributes:
        unmarked: number of the other rows.
    """

    def __init__(self) -> None:
        self.unmarked = 0
        self._found: dict[str, TopicRecords] = {}

    def add(self, marks: pa.Array | None, rows: int) -> None:
        """Counts the rows of a batch.

        Args:
            marks: the column of marks; None if the frame has none.
            rows: number of rows.
        """
        number = 0 if marks is None else rows - marks.null_count
        self.unmarked += rows - number
        if not number or marks is None:
            return
        marks = marks.drop_null()
        texts = _text_of(marks)
        topics = pa.nulls(number, pa.string())
        if pa.types.is_struct(marks.type):
            topics = _field(marks, TOPIC, pa.string())
        for each in topics.value_counts().to_pylist():
            topic = each["values"] or ""
            before = self._found.get(topic)
            if before is None:
                first = topics.index(each["values"]).as_py() if topic else 0
                before = TopicRecords(topic, 0, 0, texts[first].as_py()[:_LONGEST_REASON])
            known = before.bad + each["counts"]
            self._found[topic] = replace(before, records=known, bad=known)

    def topics(self) -> tuple[TopicRecords, ...]:
        """The marked rows, by topic."""
        return tuple(self._found.values())


def _origin_of(places: list[pa.Array], rows: int) -> dict[str, pa.Array]:
    """Returns where the rows were read, as far as a mark or, if it does not say so, another column does."""
    found = {
        header: pc.utf8_slice_codeunits(_first(places, name, pa.string(), rows), 0, _LONGEST_NAME)
        for header, name in (
            (records.ORIGIN_TOPIC, "topic"),
            (records.ORIGIN_PARTITION, "partition"),
            (records.ORIGIN_OFFSET, "offset"),
        )
    }
    at = _first(places, "timestamp", pa.timestamp("us", "UTC"), rows).cast(pa.int64())
    # Kafka's timestamps begin in 1970; Spark shows a record without one as 1 ms before
    found[records.ORIGIN_TIMESTAMP] = pc.if_else(
        pc.greater_equal(at, 0), pc.divide(at, 1000).cast(pa.string()), None
    )
    return found


def _first(places: list[pa.Array], name: str, type_: pa.DataType, rows: int) -> pa.Array:
    """Returns for each row the field of the first struct in which it is not null."""
    fields = [_field(each, name, type_) for each in places if pa.types.is_struct(each.type)]
    return pc.coalesce(*fields, pa.nulls(rows, type_))


def _contents(marks: pa.Array | None, bad: pa.Array, rows: int) -> tuple[pa.Array, pa.Array]:
    """Returns what each letter holds, and which letters are incomplete.

    A marked row is the record that was read, unless the mark says otherwise; any other row is output.
    """
    if marks is None:
        return pa.repeat(pa.scalar(records.OUTPUT), rows), pa.repeat(pa.scalar(False), rows)
    marks = marks.filter(bad)
    holds = pa.nulls(rows, pa.string())
    if pa.types.is_struct(marks.type):
        holds = _field(marks, "holds", pa.string())
    is_input = pc.and_(marks.is_valid(), pc.or_(holds.is_null(), _equals(holds, records.INPUT)))
    contents = pc.if_else(is_input, records.INPUT, records.OUTPUT)
    return contents, _equals(holds, records.INCOMPLETE)


def _equals(texts: pa.Array, text: str) -> pa.Array:
    return pc.fill_null(pc.equal(texts, text), False)


def _text_of(marks: pa.Array) -> pa.Array:
    found = _field(marks, "message", pa.string()) if pa.types.is_struct(marks.type) else marks
    return pc.coalesce(
        _repaired(found.cast(pa.string())), pa.scalar("the query marked the record as invalid")
    )


def _field(marks: pa.Array, name: str, type_: pa.DataType) -> pa.Array:
    """Returns a field of the marks, null where the struct or the field is."""
    if name not in marks.type.names:
        return pa.nulls(len(marks), type_)
    found = pc.struct_field(marks, name).cast(type_)
    return _repaired(found) if pa.types.is_string(type_) else found


def _repaired(texts: pa.Array) -> pa.Array:
    """Returns texts with a replacement character where they are not UTF-8, which Arrow refuses."""
    if pc.all(is_utf8(texts)).as_py() is not False:
        return texts
    return pa.array(
        [
            None if each is None else each.decode(errors="replace")
            for each in texts.cast(pa.binary()).to_pylist()
        ],
        pa.string(),
    )


def _as_bytes(column: pa.Array | None, rows: int) -> pa.Array:
    return pa.nulls(rows, pa.binary()) if column is None else column.cast(pa.binary())


def _longer(column: pa.Array, limit: int) -> pa.Array:
    return pc.fill_null(pc.greater(pc.binary_length(column), limit), False)


def _headers_in(columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    return {HEADERS: columns[HEADERS]} if HEADERS in columns else {}


def _target(column: pa.Array | None, option: str | None, rows: int) -> pa.Array:
    if column is None:
        return pa.repeat(pa.scalar(option, pa.string()), rows)
    return pc.utf8_slice_codeunits(_repaired(column.cast(pa.string())), 0, _LONGEST_NAME)


def _with_headers(
    original: pa.Array, added: Mapping[str, pa.Array], rows: int, *, escaped_names: bool
) -> pa.Array:
    """Returns the original headers of each row, followed by the added ones that are not null.

    Original entries without a key, and those with the name of an added header, are left out.
    """
    entries = original.flatten()
    keys, values = _repaired(entries.field(0).cast(pa.string())), entries.field(1).cast(pa.binary())
    keeps = pc.and_(
        pc.and_(entries.is_valid(), keys.is_valid()),
        pc.invert(pc.is_in(keys, value_set=pa.array(records.ALL))),
    )
    parents = pc.list_parent_indices(original).cast(pa.int64()).filter(keeps)
    keys = keys.filter(keeps)
    if escaped_names:
        keys = unescaped_names(keys)
    all_rows, all_keys, all_values = [parents.to_numpy()], [keys], [values.filter(keeps)]
    for name, column in added.items():
        has = column.is_valid().to_numpy(zero_copy_only=False)
        all_rows.append(np.flatnonzero(has))
        all_keys.append(pa.repeat(pa.scalar(name, pa.string()), int(has.sum())))
        all_values.append(column.drop_null().cast(pa.binary()))
    of_row = np.concatenate(all_rows)
    order = pa.array(np.argsort(of_row, kind="stable"))
    struct = pa.StructArray.from_arrays(
        [pa.concat_arrays(all_keys).take(order), pa.concat_arrays(all_values).take(order)],
        fields=list(HEADERS_ARROW.value_type),
    )
    ends = np.cumsum(np.bincount(of_row, minlength=rows))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, struct, type=HEADERS_ARROW)

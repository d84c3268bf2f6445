"""Sets rows aside that cannot become records: it drops them, or stages them as dead letters.

Dead letters are staged as a part of their own, which the driver sends in the same transaction as the other
records of the batch. So they are written exactly once, and never without the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.model import StagedPart, TaskFigures
from kafka_eos_source.protocol import dead_letters
from kafka_eos_source.spark.arrow import HEADERS_ARROW
from kafka_eos_source.spark.schema import HEADERS, KEY, PARTITION, TOPIC, VALUE
from kafka_eos_source.stage.meter import TaskMeter
from kafka_eos_source.stage.row_rules import RULES, RecordLimits, is_utf8, record_bytes
from kafka_eos_source.stage.spool import PartStage

#: Columns of staged dead letters.
SCHEMA = pa.schema(
    [
        pa.field(KEY, pa.binary()),
        pa.field(VALUE, pa.binary()),
        pa.field(TOPIC, pa.string()),
        pa.field(HEADERS, HEADERS_ARROW),
    ]
)

#: Classes of errors, as the header `dead_letters.ERROR` names them.
BROKEN_RULE, TOO_LARGE, MARKED = "InvalidRecord", "RecordTooLarge", "MarkedAsInvalid"

_LONGEST_MESSAGE = 1000
_LONGEST_NAME = 250
#: Room for the headers of a dead letter, in bytes.
_ROOM = 8192


class InvalidRows:
    """The invalid rows of one task attempt.

    Args:
        topic: the dead-letter topic; None = the rows are dropped.
        limits: what the topic of the write accepts.
        origin: headers that all dead letters of the task have.
        target: option ``topic`` of the write; None if each row names its topic.
        stage: creates the stage of the dead letters, on the first one.
    """

    def __init__(
        self,
        topic: str | None,
        limits: RecordLimits,
        origin: Mapping[str, str],
        target: str | None,
        stage: Callable[[pa.Schema], PartStage],
    ) -> None:
        self._topic = topic
        self._limits = limits
        self._origin = origin
        self._target = target
        self._stage = stage
        self._part: PartStage | None = None
        self._meter = TaskMeter(topic)
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
        value = _binary(kept.get(VALUE), rows)
        key = _binary(kept.get(KEY), rows)
        # a record that fits without the headers of a dead letter may not fit with them
        room = max(0, self._limits.record_bytes - _ROOM)
        large = pc.greater(record_bytes({KEY: key, VALUE: value, **_headers_in(kept)}), room)
        # a replay must not send what is incomplete, so the header is there even if the value is null
        contents, incomplete = _contents(marks, bad, rows)
        sizes = pc.if_else(pc.or_(large, incomplete), pc.fill_null(pc.binary_length(value), 0), None)
        headers = {
            dead_letters.ERROR: pc.utf8_slice_codeunits(errors.filter(bad), 0, _LONGEST_NAME),
            dead_letters.MESSAGE: pc.utf8_slice_codeunits(messages.filter(bad), 0, _LONGEST_MESSAGE),
            **_origin_of(places, rows),
            dead_letters.HOLDS: contents,
            **{name: pa.repeat(pa.scalar(text), rows) for name, text in self._origin.items()},
            dead_letters.TARGET_TOPIC: _target(kept.get(TOPIC), self._target, rows),
            dead_letters.TARGET_PARTITION: kept[PARTITION].cast(pa.string())
            if PARTITION in kept
            else pa.nulls(rows, pa.string()),
            dead_letters.VALUE_BYTES: sizes.cast(pa.string()),
        }
        original = kept.get(HEADERS, pa.nulls(rows, HEADERS_ARROW))
        original = pc.if_else(large, pa.scalar(None, original.type), original)
        batch = pa.RecordBatch.from_arrays(
            [
                pc.if_else(pc.and_(large, _longer(key, room // 4)), None, key),
                pc.if_else(large, pc.binary_slice(value, 0, room - room // 4), value),
                pa.repeat(pa.scalar(self._topic, pa.string()), rows),
                _with_headers(original, headers, rows),
            ],
            schema=SCHEMA,
        )
        if self._part is None:
            self._part = self._stage(SCHEMA)
        self._part.write(batch)
        self._meter.add(batch)


def _origin_of(places: list[pa.Array], rows: int) -> dict[str, pa.Array]:
    """Returns where the rows were read, as far as a mark or, if it does not say so, another column does."""
    found = {
        header: pc.utf8_slice_codeunits(_first(places, name, pa.string(), rows), 0, _LONGEST_NAME)
        for header, name in (
            (dead_letters.ORIGIN_TOPIC, "topic"),
            (dead_letters.ORIGIN_PARTITION, "partition"),
            (dead_letters.ORIGIN_OFFSET, "offset"),
        )
    }
    at = _first(places, "timestamp", pa.timestamp("us", "UTC"), rows).cast(pa.int64())
    # Kafka's timestamps begin in 1970; Spark shows a record without one as 1 ms before
    found[dead_letters.ORIGIN_TIMESTAMP] = pc.if_else(
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
        return pa.repeat(pa.scalar(dead_letters.OUTPUT), rows), pa.repeat(pa.scalar(False), rows)
    marks = marks.filter(bad)
    holds = pa.nulls(rows, pa.string())
    if pa.types.is_struct(marks.type):
        holds = _field(marks, "holds", pa.string())
    is_input = pc.and_(marks.is_valid(), pc.or_(holds.is_null(), _equals(holds, dead_letters.INPUT)))
    contents = pc.if_else(is_input, dead_letters.INPUT, dead_letters.OUTPUT)
    return contents, _equals(holds, dead_letters.INCOMPLETE)


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


def _binary(column: pa.Array | None, rows: int) -> pa.Array:
    return pa.nulls(rows, pa.binary()) if column is None else column.cast(pa.binary())


def _longer(column: pa.Array, limit: int) -> pa.Array:
    return pc.fill_null(pc.greater(pc.binary_length(column), limit), False)


def _headers_in(columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    return {HEADERS: columns[HEADERS]} if HEADERS in columns else {}


def _target(column: pa.Array | None, option: str | None, rows: int) -> pa.Array:
    if column is None:
        return pa.repeat(pa.scalar(option, pa.string()), rows)
    return pc.utf8_slice_codeunits(_repaired(column.cast(pa.string())), 0, _LONGEST_NAME)


def _with_headers(original: pa.Array, added: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """Returns the original headers of each row, followed by the added ones that are not null.

    Original entries without a key, and those with the name of an added header, are left out.
    """
    entries = original.flatten()
    keys, values = _repaired(entries.field(0).cast(pa.string())), entries.field(1).cast(pa.binary())
    keeps = pc.and_(
        pc.and_(entries.is_valid(), keys.is_valid()),
        pc.invert(pc.is_in(keys, value_set=pa.array(dead_letters.ALL))),
    )
    parents = pc.list_parent_indices(original).cast(pa.int64()).filter(keeps)
    all_rows, all_keys, all_values = [parents.to_numpy()], [keys.filter(keeps)], [values.filter(keeps)]
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

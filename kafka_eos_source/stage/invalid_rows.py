"""Finds the rows of a frame that an output of the batch cannot hold, and sets them aside.

The outputs are Kafka and the sinks outside Kafka. Each has rules: Kafka's are in `stage.row_rules`, those of
a sink come from it (`contract.TwoPhaseSink.row_rules`). A row is checked by the rules of the outputs to which
it goes. If it breaks one, it reaches none of them.

Such a row fails the batch, or is dropped, or becomes a dead letter (``onInvalidRecord``). Dead letters are a
part of their own, which the driver sends in the same transaction as the records of the batch, so they are
written exactly once, and never without the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.model import StagedPart, TaskFigures, TopicRecords
from kafka_eos_source.protocol import records
from kafka_eos_source.sinks.row_checks import RowRule, is_utf8
from kafka_eos_source.sinks.specs import KAFKA
from kafka_eos_source.spark.arrow import HEADERS_ARROW, unescaped_names
from kafka_eos_source.spark.schema import (
    HEADERS,
    INVALID,
    KEY,
    NAMES,
    PARTITION,
    TOPIC,
    VALUE,
    SinkColumns,
)
from kafka_eos_source.stage.files import PartStage
from kafka_eos_source.stage.row_rules import RULES, RecordLimits, record_bytes
from kafka_eos_source.stage.staging import TaskMeter

if TYPE_CHECKING:
    from kafka_eos_source.stage.fanout import Plan

#: Columns of staged dead letters.
SCHEMA = pa.schema(
    [
        pa.field(KEY, pa.binary()),
        pa.field(VALUE, pa.binary()),
        pa.field(TOPIC, pa.string()),
        pa.field(HEADERS, HEADERS_ARROW),
    ]
)

#: Classes of errors that tasks find, as the header `protocol.records.ERROR` names them.
BROKEN_RULE, TOO_LARGE, MARKED = "InvalidRecord", "RecordTooLarge", "MarkedAsInvalid"
#: Class of the error of a row that a sink refuses when it prepares the batch.
REFUSED = "RefusedBySink"

#: What a user can do about an invalid row that fails the batch.
SET_ASIDE = (
    "set onInvalidRecord to 'dead-letter' (with deadLetter.topic), which keeps such rows in another topic, "
    "or to 'drop', which loses them"
)

_LONGEST_MESSAGE = 1000
_LONGEST_NAME = 250
#: The most characters of the reason that a task passes on for the rows of a topic.
_LONGEST_REASON = 500
#: Room for the headers of a dead letter, in bytes.
_ROOM = 8192
#: Invalid rows are staged as soon as this many wait, or this many bytes of them.
_ENOUGH_ROWS, _ENOUGH_BYTES = 1000, 16 << 20


# -- which rows are invalid ------------------------------------------------------------------------


@dataclass(frozen=True)
class Reasons:
    """Why rows of a batch are invalid. Each array is null for a valid row.

    Attributes:
        errors: class of the error.
        messages: text of the error.
        sinks: name of the sink outside Kafka that cannot hold the row; null if the row is invalid for Kafka,
            or marked.
    """

    errors: pa.Array
    messages: pa.Array
    sinks: pa.Array

    def filtered(self, rows: pa.Array) -> Reasons:
        """Returns the reasons of some rows."""
        return Reasons(self.errors.filter(rows), self.messages.filter(rows), self.sinks.filter(rows))

    @classmethod
    def joined(cls, parts: Sequence[Reasons]) -> Reasons:
        """Returns the reasons of several batches, one after the other."""
        return cls(
            *(pa.concat_arrays([getattr(each, name) for each in parts]) for name in cls.__annotations__)
        )


@dataclass(frozen=True)
class _Found:
    """Rows that are invalid for one reason.

    Attributes:
        rows: which rows.
        error: class of the error.
        messages: its text, the same for all rows or one for each.
        fix: what the user can do.
        sink: the sink outside Kafka whose rule it is; None = Kafka's, or the query's.
    """

    rows: pa.Array
    error: str
    messages: pa.Array | str
    fix: str
    sink: str | None = None


class RowChecks:
    """Finds invalid rows by the rules of the outputs to which they go.

    Args:
        columns: positions of the columns that become records.
        limits: what the topic of the write accepts; None = not known, so that only Kafka's general rules
            count.
        plan: destinations of the rows, with the rules of the sinks outside Kafka; None = all rows go to
            Kafka.
    """

    def __init__(
        self, columns: SinkColumns, limits: RecordLimits | None = None, plan: Plan | None = None
    ) -> None:
        self._columns = columns
        self._limits = limits
        self._plan = plan

    def reasons(self, batch: pa.RecordBatch) -> Reasons | None:
        """Returns why rows are invalid; None if all are valid.

        Args:
            batch: rows with the columns of the frame.
        """
        found = list(self._found(batch))
        if not found:
            return None
        errors = messages = sinks = pa.nulls(batch.num_rows, pa.string())
        for each in found:
            is_first = pc.and_(each.rows, errors.is_null())
            messages = pc.if_else(is_first, each.messages, messages)
            sinks = pc.if_else(is_first, pa.scalar(each.sink, pa.string()), sinks)
            errors = pc.if_else(is_first, each.error, errors)
        marks = _marks(batch, self._columns)
        if marks is not None and pa.types.is_struct(marks.type) and "error" in marks.type.names:
            named = _field(marks, "error", pa.string())
            errors = pc.if_else(marks.is_valid(), pc.coalesce(named, errors), errors)
        return Reasons(errors, messages, sinks)

    def refuse(self, batch: pa.RecordBatch) -> None:
        """Raises an error if a row is invalid.

        Raises:
            InvalidRecordError: names the first row that breaks the first broken rule, and its origin as far
                as the frame says it.
        """
        marks = _marks(batch, self._columns)
        for each in self._found(batch):
            row = pc.index(each.rows, True).as_py()
            place = place_of(batch, self._columns.origin, row)
            at = f"row {row} of the Arrow batch{f', {place}' if place else ''}"
            if each.error == MARKED and marks is not None:
                raise _marked(marks[row].as_py(), at)
            text = each.messages if isinstance(each.messages, str) else each.messages[row].as_py()
            if each.sink is not None:
                raise InvalidRecordError(f"sink {each.sink!r} cannot hold {at}: {text}", fix=each.fix)
            raise InvalidRecordError(f"{text.removesuffix('.')} in {at}.", fix=each.fix)

    def _found(self, batch: pa.RecordBatch) -> Iterator[_Found]:
        """Yields each reason for which there are invalid rows."""
        marks, plan = _marks(batch, self._columns), self._plan
        if marks is not None and marks.null_count < len(marks):
            yield _Found(marks.is_valid(), MARKED, _text_of(marks), "")
        if plan is None:
            yield from self._found_for_kafka(batch)
            return
        yield from _of_destination(batch, plan)
        if plan.kafka:
            yield from _going_to(KAFKA, batch, plan, self._found_for_kafka(batch))
        for route in plan.routes:
            name = route.spec.name
            at = dict(zip(route.schema.names, route.columns, strict=True))
            found = (
                _found_by(rule, batch.column(at[rule.column]), name) for rule in plan.rules.get(name, ())
            )
            yield from _going_to(name, batch, plan, (each for each in found if each is not None))

    def _found_for_kafka(self, batch: pa.RecordBatch) -> Iterator[_Found]:
        """Yields each reason for which rows cannot become records, wherever they go."""
        columns = _staged_columns(batch, self._columns)
        limits = self._limits
        rules: list[RowRule] = [rule for name in columns for rule in RULES.get(name, ())]
        rules += [rule for rule in limits.rules() if rule.column in columns] if limits is not None else []
        for rule in rules:
            if (each := _found_by(rule, columns[rule.column])) is not None:
                yield each
        if limits is None or not columns:
            return
        sizes = record_bytes(columns)
        if (pc.max(sizes).as_py() or 0) > limits.record_bytes:
            texts = pc.binary_join_element_wise(
                "the record has",
                sizes.cast(pa.string()),
                f"bytes; the largest allowed has {limits.record_bytes}.",
                " ",
            )
            yield _Found(pc.greater(sizes, limits.record_bytes), TOO_LARGE, texts, "")


def _found_by(rule: RowRule, column: pa.Array, sink: str | None = None) -> _Found | None:
    """Returns the rows that break a rule; None if there are none."""
    broken = rule.broken(column)
    if not pc.any(broken).as_py():
        return None
    fix = rule.fix or f"correct or filter such rows; or {SET_ASIDE}."
    return _Found(broken, BROKEN_RULE, f"{rule.message(column.type)}.", fix, sink)


def _of_destination(batch: pa.RecordBatch, plan: Plan) -> Iterator[_Found]:
    """Yields the rows whose destination, the column `sink`, is no output of the query."""
    if plan.router is None:
        return
    to = batch.column(plan.router)
    wrong = pc.and_(to.is_valid(), pc.invert(pc.is_in(to, value_set=pa.array(plan.outputs, to.type))))
    if not pc.any(wrong).as_py():
        return
    name = batch.schema.names[plan.router]
    shown = pc.utf8_slice_codeunits(_repaired(to.cast(pa.string())), 0, _LONGEST_NAME)
    texts = pc.binary_join_element_wise(
        f"column {name!r}, the destination of the row, is '",
        shown,
        f"'; expected {', '.join(map(repr, plan.outputs))}, or null for all of them.",
        "",
    )
    more = "" if plan.kafka else "for 'kafka', set the option 'topic' or add a column 'topic'; "
    yield _Found(wrong, BROKEN_RULE, texts, f"correct or filter such rows; {more}or {SET_ASIDE}.")


def _going_to(output: str, batch: pa.RecordBatch, plan: Plan, found: Iterable[_Found]) -> Iterator[_Found]:
    """Yields what was found about rows that go to an output."""
    for each in found:
        if plan.router is None:
            yield each
            continue
        rows = pc.and_(each.rows, plan.destined(batch, output))
        if pc.any(rows).as_py():
            yield replace(each, rows=rows)


def _marks(batch: pa.RecordBatch, columns: SinkColumns) -> pa.Array | None:
    return None if columns.invalid is None else batch.column(columns.invalid)


def _staged_columns(batch: pa.RecordBatch, columns: SinkColumns) -> dict[str, pa.Array]:
    """Returns the columns of a frame that become records, by their names."""
    at = {name: getattr(columns, name) for name in NAMES}
    return {name: batch.column(index) for name, index in at.items() if index is not None}


def _marked(why: object, at: str) -> InvalidRecordError:
    """Returns the error for a row that is marked as invalid."""
    text = why if not isinstance(why, dict) else ", ".join(f"{name}={each!r}" for name, each in why.items())
    return InvalidRecordError(
        f"column {INVALID!r} marks {at} as invalid: {text}.",
        fix=f"{SET_ASIDE}; or change the query so that it no longer marks the row.",
    )


def place_of(batch: pa.RecordBatch, origin: int | None, row: int) -> str:
    """Returns where a row was read, as far as its frame says it; else "".

    Args:
        batch: rows of the frame.
        origin: position of the column `schema.ORIGIN`; None if the frame has none.
        row: number of the row.
    """
    if origin is None:
        return ""
    places = batch.column(origin).slice(row, 1)
    topic = _field(places, "topic", pa.string())[0].as_py()
    if topic is None:
        return ""
    number, offset = (_field(places, name, pa.int64())[0].as_py() for name in ("partition", "offset"))
    return f"made from the record of topic {topic}, partition {number}, offset {offset}"


# -- rows that are set aside -----------------------------------------------------------------------


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
                first = pc.index(topics if topic else topics.is_null(), topic or True).as_py()
                before = TopicRecords(topic, 0, 0, texts[first].as_py()[:_LONGEST_REASON])
            known = before.bad + each["counts"]
            self._found[topic] = replace(before, records=known, bad=known)

    @property
    def topics(self) -> tuple[TopicRecords, ...]:
        """The marked rows, by topic."""
        return tuple(self._found.values())


class InvalidRows:
    """The invalid rows of one task attempt.

    Args:
        topic: the dead-letter topic; None = the rows are dropped.
        limits: what the topic of the write accepts.
        origin: headers that all dead letters of the task have.
        target: option ``topic`` of the write; None if each row names its topic.
        stage: creates the stage of the dead letters, on the first one.
        escaped_names: whether names of headers in the frame are escaped (option ``headerNames``).

    Attributes:
        limits: as above.
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
        self.limits = limits
        self.marked = MarkedRows()
        self._escaped_names = escaped_names
        self._topic = topic
        self._origin = origin
        self._target = target
        self._stage = stage
        self._part: PartStage | None = None
        self._waiting: list[tuple[pa.RecordBatch, Reasons]] = []
        self._frame: tuple[SinkColumns, Plan | None] | None = None
        self._meter = TaskMeter(topic)
        self.count = 0

    @property
    def dropped(self) -> int:
        """Number of rows that were dropped."""
        return 0 if self._topic is not None else self.count

    def take(
        self, batch: pa.RecordBatch, reasons: Reasons, columns: SinkColumns, plan: Plan | None = None
    ) -> pa.RecordBatch:
        """Takes the invalid rows out of a batch.

        The letter of a row holds the record that the row would have become, or the record that was read if
        the query marked the row. A row that goes to no topic of Kafka has neither, so its letter has no key,
        and as its value all columns that sinks receive, as JSON.

        Args:
            batch: rows with the columns of the frame.
            reasons: why some of them are invalid.
            columns: positions of the columns that become records.
            plan: destinations of the rows; None = all rows go to Kafka.

        Returns:
            The valid rows.
        """
        bad = reasons.errors.is_valid()
        self.count += bad.true_count
        if self._topic is not None:
            rows = batch.filter(bad)
            if self._waiting and self._waiting[0][0].schema != rows.schema:
                self._write_waiting()
            self._frame = columns, plan
            self._waiting.append((rows, reasons.filtered(bad)))
            size = sum(each.nbytes for each, _ in self._waiting)
            if size >= _ENOUGH_BYTES or sum(each.num_rows for each, _ in self._waiting) >= _ENOUGH_ROWS:
                self._write_waiting()
        return batch.filter(pc.invert(bad))

    def take_bad_records(self, bad: pa.RecordBatch) -> None:
        """Takes records that a read set aside, with the columns `spark.arrow.BAD_RECORDS`."""
        self.count += bad.num_rows
        if self._topic is not None and bad.num_rows:
            self._write_waiting()  # letters keep the order of their rows
            self._write(
                _Letters(
                    {name: bad.column(name) for name in (KEY, VALUE, HEADERS)},
                    Reasons(bad.column("error"), bad.column("message"), pa.nulls(bad.num_rows, pa.string())),
                    [pa.StructArray.from_arrays(bad.columns, names=bad.schema.names)],
                    pa.repeat(pa.scalar(records.INPUT), bad.num_rows),
                    pa.repeat(pa.scalar(False), bad.num_rows),
                    pa.repeat(pa.scalar(True), bad.num_rows),
                )
            )

    def finish(self) -> StagedPart | None:
        """Makes the dead letters durable; None if there are none."""
        self._write_waiting()
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

    def _write_waiting(self) -> None:
        """Stages the letters of rows that wait for more rows, because a batch of letters costs some ms."""
        waiting, self._waiting = self._waiting, []
        if waiting and self._frame is not None:
            (rows,) = pa.Table.from_batches([each for each, _ in waiting]).combine_chunks().to_batches()
            self._write(_letters(rows, Reasons.joined([each for _, each in waiting]), *self._frame))

    def _write(self, letters: _Letters) -> None:
        """Stages dead letters."""
        found, rows = letters.columns, len(letters.why.errors)
        value = _as_bytes(found.get(VALUE), rows)
        key = _as_bytes(found.get(KEY), rows)
        original = found.get(HEADERS, pa.nulls(rows, HEADERS_ARROW))
        # a record that fits without the headers of a dead letter may not fit with them
        room = max(0, self.limits.record_bytes - _ROOM)
        large = pc.greater(record_bytes({KEY: key, VALUE: value, HEADERS: original}), room)
        # a replay must not send what is incomplete, so the header is there even if the value is null
        is_short = pc.or_(large, letters.incomplete)
        sizes = pc.if_else(is_short, pc.fill_null(pc.binary_length(value), 0), None)
        target = _target(found.get(TOPIC), self._target, rows)
        headers = {
            records.ERROR: pc.utf8_slice_codeunits(letters.why.errors, 0, _LONGEST_NAME),
            records.MESSAGE: pc.utf8_slice_codeunits(_repaired(letters.why.messages), 0, _LONGEST_MESSAGE),
            **_origin_of(letters.places, rows),
            records.HOLDS: letters.contents,
            **{name: pa.repeat(pa.scalar(text), rows) for name, text in self._origin.items()},
            records.TARGET_TOPIC: pc.if_else(letters.for_kafka, target, pa.scalar(None, pa.string())),
            records.TARGET_PARTITION: found[PARTITION].cast(pa.string())
            if PARTITION in found
            else pa.nulls(rows, pa.string()),
            records.SINK: letters.why.sinks,
            records.VALUE_BYTES: sizes.cast(pa.string()),
        }
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


@dataclass(frozen=True)
class _Letters:
    """Rows that become dead letters.

    Attributes:
        columns: columns of the records, by the names of the staged columns.
        why: why each row is invalid.
        places: structs that may name the origin of a row; the first that does so counts.
        contents: `records.INPUT` or `records.OUTPUT` for each row.
        incomplete: which letters do not hold all of their row.
        for_kafka: which rows would have become records in Kafka.
    """

    columns: Mapping[str, pa.Array]
    why: Reasons
    places: list[pa.Array]
    contents: pa.Array
    incomplete: pa.Array
    for_kafka: pa.Array


def _letters(batch: pa.RecordBatch, why: Reasons, columns: SinkColumns, plan: Plan | None) -> _Letters:
    """Returns what the letters of some rows hold."""
    rows = batch.num_rows
    marks = _marks(batch, columns)
    origins = None if columns.origin is None else batch.column(columns.origin)
    contents, incomplete = _contents(marks, rows)
    found = _staged_columns(batch, columns)
    if HEADERS not in found and marks is not None and pa.types.is_struct(marks.type):
        found[HEADERS] = _field(marks, HEADERS, HEADERS_ARROW)
    for_kafka = pa.repeat(pa.scalar(plan is None or plan.kafka), rows)
    if plan is not None:
        if plan.kafka and plan.router is not None:
            for_kafka = plan.destined(batch, KAFKA)
        is_record = for_kafka if marks is None else pc.or_(for_kafka, marks.is_valid())
        if not pc.all(is_record).as_py():
            from kafka_eos_source.sinks.formats import rows_as_json  # few tasks need it

            encoded, exact = rows_as_json(batch.select(plan.own))
            found = {
                name: pc.if_else(is_record, each, pa.scalar(None, each.type)) for name, each in found.items()
            }
            found[VALUE] = pc.if_else(is_record, _as_bytes(found.get(VALUE), rows), encoded)
            incomplete = pc.if_else(is_record, incomplete, pc.invert(exact))
    return _Letters(
        found,
        why,
        [each for each in (marks, origins) if each is not None],
        contents,
        incomplete,
        for_kafka,
    )


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


def _contents(marks: pa.Array | None, rows: int) -> tuple[pa.Array, pa.Array]:
    """Returns what each letter holds, and which letters are incomplete.

    A marked row is the record that was read, unless the mark says otherwise; any other row is output.
    """
    if marks is None:
        return pa.repeat(pa.scalar(records.OUTPUT), rows), pa.repeat(pa.scalar(False), rows)
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

"""The rules that make a row a Kafka record.

Tasks that set invalid rows aside also need to know which records the topic accepts (`record_limits`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    KafkaEosError,
    UnavailableError,
)
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.row_checks import RowRule, is_utf8
from kafka_eos_source.spark.schema import HEADERS, KEY, PARTITION, TIMESTAMP, TOPIC, VALUE

#: Bytes that a record needs besides its key, value and headers: an upper bound of Kafka's formats.
_RECORD_OVERHEAD = 100
#: The same for a header besides its key and value.
_HEADER_OVERHEAD = 10
#: This package's default of ``batch.size``.
_BATCH_BYTES = 1_000_000
#: A row is refused if its timestamp is so close to a limit that clocks and pauses decide, in milliseconds.
CLOCKS_DIFFER_MS = 60_000
_LEGAL_TOPIC = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")

_log = logging.getLogger(__name__)

#: librdkafka's default of ``message.max.bytes``.
CLIENT_BYTES = 1_000_000
#: A dead letter has up to 8 KiB of headers.
_LEAST_BYTES = 16_384
_WAIT_MS = 60_000
#: Timestamps of Spark are before the year 10,000, so that such a limit excludes none.
_NO_LIMIT_MS = 1 << 50
#: A topic is asked for again after this time, in seconds: topics grow.
_VALID_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Rule(RowRule):
    """A rule for the values of one column of a record.

    Attributes:
        wrong_is: what a row does that breaks the rule, after the name of the column.
        test: returns which values break the rule; null counts as false.
    """

    wrong_is: str
    test: Callable[[pa.Array], pa.Array]

    @property
    def what(self) -> str:
        return self.wrong_is

    def message(self, type_: pa.DataType) -> str:  # noqa: ARG002 - Kafka takes one type of value
        return f"column {self.column!r} {self.wrong_is}"

    def wrong(self, values: pa.Array) -> pa.Array:
        return self.test(values)


def _rule(column: str, wrong_is: str, fix: str, test: Callable[[pa.Array], pa.Array]) -> Rule:
    return Rule(column=column, wrong_is=wrong_is, fix=f"{fix}.", test=test)


def _rows_of_entries(headers: pa.Array, entries: pa.Array) -> pa.Array:
    """Returns which rows have an entry of their headers that is true in ``entries``."""
    rows = np.zeros(len(headers), bool)
    if pc.any(entries).as_py():
        rows[pc.list_parent_indices(headers).filter(entries).to_numpy()] = True
    return pa.array(rows)


def _has_null_entry(headers: pa.Array) -> pa.Array:
    return _rows_of_entries(headers, headers.flatten().is_null())


def _has_null_key(headers: pa.Array) -> pa.Array:
    entries = headers.flatten()
    # a null entry is another rule's; the user's field names may be in another letter case
    return _rows_of_entries(headers, pc.and_(entries.is_valid(), entries.field(0).is_null()))


def is_legal_topic(name: str) -> bool:
    """Returns whether Kafka accepts a name for a topic."""
    return _LEGAL_TOPIC.fullmatch(name) is not None


def _is_not_utf8(topics: pa.Array) -> pa.Array:
    return pc.invert(is_utf8(topics))


def _has_key_that_is_not_utf8(headers: pa.Array) -> pa.Array:
    entries = headers.flatten()
    bad = pc.fill_null(pc.invert(is_utf8(entries.field(0))), False)
    return _rows_of_entries(headers, pc.and_(entries.is_valid(), bad))


def _is_illegal_topic(topics: pa.Array) -> pa.Array:
    """Returns which names are illegal. Many rows have few names.

    Names that are not UTF-8 break another rule.
    """
    names = pc.unique(topics.cast(pa.string()).cast(pa.binary())).to_pylist()
    illegal = [
        each for each in names if each is not None and not is_legal_topic(each.decode(errors="replace"))
    ]
    return pc.is_in(topics.cast(pa.string()).cast(pa.binary()), value_set=pa.array(illegal, pa.binary()))


RULES: Mapping[str, tuple[Rule, ...]] = {
    TOPIC: (
        _rule(
            TOPIC,
            "is null",
            "set the option 'topic', or remove or fill such rows",
            lambda column: column.is_null(),
        ),
        _rule(
            TOPIC,
            "is empty",
            "remove or fill such rows",
            lambda column: pc.equal(column.cast(pa.string()), ""),
        ),
        _rule(TOPIC, "is not valid UTF-8", "correct the column", _is_not_utf8),
        _rule(
            TOPIC,
            "is not a legal name of a topic: 1 to 249 letters, digits, '.', '_' and '-', but not '.' or '..'",
            "correct the column",
            _is_illegal_topic,
        ),
    ),
    PARTITION: (
        _rule(
            PARTITION,
            "is negative",
            "use a partition that exists, or null to let the partitioner choose one",
            lambda column: pc.less(column, 0),
        ),
    ),
    HEADERS: (
        _rule(HEADERS, "has a null entry", "remove the header, or set its key", _has_null_entry),
        _rule(HEADERS, "has an entry with a null key", "remove the header, or set its key", _has_null_key),
        _rule(
            HEADERS,
            "has an entry whose key is not valid UTF-8",
            "remove the header, or correct its key",
            _has_key_that_is_not_utf8,
        ),
    ),
    TIMESTAMP: (
        _rule(
            TIMESTAMP,
            "is before 1970",
            "use a later timestamp, because Kafka's timestamps are milliseconds since 1970",
            lambda column: pc.less(_as_integer(column), 0),
        ),
    ),
}


@dataclass(frozen=True)
class RecordLimits:
    """What the topic of a write accepts, for tasks that set invalid rows aside.

    What the broker itself decides by its clock is None if each row names its topic.

    Attributes:
        record_bytes: size of the largest record, uncompressed.
        partitions: number of partitions of the topic; None if each row names its topic.
        needs_key: whether the topic is compacted, and so refuses records without a key.
        before_ms, after_ms: how far timestamps may be behind and ahead of the broker's clock; None = any.
    """

    record_bytes: int
    partitions: int | None = None
    needs_key: bool = False
    before_ms: int | None = None
    after_ms: int | None = None

    def rules(self) -> tuple[Rule, ...]:
        """Returns the rules that follow from the limits, besides the size."""
        found: list[Rule] = []
        if self.partitions is not None:
            count = self.partitions
            found.append(
                _rule(
                    PARTITION,
                    f"names a partition that the topic does not have; it has {count} (0 to {count - 1})",
                    "correct the column",
                    lambda column: pc.greater_equal(column, count),
                )
            )
        if self.needs_key:
            what = "is null, and the topic is compacted (cleanup.policy)"
            found.append(_rule(KEY, what, "set the key", lambda column: column.is_null()))
        return (*found, *self._rules_of_time())

    def _rules_of_time(self) -> list[Rule]:
        """Returns the rules for timestamps, as a broker applies them when the record arrives."""
        now_ms, found = round(time.time() * 1000), []
        if self.after_ms is not None:
            newest = now_ms + self.after_ms - min(CLOCKS_DIFFER_MS, self.after_ms // 2)
            what = f"is too far ahead of the clock (message.timestamp.after.max.ms={self.after_ms})"
            found.append(
                _rule(TIMESTAMP, what, "correct it", lambda column: pc.greater(_milliseconds(column), newest))
            )
        if self.before_ms is not None:
            oldest = now_ms - self.before_ms + min(CLOCKS_DIFFER_MS, self.before_ms // 2)
            what = f"is too old (message.timestamp.before.max.ms={self.before_ms})"
            found.append(
                _rule(TIMESTAMP, what, "correct it", lambda column: pc.less(_milliseconds(column), oldest))
            )
        return found


def with_small_batches(kafka: Mapping[str, str], largest_record_bytes: int) -> dict[str, str]:
    """Returns librdkafka properties whose record batches are not larger than the largest record.

    A broker compares the size of a whole record batch with ``max.message.bytes``. The client does not know
    that limit, and does not split a batch that is too large, so that the transaction would fail each time.
    """
    size = min(int(kafka.get("batch.size", _BATCH_BYTES)), largest_record_bytes)
    return {**kafka, "batch.size": str(size)} if size < _BATCH_BYTES else dict(kafka)


def record_bytes(columns: Mapping[str, pa.Array]) -> pa.Array:
    """Returns an upper bound of the size of each row's record, in bytes (int64), without compression."""
    rows = len(columns[VALUE]) if VALUE in columns else len(next(iter(columns.values())))
    size = pa.repeat(pa.scalar(_RECORD_OVERHEAD, pa.int64()), rows)
    for name in (KEY, VALUE):
        if name in columns:
            lengths = pc.binary_length(columns[name]).cast(pa.int64())
            size = pc.add(size, pc.fill_null(lengths, 0))
    headers = columns.get(HEADERS)
    if headers is not None and headers.null_count < len(headers):
        size = pc.add(size, _header_bytes(headers))
    return size


def size_of(key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Returns the same upper bound as `record_bytes` for one record."""
    entries = sum(_HEADER_OVERHEAD + len(name.encode()) + len(each or b"") for name, each in headers)
    return _RECORD_OVERHEAD + len(key or b"") + len(value or b"") + entries


def _header_bytes(headers: pa.Array) -> pa.Array:
    entries = headers.flatten()
    lengths = np.full(len(entries), _HEADER_OVERHEAD, np.int64)
    for each in (0, 1):
        lengths += pc.fill_null(pc.binary_length(entries.field(each)), 0).to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(headers).to_numpy()
    return pa.array(np.bincount(rows, weights=lengths, minlength=len(headers)).astype(np.int64))


def _milliseconds(timestamps: pa.Array) -> pa.Array:
    """Returns timestamps of Spark, which are in microseconds, in milliseconds."""
    if pa.types.is_timestamp(timestamps.type):
        timestamps = timestamps.cast(pa.timestamp("us", timestamps.type.tz)).cast(pa.int64())
    return pc.divide(timestamps, 1000)


def _as_integer(timestamps: pa.Array) -> pa.Array:
    """Returns timestamps as integers; only the sign counts."""
    return timestamps.cast(pa.int64()) if pa.types.is_timestamp(timestamps.type) else timestamps


# -- What the topic accepts ------------------------------------------------------------------------


@dataclass(frozen=True)
class TopicSettings:
    """What the cluster says about a topic.

    Attributes:
        partitions: how many it has.
        config: its properties, with the broker's defaults; None = the principal may not see them.
    """

    partitions: int
    config: Mapping[str, str] | None


#: By login and topic: when the cluster was asked, and what it said, or why it said nothing.
_known: dict[str, tuple[float, TopicSettings | KafkaEosError]] = {}


def topic_settings(kafka: Mapping[str, str], topic: str, wait_ms: int) -> TopicSettings:
    """Returns the settings of a topic, which the cluster is asked for once a minute.

    Args:
        kafka: librdkafka properties of the write.
        topic: the topic.
        wait_ms: how long brokers may take. If it is shorter than a minute, an error is remembered as well, so
            that not every micro-batch waits.

    Raises:
        KafkaEosError: if the topic does not exist, or no broker answers.
    """
    key = repr((topic, sorted(kafka.items())))
    at, known = _known.get(key, (0.0, None))
    is_patient = wait_ms >= _WAIT_MS
    is_usable = known is not None and not (is_patient and isinstance(known, KafkaEosError))
    if not is_usable or time.monotonic() - at > _VALID_SECONDS:
        try:
            known = _ask(kafka, topic, Deadline.after_ms(wait_ms))
        except KafkaEosError as error:
            known = error
        _known[key] = time.monotonic(), known
    if isinstance(known, KafkaEosError):
        raise known.with_traceback(None)
    assert known is not None
    return known


def _ask(kafka: Mapping[str, str], topic: str, deadline: Deadline) -> TopicSettings:
    from kafka_eos_source.kafka.topic_admin import TopicAdmin  # only the driver asks

    config = None
    with TopicAdmin(kafka) as admin:
        try:
            config = admin.config(topic, deadline)
        except AuthorizationError as refused:
            _log.warning("the configuration of topic %r does not limit records: %s", topic, refused)
        shape = admin.shape(topic, deadline)
    if shape is None:
        raise UnavailableError(f"topic {topic!r} does not exist.", fix="create it, or correct its name.")
    return TopicSettings(shape.partitions, config)


def record_limits(kafka: Mapping[str, str], topic: str | None, dead_letter_topic: str | None) -> RecordLimits:
    """Returns the limits of records for a write.

    The size is the smallest of the client's limit (``kafka.message.max.bytes``) and ``max.message.bytes`` of
    both topics. It applies to a record without compression.

    Args:
        kafka: librdkafka properties of the write.
        topic: option ``topic``; None = each row names its topic, whose limit is not known.
        dead_letter_topic: option ``deadLetter.topic``; None if rows are dropped.

    Raises:
        InvalidOptionError: if the limit leaves no room for the headers of a dead letter.
        UnavailableError: if a topic does not exist, or no broker answers.
    """
    names = [each for each in (topic, dead_letter_topic) if each is not None]
    found = {name: topic_settings(kafka, name, _WAIT_MS) for name in names}
    sizes = [int(each.config["max.message.bytes"]) for each in found.values() if each.config is not None]
    most = min([int(kafka.get("message.max.bytes", CLIENT_BYTES)), *sizes])
    if dead_letter_topic is not None and most < _LEAST_BYTES:
        raise InvalidOptionError(
            f"records may have {most:,} bytes, by kafka.message.max.bytes and max.message.bytes of the "
            f"topics; onInvalidRecord=dead-letter needs {_LEAST_BYTES:,}, so that the headers fit.",
            fix="raise the limit.",
        )
    output = found[topic].config or {} if topic is not None else {}
    return RecordLimits(
        most,
        None if topic is None else found[topic].partitions,
        needs_key="compact" in output.get("cleanup.policy", ""),
        before_ms=time_limit(output, "message.timestamp.before.max.ms"),
        after_ms=time_limit(output, "message.timestamp.after.max.ms"),
    )


def time_limit(config: Mapping[str, str], name: str) -> int | None:
    """Returns a limit of timestamps in milliseconds; None if the topic accepts any."""
    text = config.get(name, config.get("message.timestamp.difference.max.ms"))  # until Kafka 3.5
    if text is None or config.get("message.timestamp.type") != "CreateTime":
        return None
    limit = int(text)
    return limit if limit < _NO_LIMIT_MS else None

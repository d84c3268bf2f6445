"""The layout of Kafka's record batches, as far as Python reads it, and the headers of dead letters.

Dead letters are records that could not be processed, kept with the reason. Kafka Streams has the same headers
where their names begin with ``__streams`` (KIP-1034), so that tools for its dead letter queues read ours. All
values are UTF-8 text; numbers are decimal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Bytes before the first record.
HEADER_BYTES = 61
#: The option of a source that becomes a property of its consumers: the most memory that the records of one
#: compressed batch may need. Beyond the largest value, the offsets of Arrow's columns could become too small.
#: Brokers accept batches of 1 MiB unless they are set up for more, and data rarely compresses to a fiftieth.
MOST_DECOMPRESSED = "max.decompressed.batch.bytes"
MOST_DECOMPRESSED_BYTES, LARGEST_MOST_DECOMPRESSED_BYTES = 256 << 20, 1 << 30

_RECORDS = slice(57, 61)


def records_of(batch: memoryview) -> int:
    """Returns the number of records in a record batch, as its header says."""
    return int.from_bytes(batch[_RECORDS], "big")


# -- dead letters ---------------------------------------------------------------------------------------

#: Class of the error, and its message.
ERROR = "__streams.errors.exception"
MESSAGE = "__streams.errors.message"
#: Topic, partition, offset and timestamp (ms since 1970) of the record that was read, as far as known.
ORIGIN_TOPIC = "__streams.errors.topic"
ORIGIN_PARTITION = "__streams.errors.partition"
ORIGIN_OFFSET = "__streams.errors.offset"
ORIGIN_TIMESTAMP = "__kafka_eos.origin.timestamp"
#: Query and micro-batch that wrote the dead letter. A batch write has no batch id.
APPLICATION = "__kafka_eos.application"
BATCH = "__kafka_eos.batch"
#: What key and value are: `INPUT` or `OUTPUT`.
HOLDS = "__kafka_eos.holds"
#: Topic and partition that the record was meant for, as far as the row named them.
TARGET_TOPIC = "__kafka_eos.target.topic"
TARGET_PARTITION = "__kafka_eos.target.partition"
#: Name of the sink outside Kafka that cannot hold the row.
SINK = "__kafka_eos.sink"
#: Original size of a value of which the dead letter has only the beginning, in bytes. Headers of the record,
#: and a large key, are missing then. A row that could not be encoded has this header, too.
VALUE_BYTES = "__kafka_eos.value.bytes"

#: Every header that the sink adds. Headers of these names in the original record are replaced.
ALL = (
    ERROR,
    MESSAGE,
    ORIGIN_TOPIC,
    ORIGIN_PARTITION,
    ORIGIN_OFFSET,
    ORIGIN_TIMESTAMP,
    APPLICATION,
    BATCH,
    HOLDS,
    TARGET_TOPIC,
    TARGET_PARTITION,
    SINK,
    VALUE_BYTES,
)

#: Class of the error of records that could not be decoded or encoded.
UNDECODABLE = "UndecodableRecord"

#: The letter holds the record that the query read, because the query marked its row as invalid.
INPUT = "input"
#: The letter holds a row of the query's output, which cannot become a record of the output topic.
OUTPUT = "output"
#: Only in marks of rows: the letter holds `OUTPUT`, and is incomplete, because a column could not be encoded.
INCOMPLETE = "incomplete"

#: Largest number in a header, and its digits.
_MOST, _MOST_DIGITS = 2**63 - 1, 19
#: Largest timestamp: the last millisecond of the year 9999.
MOST_MS = 253_402_300_799_999

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True)
class DeadLetter:
    """What the headers of one record say; None = the record has no such header, or no valid number.

    Attributes:
        error, message: class and text of the error.
        origin_topic, origin_partition, origin_offset, origin_timestamp_ms: the record that was read.
        application_id, batch: query and micro-batch that wrote the letter.
        holds: `INPUT` or `OUTPUT`.
        target_topic, target_partition: where the record was meant to be written.
        sink: the sink outside Kafka that cannot hold the row.
        value_bytes: original size of the value if the letter is incomplete.
    """

    error: str | None = None
    message: str | None = None
    origin_topic: str | None = None
    origin_partition: int | None = None
    origin_offset: int | None = None
    origin_timestamp_ms: int | None = None
    application_id: str | None = None
    batch: int | None = None
    holds: str | None = None
    target_topic: str | None = None
    target_partition: int | None = None
    sink: str | None = None
    value_bytes: int | None = None

    @classmethod
    def parse(cls, headers: Iterable[tuple[str, bytes | None]]) -> DeadLetter:
        """Reads the headers of a record, which any program may have written."""
        texts = {name: value.decode(errors="replace") for name, value in headers if value is not None}
        return cls(
            error=texts.get(ERROR),
            message=texts.get(MESSAGE),
            origin_topic=texts.get(ORIGIN_TOPIC),
            origin_partition=_number(texts.get(ORIGIN_PARTITION)),
            origin_offset=_number(texts.get(ORIGIN_OFFSET)),
            origin_timestamp_ms=_number(texts.get(ORIGIN_TIMESTAMP), MOST_MS),
            application_id=texts.get(APPLICATION),
            batch=_number(texts.get(BATCH)),
            holds=texts.get(HOLDS),
            target_topic=texts.get(TARGET_TOPIC),
            target_partition=_number(texts.get(TARGET_PARTITION)),
            sink=texts.get(SINK),
            value_bytes=_number(texts.get(VALUE_BYTES)),
        )


def without_ours(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    """Returns the headers that the record had before it became a dead letter."""
    return tuple((name, value) for name, value in headers if name not in ALL)


def _number(text: str | None, most: int = _MOST) -> int | None:
    if text is None or len(text) > _MOST_DIGITS or not (text.isascii() and text.isdecimal()):
        return None
    return number if (number := int(text)) <= most else None

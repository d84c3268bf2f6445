"""The headers of dead letters: records that could not be processed, kept with the reason.

Kafka Streams has the same names where they begin with ``__streams`` (KIP-1034), so that tools for its dead
letter queues read ours. All values are UTF-8 text; numbers are decimal.
"""

from __future__ import annotations

#: Class of the error, and its message.
ERROR = "__streams.errors.exception"
MESSAGE = "__streams.errors.message"
#: Topic, partition and offset of the record that was read. A row that was marked without them has none.
ORIGIN_TOPIC = "__streams.errors.topic"
ORIGIN_PARTITION = "__streams.errors.partition"
ORIGIN_OFFSET = "__streams.errors.offset"
#: Query and micro-batch that wrote the dead letter. A batch write has no batch id.
APPLICATION = "__kafka_eos.application"
BATCH = "__kafka_eos.batch"
#: Topic and partition that the record was meant for, as far as the row named them.
TARGET_TOPIC = "__kafka_eos.target.topic"
TARGET_PARTITION = "__kafka_eos.target.partition"
#: Original size of a value of which the dead letter has only the beginning, in bytes.
VALUE_BYTES = "__kafka_eos.value.bytes"

#: Every header that the sink adds. Headers of these names in the original record are replaced.
ALL = (
    ERROR,
    MESSAGE,
    ORIGIN_TOPIC,
    ORIGIN_PARTITION,
    ORIGIN_OFFSET,
    APPLICATION,
    BATCH,
    TARGET_TOPIC,
    TARGET_PARTITION,
    VALUE_BYTES,
)

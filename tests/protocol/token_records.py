"""A token record, for tests of what reads and writes it."""

from __future__ import annotations

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.token import (
    Token,
    TokenRecord,
)

TOKEN = Token("orders", "query", "run", 7, 5, "aa", "bb", 100)

ANCHOR = TopicPartition("out", 0)

RECORD = TokenRecord(
    TOKEN, {TopicPartition("in", 0): 42, ANCHOR: 5}, ANCHOR, "group", "id-1", 3, 1_760_000_000_123
)

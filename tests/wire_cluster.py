"""The names under which tests of producers know `simulated.kafka`."""

from fetched_log import INVALID_EPOCH, OK, OUT_OF_ORDER
from simulated.kafka import (
    CONCURRENT,
    CORRUPT_MESSAGE,
    FENCED,
    INVALID_TXN_STATE,
    LAST_EPOCH,
    NOT_COORDINATOR,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    UNSUPPORTED_VERSION,
    Fault,
    Partition,
)
from simulated.kafka import SimulatedKafka as WireCluster

__all__ = [
    "CONCURRENT",
    "CORRUPT_MESSAGE",
    "FENCED",
    "INVALID_EPOCH",
    "INVALID_TXN_STATE",
    "LAST_EPOCH",
    "NOT_COORDINATOR",
    "NOT_ENOUGH_REPLICAS",
    "NOT_LEADER",
    "OK",
    "OUT_OF_ORDER",
    "TOO_LARGE",
    "UNKNOWN_TOPIC",
    "UNSUPPORTED_VERSION",
    "Fault",
    "Partition",
    "WireCluster",
]

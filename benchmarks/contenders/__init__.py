"""The contenders, each a small module with one interface."""

from __future__ import annotations

from benchmarks.contenders.base import Contender, Job, Target
from benchmarks.contenders.kafka_eos import KafkaEos
from benchmarks.contenders.kafka_streams import KafkaStreams
from benchmarks.contenders.quix import Quix
from benchmarks.contenders.spark import SparkState

ALL: tuple[Contender, ...] = (
    KafkaEos("kafka-eos", vectorised=True),
    KafkaEos("kafka-eos-processor", vectorised=False),
    KafkaStreams("kafka-streams", commit_interval_ms=100),
    KafkaStreams("kafka-streams-1s", commit_interval_ms=1_000),
    Quix("quix"),
    Quix("quix-scaled", every_core=True),
    SparkState("spark-tws", pandas=False),
    SparkState("spark-tws-pandas", pandas=True),
)

#: Left out unless asked for: slower than the same peer in its other form, and it takes long to see that.
ON_REQUEST = ("spark-tws-pandas",)

#: Names of those that are kafka-eos.
OURS = ("kafka-eos", "kafka-eos-processor")

TARGETS = (
    Target("kafka-eos", "kafka-streams", 5),
    Target("kafka-eos", "quix", 25),
    Target("kafka-eos-processor", "quix", 4),
    Target("kafka-eos-processor", "spark-tws", 1),
)

__all__ = ["ALL", "ON_REQUEST", "OURS", "TARGETS", "Contender", "Job", "Target"]

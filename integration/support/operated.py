"""A query that tests of the commands operate."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from integration.support.checkpoint import SparkCheckpoint
from integration.support.kafka import (
    end_offsets,
    produce,
    read_back,
    values,
)
from integration.support.sink_stream import rows
from kafka_eos_source.commit import micro_batch
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.staging import stage
from kafka_eos_source.stage.task import StagedTask


class Query:
    """A topic-to-topic query without Spark: it writes Spark's checkpoint files and uses the sink's commit."""

    def __init__(self, broker: str, source: str, sink: str, folder: Path, application_id: str) -> None:
        self.broker, self.source, self.sink, self.application_id = broker, source, sink, application_id
        self.made = SparkCheckpoint(folder, str(uuid.uuid4()))
        self.checkpoint = self.made.location
        self._options = {
            "kafka.bootstrap.servers": broker,
            "topic": sink,
            "application.id": application_id,
            "checkpointLocation": self.checkpoint,
        }

    def plan(self, batch_id: int, start: int | None = None) -> None:
        """Plans a batch up to the end of the source; ``start`` is where batch 0 begins."""
        tp = TopicPartition(self.source, 0)
        end = {tp: end_offsets(self.broker, self.source)[0]}
        self.made.log_offsets(batch_id, SourcePosition(end, None if start is None else {tp: start}))

    def commit(self, batch_id: int, staged: Sequence[str], *, restarted: bool = False) -> Step:
        """Commits a batch, by the running driver or, if ``restarted``, by one that has just started."""
        options = parse_write(self._options, streaming=True)
        if restarted:
            while micro_batch._sessions:  # a new process has no cached sessions
                micro_batch._sessions.popitem()[1].drop()
        batch = pa.record_batch({"value": pa.array([value.encode() for value in staged])})
        part = stage([batch], batch.schema, folder=None, batch="", inline_bytes=0, topic=self.sink)
        folder = StagingFolder.at(f"{self.checkpoint}/kafka-eos/staging")
        return micro_batch.commit_micro_batch(options, folder, [StagedTask(part)], batch_id).step

    def run(self, batch_id: int, first: int, end: int) -> None:
        """Runs one batch, from its records in the source to Spark's commit log."""
        produce(self.broker, self.source, rows(first, end))
        self.plan(batch_id, start=first if batch_id == 0 else None)
        assert self.commit(batch_id, rows(first, end)) is Step.COMMITTED
        self.made.log_commit(batch_id)

    def written(self) -> list[str]:
        return values(read_back(self.broker, self.sink))

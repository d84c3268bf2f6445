"""All places where the chain model replaces a part of the product, so that a moved module changes one file.

Everything else is the real code: planning of sources, staging, packets of state changes, the first-batch
file, the offset log, the state machine of the commit, its verdict, and the recovery of sinks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kafka_eos_source.commit import at_least_once, identity_file, machine, micro_batch, open_sinks, two_phase
from kafka_eos_source.datasource import sink
from kafka_eos_source.datasource import writer as writer_module
from kafka_eos_source.datasource.writer import batch_writer, stream_writer
from kafka_eos_source.model import GroupOffset, OffsetRange, Offsets, TopicPartition
from kafka_eos_source.options.parse import parse_read, parse_write
from kafka_eos_source.protocol import identity
from kafka_eos_source.protocol.token import Mark
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.worker import StreamingTask
from kafka_eos_source.stage import staging
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.operator import shard as shard_module
from kafka_eos_source.state.operator import shard_store
from kafka_eos_source.state.options import parse_state

__all__ = [
    "Deadline",
    "GroupOffset",
    "OffsetRange",
    "Offsets",
    "TopicPartition",
    "answer",
    "batch_writer",
    "changelog_name",
    "group_of",
    "installed",
    "is_ours",
    "read_options",
    "shard_module",
    "state_options",
    "stream_writer",
    "task",
    "worker",
    "worker_globals",
    "write_options",
]

_BROKERS = {"kafka.bootstrap.servers": "model:1"}


def is_ours(metadata: str) -> bool:
    """Whether a transaction of this package committed the offset with this metadata."""
    return Mark.decode(metadata) is not None


def group_of(query_id: str, application_id: str | None, group_id: str | None) -> str:
    """Returns the consumer group of a streaming query."""
    return identity.of_stream(query_id, application_id=application_id, group_id=group_id, topic=None).group_id


def answer(value: str, batch_id: int) -> str:
    """Returns the value of an option with which a person answers a refusal of this batch."""
    return f"{value}:{batch_id}"


@lru_cache(maxsize=4096)
def _read(options: tuple[tuple[str, str], ...]) -> Any:
    return parse_read(dict(options), streaming=True, pyspark_version="4.3.0")


@lru_cache(maxsize=4096)
def _state(options: tuple[tuple[str, str], ...]) -> Any:
    return parse_state(dict(options))


def read_options(**options: str) -> Any:
    return _read(tuple(sorted({**_BROKERS, **options}.items())))


def write_options(streaming: bool, options: Mapping[str, str]) -> Any:
    return parse_write({**_BROKERS, **options}, streaming=streaming)


def state_options(options: Mapping[str, str]) -> Any:
    return _state(tuple(sorted({**_BROKERS, **options}.items())))


@contextmanager
def task(query_id: str, batch_id: str, run_id: str, partition: int) -> Iterator[None]:
    """Sets the Spark task that is running."""
    running = StreamingTask(query_id, batch_id, run_id, partition)
    with patch.object(sink, "_task", lambda: running):
        yield


def worker_globals() -> dict[str, Any]:
    """Returns the module globals of a new commit worker."""
    return {
        "_sessions": type(micro_batch._sessions)(),
        "_opened": type(open_sinks._opened)(),
        "_ready": {},
        "_identities": set(),
    }


@contextmanager
def worker(kept: Mapping[str, Any]) -> Iterator[None]:
    """Sets the module globals of the commit worker that is running."""
    with (
        patch.object(micro_batch, "_sessions", kept["_sessions"]),
        patch.object(open_sinks, "_opened", kept["_opened"]),
        patch.object(open_sinks, "_ready", kept["_ready"]),
        patch.object(identity_file, "_checked", kept["_identities"]),
    ):
        yield


@contextmanager
def installed(
    clients: Callable[[], Any],
    direct_producer: Callable[[], Any],
    driver_ms: Callable[[], int],
    executor_ms: Callable[[], int],
    seams: Mapping[str, Any],
) -> Iterator[None]:
    """Replaces the Kafka clients and the clocks of the product by those of the model.

    Args:
        clients: returns the `commit.request.Clients` of the process that is running.
        direct_producer: returns the producer of a task that writes at least once.
        driver_ms, executor_ms: return what the clocks of the two hosts show, in ms since the epoch.
        seams: replacements for names that `state.operator.shard` or `shard_store` imports.
    """
    with ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(patch.object(owner, name, value))

        replace(micro_batch, "KafkaClients", lambda _kafka: clients())
        # tasks stage rows, as when no broker answers this question, but without waiting for it
        replace(staging, "sealing_plan", lambda _kafka, _topic: None)
        replace(at_least_once, "check_target", lambda _options: None)
        replace(open_sinks, "cluster_id", lambda _options, **_more: clients().cluster_id)
        replace(at_least_once, "RecordProducer", lambda _config, _name: direct_producer())
        replace(at_least_once, "_producers", {})
        replace(at_least_once, "report", lambda *_: None)
        replace(shard_module, "time", SimpleNamespace(time_ns=lambda: executor_ms() * 1_000_000))
        replace(writer_module, "task_begins", lambda: None)
        replace(open_sinks, "WatchedSink", lambda sink, _naming: sink)
        clock = SimpleNamespace(monotonic=time.monotonic, time_ns=lambda: driver_ms() * 1_000_000)
        replace(machine, "time", clock)
        for module in (machine, two_phase):
            replace(module, "_FIRST_PAUSE_SECONDS", 0.0)
            replace(module, "_LONGEST_PAUSE_SECONDS", 0.0)
        for name, value in seams.items():
            replace(shard_module if hasattr(shard_module, name) else shard_store, name, value)
        yield


def shard_task(
    query_id: str,
    batch_id: int,
    run_id: str,
    task_attempt_id: str,
    store: str,
    changelog: Any,
    options: Any,
    shard: int,
) -> Any:
    """Returns a `state.operator.shard.ShardTask`: one task attempt at one shard."""
    return shard_module.ShardTask(
        requested=shard_module.RequestedBatch(query_id, batch_id),
        run_id=run_id,
        task_attempt_id=task_attempt_id,
        identity=shard_module.StoreIdentity(
            application_id=options.application(query_id),
            store=store,
            shard=shard,
            shards=changelog.shards,
            changelog_topic=changelog.name,
            topic_id=changelog.topic_id,
        ),
        changelog=changelog,
        options=options,
    )

"""The options of a stateful operator, checked on the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka_eos_source.errors import InvalidOptionError, UnavailableError
from kafka_eos_source.kafka import config
from kafka_eos_source.options.parse import parse_table, take_group_id
from kafka_eos_source.options.table import OPERATOR
from kafka_eos_source.protocol.identity import derived_application_id, group_of
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.runtime.folders import NotOwnError, PrivateFolder

#: Default of ``state.snapshot.interval.ms``.
SNAPSHOT_INTERVAL_MS = 600_000


@dataclass(frozen=True)
class SnapshotSettings:
    """Where snapshots are and how often they are made.

    Attributes:
        location: option ``state.snapshot.location``.
        interval_ms: option ``state.snapshot.interval.ms``.
    """

    location: str = field(repr=False)  # may have a password
    interval_ms: int


@dataclass(frozen=True)
class StateOptions:
    """The checked options of an operator. The fields are named after the options.

    Attributes:
        kafka: librdkafka properties for the sink's cluster; not printed, because they may contain passwords.
        snapshots: of ``state.snapshot.location`` and ``state.snapshot.interval.ms``; None = no snapshots.
    """

    application_id: str | None
    group_id: str | None
    state_dir: str | None
    uncommitted_max_bytes: int
    replication_factor: int
    min_insync_replicas: int | None
    delete_retention_ms: int | None
    wal_sync: bool
    event_time_max_ahead_ms: int
    clock_max_ahead_ms: int
    aggregate_max_values: int
    lock_timeout_ms: int
    timeout_ms: int
    missing_state: str
    foreign_query: str
    kafka: Mapping[str, str] = field(repr=False)
    snapshots: SnapshotSettings | None = None

    def application(self, query_id: str) -> str:
        """Returns the query's transactional id, the same as in its sink."""
        return self.application_id or derived_application_id(query_id)

    def group(self, query_id: str) -> str:
        """Returns the consumer group whose committed offsets carry the token."""
        return group_of(self.application(query_id), self.group_id)

    def missing_state_in(self, batch_id: int) -> str:
        """Returns the answer of ``onMissingState`` for a batch: ``fail``, ``changelog`` or ``new``."""
        word, _, batch = self.missing_state.partition(":")
        return word if batch == str(batch_id) else "fail"

    def root(self) -> str:
        """Returns the folder where this host keeps state. Call it in the task, not on the driver.

        Raises:
            InvalidOptionError: if ``state.dir`` is not set and another user owns the default folder.
            UnavailableError: if the default folder cannot be created.
        """
        if self.state_dir:
            return self.state_dir
        folder = PrivateFolder.of_user("kafka-eos-state")
        try:
            return folder.create()
        except NotOwnError as error:
            raise InvalidOptionError(
                f"state.dir is not set, and the default state folder {error}.",
                fix="set .option('state.dir', …) to a local folder that only this user can write to.",
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"cannot create the default state folder {folder.path!r}: {error}.",
                fix="free disk space or grant write permission there, or set .option('state.dir', …).",
            ) from error


def parse_state(options: Mapping[str, str]) -> StateOptions:
    """Parses and checks the options of an operator, without contacting a broker.

    Raises:
        InvalidOptionError: if an option is unknown, malformed, not allowed on an operator, or missing.
    """
    values, kafka = parse_table(options, OPERATOR)
    group_id = take_group_id(kafka)
    return StateOptions(
        application_id=values["application.id"],
        group_id=group_id,
        state_dir=values["state.dir"],
        uncommitted_max_bytes=values["statestore.uncommitted.max.bytes"],
        replication_factor=values["state.changelog.replication.factor"],
        min_insync_replicas=values["state.changelog.min.insync.replicas"],
        delete_retention_ms=values["state.changelog.delete.retention.ms"],
        wal_sync=values["state.wal.sync"],
        event_time_max_ahead_ms=values["state.event.time.max.ahead"],
        clock_max_ahead_ms=values["state.clock.max.ahead"],
        aggregate_max_values=values["state.aggregate.max.values"],
        lock_timeout_ms=values["state.lock.timeout.ms"],
        timeout_ms=values["state.timeout.ms"],
        missing_state=values["onMissingState"],
        foreign_query=values["onForeignQuery"],
        kafka=config.check_consumer(kafka),
        snapshots=_snapshots(values["state.snapshot.location"], values["state.snapshot.interval.ms"]),
    )


def _snapshots(location: str | None, interval_ms: int | None) -> SnapshotSettings | None:
    """Returns the settings of snapshots; raises `InvalidOptionError` if PyArrow cannot open the location."""
    if location is None:
        if interval_ms is not None:
            raise InvalidOptionError(
                f"state.snapshot.interval.ms is {interval_ms}, but state.snapshot.location is not set, so no "
                "snapshots are made.",
                fix="set state.snapshot.location to a folder that all executors share, or remove "
                "state.snapshot.interval.ms.",
            )
        return None
    file_system(location)
    return SnapshotSettings(location, SNAPSHOT_INTERVAL_MS if interval_ms is None else interval_ms)

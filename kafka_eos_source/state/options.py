"""The options of a stateful operator, checked on the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka_eos_source.errors import InvalidOptionError, UnavailableError
from kafka_eos_source.kafka import config
from kafka_eos_source.options.option import OPERATOR
from kafka_eos_source.options.parse import parse_table, take_group_id
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.runtime.private_folders import ForeignFolderError, PrivateFolder


@dataclass(frozen=True)
class StateOptions:
    """The options of an operator, checked. Fields are named after the options.

    ``kafka``: librdkafka properties that say how to reach the sink's cluster; may hold passwords, so not
    printed.
    """

    application_id: str | None
    group_id: str | None
    state_dir: str | None
    uncommitted_max_bytes: int
    replication_factor: int
    min_insync_replicas: int | None
    wal_sync: bool
    lock_timeout_ms: int
    timeout_ms: int
    missing_state: str
    foreign_query: str
    kafka: Mapping[str, str] = field(repr=False)

    def application(self, query_id: str) -> str:
        """The query's transactional id, as its sink has it."""
        return self.application_id or derived_application_id(query_id)

    def group(self, query_id: str) -> str:
        """The consumer group that carries the token."""
        return self.group_id or self.application(query_id)

    def root(self) -> str:
        """Where this host keeps state: looked up in the task, not on the driver.

        Raises:
            InvalidOptionError: ``state.dir`` is not set, and another user owns the default folder.
            UnavailableError: the default folder cannot be created.
        """
        if self.state_dir:
            return self.state_dir
        folder = PrivateFolder.of_user("kafka-eos-state")
        try:
            return folder.create()
        except ForeignFolderError as error:
            raise InvalidOptionError(
                f"the default state folder {error}.",
                fix="set .option('state.dir', …) to a local folder that only this user may write.",
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"cannot create the default state folder {folder.path!r}: {error}.",
                fix="free space there or allow writing, or set .option('state.dir', …).",
            ) from error


def parse_state(options: Mapping[str, str]) -> StateOptions:
    """The options of an operator. No broker is asked.

    Raises:
        InvalidOptionError: an option is unknown, malformed, out of place or missing.
    """
    found, kafka = parse_table(options, OPERATOR)
    group_id = take_group_id(kafka)
    return StateOptions(
        application_id=found["application.id"],
        group_id=group_id,
        state_dir=found["state.dir"],
        uncommitted_max_bytes=found["statestore.uncommitted.max.bytes"],
        replication_factor=found["state.changelog.replication.factor"],
        min_insync_replicas=found["state.changelog.min.insync.replicas"],
        wal_sync=found["state.wal.sync"],
        lock_timeout_ms=found["state.lock.timeout.ms"],
        timeout_ms=found["state.timeout.ms"],
        missing_state=found["onMissingState"],
        foreign_query=found["onForeignQuery"],
        kafka=config.check_consumer(kafka),
    )

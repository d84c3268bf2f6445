"""Parses the options of ``spark.read.format("kafka-eos-state")``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import config
from kafka_eos_source.options.parse import has_brokers, parse_table, take_group_id
from kafka_eos_source.options.table import STATE_READ
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.state.reading.cut import Changelog
from kafka_eos_source.state.reading.decode import Choice


@dataclass(frozen=True)
class StateReadOptions:
    """Parsed options of a read of state; ``docs/options.md`` describes each.

    Attributes:
        application_id: option ``application.id``; set unless ``state_dir`` is.
        store: option ``storeName``; set unless ``state_dir`` is.
        state_dir: directory of the databases to read; None = read the changelog.
        group_id: consumer group of the query; None = the default (`identity.group_of`).
        choice: the part of the store to read.
        raw: whether to return keys and values as they are stored.
        batch_id: batch that the state must be of; None = any.
        timeout_ms: limit for each wait for the brokers.
        kafka: librdkafka properties. They may contain passwords, so they are not printed.
        snapshot_location: where snapshots of the shards are, from which a read of the changelog may begin;
            None = it begins with the changelog. It may contain a password, so it is not printed.
    """

    application_id: str | None
    store: str | None
    state_dir: str | None
    group_id: str | None
    choice: Choice
    raw: bool
    batch_id: int | None
    timeout_ms: int
    kafka: Mapping[str, str] = field(repr=False)
    snapshot_location: str | None = field(default=None, repr=False)

    def changelog(self) -> Changelog:
        """Returns the changelog to read; ``state_dir`` must not be set."""
        assert self.application_id is not None
        assert self.store is not None
        group_id = group_of(self.application_id, self.group_id)
        return Changelog(self.application_id, self.store, group_id, self.kafka, self.snapshot_location)


def parse_state_read(options: Mapping[str, str]) -> StateReadOptions:
    """Parses the options of a read of state, without any access to brokers or files.

    Raises:
        InvalidOptionError: if an option is unknown, malformed or missing, or contradicts another one; or if
            PyArrow cannot open the location of snapshots.
    """
    values, kafka = parse_table(options, STATE_READ, needs_brokers=False)
    group_id = take_group_id(kafka)
    state_dir = values["state.dir"] or options.get("path")
    if state_dir is None:
        if not has_brokers(kafka):
            raise InvalidOptionError(
                "neither 'state.dir' nor 'kafka.bootstrap.servers' is set; expected one of them.",
                fix="to read the databases on this machine, set state.dir or load(path); to read the "
                "changelog, set the operator's kafka.* options.",
            )
        for name in ("application.id", "storeName"):
            if values[name] is None:
                raise InvalidOptionError(
                    f"option {name!r} is missing; it is part of the name of the changelog topic.",
                    fix="set it to the value that the query has; `kafka-eos state ls` lists the values.",
                )
    elif has_brokers(kafka):
        raise InvalidOptionError(
            f"both 'state.dir' ({state_dir!r}) and 'kafka.bootstrap.servers' are set; expected one of them.",
            fix="keep the kafka.* options to read all shards at one batch from the changelog, or keep "
            "state.dir to read the databases on this machine. StateQuery accepts both.",
        )
    snapshot_location = values["state.snapshot.location"]
    if snapshot_location is not None:
        if state_dir is not None:
            raise InvalidOptionError(
                f"both 'state.dir' ({state_dir!r}) and 'state.snapshot.location' are set; a read of the "
                "databases uses no snapshots.",
                fix="remove state.snapshot.location; or remove state.dir, to read the changelog.",
            )
        file_system(snapshot_location)
    if values["raw"] and (values["stateVarName"] or values["readRegisteredTimers"]):
        raise InvalidOptionError(
            "'raw' is set together with 'stateVarName' or 'readRegisteredTimers'.", fix="keep one of them."
        )
    if values["stateVarName"] and values["readRegisteredTimers"]:
        raise InvalidOptionError(
            "'stateVarName' and 'readRegisteredTimers' are both set, but timers belong to no variable.",
            fix="keep one of them.",
        )
    return StateReadOptions(
        application_id=values["application.id"],
        store=values["storeName"],
        state_dir=state_dir,
        group_id=group_id,
        choice=Choice(
            values["stateVarName"], values["readRegisteredTimers"], values["flattenCollectionTypes"]
        ),
        raw=values["raw"],
        batch_id=values["batchId"],
        timeout_ms=values["state.timeout.ms"],
        kafka=config.check_consumer(kafka),
        snapshot_location=snapshot_location,
    )

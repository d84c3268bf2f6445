"""The options of ``spark.read.format("kafka-eos-state")``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import config
from kafka_eos_source.options.option import STATE_READ
from kafka_eos_source.options.parse import has_brokers, parse_table, take_group_id
from kafka_eos_source.state.reading.cut import Changelog
from kafka_eos_source.state.reading.decode import Choice


@dataclass(frozen=True)
class StateReadOptions:
    """Fields are named after the options.

    Attributes:
        state_dir: read the databases there; None = read the changelog.
        kafka: librdkafka properties; may hold passwords, so not printed.
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

    def changelog(self) -> Changelog:
        """The changelog that is meant."""
        assert self.application_id is not None
        assert self.store is not None
        group_id = self.group_id or self.application_id
        return Changelog(self.application_id, self.store, group_id, self.kafka)


def parse_state_read(options: Mapping[str, str]) -> StateReadOptions:
    """The options of a read of state. No broker is asked; no file is looked at.

    Raises:
        InvalidOptionError: an option is unknown, malformed, out of place or missing.
    """
    found, kafka = parse_table(options, STATE_READ, needs_brokers=False)
    group_id = take_group_id(kafka)
    state_dir = found["state.dir"] or options.get("path")
    if state_dir is None:
        if not has_brokers(kafka):
            raise InvalidOptionError(
                "neither 'state.dir' nor 'kafka.bootstrap.servers' is set: state is read from one of them.",
                fix="set state.dir, or load(path), for the databases on this machine; else the operator's "
                "kafka.* options, for the changelog.",
            )
        for name in ("application.id", "storeName"):
            if found[name] is None:
                raise InvalidOptionError(
                    f"option {name!r} is missing: the changelog is named by application.id and storeName.",
                    fix="set it as the query has it; `kafka-eos state ls` lists what there is.",
                )
    elif has_brokers(kafka):
        raise InvalidOptionError(
            f"both 'state.dir' ({state_dir!r}) and 'kafka.bootstrap.servers' are set.",
            fix="keep kafka.* for one batch of all shards, wherever they are; state.dir for what lies here. "
            "StateQuery takes both.",
        )
    if found["raw"] and (found["stateVarName"] or found["readRegisteredTimers"]):
        raise InvalidOptionError(
            "'raw' is set together with 'stateVarName' or 'readRegisteredTimers'.", fix="keep one of them."
        )
    if found["stateVarName"] and found["readRegisteredTimers"]:
        raise InvalidOptionError(
            "'stateVarName' and 'readRegisteredTimers' are both set: timers belong to no variable.",
            fix="keep one of them.",
        )
    return StateReadOptions(
        application_id=found["application.id"],
        store=found["storeName"],
        state_dir=state_dir,
        group_id=group_id,
        choice=Choice(found["stateVarName"], found["readRegisteredTimers"], found["flattenCollectionTypes"]),
        raw=found["raw"],
        batch_id=found["batchId"],
        timeout_ms=found["state.timeout.ms"],
        kafka=config.check_consumer(kafka),
    )

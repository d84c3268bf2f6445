"""What the sinks of a query hold prepared, what a start makes of it, and a person's word where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kafka_eos_source.commit import sink_session
from kafka_eos_source.commit.sink_fate import Fate, fate_by_token
from kafka_eos_source.errors import InvalidOptionError, OperatorError, SinkFailedError
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.operate import checkpoint as checkpoints
from kafka_eos_source.operate.cluster import KafkaView
from kafka_eos_source.operate.inspect import inspect
from kafka_eos_source.operate.target import Target, properties, target
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import Fatal, Retryable, SinkTxn, TwoPhaseSink

_NAMES = (
    "checkpointLocation",
    "application.id",
    "topic",
    "anchor.topic",
    "staging.location",
    "source.cluster",
)


@dataclass(frozen=True)
class Query:
    """A query as the file of its sink's options has it.

    Attributes:
        target: as the other commands take it.
        options: parsed.
        application_id: of its ids.
    """

    target: Target
    options: WriteOptions
    application_id: str


@dataclass(frozen=True)
class Held:
    """One id that a sink holds prepared.

    Attributes:
        sink: its name.
        txn: the id.
        becomes: ``commit`` or ``abort``, by a start; ``?``: there is no token, a person must say.
    """

    sink: str
    txn: SinkTxn
    becomes: str


def query(text: str) -> Query:
    """The query whose sink has these options: one ``name=value`` a line, as ``.option`` takes them.

    Raises:
        InvalidOptionError: one is unknown or malformed, or no sink outside Kafka is named.
    """
    given = {name.lower(): value for name, value in properties(text)}
    options = parse_write(given, streaming=True)
    if not options.sinks:
        raise InvalidOptionError("the options name no sinks outside Kafka.", fix="add 'sinks' and 'sink.…'.")
    named = {name: given.get(name.lower()) for name in _NAMES}
    kafka = {name: value for name, value in given.items() if name.startswith("kafka.")}
    found = target(named, kafka)
    checkpoint = checkpoints.read(found.checkpoint) if found.checkpoint is not None else None
    return Query(found, options, checkpoints.application_id(found.application_id, checkpoint))


def held(which: Query, kafka: KafkaView, deadline: Deadline) -> list[Held]:
    """What every sink holds.

    Raises:
        SinkFailedError: one of them does not tell.
    """
    found = []
    for name, sink in _open(which).items():
        try:
            txns = sink.recover(deadline)
        except Exception as error:
            raise SinkFailedError(
                f"sink {name!r} does not tell what it holds: {concealed(str(error))}"
            ) from error
        finally:
            sink.close()
        found += [Held(name, txn, _becomes(name, txn, kafka.token)) for txn in txns]
    return found


def end(
    which: Query, kafka: KafkaView, sink_name: str, txn: SinkTxn, deadline: Deadline, *, commit: bool
) -> None:
    """Commits or aborts what only a person can decide.

    Raises:
        OperatorError: a start decides it by the token, or the sink does not hold it.
        SinkFailedError: the sink cannot.
    """
    becomes = _becomes(sink_name, txn, kafka.token)
    if kafka.token is not None and becomes != "?":
        raise OperatorError(
            f"Kafka holds the token of batch {kafka.token.batch_id}, which decides {txn}: {becomes}.",
            fix="start the query; it does that first.",
        )
    sinks = _open(which)
    sink = sinks.get(sink_name)
    if sink is None or txn not in sink.recover(deadline):
        raise OperatorError(
            f"sink {sink_name!r} does not hold {txn}.", fix="see `kafka-eos sinks list` for what is held."
        )
    outcome = sink.commit(txn, deadline) if commit else sink.abort(txn, deadline)
    for each in sinks.values():
        each.close()
    if isinstance(outcome, Retryable | Fatal):
        raise SinkFailedError(f"sink {sink_name!r}, {txn}: {concealed(outcome.why)}", fix="try it again.")


def kafka_of(which: Query, deadline: Deadline) -> KafkaView:
    """What Kafka holds of the query.

    Raises:
        OperatorError: it does not answer.
    """
    from kafka_eos_source.operate.given import look_at

    with look_at(which.target) as look:
        found = inspect(which.target, look, deadline)
    if found.kafka is None:
        raise OperatorError(
            found.findings[-1].text, fix="see to the brokers, and the rights to look at the group."
        )
    return found.kafka


def _open(which: Query) -> Mapping[str, TwoPhaseSink]:
    return sink_session.open_all(which.options.sinks, which.application_id, which.options.checkpoint_location)


def _becomes(sink: str, txn: SinkTxn, token: Token | None) -> str:
    found = fate_by_token(sink, txn, token)
    return "?" if found is Fate.LEAVE else found.value

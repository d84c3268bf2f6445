"""Lists the prepared batches of a query's sinks, and commits or aborts those that no token decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kafka_eos_source.commit import sink_session
from kafka_eos_source.commit.sink_fate import Fate, fate
from kafka_eos_source.errors import InvalidOptionError, OperatorError, SinkFailedError
from kafka_eos_source.operate import checkpoint as checkpoints
from kafka_eos_source.operate.cluster import KafkaView
from kafka_eos_source.operate.inspect import inspect
from kafka_eos_source.operate.shared_options import open_reader
from kafka_eos_source.operate.target import Target, java_properties, target_from_options
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import Fatal, Retryable, SinkContext, SinkTxn, TwoPhaseSink

_TARGET_OPTIONS = (
    "checkpointLocation",
    "application.id",
    "topic",
    "anchor.topic",
    "staging.location",
    "source.cluster",
)


@dataclass(frozen=True)
class Query:
    """A query, from the file with its sink's options.

    Attributes:
        target: the query in the form that the other commands use.
        options: the parsed options.
        application_id: the query's application.id, which is part of each prepared id.
    """

    target: Target
    options: WriteOptions
    application_id: str


@dataclass(frozen=True)
class Prepared:
    """A batch that a sink holds prepared.

    Attributes:
        sink: name of the sink.
        txn: the sink transaction id.
        fate: what a start of the query does with it; `Fate.LEAVE` if only a person can decide.
    """

    sink: str
    txn: SinkTxn
    fate: Fate

    @property
    def needs_a_person(self) -> bool:
        """Whether no token decides what happens to the batch."""
        return self.fate is Fate.LEAVE


def parse_query(text: str) -> Query:
    """Reads a query from the options of its sink, one ``name=value`` per line.

    Raises:
        InvalidOptionError: if an option is unknown or malformed, or the options name no sink outside Kafka.
    """
    given = {name.lower(): value for name, value in java_properties(text)}
    options = parse_write(given, streaming=True)
    if not options.sinks:
        raise InvalidOptionError(
            "the options name no sinks outside Kafka.", fix="add the query's options 'sinks' and 'sink.…'."
        )
    target = target_from_options(
        {name: given.get(name.lower()) for name in _TARGET_OPTIONS},
        {name: value for name, value in given.items() if name.startswith("kafka.")},
    )
    checkpoint = checkpoints.read_checkpoint(target.checkpoint) if target.checkpoint is not None else None
    return Query(target, options, checkpoints.known_application_id(target.application_id, checkpoint))


def list_prepared(query: Query, kafka: KafkaView, deadline: Deadline) -> list[Prepared]:
    """Lists the prepared batches of every sink of the query.

    Raises:
        SinkFailedError: if a sink cannot list its prepared batches.
    """
    prepared = []
    with _opened(query, kafka) as sinks:
        for name, sink in sinks.items():
            try:
                txns = sink.recover(deadline)
            except Exception as error:
                raise SinkFailedError(
                    f"sink {name!r} cannot list its prepared batches: {sink.context.secrets.hide(str(error))}"
                ) from error
            prepared += [Prepared(name, txn, fate(sink.context, txn, kafka.token)) for txn in txns]
    return prepared


def resolve(
    query: Query,
    kafka: KafkaView,
    sink_name: str,
    txn: SinkTxn,
    deadline: Deadline,
    *,
    commit: bool,
    only_check: bool = False,
) -> None:
    """Commits or aborts a prepared batch whose fate no token decides.

    Args:
        query: the query that prepared it.
        kafka: what the query's cluster holds of it.
        sink_name: the sink that holds it.
        txn: its id.
        deadline: time limit of the calls to the sink.
        commit: whether to commit it.
        only_check: whether to change nothing.

    Raises:
        OperatorError: if another query prepared the batch, or this one on another cluster; if the token
            decides the fate of the batch; or if the sink does not hold it.
        SinkFailedError: if the sink cannot commit or abort it.
    """
    context = SinkContext(sink_name, query.application_id, kafka.cluster_id)
    if not context.owns(txn):
        own = context.txn(txn.sequence, txn.attempt)
        raise OperatorError(
            f"{txn} belongs to {_owner_text(txn)}, but the options are those of {_owner_text(own)}: cluster "
            f"{kafka.cluster_id!r}. Nothing was changed.",
            fix="leave it to the query that prepared it; if that query cannot resolve it, run the command "
            "with that query's options, on its cluster.",
        )
    decided = fate(context, txn, kafka.token)
    if kafka.token is not None and decided is not Fate.LEAVE:
        raise OperatorError(
            f"Kafka holds the token of batch {kafka.token.batch_id}, by which the next start of the query "
            f"will {decided.value} {txn}.",
            fix="start the query.",
        )
    with _opened(query, kafka) as sinks:
        sink = sinks.get(sink_name)
        if sink is None or txn not in sink.recover(deadline):
            raise OperatorError(
                f"sink {sink_name!r} does not hold {txn}.",
                fix="run `kafka-eos sinks list`, which shows the ids that each sink holds.",
            )
        if only_check:
            return
        outcome = sink.commit(txn, deadline) if commit else sink.abort(txn, deadline)
    if isinstance(outcome, Retryable | Fatal):
        verb = "commit" if commit else "abort"
        raise SinkFailedError(
            f"sink {sink_name!r} cannot {verb} {txn}: {sink.context.secrets.hide(outcome.why)}",
            fix="run the command again.",
        )


def read_kafka(query: Query, deadline: Deadline) -> KafkaView:
    """Reads what Kafka holds of the query.

    Raises:
        OperatorError: if Kafka does not answer.
    """
    with open_reader(query.target) as reader:
        found = inspect(query.target, reader, deadline)
    if found.kafka is None:
        raise OperatorError(
            found.findings[-1].text, fix="check the brokers, and the right to describe the consumer group."
        )
    return found.kafka


def _owner_text(txn: SinkTxn) -> str:
    return (
        f"sink {txn.sink!r} of application.id={txn.application_id!r} on the Kafka cluster with the hash "
        f"{txn.cluster}"
    )


@contextmanager
def _opened(query: Query, kafka: KafkaView) -> Iterator[Mapping[str, TwoPhaseSink]]:
    """Opens the sinks of the query, and closes all of them at the end, also after an error."""
    with ExitStack() as stack:
        sinks = sink_session.open_all(
            query.options.sinks, query.application_id, kafka.cluster_id, query.options.checkpoint_location
        )
        for sink in sinks.values():
            stack.callback(sink.close)
        yield sinks

"""Says whose batches Kafka holds, where only a person knows: another query's, or a batch without a token.

What is written is the token of an *empty* batch, by the commit of any batch, which fences, reads the token
after that, and decides. For a checkpoint that goes on with another one's work it is the batch before its
first, under the same offsets; for a batch whose token is lost, that batch or the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import pyarrow as pa

from kafka_eos_source.commit.facts import Batch
from kafka_eos_source.commit.interfaces import ProducerSession, UndecidedSinks
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.request import CommitRequest
from kafka_eos_source.commit.session import KafkaClients, digests
from kafka_eos_source.commit.sources import SourceRange, ranges
from kafka_eos_source.commit.verdict import batch_verdict
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError, TokenMissingError
from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.operate.cluster import KafkaView
from kafka_eos_source.operate.inspect import Inspection
from kafka_eos_source.operate.target import Target
from kafka_eos_source.operate.verdict import Finding, short_name
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.runtime.deadline import Deadline

#: In the token, in place of Spark's run id.
RUN = "kafka-eos adopt"
_LAST_RESORT = "__consumer_offsets"


class Said(Enum):
    """What a person found out about a batch without a token."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"


@dataclass(frozen=True)
class Adoption:
    """What can be done, and what a person has to do.

    Attributes:
        text: what is the matter, in sentences.
        request: the empty batch to be committed; None = there is nothing that can be written.
        options: of the query, to be set by a person.
        refused: why nothing can be written although something is wrong.
    """

    text: Sequence[str]
    request: CommitRequest | None = None
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused: Finding | None = None


def plan(inspection: Inspection, target: Target, said: Said | None) -> Adoption:
    """What is the matter with a query whose token is not its own, or missing. Nothing is written.

    Args:
        inspection: of the query, with Kafka.
        target: the query.
        said: what a person found out; None = nothing yet.
    """
    kafka, checkpoint = inspection.kafka, inspection.checkpoint
    if kafka is None:
        return Adoption((), refused=inspection.findings[-1])
    other = [each for each in inspection.findings if each.condition == short_name(InvalidOptionError)]
    if other:
        return Adoption((), refused=other[0])
    token = kafka.token
    if token is None:
        return _without_token(inspection, target, kafka, said)
    stands = (
        f"Kafka holds batch {token.batch_id} of query {token.query_id} (run {token.run_id or 'unknown'}) "
        f"under application.id={inspection.application_id!r}.",
    )
    if said is not None:
        return Adoption(
            stands,
            refused=Finding(
                "Kafka knows which batch it holds: nobody has to say so.",
                fix="leave out --committed and --not-committed.",
            ),
        )
    if checkpoint is None or checkpoint.planned is None:
        return Adoption(
            (*stands, "The new checkpoint has planned no batch: start its query with these options."),
            options=_options(inspection, target.checkpoint, adopts=True),
        )
    if checkpoint.query_id == token.query_id:
        return Adoption((*stands, "That is this checkpoint's own query.", inspection.verdict.text))
    return _hand_over(inspection, target, kafka, checkpoint, stands)


def perform(
    adoption: Adoption, kafka: Mapping[str, str], deadline: Deadline, *, sinks_finished: bool = False
) -> Result:
    """Writes the token; whoever runs under the ``application.id`` now is fenced.

    Args:
        adoption: with a request.
        kafka: librdkafka properties of a producer.
        deadline: for all of it.
        sinks_finished: whether a person said that the sinks outside Kafka which the token names have
            committed; otherwise a token that names sinks is not replaced.

    Raises:
        KafkaEosError: as a commit; `ForeignQueryError` and the like if Kafka holds something else by now.
    """
    assert adoption.request is not None
    session = ProducerSession()
    sinks = UndecidedSinks(finished=sinks_finished)
    try:
        return Commit(adoption.request, NoRows(), KafkaClients(kafka), session, deadline, sinks).run()
    finally:
        session.drop()


def _hand_over(
    inspection: Inspection, target: Target, kafka: KafkaView, checkpoint: Checkpoint, stands: Sequence[str]
) -> Adoption:
    """The batch before the checkpoint's next, empty, under the offsets where the other query stopped."""
    batch = replace(
        checkpoint.next(inspection.application_id, kafka.own),
        run_id=RUN,
        batch_id=checkpoint.next_batch - 1,
        end=digests(checkpoint.before if checkpoint.replays else checkpoint.logged, checkpoint.query_id),
        ends=None,
        comparable=False,
    )
    try:
        batch_verdict(batch, kafka.held, kafka.anchor, foreign_query="adopt")
    except KafkaEosError as error:
        return Adoption(stands, options=_options(inspection, None, adopts=True), refused=Finding.of(error))
    starts = kafka.own.starts or {}
    if kafka.own.starts is None or set(starts) - set(kafka.committed):
        new = ", ".join(str(tp) for tp in sorted(set(kafka.own.ends) - set(kafka.committed))) or "its sources"
        return Adoption(
            stands,
            options=_options(inspection, None, adopts=True),
            refused=Finding(
                f"where this checkpoint starts cannot be compared with where the other query stopped: {new}.",
                fix="if that is meant, let the query itself adopt, with onForeignQuery=adopt.",
            ),
        )
    text = [
        *stands,
        f"The new checkpoint's batch {checkpoint.next_batch} starts where it stopped: its query "
        f"{checkpoint.query_id} can have the application.id.",
    ]
    if not starts:
        text.append("It reads nothing from this cluster, so that nothing could be compared.")
    return Adoption(
        text,
        request=CommitRequest(
            batch=batch,
            group_id=inspection.group_id,
            anchor=_anchor(target.anchor_topic, kafka),
            sources=(SourceRange(starts, starts, kafka.cluster_id),) if starts else (),
            foreign_query="adopt",
        ),
        options=_options(inspection, None, adopts=False),
    )


def _without_token(inspection: Inspection, target: Target, kafka: KafkaView, said: Said | None) -> Adoption:
    checkpoint = inspection.checkpoint
    if checkpoint is None or inspection.verdict.condition != short_name(TokenMissingError):
        return Adoption(("Kafka holds no token, and none is missed.", inspection.verdict.text))
    batch_id = checkpoint.next_batch
    text = [f"Kafka holds no token of application.id={inspection.application_id!r}."]
    if not checkpoint.replays:
        text.append(f"Batch {batch_id} is not planned yet, so it cannot be in the output.")
        if said is Said.COMMITTED:
            return Adoption(
                text, refused=Finding("what is not planned is not committed.", fix="leave it out.")
            )
        said = Said.NOT_COMMITTED
    elif said is None:
        text.append(
            f"Look whether batch {batch_id} is in the output (docs/runbooks.md, TOKEN_MISSING), then say "
            "--committed or --not-committed."
        )
        return Adoption(text)
    marked = batch_id if said is Said.COMMITTED else batch_id - 1
    logged = offset_log.read(checkpoint.location, marked)
    if logged is None:
        return Adoption(
            text,
            refused=Finding(
                f"Spark's offset log has no batch {marked} any more.",
                fix="restart once with .option('onMissingToken', "
                f"'assume_{'committed' if said is Said.COMMITTED else 'not_committed'}').",
            ),
        )
    before = offset_log.read(checkpoint.location, marked - 1)
    text.append(f"Batch {batch_id} is {said.value}: Kafka is told that it holds batch {marked}.")
    return Adoption(
        text,
        request=CommitRequest(
            batch=Batch(
                application_id=inspection.application_id,
                query_id=checkpoint.query_id,
                run_id=RUN,
                batch_id=marked,
                start=digests(before, checkpoint.query_id),
                end=digests(logged, checkpoint.query_id),
                promised=True,
            ),
            group_id=inspection.group_id,
            anchor=_anchor(target.anchor_topic, kafka),
            sources=tuple(ranges(logged, before)),
            missing_token="assume_committed",
            source_cluster=target.source_cluster,
            token_topic=None if checkpoint.first_batch is None else checkpoint.first_batch.token_topic,
        ),
    )


def _anchor(stated: str | None, kafka: KafkaView) -> TopicPartition:
    """As the sink chooses it, as far as that is known: any partition carries a token as well as another."""
    if stated is not None:
        return TopicPartition(stated, 0)
    read = {*kafka.own.ends, *(kafka.own.starts or {})}
    others = sorted(tp for tp in kafka.offsets if tp not in read and tp.topic in kafka.topics)
    return others[0] if others else TopicPartition(_LAST_RESORT, 0)


def _options(inspection: Inspection, location: str | None, *, adopts: bool) -> dict[str, dict[str, str]]:
    """What the query needs, on its source and on its sink."""
    names = {"application.id": inspection.application_id}
    if inspection.group_id != inspection.application_id:
        names["kafka.group.id"] = inspection.group_id
    sink = dict(names)
    if location is not None:
        sink["checkpointLocation"] = location
    if adopts:
        sink["onForeignQuery"] = "adopt"
    return {"source": {"startingOffsets": "group", **names}, "sink": sink}


class NoRows:
    """No rows."""

    rows = 0
    topics: Mapping[str, int] = {}
    shards: Sequence[ShardReport] = ()

    def batches(self) -> Iterable[pa.RecordBatch]:
        return ()

    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]:
        return ()

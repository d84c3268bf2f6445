"""Decides what a restart would do, with the decision function of the commit itself. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kafka_eos_source.commit.identity_file import IdentityFile
from kafka_eos_source.commit.verdict import Verdict, batch_verdict
from kafka_eos_source.errors import DataLossError, KafkaEosError
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.operate.cluster import KafkaView
from kafka_eos_source.sinks.targets import location


@dataclass(frozen=True)
class Finding:
    """One fact that a person should know.

    Attributes:
        text: the fact.
        condition: the error condition that a restart would end with, such as ``TOKEN_MISSING``; "" = no
            error.
        fix: what to do about it.
    """

    text: str
    condition: str = ""
    fix: str = ""

    @classmethod
    def of(cls, error: KafkaEosError) -> Finding:
        """Returns the finding that describes an error."""
        return cls(error.message, short_name(type(error)), error.fix)


def short_name(error: type[KafkaEosError]) -> str:
    """Returns the condition without its prefix, which is its heading in docs/runbooks.md."""
    return error.condition.partition(".")[2] or error.condition


def findings(application_id: str, checkpoint: Checkpoint | None, kafka: KafkaView | None) -> list[Finding]:
    """Returns what a restart would do, followed by what else a person should know.

    Args:
        application_id: the transactional id.
        checkpoint: None = no checkpoint was named, or the location contains none.
        kafka: None = Kafka was not contacted, or did not answer.
    """
    found = []
    if kafka is None:
        found.append(_without_kafka(checkpoint))
    elif checkpoint is None:
        found.append(_without_checkpoint(application_id, kafka))
    else:
        found.append(_restart(application_id, checkpoint, kafka))
    if checkpoint is not None:
        found += _identity_file(application_id, checkpoint)
    if kafka is not None:
        found += _transactions(application_id, kafka)
        if kafka.losses:
            found.append(
                Finding(
                    "; ".join(f"{each.kind}: {each.text}" for each in kafka.losses) + ".",
                    short_name(DataLossError),
                    "once you know which records are lost, restart with failOnDataLoss=false.",
                )
            )
    return found


def _restart(application_id: str, checkpoint: Checkpoint, kafka: KafkaView) -> Finding:
    if kafka.unrecovered is not None:
        return Finding.of(kafka.unrecovered)
    target = "" if kafka.token is None else kafka.token.target
    batch = checkpoint.describe_next_batch(application_id, kafka.own, target)
    token_topic = None if checkpoint.identity is None else checkpoint.identity.token_topic
    try:
        verdict = batch_verdict(batch, kafka.held, kafka.anchor, token_topic=token_topic)
    except KafkaEosError as error:
        return Finding.of(error)
    if verdict is Verdict.SKIP:
        return Finding(
            f"Kafka holds batch {batch.batch_id}, Spark's commit log does not: a restart skips it."
        )
    if checkpoint.replays:
        return Finding(f"batch {batch.batch_id} is planned but not in Kafka: a restart writes it once.")
    if checkpoint.planned is None:
        return Finding("the query has not planned a batch yet: a restart begins with batch 0.")
    return Finding(
        f"batch {checkpoint.planned} is complete in Spark and in Kafka: a restart continues with batch "
        f"{batch.batch_id}."
    )


def _without_kafka(checkpoint: Checkpoint | None) -> Finding:
    if checkpoint is None:
        return Finding("nothing is known: there is no checkpoint and no answer from Kafka.")
    return Finding(
        f"without an answer from Kafka, it is unknown whether Kafka holds batch {checkpoint.next_batch}."
        if checkpoint.replays
        else "there is no answer from Kafka; by Spark's logs, a restart continues with batch "
        f"{checkpoint.next_batch}."
    )


def _without_checkpoint(application_id: str, kafka: KafkaView) -> Finding:
    if kafka.token is None:
        return Finding(f"Kafka holds no token of application.id={application_id!r}.")
    return Finding(
        f"Kafka holds batch {kafka.token.batch_id} of query {kafka.token.query_id}. A query with a new "
        "checkpoint fails with FOREIGN_QUERY unless it sets onForeignQuery=adopt."
    )


def _identity_file(application_id: str, checkpoint: Checkpoint) -> list[Finding]:
    first = checkpoint.identity
    if first is None:
        if checkpoint.planned is None:
            return []
        return [
            Finding("kafka-eos has not committed a batch of this checkpoint yet: a restart writes the first.")
        ]
    if first.query_id != checkpoint.query_id:
        return [
            Finding(
                f"the checkpoint's identity file belongs to query {first.query_id}: somebody copied the "
                "folder from that query's checkpoint."
            )
        ]
    wanted = replace(first, application_id=application_id, location=location(checkpoint.location))
    try:
        IdentityFile(checkpoint.location, wanted).check_guarantee()
    except KafkaEosError as error:
        return [Finding.of(error)]
    return []


def _transactions(application_id: str, kafka: KafkaView) -> list[Finding]:
    found = []
    if kafka.pending:
        found.append(
            Finding(
                "an unfinished transaction is about to change the group's offsets: a driver is committing, "
                "or died while committing. The offsets shown here were committed before this transaction.",
                fix="if no driver runs, start the query or run "
                f"kafka-eos fence --application-id {application_id} --yes",
            )
        )
    open_since = [
        f"{each.tp} from offset {each.transaction_since}"
        for each in kafka.partitions
        if each.transaction_since is not None
    ]
    if open_since:
        found.append(
            Finding(
                f"a transaction is open in {', '.join(open_since)}: read_committed consumers wait there.",
                fix="if it is a transaction of this query, a restart of the query ends it. For others, see "
                "'Hanging transactions' in docs/runbooks.md (kafka-transactions.sh find-hanging).",
            )
        )
    return found

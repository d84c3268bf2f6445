"""What a restart would do, by the product's own decision: a pure function of what was found."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_eos_source.commit.verdict import Verdict, batch_verdict
from kafka_eos_source.errors import DataLossError, InvalidOptionError, KafkaEosError
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.operate.cluster import KafkaView


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        text: what.
        condition: the error that a restart would end with, as in ``TOKEN_MISSING``; "" = none.
        fix: what to do about it.
    """

    text: str
    condition: str = ""
    fix: str = ""

    @classmethod
    def of(cls, error: KafkaEosError) -> Finding:
        return cls(error.message, short_name(type(error)), error.fix)


def short_name(error: type[KafkaEosError]) -> str:
    """The condition without its prefix: the heading of its page in docs/runbooks.md."""
    return error.condition.partition(".")[2] or error.condition


def findings(application_id: str, checkpoint: Checkpoint | None, kafka: KafkaView | None) -> list[Finding]:
    """The verdict first, then what else a restart would meet.

    Args:
        application_id: the transactional id.
        checkpoint: None = none was named, or there is none.
        kafka: None = no broker was asked, or none answered.
    """
    found = []
    if kafka is None:
        found.append(_without_kafka(checkpoint))
    elif checkpoint is None:
        found.append(_without_checkpoint(application_id, kafka))
    else:
        found.append(_restart(application_id, checkpoint, kafka))
    if checkpoint is not None:
        found += _first_batch_file(application_id, checkpoint)
    if kafka is not None:
        found += _transactions(application_id, kafka)
        if kafka.losses:
            found.append(
                Finding(
                    "; ".join(f"{each.kind}: {each.text}" for each in kafka.losses) + ".",
                    short_name(DataLossError),
                    "restart with failOnDataLoss=false once it is clear what is lost.",
                )
            )
    return found


def _restart(application_id: str, checkpoint: Checkpoint, kafka: KafkaView) -> Finding:
    if kafka.unrecovered is not None:
        return Finding.of(kafka.unrecovered)
    batch = checkpoint.next(application_id, kafka.own)
    token_topic = None if checkpoint.first_batch is None else checkpoint.first_batch.token_topic
    try:
        verdict = batch_verdict(batch, kafka.held, kafka.anchor, token_topic=token_topic)
    except KafkaEosError as error:
        return Finding.of(error)
    if verdict is Verdict.SKIP:
        return Finding(f"batch {batch.batch_id} is in Kafka and not in Spark's log: a restart skips it.")
    if checkpoint.replays:
        return Finding(f"batch {batch.batch_id} is planned and not in Kafka: a restart writes it, once.")
    if checkpoint.planned is None:
        return Finding("the query has not planned a batch yet: it begins with batch 0.")
    return Finding(
        f"batch {checkpoint.planned} is done on both sides: Spark's next batch {batch.batch_id} will be "
        "written."
    )


def _without_kafka(checkpoint: Checkpoint | None) -> Finding:
    if checkpoint is None:
        return Finding("no checkpoint, and no broker was asked or answered: nothing is known.")
    return Finding(
        f"no broker was asked or answered: whether batch {checkpoint.next_batch} is in Kafka is not known."
        if checkpoint.replays
        else f"no broker was asked or answered; by Spark's logs batch {checkpoint.next_batch} comes next."
    )


def _without_checkpoint(application_id: str, kafka: KafkaView) -> Finding:
    if kafka.token is None:
        return Finding(f"Kafka holds no token of application.id={application_id!r}.")
    return Finding(
        f"Kafka holds batch {kafka.token.batch_id} of query {kafka.token.query_id}: a query with a new "
        "checkpoint would be refused (FOREIGN_QUERY), unless it adopts."
    )


def _first_batch_file(application_id: str, checkpoint: Checkpoint) -> list[Finding]:
    first = checkpoint.first_batch
    if first is None:
        if checkpoint.planned is None:
            return []
        return [Finding("the checkpoint was never committed through kafka-eos: its first batch is written.")]
    if first.query_id != checkpoint.query_id:
        return [
            Finding(
                f"the checkpoint's first-batch file is that of query {first.query_id}: the folder was copied "
                "from there."
            )
        ]
    if first.application_id != application_id:
        return [
            Finding(
                f"the checkpoint was committed with application.id={first.application_id!r}, "
                f"not {application_id!r}.",
                short_name(InvalidOptionError),
                f"set .option('application.id', {first.application_id!r}), or use a new checkpoint.",
            )
        ]
    return []


def _transactions(application_id: str, kafka: KafkaView) -> list[Finding]:
    found = []
    if kafka.pending:
        found.append(
            Finding(
                "an unfinished transaction holds the group's offsets: a driver is in the midst of a commit, "
                "or died there. What is said here of Kafka is what was committed before it.",
                fix="if no driver runs, start the query, or: "
                f"kafka-eos fence --application-id {application_id}",
            )
        )
    since = [
        f"{each.tp} from offset {each.transaction_since}"
        for each in kafka.partitions
        if each.transaction_since is not None
    ]
    if since:
        found.append(
            Finding(
                f"a transaction is open in {', '.join(since)}: read_committed consumers wait there.",
                fix="an open one of this query ends with it; for others see 'Hanging transactions' in "
                "docs/runbooks.md (kafka-transactions.sh find-hanging).",
            )
        )
    return found

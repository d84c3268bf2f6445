"""One query in one view: its checkpoint, what Kafka holds of it, what is staged, what a restart would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kafka_eos_source.commit.recovered import TokenRecords, recover
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.token_topic_reader import TopicRecords
from kafka_eos_source.operate import checkpoint as checkpoints
from kafka_eos_source.operate import cluster, staging, verdict
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.operate.cluster import KafkaView, Look
from kafka_eos_source.operate.staging import Staged
from kafka_eos_source.operate.target import Target
from kafka_eos_source.operate.verdict import Finding
from kafka_eos_source.runtime.deadline import Deadline

#: Opens the token topic of a name before a deadline.
OpenTokenTopic = Callable[[str, Deadline], TokenRecords]


@dataclass(frozen=True)
class Inspection:
    """Everything that was found.

    Attributes:
        application_id: the transactional id.
        group_id: the consumer group.
        checkpoint: None = none was named, or there is none.
        kafka: None = not asked, or no answer.
        staged: what lies in the staging folder.
        findings: the verdict first.
    """

    application_id: str
    group_id: str
    checkpoint: Checkpoint | None
    kafka: KafkaView | None
    staged: Sequence[Staged]
    findings: Sequence[Finding]

    @property
    def verdict(self) -> Finding:
        return self.findings[0]

    @property
    def needs_a_person(self) -> bool:
        """Whether a restart would fail, or Kafka did not answer."""
        return any(each.condition for each in self.findings)


def inspect(
    target: Target, look: Look | None, deadline: Deadline, *, token_topic: OpenTokenTopic | None = None
) -> Inspection:
    """Reports the state of a query, and what a restart would do. Changes nothing.

    Args:
        target: the query.
        look: reads its cluster; None = only the checkpoint is read.
        deadline: for the brokers. If they do not answer, or refuse, that is a finding.
        token_topic: opens the query's token topic; None = on the target's cluster.

    Raises:
        InvalidOptionError: neither an ``application.id`` nor a checkpoint is known.
        OperatorError: the checkpoint is damaged.
    """
    checkpoint = checkpoints.read(target.checkpoint) if target.checkpoint is not None else None
    application_id = checkpoints.application_id(target.application_id, checkpoint)
    group_id = target.group_id or application_id
    kafka: KafkaView | None = None
    silent: list[Finding] = []
    if look is not None:
        try:
            kafka = cluster.view(
                look,
                deadline,
                group_id,
                checkpoint,
                application_id=application_id,
                anchor_topic=target.anchor_topic,
                source_cluster=target.source_cluster,
            )
            kafka = _recovered(kafka, group_id, checkpoint, token_topic or _opener(target), deadline)
        except KafkaEosError as error:
            silent = [Finding.of(error)]
    location = target.staging_location
    return Inspection(
        application_id=application_id,
        group_id=group_id,
        checkpoint=checkpoint,
        kafka=kafka,
        staged=staging.entries(location) if location is not None else (),
        findings=[*verdict.findings(application_id, checkpoint, kafka), *silent],
    )


def _opener(target: Target) -> OpenTokenTopic:
    connection = admin_config(target.kafka or {})
    return lambda name, deadline: TopicRecords.checked(connection, name, deadline)


def _recovered(
    kafka: KafkaView,
    group_id: str,
    checkpoint: Checkpoint | None,
    token_topic: OpenTokenTopic,
    deadline: Deadline,
) -> KafkaView:
    """Completes what the group holds from the token topic that the checkpoint names, as a restart does."""
    first_batch = None if checkpoint is None else checkpoint.first_batch
    if first_batch is None or first_batch.token_topic is None:
        return kafka
    try:
        records = token_topic(first_batch.token_topic, deadline)
        return replace(kafka, held=recover(kafka.held, group_id, records, deadline))
    except KafkaEosError as error:
        return replace(kafka, unrecovered=error)

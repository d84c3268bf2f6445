"""Collects the state of one query: checkpoint, Kafka, staged rows, and what a restart would do."""

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
from kafka_eos_source.operate.cluster import KafkaView, MetadataReader
from kafka_eos_source.operate.staging import StagedEntry
from kafka_eos_source.operate.target import Target
from kafka_eos_source.operate.verdict import Finding
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.deadline import Deadline

#: Opens the token topic with this name before a deadline.
OpenTokenTopic = Callable[[str, Deadline], TokenRecords]


@dataclass(frozen=True)
class Inspection:
    """The state of one query.

    Attributes:
        application_id: the transactional id.
        group_id: the consumer group.
        checkpoint: None = no checkpoint was named, or the location contains none.
        kafka: None = Kafka was not contacted, or did not answer.
        staged: entries of the staging folder.
        findings: what a person should know; the first one says what a restart would do.
    """

    application_id: str
    group_id: str
    checkpoint: Checkpoint | None
    kafka: KafkaView | None
    staged: Sequence[StagedEntry]
    findings: Sequence[Finding]

    @property
    def verdict(self) -> Finding:
        """What a restart would do."""
        return self.findings[0]

    @property
    def needs_a_person(self) -> bool:
        """Whether a restart would fail, or Kafka did not answer."""
        return any(each.condition for each in self.findings)


def inspect(
    target: Target,
    reader: MetadataReader | None,
    deadline: Deadline,
    *,
    token_topic: OpenTokenTopic | None = None,
) -> Inspection:
    """Reads the state of a query and decides what a restart would do. Changes nothing.

    Args:
        target: the query.
        reader: reads the cluster; None = read only the checkpoint.
        deadline: limits the wait for the brokers. If they do not answer or refuse, the result has a finding.
        token_topic: opens the query's token topic; None = open it on the target's cluster.

    Raises:
        InvalidOptionError: if neither an ``application.id`` nor a checkpoint is known.
        OperatorError: if the checkpoint is damaged.
    """
    checkpoint = checkpoints.read_checkpoint(target.checkpoint) if target.checkpoint is not None else None
    application_id = checkpoints.known_application_id(target.application_id, checkpoint)
    group_id = group_of(application_id, target.group_id)
    kafka: KafkaView | None = None
    kafka_failure: list[Finding] = []
    if reader is not None:
        try:
            kafka = cluster.kafka_view(
                reader,
                deadline,
                group_id,
                checkpoint,
                application_id=application_id,
                anchor_topic=target.anchor_topic,
                source_cluster=target.source_cluster,
            )
            kafka = _recovered(kafka, group_id, checkpoint, token_topic or _opener(target), deadline)
        except KafkaEosError as error:
            kafka_failure = [Finding.of(error)]
    location = target.staging_location
    return Inspection(
        application_id=application_id,
        group_id=group_id,
        checkpoint=checkpoint,
        kafka=kafka,
        staged=staging.staged_entries(location) if location is not None else (),
        findings=[*verdict.findings(application_id, checkpoint, kafka), *kafka_failure],
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
    """Completes the group's token from the token topic that the checkpoint names, as a restart does."""
    identity = None if checkpoint is None else checkpoint.identity
    if identity is None or identity.token_topic is None:
        return kafka
    try:
        records = token_topic(identity.token_topic, deadline)
        return replace(kafka, held=recover(kafka.held, group_id, records, deadline))
    except KafkaEosError as error:
        return replace(kafka, unrecovered=error)

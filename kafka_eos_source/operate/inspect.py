"""One query in one view: its checkpoint, what Kafka holds of it, what is staged, what a restart would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.operate import checkpoint as checkpoints
from kafka_eos_source.operate import cluster, staging, verdict
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.operate.cluster import KafkaView, Look
from kafka_eos_source.operate.staging import Staged
from kafka_eos_source.operate.target import Target
from kafka_eos_source.operate.verdict import Finding
from kafka_eos_source.runtime.deadline import Deadline


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


def inspect(target: Target, look: Look | None, deadline: Deadline) -> Inspection:
    """Looks at a query; changes nothing.

    Args:
        target: which.
        look: its cluster; None = only the checkpoint is looked at.
        deadline: for the brokers. That they do not answer, or refuse, is a finding.

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

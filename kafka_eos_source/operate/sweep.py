"""Deletes staged rows that are no longer needed: batches that Kafka holds, and old orphans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.operate import staging
from kafka_eos_source.operate.inspect import Inspection
from kafka_eos_source.operate.staging import SweepDecision
from kafka_eos_source.runtime.file_systems import file_system


@dataclass(frozen=True)
class Sweep:
    """What can be deleted from one staging folder.

    Attributes:
        location: the staging folder.
        decisions: a decision for each entry.
        token_batch: newest batch that Kafka holds; None = not known, so all micro-batches are kept.
        why_unknown: why ``token_batch`` is not known; "" if it is known.
    """

    location: str
    decisions: Sequence[SweepDecision]
    token_batch: int | None
    why_unknown: str = ""

    @property
    def deletable(self) -> list[SweepDecision]:
        """The entries that can be deleted."""
        return [each for each in self.decisions if each.delete]

    @property
    def size_bytes(self) -> int:
        """Size of all entries that can be deleted."""
        return sum(each.entry.size_bytes for each in self.deletable)


def plan_sweep(
    location: str | None, inspection: Inspection | None, older_than_seconds: float, now_seconds: float
) -> Sweep:
    """Decides what can be deleted. Deletes nothing.

    Args:
        location: the staging folder.
        inspection: state of the query that stages there; None = no query was named, so only orphans are
            deleted.
        older_than_seconds: age from which an orphan is deleted.
        now_seconds: the current time, in seconds since 1970.

    Raises:
        InvalidOptionError: if no folder is known.
    """
    if location is None:
        raise InvalidOptionError(
            "the staging folder is not known.",
            fix="add --checkpoint, or --staging if the sink sets staging.location.",
        )
    token_batch, why_unknown = _token_batch(inspection)
    decisions = staging.sweep_decisions(
        staging.staged_entries(location),
        token_batch=token_batch,
        older_than_seconds=older_than_seconds,
        now_seconds=now_seconds,
    )
    return Sweep(location, decisions, token_batch, why_unknown)


def _token_batch(inspection: Inspection | None) -> tuple[int | None, str]:
    if inspection is None:
        return None, "neither --checkpoint nor --application-id is set"
    if inspection.kafka is None:
        return None, "no brokers are set, or Kafka did not answer"
    token, checkpoint = inspection.kafka.token, inspection.checkpoint
    if token is None:
        return None, f"Kafka holds no token of application.id={inspection.application_id!r}"
    if checkpoint is not None and checkpoint.query_id != token.query_id:
        return None, f"the token in Kafka belongs to another query ({token.query_id})"
    return token.batch_id, ""


def perform_sweep(sweep: Sweep) -> dict[str, str]:
    """Deletes what can be deleted.

    Returns:
        The reason for each entry that could not be deleted, by name. Nothing reads these entries again.
    """
    fs, path = file_system(sweep.location)
    failures = {}
    for each in sweep.deletable:
        entry = f"{path}/{each.entry.name}"
        try:
            if each.entry.is_folder:
                fs.delete_dir(entry)
            else:
                fs.delete_file(entry)
        except FileNotFoundError:
            continue  # a commit has deleted it in the meantime
        except OSError as error:
            failures[each.entry.name] = str(error)
    return failures

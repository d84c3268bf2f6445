"""Deletes what a staging folder need not hold any more: batches that are in Kafka, and orphans by age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.operate import staging
from kafka_eos_source.operate.inspect import Inspection
from kafka_eos_source.operate.staging import Judged
from kafka_eos_source.runtime.file_systems import file_system


@dataclass(frozen=True)
class Sweep:
    """What may go from one folder.

    Attributes:
        location: the staging folder.
        judged: everything in it.
        token_batch: newest batch in Kafka; None = not known, so that no micro-batch may go.
        why_unknown: why it is not known; "" = it is.
    """

    location: str
    judged: Sequence[Judged]
    token_batch: int | None
    why_unknown: str = ""

    @property
    def going(self) -> list[Judged]:
        return [each for each in self.judged if each.goes]

    @property
    def size_bytes(self) -> int:
        """Of all that may go."""
        return sum(each.staged.size_bytes for each in self.going)


def plan(
    location: str | None, inspection: Inspection | None, older_than_seconds: float, now_seconds: float
) -> Sweep:
    """What may go. Nothing is deleted.

    Args:
        location: the staging folder.
        inspection: of the query that stages there; None = it was not named, so only orphans go.
        older_than_seconds: age from which an orphan goes.
        now_seconds: since 1970.

    Raises:
        InvalidOptionError: there is no folder to sweep.
    """
    if location is None:
        raise InvalidOptionError(
            "no folder to sweep was named.", fix="give --checkpoint, or --staging for a folder of its own."
        )
    token_batch, why_unknown = _token_batch(inspection)
    judged = staging.judge(
        staging.entries(location),
        token_batch=token_batch,
        older_than_seconds=older_than_seconds,
        now_seconds=now_seconds,
    )
    return Sweep(location, judged, token_batch, why_unknown)


def _token_batch(inspection: Inspection | None) -> tuple[int | None, str]:
    if inspection is None:
        return None, "no query was named"
    if inspection.kafka is None:
        return None, "Kafka was not asked, or did not answer"
    token, checkpoint = inspection.kafka.token, inspection.checkpoint
    if token is None:
        return None, f"Kafka holds no token of application.id={inspection.application_id!r}"
    if checkpoint is not None and checkpoint.query_id != token.query_id:
        return None, f"the token in Kafka is of another query ({token.query_id})"
    return token.batch_id, ""


def perform(sweep: Sweep) -> list[str]:
    """Deletes what may go.

    Returns:
        What could not be deleted, and why; nothing ever reads it again.
    """
    fs, path = file_system(sweep.location)
    left = []
    for each in sweep.going:
        entry = f"{path}/{each.staged.name}"
        try:
            if each.staged.is_folder:
                fs.delete_dir(entry)
            else:
                fs.delete_file(entry)
        except FileNotFoundError:
            continue  # a commit has tidied up meanwhile
        except OSError as error:
            left.append(f"{each.staged.name}: {error}")
    return left

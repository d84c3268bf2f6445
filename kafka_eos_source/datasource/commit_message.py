"""The commit message that each writing task sends to the driver, and what the driver takes from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from kafka_eos_source.errors import RestartQueryError
from kafka_eos_source.model import StagedPart, StagedRead, WrittenPart
from kafka_eos_source.protocol.offset_log import PlannedBatch

if TYPE_CHECKING:
    from kafka_eos_source.stage.fanout import SinkPart


@dataclass
class CommitMessage(WriterCommitMessage):
    """What one task attempt staged or wrote, for the driver that commits it.

    Attributes:
        part: the staged rows for Kafka; None if the task wrote them itself.
        dead_letters: the staged dead letters; None if there are none.
        sinks: the staged rows for sinks outside Kafka.
        planned: `StagedSink.planned` of the writer that the task received.
        written: what the task wrote itself; None if it staged its rows.
        record_bytes: size of the largest record that the topics accept; None if the task does not know it.
        read: the offsets that the staged rows cover, if the task that read them staged them.
        reports: messages of such tasks, which this task received as rows of the frame.
    """

    part: StagedPart | None
    dead_letters: StagedPart | None = None
    sinks: tuple[SinkPart, ...] = ()
    planned: PlannedBatch | None = None
    written: WrittenPart | None = None
    record_bytes: int | None = None
    read: StagedRead | None = None
    reports: tuple[CommitMessage, ...] = ()


def of_every_task(messages: Iterable[WriterCommitMessage | None]) -> list[CommitMessage]:
    """Returns the messages of a batch in which every task succeeded.

    Raises:
        RestartQueryError: if the message of a task is missing, because its rows would be missing too.
    """
    found = list(messages)
    missing = [number for number, each in enumerate(found) if not isinstance(each, CommitMessage)]
    if missing:
        raise RestartQueryError(
            f"Spark asks to commit a batch, but {len(missing)} of its {len(found)} tasks (the first is task "
            f"{missing[0]}) sent no commit message: Spark passed {found[missing[0]]!r}. The rows of these "
            "tasks would be lost.",
            fix="start the query or the write again, which repeats the batch. Readers see nothing of it yet.",
        )
    return of_successful_tasks(found)


def of_successful_tasks(messages: Iterable[WriterCommitMessage | None]) -> list[CommitMessage]:
    """Returns the messages of the tasks that succeeded. Spark passes None for the others."""
    return [each for each in messages if isinstance(each, CommitMessage)]


def with_reported(messages: Iterable[CommitMessage]) -> list[CommitMessage]:
    """Returns the messages, and after them those in their reports, in the order of the tasks that read."""
    messages = list(messages)
    reported = [(each.read, each) for message in messages for each in message.reports]
    in_order = sorted(reported, key=lambda found: (found[0].frame, found[0].task) if found[0] else ("", 0))
    return [*messages, *(each for _, each in in_order)]


def staged_parts(messages: Iterable[CommitMessage]) -> list[StagedPart]:
    """Returns all parts that these messages name: those of the rows, and of the dead letters."""
    return [part for each in messages for part in (each.part, each.dead_letters) if part is not None]

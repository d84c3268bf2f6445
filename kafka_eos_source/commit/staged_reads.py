"""Checks that the reports of the tasks that staged what they read cover the batch, each offset once.

With ``write=`` of `map_in_read`, the rows of a batch reach the sink as one report of each reading task, a row
of the frame. A step of the query between the read and the sink can drop reports (a filter, ``limit``) or
double them (a union of the frame with itself). After the loss of a shuffle file, Spark may pass on the
reports of two attempts of a task, or none of one that it sent to another partition the second time. This
module detects all of that before anything is sent to Kafka: it compares the reports with each other, and with
the batch in Spark's offset log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kafka_eos_source.errors import StagedPartError, StagedReadError
from kafka_eos_source.model import OffsetRange, StagedRead, TopicPartition
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition, is_kafka_offset_json


@dataclass(frozen=True)
class _Source:
    """What one source reads in the batch, as the offset log shows it.

    Attributes:
        end: its position at the end of the batch.
        starts: first offset to read, of the partitions whose start the log shows.
    """

    end: SourcePosition
    starts: Mapping[TopicPartition, int]


def check_staged_reads(
    reads: Sequence[StagedRead], batch_id: int, logged: LoggedOffsets, before: LoggedOffsets | None
) -> None:
    """Checks that the reports of a batch cover what its sources read, each offset once.

    Args:
        reads: what the reports of the reading tasks cover.
        batch_id: Spark's id of the batch.
        logged: entry of the batch in the offset log.
        before: entry of the batch before it; None if there is none.

    Raises:
        StagedReadError: if a step of the query dropped or doubled reports.
        StagedPartError: if there are reports of two attempts of a task, or of another batch.
    """
    sources = _reading(logged, before)
    by_frame: dict[str, list[StagedRead]] = {}
    for each in reads:
        by_frame.setdefault(each.frame, []).append(each)
    for of_frame in by_frame.values():
        _check_frame(of_frame, batch_id)
    wanted = Counter(each.end.digest for each in sources)
    found = Counter(of_frame[0].position for of_frame in by_frame.values())
    if found - wanted:
        raise StagedPartError(
            f"reading tasks staged rows up to another position than that of batch {batch_id} in Spark's "
            "offset log.",
            fix="restart the query, which repeats the batch; do not cache or persist the frame. Nothing was "
            "sent to Kafka.",
        )
    if wanted - found:
        raise _lost("all reports of a source are missing", batch_id)
    for position in found:
        _check_ranges(
            [each for each in sources if each.end.digest == position],
            [of_frame for of_frame in by_frame.values() if of_frame[0].position == position],
            batch_id,
        )


def _reading(logged: LoggedOffsets, before: LoggedOffsets | None) -> list[_Source]:
    """Returns the Kafka sources for which `StagingPlan.tasks` plans tasks in the batch."""
    found = []
    for name, line in logged.sources.items():
        if line is None or not is_kafka_offset_json(line):
            continue
        end = SourcePosition.from_json(line)
        line_before = None if before is None else before.sources.get(name)
        starts = dict(end.start or {})
        if line_before is not None and is_kafka_offset_json(line_before):
            start = SourcePosition.from_json(line_before)
            if end == start:
                continue
            starts = {**start.end, **starts}
        if end.has_records:
            found.append(_Source(end, starts))
    return found


def _check_frame(reads: Sequence[StagedRead], batch_id: int) -> None:
    """Checks that there is one report of each task of one plan."""
    plans = {each.plan for each in reads}
    attempts = Counter(each.task_attempt_id for each in reads)
    if len(plans) > 1 or max(attempts.values()) > 1:
        raise StagedReadError(
            f"the rows of batch {batch_id} are doubled: {len(reads)} reports of reading tasks reached the "
            f"sink, of which {reads[0].tasks} belong together. The query uses the frame of map_in_read more "
            "than once, for example in a union or join with itself.",
            fix="write the frame that map_in_read returned without changes, and return doubled rows from its "
            "function. Nothing was sent to Kafka.",
        )
    tasks = Counter(each.task for each in reads)
    repeated = [task for task, number in tasks.items() if number > 1]
    if repeated:
        raise StagedPartError(
            f"two attempts of reading task {repeated[0]} reported their rows for batch {batch_id}; expected "
            "one. Spark ran the task again after the sink had received its report.",
            fix="restart the query, which repeats the batch. Nothing was sent to Kafka.",
        )
    missing = sorted(set(range(reads[0].tasks)) - set(tasks))
    if missing:
        raise _lost(
            f"{len(missing)} of {reads[0].tasks} reports of reading tasks are missing (the first is that of "
            f"task {missing[0]})",
            batch_id,
        )


def _check_ranges(sources: Sequence[_Source], frames: Sequence[Sequence[StagedRead]], batch_id: int) -> None:
    """Checks that each of the frames covers the batch of another source, among sources with the same end.

    Two sources of one topic often end at the same position after they started at different ones, and reports
    do not name their source. So this looks for a pairing in which the ranges of all frames fit.

    Raises:
        StagedPartError: if there is none.
    """
    wrong = [[_wrong_partition(source, reads) for source in sources] for reads in frames]
    frame_of: dict[int, int] = {}

    def finds_source(frame: int, tried: set[int]) -> bool:
        """Whether the frame gets a source, which moves frames to other sources where it must."""
        for source, tp in enumerate(wrong[frame]):
            if tp is None and source not in tried:
                tried.add(source)
                if source not in frame_of or finds_source(frame_of[source], tried):
                    frame_of[source] = frame
                    return True
        return False

    for frame in range(len(frames)):
        if not finds_source(frame, set()):
            found = [tp for tp in wrong[frame] if tp is not None] or [
                tp for each in wrong for tp in each if tp
            ]
            raise _other_offsets(found[0], batch_id)


def _wrong_partition(source: _Source, reads: Sequence[StagedRead]) -> TopicPartition | None:
    """Returns a partition in which reports overlap, or leave offsets of the source out; None if all fit.

    A source that accepts lost records (``failOnDataLoss=false``) may skip offsets that are gone. People set
    that option after a batch has failed, so it also counts if the source got it only for the repeated batch.
    """
    pieces: dict[TopicPartition, list[OffsetRange]] = {}
    for each in (piece for read in reads for piece in read.ranges):
        pieces.setdefault(each.tp, []).append(each)
    lossy = source.end.lossy or any(each.lossy for each in reads)
    for tp, end in source.end.end.items():
        of_partition = sorted(pieces.pop(tp, ()), key=lambda each: each.start)
        at = None if lossy else source.starts.get(tp)
        for piece in of_partition:
            if at is not None and (piece.start < at if lossy else piece.start != at):
                return tp
            at = piece.end
        if at is not None and (at > end if lossy else at != end):
            return tp
    return next(iter(pieces), None)


def _lost(what: str, batch_id: int) -> StagedReadError:
    return StagedReadError(
        f"rows of batch {batch_id} are lost: {what}. A step between map_in_read and the sink dropped them, "
        "or Spark repeated a stage after it had lost a shuffle file.",
        fix="restart the query once, which repeats the batch. If it fails again, write the frame that "
        "map_in_read returned without changes, and filter rows in its function. Nothing was sent to Kafka.",
    )


def _other_offsets(tp: TopicPartition, batch_id: int) -> StagedPartError:
    return StagedPartError(
        f"the offsets of {tp} that reading tasks staged are not those of batch {batch_id} in Spark's offset "
        "log.",
        fix="restart the query, which repeats the batch. If it fails again, leave out write= of map_in_read, "
        "and report the bug. Nothing was sent to Kafka.",
    )

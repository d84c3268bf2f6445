"""Verifies the staged parts of one batch on the driver, and reads them as often as the commit is retried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from kafka_eos_source.errors import StagedPartError, StagedReadError, StateLostError
from kafka_eos_source.model import ReadPart, ShardPart, ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packing import CHANGELOG, Packet, packets
from kafka_eos_source.spark.arrow import CHANGES, SEALED
from kafka_eos_source.spark.packet_senders import READ, sender_of_read
from kafka_eos_source.spark.schema import PARTITION
from kafka_eos_source.stage.files import RESTART, LocalCopies, StagingFolder
from kafka_eos_source.stage.staging import is_sealed, records_in
from kafka_eos_source.state.model import BatchRecord, Owner, encode_batch


class StagedRows:
    """All staged rows of a batch, in the order of its tasks, and the state changes of its operators.

    Attributes:
        rows: number of records that the batch writes, those of changelogs included.
        changelog_rows: number of records that the batch writes to changelogs.
        topics: each topic that the batch writes, with the highest partition that a row names (-1 = none).
        sealed_partitions: partitions of the topic when tasks sealed rows for it; 0 if none did.
        shards: reports of the operators' shards (`reports`).
        end_digest: digest of the batch's entry in Spark's offset log, for `changes`.
    """

    def __init__(
        self,
        folder: StagingFolder,
        batch: str,
        parts: Iterable[StagedPart],
        shards: Sequence[ShardReport] = (),
        before: StagedRows | None = None,
    ) -> None:
        """Verifies length, checksum and number of rows of every part, before anything is sent to Kafka.

        Args:
            folder, batch, parts: where the rows are.
            shards: reports of the operators' shards.
            before: the rows of the batch before some tasks' rows were staged again; None if none were.

        Raises:
            StagedPartError: if a part is missing or is not what its task wrote.
        """
        parts = list(parts)
        self.shards = tuple(shards)
        self.end_digest: str = "" if before is None else before.end_digest
        known = None if before is None else before._parts
        self._parts: VerifiedParts = VerifiedParts(folder, batch, parts, known)
        carriers = sum(len(shard.packets) for part in parts for shard in part.shards or ())
        carriers += sum(len(read.packets) for part in parts for read in part.reads)
        changes = sum(shard.records + 1 for shard in self.shards if shard.records)  # and the batch record
        self.changelog_rows = changes
        self.rows = sum(part.rows for part in parts) - carriers + changes
        self.topics: Mapping[str, int] = _highest(parts)
        self.sealed_partitions = max((part.sealed_partitions for part in parts), default=0)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the staged Arrow batches of records; can be called again.

        A batch with the column `SEALED` contains sealed batches and their partitions instead of rows.
        """
        for each in self._parts.batches():
            if CHANGES in each.schema.names and each.column(CHANGES).null_count == 0:
                continue
            if is_sealed(each):
                yield each.select([PARTITION, SEALED])
            else:
                yield each.select([name for name in each.schema.names if name not in (CHANGES, SEALED)])

    def changes(self) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        """Yields the state changes of operators, by changelog partition; can be called again.

        The columns are ``key``, ``value`` (null = tombstone) and ``partition``. The last change of each
        partition is its batch record, which shows readers of the changelog which batch the state belongs to.
        """
        if not self.shards:
            return
        for each in self._parts.batches(with_changes=True):
            if each.column(CHANGES).null_count == 0:
                for packet in packets(each.column(CHANGES)):
                    if isinstance(packet, Packet):
                        for batch in packet.batches():
                            yield packet.tp, _of_partition(batch, packet.tp.partition)
        for shard in self.shards:
            if shard.records:
                key = Owner(shard.application_id, shard.store, shard.shards).key
                value = encode_batch(batch_of(shard, self.end_digest))
                record = pa.record_batch([pa.array([key]), pa.array([value])], ["key", "value"])
                yield shard.tp, _of_partition(record, shard.tp.partition)


def _of_partition(batch: pa.RecordBatch, partition: int) -> pa.RecordBatch:
    return batch.append_column("partition", pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows))


def _highest(parts: Iterable[StagedPart]) -> dict[str, int]:
    topics: dict[str, int] = {}
    for part in parts:
        for topic, partition in part.topics:
            topics[topic] = max(partition, topics.get(topic, partition))
        for shard in part.shards or ():
            topics[shard.tp.topic] = max(shard.tp.partition, topics.get(shard.tp.topic, -1))
    return topics


class VerifiedParts:
    """Parts whose length, checksum and number of rows match the reports of their tasks.

    No file stays open between verification and reading, because a batch may have thousands of parts, and a
    process can often open only a thousand files. Therefore a part is verified again whenever it is opened.
    """

    def __init__(
        self,
        folder: StagingFolder,
        batch: str,
        parts: Iterable[StagedPart],
        before: VerifiedParts | None = None,
    ) -> None:
        """Verifies every part that has rows, before the driver sends anything to Kafka or another sink.

        Args:
            folder, batch, parts: where the rows are.
            before: parts that were verified before, and their local copies.

        Raises:
            StagedPartError: if a part is missing or is not what its task wrote.
        """
        self._folder = folder
        self._batch = batch
        self._parts = tuple(part for part in parts if part.rows)
        self._copies: LocalCopies = LocalCopies() if before is None else before._copies
        known = set() if before is None else set(map(id, before._parts))
        for part in self._parts:
            if id(part) not in known:
                _check_rows(self._read(part), part, batch)

    def batches(self, *, with_changes: bool = False) -> Iterator[pa.RecordBatch]:
        """Yields the Arrow batches of all parts, in order; can be called again.

        Args:
            with_changes: whether to read only the parts with state changes of operators.

        Raises:
            StagedPartError: if a part was removed or changed since it was verified.
        """
        for part in self._parts:
            if part.shards or not with_changes:
                yield from self.batches_of(part)

    def batches_of(self, part: StagedPart) -> Iterator[pa.RecordBatch]:
        """Yields the Arrow batches of one of the parts. Raises the error of `batches`."""
        if not part.rows:
            return
        # a file may have been replaced since it was verified; bytes in memory cannot change
        found = self._read(part) if part.inline is None else pa.py_buffer(part.inline)
        yield from pa.ipc.open_stream(found)

    def _read(self, part: StagedPart) -> pa.Buffer:
        return self._folder.read(self._batch, part, self._copies)


def _check_rows(found: pa.Buffer, part: StagedPart, batch: str) -> None:
    name = part.name or "(inline)"
    try:
        rows = sum(records_in(each) for each in pa.ipc.open_stream(found))
    except pa.ArrowInvalid as error:
        raise StagedPartError(
            f"staged part {name} of batch {batch} is not an Arrow IPC stream: {error}.", fix=RESTART
        ) from error
    if rows != part.rows:
        raise StagedPartError(
            f"staged part {name} of batch {batch} has {rows:,} rows; expected {part.rows:,}, as its task "
            "reported.",
            fix=RESTART,
        )


def reports(parts: Collection[StagedPart], query_id: str, batch_id: int) -> tuple[ShardReport, ...]:
    """Returns the report of each shard of each operator of the batch, sorted by changelog partition.

    State changes travel as rows of the frame. So a filter or a projection after the operator can drop them,
    and after the loss of a shuffle file Spark may mix the rows of two attempts of a task. This function
    detects both, before anything is sent to Kafka. All reports of an operator get the largest event time of
    its shards.

    Args:
        parts: staged parts of the batch.
        query_id: id of the query in the checkpoint.
        batch_id: id of the micro-batch.

    Raises:
        StateLostError: if packets of state changes are missing.
        StagedPartError: if packets come from two attempts of a task, or from another batch.
    """
    found: dict[TopicPartition, list[ShardPart]] = {}
    carried = False
    ran: set[str] = set()
    for part in parts:
        carried = carried or part.shards is not None
        ran.update(each for each in part.senders if not each.startswith(READ))
        for shard in part.shards or ():
            found.setdefault(shard.tp, []).append(shard)
    if carried and not found and not any(part.reads for part in parts):
        raise _state_lost(
            "no shard of the operator sent a report",
            batch_id,
            "; with shards='partitions', remove stateful steps of Spark such as dropDuplicates, for which it "
            "runs batches without the source",
        )
    silent = sorted(ran - {tp.topic for tp in found})
    if silent:
        raise _state_lost(
            f"the operator of {', '.join(silent)} ran, but none of its state changes reached the sink",
            batch_id,
        )
    whole = {tp: _whole(tp, pieces, query_id, batch_id) for tp, pieces in sorted(found.items())}
    for topic in {tp.topic for tp in whole}:
        _check_all_reported([report for tp, report in whole.items() if tp.topic == topic])
    return tuple(_with_common_event_time(list(whole.values())))


def check_reads(parts: Iterable[StagedPart], batch_id: int) -> None:
    """Checks that all packets of the batch's reading tasks have arrived, each once (`in_read.bad_records`).

    Bad records travel as rows of the frame, like state changes. Each reading task sends a report at least, so
    that a lost packet is noticed although most batches have no bad record.

    Raises:
        StagedReadError: if a step of the query dropped or doubled packets.
        StagedPartError: if packets come from two attempts of a task.
    """
    found: dict[str, list[ReadPart]] = {}
    ran: set[str] = set()
    for part in parts:
        ran.update(each for each in part.senders if each.startswith(READ))
        for each in part.reads:
            found.setdefault(each.task.frame, []).append(each)
    if ran - set(map(sender_of_read, found)):
        raise _bad_records_lost("reading tasks ran, but nothing that they sent reached the sink", batch_id)
    for pieces in found.values():
        _check_read(pieces, batch_id)


def check_planned_reads(parts: Iterable[StagedPart], frames: Collection[str], batch_id: int) -> None:
    """Checks that reading tasks which were planned to send packets have done so.

    Args:
        parts: staged parts of the batch.
        frames: ids of the frames whose reading tasks were planned.
        batch_id: Spark's id of the batch.

    Raises:
        StagedReadError: if no packet of a frame has arrived.
    """
    if set(frames) - {each.task.frame for part in parts for each in part.reads}:
        raise _bad_records_lost(
            "reading tasks were planned, and nothing that they sent reached the sink", batch_id
        )


def _check_read(pieces: Sequence[ReadPart], batch_id: int) -> None:
    """Checks the packets of one read."""
    if len({piece.task.plan for piece in pieces}) > 1:
        raise StagedReadError(
            f"bad records of batch {batch_id} are doubled: the query uses a frame that was read with "
            "on_bad='dead-letter' more than once, for example in a union with itself, and Spark reads it for "
            "each use.",
            fix="use the frame once: instead of a union of its parts, use one select() with F.when(…), or "
            "map_in_read, whose function may return several rows for one. Nothing was sent to Kafka.",
        )
    by_task: dict[int, list[ReadPart]] = {}
    for piece in pieces:
        by_task.setdefault(piece.task.task, []).append(piece)
    missing = sorted(set(range(pieces[0].task.tasks)) - set(by_task))
    if missing:
        raise _bad_records_lost(
            f"{len(missing)} of {pieces[0].task.tasks} reading tasks sent nothing (the first is task "
            f"{missing[0]})",
            batch_id,
        )
    for number, of_task in by_task.items():
        if len({piece.task_attempt_id for piece in of_task}) > 1:
            raise StagedPartError(
                f"bad records of batch {batch_id} come from several attempts of reading task {number}; "
                "expected one. Spark ran the task again after the sink had read some of its rows.",
                fix="restart the query, which repeats the batch. Nothing was sent to Kafka.",
            )
        total = next((piece.total for piece in of_task if piece.total is not None), None)
        arrived = Counter(packet for piece in of_task for packet in piece.packets)
        if total is None or arrived != Counter(range(total)):
            raise _bad_records_lost(
                f"{arrived.total()} packets of reading task {number} reached the sink; expected "
                f"{'its report too' if total is None else total}",
                batch_id,
            )


def _bad_records_lost(what: str, batch_id: int) -> StagedReadError:
    return StagedReadError(
        f"bad records of batch {batch_id} are lost or doubled: {what}. A step between the read with "
        f"on_bad='dead-letter' and the sink dropped or repeated their rows, or dropped the column "
        f"{CHANGELOG!r}.",
        fix="use select(), where() and the other methods of the frame that was read, which keep them; in SQL "
        f"of Spark, select {CHANGELOG} too, and write conditions as '… OR {CHANGELOG} IS NOT NULL'; give "
        "explode_outer() an array that is null where the columns of the row are. Nothing was sent to Kafka.",
    )


def batch_of(report: ShardReport, end_digest: str) -> BatchRecord:
    """Returns the batch record for the changelog of a shard. It does not name the run; the token does."""
    return BatchRecord(
        query_id=report.query_id,
        batch_id=report.batch_id,
        task_attempt_id=report.task_attempt_id,
        time_ms=report.time_ms,
        event_time_ms=report.event_time_ms,
        counts=report.counts,
        end_digest=end_digest,
        log_start=report.log_start,
    )


def _whole(tp: TopicPartition, pieces: list[ShardPart], query_id: str, batch_id: int) -> ShardReport:
    attempts = {piece.task_attempt_id for piece in pieces}
    if len(attempts) > 1:
        raise StagedPartError(
            f"the state changes for {tp} in batch {batch_id} come from {len(attempts)} attempts of one "
            "task; expected one. Spark computed its rows again after the sink had read some of them.",
            fix="restart the query, which repeats the batch. Nothing was sent to Kafka.",
        )
    reported = [piece.report for piece in pieces if piece.report is not None]
    if not reported:
        raise _state_lost(f"the report of shard {tp.partition} of {tp.topic!r} is missing", batch_id)
    report = reported[0]
    numbers = sorted(number for piece in pieces for number in piece.packets)
    if numbers != list(range(report.packets)):
        raise _state_lost(
            f"{len(set(numbers))} of the {report.packets} packets of {tp} reached the sink, in "
            f"{len(numbers)} rows",
            batch_id,
        )
    if (report.query_id, report.batch_id) != (query_id, batch_id):
        raise StagedPartError(
            f"the state changes for {tp} belong to batch {report.batch_id} of query {report.query_id}; "
            f"expected batch {batch_id} of query {query_id}.",
            fix="do not cache or persist the result of a stateful operator; write it directly.",
        )
    return report


def _check_all_reported(found: list[ShardReport]) -> None:
    shards = {report.shards for report in found}
    missing = sorted(set(range(max(shards))) - {report.tp.partition for report in found})
    if missing or len(shards) > 1:
        raise _state_lost(
            f"of the {max(shards)} shards of {found[0].tp.topic!r}, the shards {missing} sent no report",
            found[0].batch_id,
        )


def _with_common_event_time(found: list[ShardReport]) -> Iterable[ShardReport]:
    largest: dict[str, int] = {}
    for report in found:
        if report.event_time_ms is not None:
            topic = report.tp.topic
            largest[topic] = max(report.event_time_ms, largest.get(topic, report.event_time_ms))
    for report in found:
        yield replace(report, event_time_ms=largest.get(report.tp.topic))


def _state_lost(what: str, batch_id: int, more: str = "") -> StateLostError:
    return StateLostError(
        f"state changes of batch {batch_id} are lost: {what}. A step between the operator and the sink "
        f"dropped or repeated their rows, or dropped the column {CHANGELOG!r}.",
        fix="use select(), where() and the other methods of the frame that the operator returned, which keep "
        f"them; in SQL, select {CHANGELOG} too, and write conditions as '… OR {CHANGELOG} IS NOT NULL'; "
        f"write the result of an operator to one sink only{more}. "
        "Nothing was sent to Kafka.",
    )

"""Checks what the tasks of a batch report: stateful shards, and reading tasks that staged what they read.

**Shards.** The state changes of a batch must belong to the state that Kafka holds of each shard.

**Reading tasks.** With ``write=`` of `map_in_read`, the rows of a batch reach the sink as one report of each
reading task, a row of the frame. A step of the query between the read and the sink can drop reports (a
filter, ``limit``) or double them (a union of the frame with itself). After the loss of a shuffle file, Spark
may pass on the reports of two attempts of a task, or none of one that it sent to another partition the second
time. `check_staged_reads` detects all of that before anything is sent to Kafka: it compares the reports with
each other, and with the batch in Spark's offset log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafka_eos_source.commit import refusals
from kafka_eos_source.commit.request import SourceRange
from kafka_eos_source.commit.verdict import Batch, Held
from kafka_eos_source.errors import (
    AbortableError,
    ChangelogError,
    InvalidOptionError,
    RestartQueryError,
    StagedPartError,
    StagedReadError,
    StateError,
    StatefulProcessorError,
    StateLostError,
    TokenMissingError,
)
from kafka_eos_source.model import OffsetRange, ShardReport, StagedRead, TopicPartition
from kafka_eos_source.protocol.identity import Identity, derived_application_id
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition, is_kafka_offset_json
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.state.changelog.topic import Tail
from kafka_eos_source.state.model import Owner, foreign_state

_RESTART = (
    "restart the query; if the error comes back, give the operator and the sink the same brokers "
    "(kafka.bootstrap.servers)."
)

_FIX_AT_SOURCE = (
    " If the value of the source is the wrong one, correct it, and delete offsets/{0} in the checkpoint, so "
    "that Spark plans the batch again; otherwise Spark repeats it with the logged value. Batch 0 of a query "
    "with startingOffsets=latest then begins at the new end of its topics, and leaves out what came before."
)


def check_reports(shards: Sequence[ShardReport], batch: Batch, held: Held, driver: tuple[str, int]) -> None:
    """Checks what the shards report about clocks and stores. Call it before anything is written.

    ``driver`` is the host name of the driver, and its time in ms since the epoch.

    Raises:
        StateMismatchError: if an operator has another store than in the last transaction.
        StateError: if the processing time of a shard is in the future.
        StateLostError: if the changelog of a shard already holds another batch with the id of this one.
        TokenMissingError: if the batch does not continue the state in a changelog that has no token.
    """
    for shard in shards:
        _check_clock(shard, held, *driver)
        _check_base(shard, batch, held)
    _check_store_names(shards, batch, held)


def _check_clock(shard: ShardReport, held: Held, driver_host: str, now_ms: int) -> None:
    """Checks that the processing time of a shard is not in the future.

    A task may run long after its batch was planned, but never after the driver commits the batch. So the
    check never fails if the clocks of both hosts are right.
    """
    ahead_ms = shard.time_ms - now_ms
    if ahead_ms <= shard.clock_max_ahead_ms:
        return
    token = _token(shard, held)
    if token is not None and token.shard is not None and token.shard.time_ms >= shard.time_ms:
        raise StateError(
            f"the recorded processing time of shard {shard.tp} is {ahead_ms / 1000:.0f} s ahead of the "
            f"clock of the driver's host {driver_host!r}; expected at most "
            f"{shard.clock_max_ahead_ms / 1000:.0f} s. A clock was wrong in an earlier batch, or that of "
            "the driver is slow now. Until the clock reaches that time, no timer would fire. Nothing of "
            "the batch was written.",
            fix="compare the clock of the driver's host with `kafka-eos doctor`. If it is right, stop the "
            f"query and run `kafka-eos state lower-time QUERY --store {shard.store} --yes`, then start it "
            "again.",
        )
    raise StateError(
        f"the clock of host {shard.host!r}, which ran shard {shard.tp}, is {ahead_ms / 1000:.0f} s ahead of "
        f"the clock of the driver's host {driver_host!r}; expected at most "
        f"{shard.clock_max_ahead_ms / 1000:.0f} s (state.clock.max.ahead). Nothing of the batch was written.",
        fix="set the clock that is wrong (`kafka-eos doctor` compares the driver's with the brokers'), then "
        "restart the query.",
    )


def _check_base(shard: ShardReport, batch: Batch, held: Held) -> None:
    """Checks that the batch continues the state of a shard without a token, by the digest in its changelog.

    If the token topic still has the token, `check_shards` decides by it: a shard without changes in the last
    batches has an older digest.

    The offset with the token was deleted. Batch ids prove nothing: after a checkpoint was restored, Spark
    uses the same id for other records.
    """
    if shard.sequence >= 0 or not shard.base_digest:
        return
    if shard.skipped:
        if shard.base_digest != batch.end:
            raise StateLostError(
                f"the changelog {shard.tp} holds the state of another batch {batch.batch_id}: the checkpoint "
                "was restored from an older copy, and Spark planned the batch again with other records.",
                fix="restore a newer copy of the checkpoint; or start with a new application.id and a new "
                "checkpoint, so that output and state are computed from the input again.",
            )
        return
    if _token(shard, held) is not None:
        return
    if shard.base_digest != batch.start and shard.missing_state != "changelog":
        raise TokenMissingError(
            f"the consumer group has no token of the changelog {shard.tp}, and the state in it does not end "
            f"where batch {batch.batch_id} begins: the checkpoint was restored from a copy, or batches were "
            "committed without their state changes. Nothing of the batch was written.",
            fix="restore the checkpoint that the query had last; otherwise start with a new application.id "
            "and a new checkpoint. If the state may be wrong by the records between the two, start once "
            f"with onMissingState=changelog:{batch.batch_id} on the operator.",
        )


def _check_store_names(shards: Sequence[ShardReport], batch: Batch, held: Held) -> None:
    """Checks that no operator of the last transaction has been given another store.

    A store without a token is that of a new operator, unless a store of the last transaction is missing.
    """
    new = [shard for shard in shards if _token(shard, held) is None and shard.missing_state == "fail"]
    if not new:
        return
    newest = -1 if held.token is None else held.token.sequence
    gone = stores_without_operator(held, newest, {shard.tp.topic for shard in shards})
    if gone:
        raise refusals.renamed_store(
            new[0].store, gone, held.application_id, batch.batch_id, " Nothing of the batch was written."
        )


def stores_without_operator(held: Held, sequence: int, changelogs: Collection[str]) -> list[str]:
    """Returns the stores whose state a transaction committed, and whose changelogs are not among these.

    Args:
        held: what the group holds.
        sequence: sequence number of the transaction.
        changelogs: topics of the operators that the query has now.
    """
    return sorted(
        {
            tp.topic.removeprefix(f"{held.application_id}-").removesuffix("-changelog")
            for tp, offset in held.offsets.items()
            if tp.topic not in changelogs
            and (token := Token.decode(offset.metadata)) is not None
            and (token.application_id, token.sequence) == (held.application_id, sequence)
            and token.shard is not None
        }
    )


def check_shards(
    shards: Sequence[ShardReport],
    batch_id: int,
    held: Held,
    read_tail: Callable[[TopicPartition, int], Tail],
) -> None:
    """Checks that every shard applied its changes to the state that Kafka holds.

    ``read_tail`` reads what a changelog holds from an offset on.

    Raises:
        RestartQueryError: if a shard started from the state of another transaction.
        StateLostError: if transactions were committed without the state changes of a shard.
        StateError: if an operator in the read did not run, which ran in the last transaction.
        StatefulProcessorError: if the processor failed on the batch.
    """
    newest = -1 if held.token is None else held.token.sequence
    _check_all_in_read(shards, batch_id, held, newest)
    for shard in shards:
        if shard.skipped:
            raise StateLostError(
                f"the changelog {shard.tp} holds the state of batch {batch_id}. State and records commit "
                "together, so Kafka holds the records of the batch, and they must not be written again.",
                fix=f"start the query once with .option('onMissingToken', 'assume_committed:{batch_id}') on "
                "the sink.",
            )
        token = _token(shard, held)
        committed_sequence = _sequence(token)
        if shard.sequence != committed_sequence and not _is_proved(shard, held, read_tail):
            raise RestartQueryError(
                f"shard {shard.tp} started from the state of transaction {shard.sequence}, but Kafka holds "
                f"the state of transaction {committed_sequence} (-1 means none).",
                fix=_RESTART,
            )
        if token is not None and committed_sequence < newest and shard.missing_state != "changelog":
            raise StateLostError(
                f"the changelog {shard.tp} holds the state of transaction {committed_sequence} (batch "
                f"{token.batch_id}), but the last transaction of the query is {newest}: transactions between "
                "them were committed without their state changes.",
                fix="keep the operator's column of changes in the rows that the query writes. Then start "
                "with a new checkpoint and application.id. If the state may lack these changes for ever, "
                f"start once with onMissingState=changelog:{batch_id} instead.",
            )
        if shard.failure:
            raise StatefulProcessorError(f"shard {shard.tp}, batch {batch_id}: {shard.failure}")


def _is_proved(shard: ShardReport, held: Held, read_tail: Callable[[TopicPartition, int], Tail]) -> bool:
    """Whether a shard that found no token started from the state of the token that the token topic has.

    Such a shard has read its whole changelog. So its state is that of the token if the changelog reaches the
    token's offset, and has no committed record behind it.
    """
    token = _token(shard, held)
    if shard.sequence >= 0 or token is None:
        return False
    if shard.base_digest == token.end_digest:
        return True
    end = held.offsets[shard.tp].offset
    has_state = bool(shard.base_digest) or not end
    return has_state and shard.next_offset >= end and not read_tail(shard.tp, end).records


def check_names(
    who: Identity,
    batch_id: int,
    shards: Sequence[ShardReport],
    sources: Iterable[SourceRange],
) -> None:
    """Checks that sink, operators and sources of a query have the same ``application.id`` and group.

    An operator with another name would read the token of another application in the next batch, and take its
    own state for lost.

    Raises:
        InvalidOptionError: if the names differ.
    """
    operators = {(each.tp.topic, each.application_id, each.group_id) for each in shards}
    named = {f"the operator with the changelog {topic!r}": name for topic, name, _ in sorted(operators)}
    named |= {
        f"source {number}": each.application_id
        for number, each in enumerate(sources)
        if each.application_id is not None
    }
    nothing = f" Nothing of batch {batch_id} was written."
    if any(name not in ("", who.application_id) for name in named.values()):
        at_source = any(
            part.startswith("source") and name != who.application_id for part, name in named.items()
        )
        raise refusals.different_ids(
            {"the sink": who.application_id, **named},
            derived_application_id(who.query_id),
            nothing,
            _FIX_AT_SOURCE.format(batch_id) if at_source else "",
        )
    groups = {f"the operator with the changelog {topic!r}": group for topic, _, group in sorted(operators)}
    if any(group not in ("", who.group_id) for group in groups.values()):
        raise refusals.different_groups({"the sink": who.group_id, **groups}, nothing)


def check_same_cluster(
    shards: Sequence[ShardReport], topic_ids: Mapping[str, str], cluster_id: str, batch_id: int
) -> None:
    """Checks that the changelog of each operator is on the cluster that the sink writes to.

    Raises:
        InvalidOptionError: if the operator uses other brokers, or somebody recreated the topic a moment ago.
    """
    for each in shards:
        found = topic_ids.get(each.tp.topic)
        if each.topic_id and found is not None and found != each.topic_id:
            raise InvalidOptionError(
                f"the operator with the changelog {each.tp.topic!r} uses kafka.bootstrap.servers="
                f"{each.brokers!r}, where the topic has the id {each.topic_id}; on the cluster of the sink "
                f"({cluster_id}) it has the id {found}. Expected the same topic, because the sink writes the "
                f"changes of the state. Nothing of batch {batch_id} was written.",
                fix="set kafka.bootstrap.servers on the sink and in the options of the operator to the same "
                "cluster. If they are the same, the topic was deleted and created again: restart the query.",
            )


def check_one_source(shards: Sequence[ShardReport], sources: int) -> None:
    """Checks that a query with an operator in the read has no other source.

    Spark reads a source only in batches for which that source has new offsets. In other batches such an
    operator would not run, and the chain of its transactions would have a gap.

    Raises:
        StateError: if there are several.
    """
    topic = next((shard.tp.topic for shard in shards if shard.in_read), None)
    if topic is None or sources == 1:
        return
    raise StateError(
        f"the operator with the changelog {topic!r} has shards='partitions', and the query has {sources} "
        "sources; expected one. Spark would not run the operator in batches that only another source has "
        "records for. Nothing of this batch was written.",
        fix="read all topics with one source (subscribe), write the results of the sources with queries of "
        "their own, or pass a number of shards; with a new application.id and a new checkpoint.",
    )


def _check_all_in_read(shards: Sequence[ShardReport], batch_id: int, held: Held, newest: int) -> None:
    """Checks that each operator in the read that ran in the last transaction has run in this batch."""
    reported = {shard.tp.topic for shard in shards}
    for tp, offset in held.offsets.items():
        token = Token.decode(offset.metadata) if tp.topic not in reported else None
        if token is None or not token.in_read or token.application_id != held.application_id:
            continue
        if token.sequence == newest:
            raise StateError(
                f"the operator with the changelog {tp.topic!r} has shards='partitions', and did not run in "
                f"batch {batch_id}. Spark ran the batch without the source, which had no new offsets, for a "
                "stateful step of its own (such as dropDuplicates or a join); or the query no longer has the "
                "operator. Nothing of this batch was written.",
                fix="remove Spark's stateful step, or pass a number of shards, and start over with a new "
                "application.id and a new checkpoint. If you removed the operator from the query for good, "
                f"stop the query and delete the offsets of its changelog: kafka-consumer-groups.sh "
                f"--delete-offsets --group … --topic {tp.topic}.",
            )


def shards_match(shards: Sequence[ShardReport], held: Held) -> bool:
    """Whether every shard applied its changes to the state in ``held``."""
    return not any(shard.skipped or shard.sequence != _sequence(_token(shard, held)) for shard in shards)


def _token(shard: ShardReport, held: Held) -> Token | None:
    offset = held.offsets.get(shard.tp)
    return None if offset is None else Token.decode(offset.metadata)


def _sequence(token: Token | None) -> int:
    return -1 if token is None else token.sequence


def is_alone(shard: ShardReport, start: int, end: int) -> bool:
    """Whether a changelog holds only this transaction's records after an offset, as their number shows.

    ``start`` is the committed offset of the changelog, else its end when the shard read it. ``end`` is the
    end of the log after the changes and the batch record were flushed.
    """
    # the transaction that committed the offset wrote its control record there
    control_records = 1 if start and shard.sequence >= 0 else 0
    return end - start == control_records + shard.records + 1


def check_tail(shard: ShardReport, end: int, tail: Tail) -> None:
    """Checks that nobody else has written to the shard's changelog since the state that the shard began with.

    The records before ``tail.stable`` belong to transactions that have ended. If all records after it are
    this transaction's, these transactions include every one that has written before this one. So of two
    owners that begin to use the topic at the same moment, at most one commits.

    ``tail`` is what the log holds since the state that the shard began with, and ``end`` its end after the
    changes and the batch record were flushed.

    Raises:
        AbortableError: if another transaction is open.
        KafkaEosError: if another owner has committed records (`state.model.foreign_state`).
        StateLostError: if they are this query's own records.
        ChangelogError: if another program has written records.
    """
    own = Owner(shard.application_id, shard.store, shard.shards)
    for found in sorted(tail.owners - {own}, key=str):
        raise foreign_state(shard.tp, found, own)
    if own in tail.owners:
        raise StateLostError(
            f"the changelog {shard.tp} holds {tail.records} committed records that are newer than the state "
            "of the last token: the committed offsets of the group were set back, or the group was restored "
            "from a copy. Nothing of this batch was committed.",
            fix="restore the newest offsets of the group; otherwise start with a new checkpoint and "
            "application.id, so that the state is computed from the input again.",
        )
    if tail.records:
        raise ChangelogError(
            f"another program has written {tail.records} records to the changelog {shard.tp}. Nothing of "
            "this batch was committed.",
            fix="find that program and stop it; only the query may write to its changelog. The state is "
            "damaged: start with another store name, a new checkpoint and a new application.id.",
        )
    if end - tail.stable != shard.records + 1:
        raise AbortableError(f"another producer has an open transaction in the changelog {shard.tp}")


def check_same_log(shard: ShardReport, end: int) -> None:
    """Checks that nobody deleted and recreated the changelog, which would lose the shard's earlier state.

    ``end`` is the end of the changelog after the changes were flushed.

    Raises:
        StateLostError: if the changelog is shorter, because the topic was deleted and created again.
    """
    if end < shard.next_offset + shard.records:
        raise StateLostError(
            f"the changelog {shard.tp} ends at offset {end} and includes {shard.records} changes of this "
            f"batch, but the state that they belong to ends at offset {shard.next_offset}: the topic was "
            "deleted and created again while the query ran. Nothing of this batch was committed.",
            fix="restore the topic from a copy, or start with a new checkpoint and application.id.",
        )


# -- reading tasks that staged what they read -----------------------------------------------------------


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

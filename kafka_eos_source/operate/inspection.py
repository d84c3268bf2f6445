"""The state of one query: what its checkpoint and Kafka hold, and what a restart would do.

`inspect` reads Spark's offset log and commit log, the identity file, the group's offsets and tokens, and
the staged parts. It changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow.fs as pafs

from kafka_eos_source.commit.identity_file import Identity, IdentityFile, read_identity
from kafka_eos_source.commit.ownership import recover
from kafka_eos_source.commit.request import OwnOffsets, SourceRange, TokenRecords, on_cluster, ranges
from kafka_eos_source.commit.verdict import Batch, Held, Verdict, batch_verdict
from kafka_eos_source.errors import DataLossError, InvalidOptionError, KafkaEosError, UnavailableError
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.kafka.token_topic import TopicRecords
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.shared import INTERNAL_PREFIX, Target
from kafka_eos_source.plan.continuity import Loss, cut_logs, reconcile
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import anchor as anchor_of
from kafka_eos_source.protocol.identity import derived_application_id, group_of
from kafka_eos_source.protocol.offset_log import (
    LoggedOffsets,
    SourcePosition,
    digest_of,
    is_kafka_offset_json,
)
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.secrets import shown_text
from kafka_eos_source.sinks.targets import location
from kafka_eos_source.stage.files import PROBE


@dataclass(frozen=True)
class Checkpoint:
    """The contents of one checkpoint.

    Attributes:
        location: URI or path.
        query_id: Spark's id of the query.
        planned: newest batch in Spark's offset log, which Spark writes before it runs the batch; None = no
            batch.
        planned_at_seconds: when that entry was written, in seconds since 1970.
        committed: newest batch in Spark's commit log, which Spark writes after the batch; None = no batch.
        identity: the identity file; None = this package has not committed a batch of this checkpoint.
        logged: offsets of the batch ``planned``.
        before: offsets of the batch before ``planned``, if the log still has them.
    """

    location: str
    query_id: str
    planned: int | None = None
    planned_at_seconds: float | None = None
    committed: int | None = None
    identity: Identity | None = None
    logged: LoggedOffsets | None = None
    before: LoggedOffsets | None = None

    @property
    def next_batch(self) -> int:
        """Id of the batch that a restart begins with (``MicroBatchExecution.populateStartOffsets``)."""
        if self.planned is None:
            return 0
        return self.planned + 1 if self.committed == self.planned else self.planned

    @property
    def replays(self) -> bool:
        """Whether a restart repeats a batch that Spark has already planned."""
        return self.planned is not None and self.next_batch == self.planned

    @property
    def unproven_since(self) -> int | None:
        """The first batch that ``at_least_once`` may have written since the last token; else None."""
        return None if self.identity is None else self.identity.unproven_since

    @property
    def has_native_state(self) -> bool:
        """Whether Spark keeps its own state for the query, such as an aggregation or a deduplication."""
        with reachable("the checkpoint", self.location):
            return offset_log.has_native_state(self.location)

    def entry(self, batch_id: int) -> LoggedOffsets | None:
        """Reads the entry of a batch in the offset log; returns None if there is none."""
        with reachable("the checkpoint", self.location):
            return offset_log.read(self.location, batch_id)

    def sources(self) -> Sequence[SourceRange]:
        """Returns the offset ranges of the next batch; empty ranges if Spark has not planned it."""
        if self.logged is None:
            return ()
        if self.replays:
            return ranges(self.logged, self.before)
        return [replace(each, start=each.end) for each in ranges(self.logged, self.before)]

    def describe_next_batch(self, application_id: str, own: OwnOffsets, target: str) -> Batch:
        """Returns the next batch in the form that `batch_verdict` takes.

        Args:
            application_id: the transactional id.
            own: offsets of the next batch's `sources` that lie on the sink's cluster.
            target: where the query writes, as its token says; commands assume that this did not change.
        """
        known = self.replays and self.logged is not None
        start = self.before if self.replays else self.logged
        return Batch(
            application_id=application_id,
            query_id=self.query_id,
            run_id="",
            batch_id=self.next_batch,
            start=digest_of(start, self.query_id),
            end=digest_of(self.logged, self.query_id) if known else "",
            target=target,
            starts=own.starts,
            ends=own.ends if known else None,
            comparable=own.comparable and known,
            jump=known and any(each.jump for each in self.sources()),
            jumped=own.jumped if known else frozenset(),
            shared=own.shared,
            promised=self.identity is not None and self.identity.query_id == self.query_id,
        )


def read_checkpoint(location: str) -> Checkpoint | None:
    """Reads a checkpoint; returns None if the location contains no checkpoint.

    Raises:
        OperatorError: if one of its files is damaged or has an unknown version.
        UnavailableError: if its file system does not answer, or refuses access.
        InvalidOptionError: if no file system supports the location.
    """
    fs, path = file_system(location)
    with reachable("the checkpoint", location):
        if fs.get_file_info(f"{path}/metadata").type != pafs.FileType.File:
            return None
        planned, planned_at_seconds = _newest(fs, f"{path}/offsets")
        logged = before = None
        if planned is not None:
            logged = offset_log.read(location, planned)
            before = offset_log.read(location, planned - 1) if planned > 0 else None
        return Checkpoint(
            location=location,
            query_id=offset_log.query_id(location),
            planned=planned,
            planned_at_seconds=planned_at_seconds,
            committed=_newest(fs, f"{path}/commits")[0],
            identity=read_identity(location),
            logged=logged,
            before=before,
        )


@contextmanager
def reachable(what: str, location: str) -> Iterator[None]:
    """Turns what a file system raises into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"{what} {shown_text(location)} cannot be read: {error}",
            fix="check the location, that its storage answers, and the credentials and rights of this user.",
        ) from error


def known_application_id(given: str | None, checkpoint: Checkpoint | None) -> str:
    """Returns the transactional id: the given one, else the checkpoint's, else the derived one.

    Raises:
        InvalidOptionError: if neither an id nor a checkpoint is known.
    """
    if given is not None:
        return given
    if checkpoint is None:
        raise InvalidOptionError(
            "the application.id is not known, because --checkpoint is not set or names no checkpoint.",
            fix="correct --checkpoint, or name the query by the argument QUERY, its application.id.",
        )
    identity = checkpoint.identity
    if identity is not None and identity.query_id == checkpoint.query_id:
        return identity.application_id
    return derived_application_id(checkpoint.query_id)


def _newest(fs: pafs.FileSystem, folder: str) -> tuple[int | None, float | None]:
    """Returns the newest batch id in a log folder of Spark, and when its file was written.

    Spark names these files by batch id; its temporary files and checksums have other names.
    """
    found = fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    named = [(int(each.base_name), each) for each in found if each.base_name.isdigit() and each.is_file]
    if not named:
        return None, None
    batch_id, info = max(named, key=lambda each: each[0])
    return batch_id, info.mtime.timestamp() if info.mtime is not None else None


# -- what Kafka holds of a query


@dataclass(frozen=True)
class PartitionView:
    """One partition that the query reads or writes, or has committed offsets for.

    Attributes:
        tp: the partition.
        start, end: offsets of the next batch, from Spark's log; None = the query does not read the partition,
            or has not planned the batch.
        group: the group's committed offset; None = no offset.
        token: the token in the metadata of that offset.
        log: bounds of the log; None = the partition does not exist, or is internal to Kafka.
    """

    tp: TopicPartition
    start: int | None = None
    end: int | None = None
    group: int | None = None
    token: Token | None = None
    log: LogEnds | None = None

    @property
    def transaction_since(self) -> int | None:
        """First offset of an open transaction of any producer; None if no transaction is open."""
        return self.log.stable if self.log is not None and self.log.stable < self.log.end else None


@dataclass(frozen=True)
class KafkaView:
    """What Kafka holds of a query.

    Attributes:
        cluster_id: Kafka's id of the cluster.
        topics: number of partitions of each topic on the cluster.
        held: what the group holds for the application.
        anchor: partition that carries the full token, as far as it is known.
        pending: whether an unfinished transaction is about to change the group's offsets.
        own: the next batch's offsets on this cluster.
        partitions: partitions that the query reads or writes, or has committed offsets for.
        losses: records that the next batch needs and Kafka no longer has.
        unrecovered: why ``held`` could not be completed from the query's token topic; None = it is complete,
            or the query has no token topic.
    """

    cluster_id: str
    topics: Mapping[str, int]
    held: Held
    anchor: TopicPartition
    pending: bool
    own: OwnOffsets
    partitions: Sequence[PartitionView] = ()
    losses: Sequence[Loss] = ()
    unrecovered: KafkaEosError | None = None

    @property
    def token(self) -> Token | None:
        """The newest token of the application; None = no token, or Kafka lost a newer one."""
        return self.held.whole_token

    @property
    def offsets(self) -> Mapping[TopicPartition, GroupOffset]:
        """The committed offsets of the group."""
        return self.held.offsets

    @property
    def committed(self) -> dict[TopicPartition, int]:
        """The committed offsets without their metadata."""
        return self.held.committed


def kafka_view(
    reader: ClusterReader,
    deadline: Deadline,
    group_id: str,
    checkpoint: Checkpoint | None,
    *,
    application_id: str,
    anchor_topic: str | None = None,
    source_cluster: str = "auto",
) -> KafkaView:
    """Reads what Kafka holds of a query.

    Raises:
        OperatorError: if a token is damaged or has a newer format.
    """
    cluster_id, topics = reader.topics(deadline)
    sources = checkpoint.sources() if checkpoint is not None else ()
    own = on_cluster(sources, cluster_id, topics, source_cluster)
    anchor = anchor_of(anchor_topic, None)
    known_anchor = {anchor} if anchor_topic is not None else set()
    offsets, pending = reader.group(group_id, {*own.ends, *known_anchor}, deadline)
    read = {*own.ends, *(own.starts or {})}
    tokens = {tp: Token.decode(each.metadata) for tp, each in offsets.items()}
    written = {tp.topic for tp in {*offsets, *known_anchor} - read}
    shown = {*read, *offsets, *(TopicPartition(t, n) for t in written for n in range(topics.get(t, 0)))}
    existing = {tp for tp in shown if tp.partition < topics.get(tp.topic, 0)}
    logs = reader.logs({tp for tp in existing if not tp.topic.startswith(INTERNAL_PREFIX)})
    planned = checkpoint is not None and checkpoint.replays
    return KafkaView(
        cluster_id=cluster_id,
        topics=topics,
        held=Held.of(application_id, offsets),
        anchor=anchor,
        pending=pending,
        own=own,
        partitions=[
            PartitionView(
                tp,
                start=(own.starts or {}).get(tp),
                end=own.ends.get(tp) if planned else None,
                group=offsets[tp].offset if tp in offsets else None,
                token=tokens.get(tp),
                log=logs.get(tp),
            )
            for tp in sorted(shown)
            if tp in read or tp in offsets or not tp.topic.startswith(INTERNAL_PREFIX)
        ],
        losses=_losses(reader, checkpoint, own, existing, logs),
    )


def _losses(
    reader: ClusterReader,
    checkpoint: Checkpoint | None,
    own: OwnOffsets,
    existing: Collection[TopicPartition],
    logs: Mapping[TopicPartition, LogEnds],
) -> list[Loss]:
    """Returns the lost records, by the source's own rule. Checks only partitions that the batch knows."""
    if checkpoint is None or not own.starts:
        return []
    partitions = [tp for tp in own.starts if tp in existing]
    begins = _positions(checkpoint.before if checkpoint.replays else checkpoint.logged)
    epochs = {
        tp: epoch
        for each in begins
        for tp, epoch in each.epochs.items()
        if tp in partitions and each.end[tp] == own.starts[tp]
    }
    return reconcile(
        own.starts,
        {topic: topic_id for each in begins for topic, topic_id in each.topic_ids.items()},
        partitions,
        {tp: logs[tp].earliest for tp in partitions},
        {tp: logs[tp].end for tp in partitions},
        reader.topic_ids({tp.topic for tp in partitions}),
        cuts=cut_logs(own.starts, reader.epoch_ends(epochs)) if epochs else None,
    ).losses


def _positions(logged: LoggedOffsets | None) -> list[SourcePosition]:
    lines = logged.sources.values() if logged is not None else ()
    return [
        SourcePosition.from_json(line) for line in lines if line is not None and is_kafka_offset_json(line)
    ]


# -- what a restart would do: decided by the commit's own function


@dataclass(frozen=True)
class Finding:
    """One fact that a person should know.

    Attributes:
        text: the fact.
        condition: the error condition that a restart would end with, such as ``TOKEN_MISSING``; "" = no
            error.
        fix: what to do about it.
    """

    text: str
    condition: str = ""
    fix: str = ""

    @classmethod
    def of(cls, error: KafkaEosError) -> Finding:
        """Returns the finding that describes an error."""
        return cls(error.message, short_name(type(error)), error.fix)


def short_name(error: type[KafkaEosError]) -> str:
    """Returns the condition without its prefix, which is its heading in docs/runbooks.md."""
    return error.condition.partition(".")[2] or error.condition


def findings(application_id: str, checkpoint: Checkpoint | None, kafka: KafkaView | None) -> list[Finding]:
    """Returns what a restart would do, followed by what else a person should know.

    Args:
        application_id: the transactional id.
        checkpoint: None = no checkpoint was named, or the location contains none.
        kafka: None = Kafka was not contacted, or did not answer.
    """
    found = []
    if kafka is None:
        found.append(_without_kafka(checkpoint))
    elif checkpoint is None:
        found.append(_without_checkpoint(application_id, kafka))
    else:
        found.append(_restart(application_id, checkpoint, kafka))
    if checkpoint is not None:
        found += _identity_file(application_id, checkpoint)
    if kafka is not None:
        found += _transactions(application_id, kafka)
        if kafka.losses:
            found.append(
                Finding(
                    "; ".join(f"{each.kind}: {each.text}" for each in kafka.losses) + ".",
                    short_name(DataLossError),
                    "once you know which records are lost, restart with failOnDataLoss=false.",
                )
            )
    return found


def _restart(application_id: str, checkpoint: Checkpoint, kafka: KafkaView) -> Finding:
    if kafka.unrecovered is not None:
        return Finding.of(kafka.unrecovered)
    target = "" if kafka.token is None else kafka.token.target
    batch = checkpoint.describe_next_batch(application_id, kafka.own, target)
    token_topic = None if checkpoint.identity is None else checkpoint.identity.token_topic
    try:
        verdict = batch_verdict(batch, kafka.held, kafka.anchor, token_topic=token_topic)
    except KafkaEosError as error:
        return Finding.of(error)
    if verdict is Verdict.SKIP:
        return Finding(
            f"Kafka holds batch {batch.batch_id}, Spark's commit log does not: a restart skips it."
        )
    if checkpoint.replays:
        return Finding(f"batch {batch.batch_id} is planned but not in Kafka: a restart writes it once.")
    if checkpoint.planned is None:
        return Finding("the query has not planned a batch yet: a restart begins with batch 0.")
    return Finding(
        f"batch {checkpoint.planned} is complete in Spark and in Kafka: a restart continues with batch "
        f"{batch.batch_id}."
    )


def _without_kafka(checkpoint: Checkpoint | None) -> Finding:
    if checkpoint is None:
        return Finding("nothing is known: there is no checkpoint and no answer from Kafka.")
    return Finding(
        f"without an answer from Kafka, it is unknown whether Kafka holds batch {checkpoint.next_batch}."
        if checkpoint.replays
        else "there is no answer from Kafka; by Spark's logs, a restart continues with batch "
        f"{checkpoint.next_batch}."
    )


def _without_checkpoint(application_id: str, kafka: KafkaView) -> Finding:
    if kafka.token is None:
        return Finding(f"Kafka holds no token of application.id={application_id!r}.")
    return Finding(
        f"Kafka holds batch {kafka.token.batch_id} of query {kafka.token.query_id}. A query with a new "
        "checkpoint fails with FOREIGN_QUERY unless it sets onForeignQuery=adopt."
    )


def _identity_file(application_id: str, checkpoint: Checkpoint) -> list[Finding]:
    first = checkpoint.identity
    if first is None:
        if checkpoint.planned is None:
            return []
        return [
            Finding("kafka-eos has not committed a batch of this checkpoint yet: a restart writes the first.")
        ]
    if first.query_id != checkpoint.query_id:
        return [
            Finding(
                f"the checkpoint's identity file belongs to query {first.query_id}: somebody copied the "
                "folder from that query's checkpoint."
            )
        ]
    wanted = replace(first, application_id=application_id, location=location(checkpoint.location))
    try:
        IdentityFile(checkpoint.location, wanted).check_guarantee()
    except KafkaEosError as error:
        return [Finding.of(error)]
    return []


def _transactions(application_id: str, kafka: KafkaView) -> list[Finding]:
    found = []
    if kafka.pending:
        found.append(
            Finding(
                "an unfinished transaction is about to change the group's offsets: a driver is committing, "
                "or died while committing. The offsets shown here were committed before this transaction.",
                fix=f"if no driver runs, start the query or run kafka-eos fence {application_id} --yes",
            )
        )
    open_since = [
        f"{each.tp} from offset {each.transaction_since}"
        for each in kafka.partitions
        if each.transaction_since is not None
    ]
    if open_since:
        found.append(
            Finding(
                f"a transaction is open in {', '.join(open_since)}: read_committed consumers wait there.",
                fix="if it is a transaction of this query, a restart of the query ends it. For others, see "
                "'Hanging transactions' in docs/runbooks.md (kafka-transactions.sh find-hanging).",
            )
        )
    return found


# -- what is staged


@dataclass(frozen=True)
class StagedEntry:
    """One entry of a staging folder: the parts of a batch, or a leftover file.

    Attributes:
        name: its name in the folder: a batch id, ``write-…`` for a batch write, or something else.
        is_folder: whether it is a folder.
        files: number of files in it; 1 for a file.
        size_bytes: size of all these files.
        newest_seconds: when the newest file was written, in seconds since 1970; 0 = unknown.
    """

    name: str
    is_folder: bool
    files: int = 0
    size_bytes: int = 0
    newest_seconds: float = 0.0

    @property
    def batch_id(self) -> int | None:
        """Id of the micro-batch; None if the entry is not a micro-batch."""
        return int(self.name) if self.is_folder and re.fullmatch("[0-9]+", self.name) else None


def staged_entries(location: str) -> list[StagedEntry]:
    """Lists the folder, micro-batches first in order of their ids.

    Leaves out the probe file. A folder that does not exist has no entries.
    """
    fs, path = file_system(location)
    with reachable("the staging folder", location):
        infos = fs.get_file_info(pafs.FileSelector(path, recursive=True, allow_not_found=True))
    found: dict[str, StagedEntry] = {}
    for info in infos:
        name, _, below = info.path[len(path.rstrip("/")) + 1 :].partition("/")
        if name == PROBE and not below:
            continue
        so_far = found.setdefault(name, StagedEntry(name, bool(below) or not info.is_file))
        at_seconds = info.mtime.timestamp() if info.mtime is not None else 0.0
        found[name] = replace(
            so_far,
            files=so_far.files + info.is_file,
            size_bytes=so_far.size_bytes + (info.size or 0 if info.is_file else 0),
            newest_seconds=max(so_far.newest_seconds, at_seconds),
        )
    return sorted(found.values(), key=lambda each: (each.batch_id is None, each.batch_id or 0, each.name))


# -- everything about one query

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
    reader: ClusterReader | None,
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
    checkpoint = read_checkpoint(target.checkpoint) if target.checkpoint is not None else None
    application_id = known_application_id(target.application_id, checkpoint)
    group_id = group_of(application_id, target.group_id)
    kafka: KafkaView | None = None
    kafka_failure: list[Finding] = []
    if reader is not None:
        try:
            kafka = kafka_view(
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
        staged=staged_entries(location) if location is not None else (),
        findings=[*findings(application_id, checkpoint, kafka), *kafka_failure],
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

"""Switches off one safety rule of the product at a time: a test that still passes proves nothing (T54)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientPartition

from kafka_eos_source.commit import (
    at_least_once,
    identity_file,
    machine,
    micro_batch,
    ownership,
    report_checks,
    transaction,
    verdict,
)
from kafka_eos_source.commit.request import Clients, CommitContext, Decision
from kafka_eos_source.commit.steps import Progress
from kafka_eos_source.commit.verdict import Held, Verdict
from kafka_eos_source.datasource import sink
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.operate import replay, rescale_copy
from kafka_eos_source.protocol import identity, token
from kafka_eos_source.runtime import failpoints, folders
from kafka_eos_source.sinks import filesystem_layout, manifest
from kafka_eos_source.stage import files, rows
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.task import StagedTask, Staging
from kafka_eos_source.state.changelog.restore import _Chunk
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.model import StateAccess
from kafka_eos_source.state.operator import shard, shard_store
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.durable import Applying, DurableState
from kafka_eos_source.state.vector import processor


def _no_token_check() -> None:
    """Writes every batch, ignoring the token in Kafka. Replays are then written twice."""
    ownership.batch_verdict = lambda *_, **__: Verdict.WRITE


def _no_epoch_of_its_own() -> None:
    """Begins each transaction with the epoch of the one before."""
    begin = TransactionalProducer.begin

    def begin_as_before(self: TransactionalProducer) -> None:
        self._transaction.epoch_is_used = False
        begin(self)

    TransactionalProducer.begin = begin_as_before  # type: ignore[method-assign]


def _no_digests_of_manifests() -> None:
    """Believes whatever a sink finds after a restart."""
    manifest.check = lambda *_: None  # type: ignore[assignment]


def _no_names_in_manifests() -> None:
    """Moves files wherever a manifest says."""
    filesystem_layout._NAME = filesystem_layout._STAGED = re.compile(".*")


def _lose_a_record() -> None:
    """Drops one record silently. This is not a rule, but the fault that the count check detects."""

    def lossy(send: Any) -> Any:
        return lambda self, rows, *others: send(self, rows.slice(1), *others)

    def lossy_for_sealed(send_sealed: Any) -> Any:
        return lambda self, batches, topic, deadline: send_sealed(self, list(batches)[1:], topic, deadline)

    TransactionalProducer.send = lossy(TransactionalProducer.send)  # type: ignore[method-assign]
    TransactionalProducer.send_sealed = lossy_for_sealed(TransactionalProducer.send_sealed)  # type: ignore[method-assign]


def _no_count_check() -> None:
    """Disables the comparison of the number of records produced with the number staged."""

    def lying(flush: Any) -> Any:
        def flush_and_lie(self: Any, deadline: Any) -> None:
            flush(self, deadline)
            self.enqueued = _AnyNumber()

        return flush_and_lie

    TransactionalProducer.flush = lying(TransactionalProducer.flush)  # type: ignore[method-assign]


class _AnyNumber(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__

    def __sub__(self, other: int) -> _AnyNumber:
        return self


def _token_before_init() -> None:
    """Reads the token before it initialises the producer, so that an older owner can commit in between.

    This also disables the second read of the token inside the transaction, which would notice that.
    """
    transaction.Transaction._confirm = lambda self: None  # type: ignore[method-assign]
    take_ownership = ownership.take_ownership

    def read_then_init(context: CommitContext, progress: Progress) -> Decision:
        producer: Any = context.clients.producer(context.request.batch.application_id)
        init, producer.init = producer.init, lambda deadline: None
        prepared: Any = _Prepared(producer, context.clients)
        decision = take_ownership(replace(context, clients=prepared), progress)
        init(context.deadline)
        return decision

    machine.take_ownership = read_then_init


def _no_plan_check() -> None:
    """Commits rows with whatever offsets the log holds at the time of the commit."""
    micro_batch._refuse_another_plan = lambda *_: None  # type: ignore[assignment]


def _no_report_check() -> None:
    """Commits whatever reports of reading tasks reach the sink (``write=`` of `map_in_read`)."""
    micro_batch.check_staged_reads = lambda *_: None  # type: ignore[assignment]


def _no_dead_letters() -> None:
    """Leaves the tasks' dead letters out of the batch that the driver commits."""
    StagedTask.parts = property(lambda self: (self.part,))  # type: ignore[method-assign,assignment]


def _no_bad_records() -> None:
    """Takes no bad records out of packets."""
    rows._take_bad = lambda *_: None


def _refused_rows_stay_for_kafka() -> None:
    """Takes rows that a sink refuses out of the sinks only."""
    again = Staging.again

    def for_sinks_only(self: Staging, before: StagedTask, refused: Any) -> StagedTask:
        return replace(again(self, before, refused), part=before.part)

    Staging.again = for_sinks_only  # type: ignore[method-assign]


def _no_packet_check() -> None:
    """Commits a batch although packets of bad records are lost or doubled."""
    micro_batch.check_reads = lambda *_: None


def _dead_letters_at_once() -> None:
    """Sends dead letters before the batch, by a producer without transactions."""
    commit = sink.StagedSink.commit_micro_batch

    def send_then_commit(self: Any, messages: Any, batch_id: int) -> None:
        parts = [part for each in messages for part in each.staged.dead_letters]
        staged = StagedRows(self.folder, str(batch_id), parts)
        at_least_once.produce(replace(self.options, topic=None), staged.batches())
        without = [replace(each, staged=replace(each.staged, dead_letters=())) for each in messages]
        commit(self, without, batch_id)

    sink.StagedSink.commit_micro_batch = send_then_commit  # type: ignore[method-assign]


def _replay_offsets_afterwards() -> None:
    """Commits the offsets of a replay after its transaction, by an ordinary consumer."""
    later: list[Any] = []

    def keep(self: Any, offsets: Any, group_id: str, deadline: Any) -> None:
        later[:] = [offsets, group_id]

    def then_offsets(commit: Any) -> Any:
        def commit_then_offsets(self: Any, deadline: Any) -> None:
            commit(self, deadline)
            failpoints.reach("test.between_records_and_offsets")
            offsets, group_id = later
            consumer = Consumer({"bootstrap.servers": self._cluster.bootstrap, "group.id": group_id})
            named = [ClientPartition(*each.tp, each.offset, each.metadata) for each in offsets]
            consumer.commit(offsets=named, asynchronous=False)
            consumer.close()

        return commit_then_offsets

    # no coordinator knows of offsets in the transaction, so none could prove that
    micro_batch.KafkaClients.proved_offsets = micro_batch.KafkaClients.committed_now  # type: ignore[method-assign]
    TransactionalProducer.send_offsets = keep  # type: ignore[method-assign]
    TransactionalProducer.commit = then_offsets(TransactionalProducer.commit)  # type: ignore[method-assign]


def _no_topic_ids() -> None:
    """Takes each topic for the one that it was before, although it may have been created again."""
    transaction.Transaction._check_topic_ids = lambda self: set()  # type: ignore[method-assign]
    replay._check_topics = lambda before, now: None


def _no_leader_epochs() -> None:
    """Never asks whether a new leader has the records that the query has read, as before KIP-320."""
    SourceAdmin.epoch_ends = lambda self, epochs, leaders=None: {}  # type: ignore[method-assign]
    assign = RangeConsumer.assign

    def assign_offsets(
        self: RangeConsumer, positions: Any, columns: Any, ends: Any = None, _epochs: Any = None
    ) -> None:
        assign(self, positions, columns, ends)

    RangeConsumer.assign = assign_offsets  # type: ignore[method-assign]


def _no_mark_check() -> None:
    """Takes every committed offset for the query's own, whoever committed it."""
    Held.is_marked = lambda self, tp: tp in self.offsets  # type: ignore[method-assign]


def _no_promise() -> None:
    """Takes a missing token for a query that has never committed."""
    verdict._without_token = lambda *_: Verdict.WRITE  # type: ignore[assignment]


def _no_targets() -> None:
    """Leaves out of tokens where the rows of a batch went."""
    identity.target = lambda *_: ""


def _no_places() -> None:
    """Lets a checkpoint run wherever it is found."""
    identity_file._check_place = lambda *_: None


def _no_proof() -> None:
    """Adopts another query's work without comparing all of its sources."""

    def without_proof(batch: Any, token: Any, held: Any, foreign_query: str) -> None:
        check(replace(batch, comparable=True), token, held, foreign_query)

    check = verdict._check_adoption
    verdict._check_adoption = without_proof


def _no_trace_of_at_least_once() -> None:
    """Writes batches with at_least_once without leaving a trace in the checkpoint."""
    at_least_once.set_unproven = lambda *_: None


def _no_mark_of_at_least_once() -> None:
    """Writes batches with at_least_once without marking the token that they do not replace."""
    at_least_once._mark_token = lambda *_: None


def _answers_for_ever() -> None:
    """Takes an answer about a lost token for an answer about every batch."""
    without_token = verdict._without_token

    def without_number(batch: Any, held: Any, missing_token: str, token_topic: str | None) -> Verdict:
        return without_token(batch, held, f"{missing_token.partition(':')[0]}:{batch.batch_id}", token_topic)

    verdict._without_token = without_number


def _new_partitions_from_their_end() -> None:
    """Starts partitions that were added to a topic at their end instead of their beginning."""
    SourceAdmin.earliest = SourceAdmin.high_watermarks  # type: ignore[method-assign]


def _no_owner() -> None:
    """Takes any state in a changelog for that of the store whose name the topic has."""
    _Chunk._check_owner = lambda *_: None  # type: ignore[method-assign]
    transaction.is_alone = lambda *_: True  # type: ignore[assignment]


def _no_shard_check() -> None:
    """Trusts that the state in the changelog has as many shards as the changelog has partitions."""
    shard._check_shards = lambda *_: None  # type: ignore[assignment]
    _no_owner()


def _no_clock_check() -> None:
    """Commits processing times that are in the future."""
    report_checks._check_clock = lambda *_: None  # type: ignore[assignment]


def _no_store_names() -> None:
    """Takes a store without a token for that of a new operator, whatever stores the query had before."""
    report_checks._check_store_names = lambda *_: None  # type: ignore[assignment]


def _no_beginning() -> None:
    """Restores what a changelog still has, whether or not its first records were removed."""
    restore = shard_store.restore
    shard_store.restore = lambda *args, **more: restore(*args, **{**more, "accepted_start": 1 << 62})


def _no_unfinished_batches() -> None:
    """Records a large batch as applied when its rows begin to be written, and not when they are."""

    def begin_applying(self: DurableState, _ranges: Any, applying: Applying) -> None:
        done = replace(self.metadata, offsets=applying.offsets, batch=applying.batch)
        self._write_with(self.database.new_batch(), done)

    DurableState.begin_applying = begin_applying  # type: ignore[method-assign]


def _no_state_log() -> None:
    """Keeps the offsets of a store that is closed, and loses the rows that are only in its log."""
    close = Database.close

    def close_and_lose(self: Any) -> None:
        families = dict(self._families)
        if families:
            families.pop("offsets").flush()
        families.clear()
        close(self)
        for log in self.path.glob("*.log"):
            log.unlink()

    Database.close = close_and_lose  # type: ignore[method-assign]


def _no_state_versions() -> None:
    """Overwrites the description of a store by what the query declares, and reads its values as such."""

    def overwrite(state: StateAccess, declared: Description, _context: object) -> Description:
        state.put(META_KEY, declared.to_json())
        return declared

    processor.agree = overwrite


def _no_rescale_cut() -> None:
    """Continues a copy of the state, although the query has run since."""
    rescale_copy.CopyJournal.continues = lambda *_: True  # type: ignore[method-assign]


def _journal_ahead_of_the_slice() -> None:
    """Writes into the journal of a rescale that some more records were copied than were."""
    encode = rescale_copy.CopyJournal.encode

    def encode_ahead(self: rescale_copy.CopyJournal) -> str:
        return encode(replace(self, offset=self.offset + 5))

    rescale_copy.CopyJournal.encode = encode_ahead  # type: ignore[method-assign]


def _any_pending_state() -> None:
    """Takes the newest pending changes of a shard for committed, whatever the token says."""
    bring_to_batch = shard.bring_to_batch

    def promote_or_bring(store: Any, tp: Any, batch: Any, end: int, read: Any) -> Any:
        pending = list(store.pending())
        if not pending:
            return bring_to_batch(store, tp, batch, end, read)
        store.promote(pending[-1].record, {tp: end})
        return shard_store.Action.PROMOTE, shard_store.NOTHING_READ

    shard.bring_to_batch = promote_or_bring


def _next_format() -> None:
    """Writes tokens as a later version of this package may: with the next format, and another version."""
    token.FORMAT += 1
    token.package_version = lambda: "99.0.0"  # type: ignore[assignment]


def _no_packets_before() -> None:
    """Drops the state changes of the stateful step before this one, so that its state never commits."""
    from kafka_eos_source.protocol.packing import WaitingPackets
    from kafka_eos_source.state.operator.task import Operator

    packets = Operator._packets

    def only_own(self: Operator, _before: WaitingPackets, report: Any, changes: Any) -> Any:
        return packets(self, WaitingPackets(), report, changes)

    Operator._packets = only_own  # type: ignore[method-assign]


def _wrong_removal() -> None:
    """Removes the newest result of a group instead of the one that was emitted before."""
    from kafka_eos_source.state.vector.groups import Emission

    rows = Emission._rows

    def remove_newest(self: Emission, place: Any, states: Any, lives: Any, was: Any, before: Any) -> Any:
        newest = None if before is None else self._aggregation.finish(states)
        return rows(self, place, states, lives, was, newest)

    Emission._rows = remove_newest  # type: ignore[method-assign]


def _no_look_at_members() -> None:
    """Does not ask whether the group of the query has members."""
    ownership.refuse_members = transaction.refuse_members = lambda *_: None  # type: ignore[assignment]


def _no_look_at_offsets() -> None:
    """Begins a query although the group has offsets of another program."""
    verdict._refuse_offsets_of_others = lambda *_: None


def _no_group_prefix() -> None:
    """Uses the application.id as the group, as consumers of the application do."""
    identity.GROUP_PREFIX = ""


def _shared_storage() -> None:
    """Treats every folder as one that other hosts mount: no rule, but tests have only their own disk."""
    files.is_on_this_host = lambda path: False  # type: ignore[assignment]


def _no_owner_of_rows() -> None:
    """Takes staged rows from a file on a disk of the host, whoever wrote it."""
    folders._refuse_foreign = lambda path, found, refused_modes: None


def _no_digest_of_rows() -> None:
    """Takes staged rows from a file on shared storage, whatever their digest is."""
    find = files.StagingFolder._map

    def find_and_believe(self: Any, relative: str, part: Any, copies: Any) -> Any:
        return find(self, relative, part, copies)[0], part.digest

    files.StagingFolder._map = find_and_believe  # type: ignore[method-assign]


def _short_look() -> None:
    """Looks at the group in each transaction: no rule, but it saves a test the minute between two looks."""
    transaction._LOOK_SECONDS = 0.0


class _Prepared:
    """Clients that return an existing producer instead of making a new one."""

    def __init__(self, producer: Any, clients: Clients) -> None:
        self._producer = producer
        self.group_offsets = clients.group_offsets
        self.committed_now = clients.committed_now
        self.proved_offsets = clients.proved_offsets
        self.group_members = clients.group_members

    def producer(self, _transactional_id: str) -> Any:
        return self._producer


SWITCHES: Mapping[str, Callable[[], None]] = {
    "token check": _no_token_check,
    "own epoch": _no_epoch_of_its_own,
    "lose a record": _lose_a_record,
    "digests of manifests": _no_digests_of_manifests,
    "names in manifests": _no_names_in_manifests,
    "count check": _no_count_check,
    "init before token": _token_before_init,
    "plan check": _no_plan_check,
    "report check": _no_report_check,
    "commit dead letters": _no_dead_letters,
    "unpack bad records": _no_bad_records,
    "stage again for Kafka": _refused_rows_stay_for_kafka,
    "packet check": _no_packet_check,
    "dead letters in the transaction": _dead_letters_at_once,
    "replay offsets in the transaction": _replay_offsets_afterwards,
    "topic ids": _no_topic_ids,
    "leader epochs": _no_leader_epochs,
    "mark check": _no_mark_check,
    "targets": _no_targets,
    "places": _no_places,
    "proof of an adoption": _no_proof,
    "trace of at_least_once": _no_trace_of_at_least_once,
    "mark of at_least_once": _no_mark_of_at_least_once,
    "numbers of answers": _answers_for_ever,
    "promised token": _no_promise,
    "next format": _next_format,
    "new partitions": _new_partitions_from_their_end,
    "shard check": _no_shard_check,
    "changelog owner": _no_owner,
    "clock check": _no_clock_check,
    "store names": _no_store_names,
    "changelog beginning": _no_beginning,
    "pending state": _any_pending_state,
    "applying": _no_unfinished_batches,
    "state log": _no_state_log,
    "state versions": _no_state_versions,
    "rescale cut": _no_rescale_cut,
    "rescale journal": _journal_ahead_of_the_slice,
    "packets before": _no_packets_before,
    "removed result": _wrong_removal,
    "group members": _no_look_at_members,
    "group offsets": _no_look_at_offsets,
    "group prefix": _no_group_prefix,
    "short look": _short_look,
    "shared storage": _shared_storage,
    "owner of staged rows": _no_owner_of_rows,
    "digest of staged rows": _no_digest_of_rows,
}


def switch_off(name: str) -> None:
    """Switches off the rule ``name`` for the rest of this process."""
    SWITCHES[name]()

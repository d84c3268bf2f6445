"""A consumer that speaks Kafka's protocol itself, for tasks that read ranges of offsets.

It sends one Fetch at a time to each broker. The next one is on its way while the last answer is decoded, so
at most two answers of each broker are in memory. A range ends at a known offset, and the consumer asks for
little more than what is left of it. A leader may refer it to a replica in its rack (``client.rack``,
KIP-392).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kafka.protocol.consumer import FetchRequest

from kafka_eos_source.errors import InvalidRecordError, RetriableError, UnavailableError
from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.damage import CORRUPT, Damage, Examination
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import classify, is_transient
from kafka_eos_source.kafka.fetched_batches import Arrived, DamagedBatchError, FetchedBatches
from kafka_eos_source.kafka.kernel import KernelMessages, kernel, wants
from kafka_eos_source.kafka.messages import (
    HIGHEST,
    LOWEST,
    FetchAnswer,
    Fetched,
    Wanted,
    decoded_fetch,
    fetch_request,
)
from kafka_eos_source.kafka.partitions import FetchSizes, LeaderLookup, Partition
from kafka_eos_source.model import Epochs, TopicPartition
from kafka_eos_source.protocol.records import MOST_DECOMPRESSED, MOST_DECOMPRESSED_BYTES
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)

#: Answers of a leader that may wait to be decoded before it is asked again.
_MOST_ANSWERS = 2
#: How long a partition waits after an error.
_PAUSE_SECONDS = 0.1
_SHORT_PAUSE_SECONDS = 0.005
#: How long a leader must not find an offset that its log has until that counts as damage. Right after an
#: election, a broker may report an end that it does not have yet.
_STALL_SECONDS = 3.0
#: How long one connection attempt, or one lookup of leaders, may keep a caller waiting.
_CONNECT_SECONDS = 10.0
#: How long brokers may not know a topic that exists (``topic.metadata.propagation.max.ms``).
_PROPAGATION_MS = "30000"
#: How long a broker waits for records, unless the user sets ``fetch.wait.max.ms``. The end of a log arrives
#: only then, so that Kafka's default of 500 ms would be the latency of every small batch.
_WAIT_MS = "10"

#: How long a broker waits at least for records that it has not sent within the usual wait. They may be in
#: remote storage: before Kafka 3.8, a broker gives up reading there when the wait ends (KIP-1018).
_PATIENT_MS = 2000

#: How long a partition is read from the replica to which its leader referred, unless the user sets
#: ``metadata.max.age.ms`` (its default in Java), and how long only from its leader after the replica failed.
_REPLICA_MS, _LEADER_SECONDS = "300000", 30.0

_NO_END = 2**63 - 1
_SESSION_ERRORS = frozenset(
    {
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)
_OUT_OF_RANGE = ErrorCode.OFFSET_OUT_OF_RANGE
_UNKNOWN = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
#: Besides temporary errors. Brokers answer UNKNOWN when remote storage fails for a moment; Java's consumer
#: asks again, too.
_LOOKS_AGAIN = frozenset({_UNKNOWN, ErrorCode.UNKNOWN_SERVER_ERROR})


@dataclass(slots=True)
class Taken:
    """The messages and events that one call of `RangeConsumer.take` returned.

    Attributes:
        messages: messages of any assigned partitions, in offset order within each.
        log_ends: partitions that were read to the end of their log, with the offset of that end.
        out_of_range: partitions whose position is not, or no longer, in their log.
        gone: partitions that the cluster no longer knows.
        reached: offsets before which no more messages will come, by partition. Unlike the offset of the last
            message, they include what readers do not see.
        cut: partitions whose log was cut below the end of what was asked for, with the offset of the cut.
        damaged: damaged places at which the next records of a partition would be.
    """

    messages: KernelMessages | tuple[()] = ()
    log_ends: dict[TopicPartition, int] = field(default_factory=dict)
    out_of_range: list[TopicPartition] = field(default_factory=list)
    gone: list[TopicPartition] = field(default_factory=list)
    reached: dict[TopicPartition, int] = field(default_factory=dict)
    cut: dict[TopicPartition, int] = field(default_factory=dict)
    damaged: list[Damage] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is neither a message nor an event."""
        events = self.log_ends or self.out_of_range or self.gone or self.reached or self.cut or self.damaged
        return not (len(self.messages) or events)


class RangeConsumer:
    """A consumer that reads the partitions assigned to it, and joins no group. Not thread-safe.

    Args:
        conf: properties from `kafka.config.check_consumer`, ``isolation.level``, and `MOST_DECOMPRESSED`.

    Raises:
        InvalidOptionError: if a certificate or key cannot be used.
        KernelUnavailableError: if the C kernel cannot be used.

    Attributes:
        cluster: the brokers, for other requests over the same connections.
        last_complaint: what went wrong last; the likely reason of a time-out.
    """

    def __init__(self, conf: Mapping[str, str]) -> None:
        self._kernel = kernel()
        self.cluster = Cluster(conf)
        self._committed = conf.get("isolation.level") == "read_committed"
        self._checks = conf.get("check.crcs", "true").lower() != "false"
        self._wait_ms = int(conf.get("fetch.wait.max.ms", _WAIT_MS))
        self._least_bytes = int(conf.get("fetch.min.bytes", "1"))
        self._sizes = FetchSizes(conf)
        propagation_ms = conf.get("topic.metadata.propagation.max.ms", _PROPAGATION_MS)
        self._propagation_seconds = int(propagation_ms) / 1000
        self._rack = conf.get("client.rack", "")
        self._replica_seconds = max(1.0, int(conf.get("metadata.max.age.ms", _REPLICA_MS)) / 1000)
        self.last_complaint = ""
        self._wanted = 0
        self._partitions: dict[TopicPartition, Partition] = {}
        #: Partitions that brokers have known.
        self._seen: set[TopicPartition] = set()
        most_bytes = int(conf.get(MOST_DECOMPRESSED, MOST_DECOMPRESSED_BYTES))
        self._arrived = Arrived(self._kernel, committed=self._committed, most_bytes=most_bytes)
        self._answers = 0
        #: Nodes that have not answered the newest Fetch.
        self._asked: set[int] = set()
        #: The events that the next `take` returns with its messages.
        self._events = Taken()
        self._failure: Exception | None = None
        #: Partitions whose log may be cut (`_ask_for_cuts`).
        self._cut_suspects: set[TopicPartition] = set()
        self._examination = Examination(
            self._kernel,
            self.cluster,
            committed=self._committed,
            checks=self._checks,
            most_bytes=most_bytes,
        )
        #: Damaged batches that are examined when the caller has what arrived before them.
        self._suspected: dict[TopicPartition, DamagedBatchError] = {}
        #: What follows a damaged batch, for `move`: its broker may not find it.
        self._rests: dict[TopicPartition, FetchedBatches] = {}
        #: Nodes to which the last attempt to connect failed.
        self._unreachable: set[int] = set()
        #: How many brokers are asked at present.
        self._brokers = 1
        self._lookup = LeaderLookup(self.cluster, _CONNECT_SECONDS)

    # -- the assignment --------------------------------------------------------------------------

    def assign(
        self,
        positions: Mapping[TopicPartition, int],
        columns: Collection[str],
        ends: Mapping[TopicPartition, int] | None = None,
        epochs: Epochs | None = None,
    ) -> None:
        """Starts reading these partitions from their positions, and stops reading all others.

        Args:
            positions: the next offset to read, by partition.
            columns: the columns of Spark's schema that messages must carry.
            ends: offsets behind which nothing is wanted, by partition; None = there are no ends.
            epochs: leader epochs that belong to the ends, by partition; None = they are not known.
        """
        self.release()
        self._wanted = wants(columns)
        self.last_complaint = ""
        self._partitions = {}
        for tp, position in positions.items():
            epoch = -1 if epochs is None else epochs[tp]
            self._partitions[tp] = Partition(position, _NO_END if ends is None else ends[tp], epoch, epoch)

    def move(self, tp: TopicPartition, position: int) -> None:
        """Continues an assigned partition at another offset."""
        before, rest = self._partitions[tp], self._rests.get(tp)
        self.drop([tp])
        # A new object, so that an answer to the request before is ignored. The leader may have refused the
        # epoch of that request, and not its offset; the epochs of the record batches are compared anyway.
        resumes_at = time.monotonic() + _PAUSE_SECONDS
        moved = Partition(position, before.end, before.epoch, is_slow=before.is_slow, resumes_at=resumes_at)
        self._partitions[tp] = moved
        if rest is not None:
            foreign = rest.above(moved.epoch, moved.end)
            rest = rest if foreign is None else rest.first(foreign)
            if foreign == 0:
                self._suspect_cut(tp, moved)
                return
            moved.position = rest.past_offset
            self._arrived.add(self.cluster.leaders.of(tp) or 0, self._answers, rest)

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        """Stops reading these partitions and discards what has arrived of them."""
        dropped = set(tps)
        for tp in dropped:
            self._partitions.pop(tp, None)
            self._suspected.pop(tp, None)
            self._rests.pop(tp, None)
            self._events.log_ends.pop(tp, None)
            self._events.cut.pop(tp, None)
        for events in (self._events.out_of_range, self._events.gone):
            events[:] = [tp for tp in events if tp not in dropped]
        self._cut_suspects -= dropped
        self._events.damaged = [each for each in self._events.damaged if each.tp not in dropped]
        self._arrived.drop(dropped)

    def release(self) -> None:
        """Stops all reading; connections stay open."""
        self._partitions.clear()
        self._cut_suspects.clear()
        self._suspected.clear()
        self._rests.clear()
        self._arrived.clear()
        self._events = Taken()
        self._failure = None

    def close(self) -> None:
        """Closes all connections."""
        self.release()
        self.cluster.close()

    # -- reading ---------------------------------------------------------------------------------

    def take(self, wait_seconds: float) -> Taken:
        """Returns messages that have arrived, and events; waits if there is nothing.

        Args:
            wait_seconds: longest wait for a message or event, unless a connection is made.

        Raises:
            AuthorizationError: if the principal may not read, or the login is refused for good.
            InvalidRecordError: if records have a format from before Kafka 0.11.
            KafkaEosError: if a broker refuses for another reason that no retry mends.
        """
        deadline = Deadline.after_seconds(wait_seconds)
        has_waited = False
        while True:
            self._fetch()
            self._examine()
            self._raise_failure()
            if self._cut_suspects:
                self._ask_for_cuts()
                self._fetch()
            if self._arrived or not self._events.empty:
                return self._taken()
            if deadline.expired and has_waited:
                return Taken()
            # at least once, even if connecting to one broker took all the time: others may have answered
            self._wait(min(deadline.remaining_seconds(), self._until_resumed()))
            has_waited = True

    def log_bounds(self, tp: TopicPartition, deadline: Deadline) -> tuple[int, int]:
        """Returns the first offset of a log, and the offset up to which a reader may read.

        The latter is the last stable offset under ``read_committed``, else the high watermark.

        Raises:
            UnavailableError: if no broker answers before ``deadline``, or the partition does not exist.
            AuthorizationError: if the principal may not read the topic, or the login is refused.
        """
        # Callers ask when a log is not what they expect. The leader may be an old one that is cut off from
        # the others, and so may be the broker that named it.
        self.cluster.ask_another()

        def ask() -> tuple[int, int]:
            low = self.cluster.offsets([tp], deadline, earliest=True)[tp]
            return low, self.cluster.offsets([tp], deadline, committed=self._committed)[tp]

        return self.cluster.retried(f"looking up the offsets of {tp}", deadline, ask)

    # -- inside ----------------------------------------------------------------------------------

    def _taken(self) -> Taken:
        taken, self._events = self._events, Taken()
        if self._arrived:
            try:
                taken.messages, reached = self._arrived.next_part(
                    self._wanted, lambda tp: self._partitions[tp].end
                )
            except DamagedBatchError as error:
                tp, before = error.tp, self._partitions[error.tp]
                self._arrived.keep_before(tp, error.offset)
                # read again from there on, because another damaged batch may be between the two
                error.position = max(error.position, error.offset)
                # a new object, so that an answer to a request that has been sent is ignored
                self._partitions[tp] = replace(
                    before, position=error.position, is_waiting=False, stalled_since=None, reported_end=-1
                )
                self._suspect(error)
                return taken
            taken.reached.update(reached)
        return taken

    def _wait(self, seconds: float) -> None:
        if self.cluster.network.is_connected:
            self.cluster.network.wait(seconds)
        else:
            time.sleep(seconds)

    def _fetch(self) -> None:
        """Asks for what is wanted; looks up leaders if that is due, and asks those that were found."""
        self._ask_brokers()
        if self._lookup.is_due:
            self._look_for_leaders()
            self._ask_brokers()

    def _ask_brokers(self) -> None:
        """Sends a Fetch to every broker that has none to answer, and of whose partitions more is wanted."""
        now = time.monotonic()
        waiting = self._arrived.answers()
        by_broker: dict[int, dict[TopicPartition, Wanted]] = {}
        brokers = {*self._asked, *waiting}
        for tp, each in self._partitions.items():
            if each.is_waiting or each.position >= each.end or each.resumes_at > now:
                continue
            broker = self._broker_of(tp, each, now)
            if broker is None:
                self._lookup.is_wanted = True
            elif broker not in self._asked and waiting[broker] < _MOST_ANSWERS:
                by_broker.setdefault(broker, {})[tp] = self._next(tp, each)
        self._brokers = len(brokers | by_broker.keys())
        for node in sorted(by_broker, key=self._unreachable.__contains__):
            self._send(node, by_broker[node])

    def _broker_of(self, tp: TopicPartition, partition: Partition, now: float) -> int | None:
        """Returns the broker to read a partition from; None if it has no leader."""
        if partition.replica >= 0 and (
            now >= partition.replica_until or self.cluster.leaders.epoch(tp) != partition.replica_epoch
        ):
            partition.replica, partition.replica_until = -1, now
        return partition.replica if partition.replica >= 0 else self.cluster.leaders.of(tp)

    def _next(self, tp: TopicPartition, partition: Partition) -> Wanted:
        most_bytes = self._sizes.of_partition(tp.topic, partition.end - partition.position)
        epoch = self.cluster.leaders.epoch(tp)
        # a replica that is a moment behind may not have heard of the last epoch; the leader was asked for it
        last_epoch = partition.last_epoch if partition.replica < 0 else -1
        return Wanted(partition.position, most_bytes, epoch, last_epoch)

    def _send(self, node: int, wanted: Mapping[TopicPartition, Wanted]) -> None:
        started = time.monotonic()
        try:
            connection = self.cluster.broker(node, Deadline.after_seconds(_CONNECT_SECONDS))
        except TemporaryError as error:
            self._unreachable.add(node)
            self._look_again(wanted, str(error), self._fair_pause(started))
            for tp in wanted:
                self._return_to_leader(self._partitions[tp])
            return
        self._unreachable.discard(node)
        version = connection.version(FetchRequest, HIGHEST, LOWEST)
        now = time.monotonic()
        asked = {tp: self._partitions[tp] for tp in wanted}
        # the rack is the same for all partitions of a request, and some may have to come from their leader
        may_refer = all(each.replica >= 0 or now >= each.replica_until for each in asked.values())
        wait_ms = max(self._wait_ms, _PATIENT_MS * any(each.is_slow for each in asked.values()))
        request = fetch_request(
            version,
            wanted,
            committed=self._committed,
            wait_ms=wait_ms,
            least_bytes=self._least_bytes,
            most_bytes=self._sizes.of_answer(_MOST_ANSWERS * max(1, self._brokers)),
            rack=self._rack if may_refer else "",
        )
        for each in asked.values():
            each.is_waiting = True
        self._asked.add(node)
        connection.send(
            request,
            partial(self._on_answer, node, connection, asked),
            decode=decoded_fetch,
            wait_seconds=wait_ms / 1000,
        )

    def _on_answer(
        self,
        node: int,
        connection: Connection,
        asked: Mapping[TopicPartition, Partition],
        answer: FetchAnswer | None,
        error: Exception | None,
    ) -> None:
        self._asked.discard(node)
        self._answers += 1
        # leaves out partitions that were moved, dropped or assigned anew since the request
        valid = {tp: each for tp, each in asked.items() if self._partitions.get(tp) is each}
        for each in valid.values():
            each.is_waiting = False
        if answer is None:
            self._look_again(valid, f"broker {connection.address}: {error}")
            for each in valid.values():
                self._return_to_leader(each)
        elif answer.error_code in _SESSION_ERRORS:  # a defect of the broker: the request has no session
            self._look_again(valid, f"broker {connection.address}: {KafkaError(answer.error_code).text}")
        elif answer.error_code:
            for tp, each in valid.items():
                self._on_refusal(tp, answer.error_code, each)
        else:
            has_records = False
            for fetched in answer.partitions:
                if fetched.tp in valid:
                    self._on_partition(node, fetched, valid[fetched.tp], is_first=not has_records)
                has_records |= len(fetched.records) > 0

    def _on_partition(self, node: int, fetched: Fetched, partition: Partition, *, is_first: bool) -> None:
        """Takes what a broker answered about a partition.

        Args:
            node: the broker.
            fetched: its answer.
            partition: the partition.
            is_first: whether the answer has no records of a partition before it. Brokers send at least one
                batch of the first partition, and of others only what there is room for.
        """
        tp = fetched.tp
        if fetched.error_code:
            self._on_refusal(tp, fetched.error_code, partition)
            return
        partition.unknown_since = None
        self._lookup.tries = 0
        if fetched.replica >= 0:
            self._on_referral(tp, fetched.replica, partition)
            return
        if fetched.diverging is not None:
            self._on_diverging(tp, fetched.diverging, partition)
            return
        try:
            batches = FetchedBatches.of(
                self._kernel,
                tp,
                partition.position,
                fetched.records,
                fetched.aborted,
                checks=self._checks,
                log_end=fetched.high_watermark,
            )
        except InvalidRecordError as error:
            self._failure = error
            return
        foreign = batches.above(partition.epoch, partition.end)
        if foreign is not None:
            batches = batches.first(foreign)
            if not foreign:
                self._suspect_cut(tp, partition)
                return
        is_progress = batches.past_offset > partition.position
        if is_progress:
            self._sizes.learn(batches)
            partition.position = batches.past_offset
            partition.stalled_since = None
            self._arrived.add(node, self._answers, batches)
            # to the end of the next request, so that each partition is the first one at some time
            self._partitions[tp] = self._partitions.pop(tp)
        if batches.damage is not None and partition.position < partition.end:
            self._suspect(batches.damage)
        if is_progress or batches.damage is not None:
            return
        end = fetched.last_stable_offset if self._committed else fetched.high_watermark
        if partition.position < end:
            # Other partitions filled the answer. Or the broker does not have what it reports, and would be
            # busy if it were asked again at once.
            partition.resumes_at = time.monotonic() + _SHORT_PAUSE_SECONDS
            if is_first:
                self._on_stall(
                    tp, partition, f"its leader sends nothing, although the log ends before offset {end}"
                )
        else:
            now = time.monotonic()
            partition.stalled_since = (partition.stalled_since or now) if partition.replica >= 0 else None
            if partition.stalled_since is not None and now - partition.stalled_since >= _STALL_SECONDS:
                self._return_to_leader(partition)  # the replica has fallen behind
            partition.resumes_at = now + _PAUSE_SECONDS
            # not before the caller has the records that arrived: it would take them for read
            if partition.reported_end < partition.position and not self._arrived.has(tp):
                partition.reported_end = partition.position
                self._events.log_ends[tp] = partition.position

    def _on_referral(self, tp: TopicPartition, replica: int, partition: Partition) -> None:
        """Reads a partition from the replica to which its leader refers (KIP-392), as Java's consumer does.

        The leader sends no records then, and does not compare the epoch that belongs to the position. A
        replica that refers further, or to itself, would have the consumer go round in circles.
        """
        if self._return_to_leader(partition):
            self._look_again([tp], f"{tp}: a replica of its leader refers to broker {replica}")
            return
        if partition.epoch >= 0 and self._arrived.has(tp):  # the caller must first get what arrived before
            self._pause(tp, f"the leader of {tp} refers to broker {replica}")
            return
        partition.replica = replica
        partition.replica_until = time.monotonic() + self._replica_seconds
        partition.replica_epoch = self.cluster.leaders.epoch(tp)
        if partition.epoch >= 0:
            self._suspect_cut(tp, partition)

    def _return_to_leader(self, partition: Partition) -> bool:
        """Reads a partition from its leader alone for a while, if it was read from a replica; else False."""
        if partition.replica < 0:
            return False
        partition.replica, partition.replica_until = -1, time.monotonic() + _LEADER_SECONDS
        return True

    def _on_diverging(self, tp: TopicPartition, diverging: tuple[int, int], partition: Partition) -> None:
        """Takes the answer of a leader whose log does not have the last epoch up to the position."""
        epoch, end = diverging
        if end < partition.end:
            self._suspect_cut(tp, partition)
        else:  # the epoch is missing, because nothing was written in it, but no record is
            partition.last_epoch = epoch

    def _suspect_cut(self, tp: TopicPartition, partition: Partition) -> None:
        """Notes that a log may be cut, once the caller has what arrived from before the cut."""
        if self._arrived.has(tp):
            self._pause(tp, f"the log of {tp} was cut")
        else:
            partition.is_waiting = True  # until `_ask_for_cuts`
            self._cut_suspects.add(tp)

    def _ask_for_cuts(self) -> None:
        """Asks leaders where the logs were cut that may be.

        Services that only resemble Kafka may send batches with any epoch, so the batches alone prove nothing.
        """
        suspects = {tp: self._partitions[tp] for tp in self._cut_suspects}
        self._cut_suspects.clear()
        epochs = {tp: each.epoch for tp, each in suspects.items()}
        deadline = Deadline.after_seconds(_CONNECT_SECONDS)
        try:
            ends = self.cluster.retried(
                f"looking up the ends of leader epochs of {', '.join(map(str, epochs))}",
                deadline,
                partial(self.cluster.epoch_ends, epochs, deadline),
            )
        except (RetriableError, UnavailableError) as error:
            for tp, each in suspects.items():
                each.replica, each.replica_until = -1, 0.0
                self._pause(tp, str(error))  # fetches again, until the timeout
            return
        for tp, each in suspects.items():
            if 0 <= ends[tp] < each.end:
                self._events.cut[tp] = ends[tp]  # the partition waits until the caller drops it
                continue
            each.is_waiting = False
            if each.replica >= 0:  # `_on_referral`
                continue
            _log.warning("%s has a record batch of a later leader epoch than its leader says", tp)
            each.epoch = each.last_epoch = -1

    def _on_refusal(self, tp: TopicPartition, code: int, partition: Partition) -> None:
        error = KafkaError(code)
        if self._return_to_leader(partition):
            self._look_again([tp], f"{tp}: a replica of its leader answers: {error.text}")
        elif code == _OUT_OF_RANGE and self._arrived.has(tp):
            self._pause(tp, f"{tp}: {error.text}")  # the caller must first get what arrived before
        elif code == _OUT_OF_RANGE:
            partition.is_waiting = True  # until the caller moves it
            self._events.out_of_range.append(tp)
        elif code in CORRUPT:
            self._suspect(_not_found(tp, partition, error.text))
        elif code in _LOOKS_AGAIN or is_transient(error):
            self._look_again([tp], f"{tp}: {error.text}")
            if code == ErrorCode.UNKNOWN_SERVER_ERROR:
                self._on_stall(tp, partition, error.text)
        else:
            self._failure = classify(error, f"reading {tp}")

    def _on_stall(self, tp: TopicPartition, partition: Partition, why: str) -> None:
        """Suspects damage if the leader of a partition has sent nothing of it for a while."""
        partition.is_slow = True
        partition.stalled_since = partition.stalled_since or time.monotonic()
        if time.monotonic() - partition.stalled_since >= _STALL_SECONDS:
            partition.stalled_since = None
            self._suspect(_not_found(tp, partition, why))

    def _suspect(self, error: DamagedBatchError) -> None:
        """Stops reading a partition until the damaged batch was examined."""
        self.last_complaint = str(error)
        partition = self._partitions[error.tp]
        replica = partition.replica
        if not error.is_too_large and self._return_to_leader(partition):
            _log.warning("%s. Broker %d, a replica, sent it like this; the leader is asked.", error, replica)
            return
        partition.is_waiting = True
        self._suspected[error.tp] = error

    def _examine(self) -> None:
        """Examines damaged batches of which the caller has what arrived before.

        Those that are too large need no examination: all copies are, and each one would be decompressed.
        """
        for tp, error in list(self._suspected.items()):
            if self._arrived.has(tp):
                continue
            del self._suspected[tp]
            partition = self._partitions[tp]
            if error.is_too_large:
                past = error.past_offset
                large = Damage(tp, error.offset, past, past, error.text, is_too_large=True)
                self._events.damaged.append(large)  # the partition waits until the caller moves it
                continue
            try:
                found = self._examination.run(error, partition.position, self._wanted)
            except TemporaryError as failure:
                self._look_again([tp], f"{error}; {failure}")
                continue
            if self._partitions.get(tp) is not partition:
                continue
            if found is None:
                self._pause(tp, f"{error}; it was intact when it was read again")
                continue
            damage, rest = found
            self._events.damaged.append(damage)  # the partition waits until the caller moves it
            if rest is not None:
                self._rests[tp] = rest

    def _fair_pause(self, started: float) -> float:
        """Returns how long a retry waits: as long as the failed call delayed the answers of other brokers."""
        return time.monotonic() - started if self._asked or self._arrived else 0.0

    def _look_again(self, tps: Collection[TopicPartition], why: str, seconds: float = 0.0) -> None:
        """Pauses partitions for at least so many seconds, and asks for a lookup of their leaders."""
        self._lookup.is_wanted = True
        for tp in tps:
            self._pause(tp, why, seconds)

    def _pause(self, tp: TopicPartition, why: str, seconds: float = 0.0) -> None:
        self.last_complaint = why
        partition = self._partitions.get(tp)
        if partition is not None:
            partition.is_waiting = False
            partition.resumes_at = time.monotonic() + max(_PAUSE_SECONDS, seconds)

    def _look_for_leaders(self) -> None:
        started = time.monotonic()
        try:
            found = self._lookup.find({tp.topic for tp in self._partitions})
        except TemporaryError as error:
            self.last_complaint = str(error)
            self._lookup.pause(self._fair_pause(started))
            return
        for tp, partition in self._partitions.items():
            self._on_metadata(tp, partition, found.codes[tp.topic], is_known=tp in found.partitions)

    def _on_metadata(self, tp: TopicPartition, partition: Partition, code: int, *, is_known: bool) -> None:
        if code not in (0, _UNKNOWN) and not is_transient(KafkaError(code)):
            self._failure = classify(KafkaError(code), f"reading {tp}")
            return
        if is_known:
            partition.unknown_since = None
            self._seen.add(tp)
            if self.cluster.leaders.of(tp) is None:
                self._look_again([tp], f"{tp} has no leader")
            return
        self._look_again([tp], f"{tp}: {KafkaError(code or _UNKNOWN).text}")
        if code not in (0, _UNKNOWN):
            return
        now = time.monotonic()
        partition.unknown_since = partition.unknown_since or now
        # a partition that this client has never seen may be too new for the brokers that it asks
        is_gone = tp in self._seen and now - partition.unknown_since >= self._propagation_seconds
        if is_gone and not self._arrived.has(tp):
            partition.is_waiting = True  # until the caller drops it
            self._events.gone.append(tp)
        else:
            self.cluster.ask_another()

    def _until_resumed(self) -> float:
        """Returns for how many seconds there is nothing to do, unless an answer arrives."""
        now = time.monotonic()
        times = [each.resumes_at for each in self._partitions.values() if each.resumes_at > now]
        if self._lookup.is_wanted:
            times.append(self._lookup.next_at)
        return max(0.001, min(times, default=now + 1.0) - now)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _not_found(tp: TopicPartition, partition: Partition, why: str) -> DamagedBatchError:
    return DamagedBatchError(tp, why, position=partition.position, offset=partition.position)

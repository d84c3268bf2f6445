"""Examines a damaged record batch: is it stored like that, where does it end, who has an intact copy.

A checksum does not cover the first offset, the length and the format of a batch, and nothing is certain of
what a batch with a wrong checksum says about itself. So only the next intact batch shows where a damaged one
ends. It is searched for in the bytes behind the damage.

If the length of a batch is wrong in the log of a broker, the broker finds nothing behind it, up to the next
entry of its index. Such records are taken from what the broker sends for an earlier offset.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from kafka.protocol.consumer import FetchRequest

from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.fetched_batches import (
    MAGIC,
    DamagedBatchError,
    FetchedBatches,
    decode,
    listed,
    what_is_wrong,
)
from kafka_eos_source.kafka.kernel import Kernel
from kafka_eos_source.kafka.messages import (
    HIGHEST,
    LOWEST,
    FetchAnswer,
    Fetched,
    Wanted,
    decoded_fetch,
    fetch_request,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.records import HEADER_BYTES
from kafka_eos_source.runtime.deadline import Deadline

#: Limits of an examination, and of one request to a broker.
_SECONDS, _REQUEST_SECONDS = 20.0, 5.0
#: How often the leader is asked, each time over a new connection, until it sends the same bytes twice.
_ATTEMPTS = 4
#: How long the leader may take to find records that it did not send at first, as in `consumer`.
_PATIENT_MS = 2000
#: Several times what brokers accept as a batch by default, so that intact batches follow the damaged one.
_MOST_BYTES = 8 << 20
#: How far before an offset that a broker does not find to ask for others at most.
_MOST_BACK = 1 << 20
#: Bytes of a batch that its length does not count; position of its length and of its format.
_NOT_COUNTED, _LENGTH, _FORMAT = 12, slice(8, 12), 16
_HEADER = struct.Struct(">qi")
_NO_END = 2**63 - 1

#: How brokers refuse a Fetch because a batch in their log has an impossible length or format.
CORRUPT = frozenset({ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD})
#: Brokers also do so for other reasons.
_UNKNOWN = ErrorCode.UNKNOWN_SERVER_ERROR


@dataclass(frozen=True)
class Damage:
    """A place in a log whose records cannot be read, because a record batch is damaged.

    Attributes:
        tp: the partition.
        offset: the first offset of the batch, as far as it is known.
        past_offset: the offset before which the damage ends; -1 = unknown.
        resume: the next offset that can be read; -1 = unknown. It is ``offset`` if the batch can be read
            nevertheless.
        text: what is wrong, and which brokers have it like that.
        leader: the broker that leads the partition.
        intact_on: other brokers that have an intact copy.
        is_too_large: whether nothing is wrong but that the records are larger than the reader allows.
    """

    tp: TopicPartition
    offset: int
    past_offset: int
    resume: int
    text: str
    leader: int = -1
    intact_on: tuple[int, ...] = ()
    is_too_large: bool = False

    def __str__(self) -> str:
        offsets = f"offset {self.offset}"
        if self.past_offset != self.offset + 1:
            last = self.past_offset - 1 if self.past_offset >= 0 else "an unknown one"
            offsets = f"offsets {self.offset} to {last}"
        what = "too large" if self.is_too_large else "damaged"
        return f"{offsets} of {self.tp} cannot be read, because the record batch is {what}: {self.text}."

    @property
    def repair(self) -> str:
        """How to repair the partition, as the beginning of a sentence."""
        if self.is_too_large:
            return "find out who wrote the batch: what compresses so well is rarely meant to be read"
        if self.intact_on:
            return (
                f"make broker {self.intact_on[0]} the leader of the partition (kafka-reassign-partitions.sh "
                "with it as the first replica, then kafka-leader-election.sh --election-type PREFERRED), "
                f"start the query again, and let broker {self.leader} copy the partition again"
            )
        return (
            "check the disk of the broker, restore its log from a copy if there is one, and start the query "
            "again"
        )


@dataclass(frozen=True)
class _Answered:
    """A broker's answer.

    Attributes:
        position: the offset that it was asked for.
        fetched: what it sent.
        damage: what is wrong with that; None = nothing.
    """

    position: int
    fetched: Fetched
    damage: DamagedBatchError | None


class Examination:
    """Examines damaged record batches.

    Args:
        kernel: the C kernel.
        cluster: the brokers.
        committed: whether the reader must not see records of aborted transactions.
        checks: whether to check checksums.
        most_bytes: the most memory that the records of one compressed batch may need.
    """

    def __init__(
        self, kernel: Kernel, cluster: Cluster, *, committed: bool, checks: bool, most_bytes: int
    ) -> None:
        self._kernel = kernel
        self._cluster = cluster
        self._committed = committed
        self._checks = checks
        self._most_bytes = most_bytes

    def run(
        self, suspected: DamagedBatchError, position: int, wanted: int
    ) -> tuple[Damage, FetchedBatches | None] | None:
        """Reads a batch again from its leader, over new connections, and from the other replicas.

        Args:
            suspected: what was found first.
            position: the next offset that the reader wants.
            wanted: the contents that it wants; see `kernel.WANT_KEY`.

        Returns:
            What is wrong, and what follows it, as far as that is known; None if the leader now sends the
            batch intact.

        Raises:
            TemporaryError: if the leader does not answer.
            InvalidRecordError: if the leader now sends an old format.
        """
        tp, deadline = suspected.tp, Deadline.after_seconds(_SECONDS)
        metadata = self._cluster.metadata([tp.topic], deadline)
        leader = self._cluster.leaders.of(tp)
        if leader is None:
            raise TemporaryError(f"{tp} has no leader")
        place = max(position, suspected.offset)
        seen, is_stored = {(suspected.offset, suspected.digest)}, False
        for _ in range(_ATTEMPTS):
            found = self._ask(leader, tp, suspected.position, position, wanted, deadline, _PATIENT_MS)
            if found.damage is None or found.damage.offset > place:
                return None
            shown = (found.damage.offset, found.damage.digest)
            is_stored = shown in seen
            seen.add(shown)
            if is_stored:
                break
        assert found.damage is not None
        reads = found
        data = found.fetched.records
        if not len(data) or (found.damage.at == 0 and _HEADER.unpack_from(data)[0] > position):
            reads = self._before(leader, tp, position, wanted, deadline) or found
        damage, rest = self._placed(found, reads, position)
        while rest is not None and damage.resume <= position:
            further = self._first_damage(rest, position, wanted)
            if further is None or further.offset > position:
                break
            # the position is not only behind a damage, but is damaged itself
            fetched = replace(reads.fetched, records=rest.data, aborted=rest.aborted)
            reads = _Answered(rest.position, fetched, further)
            damage, rest = self._placed(found, reads, position)
        if damage.resume < 0:
            past = self._next_found(leader, found.damage, max(position, damage.offset), deadline)
            damage = replace(damage, past_offset=past, resume=past)
        if rest is None and damage.resume >= 0:
            rest = self._behind(reads, damage)
        how = "every time" if is_stored else "with other bytes each time: suspect its memory or the network"
        texts = [damage.text, f"broker {leader}, the leader, sends it like this {how}"]
        intact_on = []
        for node in _replicas(metadata, tp):
            if node != leader:
                is_intact, text = self._copy(node, tp, damage.offset, wanted, deadline)
                texts.append(text)
                intact_on += [node] * is_intact
        return replace(damage, text="; ".join(texts), leader=leader, intact_on=tuple(intact_on)), rest

    # -- requests --------------------------------------------------------------------------------

    def _ask(
        self,
        node: int,
        tp: TopicPartition,
        position: int,
        needed: int,
        wanted: int,
        deadline: Deadline,
        wait_ms: int = 0,
    ) -> _Answered:
        """Fetches from a broker over a new connection.

        Args:
            node: id of the broker.
            tp: the partition.
            position: the offset to ask for.
            needed: the first batch behind this offset is decoded.
            wanted: the contents to decode.
            deadline: limits the request, as `_REQUEST_SECONDS` does.
            wait_ms: how long the broker may wait for records.

        Raises:
            TemporaryError: if there is no answer, or one that says nothing about damage.
        """
        deadline = Deadline.after_seconds(deadline.remaining_seconds(_REQUEST_SECONDS))
        connection = self._cluster.new_connection(node, deadline)
        request = fetch_request(
            connection.version(FetchRequest, HIGHEST, LOWEST),
            {tp: Wanted(position, _MOST_BYTES)},
            committed=self._committed,
            wait_ms=wait_ms,
            least_bytes=1,
            most_bytes=_MOST_BYTES,
        )
        answer: FetchAnswer = self._cluster.ask(connection, request, deadline, decoded_fetch)
        if answer.error_code or not answer.partitions:
            raise TemporaryError(f"broker {connection.address} refused the request")
        fetched = answer.partitions[0]
        if fetched.error_code and fetched.error_code not in CORRUPT | {_UNKNOWN}:
            raise TemporaryError(f"broker {connection.address}: {KafkaError(fetched.error_code).text}")
        if fetched.replica >= 0:
            raise TemporaryError(f"broker {connection.address}: it refers to broker {fetched.replica}")
        return _Answered(position, fetched, self._damage(position, fetched, needed, wanted))

    def _before(
        self, leader: int, tp: TopicPartition, position: int, wanted: int, deadline: Deadline
    ) -> _Answered | None:
        """Fetches from an offset before a damaged batch, so that an intact one comes first.

        Returns:
            What comes nearest to that; None if the broker sends nothing.
        """
        back, nearest = 1, None
        while back <= min(_MOST_BACK, 2 * position):
            try:
                found = self._ask(leader, tp, max(0, position - back), position, wanted, deadline)
            except TemporaryError:  # the log may begin later
                break
            if len(found.fetched.records):
                nearest = found
                if found.damage is None or found.damage.at > 0:
                    break
            back *= 2
        return nearest

    def _next_found(self, leader: int, shown: DamagedBatchError, position: int, deadline: Deadline) -> int:
        """Returns the first offset behind a damaged one that the leader answers otherwise; -1 = unknown.

        The leader answers alike for all offsets between the two: it sends the same batch, or refuses them.
        """

        def is_behind(offset: int) -> bool:
            answered = self._ask(leader, shown.tp, offset, offset, 0, deadline).damage
            return answered is None or answered.offset > offset or answered.digest != shown.digest

        def may_be_behind(offset: int) -> bool:
            try:
                return is_behind(offset)
            except TemporaryError:  # behind the end of the log
                return True

        before, step = position, 1
        while not may_be_behind(before + step):
            before, step = before + step, 2 * step
        found = before + step
        while found - before > 1:
            middle = (before + found) // 2
            before, found = (before, middle) if may_be_behind(middle) else (middle, found)
        try:
            return found if is_behind(found) else -1
        except TemporaryError:
            return -1

    def _copy(
        self, node: int, tp: TopicPartition, offset: int, wanted: int, deadline: Deadline
    ) -> tuple[bool, str]:
        """Returns whether a follower has an intact copy of a batch, and a clause that says so."""
        try:
            found = self._ask(node, tp, offset, offset, wanted, deadline)
        except TemporaryError as error:
            return False, f"broker {node} was not asked for its copy ({error})"
        if found.damage is not None and found.damage.offset <= offset:
            return False, f"the copy of broker {node} is damaged, too"
        if not len(found.fetched.records):
            return False, f"broker {node} has no copy"
        return True, f"broker {node} has an intact copy"

    # -- what was sent ---------------------------------------------------------------------------

    def _damage(self, position: int, fetched: Fetched, needed: int, wanted: int) -> DamagedBatchError | None:
        """Returns what is wrong with an answer up to the first batch that is needed, or behind it."""
        tp, end = fetched.tp, self._end(fetched)
        text = ""
        if fetched.error_code:
            text = f"the broker refuses to read it ({KafkaError(fetched.error_code).text})"
        elif not len(fetched.records) and position < end:
            text = f"the broker does not find it, although the log ends before offset {end}"
        if text or not len(fetched.records):
            return DamagedBatchError(tp, text, position=position, offset=position) if text else None
        return self._first_damage(self._listed(position, fetched), needed, wanted)

    def _first_damage(self, found: FetchedBatches, needed: int, wanted: int) -> DamagedBatchError | None:
        """Returns what is wrong with the first batch behind an offset, or else what ends the list."""
        first = found.batches[found.batches["past_offset"] > needed][:1]
        try:
            # as uncommitted, because a marker before it may end its transaction
            for _ in decode(
                self._kernel,
                wanted,
                [(replace(found, batches=first), _NO_END)],
                committed=False,
                most_bytes=self._most_bytes,
            ):
                pass
        except DamagedBatchError as error:
            if not error.is_too_large:  # of which the reader finds out itself
                return error
        return found.damage

    def _listed(self, position: int, fetched: Fetched) -> FetchedBatches:
        """Lists the batches, up to one whose length is too large."""
        data = fetched.records
        found = FetchedBatches.of(
            self._kernel,
            fetched.tp,
            position,
            data,
            fetched.aborted,
            checks=self._checks,
            log_end=fetched.high_watermark,
        )
        past = int((found.batches["at"] + found.batches["bytes"])[-1]) if len(found.batches) else 0
        # The broker cuts the last batch off if there is no room for it, and never the first one.
        may_be_cut = past > 0 and len(data) >= _MOST_BYTES
        if found.damage is not None or past == len(data) or may_be_cut:
            return found
        cut = DamagedBatchError(
            fetched.tp,
            what_is_wrong(self._kernel, data[past:]),
            position=position,
            offset=found.past_offset,
            at=past,
            digest=1,
        )
        return replace(found, damage=cut)

    def _end(self, fetched: Fetched) -> int:
        return fetched.last_stable_offset if self._committed else fetched.high_watermark

    # -- where the damage ends -------------------------------------------------------------------

    def _placed(
        self, found: _Answered, reads: _Answered, position: int
    ) -> tuple[Damage, FetchedBatches | None]:
        """Returns where the damage begins and ends, and what follows if the broker does not find it.

        Args:
            found: the answer for the damaged batch.
            reads: the same, or the answer for an earlier offset if the broker does not find the batch.
            position: the next offset that the reader wants.
        """
        tp, error = found.fetched.tp, reads.damage
        assert found.damage is not None
        data = reads.fetched.records
        if error is None or not len(data) or error.offset > max(position, found.damage.offset):
            return Damage(tp, found.damage.offset, -1, -1, found.damage.text), None
        text = error.text if reads is found else f"{error.text}; {found.damage.text}"
        following = self._next_intact(data, error.at, error.offset, reads.fetched.high_watermark)
        past = error.past_offset
        if past < 0 and following >= 0:
            past = _HEADER.unpack_from(data, following)[0]
        mended = self._mended(reads, error, following if following >= 0 else len(data))
        if mended is not None:
            past = int(mended.batches[0]["past_offset"])
            return Damage(tp, error.offset, past, max(position, error.offset), text), mended
        damage = Damage(tp, error.offset, past, max(position, past) if past >= 0 else -1, text)
        return damage, None if reads is found else self._behind(reads, damage)

    def _next_intact(self, data: memoryview, at: int, offset: int, log_end: int) -> int:
        """Returns where the next intact batch begins behind ``at`` that has higher offsets; -1 = none."""
        everything = bytes(data)
        place = everything.find(MAGIC, at + _FORMAT + 1)
        while place >= 0:
            begin = place - _FORMAT
            if begin + HEADER_BYTES > len(data):
                break
            first, length = _HEADER.unpack_from(data, begin)
            if offset < first < log_end and HEADER_BYTES <= length + _NOT_COUNTED <= len(data) - begin:
                batches = listed(self._kernel, data[begin : begin + length + _NOT_COUNTED])
                if len(batches) == 1 and batches[0]["is_intact"] and batches[0]["past_offset"] <= log_end:
                    return begin
            place = everything.find(MAGIC, place + 1)
        return -1

    def _mended(self, reads: _Answered, error: DamagedBatchError, past: int) -> FetchedBatches | None:
        """Returns a batch, and what follows it, if only its length or format are wrong.

        Its checksum covers neither, and proves everything else.

        Args:
            reads: what the broker sent.
            error: the damage in it.
            past: where the next intact batch begins.
        """
        data = reads.fetched.records
        if past - error.at < HEADER_BYTES:
            return None
        mended = bytearray(data[error.at :])
        mended[_LENGTH] = (past - error.at - _NOT_COUNTED).to_bytes(4, "big")
        mended[_FORMAT : _FORMAT + 1] = MAGIC
        if mended[:HEADER_BYTES] == data[error.at : error.at + HEADER_BYTES]:
            return None
        found = self._from(reads, error.offset, memoryview(mended))
        is_mended = len(found.batches) > 0 and found.batches[0]["first_offset"] == error.offset
        return found if is_mended else None

    def _behind(self, reads: _Answered, damage: Damage) -> FetchedBatches | None:
        """Returns the batches that follow a damage immediately; None if there are none."""
        data, error = reads.fetched.records, reads.damage
        if error is None:
            return None
        if error.past_offset >= 0:  # the length of the batch is right
            begin = error.at + _NOT_COUNTED + _HEADER.unpack_from(data, error.at)[1]
        else:
            begin = self._next_intact(data, error.at, error.offset, reads.fetched.high_watermark)
        found = None if begin < 0 else self._from(reads, damage.past_offset, data[begin:])
        return found if found is not None and len(found.batches) else None

    def _from(self, reads: _Answered, position: int, data: memoryview) -> FetchedBatches:
        """Lists batches that follow a damage.

        The broker named the aborted transactions from an earlier offset on. Those that ended before the
        damage would hide the committed records of their producers behind it.

        Raises:
            TemporaryError: if a marker before the damage cannot be decoded.
        """
        fetched = reads.fetched
        try:
            aborted = self._listed(reads.position, fetched).left_open()
        except DamagedBatchError as error:
            raise TemporaryError(str(error)) from error
        return FetchedBatches.of(
            self._kernel, fetched.tp, position, data, aborted, log_end=fetched.high_watermark
        )


def _replicas(metadata: Any, tp: TopicPartition) -> Collection[int]:
    """Returns the nodes that have a copy of a partition, as the answer to a Metadata request names them."""
    for topic in metadata.topics or ():
        if topic.name == tp.topic:
            for each in topic.partitions or ():
                if each.partition_index == tp.partition:
                    return list(each.replica_nodes or ())
    return ()

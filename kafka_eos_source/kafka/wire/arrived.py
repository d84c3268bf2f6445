"""What brokers sent to a consumer and its caller does not have yet."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from kafka_eos_source.kafka.kernel import Kernel
from kafka_eos_source.kafka.wire.fetched_batches import FetchedBatches, Part, decode
from kafka_eos_source.model import TopicPartition

#: Batches of several partitions are decoded at once while they have at most this many bytes. Decoding each of
#: 1,000 partitions with a few records alone took 0.3 s.
_GROUP_BYTES = 1 << 20


class Arrived:
    """Fetched batches in the order of their arrival.

    Args:
        kernel: the C kernel.
        committed: whether the reader must not see records of aborted transactions.
        most_bytes: the most memory that the records of one compressed batch may need.
    """

    def __init__(self, kernel: Kernel, *, committed: bool, most_bytes: int) -> None:
        self._kernel = kernel
        self._committed = committed
        self._most_bytes = most_bytes
        #: The node, the number of its answer, and the batches.
        self._fetched: deque[tuple[int, int, FetchedBatches]] = deque()
        self._of_partition: Counter[TopicPartition] = Counter()
        #: Decodes the first so many of `_fetched`; None = nothing of them was decoded.
        self._parts: Iterator[Part] | None = None
        self._in_parts = 0

    def __len__(self) -> int:
        """Returns how often batches of a partition arrived."""
        return len(self._fetched)

    @property
    def size_bytes(self) -> int:
        """Size of the batches, as brokers sent them."""
        return sum(len(batches.data) for *_, batches in self._fetched)

    def has(self, tp: TopicPartition) -> bool:
        """Returns whether something of a partition has arrived."""
        return self._of_partition[tp] > 0

    def answers(self) -> Counter[int]:
        """Returns the number of answers, by node."""
        return Counter(node for node, _ in {each[:2] for each in self._fetched})

    def add(self, node: int, answer: int, batches: FetchedBatches) -> None:
        """Adds what a node sent of one partition in an answer."""
        self._fetched.append((node, answer, batches))
        self._of_partition[batches.tp] += 1

    def drop(self, tps: Collection[TopicPartition]) -> None:
        """Discards what has arrived of these partitions."""
        if not any(self._of_partition[tp] for tp in tps):
            return
        if any(batches.tp in tps for *_, batches in islice(self._fetched, self._in_parts)):
            self._start_again()
        self._fetched = deque(each for each in self._fetched if each[-1].tp not in tps)
        for tp in tps:
            del self._of_partition[tp]

    def keep_before(self, tp: TopicPartition, offset: int) -> None:
        """Discards what has arrived of a partition from a record batch on; the rest is decoded again."""
        if any(batches.tp == tp for *_, batches in islice(self._fetched, self._in_parts)):
            self._start_again()
        kept: deque[tuple[int, int, FetchedBatches]] = deque()
        for node, answer, batches in self._fetched:
            left = batches.before(offset) if batches.tp == tp else batches
            if len(left.batches):
                kept.append((node, answer, left))
        self._fetched = kept
        self._of_partition = Counter(batches.tp for *_, batches in kept)

    def clear(self) -> None:
        """Discards everything."""
        self._fetched.clear()
        self._of_partition.clear()
        self._start_again()

    def next_part(self, wanted: int, end: Callable[[TopicPartition], int]) -> Part:
        """Decodes the next messages. Those of other partitions may come again after `drop`.

        Args:
            wanted: the contents to copy; see `kernel.WANT_KEY`.
            end: returns the offset of a partition from which on nothing is wanted.

        Raises:
            DamagedBatchError: if records cannot be decoded, or are too large. Call `keep_before` before the
                next call.
        """
        if self._parts is None:
            group = self._group()
            self._in_parts = len(group)
            pairs = [(each, end(each.tp)) for each in group]
            self._parts = decode(
                self._kernel, wanted, pairs, committed=self._committed, most_bytes=self._most_bytes
            )
        part = next(self._parts)
        while self._in_parts and part.reached.get(self._fetched[0][-1].tp, -1) >= self._past_first():
            *_, batches = self._fetched.popleft()
            self._of_partition[batches.tp] -= 1
            self._in_parts -= 1
        if not self._in_parts:
            self._start_again()
        return part

    def _start_again(self) -> None:
        self._parts, self._in_parts = None, 0

    def _past_first(self) -> int:
        *_, batches = self._fetched[0]
        return batches.past_offset

    def _group(self) -> list[FetchedBatches]:
        group: dict[TopicPartition, FetchedBatches] = {}
        size = 0
        for *_, batches in self._fetched:
            size += len(batches.data)
            # Two answers of a partition may overlap; their reader sees that only if it gets them one by one.
            if group and (size > _GROUP_BYTES or batches.tp in group):
                break
            group[batches.tp] = batches
        return [*group.values()]

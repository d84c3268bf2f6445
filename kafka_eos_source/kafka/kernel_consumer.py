"""`AssignedConsumer` without a Python object a message: what is fetched goes into Arrow's buffers at once.

confluent-kafka's callbacks (errors, logs, statistics, tokens) expect to be run by a call of its own, and end
the process when they are not. So the kernel never serves the client's own queue. The queues of the assigned
partitions are forwarded to one of ours, which holds messages and events of partitions; the client is polled
now and then for the rest.

librdkafka facts this rests on (rdkafka_queue.c, rdkafka_partition.c, rdkafka_assignment.c):

- A forward set by the application (RD_KAFKA_Q_F_FWD_APP) is kept when fetching starts; the first one has to
  be set before.
- Stopping to fetch clears the forward, in librdkafka's main thread, after ``unassign`` has returned. Any
  answered request to that thread (`_settle`) comes after it.
- Setting a forward moves what is in the queue already. So one that was lost after all, and is set again,
  costs a wait and loses nothing.
- What is left in our queue of a partition that was unassigned is outdated: the next look at the queue throws
  it away.
- A partition that is not there any more puts an RD_KAFKA_OP_ERR into its queue, for which confluent-kafka's
  own calls run the error callback (kernel.c says how the kernel does not).
- A client is not destroyed while a handle of one of its queues is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from ctypes import c_char_p, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaTopicPartition

from kafka_eos_source.kafka.consumer import AssignedConsumer, Taken
from kafka_eos_source.kafka.failure import classify
from kafka_eos_source.kafka.kernel import (
    WANT_HEADERS,
    WANT_KEY,
    WANT_TIMESTAMP,
    WANT_VALUE,
    choice,
)
from kafka_eos_source.kafka.kernel_messages import Block, KernelMessages
from kafka_eos_source.kafka.native import client_pointer, function
from kafka_eos_source.model import TopicPartition

#: The client is asked for errors and other callbacks about this often, and a wait looks up.
_HEAR_SECONDS = 0.1

#: Of one look; what is beyond it goes back into the queue. librdkafka has fetched no more than
#: ``queued.max.messages.kbytes`` (64 MiB) and a fetch, so this bounds what is otherwise bounded already.
_LOOK_BYTES = 256 << 20

_WANTS = {
    "key": WANT_KEY,
    "value": WANT_VALUE,
    "timestamp": WANT_TIMESTAMP,
    "timestampType": WANT_TIMESTAMP,
    "headers": WANT_HEADERS,
}


@dataclass(frozen=True, slots=True)
class _Event:
    """What came in the place of a message, through the accessors of confluent-kafka's."""

    tp: TopicPartition | None
    at: int
    failure: KafkaError

    def topic(self) -> str | None:
        return self.tp.topic if self.tp else None

    def partition(self) -> int:
        return self.tp.partition if self.tp else -1

    def offset(self) -> int:
        return self.at

    def error(self) -> KafkaError:
        return self.failure


class KernelConsumer(AssignedConsumer):
    """Takes `KernelMessages`. Not thread-safe.

    Args:
        conf: from `kafka.config.consumer_config`.

    Raises:
        InvalidOptionError: librdkafka refuses a property, or two of them together.
    """

    drains = True

    def __init__(self, conf: Mapping[str, str]) -> None:
        kernel = choice().kernel
        if kernel is None:
            raise ValueError("there is no kernel here: use AssignedConsumer")
        super().__init__(conf)
        self._kernel = kernel
        self._pid = os.getpid()
        self._pointer = client_pointer(self._client)
        self._queue: int | None = function("rd_kafka_queue_new", c_void_p, c_void_p)(self._pointer)
        #: Handles of the queues of the assigned partitions.
        self._sources: dict[TopicPartition, int] = {}
        self._wanted = sum(set(_WANTS.values()))
        self._unsettled = False
        self._next_hear = 0.0

    def want(self, columns: Collection[str]) -> None:
        self._wanted = 0
        for name in columns:
            self._wanted |= _WANTS.get(name, 0)

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        if self._sources:
            self.release()
        self._forward(positions)
        super().assign(positions)

    def move(self, tp: TopicPartition, position: int) -> None:
        self.drop([tp])
        self._forward([tp])
        self._client.incremental_assign([KafkaTopicPartition(tp.topic, tp.partition, position)])

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        super().drop(tps)
        self._unsettled = True
        self._forget(tps)

    def take(self, at_most: int, wait_seconds: float) -> Taken:
        """What is there now, and no less: ``at_most`` is to be all that the caller will ever need."""
        block = self._look(at_most, 0.0)
        if block is not None:
            return self._sorted(block, self._hear() if time.monotonic() >= self._next_hear else [])
        past = time.monotonic() + wait_seconds
        while True:
            events = self._hear()
            if self._refused is not None:
                raise classify(self._refused, "reading")
            if events:
                return self._sort(events)
            left = past - time.monotonic()
            block = self._look(at_most, max(0.0, min(left, _HEAR_SECONDS)))
            if block is not None:
                return self._sorted(block, [])
            if time.monotonic() >= past:
                return Taken(())
            self._forward_again()

    def release(self) -> None:
        super().release()
        self._unsettled = True
        self._forget(list(self._sources))
        self._settle()
        self._look(1, 0.0)  # of partitions that were unassigned: all is thrown away

    def close(self) -> None:
        if self._queue is not None:
            self.release()
            self._free_handles()
        super().close()

    def __del__(self) -> None:
        """Without `close`, the client's own end would wait for its handles without end."""
        if getattr(self, "_queue", None) is not None and self._pid == os.getpid():
            self._free_handles()

    # -- inside ----------------------------------------------------------------------------------

    def _free_handles(self) -> None:
        self._forget(list(self._sources))
        function("rd_kafka_queue_destroy", None, c_void_p)(self._queue)
        self._queue = None

    def _look(self, at_most: int, wait_seconds: float) -> Block | None:
        found = self._kernel.take(self._queue, int(wait_seconds * 1000), at_most, _LOOK_BYTES, self._wanted)
        if not found:
            raise MemoryError("no memory for what was fetched")
        block = Block(self._kernel, found)
        return block if block.rows or len(block.events) else None

    def _sorted(self, block: Block, heard: Sequence[Any]) -> Taken:
        """``heard``: what the client had to say besides."""
        messages = KernelMessages(block, 0, block.rows)
        if not len(block.events) and not heard:
            return Taken(messages)
        events = list(heard)
        for found in block.events:
            tp = None
            if found["topic"]:
                tp = TopicPartition(block.topic_names[int(found["topic"])], int(found["partition"]))
            event = _Event(tp, int(found["offset"]), _kafka_error(found))
            if tp is not None and event.failure.str().startswith(f"{tp.topic} [{tp.partition}]: "):
                # rd_kafka_toppar_enq_error, in whose text alone the partition comes first: the metadata has
                # no such partition at the moment. Elsewhere it comes by the error callback.
                self._on_error(event.failure)
            else:
                events.append(event)
        taken = self._sort(events)
        taken.messages = messages
        return taken

    def _hear(self) -> list[Any]:
        """Runs the client's callbacks, and what it has to say of no partition of ours."""
        self._next_hear = time.monotonic() + _HEAR_SECONDS
        events = []
        while (event := self._client.poll(0)) is not None:
            if event.error() is None:
                raise RuntimeError(
                    f"librdkafka handed a record of {event.topic()}-{event.partition()} to the wrong queue; "
                    "KAFKA_EOS_NATIVE=0 reads without the kernel"
                )
            events.append(event)
        return events

    def _settle(self) -> None:
        """Until what was unassigned has stopped: it takes its forward along."""
        if self._unsettled:
            self._client.assignment()
            self._unsettled = False

    def _forward(self, tps: Mapping[TopicPartition, int] | Sequence[TopicPartition]) -> None:
        self._settle()
        get = function("rd_kafka_queue_get_partition", c_void_p, c_void_p, c_char_p, c_int32)
        for tp in tps:
            source = get(self._pointer, tp.topic.encode(), tp.partition)
            if source is not None:  # else no topic can have such a name, and assigning it says so
                self._sources[tp] = source
                _forward(source, self._queue)

    def _forward_again(self) -> None:
        for source in self._sources.values():
            _forward(source, self._queue)

    def _forget(self, tps: Sequence[TopicPartition]) -> None:
        destroy = function("rd_kafka_queue_destroy", None, c_void_p)
        for tp in tps:
            source = self._sources.pop(tp, None)
            if source is not None:
                destroy(source)


def range_consumer() -> type[AssignedConsumer]:
    """Which of the two reads ranges in this process."""
    return AssignedConsumer if choice().kernel is None else KernelConsumer


def _forward(source: int, queue: int | None) -> None:
    function("rd_kafka_queue_forward", None, c_void_p, c_void_p)(source, queue)


def _kafka_error(found: Any) -> KafkaError:
    text = bytes(found["text"]).decode(errors="replace")
    return KafkaError(int(found["err"]), text) if text else KafkaError(int(found["err"]))

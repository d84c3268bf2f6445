"""An `AssignedConsumer` that copies messages straight into Arrow buffers, without a Python object for each.

confluent-kafka's callbacks (for errors, logs, statistics and OAuth tokens) must run inside one of its own
calls; elsewhere they kill the process. So the kernel never reads the client's own queue. Instead, this module
forwards the queues of the assigned partitions to a queue of its own, which then contains only messages and
events of partitions. It polls the client from time to time for all other events.

The module relies on this behaviour of librdkafka (rdkafka_queue.c, rdkafka_partition.c,
rdkafka_assignment.c):

- A forward that the application set (RD_KAFKA_Q_F_FWD_APP) survives the start of fetching. It must be set
  before that.
- When fetching stops, librdkafka's main thread clears the forward, after ``unassign`` has returned. A later
  request to that thread is answered only after that (`_await_unassigned`).
- Setting a forward also moves what is in the queue already. So if a forward was cleared unexpectedly, setting
  it again costs time but loses nothing.
- Messages of an unassigned partition that remain in our queue are outdated; the next read of the queue
  discards them.
- A partition that no longer exists puts an RD_KAFKA_OP_ERR into its queue. confluent-kafka's own calls run
  the error callback for it; kernel.c describes how the kernel avoids that.
- A client cannot be destroyed while a handle of one of its queues exists.
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
from kafka_eos_source.kafka.kernel import WANTS, choice, wants
from kafka_eos_source.kafka.kernel_messages import Block, KernelMessages
from kafka_eos_source.kafka.native import client_pointer, function
from kafka_eos_source.model import Epochs, TopicPartition

#: How often the client is polled for errors and other callbacks, also during a wait.
_POLL_SECONDS = 0.1

#: Most bytes of one read of the queue; further messages stay in it. This is only a safeguard: librdkafka
#: prefetches at most ``queued.max.messages.kbytes`` (64 MiB) and one fetch.
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Event:
    """An event in place of a message, with the accessors of confluent-kafka's ``Message``."""

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
    """A consumer whose `take` returns `KernelMessages`. Not thread-safe.

    Args:
        conf: properties from `kafka.config.consumer_config`.

    Raises:
        InvalidOptionError: if librdkafka rejects a property, or a combination of properties.
    """

    drains = True

    def __init__(self, conf: Mapping[str, str]) -> None:
        kernel = choice().kernel
        if kernel is None:
            raise ValueError(f"the C kernel is not available ({choice().why_not}); use AssignedConsumer")
        super().__init__(conf)
        self._kernel = kernel
        self._pid = os.getpid()
        #: Queue handles of the assigned partitions.
        self._sources: dict[TopicPartition, int] = {}
        self._wanted = wants(WANTS)
        self._is_unassigning = False
        self._next_poll = 0.0

    def _connect(self) -> None:
        super()._connect()
        self._pointer = client_pointer(self._client)
        self._queue: int | None = function("rd_kafka_queue_new", c_void_p, c_void_p)(self._pointer)

    def want(self, columns: Collection[str]) -> None:
        self._wanted = wants(columns)

    def assign(
        self,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int] | None = None,
        epochs: Epochs | None = None,
    ) -> None:
        if self._sources:
            self.release()
        self._forward(positions)
        super().assign(positions, ends, epochs)

    def move(self, tp: TopicPartition, position: int) -> None:
        self.drop([tp])
        self._forward([tp])
        self._client.incremental_assign([KafkaTopicPartition(tp.topic, tp.partition, position)])

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        super().drop(tps)
        self._is_unassigning = True
        self._free_sources(tps)

    def take(self, at_most: int, wait_seconds: float) -> Taken:
        """Returns everything that is queued; if nothing is, waits up to ``wait_seconds``.

        Args:
            at_most: the number of messages that the caller needs in total, not only in this call.
            wait_seconds: longest wait for a message or event.

        Raises:
            AuthorizationError, KafkaEosError: under the same conditions as `AssignedConsumer.take`.
        """
        block = self._read_queue(at_most, 0.0)
        if block is not None:
            return self._sorted(block, self._poll() if time.monotonic() >= self._next_poll else [])
        past = time.monotonic() + wait_seconds
        while True:
            events = self._poll()
            self._raise_if_refused()
            if events:
                return self._sort(events)
            left = past - time.monotonic()
            block = self._read_queue(at_most, max(0.0, min(left, _POLL_SECONDS)))
            if block is not None:
                return self._sorted(block, [])
            if time.monotonic() >= past:
                return Taken(())
            self._forward_again()

    def release(self) -> None:
        super().release()
        self._is_unassigning = True
        self._free_sources(list(self._sources))
        self._await_unassigned()
        self._read_queue(1, 0.0)  # discards everything, because it belongs to unassigned partitions

    def close(self) -> None:
        if self._queue is not None:
            self.release()
            self._free_handles()
        super().close()

    def __del__(self) -> None:
        """Frees the handles if `close` was not called: the client's own end would wait for them forever."""
        if getattr(self, "_queue", None) is not None and self._pid == os.getpid():
            self._free_handles()

    # -- inside ----------------------------------------------------------------------------------

    def _free_handles(self) -> None:
        self._free_sources(list(self._sources))
        function("rd_kafka_queue_destroy", None, c_void_p)(self._queue)
        self._queue = None

    def _read_queue(self, at_most: int, wait_seconds: float) -> Block | None:
        found = self._kernel.take(self._queue, int(wait_seconds * 1000), at_most, _MAX_BYTES, self._wanted)
        if not found:
            raise MemoryError("not enough memory for the fetched messages")
        block = Block(self._kernel, found)
        return block if block.rows or len(block.events) else None

    def _sorted(self, block: Block, polled: Sequence[Any]) -> Taken:
        """Returns the block's messages, together with the events of the block and of the client's poll."""
        if block.rows:
            self._complaints.answered()
        messages = KernelMessages(block, 0, block.rows)
        if not len(block.events) and not polled:
            return Taken(messages)
        events = list(polled)
        for found in block.events:
            tp = None
            if found["topic"]:
                tp = TopicPartition(block.topic_names[int(found["topic"])], int(found["partition"]))
            event = _Event(tp, int(found["offset"]), _kafka_error(found))
            if tp is not None and event.failure.str().startswith(f"{tp.topic} [{tp.partition}]: "):
                # from rd_kafka_toppar_enq_error, the only source of texts that begin with the partition: the
                # metadata lacks the partition at the moment. Other clients get this in the error callback.
                self._on_error(event.failure)
            else:
                events.append(event)
        taken = self._sort(events)
        taken.messages = messages
        return taken

    def _poll(self) -> list[Any]:
        """Runs the client's callbacks, and returns events that belong to no assigned partition."""
        self._next_poll = time.monotonic() + _POLL_SECONDS
        events = []
        while (event := self._client.poll(0)) is not None:
            if event.error() is None:
                raise RuntimeError(
                    f"librdkafka put a record of {event.topic()}-{event.partition()} into the wrong queue; "
                    "set the environment variable KAFKA_EOS_NATIVE=0 to read without the C kernel"
                )
            events.append(event)
        return events

    def _await_unassigned(self) -> None:
        """Waits until librdkafka has stopped fetching unassigned partitions and forwarding their queues."""
        if self._is_unassigning:
            self._client.assignment()
            self._is_unassigning = False

    def _forward(self, tps: Mapping[TopicPartition, int] | Sequence[TopicPartition]) -> None:
        self._await_unassigned()
        get = function("rd_kafka_queue_get_partition", c_void_p, c_void_p, c_char_p, c_int32)
        for tp in tps:
            source = get(self._pointer, tp.topic.encode(), tp.partition)
            if source is not None:  # None: the topic's name is invalid, and assigning it raises an error
                self._sources[tp] = source
                _forward(source, self._queue)

    def _forward_again(self) -> None:
        for source in self._sources.values():
            _forward(source, self._queue)

    def _free_sources(self, tps: Sequence[TopicPartition]) -> None:
        destroy = function("rd_kafka_queue_destroy", None, c_void_p)
        for tp in tps:
            source = self._sources.pop(tp, None)
            if source is not None:
                destroy(source)


def range_consumer() -> type[AssignedConsumer]:
    """Returns the class of consumer that reads ranges in this process."""
    return AssignedConsumer if choice().kernel is None else KernelConsumer


def _forward(source: int, queue: int | None) -> None:
    function("rd_kafka_queue_forward", None, c_void_p, c_void_p)(source, queue)


def _kafka_error(found: Any) -> KafkaError:
    text = bytes(found["text"]).decode(errors="replace")
    return KafkaError(int(found["err"]), text) if text else KafkaError(int(found["err"]))

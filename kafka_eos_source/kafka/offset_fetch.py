"""Sends an OffsetFetch request for a group through a consumer's handle; stable offsets (KIP-447) or not.

`AdminClient.list_consumer_group_offsets` sends the same request through a producer's handle, which has no
group state. The error NOT_COORDINATOR, which is normal while a coordinator moves or a cluster is new, then
kills the process with a segmentation fault (librdkafka issue 5040). A consumer's handle has the group state.

The time limit is not passed to librdkafka either. If it passed before librdkafka found the coordinator, and
librdkafka found it later, an assertion would kill the process (librdkafka issue 4605). Instead, this module
waits for the answer itself, and abandons a request that takes too long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException

from kafka_eos_source.kafka.native import ERROR_TEXT_BYTES, client_pointer, function
from kafka_eos_source.model import GroupOffset, TopicPartition

_LIST_CONSUMER_GROUP_OFFSETS = 14  # RD_KAFKA_ADMIN_OP_LISTCONSUMERGROUPOFFSETS

#: How long to wait for the answer before asking whether to stop.
_STOP_CHECK_MS = 500

#: The longest time limit that librdkafka accepts: one hour.
NO_LIMIT_MS = 3_600_000


class _Partition(Structure):
    """``rd_kafka_topic_partition_t``."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition", c_int32),
        ("offset", c_int64),
        ("metadata", c_void_p),
        ("metadata_size", c_size_t),
        ("opaque", c_void_p),
        ("err", c_int),
        ("private", c_void_p),
    )


class _PartitionList(Structure):
    """``rd_kafka_topic_partition_list_t``."""

    _fields_ = (("cnt", c_int), ("size", c_int), ("elems", POINTER(_Partition)))


def fetch(
    consumer: Consumer,
    group_id: str,
    partitions: Collection[TopicPartition] | None,
    timeout_ms: int,
    *,
    stable: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> list[GroupOffset]:
    """Sends one request for the committed offsets of a group.

    Args:
        consumer: any consumer with a ``group.id``; it need not belong to the group.
        group_id: the group.
        partitions: the partitions to ask for; None = all that have an offset.
        timeout_ms: for the answer.
        stable: whether to fail if an open transaction is about to change an offset (KIP-447). False = return
            what was committed before that transaction.
        stop: called about twice a second; True = the answer is not worth waiting for.

    Raises:
        KafkaException: if the request or one of its partitions failed, for example with
            UNSTABLE_OFFSET_COMMIT; with _TIMED_OUT if there is no answer in time, or ``stop`` says so.
    """
    client = client_pointer(consumer)
    with _queue(client) as queue, _options(client, stable) as options:
        _send(client, group_id, partitions, options, queue)
        event = _await_event(queue, timeout_ms, stop)
        if not event:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        try:
            return _offsets(event)
        finally:
            function("rd_kafka_event_destroy", None, c_void_p)(event)


def _await_event(queue: int, timeout_ms: int, stop: Callable[[], bool]) -> int | None:
    poll = function("rd_kafka_queue_poll", c_void_p, c_void_p, c_int)
    while True:
        event: int | None = poll(queue, min(timeout_ms, _STOP_CHECK_MS))
        timeout_ms -= _STOP_CHECK_MS
        if event or timeout_ms <= 0 or stop():
            return event


@contextmanager
def _queue(client: int) -> Iterator[int]:
    queue = function("rd_kafka_queue_new", c_void_p, c_void_p)(client)
    try:
        yield queue
    finally:
        function("rd_kafka_queue_destroy", None, c_void_p)(queue)


@contextmanager
def _options(client: int, stable: bool) -> Iterator[int]:
    options = function("rd_kafka_AdminOptions_new", c_void_p, c_void_p, c_int)(
        client, _LIST_CONSUMER_GROUP_OFFSETS
    )
    try:
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        set_timeout = function(
            "rd_kafka_AdminOptions_set_request_timeout", c_int, c_void_p, c_int, c_char_p, c_size_t
        )
        _check(set_timeout(options, NO_LIMIT_MS, text, len(text)))
        error = function("rd_kafka_AdminOptions_set_require_stable_offsets", c_void_p, c_void_p, c_int)(
            options, int(stable)
        )
        assert not error, "this librdkafka does not support stable offsets"
        yield options
    finally:
        function("rd_kafka_AdminOptions_destroy", None, c_void_p)(options)


def _send(
    client: int, group_id: str, partitions: Collection[TopicPartition] | None, options: int, queue: int
) -> None:
    wanted = None
    if partitions is not None:
        wanted = function("rd_kafka_topic_partition_list_new", c_void_p, c_int)(len(partitions))
        add = function("rd_kafka_topic_partition_list_add", c_void_p, c_void_p, c_char_p, c_int32)
        for tp in partitions:
            add(wanted, tp.topic.encode(), tp.partition)
    request = c_void_p(
        function("rd_kafka_ListConsumerGroupOffsets_new", c_void_p, c_char_p, c_void_p)(
            group_id.encode(), wanted
        )
    )
    try:
        function(
            "rd_kafka_ListConsumerGroupOffsets",
            None,
            c_void_p,
            POINTER(c_void_p),
            c_size_t,
            c_void_p,
            c_void_p,
        )(client, ctypes.byref(request), 1, options, queue)
    finally:
        function("rd_kafka_ListConsumerGroupOffsets_destroy", None, c_void_p)(request)
        if wanted is not None:
            function("rd_kafka_topic_partition_list_destroy", None, c_void_p)(wanted)


def _offsets(event: int) -> list[GroupOffset]:
    _check(function("rd_kafka_event_error", c_int, c_void_p)(event))
    result = function("rd_kafka_event_ListConsumerGroupOffsets_result", c_void_p, c_void_p)(event)
    count = c_size_t()
    groups = function(
        "rd_kafka_ListConsumerGroupOffsets_result_groups", POINTER(c_void_p), c_void_p, POINTER(c_size_t)
    )(result, ctypes.byref(count))
    assert count.value == 1, "the request names one group"
    error = function("rd_kafka_group_result_error", c_void_p, c_void_p)(groups[0])
    if error:
        _check(function("rd_kafka_error_code", c_int, c_void_p)(error))
    found = function("rd_kafka_group_result_partitions", POINTER(_PartitionList), c_void_p)(groups[0])
    return [_offset(found.contents.elems[index]) for index in range(found.contents.cnt)]


def _offset(each: Any) -> GroupOffset:
    _check(each.err)
    metadata = ctypes.string_at(each.metadata, each.metadata_size) if each.metadata else b""
    epoch = function("rd_kafka_topic_partition_get_leader_epoch", c_int32, c_void_p)(ctypes.addressof(each))
    return GroupOffset(
        TopicPartition(each.topic.decode(), each.partition),
        each.offset,
        metadata.decode(errors="replace"),
        epoch,
    )


def _check(code: int) -> None:
    if code:
        raise KafkaException(KafkaError(code))

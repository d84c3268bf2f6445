"""Requests for a group's offsets that a slow coordinator answers too late."""

from __future__ import annotations

import socket

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from mock_cluster import Api, MockCluster

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.offset_fetch import fetch
from kafka_eos_source.runtime.deadline import Deadline

_LATE_MS = 1500


def _hide_the_coordinator(mock: MockCluster) -> None:
    """Makes requests for the coordinator fail, including those that the client sends by itself."""
    mock.answer(1, Api.FIND_COORDINATOR, *[(KafkaError.NO_ERROR, _LATE_MS)] * 4)


def test_a_coordinator_that_is_found_after_the_time_limit_does_not_end_the_process() -> None:
    """With librdkafka's own time limit, the late answer ends the process (librdkafka issue 4605)."""
    with MockCluster() as mock:
        _hide_the_coordinator(mock)
        consumer = Consumer({"bootstrap.servers": mock.bootstrap_servers, "group.id": "group"})
        try:
            with pytest.raises(KafkaException) as late:
                fetch(consumer, "group", None, 500)
            assert late.value.args[0].code() == KafkaError._TIMED_OUT
            # answered after the first one is, which nobody waits for
            assert fetch(consumer, "group", None, 30_000) == []
        finally:
            consumer.close()


def test_a_client_can_close_before_its_coordinator_is_found() -> None:
    with MockCluster() as mock:
        _hide_the_coordinator(mock)
        group = GroupOffsets({"bootstrap.servers": mock.bootstrap_servers})
        with pytest.raises(UnavailableError, match="offsets of group 'group'"):
            group.fetch("group", (), Deadline.after_seconds(0.5))
        assert group.fetch("group", (), Deadline.after_seconds(30)) == {}


def test_deleting_a_group_ends_at_the_deadline() -> None:
    """librdkafka alone would retry for an hour."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = GroupOffsets({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"})
        with pytest.raises(UnavailableError, match="deleting group 'group'"):
            group.delete_group("group", Deadline.after_seconds(0.5))

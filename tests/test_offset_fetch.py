"""Offsets of a group, asked of a coordinator that takes its time."""

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
    """The client asks for it on its own account too."""
    mock.answer(1, Api.FIND_COORDINATOR, *[(KafkaError.NO_ERROR, _LATE_MS)] * 4)


def test_a_coordinator_that_is_found_after_the_time_limit_does_no_harm() -> None:
    """With librdkafka's own time limit its answer ends the process (librdkafka issue 4605)."""
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


def test_a_client_that_is_closed_before_its_coordinator_is_found_does_no_harm() -> None:
    with MockCluster() as mock:
        _hide_the_coordinator(mock)
        group = GroupOffsets({"bootstrap.servers": mock.bootstrap_servers})
        with pytest.raises(UnavailableError, match="offsets of group 'group'"):
            group.fetch("group", (), Deadline.after_seconds(0.5))
        assert group.fetch("group", (), Deadline.after_seconds(30)) == {}


def test_to_delete_a_group_is_given_up_in_time() -> None:
    """librdkafka would go on for an hour."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = GroupOffsets({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"})
        with pytest.raises(UnavailableError, match="deleting group 'group'"):
            group.delete_group("group", Deadline.after_seconds(0.5))

"""Operators request micro-batches for what is due, and the requests reach the commit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.protocol.packet import pack, unpack
from kafka_eos_source.state.model import BatchContext

REPORT = ShardReport(TopicPartition("changelog", 1), "attempt", 2, "query", 7, 40, 1000, packets=1)


def test_a_processor_that_requests_nothing_leaves_no_due_time() -> None:
    assert BatchContext(7, 0, 2, False, 1000).due_ms is None


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1))
def test_the_earliest_request_counts(times_ms: list[int]) -> None:
    context = BatchContext(7, 0, 2, False, 1000)
    for time_ms in times_ms:
        context.request_batch_at(time_ms)
    assert context.due_ms == min(times_ms)


@pytest.mark.parametrize("due_ms", [None, 0, -5, 1_760_000_000_000])
def test_the_due_time_travels_with_the_report_of_the_shard(due_ms: int | None) -> None:
    report = replace(REPORT, due_ms=due_ms)
    (packet,) = pack(report, ())
    assert unpack(packet).report == report

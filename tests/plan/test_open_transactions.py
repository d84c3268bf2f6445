"""A source finds out which open transactions hide records, and asks the brokers seldom."""

from __future__ import annotations

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.plan.planner import OpenTransactions, reason
from tests.plan.source_cluster import Clock

T0, T1 = TopicPartition("in", 0), TopicPartition("in", 1)


class Watermarks:
    def __init__(self) -> None:
        self.ends = {T0: 5, T1: 5}
        self.asked = 0
        self.error: Exception | None = None

    def high_watermarks(self, partitions: object) -> dict[TopicPartition, int]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.ends


def test_an_idle_source_finds_out_that_a_transaction_is_open() -> None:
    clock, admin = Clock(), Watermarks()
    found = OpenTransactions(admin, clock)

    def idle(offsets: Offsets) -> str:
        return reason(found.hidden(offsets, is_idle=True))

    latest = {T0: 5, T1: 5}
    assert idle(latest) == ""
    for _ in range(10):
        idle(latest)
    assert admin.asked == 0, "a source that was busy a moment ago does not ask"
    admin.ends = {T0: 25, T1: 5}
    clock.advance(6)
    assert idle(latest) == "", "the answer came after these offsets were read"
    assert idle(latest) == "open transactions in in-0 hide 20 offsets"
    clock.advance(6)
    assert "in-0" in idle(latest)
    assert admin.asked == 2
    assert idle({T0: 25, T1: 5}) == "", "it was committed"
    clock.advance(6)
    admin.error = UnavailableError("no answer")
    assert idle({T0: 25, T1: 5}) == ""


def test_a_busy_source_finds_the_partition_whose_transaction_stays_open() -> None:
    clock, admin = Clock(), Watermarks()
    found = OpenTransactions(admin, clock)
    admin.ends = {T0: 25, T1: 100}
    for offset in range(5, 45):
        clock.advance(1)
        hidden = found.hidden({T0: 5, T1: offset}, is_idle=False)
    assert admin.asked == 1, "it asks every 30 seconds"
    assert hidden == {T0: 20}, "partition 1 moves on, so that its transactions end"
    assert found.hidden({T0: 25, T1: 60}, is_idle=False) == {}, "it was committed"

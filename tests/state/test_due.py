"""Operators request micro-batches for what is due, and the requests reach the commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.commit.request import earliest_due
from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.protocol.packing import pack_packets, unpack_packet
from kafka_eos_source.protocol.token import Due
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.model import BatchContext, StoreIdentity
from kafka_eos_source.state.processor import variables
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.processor.processor_shard import Shard, scan_table
from tests.state.processor.scripted_processor import INPUT, ops, scripted

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
    (packet,) = pack_packets(report, ())
    assert unpack_packet(packet).report == report


def test_the_earliest_request_of_all_shards_is_due_with_the_clock_of_its_shard() -> None:
    assert earliest_due([]) is None
    assert earliest_due([REPORT]) is None
    later, sooner = replace(REPORT, due_ms=9000, time_ms=70), replace(REPORT, due_ms=8000, time_ms=60)
    assert earliest_due([later, REPORT, sooner]) == Due(8000, 60)


# -- what processors request ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "store"])
def test_a_processor_requests_a_batch_for_its_earliest_timer(kind: str, tmp_path: Path) -> None:
    identity = StoreIdentity("app", "s", 0, 1, "t")
    with TransactionalStateStore.open(tmp_path / "store", identity) as store:
        _check_timers(Shard(scripted(), INPUT, store if kind == "store" else None))


def _check_timers(shard: Shard) -> None:
    shard.batch(ops("a", "t.set 500", "t.set 90") + ops("b", "t.set 300"), 1000)
    assert shard.context.due_ms == 1090
    shard.batch(time_ms=1089)
    assert shard.context.due_ms == 1090, "a batch that comes too early requests the next one again"
    shard.batch(time_ms=1100)
    assert shard.context.due_ms == 1300
    shard.batch(ops("b", "t.delete 100"), time_ms=1200)
    assert shard.context.due_ms == 1500
    shard.batch(time_ms=1500)
    assert shard.context.due_ms is None


@pytest.mark.parametrize("time_mode", ["None", "EventTime"])
def test_without_processing_time_no_batch_is_requested(time_mode: str) -> None:
    event_time = {"event_time": "at"} if time_mode == "EventTime" else {}
    shard = Shard(scripted(time_mode, **event_time), INPUT)
    shard.batch(ops("a", "v.update 1", *(["t.set 500"] if event_time else [])), 1000)
    assert shard.context.due_ms is None


def test_a_processor_requests_a_batch_for_values_that_expire() -> None:
    """It waits a tenth of the time to live, because expired values are hidden anyway."""
    shard = Shard(scripted(ttl_ms=1000), INPUT)
    shard.batch(ops("a", "v.update 1"), 5000)
    assert shard.context.due_ms == 6100
    shard.batch(ops("b", "m.put 1 2", "l.append 1"), 5050)
    assert shard.context.due_ms == 6100
    shard.batch(time_ms=6100)
    assert shard.context.metrics == {"expired_values": 3}
    assert shard.context.due_ms is None


def test_values_that_live_long_are_removed_within_a_minute() -> None:
    day_ms = 24 * 3_600_000
    shard = Shard(scripted(ttl_ms=day_ms), INPUT)
    shard.batch(ops("a", "v.update 1"), 5000)
    assert shard.context.due_ms == 5000 + day_ms + variables.SWEEP_DELAY_MS


def test_what_a_sweep_leaves_is_due_in_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "SWEEP_VALUES", 2)
    shard = Shard(scripted(ttl_ms=1000), INPUT)
    shard.batch([row for key in "abcde" for row in ops(key, "v.update 1")], 5000)
    for left in (3, 1):
        shard.batch(time_ms=6100)
        assert shard.context.due_ms == 6100
        assert len(shard.values("v")) == left
    shard.batch(time_ms=6100)
    assert shard.context.due_ms is None


_TIMED = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from(["t.set", "t.delete", "v.update", "l.append", "m.put"])
    ),
    max_size=6,
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), _TIMED), min_size=1, max_size=8))
def test_the_request_is_the_earliest_time_in_the_state(
    batches: list[tuple[int, int, list[tuple[str, str]]]],
) -> None:
    shard, now_ms = Shard(scripted(ttl_ms=20), INPUT), 1000
    for after_ms, number, rows in batches:
        now_ms += after_ms
        shard.batch([row for key, op in rows for row in ops(key, f"{op} {number}")], now_ms)
        times = {
            layout.split(key).time_ms + (0 if table == 0xFF else 2)  # type: ignore[operator]
            for table in range(layout.TIMED + 1, 0x100)
            for key, _ in scan_table(shard.state, table)
        }
        assert shard.context.due_ms == min(times, default=None)
        assert all(time_ms > now_ms for time_ms in times), "what is due has been done"

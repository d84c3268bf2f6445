"""The state that a `StatefulProcessor` reads in successive batches, on a dict and on the store."""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import StateAccess, StoreIdentity
from kafka_eos_source.state.processor import rows, variables
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.processor.processor_shard import Shard, check_indexes, runner
from tests.state.processor.scripted_processor import INPUT, ops, results, scripted


def test_every_kind_of_variable_keeps_its_state_between_batches(state: StateAccess) -> None:
    shard = Shard(scripted(), INPUT, state)
    shard.batch(
        ops("a", "v.update 1", "l.append 1", "l.append 2", "m.put 1 10", "m.put 2 20", "t.set 5"), 100
    )
    shard.batch(ops("b", "v.update 2", "l.put 7 2", "m.put 1 11"), 101)
    out = shard.batch(
        ops("a", "v.get", "l.get", "m.items", "t.list", "l.extend 3 1", "l.get", "m.remove 1"), 102
    )
    assert results(out) == [
        "(1,)", "[(1,), (2,)]", "[((1,), (10,)), ((2,), (20,))]", "[105]", "None", "[(1,), (2,), (3,), (4,)]",
        "None",
    ]  # fmt: skip
    assert shard.values("m") == {("a",): {(2,): (20,)}, ("b",): {(1,): (11,)}}
    out = shard.batch(
        ops("b", "l.get", "l.put 1", "l.get", "l.clear", "l.exists", "m.clear", "m.exists", "v.clear"), 103
    )
    assert results(out) == ["[(7,), (8,), (9,)]", "None", "[(1,)]", "None", "False", "None", "False", "None"]
    assert shard.values("v") == {("a",): (1,)}
    assert shard.values("l") == {("a",): [(1,), (2,), (3,), (4,)]}
    check_indexes(shard)


def test_keys_with_a_common_prefix_have_separate_state(state: StateAccess) -> None:
    shard = Shard(scripted(), INPUT, state)
    keys = ["", "k", "ke", "key", "key\x00", "\xff", None]
    for key in keys:
        shard.batch(ops(key, "m.put 1 1", "l.append 1", "v.update 1"))  # type: ignore[arg-type]
    assert set(shard.values("m")) == {(key,) for key in keys}
    shard.batch(ops("ke", "m.clear", "l.clear", "v.clear"))
    for name in "mlv":
        assert set(shard.values(name)) == {(key,) for key in keys if key != "ke"}


def test_a_map_is_empty_when_its_last_key_is_removed() -> None:
    shard = Shard(scripted(), INPUT)
    assert results(shard.batch(ops("a", "m.put 1", "m.exists", "m.remove 1", "m.exists"))) == [
        "None", "True", "None", "False"
    ]  # fmt: skip


class TestTimers:
    def test_timers_fire_after_the_rows_of_all_keys_in_order_of_time(self, state: StateAccess) -> None:
        shard = Shard(scripted(), INPUT, state)
        shard.batch(ops("b", "t.set 5", "t.set 3") + ops("a", "t.set 4", "t.set 900"), 100)
        out = shard.batch(ops("c", "v.update 1"), 200)
        assert [row[:2] for row in out] == [("c", "v.update"), ("b", "fired"), ("a", "fired"), ("b", "fired")]
        assert [result.split()[0] for result in results(out)[1:]] == ["103", "104", "105"]
        assert shard.batch(time_ms=999) == []
        assert len(shard.batch(time_ms=1000)) == 1  # at its time, not after it
        check_indexes(shard)

    def test_a_timer_in_the_past_fires_in_the_same_batch(self) -> None:
        shard = Shard(scripted(), INPUT)
        out = shard.batch(ops("a", "t.set -50"), 100)
        assert results(out)[-1].startswith("50 ")
        assert shard.batch(time_ms=200) == []

    def test_a_timer_that_the_batch_moves_does_not_fire_at_its_old_time(self) -> None:
        shard = Shard(scripted(), INPUT)
        shard.batch(ops("a", "t.set 10"), 100)
        out = shard.batch(ops("a", "t.delete -90", "t.set 10"), 200)
        assert [row[1] for row in out] == ["t.delete", "t.set"]
        assert results(shard.batch(time_ms=300)) == ["210 (None, [210])"]

    def test_a_timer_registered_twice_fires_once_and_deleting_an_unknown_one_has_no_effect(self) -> None:
        shard = Shard(scripted(), INPUT)
        shard.batch(ops("a", "t.set 10", "t.set 10", "t.delete 11"), 100)
        assert len(shard.batch(time_ms=200)) == 1
        check_indexes(shard)

    def test_no_timer_is_missed_if_more_expire_than_are_read_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (variables, rows):
            monkeypatch.setattr(module, "WINDOW_KEYS", 3)
        monkeypatch.setattr("kafka_eos_source.state.processor.run.WINDOW_KEYS", 3)
        shard = Shard(scripted(), INPUT)
        shard.batch([row for i in range(20) for row in ops(f"k{i}", f"t.set {i % 4}", f"t.set {i}")], 0)
        out = shard.batch(time_ms=100)
        expected = sorted({(time, f"k{i}") for i in range(20) for time in (i % 4, i) if time > 0})
        assert sorted((int(row[2].split()[0]), row[0]) for row in out) == expected
        assert [int(row[2].split()[0]) for row in out] == sorted(time for time, _ in expected)
        assert [e for e in shard.entries() if e.variable == "$timers"] == []
        check_indexes(shard)

    def test_timers_that_handlers_register_and_delete_in_one_pass_are_respected(self) -> None:
        class Chain(StatefulProcessor):
            """A timer deletes the next timer and registers two new ones, one of them due immediately."""

            def init(self, handle: Any) -> None:
                self.handle = handle

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
                for time in (10, 20, 30):
                    self.handle.registerTimer(time)
                return iter([])

            def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
                time = expiredTimerInfo.getExpiryTimeInMs()
                if time == 10:
                    self.handle.deleteTimer(20)
                    self.handle.registerTimer(15)
                    self.handle.registerTimer(500)
                yield Row(n=time)

        shard = Shard(
            runner(Chain(), key="n LONG", columns="n LONG", output="n LONG", time_mode="ProcessingTime"),
            "n LONG",
        )
        assert shard.batch([(1,)], 0) == []
        assert shard.batch(time_ms=100) == [(10,), (30,)]
        assert shard.batch(time_ms=101) == [(15,)]
        assert shard.batch(time_ms=500) == [(500,)]


class TestTimeToLive:
    def test_an_expired_value_is_hidden_and_then_removed(self, state: StateAccess) -> None:
        shard = Shard(scripted(ttl_ms=50), INPUT, state)
        shard.batch(ops("a", "v.update 1", "l.append 1", "m.put 1 1"), 100)
        reads = ("v.get", "v.exists", "l.get", "l.exists", "m.get 1", "m.has 1", "m.items", "m.exists")
        assert results(shard.batch(ops("a", *reads), 149)) == [
            "(1,)", "True", "[(1,)]", "True", "(1,)", "True", "[((1,), (1,))]", "True"
        ]  # fmt: skip
        assert len(shard.entries()) == 3
        assert results(shard.batch(ops("a", *reads), 150)) == [
            "None", "False", "[]", "False", "None", "False", "[]", "False"
        ]  # fmt: skip
        assert shard.entries() == []
        left = [key for key, _ in state.range() if key[0] != 1]
        assert left == []  # neither a list's head nor an index entry

    def test_an_update_keeps_a_value_that_the_same_batch_would_remove(self, state: StateAccess) -> None:
        shard = Shard(scripted(ttl_ms=50), INPUT, state)
        shard.batch(ops("a", "v.update 1", "m.put 1 1", "m.put 2 2", "l.append 1"), 100)
        shard.batch(ops("a", "v.update 2", "m.put 1 3", "l.append 2"), 150)
        check_indexes(shard)
        assert shard.values("v") == {("a",): (2,)}
        assert shard.values("m") == {("a",): {(1,): (3,)}}
        assert shard.values("l") == {("a",): [(2,)]}
        assert {entry.expiry_ms for entry in shard.entries()} == {200}
        assert shard.context.metrics == {"expired_values": 2}

    def test_removing_values_removes_their_index_entries(self, state: StateAccess) -> None:
        shard = Shard(scripted(ttl_ms=50), INPUT, state)
        shard.batch(
            ops("a", "v.update 1", "l.put 1 3", "m.put 1 1", "m.put 2 2") + ops("b", "l.put 1 1"), 100
        )
        shard.batch(ops("a", "v.clear", "l.put 5 1", "m.remove 1", "v.clear", "m.remove 9"), 110)
        check_indexes(shard)
        shard.batch(ops("a", "l.clear", "m.clear") + ops("b", "l.clear", "l.append 9"), 120)
        check_indexes(shard)
        assert [entry.value for entry in shard.entries()] == [(9,)]

    def test_many_expired_values_are_removed_over_several_batches(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(variables, "SWEEP_VALUES", 4)
        shard = Shard(scripted(ttl_ms=50), INPUT)
        shard.batch(ops("a", "l.put 1 9"), 100)
        for left in (6, 2, 0):
            assert results(shard.batch(ops("a", "l.get", "l.exists"), 150)) == ["[]", "False"]
            assert len(shard.entries()) == left
            check_indexes(shard)
        assert [key for key in shard.state.rows if key[0] != 1] == []  # type: ignore[attr-defined]

    def test_a_shorter_time_to_live_applies_from_the_next_update(self) -> None:
        shard = Shard(scripted(ttl_ms=50), INPUT)
        shard.batch(ops("a", "l.append 1"), 100)
        shorter = Shard(scripted(ttl_ms=10), INPUT, shard.state)
        shorter.batch(ops("a", "l.append 2"), 110)
        assert results(shorter.batch(ops("a", "l.get"), 120)) == ["[(1,)]"]
        check_indexes(shorter)
        assert shorter.values("l") == {("a",): [(1,)]}


def test_computing_a_batch_again_gives_the_same_state() -> None:
    first = Shard(scripted(ttl_ms=50), INPUT)
    first.batch(ops("a", "v.update 1", "l.append 1", "t.set 10") + ops("b", "m.put 1 1"), 100)
    again = copy.deepcopy(first)
    batch = ops("b", "m.get 1", "m.put 1 2", "t.set -5") + ops("a", "v.get", "v.update 3")
    assert first.batch(batch, 150) == again.batch(batch, 150)
    assert list(first.state.rows.items()) == list(again.state.rows.items())  # type: ignore[attr-defined]


class TestEventTime:
    @staticmethod
    def _at(second: float) -> dt.datetime:
        return dt.datetime.fromtimestamp(second, dt.timezone.utc)

    def test_event_timers_fire_by_the_watermark_of_earlier_batches(self) -> None:
        shard = Shard(scripted("EventTime", event_time="at", delay_ms=10_000), INPUT)
        assert results(shard.batch(ops("a", "t.set 5000", at=self._at(100)), 7)) == ["None"]  # watermark 0
        assert shard.context.seen_event_time_ms == 100_000
        out = shard.batch(ops("a", "t.list", "t.set 5000", at=self._at(101)), 8)
        assert results(out) == ["[5000]", "None", "5000 (None, [5000, 95000])"]
        assert results(shard.batch(ops("b", "v.get", at=self._at(200)))) == ["None"]
        assert results(shard.batch()) == ["95000 (None, [95000])"]

    def test_rows_are_late_by_the_watermark_of_the_previous_batch(self) -> None:
        shard = Shard(scripted("EventTime", event_time="at", delay_ms=10_000), INPUT)
        shard.batch(ops("a", "v.get", at=self._at(100)))
        # The watermark is 90 s now, but rows that Spark may have sent before it was known are not late.
        assert len(shard.batch(ops("a", "v.get", at=self._at(50)))) == 1
        late = [*ops("a", "v.get", at=self._at(90)), *ops("a", "v.update 5", at=self._at(90.001))]
        assert shard.batch([*late, *ops("b", "v.get")]) == [
            ("a", "v.update", "None"),
            ("b", "v.get", "None"),
        ]
        assert shard.context.seen_event_time_ms == 90_001
        assert shard.context.metrics == {"late_rows": 1}
        assert shard.batch(ops("a", "v.get", at=self._at(1))) == []
        assert shard.context.seen_event_time_ms == 1000

    def test_the_watermark_never_goes_back(self) -> None:
        shard = Shard(scripted("EventTime", event_time="at", delay_ms=10_000), INPUT)
        shard.batch(ops("a", "v.get", at=self._at(100)))
        shard.batch()
        slower = Shard(scripted("EventTime", event_time="at", delay_ms=60_000), INPUT, shard.state)
        slower.event_time_ms = shard.event_time_ms
        assert results(slower.batch(ops("a", "t.set 0", "t.list", at=self._at(99)))) == [
            "None", "[90000]", "90000 (None, [90000])"
        ]  # fmt: skip

    def test_event_time_is_rounded_down_and_may_be_missing(self) -> None:
        shard = Shard(scripted("EventTime", event_time="at"), INPUT)
        before_1970 = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.timezone.utc)
        shard.batch(ops("a", "v.get", at=before_1970))
        assert shard.context.seen_event_time_ms == -1
        shard.batch(ops("a", "v.get"))
        assert shard.context.seen_event_time_ms is None


def test_state_of_a_processor_survives_commit_and_reopening_of_the_store(tmp_path: Path) -> None:
    """Processing continues on the reopened store."""
    identity = StoreIdentity("app", "s", 0, 1, "t")
    shard = Shard(scripted(ttl_ms=50), INPUT)
    expected = Shard(scripted(ttl_ms=50), INPUT)
    for number in range(4):
        with TransactionalStateStore.open(tmp_path / "store", identity) as store:
            shard.state = store
            batch = ops(
                f"k{number % 2}",
                f"v.update {number}",
                "l.append 1",
                "m.put 1 1",
                "l.get",
                "t.set 15",
                "t.list",
            )
            assert shard.batch(batch, 20 * number) == expected.batch(batch, 20 * number)
            store.commit({TopicPartition("t", 0): number + 1})
    with TransactionalStateStore.open(tmp_path / "store", identity) as store:
        assert dict(store.range()) == expected.state.rows  # type: ignore[attr-defined]

"""Compares the store with a dict over any sequence of writes, commits, pending changes and reopens."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.encoding.layout import upper_bound
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import EFFORT, IDENTITY, TINY, TP, Model, binary, put_rows, record

# Few keys that are prefixes of each other or end in 0xff, so that bounds and ranges often touch them.
KEYS = st.one_of(
    st.builds(bytes, st.lists(st.sampled_from([1, 2, 0x7F, 0xFE, 0xFF]), min_size=1, max_size=3)),
    st.integers(0, 399).map(lambda n: b"\1x%03d" % n),
)
VALUES = st.one_of(st.none(), st.binary(max_size=4))
ROWS = st.lists(st.tuples(KEYS, VALUES), max_size=12)


class StoreMachine(RuleBasedStateMachine):
    """`committed` is the state that others should see, `seen` the state that the owner should see."""

    config: ClassVar[StoreConfig] = TINY

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="state-model-"))
        self.store = TransactionalStateStore.open(self.folder / "s", IDENTITY, self.config)
        self.committed: Model = {}
        self.seen: Model = {}
        self.ever: set[bytes] = set()  # all keys that ever existed
        self.offset = 0
        self.batch = -1
        # task attempt → batch, base batch, state
        self.kept: dict[str, tuple[int, int, Model]] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def _write(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self.seen.pop(key, None)
        else:
            self.seen[key] = value

    @rule(key=KEYS, value=VALUES)
    def put(self, key: bytes, value: bytes | None) -> None:
        self.store.put(key, value)
        self._write(key, value)

    @rule(rows=ROWS)
    def put_many(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        keys, values = [k for k, _ in rows], [v for _, v in rows]
        self.store.put_many(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
        for k, v in rows:
            self._write(k, v)

    @rule(value=st.binary(max_size=2))
    def put_a_run_of_keys(self, value: bytes) -> None:
        rows = [(b"\1x%03d" % n, value) for n in range(400)]
        put_rows(self.store, rows)
        self.seen.update(rows)

    @rule(low=KEYS, high=st.one_of(st.none(), KEYS))
    def delete_range(self, low: bytes, high: bytes | None) -> None:
        self.store.delete_range(low, high)
        for k in [k for k in self.seen if low <= k and (high is None or k < high)]:
            del self.seen[k]

    @rule(keys=st.lists(KEYS, max_size=10))
    def get(self, keys: list[bytes]) -> None:
        expected = [self.seen.get(k) for k in keys]
        assert [self.store.get(k) for k in keys] == expected
        assert self.store.get_many(pa.array(keys, pa.binary())).to_pylist() == expected

    @rule()
    def get_all_keys(self) -> None:
        keys = [b"\1x%03d" % n for n in range(400)] * 2
        assert self.store.get_many(pa.array(keys, pa.binary())).to_pylist() == [
            self.seen.get(k) for k in keys
        ]

    @rule(low=st.one_of(st.none(), KEYS), high=st.one_of(st.none(), KEYS), reverse=st.booleans())
    def scan(self, low: bytes | None, high: bytes | None, reverse: bool) -> None:
        expected = sorted(
            (
                (k, v)
                for k, v in self.seen.items()
                if (low is None or low <= k) and (high is None or k < high)
            ),
            reverse=reverse,
        )
        assert list(self.store.range(low, high, reverse=reverse)) == expected
        if low:
            end = upper_bound(low)
            assert [k for k, _ in self.store.prefix_scan(low)] == sorted(
                k for k in self.seen if k.startswith(low)
            )
            assert end is None or all(k < end for k in self.seen if k.startswith(low))

    @rule()
    def changes_lead_from_the_committed_state_to_what_the_owner_sees(self) -> None:
        state = dict(self.committed)
        keys: list[bytes] = []
        for rows in self.store.staged_changes():
            for k, v in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
                keys.append(k)
                state.pop(k, None) if v is None else state.update({k: v})
        assert state == self.seen
        assert len(keys) == len(set(keys))

    @rule(ahead=st.integers(0, 3))
    def commit(self, ahead: int) -> None:
        self.offset += ahead
        self.batch += 1
        self.store.commit({TP: self.offset}, batch=record(self.batch))
        self.committed = dict(self.seen)

    @rule()
    def rollback(self) -> None:
        self.store.rollback()
        self._clear_staged()

    @rule(task_attempt_id=st.sampled_from("ab"))
    def persist_pending(self, task_attempt_id: str) -> None:
        self.store.persist_pending(record(self.batch + 1, task_attempt_id))
        if task_attempt_id in self.kept and self.kept[task_attempt_id][0] != self.batch + 1:
            self.store.drop_pending([task_attempt_id])  # drop an earlier batch, as an operator does
            self.store.rollback()
        self.kept = {a: k for a, k in self.kept.items() if k[0] == self.batch + 1}
        self.kept[task_attempt_id] = (self.batch + 1, self.batch, dict(self.seen))
        state = dict(self.committed)
        for rows in self.store.pending_changes(record(self.batch + 1, task_attempt_id)):
            for k, v in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
                state.pop(k, None) if v is None else state.update({k: v})
        assert state == self.seen
        self._clear_staged()

    @precondition(lambda self: self.kept)
    @rule(ahead=st.integers(0, 3))
    def promote(self, ahead: int) -> None:
        self.store.rollback()
        self._clear_staged()
        task_attempt_id, (batch, base, state) = sorted(self.kept.items())[0]
        if base != self.batch:
            self.store.drop_pending()
        else:
            self.offset += ahead
            self.batch = batch
            self.store.promote(record(batch, task_attempt_id), {TP: self.offset})
            self.committed, self.seen = dict(state), dict(state)
        self.kept = {}
        assert self.store.pending() == []

    @rule(rows=ROWS)
    def restore_chunk(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        self.store.rollback()
        self._clear_staged()
        self.batch += 1
        keys, values = [k for k, _ in rows], [v for _, v in rows]
        self.store.restore_chunk(binary(keys), binary(values), {TP: self.offset}, batch=record(self.batch))
        for k, v in rows:
            self._write(k, v)
        self.committed = dict(self.seen)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = TransactionalStateStore.open(self.folder / "s", IDENTITY, self.config)
        self._clear_staged()

    def _clear_staged(self) -> None:
        self.seen = dict(self.committed)

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        assert list(self.store.all()) == sorted(self.seen.items())
        self.ever |= self.seen.keys()
        wanted = list(self.ever)
        assert self.store.get_many(pa.array(wanted, pa.binary())).to_pylist() == [
            self.seen.get(k) for k in wanted
        ]
        assert self.store.next_offset(TP) == self.offset
        last = self.store.last_batch()
        assert (-1 if last is None else last.batch_id) == self.batch
        with self.store.view() as view:
            assert list(view.all()) == sorted(self.committed.items())
            assert list(view.range(reverse=True)) == sorted(self.committed.items(), reverse=True)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40 * EFFORT, stateful_step_count=30, deadline=None, print_blob=True
)


class Killed(Exception):
    """Stands for the end of the process at a failpoint."""


class SpillingMachine(StoreMachine):
    """The same rules for a store that moves its staged writes to disk after a few rows, or at any time."""

    config: ClassVar[StoreConfig] = replace(TINY, uncommitted_max_bytes=1_500)

    @rule()
    def spill(self) -> None:
        self.store._spill()

    @precondition(lambda self: self.kept)
    @rule(step=st.sampled_from(["began", "slice", "written", "ended"]))
    def promotion_is_interrupted(self, step: str) -> None:
        """What was begun is finished when the store is opened again."""
        self.store.rollback()
        self._clear_staged()
        task_attempt_id, (batch, base, state) = sorted(self.kept.items())[0]
        if base != self.batch:
            self.store.drop_pending()
            self.kept = {}
            return

        def reach(name: str) -> None:
            if name == f"state.apply_{step}":
                raise Killed

        # A small attempt is promoted in one write, and not killed.
        with mock.patch.object(failpoints, "reach", reach), suppress(Killed):
            self.store.promote(record(batch, task_attempt_id), {TP: self.offset})
        self.reopen()
        self.committed, self.seen, self.batch = dict(state), dict(state), batch
        self.kept = {}
        assert self.store.pending() == []
        self.store.drop_pending()
        assert not list((self.folder / "s").glob("spill/*"))


TestSpillingMachine = SpillingMachine.TestCase
TestSpillingMachine.settings = TestStoreMachine.settings

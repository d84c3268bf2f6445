"""Conformance tests for two-phase sinks: they check every rule of `sinks.contract`, for any sink.

To test a sink, derive a class in a test file::

    class TestMySink(SinkConformance):
        @pytest.fixture
        def system(self, tmp_path):
            return System(sink=lambda: MySink(str(tmp_path)), visible=lambda: read_all_rows(tmp_path))

pytest then runs the inherited tests: each call twice; every order of calls, legal or not, against a model of
four states; a process killed at every line of every call, and recovered in both ways; zombie drivers; two
sinks on one target; batch ids that go back; values of many types. The tests use only the sink's public
contract.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kafka_eos_source.errors import RetriableError
from kafka_eos_source.sinks.contract import OK, Fatal, Ok, Outcome, Retryable
from kafka_eos_source.testing.sink_kills import SinkKills
from kafka_eos_source.testing.sink_system import (
    APPLICATION,
    BATCH,
    CLUSTER_ID,
    OTHER_CLUSTER_ID,
    ROWS,
    Given,
    Rows,
    System,
    deadline,
    new_txn,
    opened,
    stage,
)

__all__ = [
    "BATCH",
    "CLUSTER_ID",
    "OTHER_CLUSTER_ID",
    "ROWS",
    "Given",
    "Rows",
    "SinkConformance",
    "System",
    "deadline",
    "new_txn",
    "opened",
    "stage",
]


class SinkConformance(SinkKills):
    """The tests. Derive a class from it, with a fixture ``system``.

    Attributes:
        depth: longest sequence of prepare, commit and abort that is tried.
    """

    depth: ClassVar[int] = 3

    def test_prepared_rows_are_invisible_until_the_commit(self, system: System) -> None:
        txn = new_txn()
        with opened(system) as sink:
            staged = stage(sink, self.rows_of(system))
            assert self.times(system) == 0, "staged rows are visible"
            assert sink.prepare(txn, staged, deadline()) == OK
            assert self.times(system) == 0, "prepared rows are visible"
            assert sink.recover(deadline()) == [txn]
            assert sink.commit(txn, deadline()) == OK
            assert self.times(system) == 1
            assert list(sink.recover(deadline())) == []

    def test_every_value_arrives(self, system: System) -> None:
        txn = new_txn()
        rows = self.rows_of(system)
        with opened(system) as sink:
            sink.check(rows.schema, deadline())
            assert sink.prepare(txn, stage(sink, rows), deadline()) == OK
            assert sink.commit(txn, deadline()) == OK
        found = sorted(system.visible(), key=lambda row: row["id"])
        wanted = sorted(rows.to_pylist(), key=lambda row: row["id"])
        assert [{name: row[name] for name in rows.schema.names} for row in found] == wanted

    def test_batches_follow_one_another(self, system: System) -> None:
        rows = self.rows_of(system)
        with opened(system) as sink:
            for batch_id in range(3):
                txn = new_txn(batch_id)
                one = rows.slice(batch_id, 1)
                assert sink.prepare(txn, stage(sink, one, batch_id, tasks=1), deadline()) == OK
                assert sink.commit(txn, deadline()) == OK
                sink.tidy(batch_id, deadline())
                assert sink.commit(txn, deadline()) == OK, "after tidy, the sink forgot what it committed"
        assert sorted(row["id"] for row in system.visible()) == sorted(rows["id"].to_pylist()[:3])

    def test_every_order_of_calls(self, system: System) -> None:
        """Each outcome follows the contract's table; each call uses a new sink object, like a new process."""
        rows = self.rows_of(system)
        expected = 0
        for length in range(1, self.depth + 1):
            for order in itertools.product(("prepare", "commit", "abort"), repeat=length):
                txn, state = new_txn(), "unknown"
                with opened(system) as sink:
                    staged = stage(sink, rows, tasks=1)
                for call in order:
                    with opened(system) as sink:
                        outcome = (
                            sink.prepare(txn, staged, deadline())
                            if call == "prepare"
                            else getattr(sink, call)(txn, deadline())
                        )
                        state = _next(state, call, outcome, order)
                        assert (txn in sink.recover(deadline())) is (state == "prepared"), (order, state)
                expected = self._once_more(expected) if state == "committed" else expected
                assert self.times(system) == expected, (order, state)
                with opened(system) as sink:
                    sink.abort(txn, deadline())

    def test_an_aborted_batch_can_be_prepared_again_from_the_same_stage(self, system: System) -> None:
        first, second = new_txn(), new_txn()
        with opened(system) as sink:
            staged = stage(sink, self.rows_of(system))
            assert sink.prepare(first, staged, deadline()) == OK
            assert sink.abort(first, deadline()) == OK
            assert sink.prepare(second, staged, deadline()) == OK
            assert sink.commit(second, deadline()) == OK
            assert isinstance(sink.commit(first, deadline()), Fatal)
        assert self.times(system) == 1

    def test_recover_lists_only_ids_of_its_own_query(self, system: System) -> None:
        """Queries with similar application ids, and one query on two Kafka clusters, share a target."""
        rows = self.rows_of(system)
        owners = [
            (APPLICATION, CLUSTER_ID),
            (f"{APPLICATION}-7", CLUSTER_ID),
            ("conform", CLUSTER_ID),
            (APPLICATION, OTHER_CLUSTER_ID),
        ]
        prepared = [new_txn(3, application, cluster_id=cluster) for application, cluster in owners]
        for number, (owner, txn) in enumerate(zip(owners, prepared, strict=True)):
            with opened(system, owner[0], cluster_id=owner[1]) as sink:
                # Each id has its own rows, because a database may lock rows that it upserts.
                staged = stage(sink, rows.slice(number, 1), tasks=1)
                assert sink.prepare(txn, staged, deadline()) == OK
        for owner, txn in zip(owners, prepared, strict=True):
            with opened(system, owner[0], cluster_id=owner[1]) as sink:
                assert list(sink.recover(deadline())) == [txn]
                assert sink.abort(txn, deadline()) == OK
        assert self.times(system) == 0

    def test_the_same_query_on_two_clusters_writes_to_one_target(self, system: System) -> None:
        """One job runs in two regions: only the cluster tells the ids apart, and the batches of the tasks.

        Each region commits, aborts and tidies while the other has a batch prepared, or committed a batch.
        """
        rows = self.rows_of(system)
        here = new_txn()
        there = replace(here, cluster=new_txn(cluster_id=OTHER_CLUSTER_ID).cluster)
        with opened(system) as one, opened(system, cluster_id=OTHER_CLUSTER_ID) as two:
            assert one.prepare(here, stage(one, rows.slice(0, 2), tasks=1), deadline()) == OK
            staged = stage(two, rows.slice(2), tasks=2)
            assert list(two.recover(deadline())) == [], "recover lists what the other region prepared"
            assert isinstance(two.commit(there, deadline()), Fatal), "commit accepts the other region's work"
            assert two.abort(there, deadline()) == OK
            assert list(one.recover(deadline())) == [here], "the other region's abort removed it"
            one.tidy(BATCH - 1, deadline())
            assert two.prepare(there, staged, deadline()) == OK
            assert two.commit(there, deadline()) == OK
            two.tidy(BATCH, deadline())
        assert self._ids(system) == rows["id"].to_pylist()[2:]
        with opened(system) as one, opened(system, cluster_id=OTHER_CLUSTER_ID) as two:
            assert list(one.recover(deadline())) == [here], "the other region's commit or tidy removed it"
            assert one.commit(here, deadline()) == OK
            assert self._ids(system) == rows["id"].to_pylist()
            assert (one.commit(here, deadline()), two.commit(there, deadline())) == (OK, OK), (
                "the sink forgot a commit of one region after a commit of the other"
            )
        assert self._ids(system) == rows["id"].to_pylist()

    def test_commit_of_an_unknown_id_is_fatal(self, system: System) -> None:
        """A commit of an unknown id is fatal.

        The token names the id, so an answer of OK would lose the batch without an error.
        """
        rows = self.rows_of(system)
        with opened(system) as sink:
            done = new_txn(6)
            assert sink.prepare(done, stage(sink, rows.slice(0, 1), 2, tasks=1), deadline()) == OK
            assert sink.commit(done, deadline()) == OK
            sink.tidy(2, deadline())
        same_attempt = replace(done, sequence=7)
        same_sequence = new_txn(6)
        for unknown in (same_attempt, same_sequence, new_txn(7, sink="other")):
            with opened(system, name=unknown.sink) as sink:
                outcome = sink.commit(unknown, deadline())
                assert isinstance(outcome, Fatal), f"commit of {unknown}, which was never prepared: {outcome}"
                assert outcome.why, "the outcome must say what is missing"
        with opened(system) as sink:
            assert sink.commit(done, deadline()) == OK, "after a restart, the sink forgot what it committed"

    def test_a_batch_with_another_digest_than_the_token_names_is_not_committed(self, system: System) -> None:
        """Somebody changed what was prepared, so that it no longer has the digest in the token."""
        txn = new_txn()
        with opened(system) as sink:
            prepared = sink.prepare(txn, stage(sink, self.rows_of(system)), deadline())
        assert isinstance(prepared, Ok)
        if not prepared.digest:
            pytest.skip("this sink reads nothing back that others could have changed")
        with opened(system) as sink:
            outcome = _outcome(lambda: sink.commit(replace(txn, digest="f" * 32), deadline()))
            assert isinstance(outcome, Fatal), outcome
            assert self.times(system) == 0, "rows are visible that nobody vouches for"
            assert list(sink.recover(deadline())) == [txn]
            assert sink.commit(txn, deadline()) == OK
        assert self.times(system) == 1

    def test_commit_after_the_checkpoint_is_lost(self, system: System, tmp_path: Path) -> None:
        """The query lost the checkpoint in which the sink kept its prepared rows."""
        if system.store is None:
            pytest.skip("this sink keeps nothing in the checkpoint")
        txn = new_txn()
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, self.rows_of(system)), deadline()) == OK
        with opened(replace(system, store=str(tmp_path / "another"))) as sink:
            outcome = sink.commit(txn, deadline())
            assert isinstance(outcome, Fatal) or (outcome == OK and self.times(system) == 1), outcome
        with opened(system) as sink:
            assert sink.commit(txn, deadline()) == OK
        assert self.times(system) == 1

    def test_two_sinks_of_one_query_are_independent(self, system: System) -> None:
        """Two sinks of one type write to one target, with the same sequence number, attempt and batch."""
        rows = self.rows_of(system)
        left = new_txn(sink="left")
        right = replace(left, sink="right")
        with opened(system, name="left") as one, opened(system, name="right") as two:
            # Each sink has its own rows, because a database may lock rows that it upserts.
            of_one, of_two = stage(one, rows.slice(0, 2), tasks=1), stage(two, rows.slice(2), tasks=2)
            assert one.prepare(left, of_one, deadline()) == OK
            assert list(two.recover(deadline())) == [], "recover lists what the other sink prepared"
            assert isinstance(two.commit(right, deadline()), Fatal), (
                "commit accepts what the other sink prepared"
            )
            assert two.prepare(right, of_two, deadline()) == OK
            assert list(one.recover(deadline())) == [left]
            assert list(two.recover(deadline())) == [right]
            assert one.commit(left, deadline()) == OK
            one.tidy(BATCH, deadline())
            assert list(two.recover(deadline())) == [right], "the other sink's commit removed it"
            assert self._ids(system) == rows["id"].to_pylist()[:2]
            assert two.commit(right, deadline()) == OK
            two.tidy(BATCH, deadline())
            assert self._ids(system) == rows["id"].to_pylist()
        with opened(system, name="left") as one, opened(system, name="right") as two:
            assert (one.commit(left, deadline()), two.commit(right, deadline())) == (OK, OK)
            again = new_txn(8, sink="left")
            assert one.prepare(again, stage(one, rows, 4), deadline()) == OK
            assert two.abort(replace(again, sink="right"), deadline()) == OK
            assert list(one.recover(deadline())) == [again], "the other sink's abort removed it"
            assert one.abort(again, deadline()) == OK
            assert self._ids(system) == rows["id"].to_pylist()

    def test_repeated_batch_ids_lose_nothing(self, system: System) -> None:
        """A checkpoint was restored: the sequence continues, but Spark's batch ids repeat."""
        rows = self.rows_of(system)
        with opened(system) as sink:
            for sequence, batch_id in ((5, 2), (6, 3), (7, 2), (8, 3)):
                txn = new_txn(sequence)
                one = rows.slice(sequence - 5, 1)
                assert sink.prepare(txn, stage(sink, one, batch_id, tasks=1), deadline()) == OK
                # A zombie driver from before the restore tidies up late.
                with opened(system) as zombie:
                    zombie.tidy(3, deadline())
                assert sink.commit(txn, deadline()) == OK, "tidy deleted what was prepared"
                sink.tidy(batch_id, deadline())
                assert list(sink.recover(deadline())) == []
        assert self._ids(system) == rows["id"].to_pylist()[:4]

    def _ids(self, system: System) -> list[Any]:
        return sorted(row["id"] for row in system.visible())

    def test_two_processes_commit_at_once(self, system: System) -> None:
        """A zombie driver and the new driver commit the same batch at once."""
        txn = new_txn()
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, self.rows_of(system)), deadline()) == OK
        outcomes: list[Outcome] = []
        start = threading.Barrier(2)

        def commit() -> None:
            with opened(system) as own:
                start.wait()
                outcomes.append(_outcome(lambda: own.commit(txn, deadline())))

        threads = [threading.Thread(target=commit) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        with opened(system) as sink:
            assert OK in outcomes, outcomes
            assert not any(isinstance(each, Fatal) for each in outcomes), outcomes
            assert sink.commit(txn, deadline()) == OK
            assert list(sink.recover(deadline())) == []
        assert self.times(system) == 1

    def test_a_zombie_prepares_after_the_commit(self, system: System) -> None:
        """A zombie driver prepares after the new driver has committed.

        No token names the zombie's id, so the next start aborts it.
        """
        rows = self.rows_of(system)
        late, good = new_txn(), new_txn()
        with opened(system) as zombie, opened(system) as sink:
            zombies, staged = stage(zombie, rows), stage(sink, rows)
            assert sink.prepare(good, staged, deadline()) == OK
            assert sink.commit(good, deadline()) == OK
            sink.tidy(BATCH, deadline())
            # If tidy has deleted what the zombie staged, its prepare fails, which is correct too.
            prepared = _outcome(lambda: zombie.prepare(late, zombies, deadline())) == OK
            assert self.times(system) == 1
        with opened(system) as sink:
            found = list(sink.recover(deadline()))
            assert late in found if prepared else found in ([], [late])
            assert sink.abort(late, deadline()) == OK
            assert list(sink.recover(deadline())) == []
            assert sink.abort(good, deadline()) == OK, "an abort after the commit must have no effect"
        assert self.times(system) == 1


def _next(state: str, call: str, outcome: Outcome, order: Sequence[str]) -> str:
    """Checks an outcome against the table of the contract; returns the next state."""
    text = f"{call} in state {state!r} returned {outcome} (order {order})"
    if call == "prepare":
        if state == "aborted" and isinstance(outcome, Fatal):
            return state
        assert outcome == OK, text
        return "committed" if state == "committed" else "prepared"
    if call == "commit":
        if state in ("unknown", "aborted"):
            assert isinstance(outcome, Fatal), f"{text}: a lost batch would go unnoticed"
            return state
        assert outcome == OK, text
        return "committed"
    assert outcome == OK, text
    return "committed" if state == "committed" else "aborted"


def _outcome(call: Callable[[], Outcome]) -> Outcome:
    try:
        return call()
    except (RetriableError, OSError) as error:
        return Retryable(str(error))
    except Exception as error:  # noqa: BLE001 - the contract lets a sink raise anything
        return Fatal(str(error))

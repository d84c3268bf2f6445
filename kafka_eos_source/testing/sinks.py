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

import functools
import inspect
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from kafka_eos_source.errors import RetriableError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import manifest
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    Refused,
    Retryable,
    SinkContext,
    SinkTxn,
    StageContext,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.testing.kills import count_lines, killed_at, spread

_SECONDS = 60.0
#: The application.id and the name of the sink under test.
APPLICATION = SINK = "conformance"
#: Kafka's id of the cluster of the query under test.
CLUSTER_ID = "Conformance-Cluster_01"
#: The cluster of the same query in another region.
OTHER_CLUSTER_ID = "Conformance-Cluster_02"
#: Spark's batch id of the rows that tests stage. Sink transaction ids contain a sequence number instead.
BATCH = 3

#: The rows that a reader sees, as dicts, in any order.
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class System:
    """The outside system, and how a test reads it.

    Attributes:
        sink: returns a new, closed sink for this system, as a new process would create it.
        visible: returns the rows that a reader of the system sees, which must be committed rows only. If
            readers of the sink recognise batches by a manifest, these are the rows that such a reader sees.
        store: folder of the checkpoint, for sinks that keep prepared state there; each sink has its own
            folder in it.
        in_process: whether the system is the memory of this process; a kill is then an exception.
        rows: rows to write; None = `ROWS`. They need a unique column ``id``.
        poison: rows that the system refuses, whatever else is in the batch; None = the tests of such rows are
            skipped. Each must have an ``id`` that no other row has, and the schema of the rows to write.
        digests: what `prepare` returned for each id, which the token in Kafka would hold.
    """

    sink: Callable[[], TwoPhaseSink]
    visible: Callable[[], Rows]
    store: str | None = None
    in_process: bool = False
    rows: pa.Table | None = None
    poison: pa.Table | None = None
    digests: dict[SinkTxn, str] = field(default_factory=dict)


ROWS = pa.table(
    {
        "id": pa.array(range(5), pa.int64()),
        "name": pa.array(["a", "", None, "quote ' \" \\ , ; \n tab\t", "žluťoučký 🐎"], pa.string()),
        "amount": pa.array([0.5, -1.25, None, 1e15, 0.0], pa.float64()),
    }
)


@dataclass
class Given:
    """`contract.Staged` over the rows that the test's tasks staged."""

    schema: pa.Schema
    rows: int
    receipts: list[Any]

    def batches(self) -> Iterator[pa.RecordBatch]:
        for receipt in self.receipts:
            yield from receipt


@dataclass
class _Parts:
    """`Stage` in memory, instead of the checkpoint's staging folder."""

    taken: list[pa.RecordBatch] = field(default_factory=list)

    def write(self, batch: pa.RecordBatch) -> None:
        self.taken.append(batch)

    def finish(self) -> list[pa.RecordBatch]:
        return self.taken

    def discard(self) -> None:
        self.taken = []


def new_txn(
    sequence: int = 7, application_id: str = APPLICATION, sink: str = SINK, cluster_id: str = CLUSTER_ID
) -> SinkTxn:
    """Returns a sink transaction id that was never used."""
    return SinkContext(sink, application_id, cluster_id).txn(sequence, SinkTxn.new_attempt())


def deadline() -> Deadline:
    """Returns a deadline that is far enough for any single call."""
    return Deadline.after_seconds(_SECONDS)


@contextmanager
def opened(
    system: System, application_id: str = APPLICATION, name: str = SINK, cluster_id: str = CLUSTER_ID
) -> Iterator[TwoPhaseSink]:
    """Opens a new sink, as a new process would."""
    sink = system.sink()
    store = None if system.store is None else NotesFolder(os.path.join(system.store, name))
    sink.open(SinkContext(name, application_id, cluster_id, store))
    _pass_digests(sink, system.digests)
    try:
        yield sink
    finally:
        sink.close()


def _pass_digests(sink: TwoPhaseSink, digests: dict[SinkTxn, str]) -> None:
    """Passes the digest that `prepare` returns to `commit`, as the driver does through the token in Kafka."""
    prepare, commit = sink.prepare, sink.commit

    def remembered(txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        outcome = prepare(txn, staged, deadline)
        if isinstance(outcome, Ok) and outcome.digest:
            digests[txn] = outcome.digest
        return outcome

    def vouched(txn: SinkTxn, deadline: Deadline) -> Outcome:
        return commit(txn if txn.digest else replace(txn, digest=digests.get(txn, "")), deadline)

    sink.prepare, sink.commit = remembered, vouched  # type: ignore[method-assign]


def stage(sink: TwoPhaseSink, rows: pa.Table, batch_id: int = BATCH, tasks: int = 2) -> Given:
    """Stages the rows with several tasks."""
    tokens = []
    size = -(-rows.num_rows // tasks)
    for start in range(0, rows.num_rows, size):
        to_parts = sink.stage(StageContext(batch_id, uuid.uuid4().hex, rows.schema, _Parts))
        for batch in rows.slice(start, size).to_batches():
            to_parts.write(batch)
        tokens.append(to_parts.finish())
    return Given(rows.schema, rows.num_rows, tokens)


# -- tests that kill the sink ----------------------------------------------------------------------


class SinkKills:
    """The tests with kills, and what all conformance tests use.

    Attributes:
        most_kills: number of lines at which each call is killed; all lines if there are fewer.
        upserts: whether the sink replaces rows with the same ``id``, so that they exist once however often
            they are written.
    """

    most_kills: ClassVar[int] = 30
    upserts: ClassVar[bool] = False

    @pytest.fixture
    def system(self) -> System:
        raise NotImplementedError("a conformance test needs a fixture 'system'")

    def rows_of(self, system: System) -> pa.Table:
        """Returns the rows to write."""
        return ROWS if system.rows is None else system.rows

    def times(self, system: System) -> int:
        """Returns how often the rows are visible. Fails if only a part of a batch is visible."""
        seen = [row["id"] for row in system.visible()]
        wanted = self.rows_of(system)["id"].to_pylist()
        counts = {seen.count(each) for each in wanted}
        assert len(counts) == 1, f"a part of a batch is visible: ids {sorted(seen)} of {wanted}"
        assert set(seen) <= set(wanted), "rows are visible that were never written"
        return counts.pop()

    def _once_more(self, before: int) -> int:
        return 1 if self.upserts else before + 1

    def test_killed_while_it_finds_rows_that_it_refuses(self, system: System) -> None:
        """Nothing of the batch may stay, and the batch without these rows can be prepared."""
        good, mixed = self.rows_of(system), self._with_poison(system)
        if mixed.num_rows == good.num_rows:
            pytest.skip("all of the poison rows break rules that tasks check")
        for line, txn, before in self._kills(system, "prepare", mixed):
            with opened(system) as sink:
                assert list(sink.recover(deadline())) in ([], [txn]), line
                assert self.times(system) == before, line
                assert sink.abort(txn, deadline()) == OK, line
                again = new_txn()
                assert sink.prepare(again, stage(sink, good), deadline()) == OK, line
                assert list(sink.recover(deadline())) == [again], line
                assert sink.abort(again, deadline()) == OK, line
                assert self.times(system) == before, line

    def _with_poison(self, system: System) -> pa.Table:
        """Returns good rows and, among them, the poison rows that break no rule of the sink for rows.

        Fails if a good row breaks such a rule.
        """
        good, poison = self.rows_of(system), system.poison
        if poison is None:
            pytest.skip("the test names no rows that the system refuses")
        mixed = pa.concat_tables([good.slice(0, 1), poison, good.slice(1)])
        with opened(system) as sink:
            sink.make_ready(mixed.schema, deadline())
            rules = sink.row_rules(mixed.schema, deadline())
        whole = mixed.combine_chunks()
        broken = {rule: rule.broken(whole[rule.column].combine_chunks()).to_pylist() for rule in rules}
        ids, bad = whole["id"].to_pylist(), set(poison["id"].to_pylist())
        for rule, rows in broken.items():
            found = {each for each, is_broken in zip(ids, rows, strict=True) if is_broken}
            stricter = sorted(found - bad)
            assert not stricter, f"good rows break the rule {rule}: {stricter}"
        passed = [number for number in range(len(ids)) if not any(rows[number] for rows in broken.values())]
        return whole.take(passed)

    @pytest.mark.parametrize("then", ["abort", "prepare again"])
    def test_killed_while_it_prepares(self, system: System, then: str) -> None:
        for line, txn, _ in self._kills(system, "prepare"):
            with opened(system) as sink:
                found = list(sink.recover(deadline()))
                assert found in ([], [txn]), (line, found)
                if then == "prepare again":
                    again = stage(sink, self.rows_of(system))
                    assert sink.prepare(txn, again, deadline()) == OK, line
                    assert list(sink.recover(deadline())) == [txn], line
                assert self.times(system) == 0, line
                assert sink.abort(txn, deadline()) == OK, line
                assert list(sink.recover(deadline())) == [], line
                assert self.times(system) == 0, line

    def test_killed_while_it_commits(self, system: System) -> None:
        for line, txn, before in self._kills(system, "commit"):
            with opened(system) as sink:
                found = list(sink.recover(deadline()))
                assert found in ([], [txn]), (line, found)
                if not found:
                    assert self.times(system) == self._once_more(before), (
                        f"a kill at line {line} lost the batch"
                    )
                assert sink.commit(txn, deadline()) == OK, line
                assert list(sink.recover(deadline())) == [], line
            assert self.times(system) == self._once_more(before), line

    def test_killed_while_it_aborts(self, system: System) -> None:
        for line, txn, before in self._kills(system, "abort"):
            with opened(system) as sink:
                assert list(sink.recover(deadline())) in ([], [txn]), line
                assert sink.abort(txn, deadline()) == OK, line
                assert list(sink.recover(deadline())) == [], line
            assert self.times(system) == before, line

    def _kills(
        self, system: System, call: str, rows: pa.Table | None = None
    ) -> Iterator[tuple[int, SinkTxn, int]]:
        """Kills the same call again and again, each time at another line.

        Args:
            rows: what to prepare; None = the usual rows.

        Yields:
            The number of the line, the id, and how often the rows were visible before.
        """
        watched = _watched(system.sink())
        fork = not system.in_process

        def act(txn: SinkTxn) -> None:
            with opened(system) as sink:
                if call == "prepare":
                    sink.prepare(txn, stage(sink, self.rows_of(system) if rows is None else rows), deadline())
                else:
                    getattr(sink, call)(txn, deadline())

        def prepared_id() -> SinkTxn:
            txn = new_txn()
            if call != "prepare":
                with opened(system) as sink:
                    assert sink.prepare(txn, stage(sink, self.rows_of(system)), deadline()) == OK
            return txn

        whole = prepared_id()
        lines = count_lines(lambda: act(whole), watched, fork=fork)
        with opened(system) as sink:
            assert sink.abort(whole, deadline()) == OK
        for line in spread(lines, self.most_kills):
            txn = prepared_id()
            before = self.times(system)
            killed_at(functools.partial(act, txn), watched, line, fork=fork)
            yield line, txn, before


def _watched(sink: TwoPhaseSink) -> list[str]:
    """Returns the sink's own files: module, package, modules of base classes, notes folder.

    The sinks of this project share a package. Of these, the modules count whose names begin like the sink's.
    """
    file = inspect.getfile(type(sink))
    folder = os.path.dirname(file)
    is_ours = folder == os.path.dirname(inspect.getfile(manifest))
    package = os.path.exists(os.path.join(folder, "__init__.py")) and not is_ours
    bases = [
        inspect.getfile(each)
        for each in type(sink).__mro__
        if issubclass(each, TwoPhaseSink) and each is not TwoPhaseSink
    ]
    own = folder + os.sep if package else file.removesuffix(".py") if is_ours else file
    return [own, inspect.getfile(manifest), *bases]


# -- all tests -------------------------------------------------------------------------------------

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
            sink.make_ready(rows.schema, deadline())
            assert sink.prepare(txn, stage(sink, rows), deadline()) == OK
            assert sink.commit(txn, deadline()) == OK
        found = sorted(system.visible(), key=lambda row: row["id"])
        wanted = sorted(rows.to_pylist(), key=lambda row: row["id"])
        assert [{name: row[name] for name in rows.schema.names} for row in found] == wanted

    def test_the_rows_that_the_system_refuses_are_named(self, system: System) -> None:
        """All at once, whatever the order of the rows, and nothing is prepared under the id."""
        good, mixed = self.rows_of(system), self._with_poison(system)
        bad = set(system.poison["id"].to_pylist()) if system.poison is not None else set()
        backwards = mixed.take(list(range(mixed.num_rows))[::-1])
        txn = new_txn()
        with opened(system) as sink:
            sink.make_ready(good.schema, deadline())
            for rows in (mixed, backwards) if mixed.num_rows > good.num_rows else ():
                assert sink.refuses_rows, "the driver would not keep the rows"
                wanted = {number for number, each in enumerate(rows["id"].to_pylist()) if each in bad}
                outcome = sink.prepare(txn, stage(sink, rows), deadline())
                assert isinstance(outcome, Refused), outcome
                assert set(outcome.rows) == wanted, outcome
                assert all(each.why for each in outcome.rows.values()), "each row needs a reason"
                assert list(sink.recover(deadline())) == [], "a part of the batch stays prepared"
                assert isinstance(sink.commit(txn, deadline()), Fatal), "the refused batch was committed"
                assert self.times(system) == 0, "a part of the batch is visible"
            assert sink.prepare(txn, stage(sink, good), deadline()) == OK
            assert sink.commit(txn, deadline()) == OK
        assert self.times(system) == 1

    def test_a_batch_of_rows_that_are_all_refused_leaves_nothing(self, system: System) -> None:
        mixed = self._with_poison(system)
        bad = set(system.poison["id"].to_pylist()) if system.poison is not None else set()
        only = mixed.take([n for n, each in enumerate(mixed["id"].to_pylist()) if each in bad])
        if not only.num_rows:
            pytest.skip("all of the poison rows break rules that tasks check")
        with opened(system) as sink:
            outcome = sink.prepare(new_txn(), stage(sink, only), deadline())
            assert isinstance(outcome, Refused), outcome
            assert set(outcome.rows) == set(range(only.num_rows))
            assert list(sink.recover(deadline())) == []

    def test_a_check_has_no_effect(self, system: System) -> None:
        """Anybody may call it at any time, also while another process has a batch prepared."""
        rows = self.rows_of(system)

        def check(application_id: str) -> None:
            sink = system.sink()
            sink.open(SinkContext(SINK, application_id, CLUSTER_ID))
            try:
                sink.check(rows.schema, deadline())
            finally:
                sink.close()

        txn = new_txn()
        check(APPLICATION)
        with opened(system) as sink:
            check(APPLICATION)
            staged = stage(sink, rows)
            check("other")
            assert self.times(system) == 0
            assert sink.prepare(txn, staged, deadline()) == OK
            check(APPLICATION)
            assert list(sink.recover(deadline())) == [txn], "the check removed what is prepared"
            assert self.times(system) == 0, "the check made rows visible"
            assert sink.commit(txn, deadline()) == OK
            check(APPLICATION)
            check("other")
            assert self.times(system) == 1
            assert sink.commit(txn, deadline()) == OK, "after the check, the sink forgot what it committed"
            assert list(sink.recover(deadline())) == []

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

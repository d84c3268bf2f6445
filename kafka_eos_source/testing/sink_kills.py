"""Conformance tests that kill a sink at every line of every call, and let a new process recover."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from typing import ClassVar

import pyarrow as pa
import pytest

from kafka_eos_source.sinks import manifest
from kafka_eos_source.sinks.contract import OK, SinkTxn, TwoPhaseSink
from kafka_eos_source.testing.kills import count_lines, killed_at, spread
from kafka_eos_source.testing.sink_system import ROWS, System, deadline, new_txn, opened, stage


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

    def _kills(self, system: System, call: str) -> Iterator[tuple[int, SinkTxn, int]]:
        """Kills the same call again and again, each time at another line.

        Yields:
            The number of the line, the id, and how often the rows were visible before.
        """
        watched = _watched(system.sink())
        fork = not system.in_process

        def act(txn: SinkTxn) -> None:
            with opened(system) as sink:
                if call == "prepare":
                    sink.prepare(txn, stage(sink, self.rows_of(system)), deadline())
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

"""The journals of live figures: bounded, private, and readable whatever happened to their writer."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe import journal
from kafka_eos_source.observe.figures import (
    MOST_TOPICS,
    OTHER_TOPICS,
    BatchFigures,
    Event,
    EventKind,
    Outcome,
    SourceFigures,
    SourceState,
    WaitingCommit,
    bounded,
    newer,
    position_id,
    with_totals,
)
from kafka_eos_source.observe.journal import Journal, QueryJournal, SourceFile, query_journals
from kafka_eos_source.observe.lines import ProcessId, Writer, this_writer
from kafka_eos_source.observe.source import figures_in, with_figures
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.runtime import folders
from kafka_eos_source.runtime.folders import NotOwnError, PrivateFolder
from tests.observe.figures_kit import BATCH, SOURCE, WAITING, WRITER


def test_text_and_numbers_that_json_does_not_have_cost_no_line_and_stop_no_plan() -> None:
    """An error may quote a path that is not UTF-8, and a sink may report a figure that is no number."""
    odd = replace(BATCH, error="/data/\udcff 😀", gauges={"a": float("inf"), "b": float("nan"), "c": 1.5})
    read = BatchFigures.from_json(odd.to_json())
    assert read is not None
    assert (read.error, read.gauges) == ("/data/? 😀", {"c": 1.5})
    assert figures_in(with_figures({}, odd)) == read
    assert BatchFigures.from_json(replace(BATCH, error="\\ud800 😀").to_json()).error == "\\ud800 😀"  # type: ignore[union-attr]
    waiting = WaitingCommit.from_json(replace(WAITING, reason="\udcff").to_json())
    assert waiting is not None
    assert waiting.reason == "?"


def batches_folder(shared: Path) -> Path:
    return shared / f"kafka-eos-live-{os.getuid()}" / "batches"


def write(number: int, run_id: str = "run", outcome: Outcome = Outcome.COMMITTED) -> None:
    """Appends one batch as the committing process does."""
    made = Journal(BATCH.application_id)
    made.newest("run")
    made.finished(replace(BATCH, batch_id=number, run_id=run_id, outcome=outcome))


def read() -> list[int]:
    (found,) = query_journals()
    return [each.batch_id for each in found.batches]


# -- lines -----------------------------------------------------------------------------------------


def test_totals_cover_a_run_and_runs_are_counted() -> None:
    first = with_totals(replace(BATCH, seconds={"tasks": 0.04}), None)
    second = with_totals(replace(BATCH, seconds={"tasks": 0.7, "produce": 0.1}), first)
    assert second.total_seconds == {"tasks": 0.74, "produce": 0.1}
    assert (second.totals["batches"], second.runs) == (2, 1)
    restarted = with_totals(replace(BATCH, run_id="another", seconds={"tasks": 400.0}), second)
    assert (restarted.totals["batches"], restarted.runs) == (1, 2)


def test_the_figures_of_topics_are_bounded_and_only_grow() -> None:
    """A query may write each record to a topic of its own; labels of metrics stay few."""
    topics = {f"t{number}": {"records": number, "bytes": 10 * number} for number in range(MOST_TOPICS + 10)}
    first = with_totals(replace(BATCH, topics=topics), None)
    assert first.topics == first.topic_totals == bounded(topics)
    assert set(first.topic_totals) == {f"t{number}" for number in range(10, MOST_TOPICS + 10)} | {
        OTHER_TOPICS
    }
    assert first.topic_totals[OTHER_TOPICS] == {"records": 45, "bytes": 450}
    second = with_totals(
        replace(BATCH, topics={"t59": {"records": 1, "bytes": 1}, "new": {"records": 5}}), first
    )
    assert second.topic_totals["t59"] == {"records": 60, "bytes": 591}
    assert second.topic_totals[OTHER_TOPICS]["records"] == 50
    # a named topic keeps its name in a batch with many larger ones
    flood = {f"x{number}": {"records": 1000} for number in range(MOST_TOPICS)}
    third = with_totals(replace(BATCH, topics={**flood, "t59": {"records": 1, "bytes": 1}}), second)
    assert third.topic_totals["t59"] == {"records": 61, "bytes": 592}
    assert third.topics == {OTHER_TOPICS: {"records": 1000 * MOST_TOPICS}, "t59": {"records": 1, "bytes": 1}}


def test_the_longest_line_of_a_batch_is_found_as_the_newest(shared: Path) -> None:
    topics = {f"{number:02}".ljust(249, "t"): {"records": 1, "bytes": 1} for number in range(MOST_TOPICS)}
    events = tuple(Event(1000.1, EventKind.RETRIED, "e" * 300) for _ in range(20))
    Journal(BATCH.application_id).finished(replace(BATCH, topics=topics, events=events))
    found = journal.newest_batch(BATCH.application_id)
    assert found is not None
    assert len(found.to_json()) > 32 << 10


def test_files_of_former_queries_are_deleted_every_day(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that makes batch writes may run for months."""
    now = 0.0
    clocks = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(folders, "time", clocks)
    write(1)
    (old,) = batches_folder(shared).iterdir()
    os.utime(old, (1, 1))
    another = replace(BATCH, application_id="another")
    Journal("another").finished(another)
    assert old.exists(), "the process has looked for such files today"
    now = 25 * 3600.0
    Journal("another").finished(another)
    assert not old.exists()


def test_figures_that_a_line_lacks_have_their_defaults() -> None:
    line = json.loads(BATCH.to_json())
    for name in ("total_seconds", "runs", "state", "gauges", "topics", "links"):
        del line[name]
    found = BatchFigures.from_json(json.dumps(line))
    assert found is not None
    assert (found.runs, found.state, found.topics) == (1, {}, {})
    assert with_totals(BATCH, found).total_seconds == BATCH.seconds
    source = json.loads(SOURCE.to_json())
    for name in ("hidden", "hidden_since", "retention"):
        del source[name]
    read = SourceFigures.from_json(json.dumps(source))
    assert read is not None
    assert read.hidden_since is None


def test_lines_survive_the_journey() -> None:
    assert BatchFigures.from_json(BATCH.to_json()) == BATCH
    assert WaitingCommit.from_json(WAITING.to_json()) == WAITING
    assert SourceFigures.from_json(SOURCE.to_json()) == SOURCE


@given(
    line=st.sampled_from([BATCH.to_json(), WAITING.to_json(), SOURCE.to_json()]),
    cut=st.integers(0, 2000),
    more=st.text(max_size=20),
    rest=st.booleans(),
)
def test_a_damaged_line_is_never_taken_for_another(line: str, cut: int, more: str, rest: bool) -> None:
    """Whatever stands in a line, reading it does not raise, and never returns wrong kinds of values."""
    damaged = line[:cut] + more + (line[cut:] if rest else "")
    for kind in (BatchFigures, WaitingCommit, SourceFigures):
        found = kind.from_json(damaged)
        assert found is None or kind.from_json(found.to_json()) == found


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)
)
def test_values_of_another_type_are_refused(value: object) -> None:
    for made in (BATCH, WAITING, SOURCE):
        found = json.loads(made.to_json())
        for name in found:
            kind = type(made)
            again = kind.from_json(json.dumps({**found, name: value}))
            assert again is None or isinstance(again, kind)


@pytest.mark.parametrize("change", [{"v": 2}, {"kind": "other"}])
def test_lines_of_a_later_version_are_left_out(change: dict[str, object]) -> None:
    assert BatchFigures.from_json(json.dumps({**json.loads(BATCH.to_json()), **change})) is None


def test_keys_of_a_later_version_are_ignored() -> None:
    assert BatchFigures.from_json(json.dumps({**json.loads(BATCH.to_json()), "new": 1})) == BATCH


def test_figures_travel_in_the_offsets_that_a_source_reports() -> None:
    """Spark and other readers of ``lastProgress`` find the offsets where they were."""
    position = SourcePosition({TopicPartition("in", 0): 14}, cluster_id="c", topic_ids={"in": "id"})
    reported = with_figures(position.to_dict(), BATCH)
    assert reported["in"] == {"0": 14}
    assert SourcePosition.from_dict(reported) == position
    assert figures_in(reported) == BATCH
    assert with_figures(position.to_dict(), None) == position.to_dict()
    assert figures_in(position.to_dict()) is figures_in("{") is figures_in(None) is None


# -- files -----------------------------------------------------------------------------------------


def test_only_the_owner_can_read_a_journal(shared: Path) -> None:
    before = os.umask(0)
    try:
        write(1)
        Journal("app").waits(WAITING)
        SourceFile("s").write(SOURCE)
    finally:
        os.umask(before)
    files = [each for each in shared.rglob("*") if each.is_file()]
    assert len(files) == 3
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    assert {stat.S_IMODE(each.stat().st_mode) for each in shared.rglob("*") if each.is_dir()} == {0o700}


def test_a_journal_keeps_its_bound_and_its_newest_batches(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_JOURNAL_BYTES", 4000)
    for number in range(40):
        write(number)
    sizes = [each.stat().st_size for each in batches_folder(shared).iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) < 2 * 4000 + 2 * len(BATCH.to_json()) + 1000
    assert read()[-4:] == [36, 37, 38, 39]
    (found,) = query_journals()
    assert found.batches[-1].totals["batches"] == 40, "totals survive the lines that were dropped"


def test_two_processes_append_without_mixing_lines(shared: Path) -> None:
    """Spark may commit a batch in another process than the one before."""
    fork = multiprocessing.get_context("fork")
    lines = [("x" if number % 2 else "y") * 700 for number in range(2)]
    folder = PrivateFolder.of_user("kafka-eos-live")

    def append(line: str) -> None:
        for _ in range(200):
            folder.append("j", lambda _size: line, 20_000)

    writers = [fork.Process(target=append, args=(line,)) for line in lines]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
        assert each.exitcode == 0
    found = folder.lines("j", 1 << 20)
    assert set(found) <= set(lines)
    assert len(found) >= 20_000 // 701
    total = sum(each.stat().st_size for each in (shared / f"kafka-eos-live-{os.getuid()}").iterdir())
    assert total < 2 * 20_000 + 4 * 701


def test_a_writer_that_is_killed_within_a_line_damages_that_line_only(shared: Path) -> None:
    write(1)
    (file,) = batches_folder(shared).iterdir()

    def die() -> None:
        with file.open("ab") as out:
            out.write(BATCH.to_json().encode()[:200])
            out.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    writer = multiprocessing.get_context("fork").Process(target=die)
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    assert not file.read_bytes().endswith(b"\n")
    assert read() == [1]
    write(3)
    assert read() == [1, 3]
    (found,) = query_journals()
    assert found.batches[-1].totals["batches"] == 2


def test_damaged_bytes_hide_only_their_line(shared: Path) -> None:
    write(1)
    (file,) = batches_folder(shared).iterdir()
    with file.open("ab") as out:
        out.write(b"\xff\xfe\x00{]\n\n" + b"[" * 5000 + b"\n")
    write(2)
    assert read() == [1, 2]


def test_a_planted_link_is_not_followed(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "authorized_keys"
    victim.write_text("precious")
    folder = PrivateFolder.of_user("kafka-eos-live").folder("batches")
    Path(folder.create(), "app").symlink_to(victim)
    with pytest.raises(NotOwnError):
        folder.append("app", lambda _size: "line", 1000)
    with caplog.at_level(logging.WARNING):
        Journal("app").finished(BATCH)
        Journal("app").finished(BATCH)
    assert victim.read_text() == "precious"
    assert len(caplog.records) == 1, "the problem is logged once"


def test_a_named_pipe_does_not_block_the_commit(shared: Path) -> None:
    folder = PrivateFolder.of_user("kafka-eos-live").folder("batches")
    os.mkfifo(Path(folder.create(), "app"))
    Journal("app").finished(BATCH)  # would wait for a reader


def test_a_commit_does_not_notice_that_the_disk_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    made = Journal("app")
    assert made.newest("run") is None
    made.finished(BATCH)
    made.waits(WAITING)
    made.proceeds()


def test_files_of_former_queries_are_deleted_by_age(shared: Path) -> None:
    write(1)
    (old,) = batches_folder(shared).iterdir()
    os.utime(old, (1, 1))
    folders._tidied.clear()
    Journal("another").finished(replace(BATCH, application_id="another"))
    assert [each.application_id for each in query_journals()] == ["another"]


def test_an_id_that_is_too_long_for_a_file_name_has_a_journal() -> None:
    long = replace(BATCH, application_id="ä" * 200)
    Journal(long.application_id).finished(long)
    assert [each.application_id for each in query_journals()] == [long.application_id]
    assert journal.newest_batch(long.application_id) is not None


def test_journals_of_queries_that_nobody_wants_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "orders-" + "ä" * 200
    for name in ("orders-1", "payments", long):
        Journal(name).finished(replace(BATCH, application_id=name))
    read: list[str] = []
    lines = PrivateFolder.lines
    monkeypatch.setattr(
        PrivateFolder, "lines", lambda self, name, most: read.append(name) or lines(self, name, most)
    )
    wanted = query_journals(is_wanted=lambda name: name.startswith("orders-"))
    assert {each.application_id for each in wanted} == {"orders-1", long}
    assert "payments" not in read
    read.clear()
    assert query_journals(is_wanted=lambda name: name == "payments")[0].application_id == "payments"
    assert "orders-1" not in read


# -- totals and joins ------------------------------------------------------------------------------


def test_totals_cover_the_run_whichever_process_commits() -> None:
    write(0, "former run")
    for number in range(1, 4):
        write(number)
    write(4, outcome=Outcome.FAILED)
    (found,) = query_journals()
    newest = found.batches[-1]
    assert newest.totals == {"records": 40, "committed": 4, "batches": 4, "failed": 1}
    assert newest.sink_totals["files"]["rows"] == 40
    assert newest.totals_since == BATCH.began_at


def committed(number: int, run_id: str = "run") -> BatchFigures:
    return replace(BATCH, batch_id=number, run_id=run_id, ended_at=BATCH.ended_at + number)


def test_totals_continue_while_the_journal_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that does not answer must not look like a new run: counters would go backwards."""
    for number in range(3):
        write(number)
    with monkeypatch.context() as broken:

        def fails(*_arguments: object) -> list[str]:
            raise TimeoutError(110, "Connection timed out")

        broken.setattr(PrivateFolder, "lines", fails)
        broken.setattr(PrivateFolder, "append", fails)
        made = Journal(BATCH.application_id)
        known = made.newest("another run")
        assert known is not None
        assert known.totals["batches"] == 3
        made.finished(committed(3))  # the line is lost, and its figures are remembered
    made = Journal(BATCH.application_id)
    made.newest("run")
    made.finished(committed(4))
    (found,) = query_journals()
    assert [each.totals["batches"] for each in found.batches] == [1, 2, 3, 5]
    assert {each.runs for each in found.batches} == {1}


def test_a_process_that_knows_nothing_writes_no_totals_before_it_has_read_the_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(0)
    monkeypatch.setattr(journal, "_remembered", {})  # as in a process that has just started
    lines = PrivateFolder.lines

    def fails(*_arguments: object) -> list[str]:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(PrivateFolder, "lines", fails)
    made = Journal(BATCH.application_id)
    assert made.newest("run") is None
    made.finished(committed(1))
    monkeypatch.setattr(PrivateFolder, "lines", lines)
    assert read() == [0], "no line with totals that begin again"
    made = Journal(BATCH.application_id)
    monkeypatch.setattr(PrivateFolder, "lines", fails)
    assert made.newest("run") is None
    monkeypatch.setattr(PrivateFolder, "lines", lines)  # the folder answers again while the commit runs
    made.finished(committed(2))
    (found,) = query_journals()
    assert [each.totals["batches"] for each in found.batches] == [1, 2]


def test_a_commit_that_failed_before_it_read_the_journal_continues_its_totals() -> None:
    write(0)
    Journal(BATCH.application_id).finished(replace(committed(1), outcome=Outcome.FAILED))
    (found,) = query_journals()
    assert found.batches[-1].totals == {
        **BATCH.counts,
        "records": 20,
        "committed": 2,
        "batches": 2,
        "failed": 1,
    }


def test_another_process_that_committed_meanwhile_is_newer_than_what_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(0)
    own = dict(journal._remembered)
    write(1)
    write(2)
    monkeypatch.setattr(journal, "_remembered", own)
    write(3)
    (found,) = query_journals()
    assert [each.totals["batches"] for each in found.batches] == [1, 2, 3, 4]


def test_a_process_that_wrote_the_last_line_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading would delay each commit, and the process knows the line."""
    write(0)

    def unexpected(*_arguments: object) -> list[str]:
        raise AssertionError("the journal was read")

    with monkeypatch.context() as unread:
        unread.setattr(PrivateFolder, "lines", unexpected)
        write(1)
        assert (
            Journal(BATCH.application_id).newest("run") == journal._remembered[BATCH.application_id].figures
        )
    assert read() == [0, 1]
    (found,) = query_journals()
    assert found.batches[-1].totals["batches"] == 2


def test_a_journal_that_was_deleted_continues_what_is_remembered(shared: Path) -> None:
    write(0)
    (file,) = batches_folder(shared).iterdir()
    file.unlink()
    write(1)
    (found,) = query_journals()
    assert [each.totals["batches"] for each in found.batches] == [2]


def test_the_newer_batch_of_a_run_is_the_one_that_counted_more() -> None:
    one = with_totals(BATCH, None)
    two = with_totals(replace(BATCH, ended_at=BATCH.ended_at - 60), one)  # the clock was set back
    assert newer(one, two) is newer(two, one) is two
    restarted = with_totals(replace(BATCH, run_id="another", ended_at=BATCH.ended_at + 1), two)
    assert newer(two, restarted) is newer(restarted, two) is restarted
    assert newer(None, one) is newer(one, None) is one


def test_processes_remember_few_queries() -> None:
    for number in range(journal._MOST_REMEMBERED + 5):
        Journal(f"{number}").finished(replace(BATCH, application_id=f"{number}"))
    assert len(journal._remembered) == journal._MOST_REMEMBERED


def test_a_source_finds_its_query_by_a_position_in_the_same_driver() -> None:
    query = QueryJournal("app", (replace(BATCH, writer=WRITER),))
    stranger = Writer(ProcessId(20, 1.0), ProcessId(19, 1.0))
    elsewhere = replace(SOURCE, writer=stranger)
    other = replace(SOURCE, positions=("xyz",))
    named = replace(elsewhere, application_id="app", name="named")
    assert journal.sources_of(query, [SOURCE]) == (SOURCE,)
    assert journal.sources_of(query, [elsewhere, other]) == ()
    assert journal.sources_of(query, [named]) == (named,)
    former = replace(SOURCE, at=SOURCE.at - 100, state=SourceState.STOPPED)
    assert journal.sources_of(query, [SOURCE, former]) == (SOURCE,), "only the newest run counts"


def test_positions_differ_if_any_offset_does() -> None:
    first = {TopicPartition("a", 0): 1, TopicPartition("a", 1): 2}
    assert position_id(first) == position_id(dict(reversed(first.items())))
    assert position_id(first) != position_id({**first, TopicPartition("a", 1): 3})


def test_this_process_is_alive_and_its_number_alone_is_not_enough() -> None:
    own = this_writer().process
    assert own.is_alive()
    assert ProcessId.from_json(json.loads(json.dumps(own.to_json()))) == own, (
        "it is compared with what was read"
    )
    assert not ProcessId(own.pid, own.started_at - 60).is_alive()

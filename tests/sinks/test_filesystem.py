"""The filesystem sink: two drivers that commit one batch, leftovers of kills."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.sinks import OK, Fatal, constructors
from kafka_eos_source.sinks import filesystem as module
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.testing.sinks import System, deadline, new_txn, opened, stage

DRIVERS, TIMES = 3, 60
ROWS = pa.table({"n": [1, 2, 3]})


@pytest.fixture
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switching_often")
def test_of_two_drivers_that_commit_one_batch_the_second_finds_it_committed(tmp_path: Path) -> None:
    for number in range(TIMES):
        folder = tmp_path / str(number)
        system = System(sink=lambda at=folder: constructors.files(str(at)).build(), visible=list)
        txn, outcomes = new_txn(), []
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        start = threading.Barrier(DRIVERS)

        def commit(system: System = system, start: threading.Barrier = start) -> None:
            with opened(system) as own:
                start.wait()
                outcomes.append(own.commit(txn, deadline()))  # noqa: B023 - joined before the next one

        threads = [threading.Thread(target=commit) for _ in range(DRIVERS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert outcomes == [OK] * DRIVERS
        assert sum(pq.read_table(file).num_rows for file in committed_files(str(folder))) == len(ROWS)
        assert not list(folder.glob("_kafka_eos/*/ending/*")), "nothing gathered is left"


def test_an_abort_that_is_killed_between_its_deletions_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator aborts a batch whose commit had begun to move files; the next start finishes the abort."""
    system = System(sink=lambda: constructors.files(str(tmp_path)).build(), visible=list)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "reach", _raising("sink.filesystem.before_record"))
            with pytest.raises(KeyboardInterrupt):
                sink.commit(txn, deadline())
    gathered, notes = (list(tmp_path.glob(f"_kafka_eos/*/{each}/*")) for each in ("ending", "prepared"))
    assert (len(gathered), len(notes)) == (1, 1)
    with opened(system) as sink, monkeypatch.context() as patch:
        patch.setattr(failpoints, "reach", _raising("sink.filesystem.within_abort"))
        with pytest.raises(KeyboardInterrupt):
            sink.abort(txn, deadline())
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn], "what is half aborted is found"
        assert sink.abort(txn, deadline()) == OK
        assert list(sink.recover(deadline())) == []
    assert not list(tmp_path.glob("_kafka_eos/*/ending/*")), "the folder that was gathered leaked"
    assert not list(tmp_path.glob("_kafka_eos/*/prepared/*"))


def test_an_application_id_too_long_for_file_names_is_refused_at_the_start(tmp_path: Path) -> None:
    """The error would look like a temporary failure of the disk if only `prepare` raised it."""
    system = System(sink=lambda: constructors.files(str(tmp_path)).build(), visible=list)
    longest, name = "a" * (194 - 4), "sink"
    with opened(system, longest, name) as sink:
        sink.make_ready(ROWS.schema, deadline())
        txn = new_txn(10**19 - 1, longest, name)
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    with opened(system, f"{longest}a", name) as sink, pytest.raises(InvalidOptionError, match="195 bytes"):
        sink.make_ready(ROWS.schema, deadline())


def test_two_sinks_of_different_formats_share_a_path_without_losing_rows(tmp_path: Path) -> None:
    """In an earlier version, the manifest of one sink overwrote that of the other, whose rows were lost."""
    wanted = {"parquet": 0, "jsonl": 0}
    for name, kind in (("left", "parquet"), ("right", "json")):
        system = System(
            sink=lambda kind=kind: constructors.files(str(tmp_path), format=kind).build(), visible=list
        )  # type: ignore[misc]
        txn = replace(new_txn(1, sink=name), attempt="0123456789abcdef0123")
        with opened(system, name=name) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
    for name, kind in (("left", "parquet"), ("right", "json")):
        system = System(
            sink=lambda kind=kind: constructors.files(str(tmp_path), format=kind).build(), visible=list
        )  # type: ignore[misc]
        with opened(system, name=name) as sink:
            assert sink.commit(replace(txn, sink=name), deadline()) == OK
    for file in committed_files(str(tmp_path)):
        ending = file.rpartition(".")[2]
        wanted[ending] += (
            pq.read_table(file).num_rows if ending == "parquet" else len(Path(file).read_text().splitlines())
        )
    assert wanted == {"parquet": 3, "jsonl": 3}


def _raising(name: str) -> Callable[[str], None]:
    def reach(reached: str) -> None:
        if reached == name:
            raise KeyboardInterrupt

    return reach


@pytest.mark.parametrize("killed_at", [None, "sink.filesystem.after_rename"])
def test_a_batch_whose_folder_was_archived_is_still_known_as_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, killed_at: str | None
) -> None:
    """The next start commits the batch again that Kafka's token names, after people moved its folder away."""
    system = System(sink=lambda: constructors.files(str(tmp_path)).build(), visible=list)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        if killed_at is None:
            assert sink.commit(txn, deadline()) == OK
        else:
            with monkeypatch.context() as patch:
                patch.setattr(failpoints, "reach", _raising(killed_at))
                with pytest.raises(KeyboardInterrupt):
                    sink.commit(txn, deadline())
    (folder,) = tmp_path.glob("batch=*")
    folder.rename(tmp_path / "_archived")
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == []
        assert sink.commit(txn, deadline()) == OK
        assert "was moved or deleted after that" in caplog.text
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK, "changes nothing"
        assert sink.abort(txn, deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert not list(tmp_path.glob("batch=*")), "the rows are in the archive, and not written twice"


@pytest.mark.parametrize("step", ["sink.filesystem.before_record", "sink.filesystem.before_rename"])
def test_a_record_without_the_rename_does_not_count_as_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    system = System(sink=lambda: constructors.files(str(tmp_path)).build(), visible=list)
    for end in ("commit", "abort"):
        txn = new_txn()
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
            with monkeypatch.context() as patch:
                patch.setattr(failpoints, "reach", _raising(step))
                with pytest.raises(KeyboardInterrupt):
                    sink.commit(txn, deadline())
        with opened(system) as sink:
            assert list(sink.recover(deadline())) == [txn]
            assert getattr(sink, end)(txn, deadline()) == OK
            assert list(sink.recover(deadline())) == []
            assert isinstance(sink.commit(txn, deadline()), Fatal) is (end == "abort")
    assert sum(pq.read_table(file).num_rows for file in committed_files(str(tmp_path))) == len(ROWS)


def test_only_the_newest_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_RECORDS", 3)
    system = System(sink=lambda: constructors.files(str(tmp_path)).build(), visible=list)
    txns = [new_txn(number) for number in range(7)]
    with opened(system) as sink:
        for number, txn in enumerate(txns):
            assert sink.prepare(txn, stage(sink, ROWS, number), deadline()) == OK
            assert sink.commit(txn, deadline()) == OK
            sink.tidy(number, deadline())
        assert {each.stem for each in tmp_path.glob("_kafka_eos/*/committed/*")} == set(map(str, txns[-3:]))
        assert all(sink.commit(txn, deadline()) == OK for txn in txns), "their folders prove the commits"


def test_the_error_for_a_batch_that_left_no_trace_says_what_to_put_back(tmp_path: Path) -> None:
    system = System(sink=lambda: constructors.files(str(tmp_path)).build(), visible=list)
    with opened(system) as sink:
        outcome = sink.commit(new_txn(), deadline())
    assert isinstance(outcome, Fatal)
    assert "neither its folder nor the record of its commit" in outcome.why
    assert "put back what was deleted or moved" in outcome.fix

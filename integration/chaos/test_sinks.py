"""Kafka and two external sinks hold the same batches, each once, whatever is killed, full or paused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.chaos.everywhere import Everywhere, pairs
from integration.chaos.scenario import Scenario
from integration.support.databases import Postgres
from integration.support.driver import Driver
from integration.support.wire import Lost, Wire

pytest.importorskip("sqlalchemy")

#: Failpoints of a commit with external sinks, in the order in which a batch reaches them.
STEPS = [
    "commit.after_token",
    "sink.filesystem.before_manifest",
    "commit.within_prepare",
    "sink.store.before_rename",
    "commit.after_prepare",
    "commit.after_flush",
    "commit.before_commit",
    "commit.after_commit",
    "sink.filesystem.within_gather",
    "sink.filesystem.before_rename",
    "commit.within_finish",
    "sink.sql.within_commit",
    "commit.after_finish",
]


@pytest.fixture
def everywhere(scenario: Scenario) -> Everywhere:
    return Everywhere(scenario)


@pytest.mark.fault(
    "T49", "killed processes, zombies, a full disk, a killed database", "commit with two sinks"
)
def test_t49_a_batch_is_in_every_system_once_although_the_driver_is_killed_at_every_step(
    everywhere: Everywhere,
) -> None:
    """A driver killed at any step of the commit leaves a batch that the next start finishes everywhere."""
    everywhere.scenario.killed_at_each(STEPS, everywhere.sink)
    everywhere.verdict()


@pytest.mark.fault("T50", "Spark calls abort() after commit() failed with the batch in Kafka", "commit")
@pytest.mark.parametrize(
    "at", ["commit.after_commit", pytest.param("commit.within_finish", marks=pytest.mark.long)]
)
def test_t50_an_abort_after_a_failed_commit_keeps_prepared_work(everywhere: Everywhere, at: str) -> None:
    """abort() after a commit in Kafka keeps the prepared sink transactions; the next start commits them."""
    scenario = everywhere.scenario
    scenario.feed(100)
    failed = scenario.start(f"{at}=raise@{scenario.once(at)}", sink=everywhere.sink)
    assert failed.wait() == 1
    assert len(everywhere.archived()) < 50 or len(everywhere.stored()) < 50, "nothing was left to finish"
    scenario.run(sink=everywhere.sink)
    everywhere.verdict()


@pytest.mark.fault(
    "T49", "killed processes, zombies, a full disk, a killed database", "commit with two sinks"
)
@pytest.mark.parametrize(
    "at",
    [
        pytest.param("commit.after_list_prepared", marks=pytest.mark.long),
        "commit.after_token",
        "commit.after_prepare",
        pytest.param("commit.after_commit", marks=pytest.mark.long),
    ],
)
def test_t49_a_paused_driver_cannot_undo_prepared_work_of_another_driver(
    everywhere: Everywhere, at: str
) -> None:
    """The paused driver is a zombie when it resumes.

    It holds an outdated token or list of prepared transactions, or has prepared or committed its batch.
    """
    scenario = everywhere.scenario
    scenario.feed(150)
    zombie = scenario.stopped_at(at, sink=everywhere.sink)
    scenario.run(sink=everywhere.sink)
    zombie.resume()
    zombie.wait()
    scenario.feed(50)
    scenario.run(sink=everywhere.sink)
    everywhere.verdict()


@pytest.mark.fault(
    "T49", "killed processes, zombies, a full disk, a killed database", "commit with two sinks"
)
def test_t49_a_full_disk_of_a_sink_fails_the_batch_everywhere(
    everywhere: Everywhere, small_disk: Path
) -> None:
    scenario = everywhere.scenario
    everywhere.folder = small_disk / "archive"
    filler = small_disk / "filler"
    scenario.feed(100)
    scenario.run(sink=everywhere.sink)
    _fill(filler)
    scenario.feed(100)
    full = scenario.start(sink={**everywhere.sink, "commitTimeoutMs": "10000"})
    assert full.wait() == 1
    assert "No space left" in full.log.read_text(), full.tail()
    filler.unlink()
    scenario.run(sink=everywhere.sink)
    everywhere.verdict()


@pytest.mark.fault(
    "T49", "killed processes, zombies, a full disk, a killed database", "commit with two sinks"
)
def test_t49_a_batch_is_finished_after_its_database_was_killed(scenario: Scenario) -> None:
    """A database that dies after Kafka's commit makes the query fail; the next start finishes the batch."""
    server = Postgres()
    try:
        everywhere = _WithServer(scenario, server)
        scenario.unfinished(server.kill, everywhere.sink)
        assert len(everywhere.archived()) == 50, "the other sink has the batch; the next has not begun"
        server.start()
        scenario.run(sink=everywhere.sink)
        everywhere.verdict()
        assert server.run("SELECT gid FROM pg_prepared_xacts") == []
    finally:
        server.close()


@pytest.mark.fault("T49c", "the network to a database is cut silently", "commit with two sinks")
@pytest.mark.parametrize(
    "lost", [Lost.ANSWERS, pytest.param(Lost.EVERYTHING, marks=pytest.mark.long)], ids=lambda lost: lost.value
)
def test_t49_a_silent_network_cut_to_the_database_times_out_and_the_batch_is_finished_later(
    scenario: Scenario, lost: Lost
) -> None:
    """The commit times out instead of hanging, and the next start finishes the batch.

    No connection is reset, so the driver waits for an answer that never comes. If only the answers are lost,
    the database has committed and the driver cannot know it.
    """
    server = Postgres()
    wire = Wire(server.port)
    try:
        everywhere = _WithServer(scenario, server, server.url.replace(str(server.port), str(wire.port)))
        stopped = scenario.unfinished(lambda: wire.lose(lost), everywhere.sink)
        assert "did not return within" in stopped.log.read_text(), stopped.tail()
        assert len(everywhere.archived()) == 50, "the other sink has the batch; the next has not begun"
        wire.lose(Lost.NOTHING)
        scenario.run(sink=everywhere.sink)
        everywhere.verdict()
        assert server.run("SELECT gid FROM pg_prepared_xacts") == []
    finally:
        wire.close()
        server.close()


@pytest.mark.fault(
    "T330",
    "one job in two regions writes to one folder and one table",
    "one driver dies behind Kafka's commit",
)
def test_t330_regions_that_share_a_folder_and_a_table_leave_each_others_work_alone(
    scenario: Scenario, other_cluster: str, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    """Region A dies twice: before its sinks commit, and when the table has its batch and the note remains.

    In between, region B commits batches of its own with the same application.id, batch ids and sinks.
    """
    deltalake = pytest.importorskip("deltalake")
    a, b = Everywhere(scenario), Everywhere(_in_another_region(scenario, other_cluster, tmp_path, driver))
    table = str(tmp_path / "table")
    sink = {
        "sinks": "archive,lake",
        "sink.archive.type": "filesystem",
        "sink.archive.path": str(a.folder),
        "sink.lake.type": "delta",
        "sink.lake.path": table,
    }
    for region in (a, b):  # each cluster holds a token, which decides about what the sinks hold
        region.scenario.feed(50)
        region.scenario.run(sink=sink)
    for step in ("commit.after_commit", "sink.delta.after_version"):
        a.scenario.feed(60)
        b.scenario.feed(60)
        killed = a.scenario.start(f"{step}=kill-worker@{a.scenario.once(step)}", sink=sink)
        assert killed.wait() == -9, killed.tail()
        prepared = a.prepared()
        assert prepared
        b.scenario.run(sink=sink)
        assert set(prepared) <= set(a.prepared()), (
            "region B aborted, committed or tidied the work of region A"
        )
    a.scenario.run(sink=sink)
    sent = sorted(a.scenario.sent + b.scenario.sent)
    assert sorted(a.archived()) == sent
    assert sorted(pairs(deltalake.DeltaTable(table).to_pyarrow_table())) == sent
    for region in (a, b):
        assert region.scenario.outcome().exactly_once, region.scenario.last_outcome
        assert not region.prepared()


@pytest.mark.fault(
    "T331", "one job in two regions writes to one database", "one driver dies behind Kafka's commit"
)
def test_t331_regions_that_share_a_database_leave_each_others_prepared_transactions_alone(
    scenario: Scenario, other_cluster: str, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    server = Postgres()
    try:
        a = _WithServer(scenario, server)
        b = _WithServer(_in_another_region(scenario, other_cluster, tmp_path, driver), server)
        sink = {**a.sink, "sinks": "warehouse"}
        sink = {name: value for name, value in sink.items() if "archive" not in name}
        for region in (a, b):  # each cluster holds a token, which decides about what the database holds
            region.scenario.feed(50)
            region.scenario.run(sink=sink)
            region.scenario.feed(60)
        step = "commit.after_commit"
        killed = a.scenario.start(f"{step}=kill-worker@{a.scenario.once(step)}", sink=sink)
        assert killed.wait() == -9, killed.tail()
        b.scenario.run(sink=sink)
        assert len(server.run("SELECT gid FROM pg_prepared_xacts")) == 1, "region B ended A's transaction"
        a.scenario.run(sink=sink)
        assert sorted(a.stored()) == sorted(a.scenario.sent + b.scenario.sent)
        assert server.run("SELECT gid FROM pg_prepared_xacts") == []
        for region in (a, b):
            assert region.scenario.outcome().exactly_once, region.scenario.last_outcome
    finally:
        server.close()


@pytest.mark.fault(
    "T332", "somebody archives the folder of a batch", "the driver dies behind the sink's commit"
)
def test_t332_a_batch_whose_folder_was_archived_is_not_written_again(everywhere: Everywhere) -> None:
    """The driver dies after the rename, and the folder is moved away before the next start."""
    scenario, step = everywhere.scenario, "sink.filesystem.after_rename"
    scenario.feed(60)
    killed = scenario.start(f"{step}=kill-worker@{scenario.once(step)}", sink=everywhere.sink)
    assert killed.wait() == -9, killed.tail()
    archive = scenario.folder / "moved"
    archive.mkdir()
    (batch,) = everywhere.folder.glob("batch=*")
    batch.rename(archive / batch.name)
    scenario.run(sink=everywhere.sink)
    (archive / batch.name).rename(batch)
    everywhere.verdict()


@pytest.mark.fault("T387", "somebody edits the manifest of a prepared batch", "the driver is stopped")
def test_t387_an_edited_manifest_moves_nothing_and_the_restored_one_is_committed(
    everywhere: Everywhere,
) -> None:
    """Kafka holds the batch, and a name in the manifest leads out of the sink's folder."""
    _refused_until_restored(everywhere, _edited_manifest)
    assert _victim(everywhere).read_text() == "mine"


@pytest.mark.fault("T388", "somebody replaces rows in the checkpoint", "the driver is stopped")
def test_t388_replaced_rows_reach_no_database_and_the_restored_ones_do(everywhere: Everywhere) -> None:
    """SQLite has no prepared transactions, so the rows wait in the checkpoint. Size and schema stay."""
    _refused_until_restored(everywhere, _replaced_rows)


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_digests_and_names_files_of_the_user_are_replaced_and_forged_rows_stored(
    everywhere: Everywhere,
) -> None:
    """Proves that the two tests above can fail."""
    _stopped_when_kafka_has_the_batch(everywhere)
    _edited_manifest(everywhere)
    _replaced_rows(everywhere)
    everywhere.scenario.run(sink=everywhere.sink, mutations=["digests of manifests", "names in manifests"])
    assert _victim(everywhere).read_bytes().startswith(b"PAR1"), "rows replaced a file of the user"
    assert any("forged" in value for _, value in everywhere.stored())


def _victim(everywhere: Everywhere) -> Path:
    return everywhere.scenario.folder / ".bashrc"


def _edited_manifest(everywhere: Everywhere) -> tuple[Path, bytes]:
    """Lets a manifest name a file elsewhere; returns the manifest, and what it was."""
    _victim(everywhere).write_text("mine")
    (manifest,) = everywhere.folder.glob("_kafka_eos/*/prepared/*.json")
    original = manifest.read_bytes()
    content = json.loads(original)
    gathered = manifest.parents[1] / "ending" / manifest.stem
    content["files"][0]["name"] = os.path.relpath(_victim(everywhere), gathered)
    manifest.write_text(json.dumps(content, indent=1))
    return manifest, original


def _replaced_rows(everywhere: Everywhere) -> tuple[Path, bytes]:
    """Replaces a value of the rows in the checkpoint; returns their file, and what it was."""
    (rows,) = everywhere.scenario.checkpoint.glob("kafka-eos/sinks/warehouse/*.arrow")
    original = rows.read_bytes()
    value = everywhere.scenario.sent[0][1].encode()
    assert value in original
    rows.write_bytes(original.replace(value, b"forged"))
    assert len(value) == len(b"forged")
    return rows, original


def _stopped_when_kafka_has_the_batch(everywhere: Everywhere) -> None:
    scenario, step = everywhere.scenario, "commit.after_commit"
    scenario.feed(60)
    killed = scenario.start(f"{step}=kill-worker@{scenario.once(step)}", sink=everywhere.sink)
    assert killed.wait() == -9, killed.tail()


def _refused_until_restored(
    everywhere: Everywhere, forge: Callable[[Everywhere], tuple[Path, bytes]]
) -> None:
    """Forges a file while the driver is stopped, starts it twice, and puts the file back as it was."""
    _stopped_when_kafka_has_the_batch(everywhere)
    file, original = forge(everywhere)
    before = set(everywhere.folder.rglob("*"))
    for _ in range(2):
        refused = everywhere.scenario.start(sink=everywhere.sink)
        assert refused.wait() == 1, refused.tail()
        log = refused.log.read_text()
        assert "SINK_FAILED" in log, refused.tail()
        assert f"{file} was changed after the batch was prepared" in log, refused.tail()
        if forge is _edited_manifest:
            now = set(everywhere.folder.rglob("*"))
            assert before <= now, "files were moved"
            assert {each.parent.name for each in now - before} <= {"0"}, "the replay only stages its rows"
            assert not list(everywhere.folder.glob("batch=*"))
    file.write_bytes(original)
    everywhere.scenario.run(sink=everywhere.sink)
    everywhere.verdict()


def _in_another_region(
    scenario: Scenario, bootstrap: str, folder: Path, driver: Callable[..., Driver]
) -> Scenario:
    """Returns the same job on another cluster, with input of its own."""
    other = Scenario(bootstrap, folder, driver)
    other.application_id = scenario.application_id
    other.sent_from = 100_000
    return other


class _WithServer(Everywhere):
    def __init__(self, scenario: Scenario, server: Postgres, url: str | None = None) -> None:
        super().__init__(scenario, url or server.url)
        self._server = server

    def stored(self) -> list[tuple[str, str]]:
        return [
            (bytes(row["key"]).decode(), bytes(row["value"]).decode()) for row in self._server.rows("orders")
        ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a file system of 4 MB, or skips the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as out:
        while True:
            try:
                out.write(bytes(65536))
            except OSError:
                return

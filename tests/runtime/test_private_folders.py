"""Files that another local user plants in the shared temporary folder do no damage."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime import folders, logs
from kafka_eos_source.runtime.folders import NotOwnError, PrivateFolder, file_name
from kafka_eos_source.spark.packet_senders import record_sender, recorded_senders
from kafka_eos_source.spark.worker import StreamingTask
from kafka_eos_source.stage.files import location_of_batch_writes
from kafka_eos_source.state.options import parse_state

UID = os.getuid()
TASK = StreamingTask("q", "4", "r", 1)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that stands in for the host's temporary folder."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(shared))
    monkeypatch.setattr(logs, "_warned", set())
    return shared


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Returns a file of the current user that this package must not touch."""
    victim = tmp_path / "authorized_keys"
    victim.write_text("precious")
    return victim


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def default_state_folder() -> str:
    return parse_state({"kafka.bootstrap.servers": "b:9092"}).root()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- attacks on files --------------------------------------------------------------------------------


def folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-notes")


@pytest.mark.parametrize("planted", ["app.json.new", "app.json"])
def test_a_planted_link_does_not_redirect_a_write(shared: Path, victim: Path, planted: str) -> None:
    path = shared / f"kafka-eos-notes-{UID}"
    path.mkdir(mode=0o777)
    (path / planted).symlink_to(victim)
    folder().write("app.json", "7")
    assert victim.read_text() == "precious"
    assert folder().read("app.json") == "7"


def test_a_planted_file_link_is_not_read(shared: Path, victim: Path) -> None:
    path = shared / f"kafka-eos-notes-{UID}"
    path.mkdir(mode=0o777)
    (path / "app.json").symlink_to(victim)
    with pytest.raises(OSError, match="a symbolic link"):
        folder().read("app.json")


def test_a_folder_of_another_user_is_neither_read_nor_written(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder().write("app.json", "1")
    theirs = shared / f"kafka-eos-notes-{UID}"
    monkeypatch.setattr("os.geteuid", lambda: UID + 1)
    theirs.rename(shared / f"kafka-eos-notes-{UID + 1}")
    acts: tuple[Callable[[], object], ...] = (
        lambda: folder().read("app.json"),
        lambda: folder().write("app.json", "9"),
        lambda: folder().remove("app.json"),
    )
    for act in acts:
        with pytest.raises(NotOwnError):
            act()
    monkeypatch.setattr("os.geteuid", lambda: UID)
    (shared / f"kafka-eos-notes-{UID + 1}").rename(theirs)
    assert folder().read("app.json") == "1", "the other user's file is as it was"


@pytest.mark.parametrize(
    "application_id", ["../../authorized_keys", "/etc/x", "..", "a/b", ".", "", "x" * 400]
)
def test_an_application_id_cannot_escape_the_folder(shared: Path, application_id: str) -> None:
    before = {each for each in shared.parent.rglob("*") if shared not in each.parents}
    folder().write(f"{application_id}.json", "7")
    assert folder().read(f"{application_id}.json") == "7"
    assert {each for each in shared.parent.rglob("*") if shared not in each.parents} == before
    assert len(os.listdir(shared / f"kafka-eos-notes-{UID}")) == 1
    folder().remove(f"{application_id}.json")
    assert folder().read(f"{application_id}.json") is None


# -- attacks on the operators' announcements ---------------------------------------------------------


@pytest.mark.parametrize("level", ["folder of the user", "folder of the query", "file"])
def test_an_announcement_follows_no_link(shared: Path, tmp_path: Path, victim: Path, level: str) -> None:
    folder, elsewhere = shared / f"kafka-eos-senders-{UID}", tmp_path / "elsewhere"
    (elsewhere / "q").mkdir(parents=True)
    if level == "folder of the user":
        folder.symlink_to(elsewhere)
    elif level == "folder of the query":
        folder.mkdir()
        (folder / "q").symlink_to(elsewhere / "q")
    else:
        (folder / "q").mkdir(parents=True)
        (folder / "q" / f".changelog.{os.getpid()}").symlink_to(victim)
    record_sender(TASK, "changelog")
    assert recorded_senders(TASK) == (("changelog",) if level == "file" else ())
    assert os.listdir(elsewhere / "q") == []
    assert victim.read_text() == "precious"


def test_announcements_in_a_folder_of_another_user_are_ignored(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record_sender(TASK, "changelog")
    monkeypatch.setattr("os.geteuid", lambda: UID + 1)
    (shared / f"kafka-eos-senders-{UID}").rename(shared / f"kafka-eos-operators-{UID + 1}")
    for _ in range(3):
        assert recorded_senders(TASK) == ()
        record_sender(TASK, "changelog")
    assert [each.levelname for each in caplog.records] == ["WARNING"] * 2
    assert "notices only at the next batch" in caplog.text


def test_each_announced_changelog_has_its_own_file(shared: Path) -> None:
    names = (".hidden", "a.b_c-D", "x" * 249)
    for name in names:
        record_sender(TASK, name)
    assert recorded_senders(TASK) == tuple(sorted(names))


# -- staging and state -------------------------------------------------------------------------------


@pytest.mark.parametrize("create", [location_of_batch_writes, default_state_folder])
def test_staging_and_state_refuse_a_folder_of_another_user(
    shared: Path, monkeypatch: pytest.MonkeyPatch, create: Callable[[], str]
) -> None:
    ours = Path(create())
    monkeypatch.setattr("os.geteuid", lambda: UID + 1)
    ours.rename(shared / ours.name.replace(str(UID), str(UID + 1)))
    with pytest.raises(InvalidOptionError, match=r"not this user's own.*Fix: set \.option"):
        create()


@pytest.mark.parametrize("create", [location_of_batch_writes, default_state_folder])
def test_staging_and_state_refuse_a_link_even_to_an_own_folder(
    shared: Path, tmp_path: Path, create: Callable[[], str]
) -> None:
    ours = Path(create())
    ours.rmdir()
    (tmp_path / "elsewhere").mkdir()
    ours.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidOptionError, match="a symbolic link"):
        create()


def test_a_configured_state_folder_is_used_unchanged(shared: Path) -> None:
    options = parse_state({"kafka.bootstrap.servers": "b:9092", "state.dir": "/data/state"})
    assert options.root() == "/data/state"
    assert os.listdir(shared) == []


# -- the helper itself -------------------------------------------------------------------------------


def test_only_the_owner_can_access_folders_and_files(shared: Path, generous_umask: None) -> None:
    outer = shared / f"name-{UID}"
    PrivateFolder.of_user("name").folder("inner").write("file", "text")
    assert [mode(each) for each in (outer, outer / "inner", outer / "inner" / "file")] == [
        0o700,
        0o700,
        0o600,
    ]


def test_an_own_folder_that_others_may_write_becomes_private(shared: Path, generous_umask: None) -> None:
    """A state folder of an older release, whose mode came from the umask, is made private."""
    outer = shared / f"name-{UID}"
    outer.mkdir(mode=0o775)
    PrivateFolder.of_user("name").create()
    assert mode(outer) == 0o700


@pytest.mark.skipif(UID != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(shared: Path) -> None:
    folder = PrivateFolder.of_user("name")
    folder.write("file", "text")
    os.chown(f"{folder.path}/file", 65534, 65534)
    with pytest.raises(NotOwnError, match="user id 65534"):
        folder.read("file")
    with pytest.raises(NotOwnError):
        folder.files()
    folder.write("file", "ours")
    assert folder.read("file") == "ours"


def test_a_named_pipe_is_ignored_without_blocking(shared: Path) -> None:
    folder = PrivateFolder.of_user("name")
    os.mkfifo(f"{folder.create()}/file")
    with pytest.raises(NotOwnError):
        folder.read("file")


def test_a_held_file_is_held_until_the_last_process_closes_it(shared: Path) -> None:
    folder = PrivateFolder.of_user("kafka-eos-held")
    assert not folder.is_held("a"), "there is no folder"
    first, second = folder.hold("a"), folder.hold("a")
    assert folder.is_held("a")
    assert not folder.is_held("b")
    first.close()
    assert folder.is_held("a")
    second.close()
    assert not folder.is_held("a")


def test_a_file_of_another_user_is_not_held(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder.of_user("kafka-eos-held")
    folder.hold("a").close()
    monkeypatch.setattr(os, "geteuid", lambda: UID + 1)
    foreign = PrivateFolder((f"kafka-eos-held-{UID}",))
    for each in (foreign.hold, foreign.is_held):
        with pytest.raises(NotOwnError):
            each("a")


def test_reading_a_missing_folder_returns_nothing_and_creates_nothing(shared: Path) -> None:
    folder = PrivateFolder.of_user("name").folder("inner")
    assert folder.read("file") is None
    assert folder.files() == {}
    folder.remove("file")
    assert os.listdir(shared) == []


def test_a_failed_write_keeps_the_older_file_and_leaves_no_other(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PrivateFolder.of_user("name")
    folder.write("file", "old")

    def full(*_arguments: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write("file", "new")
    assert os.listdir(folder.path) == ["file"]
    assert folder.read("file") == "old"


def test_the_same_error_has_the_same_text_every_time(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder.of_user("name")
    path = folder.create()
    texts = set()
    before = os.open

    def read_only(name: str, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", name)
        return before(name, flags, *more, **named)

    monkeypatch.setattr(folders.os, "open", read_only)
    for _ in range(2):
        with pytest.raises(OSError, match="Read-only") as raised:
            folder.write("file", "text")
        texts.add(str(raised.value))
    assert texts == {f"[Errno 30] Read-only file system: '{path}/file'"}


def test_no_descriptor_is_left_open(shared: Path, victim: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    if before is None:
        pytest.skip("no /proc")
    folder = PrivateFolder.of_user("name").folder("inner")
    folder.write("file", "text")
    os.symlink(victim, f"{folder.path}/link")
    for _ in range(20):
        folder.read("file")
        with pytest.raises(NotOwnError):
            folder.read("link")
        with pytest.raises(NotOwnError):
            folder.files()
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.text(max_size=300), st.text(max_size=300))
def test_file_names_are_plain_and_unique_for_each_text(first: str, second: str) -> None:
    names = [file_name(first), file_name(second)]
    assert (names[0] == names[1]) == (first == second)
    for name in names:
        assert name
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 255

"""Several users on one host: what one of them keeps is hidden from the others, and not taken from them.

Root runs each test with two more user ids. One process per umask does as the first user what tasks and the
driver do with files, in a folder like /tmp. Then the second user looks at all of it. A third process does the
same where the second user was first, and created each folder, or a link in its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.commit.identity_file import Identity, IdentityFile
from kafka_eos_source.embedded.cluster import EmbeddedKafka
from kafka_eos_source.embedded.java import JarSet, jars
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.observe.figures import SourceFigures, SourceState, WaitingCommit
from kafka_eos_source.observe.journal import Journal, SourceFile
from kafka_eos_source.observe.lines import ProcessId, Writer
from kafka_eos_source.spark import class_archive
from kafka_eos_source.stage.files import PartStage, StagingFolder, location_of_batch_writes
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.snapshots.storage import Manifest, SnapshotStorage
from kafka_eos_source.state.snapshots.upload import LocalCopy, upload
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests import ROOT
from tests.state.state_kit import IDENTITY as NO_TOPIC_ID
from tests.state.state_kit import Workload

OWNER, OTHER = 61_001, 61_002
SECRET = b"only the owner may read this"
UMASKS = (0o000, 0o022)
IDENTITY = replace(NO_TOPIC_ID, topic_id="topic-1")
ROWS = pa.record_batch({"value": pa.array([SECRET] * 9, pa.binary())})

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can work as two other users")


# -- what the owner does, in each place


def staging(root: Path) -> None:
    folder = StagingFolder.at(str(root / "checkpoint" / "kafka-eos" / "staging"))
    part = stage(folder)
    assert StagedRows(folder, "3", [part]).rows == len(ROWS)


def staging_of_batches(root: Path) -> None:
    folder = StagingFolder.at(location_of_batch_writes())
    assert StagedRows(folder, "3", [stage(folder)]).rows == len(ROWS)


def identity(root: Path) -> None:
    found = IdentityFile(str(root / "checkpoint"), Identity("app", "query", 0, "here"))
    found.write()


def store(root: Path) -> TransactionalStateStore:
    opened = TransactionalStateStore.open(IDENTITY.folder(root), IDENTITY)
    Workload(1).step(opened)
    return opened


def state(root: Path) -> None:
    store(root / "state").close()


def default_state(root: Path) -> None:
    options = parse_state({"kafka.bootstrap.servers": "localhost:1"})
    store(Path(options.root())).close()


def snapshots(root: Path) -> None:
    with store(root / "of-snapshots") as opened:
        copy, last = LocalCopy.freeze(opened), opened.last_batch()
    assert copy is not None
    assert last is not None
    try:
        wanted = Manifest(IDENTITY, 1, last, 1_000, ())
        upload(copy, SnapshotStorage(str(root / "snapshots"), IDENTITY), wanted, 0)
    finally:
        copy.remove()


def journal(root: Path) -> None:
    writer = Writer(ProcessId(10, 100.5), ProcessId(9, 99.5))
    SourceFile("app").write(SourceFigures(1.0, writer, SourceState.IDLE, 1.0))
    Journal("app").waits(
        WaitingCommit("app", "query", "run", 1, 1.0, 1.0, "begin", 1.0, "a reason", 0, writer)
    )


def broker(root: Path) -> None:
    kafka = EmbeddedKafka(directory=root / "broker")
    kafka._open_directory()  # starting one takes a JVM
    kafka._make_nodes()
    kafka._cluster_id()


def jar_cache(root: Path) -> None:
    def fetch(_set: JarSet, into: Path, _ivy: Path) -> None:
        import zipfile

        with zipfile.ZipFile(into / "a.jar", "w") as jar:
            jar.writestr("a", "a")

    os.environ["KAFKA_EOS_UNLISTED_JARS"] = "accept"  # nobody published this jar; `run` starts a process
    for _ in range(2):  # to download them, and to find them
        jars(JarSet("set", (("a", "b", "1"),), 1), root / "cache", fetch)


def archive(root: Path) -> None:
    """A JVM runs the code of a class archive, so one that others can replace is not used."""
    path = root / "cache" / "spark.jsa"
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_text("classes")
    path.with_suffix(".size").write_text("7")
    path.chmod(0o644)
    if (flaw := class_archive._flaw(path)) is not None:
        raise KafkaEosError(flaw)


def stage(folder: StagingFolder) -> Any:
    part = PartStage(ROWS.schema, folder, "3", 0)
    part.write(ROWS)
    return part.finish()


PLACES: dict[str, tuple[Callable[[Path], None], str]] = {
    # what the owner does → the folder that the other user can create first
    "staging": (staging, "checkpoint"),
    "staging of batch writes": (staging_of_batches, f"kafka-eos-staging-{OWNER}"),
    "identity of a checkpoint": (identity, "checkpoint"),
    "state.dir": (state, "state"),
    "the default state.dir": (default_state, f"kafka-eos-state-{OWNER}"),
    "journal and figures": (journal, f"kafka-eos-live-{OWNER}"),
    "embedded broker": (broker, "broker"),
    "jars": (jar_cache, "cache"),
    "class archives": (archive, "cache"),
}
VISIBLE = {**{name: place for name, (place, _) in PLACES.items()}, "snapshots": snapshots}
#: Archives and jars contain published code, and the user runs a JVM from them.
PUBLIC = {name: VISIBLE.pop(name) for name in ("class archives", "jars")}
HOSTILE = ("folder", "sticky folder", "link")


def main(root: str, umask: str, names: str) -> None:
    """Does what is named, each in a folder of its own; prints the errors by name."""
    chosen, errors = json.loads(names), {}
    with tempfile.TemporaryDirectory() as warm:  # imports what this user may not read later
        tempfile.tempdir = warm
        for name in PLACES:
            with contextlib.suppress(Exception):
                PLACES[name][0](Path(warm, name))
        snapshots(Path(warm, "more"))
    os.setgroups([])
    os.setgid(OWNER)
    os.setuid(OWNER)
    os.umask(int(umask))
    for key, name in chosen.items():
        tempfile.tempdir = str(place(root, key))
        try:
            {**PUBLIC, **VISIBLE}[name](place(root, key))
        except (KafkaEosError, OSError) as error:
            errors[key] = str(error)
    print(json.dumps(errors))


def run(root: Path, umask: int, chosen: dict[str, str]) -> dict[str, str]:
    """Returns the errors of the owner's process."""
    for key in chosen:
        shared(place(root, key))
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.runtime import test_several_users as t; "
    )
    code += "t.main(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), str(umask), json.dumps(chosen)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def place(root: Path | str, key: str) -> Path:
    """Returns a folder without blanks, because Spark passes the path of an archive in an option of a JVM."""
    return Path(root, key.replace(" ", "-"))


def shared(path: Path) -> None:
    """Creates a folder like /tmp."""
    path.mkdir(exist_ok=True)
    path.chmod(0o1777)


def as_other(work: Callable[[], Any]) -> Any:
    """Returns what a function returns to the other user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.umask(0)
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as result:
        text = result.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)


def readable(root: str) -> list[str]:
    """Returns the files below a folder that this user can read or write, and the folders that it can list."""
    found = []
    for name in os.listdir(root):
        path = f"{root}/{name}"
        with contextlib.suppress(PermissionError):
            if os.path.isdir(path):
                os.listdir(path)
                found += [path, *readable(path)]
            else:
                open(path, "rb").close()
                found.append(path)
    return found


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """A folder in which every user of the host may create files; pytest's own belong to root alone."""
    path = Path(tempfile.mkdtemp(prefix="several-users-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def owners(top: Path) -> dict[int, tuple[Path, dict[str, str]]]:
    """What the owner's processes left, and their errors, by umask."""
    found = {}
    for umask in UMASKS:
        root = top / f"umask-{umask:03o}"
        root.mkdir(mode=0o755)
        found[umask] = root, run(root, umask, {name: name for name in (*VISIBLE, *PUBLIC)})
    return found


@pytest.fixture(scope="module")
def refusals(top: Path) -> dict[str, str]:
    """The errors of the owner's process where the other user was first."""
    root = top / "hostile"
    root.mkdir(mode=0o755)
    chosen = {f"{name} {kind}": name for name in PLACES for kind in HOSTILE}
    for key, name in chosen.items():
        shared(at := place(root, key))
        as_other(lambda at=at, kind=key, name=name: plant(at / PLACES[name][1], kind))  # type: ignore[misc]
    return run(root, 0o022, chosen)


def plant(path: Path, kind: str) -> None:
    """Creates a folder of a predictable name before its owner does, or a link to one."""
    if kind.endswith("link"):
        target = path.with_name("elsewhere")
        target.mkdir(mode=0o777)
        path.symlink_to(target)
    else:
        path.mkdir()
        path.chmod(0o1777 if "sticky" in kind else 0o777)


@needs_root
@pytest.mark.parametrize("umask", UMASKS)
@pytest.mark.parametrize("name", VISIBLE)
def test_other_users_see_nothing_whatever_the_umask(
    owners: dict[int, tuple[Path, dict[str, str]]], umask: int, name: str
) -> None:
    root, errors = owners[umask]
    assert errors == {}
    assert list(place(root, name).iterdir()), "the owner wrote something"
    seen = as_other(lambda: readable(str(place(root, name))))
    if (
        name == "snapshots"
    ):  # the folders on the way to a shard have the usual mode, because stores share them
        seen = [path for path in seen if Path(path).is_file()]
    assert seen == []


@needs_root
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", [each for each in PLACES if "journal" not in each])
def test_a_folder_that_another_user_created_first_is_refused_by_name(
    refusals: dict[str, str], name: str, kind: str
) -> None:
    error = refusals.get(f"{name} {kind}", "the folder was used")
    if name == "class archives":  # a session starts without one, and ``write`` names the folder
        assert "is in a folder in which other users may replace it" in error
        return
    assert PLACES[name][1] in error
    assert str(OTHER) in error
    assert "mode" in error

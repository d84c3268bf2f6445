"""Bytes that another user puts in the place of a staged part never reach Kafka, although size and CRC fit."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from integration.support.damage import forged
from kafka_eos_source.errors import InvalidOptionError, StagedPartError, UnavailableError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime import folders
from kafka_eos_source.stage import files
from kafka_eos_source.stage.files import PartStage, StagingFolder
from kafka_eos_source.stage.parts import StagedRows

TRUE, FORGED, PADDING = b"pay 1 to alice", b"pay 9 to mallo", b"\0" * 64
SCHEMA = pa.schema([("value", pa.binary())])
OTHER = 61_002

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def local(tmp_path: Path) -> StagingFolder:
    """A folder on a disk of this host."""
    folder = StagingFolder.at(str(tmp_path / "staging"))
    if not folder.is_local:
        pytest.skip("the system does not say that the temporary folder is on a disk of this host")
    return folder


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StagingFolder:
    """A folder that other hosts mount, too."""
    monkeypatch.setattr(files, "is_on_this_host", lambda path: False)
    return StagingFolder.at(str(tmp_path / "staging"))


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StagingFolder:
    """A folder that is no local one for PyArrow, as in an object store."""
    store = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    monkeypatch.setattr(files, "file_system", lambda uri: (store, "staging"))
    return StagingFolder.at("s3://bucket/staging")


@pytest.fixture(params=["mounted", "bucket"])
def shared(request: pytest.FixtureRequest) -> StagingFolder:
    found: StagingFolder = request.getfixturevalue(request.param)
    return found


def staged(folder: StagingFolder) -> StagedPart:
    part = PartStage(SCHEMA, folder, "3", 0)
    part.write(pa.record_batch({"value": [TRUE, PADDING]}))
    return part.finish()


def values(folder: StagingFolder, part: StagedPart) -> list[bytes]:
    return [row for batch in StagedRows(folder, "3", [part]).batches() for row in batch["value"].to_pylist()]


def path_of(tmp_path: Path, part: StagedPart) -> Path:
    return tmp_path / "staging" / "3" / part.name


def forge(data: bytes) -> bytes:
    """Changes a value, and padding, so that size and CRC stay what they were."""
    return forged(data, TRUE, FORGED, data.index(PADDING))


def test_rows_replaced_in_a_shared_folder_have_another_digest(shared: StagingFolder, tmp_path: Path) -> None:
    part = staged(shared)
    assert part.digest
    assert values(shared, part) == [TRUE, PADDING]
    path_of(tmp_path, part).write_bytes(forge(path_of(tmp_path, part).read_bytes()))
    with pytest.raises(StagedPartError, match=r"is not what its task wrote: .* it has SHA-256"):
        StagedRows(shared, "3", [part])


def test_without_the_digest_forged_rows_are_sent(shared: StagingFolder, tmp_path: Path) -> None:
    """Proves that the test above can fail: size and CRC notice nothing."""
    part = staged(shared)
    path = path_of(tmp_path, part)
    path.write_bytes(forge(path.read_bytes()))
    digest = sha256(path.read_bytes()).hexdigest()
    assert values(shared, replace(part, digest=digest))[0] == FORGED


def test_of_a_file_that_grew_only_its_beginning_is_copied(mounted: StagingFolder, tmp_path: Path) -> None:
    part = staged(mounted)
    os.truncate(path_of(tmp_path, part), 1 << 40)
    with pytest.raises(StagedPartError, match="is damaged: it has"):
        StagedRows(mounted, "3", [part])


def test_a_shared_part_without_a_digest_is_refused(shared: StagingFolder) -> None:
    with pytest.raises(StagedPartError, match="its task reported none"):
        StagedRows(shared, "3", [replace(staged(shared), digest="")])


def test_the_bytes_that_were_verified_are_sent(shared: StagingFolder, tmp_path: Path) -> None:
    """A file that is replaced after it was verified is not read again: there is a copy without a name."""
    part = staged(shared)
    rows = StagedRows(shared, "3", [part])
    path_of(tmp_path, part).write_bytes(forge(path_of(tmp_path, part).read_bytes()))
    assert [row for batch in rows.batches() for row in batch["value"].to_pylist()] == [TRUE, PADDING]


def test_on_a_disk_of_this_host_nothing_is_hashed(local: StagingFolder) -> None:
    part = staged(local)
    assert part.digest == ""
    assert values(local, part) == [TRUE, PADDING]


def test_a_task_computes_a_digest_unless_driver_and_task_have_the_folder_on_their_disks(
    local: StagingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = staged(replace(local, is_local=False))
    assert elsewhere.digest
    assert values(local, elsewhere) == [TRUE, PADDING]
    with monkeypatch.context() as patch:
        patch.setattr(files, "is_on_this_host", lambda path: False)
        assert staged(local).digest


@needs_root
@pytest.mark.parametrize("moment", ["before the check", "between check and reading"])
@pytest.mark.parametrize("owned", ["file", "folder"])
def test_a_part_of_another_user_is_refused_on_a_disk_of_this_host(
    local: StagingFolder, tmp_path: Path, moment: str, owned: str
) -> None:
    part = staged(local)
    path = path_of(tmp_path, part)
    rows = StagedRows(local, "3", [part]) if moment.startswith("between") else None
    data = forge(path.read_bytes())
    path.unlink()
    path.write_bytes(data)
    os.chown(path if owned == "file" else path.parent, OTHER, OTHER)
    with pytest.raises(StagedPartError, match=rf"may be forged: .*user id {OTHER} and has mode 0[67]"):
        list((rows or StagedRows(local, "3", [part])).batches())


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_in_which_others_may_write_is_refused(
    local: StagingFolder, tmp_path: Path, mode: int
) -> None:
    part = staged(local)
    path_of(tmp_path, part).parent.chmod(mode)
    with pytest.raises(StagedPartError, match=f"has mode {mode:04o}"):
        StagedRows(local, "3", [part])
    with pytest.raises(InvalidOptionError, match=f"has mode {mode:04o}"):
        staged(local)


@needs_root
def test_without_the_owner_check_forged_rows_are_sent(
    local: StagingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the tests above can fail."""
    part = staged(local)
    path = path_of(tmp_path, part)
    path.write_bytes(forge(path.read_bytes()))
    os.chown(path, OTHER, OTHER)
    monkeypatch.setattr(folders, "_refuse_foreign", lambda *_: None)
    assert values(local, part)[0] == FORGED


def test_a_pipe_in_place_of_a_part_is_refused_and_not_waited_for(
    local: StagingFolder, tmp_path: Path
) -> None:
    part = staged(local)
    path_of(tmp_path, part).unlink()
    os.mkfifo(path_of(tmp_path, part), 0o600)
    with pytest.raises(StagedPartError, match="not a regular file"):
        StagedRows(local, "3", [part])


def test_a_copy_that_does_not_fit_on_the_drivers_disk_is_no_damaged_part(
    shared: StagingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging the batch again would not help."""
    part = staged(shared)
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no device that is always full")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(UnavailableError, match=r"temporary folder.*No space left") as full:
        StagedRows(shared, "3", [part])
    assert "TMPDIR" in full.value.fix


# -- which folders other users can replace


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_of_another_user_above_is_refused_if_everybody_could_create_it(
    tmp_path: Path, mode: int
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    os.chown(above, OTHER, OTHER)
    with pytest.raises(InvalidOptionError, match=rf"above.*user id {OTHER}, mode {mode:04o}.*chmod"):
        StagingFolder.at(str(above / "staging"))
    with pytest.raises(InvalidOptionError, match=rf"above.*user id {OTHER}.*state\.dir"):
        folders.make_private(above / "state", "state.dir")
    assert not list(above.iterdir()), "nothing was written there"


def test_a_folder_without_sticky_bit_is_refused_for_what_is_opened_by_path(tmp_path: Path) -> None:
    """Staged parts are opened by descriptor, so it does not matter who renames their folders."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    folder = StagingFolder.at(str(above / "staging"))
    assert values(folder, staged(folder)) == [TRUE, PADDING]
    with pytest.raises(InvalidOptionError, match=r"mode 0777\) lets everybody rename"):
        folders.make_private(above / "state", "state.dir")
    above.chmod(0o1777)
    folders.make_private(above / "state", "state.dir")


@needs_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    link = tmp_path / "open" / "state"
    link.symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir()
    folders.make_private(link, "state.dir")
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}"):
        folders.make_private(link, "state.dir")


def test_where_files_have_no_owners_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On many network mounts each folder has mode 0777, whatever is asked for."""
    mkdir, above = os.mkdir, tmp_path / "mount"
    above.mkdir()
    above.chmod(0o777)

    def for_everybody(path: str, mode: int = 0o777, **more: int) -> None:
        mkdir(path, mode, **more)
        os.chmod(path, 0o777, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "mkdir", for_everybody)
    folders.make_private(above / "state", "state.dir")
    assert not list(above.glob(".kafka-eos-*")), "the probe is removed"


@needs_root
def test_a_volume_that_root_mounted_is_used_without_a_sticky_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts an emptyDir with mode 0777."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(volume))
    folders.make_private(volume / "app" / "store" / "0", "state.dir")
    os.chown(volume, OTHER, OTHER)
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}, mode 0777"):
        folders.make_private(volume / "app" / "store" / "0", "state.dir")


@needs_root
def test_a_mounted_volume_of_another_user_holds_staged_parts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``docker run -v`` mounts a folder of the host with its owner, often after ``chmod 777``."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    os.chown(volume, OTHER, OTHER)
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}, mode 0777"):
        StagingFolder.at(str(volume / "staging"))
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(volume))
    folder = StagingFolder.at(str(volume / "staging"))
    assert values(folder, staged(folder)) == [TRUE, PADDING]
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}, mode 0777"):
        folders.make_private(volume / "state", "state.dir")
    (volume / "forged").mkdir()
    os.chown(volume / "forged", OTHER, OTHER)
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}.*belongs to another user"):
        StagingFolder.at(str(volume / "forged"))


def test_where_modes_cannot_be_changed_they_mean_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE and SMB mounts show one mode for everything, and some refuse chmod."""
    mkdir, chmod, mount = os.mkdir, os.chmod, tmp_path / "mount"
    mount.mkdir()

    def for_everybody(path: str, mode: int = 0o777, **more: int) -> None:
        mkdir(path, mode, **more)
        chmod(path, 0o777, **more)  # type: ignore[arg-type]

    def refuse(path: object, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "chmod", refuse)
    (mount / "with owners").mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        folders.make_private(mount / "with owners", "state.dir")
    monkeypatch.setattr(os, "mkdir", for_everybody)
    folders.make_private(mount / "state", "state.dir")
    folders.make_private(mount / "state", "state.dir")
    monkeypatch.setattr(files, "is_on_this_host", lambda path: False)
    folder = StagingFolder.at(str(mount / "staging"))
    for _ in range(2):
        assert values(folder, staged(folder)) == [TRUE, PADDING]


def test_the_top_of_a_mount_may_deny_new_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Databricks shows ``/Volumes`` with mode 0777, and lets nobody create anything outside a volume."""
    mkdir, top = os.mkdir, tmp_path / "Volumes"
    volume = top / "catalog" / "volume"
    volume.mkdir(parents=True)
    for each in (top, volume.parent, volume):
        each.chmod(0o777)

    def in_volumes_only(path: str, mode: int = 0o777, **more: int) -> None:
        if Path(path).parent in (top, volume.parent):
            raise PermissionError(1, "Operation not permitted", path)
        mkdir(path, mode, **more)
        if shows_modes_for_all:
            os.chmod(path, 0o777, **more)  # type: ignore[arg-type]

    shows_modes_for_all = True
    monkeypatch.setattr(os, "mkdir", in_volumes_only)
    folders.make_private(volume / "state", "state.dir")
    shows_modes_for_all = False
    with pytest.raises(InvalidOptionError, match="lets everybody rename"):
        folders.make_private(volume / "state", "state.dir")


@needs_root
def test_in_a_user_namespace_the_root_of_the_host_owns_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the id of nobody there, as every user does whom the namespace lacks."""
    unmapped = tmp_path / "overflowuid"
    unmapped.write_text(f"{OTHER}\n")
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    os.chown(tmp, OTHER, OTHER)
    monkeypatch.setattr(folders, "_UNMAPPED", str(unmapped))
    monkeypatch.setattr(folders, "_USER_IDS", str(tmp_path / "uid_map"))

    def in_namespace(ids: str) -> None:
        (tmp_path / "uid_map").write_text(ids)
        folders._unmapped_owner.cache_clear()

    in_namespace("         0          0 4294967295\n")
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}, mode 1777"):
        folders.make_private(tmp / "state", "state.dir")
    in_namespace("      1000       1000          1\n")
    folders.make_private(tmp / "state", "state.dir")
    (tmp / "forged").mkdir()
    os.chown(tmp / "forged", OTHER, OTHER)
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}.*belongs to another user"):
        folders.make_private(tmp / "forged", "state.dir")
    tmp.chmod(0o777)
    with pytest.raises(InvalidOptionError, match=f"user id {OTHER}, mode 0777"):
        folders.make_private(tmp / "state", "state.dir")
    folders._unmapped_owner.cache_clear()


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("1 0 8:1 / / rw - ext4 /dev/sda rw", True),
        ("1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:40 / /data rw shared:1 - nfs4 server:/data rw", False),
        ("1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:40 / /data\\040two rw - nfs4 server:/data rw", True),
        ("1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:40 / /data rw - fuse.gcsfuse bucket rw", False),
        ("1 0 0:1 / / rw - nfs server:/ rw\n2 1 8:1 / /data rw - xfs /dev/sdb rw", True),
        ("1 0 8:1 / / rw - ext4 a rw\n2 1 8:1 / /data rw - xfs b rw\n3 1 0:9 / /data rw - cifs c rw", False),
    ],
)
def test_the_mount_decides_whether_other_hosts_can_change_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, expected: bool
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(mounts + "\n")
    monkeypatch.setattr(folders, "_MOUNTS", str(table))
    folders.is_on_this_host.cache_clear()
    assert folders.is_on_this_host("/data/checkpoint") is expected
    monkeypatch.setattr(folders, "_MOUNTS", str(tmp_path / "there is none"))
    folders.is_on_this_host.cache_clear()
    assert not folders.is_on_this_host("/data/checkpoint")
    folders.is_on_this_host.cache_clear()

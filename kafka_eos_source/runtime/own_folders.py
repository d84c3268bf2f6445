"""Local folders whose contents nobody but this user can have written.

Owner and mode decide on a file system that has them: a file in a folder of mode 0700 was written by the owner
of the folder, or by root. Other users can still put a folder of their own in its place if they may write to
one of the folders above it. So `make_private` looks at the whole path, and `open_own` at what it opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO

from kafka_eos_source.errors import InvalidOptionError

#: Modes of folders and files that only their owner may access.
OWNERS_FOLDER, OWNERS_FILE = 0o700, 0o600
#: File systems on disks or in the memory of this host, which no other host can change.
_OF_THIS_HOST = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"})
_MOUNTS = "/proc/self/mountinfo"
#: Which user ids the process's user namespace has, and the id that files of all other users show.
_USER_IDS, _UNMAPPED = "/proc/self/uid_map", "/proc/sys/kernel/overflowuid"
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


class NotOwnError(PermissionError):
    """Another user wrote, or could have written, a local file."""


def make_private(path: str | os.PathLike[str], option: str, *, notices_others: bool = False) -> None:
    """Creates a local folder that only its owner may open, or takes the rights of others on it away.

    Folders above it that are missing become private, too.

    Args:
        path: the folder.
        option: the option or argument that names the folder, or the folder above it, for the error.
        notices_others: as in `refuse_replaceable`.

    Raises:
        InvalidOptionError: if another user owns the folder, or could put another folder in its place.
    """
    path = os.path.abspath(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISLNK(os.lstat(path).st_mode):
            _take_rights_of_others(path)
    refuse_replaceable(path, option, notices_others=notices_others)
    _make(path)
    found = _take_rights_of_others(path)
    if found.st_uid != os.geteuid() and _has_owners(path):
        raise _refusal(path, path, found, "belongs to another user", option)


def _take_rights_of_others(path: str) -> os.stat_result:
    found = os.stat(path)
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        try:
            os.chmod(path, OWNERS_FOLDER)
        except OSError:
            if _has_owners(path):
                raise  # elsewhere modes cannot be changed, and mean nothing
    return found


def make_missing(path: str | os.PathLike[str], option: str, *, notices_others: bool = False) -> None:
    """Creates a local folder that only its owner may open, unless it exists.

    A folder that exists keeps its mode, and may belong to root. Arguments and errors are those of
    `refuse_replaceable`.
    """
    refuse_replaceable(path, option, notices_others=notices_others)
    _make(os.path.abspath(path))


def refuse_replaceable(path: str | os.PathLike[str], option: str, *, notices_others: bool = False) -> None:
    """Checks that no other user can replace a local folder, or what is in it; it need not exist.

    Args:
        path: the folder.
        option: the option or argument that names the folder, or the folder above it, for the error.
        notices_others: whether the caller notices files of others (`open_own`, a digest). It may then use a
            folder of this user, and a mounted volume of any user, in which everybody may write.

    Raises:
        InvalidOptionError: if another user owns a folder on the path that everybody could have created, or
            everybody may rename what is in one.
    """
    if (found := _flaw(os.path.abspath(path), notices_others)) is not None:
        each, status, flaw = found
        raise _refusal(os.fspath(path), each, status, flaw, option)


def is_replaceable(path: str | os.PathLike[str]) -> bool:
    """Returns whether `refuse_replaceable` refuses a folder."""
    return _flaw(os.path.abspath(path)) is not None


def _flaw(path: str, notices_others: bool = False) -> tuple[str, os.stat_result, str] | None:
    """Returns the first folder on a path that others can replace, its status, and what is wrong with it."""
    trusted = {0, os.geteuid()}
    for whole in dict.fromkeys((path, os.path.realpath(path))):
        everybody_creates = False
        for each in _steps(whole):
            try:
                found = os.lstat(each)
            except (FileNotFoundError, NotADirectoryError):
                break
            flaw = None
            is_link, is_sticky = stat.S_ISLNK(found.st_mode), bool(found.st_mode & stat.S_ISVTX)
            is_open = bool(found.st_mode & stat.S_IWOTH) and not is_link
            if everybody_creates and found.st_uid not in trusted:
                flaw = "belongs to another user"
            elif is_open and not _is_volume(each, found, of_anybody=notices_others):
                if found.st_uid not in trusted and not (is_sticky and found.st_uid == _unmapped_owner()):
                    flaw = "belongs to another user"
                elif not is_sticky and not (notices_others and found.st_uid == os.geteuid()):
                    flaw = "lets everybody rename what is in it (it has no sticky bit)"
            if flaw is not None and (is_link or _has_owners(each, whole)):
                return each, found, flaw
            everybody_creates = is_open
    return None


def _steps(path: str) -> Iterator[str]:
    at = os.sep
    for name in path.split(os.sep):
        at = os.path.join(at, name)
        yield at


def _is_volume(path: str, found: os.stat_result, *, of_anybody: bool = False) -> bool:
    """Returns whether root mounted this folder for the process, as Kubernetes mounts an emptyDir (0777).

    Args:
        path: the folder.
        found: its status.
        of_anybody: whether the folder that was mounted may belong to any user, as one that ``docker run -v``
            names may belong to a user of the host.
    """
    return (of_anybody or found.st_uid == 0) and path != os.sep and os.path.ismount(path)


@lru_cache(maxsize=1)
def _unmapped_owner() -> int | None:
    """Returns the id that stands for every user whom this process's user namespace lacks; None = none does.

    In containers without root (Apptainer, rootless Podman), root of the host has this id, who owns /tmp.
    """
    try:
        with open(_USER_IDS, encoding="utf-8") as ids, open(_UNMAPPED, encoding="utf-8") as unmapped:
            is_complete = ids.read().split() == ["0", "0", "4294967295"]
            return None if is_complete else int(unmapped.read())
    except (OSError, ValueError):
        return None


def _has_owners(folder: str, path: str = "") -> bool:
    """Returns whether what a user creates in a folder belongs to that user, unlike on most network mounts.

    Args:
        folder: the folder.
        path: a path that leads through it. If nobody may create anything in the folder itself, as in
            ``/Volumes`` of Databricks, a folder further down on the same file system is tried.
    """
    device = os.lstat(folder).st_dev
    below = [each for each in _steps(path) if each.startswith(f"{folder.rstrip('/')}/")]
    for each in (folder, *below):
        probe = os.path.join(each, f".kafka-eos-{uuid.uuid4().hex}")
        try:
            if os.lstat(each).st_dev != device:
                break
            os.mkdir(probe, OWNERS_FOLDER)
        except OSError:
            continue
        try:
            made = os.lstat(probe)
            return made.st_uid == os.geteuid() and not made.st_mode & 0o077
        finally:
            os.rmdir(probe)
    return True


def _make(path: str) -> None:
    if not os.path.isdir(path):
        if (above := os.path.dirname(path)) != path:
            _make(above)
        try:
            os.mkdir(path, OWNERS_FOLDER)
        except FileExistsError:
            if not os.path.isdir(path):  # otherwise another task created it at the same moment
                raise


def open_own(path: str, flags: int, *, within: int | None = None, named: str = "") -> int:
    """Opens a local file or folder without following a link, and returns its descriptor.

    Args:
        path: its path, or its name in the folder ``within``.
        flags: flags of `os.open`; a file that is created gets mode 0600.
        within: descriptor of the folder.
        named: the path, for the error.

    Raises:
        NotOwnError: if another user owns it or may write to it, or it is a link.
        OSError: if it cannot be opened.
    """
    named = named or path
    try:
        descriptor = os.open(path, flags | _OPEN, OWNERS_FILE, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            with contextlib.suppress(FileNotFoundError):
                _refuse_foreign(named, os.stat(path, dir_fd=within, follow_symlinks=False))
        raise
    try:
        _refuse_foreign(named, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_foreign(path: str, found: os.stat_result) -> None:
    is_link = stat.S_ISLNK(found.st_mode)
    if is_link or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NotOwnError(
            f"{path!r} is not this user's own (user id {os.geteuid()}): "
            f"{'the symbolic link' if is_link else 'it'} belongs to user id {found.st_uid} and has mode "
            f"{stat.S_IMODE(found.st_mode):04o}"
        )


def refuse_folder_of_others(location: str, folder: str) -> None:
    """Raises PermissionError if other users may change the files of a local folder.

    Every folder from the location on has to belong to this user, to root or to the owner of the location, and
    must not be a link. Other users must not be able to write to it. The location itself may be like /tmp,
    where they cannot replace the folders of others, or a volume that root mounted. The group may write: an
    administrator decides who is in it.

    Args:
        location: folder that an option names. It may be a link, and need not exist.
        folder: the location, or a folder below it, which need not exist.
    """
    steps = [location]
    for name in os.path.relpath(folder, location).split(os.sep):
        steps += [os.path.join(steps[-1], name)] if name != os.curdir else []
    owners = {0, os.geteuid()}
    for step in steps:
        try:
            found = os.stat(step, follow_symlinks=step is location)
        except FileNotFoundError:
            return
        if step is location:
            owners.add(found.st_uid)
        if stat.S_ISLNK(found.st_mode) or found.st_uid not in owners:
            raise PermissionError(
                f"{step} is a link or belongs to another user (user id {found.st_uid}), who could replace "
                "its files. Name a location where only the query's user may create folders"
            )
        is_like_tmp = step is location and (found.st_mode & stat.S_ISVTX or _is_volume(step, found))
        if found.st_mode & stat.S_IWOTH and not is_like_tmp:
            raise PermissionError(
                f"every user of this host may change the files in {step} (mode "
                f"{stat.S_IMODE(found.st_mode):04o}). Run chmod o-w on it, or mount the file system with a "
                "mode that denies that"
            )


def open_regular_file(path: str) -> BinaryIO:
    """Opens a local file for reading. Raises OSError if it is a link, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


@lru_cache(maxsize=256)
def is_on_this_host(path: str) -> bool:
    """Returns whether a local path is on a disk of this host, which no other host can change.

    False also if the system does not say so: only Linux lists its mounts in a file.
    """
    path = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields, _, kinds = line.partition(" - ")
                at = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
                is_above = path == at or path.startswith(at.rstrip("/") + "/")
                if is_above and len(at) >= len(best):
                    best, kind = at, kinds.split()[0]
    except OSError:
        return False
    return kind in _OF_THIS_HOST


def _refusal(path: str, folder: str, found: os.stat_result, flaw: str, option: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"the folder {folder!r} (owner: user id {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}) "
        f"{flaw}, so other users of this host could replace what user id {os.geteuid()} writes to {path!r}.",
        fix=f"run this as the owner of the folder, or set {option} to a folder that only this user may write "
        "to. If the folder is yours, run chown and chmod go-w (or chmod +t) on it; if nobody needs it, "
        "remove it, and kafka-eos creates it again.",
    )

"""Local folders and files whose contents nobody but this user can have written.

Owner and mode decide on a file system that has them: a file in a folder of mode 0700 was written by the owner
of the folder, or by root. Other users can still put a folder of their own in its place if they may write to
one of the folders above it. So `make_private` looks at the whole path, and `open_own` at what it opened.

`PrivateFolder` is for the system's temporary folder, which all users share, with names that are public.
Another user may create a folder of such a name first, or plant a symbolic link. So each of its operations
opens each folder on the path by descriptor, follows no links, and checks that the current user owns the
folder before it touches a file. It creates files exclusively, with mode 0600, and renames them into place.
Only `PrivateFolder.append` writes into a file that already exists, after checking its owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from kafka_eos_source.errors import InvalidOptionError

#: How long `PrivateFolder.stays_held` waits, and how often it looks, in seconds.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 5.0, 0.05

#: Modes of folders and files that only their owner may access.
OWNERS_FOLDER, OWNERS_FILE = 0o700, 0o600
#: File systems on disks or in the memory of this host, which no other host can change.
_OF_THIS_HOST = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"})
_MOUNTS = "/proc/self/mountinfo"
#: Which user ids the process's user namespace has, and the id that files of all other users show.
_USER_IDS, _UNMAPPED = "/proc/self/uid_map", "/proc/sys/kernel/overflowuid"
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


class NotOwnError(PermissionError):
    """A local folder or file belongs to another user, who could read or change its contents."""


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


def open_own(
    path: str, flags: int, *, within: int | None = None, named: str = "", refused_modes: int = 0o022
) -> int:
    """Opens a local file or folder without following a link, and returns its descriptor.

    Args:
        path: its path, or its name in the folder ``within``.
        flags: flags of `os.open`; a file that is created gets mode 0600.
        within: descriptor of the folder.
        named: the path, for the error.
        refused_modes: rights of others that make it somebody else's.

    Raises:
        NotOwnError: if another user owns it or has such rights, or it is a link.
        OSError: if it cannot be opened.
    """
    named = named or path
    try:
        descriptor = os.open(path, flags | _OPEN, OWNERS_FILE, dir_fd=within)
    except OSError as error:
        try:
            found = os.stat(path, dir_fd=within, follow_symlinks=False)
        except OSError:
            raise error from None
        _refuse_foreign(named, found, refused_modes)
        raise
    try:
        _refuse_foreign(named, os.fstat(descriptor), refused_modes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_foreign(path: str, found: os.stat_result, refused_modes: int) -> None:
    is_link = stat.S_ISLNK(found.st_mode)
    if is_link or found.st_uid != os.geteuid() or found.st_mode & refused_modes:
        raise NotOwnError(
            f"{path!r} is not this user's own (user id {os.geteuid()}): "
            f"{'a symbolic link that' if is_link else 'it'} belongs to user id {found.st_uid} and has mode "
            f"{stat.S_IMODE(found.st_mode):04o}"
        )


def refuse_folder_of_others(location: str, folder: str) -> None:
    """Checks that no other user may change the files of a local folder.

    Every folder from the location on has to belong to this user, to root or to the owner of the location, and
    must not be a link. Other users must not be able to write to it. The location itself may be like /tmp,
    where they cannot replace the folders of others, or a volume that root mounted. The group may write: an
    administrator decides who is in it.

    Args:
        location: folder that an option names. It may be a link, and need not exist.
        folder: the location, or a folder below it, which need not exist.

    Raises:
        NotOwnError: if another user may.
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
            raise NotOwnError(
                f"{step} is a link or belongs to another user (user id {found.st_uid}), who could replace "
                "its files. Name a location where only the query's user may create folders"
            )
        is_like_tmp = step is location and (found.st_mode & stat.S_ISVTX or _is_volume(step, found))
        if found.st_mode & stat.S_IWOTH and not is_like_tmp:
            raise NotOwnError(
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


# -- folders in the system's temporary folder ------------------------------------------------------

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
#: O_NONBLOCK: without it, opening a named pipe would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK
#: O_RDWR: `append` reads the last byte.
_APPEND_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK

#: Longest name of one file that file systems allow.
_LONGEST_NAME_BYTES = 255
#: Prefix of a file that is not complete yet. `file_name` never returns such a name.
_UNFINISHED = "."
#: Prefix of a name that replaces a name that is too long. `quote` never writes a "%" before an "s".
_HASHED = "%sha256-"
#: The name for the empty text. `quote` writes two digits after each "%".
_EMPTY = "%"
#: Suffix of the former part of a file to which lines are appended. `quote` writes two digits after each "%".
_FORMER = "%1"
#: Most bytes that are read of a file, unless the caller expects a larger one.
_LARGEST_FILE_BYTES = 64 << 10

#: When this process last tidied a folder, on the monotonic clock, by path of the folder.
_tidied: dict[str, float] = {}
#: `PrivateFolder.tidy` does nothing if this process tidied the folder less than this long ago.
_TIDIED_AGAIN_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class PrivateFolder:
    """A folder of the current user below the temporary folder. It need not exist yet.

    Attributes:
        names: the folders on the path, starting with the one directly in the temporary folder.
    """

    names: tuple[str, ...]

    @classmethod
    def of_user(cls, name: str) -> PrivateFolder:
        """Returns the folder ``<temporary folder>/<name>-<user id>``."""
        return cls((file_name(f"{name}-{os.geteuid()}"),))

    @property
    def path(self) -> str:
        """The folder's path. A path does not prove who owns the folder; `create` checks that."""
        return os.path.join(tempfile.gettempdir(), *self.names)

    def folder(self, name: str) -> PrivateFolder:
        """Returns a folder inside this one. ``name`` may be any text: see `file_name`."""
        return PrivateFolder((*self.names, file_name(name)))

    def create(self) -> str:
        """Creates the folder with mode 0700 unless it exists, and returns its path.

        Raises:
            NotOwnError: if another user owns the folder, or the path is a link or not a folder.
            OSError: if the folder cannot be created.
        """
        with self._open(create=True):
            return self.path

    def read(self, name: str, most_bytes: int = _LARGEST_FILE_BYTES) -> str | None:
        """Returns the text of a file; None if the file or the folder does not exist.

        Args:
            name: name of the file.
            most_bytes: size of the largest file that the caller expects; the rest of a larger one is cut off.

        Raises:
            NotOwnError: if another user owns the folder or the file.
            OSError: if the file cannot be read.
            UnicodeDecodeError: if the file is not UTF-8.
        """
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            return self._read(folder, file_name(name), most_bytes)
        return None

    def write(self, name: str, text: str) -> None:
        """Writes a file atomically: a reader sees the old text or the new text, never a part.

        Raises:
            NotOwnError: if another user owns the folder.
            OSError: if the file cannot be written.
        """
        unfinished = f"{_UNFINISHED}{uuid.uuid4().hex}"
        with self._open(create=True) as folder:
            try:
                descriptor = os.open(unfinished, _CREATE, OWNERS_FILE, dir_fd=folder)
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.rename(unfinished, file_name(name), src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                if isinstance(error, OSError) and error.errno is not None:
                    # the random name says nothing, and would make each text of the same error another one
                    raise OSError(error.errno, error.strerror, f"{self.path}/{file_name(name)}") from error
                raise

    def append(self, name: str, line: Callable[[int], str], most_bytes: int) -> int:
        """Appends a line to a file, which several processes may do at once.

        When the file has reached ``most_bytes``, it becomes the *former part* of the file, which replaces an
        older former part, and the line begins a new file. If a process was killed while it wrote, the damaged
        line stays alone on its line.

        Args:
            name: name of the file.
            line: returns the text, without a line break; called with the size of the file.
            most_bytes: size of each of the two parts, apart from the last line.

        Returns:
            The size of the file afterwards. If ``line`` is called with the same size the next time, nobody
            else has written since.

        Raises:
            NotOwnError: if another user owns the folder or the file.
            OSError: if the file cannot be written.
        """
        with self._open(create=True) as folder:
            descriptor, size = self._open_to_append(folder, file_name(name))
            try:
                if size >= most_bytes and _set_aside(folder, descriptor, file_name(name)):
                    os.close(descriptor)
                    descriptor = -1
                    descriptor, size = self._open_to_append(folder, file_name(name))
                text = line(size)
                is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                # one call, so that lines of several processes do not mix
                return size + os.write(descriptor, f"{chr(10) if is_torn else ''}{text}\n".encode())
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def lines(self, name: str, last_bytes: int) -> list[str]:
        """Returns the last lines of a file to which `append` wrote, oldest first.

        Args:
            name: name of the file.
            last_bytes: how much is read at most of the file and its former part together. The first line may
                be incomplete.

        Raises:
            NotOwnError: if another user owns the folder or the file.
            OSError: if the file cannot be read.
        """
        found: list[bytes] = []
        left = last_bytes
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            for each in (file_name(name), file_name(name) + _FORMER):
                if left > 0:
                    with contextlib.suppress(FileNotFoundError):  # there is no former part
                        found.append(self._read_end(folder, each, left))
                        left -= len(found[-1])
        return [
            line.decode(errors="replace") for part in reversed(found) for line in part.split(b"\n") if line
        ]

    def changes(self) -> dict[str, float]:
        """Returns each complete file with the time of its last change, in seconds since 1970.

        Files whose names are too long for a file system are left out.

        Raises:
            NotOwnError: if another user owns the folder.
            OSError: if the folder cannot be read.
        """
        found: dict[str, float] = {}
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            for each in os.listdir(folder):
                if not each.startswith((_UNFINISHED, _HASHED)) and not each.endswith(_FORMER):
                    with contextlib.suppress(FileNotFoundError):  # the file was deleted after the listing
                        changed = os.stat(each, dir_fd=folder, follow_symlinks=False).st_mtime
                        found[unquote(each)] = changed
        return found

    def tidy(self, kept_seconds: float) -> None:
        """Deletes files that have not changed for this long, complete or not; at most once a day per process.

        It looks at all files of the folder, and a process may run for months.

        Args:
            kept_seconds: the age of the oldest file that stays.

        Raises:
            NotOwnError: if another user owns the folder.
            OSError: if a file cannot be deleted.
        """
        now = time.monotonic()
        if now - _tidied.get(self.path, -_TIDIED_AGAIN_SECONDS) < _TIDIED_AGAIN_SECONDS:
            return
        _tidied[self.path] = now
        oldest = time.time() - kept_seconds
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            for each in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    found = os.stat(each, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and found.st_mtime < oldest:
                        os.unlink(each, dir_fd=folder)

    def remove(self, name: str) -> None:
        """Deletes a file if it exists.

        Raises:
            NotOwnError: if another user owns the folder.
            OSError: if the file cannot be deleted.
        """
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            os.unlink(file_name(name), dir_fd=folder)

    def hold(self, name: str) -> BinaryIO:
        """Holds a file until the caller closes the result, or its process ends; others may hold it too.

        Raises:
            NotOwnError: if another user owns the folder or the file.
            OSError: if the file cannot be created or locked.
        """
        with self._open(create=True) as folder:
            descriptor, _ = self._open_to_append(folder, file_name(name))
        held = open(descriptor, "rb")  # noqa: SIM115 (the caller closes it)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
        except BaseException:
            held.close()
            raise
        return held

    def is_held(self, name: str) -> bool:
        """Returns whether a process holds a file (`hold`).

        Raises:
            NotOwnError: if another user owns the folder or the file.
            OSError: if the file cannot be opened.
        """
        with (
            contextlib.suppress(FileNotFoundError),
            self._open() as folder,
            self._open_to_read(folder, file_name(name)) as file,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def stays_held(self, name: str) -> bool:
        """Returns whether a process holds a file (`hold`), and goes on to do so for 5 s.

        The process of a query that was stopped a moment ago may live a little longer, so this waits for its
        end. Raises the errors of `is_held`.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while self.is_held(name):
            if time.monotonic() > until:
                return True
            time.sleep(_PAUSE_SECONDS)
        return False

    def files(self) -> dict[str, str]:
        """Returns the names and texts of all complete files; nothing if the folder does not exist.

        Files whose names are too long for a file system are left out.

        Raises:
            NotOwnError: if another user owns the folder or a file.
            OSError: if a file cannot be read.
            UnicodeDecodeError: if a file is not UTF-8.
        """
        found: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            for each in os.listdir(folder):
                if not each.startswith((_UNFINISHED, _HASHED)) and not each.endswith(_FORMER):
                    with contextlib.suppress(FileNotFoundError):  # the file was deleted after the listing
                        found[unquote(each)] = self._read(folder, each, _LARGEST_FILE_BYTES)
        return found

    @contextmanager
    def _open(self, *, create: bool = False) -> Iterator[int]:
        """Opens the folder after checking that the current user owns every folder on the path."""
        # the administrator chooses the temporary folder itself; its path may contain links
        folder = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        path = tempfile.gettempdir()
        try:
            for name in self.names:
                path = os.path.join(path, name)
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, OWNERS_FOLDER, dir_fd=folder)
                inner = open_own(
                    name, os.O_RDONLY | os.O_DIRECTORY, within=folder, named=path, refused_modes=0
                )
                os.close(folder)
                folder = inner
                if stat.S_IMODE(os.fstat(folder).st_mode) & ~OWNERS_FOLDER:
                    os.fchmod(folder, OWNERS_FOLDER)  # somebody gave others rights on it
            yield folder
        finally:
            os.close(folder)

    def _read(self, folder: int, name: str, most_bytes: int) -> str:
        with self._open_to_read(folder, name) as file:
            return file.read(most_bytes).decode()

    def _read_end(self, folder: int, name: str, most_bytes: int) -> bytes:
        with self._open_to_read(folder, name) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes)

    def _open_to_read(self, folder: int, name: str) -> BinaryIO:
        return open(self._open_file(folder, name, _READ_FLAGS), "rb")

    def _open_to_append(self, folder: int, name: str) -> tuple[int, int]:
        """Opens or creates a file, and returns its descriptor and its size."""
        descriptor = self._open_file(folder, name, _APPEND_FLAGS)
        return descriptor, os.fstat(descriptor).st_size

    def _open_file(self, folder: int, name: str, flags: int) -> int:
        path = os.path.join(self.path, name)
        descriptor = open_own(name, flags, within=folder, named=path, refused_modes=0)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotOwnError(f"{path!r} is not a regular file")
        return descriptor


def file_name(text: str) -> str:
    """Returns a file name that is unique for ``text`` and cannot lead out of a folder.

    Letters, digits, ".", "_", "-" and "~" are kept, except for a leading "."; every other character is
    percent-encoded. If the name would be too long, the SHA-256 of the text takes its place.
    """
    quoted = quote(text, safe="", errors="surrogatepass") or _EMPTY
    if quoted.startswith(_UNFINISHED):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > _LONGEST_NAME_BYTES:
        return _HASHED + sha256(text.encode(errors="surrogatepass")).hexdigest()
    return quoted


def _set_aside(folder: int, descriptor: int, name: str) -> bool:
    """Makes a full file the former part, unless another process is doing that or has done it.

    Returns:
        Whether ``name`` now names another file than ``descriptor``, or none.
    """
    try:
        # a lock that is never waited for: a process that was stopped while it held it delays nobody
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(FileNotFoundError):
        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino:
            os.rename(name, name + _FORMER, src_dir_fd=folder, dst_dir_fd=folder)
    return True


# -- the cache -------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Returns ``KAFKA_EOS_CACHE``, else the folder ``kafka-eos`` in the user's cache folder."""
    configured = os.environ.get("KAFKA_EOS_CACHE")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kafka-eos"

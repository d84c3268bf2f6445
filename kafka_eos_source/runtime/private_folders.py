"""Folders below the system's temporary folder that only the current user may read and write.

The system's temporary folder is shared, and the names that this package uses in it are public. Another
local user may therefore create a folder of that name first, or plant a symbolic link. Every operation of
this module opens each folder on the way by descriptor, follows no link, checks that the current user owns
it, and only then touches a file in it. Files are created exclusively with mode 0600 and renamed into place,
so an operation never writes through anything that is already there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote, unquote

_OWNERS_FOLDER, _OWNERS_FILE = 0o700, 0o600
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Without O_NONBLOCK, opening a named pipe would wait for its writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

#: What file systems allow for the name of one file.
_LONGEST_NAME_BYTES = 255
#: Begins the name of a file that is not complete yet. `file_name` never returns such a name.
_UNFINISHED = "."
#: Begins the name of a file whose own name is too long. `quote` never writes a "%" before an "s".
_HASHED = "%sha256-"
#: Stands for the empty text. `quote` writes two digits after each "%".
_EMPTY = "%"
#: No file that this package keeps in such a folder is nearly as large.
_LARGEST_FILE_BYTES = 64 << 10


class ForeignFolderError(PermissionError):
    """A folder or file is not the current user's own: its owner could read or change what is in it."""


@dataclass(frozen=True)
class PrivateFolder:
    """A folder of the current user below the temporary folder. It need not exist yet.

    Attributes:
        names: the folder's name in the temporary folder, then those of the folders inside it.
    """

    names: tuple[str, ...]

    @classmethod
    def of_user(cls, name: str) -> PrivateFolder:
        """The folder ``<temporary folder>/<name>-<user id>``."""
        return cls((file_name(f"{name}-{os.getuid()}"),))

    @property
    def path(self) -> str:
        """Where the folder is. A path does not prove who owns it; `create` does."""
        return os.path.join(tempfile.gettempdir(), *self.names)

    def folder(self, name: str) -> PrivateFolder:
        """A folder inside this one. ``name`` may be any text: see `file_name`."""
        return PrivateFolder((*self.names, file_name(name)))

    def create(self) -> str:
        """Creates the folder with mode 0700 unless it exists, and returns its path.

        Raises:
            ForeignFolderError: another user owns the folder, or it is a link or no folder.
            OSError: the folder cannot be created.
        """
        with self._open(create=True):
            return self.path

    def read(self, name: str) -> str | None:
        """The text of a file; None if the file or the folder does not exist.

        Raises:
            ForeignFolderError: the folder or the file is not the current user's own.
            OSError: the file cannot be read.
            UnicodeDecodeError: the file is not UTF-8.
        """
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            return self._read(folder, file_name(name))
        return None

    def write(self, name: str, text: str) -> None:
        """Writes a file whole, in place of an older one; a reader sees either of them and never a part.

        Raises:
            ForeignFolderError: the folder is not the current user's own.
            OSError: the file cannot be written.
        """
        unfinished = f"{_UNFINISHED}{uuid.uuid4().hex}"
        with self._open(create=True) as folder:
            descriptor = os.open(unfinished, _WRITE_FLAGS, _OWNERS_FILE, dir_fd=folder)
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.rename(unfinished, file_name(name), src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise

    def remove(self, name: str) -> None:
        """Deletes a file, if it exists.

        Raises:
            ForeignFolderError: the folder is not the current user's own.
            OSError: the file cannot be deleted.
        """
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            os.unlink(file_name(name), dir_fd=folder)

    def files(self) -> dict[str, str]:
        """The names and texts of all complete files; none if the folder does not exist.

        Files with a name that is too long for a file system are left out.

        Raises:
            ForeignFolderError: the folder or a file is not the current user's own.
            OSError: a file cannot be read.
            UnicodeDecodeError: a file is not UTF-8.
        """
        found: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            for each in os.listdir(folder):
                if not each.startswith((_UNFINISHED, _HASHED)):
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        found[unquote(each)] = self._read(folder, each)
        return found

    @contextmanager
    def _open(self, *, create: bool = False) -> Iterator[int]:
        """A descriptor of the folder; every folder on the way to it belongs to the current user."""
        # the temporary folder itself is the administrator's choice, and may be reached by a link
        folder = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        path = tempfile.gettempdir()
        try:
            for name in self.names:
                path = os.path.join(path, name)
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, _OWNERS_FOLDER, dir_fd=folder)
                inner = _open_own_folder(folder, name, path)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _read(self, folder: int, name: str) -> str:
        path = os.path.join(self.path, name)
        try:
            descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
        except OSError as error:
            raise _explained(error, folder, name, path) from error
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            _check_owner(path, found)
            if not stat.S_ISREG(found.st_mode):
                raise ForeignFolderError(f"{path!r} is no regular file")
            return file.read(_LARGEST_FILE_BYTES).decode()


def file_name(text: str) -> str:
    """A name for a file that stands for ``text`` and for no other text, and cannot lead out of a folder.

    Letters, digits, ".", "_", "-" and "~" stay as they are, except for a leading "."; everything else is
    percent-encoded. A text whose name would be too long is replaced by its SHA-256.
    """
    quoted = quote(text, safe="", errors="surrogatepass") or _EMPTY
    if quoted.startswith(_UNFINISHED):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > _LONGEST_NAME_BYTES:
        return _HASHED + sha256(text.encode(errors="surrogatepass")).hexdigest()
    return quoted


def warn_once(log: logging.Logger, text: str) -> None:
    """Logs a warning unless this process has logged the same text before."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


_warned: set[str] = set()


def _open_own_folder(parent: int, name: str, path: str) -> int:
    try:
        descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except OSError as error:
        raise _explained(error, parent, name, path) from error
    try:
        found = os.fstat(descriptor)
        _check_owner(path, found)
        if stat.S_IMODE(found.st_mode) & ~_OWNERS_FOLDER:
            os.fchmod(descriptor, _OWNERS_FOLDER)  # an older release made some with the umask's mode
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise ForeignFolderError(_foreign(path, found))


def _explained(error: OSError, parent: int, name: str, path: str) -> OSError:
    """The error to raise where ``name`` could not be opened: a `ForeignFolderError` where it is foreign."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return error
    is_link = stat.S_ISLNK(found.st_mode)
    return ForeignFolderError(_foreign(path, found)) if is_link or found.st_uid != os.getuid() else error


def _foreign(path: str, found: os.stat_result) -> str:
    kind = "a symbolic link that" if stat.S_ISLNK(found.st_mode) else "it"
    return (
        f"{path!r} is not this user's own (user id {os.getuid()}): {kind} belongs to user id {found.st_uid}"
    )

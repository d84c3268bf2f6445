"""Descriptions of prepared batches, which a sink believes by their digest: manifests, notes and rows.

A sink writes a manifest at prepare: a small JSON file that lists what the batch consists of. Another process
may read it at commit, perhaps days later. Whoever may write to the storage can edit it meanwhile. So
`prepare` returns the manifest's digest (`contract.Ok`), the token in Kafka holds that digest, and `commit`
reads nothing of a manifest that has another one.

No digest is known when a sink lists or deletes what is prepared, and when a person decides that a batch is
committed (``kafka-eos sinks commit``). Therefore each sink also validates what it reads, before it acts on
any of it: names lead to no other place than that of its own staged files.

A sink whose system cannot hold prepared work keeps it in a `NotesFolder` of the query's checkpoint::

    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.json    a note
    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.arrow   rows, as an Arrow IPC stream

Readers never see a partial file: each is written under a temporary name and then renamed. Both kinds have a
digest. Whoever may write to the checkpoint can hide that something is prepared, or pretend that it is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.file_systems import WriteOnlyFile, file_system, fsync, make_folder, new_file
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.sinks import manifest as manifests

#: Size of the largest manifest. One of 100,000 files has about 50 MB.
LARGEST_BYTES = 256 << 20
#: Hex digits of SHA-256 in a digest: 128 bits, for which nobody can make a second manifest. Short, because a
#: token holds those of all sinks.
_DIGITS = 32
#: O_NONBLOCK: without it, opening a named pipe would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SHOWN = 100
#: What `refused` says of a batch that readers see while another one of the same id is prepared.
NOT_PREPARED = "is not the one that was prepared"

T = TypeVar("T")


def encode(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest.

    Raises:
        SinkFailedError: if it is too large to be read again.
    """
    data = json.dumps(content, indent=1).encode()
    if len(data) > LARGEST_BYTES:
        raise SinkFailedError(
            f"the manifest of the batch has {len(data)} bytes; expected at most {LARGEST_BYTES}.",
            fix="read less per batch (option maxOffsetsPerTrigger of the source), or use fewer tasks.",
        )
    return data


def digest(data: bytes) -> str:
    """Returns the digest of a manifest, for `contract.Ok` and `SinkTxn.digest`."""
    return shortened(hashlib.sha256(data))


def shortened(sha256: hashlib._Hash) -> str:
    """Returns the digest of data that was hashed piece by piece."""
    return sha256.hexdigest()[:_DIGITS]


def stored(fs: pafs.FileSystem, path: str) -> bytes:
    """Reads a manifest of a file system.

    Raises:
        FileNotFoundError: if it does not exist.
        SinkFailedError: if it is too large; of a local one, also if it is a link or no regular file.
        OSError: if it cannot be read.
    """
    if not isinstance(fs, pafs.LocalFileSystem):
        with fs.open_input_file(path) as source:
            if source.size() > LARGEST_BYTES:
                raise refused(f"the manifest {path}", f"has {source.size()} bytes")
            return bytes(source.read())
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        if os.path.islink(path):
            raise refused(f"the manifest {path}", "is a symbolic link") from error
        raise
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_BYTES:
            raise refused(f"the manifest {path}", f"is not a regular file of at most {LARGEST_BYTES} bytes")
        return file.read(found.st_size)


def parsed(data: bytes, wanted: str, where: str, read: Callable[[Mapping[str, Any]], T]) -> T:
    """Checks the digest of a manifest, and then parses it.

    Args:
        data: the bytes that the storage returned.
        wanted: `SinkTxn.digest`; empty if nobody vouches for the manifest, so that it is only validated.
        where: place of the manifest, for the message.
        read: returns the manifest's content; raises ``ValueError``, ``KeyError`` or ``TypeError`` if a value
            in it is not what the sink writes.

    Raises:
        SinkFailedError: if the manifest is another one than the token names, or damaged.
    """
    check(digest(data), wanted, where)
    try:
        return read(objects([parse_json(data)])[0])
    except SHAPE_ERRORS as error:
        text = f"{type(error).__name__}: {error}"
        raise refused(where, f"is damaged: {text[:_SHOWN]!r}") from error


def check(found: str, wanted: str, where: str) -> None:
    """Checks a digest.

    Raises:
        SinkFailedError: if a digest is wanted, and another one was found.
    """
    if wanted and found != wanted:
        raise refused(
            where,
            f"was changed after the batch was prepared: its digest is {found}, but Kafka holds {wanted}",
        )


def refused(where: str, what: str) -> SinkFailedError:
    """Returns the error for a manifest, or a file of a batch, that must not be believed."""
    return SinkFailedError(
        f"{where} {what}. No row of the batch was published.",
        fix="find out who wrote to that place, and take the right away from whoever should not have it. Put "
        "the file back as it was, for example from a backup, and restart the query, which then continues. "
        "Without it, see SINK_FAILED in docs/runbooks.md: the rows of the batch are in Kafka's topic.",
    )


def relative_name(value: object) -> str:
    """Returns a name in a manifest if it leads to a place below the sink's own folder.

    Raises:
        ValueError: if it is absolute, a URI, or has empty parts, ``.``, ``..`` or control characters.
    """
    if not isinstance(value, str) or not value.isprintable() or "\\" in value or "://" in value:
        raise ValueError(f"not the name of a file below the folder: {str(value)[:_SHOWN]!r}")
    if any(part in ("", ".", "..") for part in value.split("/")):
        raise ValueError(f"the name leads out of the folder: {value[:_SHOWN]!r}")
    return value


def count(value: object) -> int:
    """Returns a number of rows or bytes.

    Raises:
        ValueError: if it is none.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a count: {str(value)[:_SHOWN]!r}")
    return value


def objects(value: object) -> list[Mapping[str, Any]]:
    """Returns a list of JSON objects.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"not a list of objects: {str(value)[:_SHOWN]!r}")
    return value


# -- the folder in the checkpoint ----------------------------------------------------------------

_NOTE, _ROWS, _TEMPORARY = ".json", ".arrow", ".new"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class NotesFolder:
    """Durable notes and rows of one sink of one query.

    Picklable, because each process opens the file system itself.

    Attributes:
        location: URI or path of the folder.
    """

    location: str

    def put(self, name: str, note: Mapping[str, Any]) -> str:
        """Writes a note and replaces an earlier one of the same name.

        Returns:
            The digest of the note.

        Raises:
            OSError: if the file cannot be written.
        """
        data = manifests.encode(note)
        self._write(f"{name}{_NOTE}", lambda out: out.write(data))
        return manifests.digest(data)

    def get(self, name: str, digest: str, read: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Reads a note.

        Args:
            name: name of the note.
            digest: digest that the note must have; empty if nobody vouches for it.
            read: see `manifest.parsed`.

        Returns:
            What ``read`` returned, or None if no note of that name exists.

        Raises:
            SinkFailedError: if it is another note than the one with the digest, or damaged.
            OSError: if the file cannot be read.
        """
        fs, path = self._file(f"{name}{_NOTE}")
        try:
            return manifests.parsed(manifests.stored(fs, path), digest, f"the note {path}", read)
        except FileNotFoundError:
            return None

    def digest(self, name: str) -> str | None:
        """Returns the digest of a note, whatever is in it; None if none of that name exists."""
        fs, path = self._file(f"{name}{_NOTE}")
        try:
            return manifests.digest(manifests.stored(fs, path))
        except FileNotFoundError:
            return None

    def put_rows(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
        """Writes rows and replaces earlier ones of the same name.

        Returns:
            The digest of the rows.

        Raises:
            OSError: if the file cannot be written.
        """
        found = hashlib.sha256()

        def write(out: pa.NativeFile) -> None:
            with pa.ipc.new_stream(_Hashed(out, found), schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)

        self._write(f"{name}{_ROWS}", write)
        return manifests.shortened(found)

    def rows(self, name: str, digest: str) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a name.

        Args:
            name: name of the rows.
            digest: digest that they must have; empty if nobody vouches for them. It is checked before the
                first batch, and takes a second read of the file.

        Raises:
            FileNotFoundError: if no rows of that name exist.
            SinkFailedError: if they have another digest.
        """
        fs, path = self._file(f"{name}{_ROWS}")
        with fs.open_input_file(path) as source:
            if digest:
                found = hashlib.sha256()
                while piece := source.read(_PIECE_BYTES):
                    found.update(piece)
                manifests.check(manifests.shortened(found), digest, f"the file of rows {path}")
                source.seek(0)
            yield from pa.ipc.open_stream(source)

    def remove(self, name: str) -> None:
        """Deletes the note and the rows of a name, if they exist.

        Raises:
            OSError: if an existing file cannot be deleted.
        """
        fs, path = file_system(self.location)
        for ending in (_ROWS, _NOTE):
            try:
                fs.delete_file(f"{path}/{name}{ending}")
            except FileNotFoundError:
                continue

    def names(self) -> list[str]:
        """Lists the names of all notes and rows."""
        fs, path = file_system(self.location)
        found = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        endings = (_NOTE, _ROWS)
        return sorted(
            {each.base_name.rpartition(".")[0] for each in found if each.base_name.endswith(endings)}
        )

    def sweep(self) -> None:
        """Deletes temporary files that a killed process left. The driver calls this when a batch is finished.

        Raises:
            OSError: if a file cannot be deleted.
        """
        fs, path = file_system(self.location)
        for each in fs.get_file_info(pafs.FileSelector(path, allow_not_found=True)):
            if each.base_name.endswith(_TEMPORARY):
                fs.delete_file(each.path)

    def _file(self, name: str) -> tuple[pafs.FileSystem, str]:
        fs, path = file_system(self.location)
        return fs, f"{path}/{name}"

    def _write(self, name: str, write: Callable[[pa.NativeFile], object]) -> None:
        fs, path = file_system(self.location)
        make_folder(fs, path)
        temporary = f"{path}/{uuid.uuid4().hex}{_TEMPORARY}"  # an id may be nearly as long as a file name may
        try:
            with new_file(fs, temporary) as out:
                write(out)
            # prepared work must survive a power cut
            if isinstance(fs, pafs.LocalFileSystem):
                fsync(temporary)
            failpoints.reach("sink.store.before_rename")
            fs.move(temporary, f"{path}/{name}")
        except BaseException:
            if fs.get_file_info(temporary).type == pafs.FileType.File:
                fs.delete_file(temporary)
            raise


class _Hashed(WriteOnlyFile):
    """File that hashes what is written to it."""

    def __init__(self, out: pa.NativeFile, sha256: hashlib._Hash) -> None:
        self._out = out
        self._sha256 = sha256

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self._out.write(data)
        return len(data)

"""The identity file of a checkpoint: whose batches it has, where it lies, and since when Kafka holds tokens.

The file is ``<checkpoint>/kafka-eos/identity.json``. A checkpoint without it is new, or was used by another
sink, whose batches leave no token. The commit writes the file after the genesis token and before the first
batch. If the file exists and Kafka holds no token, Kafka has lost the token.

The file knows the location of its checkpoint. A checkpoint that is found elsewhere was moved or copied. Kafka
cannot tell these apart, and two copies of a checkpoint would share one chain of tokens, so a person answers
(``onMovedCheckpoint``).

The file also knows the static tables that SQL texts of the query join. Other tables would change the result
in silence, so a person allows it (``onChangedTable``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from pyarrow.fs import LocalFileSystem

from kafka_eos_source.commit import refusals
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.protocol.token import BY, package_version, writer_of
from kafka_eos_source.runtime.file_systems import file_system, fsync, new_file
from kafka_eos_source.runtime.folders import make_private
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.sinks.targets import location

_FILE = "kafka-eos/identity.json"

#: Checkpoints that `check_identity` has found usable, with the options that this depends on.
_checked: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class Identity:
    """The content of the file.

    Attributes:
        application_id: the transactional id that committed the batches.
        query_id: Spark's id of the query, which shows whether the folder was copied from another checkpoint.
        first_batch: the first batch that was committed, or was about to be, through this package.
        location: normalised URI of the checkpoint (`sinks.targets.location`).
        token_topic: the topic that holds a record of every transaction since this name was written. None
            means that transactions may have been committed without a record, so a record may be outdated.
        tables: a digest of each static table that SQL texts of the query join.
        unproven_since: the first batch that may have been written with ``at_least_once``, which leaves no
            token; None if there is none.
    """

    application_id: str
    query_id: str
    first_batch: int
    location: str
    token_topic: str | None = None
    tables: Mapping[str, str] = field(default_factory=dict)
    unproven_since: int | None = None


class IdentityFile:
    """The identity file of one checkpoint, as the commit of one batch uses it.

    Args:
        checkpoint: location of the checkpoint.
        wanted: the content to write if the file does not exist.
        moved: option ``onMovedCheckpoint``: ``fail``, ``continue:<former location>`` or ``fork``.

    Raises:
        CheckpointMovedError: if the checkpoint was at another location, and ``moved`` does not say what that
            means.
        InvalidOptionError: if the batches of the checkpoint were committed with another ``application.id``,
            or a fork has the ``application.id`` of the original.
        OperatorError: if the checkpoint has lost its query id; or see `read_identity`.
        NewerVersionError: see `read_identity`.
        UnavailableError: if the file cannot be read.
    """

    def __init__(self, checkpoint: str, wanted: Identity, moved: str = "fail") -> None:
        self._checkpoint = checkpoint
        self._wanted = wanted
        self.found = _read(checkpoint)
        if self.found is not None and self.found.query_id != wanted.query_id:
            if self.found.location == wanted.location and wanted.first_batch > 0:
                raise refusals.query_id_replaced(self.found, wanted)
            self.found = None  # the folder was copied from another query's checkpoint, or it begins anew
        #: Whether this checkpoint is a copy with a new application.id that has not committed a batch yet.
        self.is_new_fork = False
        if self.found is None:
            return
        if self.found.location != wanted.location:
            _check_place(self.found, wanted, moved)
            self.is_new_fork = moved == "fork"
        if self.is_new_fork:
            self.found = None  # the original's tokens are not those of the fork
        elif self.found.application_id != wanted.application_id:
            raise refusals.other_application(self.found, wanted)

    @classmethod
    def of(cls, checkpoint: str, options: WriteOptions, query_id: str, batch_id: int) -> IdentityFile:
        """Returns the file of a checkpoint for the batch of a query with these sink options.

        Raises: as the constructor, GuaranteeChangedError as `check_guarantee`, and InvalidOptionError as
            `check_tables`, unless ``onChangedTable=continue``.
        """
        wanted = Identity(
            options.application_id or derived_application_id(query_id),
            query_id,
            batch_id,
            location(checkpoint),
            token_topic=options.token_topic,
            tables=options.static_tables,
        )
        found = cls(checkpoint, wanted, options.moved_checkpoint)
        found.check_guarantee()
        if options.changed_table != "continue":
            found.check_tables()
        return found

    @property
    def promises_token(self) -> bool:
        """Whether Kafka must hold a token: the genesis token is committed before the file is written."""
        return self.found is not None

    def has_all_tokens(self, token_topic: str) -> bool:
        """Whether the token topic has a record of every transaction that this checkpoint committed."""
        return self.found is None or self.found.token_topic == token_topic

    def check_guarantee(self) -> None:
        """Checks that no batch was written with ``at_least_once`` since the last token.

        Raises:
            GuaranteeChangedError: if one may have been.
        """
        found = self.found
        if found is not None and found.unproven_since is not None:
            raise refusals.unproven_batches(found)

    def check_tables(self) -> None:
        """Checks that the static tables are those with which the checkpoint was last used.

        Raises:
            InvalidOptionError: if one has other rows or columns.
        """
        former = {} if self.found is None else self.found.tables
        for name, digest in self._wanted.tables.items():
            if former.get(name, digest) != digest:
                raise refusals.changed_table(name)

    def accept_tables(self) -> None:
        """Records changed static tables that a person accepts, also if this start commits no batch.

        Raises:
            UnavailableError: if the checkpoint cannot be written.
        """
        if self.found is not None:
            self._write(replace(self.found, tables=self._wanted.tables))

    def write(self) -> None:
        """Writes what the file must say before a batch is committed. Call it after the genesis token.

        The commit calls this before it writes a batch. If the batch will have no record in the token topic
        that the file names, the name is removed, so that an outdated record is never believed. If the
        checkpoint was moved, its new location is written; and the static tables of this run.

        Raises:
            UnavailableError: if the checkpoint cannot be written.
        """
        found, wanted = self.found, self._wanted
        if found is None:
            self._write(wanted)
            return
        kept = found.token_topic if found.token_topic == wanted.token_topic else None
        self._write(replace(found, location=wanted.location, token_topic=kept, tables=wanted.tables))

    def confirm_token_topic(self) -> None:
        """Names the token topic in the file. Call it after a transaction with a record was committed.

        Raises:
            UnavailableError: if the checkpoint cannot be written.
        """
        if self.found is not None:
            self._write(replace(self.found, token_topic=self._wanted.token_topic))

    def _write(self, content: Identity) -> None:
        if content != self.found:
            _write(self._checkpoint, content)
            self.found = content


def check_identity(options: WriteOptions) -> None:
    """Checks once per process, before a task runs, that the query may use its checkpoint.

    The commit checks again before each batch.

    Raises: as `IdentityFile.of`, and UnavailableError if static tables changed and the file cannot say so.
    """
    checkpoint = options.checkpoint_location
    tables = (options.changed_table, *sorted(options.static_tables.items()))
    key = (checkpoint, options.application_id, options.moved_checkpoint, tables)
    if checkpoint is None or key in _checked or _read(checkpoint) is None:
        return
    found = IdentityFile.of(checkpoint, options, offset_log.query_id(checkpoint), 0)
    if options.changed_table == "continue":
        found.accept_tables()
    _checked.add(key)


def is_proven(checkpoint: str) -> bool:
    """Whether a token shows each batch of the checkpoint: this package commits them, and all exactly once.

    Raises:
        UnavailableError: if the checkpoint cannot be read.
    """
    found = _read(checkpoint)
    return found is not None and found.unproven_since is None


def set_unproven(
    checkpoint: str, since: int | None, before: Callable[[Identity], None] = lambda _: None
) -> None:
    """Records from which batch on no token exists, unless that is recorded; None removes the record.

    Call it before a batch is written with ``at_least_once``, and after a token was committed for the newest
    batch. Does nothing if this package has never committed a batch of the checkpoint.

    Args:
        checkpoint: location of the checkpoint.
        since: the first batch without a token; None = none.
        before: called with the content of the file before it changes.

    Raises:
        UnavailableError: if the checkpoint cannot be read or written.
    """
    found = _read(checkpoint)
    if found is not None and (since is None) is not (found.unproven_since is None):
        before(found)
        _write(checkpoint, replace(found, unproven_since=since))


def read_identity(checkpoint: str) -> Identity | None:
    """Reads the identity file of a checkpoint.

    Returns:
        None if this package has never committed a batch of this checkpoint.

    Raises:
        NewerVersionError: if the file has keys that this version does not know. They may forbid what this
            version would do next.
        OperatorError: if the file is damaged.
        OSError: if the file cannot be read.
    """
    fs, root = file_system(checkpoint)
    try:
        with fs.open_input_stream(f"{root}/{_FILE}") as source:
            text = source.read()
    except FileNotFoundError:
        return None
    try:
        found = {**parse_json(text)}  # raises TypeError if it is no object
        known = {each.name for each in fields(Identity)}
        unknown = sorted(found.keys() - known - {BY})
        if not unknown:
            return Identity(**{name: value for name, value in found.items() if name in known})
    except (ValueError, TypeError) as error:
        raise refusals.identity_damaged(f"{checkpoint}/{_FILE}", location(checkpoint), error) from error
    raise refusals.identity_of_newer_version(f"{checkpoint}/{_FILE}", unknown, writer_of(found))


def _read(checkpoint: str) -> Identity | None:
    try:
        return read_identity(checkpoint)
    except OSError as error:
        raise refusals.identity_unusable(checkpoint, "read", error) from error


def _write(checkpoint: str, content: Identity) -> None:
    fs, root = file_system(checkpoint)
    path = f"{root}/{_FILE}"
    try:
        is_local = isinstance(fs, LocalFileSystem)
        if is_local:
            make_private(path.rsplit("/", 1)[0], "checkpointLocation", notices_others=True)
        else:
            fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
        # another driver may write the file at the same moment; Spark's log or Kafka stops one of the two
        temporary = f"{path}.{uuid.uuid4().hex}.new"
        with new_file(fs, temporary) as out:
            out.write(json.dumps({**asdict(content), BY: package_version()}).encode())
        if is_local:
            # otherwise a power failure may leave the name of the file without its content
            fsync(temporary)
        fs.move(temporary, path)
        if is_local:
            fsync(path.rsplit("/", 1)[0])
    except OSError as error:
        raise refusals.identity_unusable(checkpoint, "written", error) from error


def _check_place(found: Identity, wanted: Identity, moved: str) -> None:
    """Raises unless a person has said what it means that the checkpoint is at another location.

    Raises:
        CheckpointMovedError: if nobody has.
        InvalidOptionError: if a fork has the ``application.id`` of the original.
    """
    if moved == "fork":
        if found.application_id == wanted.application_id:
            raise refusals.fork_with_same_id(wanted)
        return
    kind, _, former = moved.partition(":")
    if kind == "continue" and location(former) == found.location:
        return
    raise refusals.checkpoint_moved(found, wanted)

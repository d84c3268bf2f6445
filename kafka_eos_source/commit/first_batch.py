"""The first-batch file of a checkpoint records that Kafka must hold a token.

The file is ``<checkpoint>/kafka-eos/identity.json``. A checkpoint without it was used by Spark's own sink,
whose batches leave no token, or is new. The commit writes the file after the genesis token and before the
first batch. If the file exists and Kafka holds no token, Kafka has lost the token.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, fields, replace

from pyarrow.fs import LocalFileSystem

from kafka_eos_source.errors import (
    InvalidOptionError,
    NewerVersionError,
    OperatorError,
    UnavailableError,
)
from kafka_eos_source.protocol.writer_version import BY, writer_of
from kafka_eos_source.runtime.file_systems import file_system, fsync

_FILE = "kafka-eos/identity.json"


@dataclass(frozen=True)
class FirstBatch:
    """The content of the file.

    Attributes:
        application_id: the transactional id that committed the batches.
        query_id: Spark's id of the query, which shows whether the folder was copied from another checkpoint.
        first_batch: the first batch that was committed, or was about to be, through this package.
        genesis: whether a genesis token was committed before the file was written. Format 1 wrote the file
            before the first batch and had no genesis token, so that batch may have no token.
        token_topic: the topic that holds a record of every transaction since this name was written. None
            means that transactions may have been committed without a record, so a record may be outdated.
    """

    application_id: str
    query_id: str
    first_batch: int
    genesis: bool = False
    token_topic: str | None = None

    def promises_token(self, batch_id: int) -> bool:
        """Whether Kafka must hold a token before ``batch_id`` is committed."""
        return self.genesis or self.first_batch != batch_id


class FirstBatchFile:
    """The first-batch file of one checkpoint, as the commit of one batch uses it.

    Args:
        checkpoint: location of the checkpoint.
        wanted: the content to write if the file does not exist.

    Raises:
        InvalidOptionError: if the batches of the checkpoint were committed with another ``application.id``.
        NewerVersionError, OperatorError: see `read_first_batch`.
        UnavailableError: if the file cannot be read.
    """

    def __init__(self, checkpoint: str, wanted: FirstBatch) -> None:
        self._checkpoint = checkpoint
        self._wanted = wanted
        try:
            self.found = read_first_batch(checkpoint)
        except OSError as error:
            raise _unusable(checkpoint, "read", error) from error
        if self.found is not None and self.found.query_id != wanted.query_id:
            self.found = None  # the folder was copied from another query's checkpoint
        if self.found is not None:
            _check_application(self.found, wanted)

    def promises_token(self, batch_id: int) -> bool:
        """Whether Kafka must hold a token before ``batch_id`` is committed."""
        return self.found is not None and self.found.promises_token(batch_id)

    def has_all_tokens(self, token_topic: str) -> bool:
        """Whether the token topic has a record of every transaction that this checkpoint committed."""
        return self.found is None or self.found.token_topic == token_topic

    def write(self) -> None:
        """Writes the file if it does not exist. Call it after the genesis token was committed.

        The commit calls this before it writes a batch. If the batch will have no record in the token topic
        that the file names, the name is removed, so that an outdated record is never believed.

        Raises:
            UnavailableError: if the checkpoint cannot be written.
        """
        found, wanted = self.found, self._wanted
        if found is None:
            self._write(replace(wanted, genesis=True))
        elif not found.genesis or found.token_topic not in (None, wanted.token_topic):
            kept = found.token_topic if found.token_topic == wanted.token_topic else None
            self._write(replace(found, genesis=True, token_topic=kept))

    def confirm_token_topic(self) -> None:
        """Names the token topic in the file. Call it after a transaction with a record was committed.

        Raises:
            UnavailableError: if the checkpoint cannot be written.
        """
        if self.found is not None and self.found.token_topic != self._wanted.token_topic:
            self._write(replace(self.found, token_topic=self._wanted.token_topic))

    def _write(self, content: FirstBatch) -> None:
        fs, root = file_system(self._checkpoint)
        path = f"{root}/{_FILE}"
        try:
            fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
            # another driver may write the file at the same moment; Spark's log or Kafka stops one of the two
            temporary = f"{path}.{uuid.uuid4().hex}.new"
            with fs.open_output_stream(temporary) as out:
                out.write(json.dumps(asdict(content)).encode())
            is_local = isinstance(fs, LocalFileSystem)
            if is_local:
                # otherwise a power failure may leave the name of the file without its content
                fsync(temporary)
            fs.move(temporary, path)
            if is_local:
                fsync(path.rsplit("/", 1)[0])
        except OSError as error:
            raise _unusable(self._checkpoint, "written", error) from error
        self.found = content


def read_first_batch(checkpoint: str) -> FirstBatch | None:
    """Reads the first-batch file of a checkpoint.

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
        found = {**json.loads(text)}  # raises TypeError if it is no object
        known = {each.name for each in fields(FirstBatch)}
        unknown = sorted(found.keys() - known - {BY})
        if not unknown:
            return FirstBatch(**{name: value for name, value in found.items() if name in known})
    except (ValueError, TypeError) as error:
        raise OperatorError(
            f"{checkpoint}/{_FILE} is damaged ({error}); expected application_id, query_id and first_batch.",
            fix="restore it from a copy of the checkpoint; or write it by hand: application_id is the "
            "query's application.id, query_id is the id in the checkpoint's file 'metadata', and first_batch "
            "is 0.",
        ) from error
    raise NewerVersionError(
        f"{checkpoint}/{_FILE} has keys that this version of kafka-eos does not know: {', '.join(unknown)}. "
        f"It was written by {writer_of(found)}.",
        fix=f"run the query with {writer_of(found)} (docs/upgrading.md).",
    )


def _check_application(found: FirstBatch, wanted: FirstBatch) -> None:
    if found.application_id != wanted.application_id:
        raise InvalidOptionError(
            f"the batches of this checkpoint were committed with application.id={found.application_id!r}, "
            f"but the query now has application.id={wanted.application_id!r}, for which Kafka holds no "
            "token.",
            fix=f"set .option('application.id', {found.application_id!r}) again, or use a new checkpoint.",
        )


def _unusable(checkpoint: str, what: str, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"the first-batch file in checkpoint {checkpoint!r} cannot be {what}: {error}.",
        fix="give the driver permission to read and write the checkpoint, or free disk space; then restart "
        "the query.",
    )

"""The first-batch file of a checkpoint: since when its batches are committed through this package.

``<checkpoint>/kafka-eos/identity.json`` tells a checkpoint of Spark's own sink, whose batches left no token,
from one whose token is lost. It is written after the genesis token was committed and before the first batch
is, so from then on Kafka must hold a token.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, replace

from kafka_eos_source.errors import InvalidOptionError, OperatorError, UnavailableError
from kafka_eos_source.runtime.file_systems import file_system

_FILE = "kafka-eos/identity.json"


@dataclass(frozen=True)
class FirstBatch:
    """What the file says.

    Attributes:
        application_id: the transactional id used.
        query_id: the checkpoint's id, so that a copied folder is noticed.
        first_batch: the first batch that was, or was about to be, committed.
        genesis: whether a genesis token was committed before the file was written. Format 1 wrote the file
            first, so there the first batch itself may have no token yet.
        token_topic: the topic that holds a record of every transaction since this name was written; None =
            transactions may have been committed without a record, so a record may be out of date.
    """

    application_id: str
    query_id: str
    first_batch: int
    genesis: bool = False
    token_topic: str | None = None

    def promises_token(self, batch_id: int) -> bool:
        """Whether Kafka must hold a token when ``batch_id`` is about to be committed."""
        return self.genesis or self.first_batch != batch_id


class FirstBatchFile:
    """The file of one checkpoint, as the commit of one batch uses it.

    Args:
        checkpoint: location of the checkpoint.
        wanted: what to write if there is no file yet.

    Raises:
        InvalidOptionError: the checkpoint was committed under another ``application.id``.
        OperatorError: the file is damaged.
        UnavailableError: the file cannot be read.
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
        """Whether Kafka must hold a token before this batch is committed."""
        return self.found is not None and self.found.promises_token(batch_id)

    def has_all_tokens(self, token_topic: str) -> bool:
        """Whether this topic has a record of every transaction that was committed from this checkpoint."""
        return self.found is None or self.found.token_topic == token_topic

    def write(self) -> None:
        """Writes the file if there is none. The genesis token is in Kafka by now.

        The commit calls this before it writes a batch. If the batch will have no record in the token topic
        that the file names, the name is taken out, so that a record is never believed that is out of date.

        Raises:
            UnavailableError: the checkpoint cannot be written.
        """
        found, wanted = self.found, self._wanted
        if found is None:
            self._write(replace(wanted, genesis=True))
        elif not found.genesis or found.token_topic not in (None, wanted.token_topic):
            kept = found.token_topic if found.token_topic == wanted.token_topic else None
            self._write(replace(found, genesis=True, token_topic=kept))

    def confirm_token_topic(self) -> None:
        """Names the token topic in the file. A transaction with a record in it is in Kafka by now.

        Raises:
            UnavailableError: the checkpoint cannot be written.
        """
        if self.found is not None and self.found.token_topic != self._wanted.token_topic:
            self._write(replace(self.found, token_topic=self._wanted.token_topic))

    def _write(self, content: FirstBatch) -> None:
        fs, root = file_system(self._checkpoint)
        path = f"{root}/{_FILE}"
        try:
            fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
            # another driver may write it at the same moment, until Spark's log or Kafka stops one of the two
            own = f"{path}.{uuid.uuid4().hex}.new"
            with fs.open_output_stream(own) as out:
                out.write(json.dumps(asdict(content)).encode())
            fs.move(own, path)
        except OSError as error:
            raise _unusable(self._checkpoint, "written", error) from error
        self.found = content


def read_first_batch(checkpoint: str) -> FirstBatch | None:
    """The first-batch file of a checkpoint.

    Returns:
        None if no batch was ever committed from this checkpoint through this package.

    Raises:
        OperatorError: the file is damaged.
        OSError: the file cannot be read.
    """
    fs, root = file_system(checkpoint)
    try:
        with fs.open_input_stream(f"{root}/{_FILE}") as source:
            text = source.read()
    except FileNotFoundError:
        return None
    try:
        return FirstBatch(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise OperatorError(
            f"{checkpoint}/{_FILE} is damaged ({error}); expected application_id, query_id and first_batch.",
            fix="restore it from a copy of the checkpoint; or write it anew: the query's application.id, the "
            "id in the file 'metadata', and 0.",
        ) from error


def _check_application(found: FirstBatch, wanted: FirstBatch) -> None:
    if found.application_id != wanted.application_id:
        raise InvalidOptionError(
            f"this checkpoint was committed with application.id={found.application_id!r}; the query now has "
            f"{wanted.application_id!r}, under which Kafka knows nothing of its batches.",
            fix=f"set .option('application.id', {found.application_id!r}) again, or use a new checkpoint.",
        )


def _unusable(checkpoint: str, what: str, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"the checkpoint {checkpoint!r} cannot be {what}: {error}.",
        fix="allow the driver to use it, or free space; then restart the query.",
    )

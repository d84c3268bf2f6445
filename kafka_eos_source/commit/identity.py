"""Who commits: the names under which a query is known to Kafka, and the mark it leaves in its checkpoint."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass

from kafka_eos_source.checked_options import WriteOptions, derived_application_id
from kafka_eos_source.commit.decide import ONCE
from kafka_eos_source.errors import InvalidOptionError, OperatorError, UnavailableError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.file_systems import file_system

#: Where the token of a query goes that reads no Kafka and has no one topic to write to: a partition that
#: every cluster with consumer groups has, and nobody's consumers read.
_ANCHOR_OF_LAST_RESORT = "__consumer_offsets"

_DISPOSABLE = "kafka-eos-batch-"

_MARK_FILE = "kafka-eos/identity.json"


@dataclass(frozen=True)
class Identity:
    """Names of one query, or of one series of batch writes.

    Attributes:
        application_id: the transactional id.
        group_id: consumer group of the source offsets and the token.
        query_id: what the token must say for a batch to be ours.
        anchor: partition under which the token is committed whatever the sources are.
        versioned: identified by ``txnAppId``.
        once: one batch write without ``txnVersion``.
    """

    application_id: str
    group_id: str
    query_id: str
    anchor: TopicPartition
    versioned: bool = False
    once: bool = False

    @property
    def disposable(self) -> bool:
        """Whether the group was made for one batch write only, and is to be deleted after it."""
        return self.once and self.group_id.startswith(_DISPOSABLE)


def of_stream(options: WriteOptions, query_id: str) -> Identity:
    """The identity of a streaming query: the ``application.id``, else derived from the checkpoint's id."""
    return _identity(options, options.application_id or derived_application_id(query_id), query_id)


def of_batch_write(options: WriteOptions) -> Identity:
    """The identity of ``df.write``: stable with ``txnAppId``, made up for this one write without.

    The topic is part of it, so that one ``foreachBatch`` may write several topics under one ``txnAppId``.
    """
    if options.txn_app_id is None:
        own = str(uuid.uuid4())
        return _identity(options, options.application_id or _DISPOSABLE + own, f"{ONCE}{own}", once=True)
    series = f"{options.txn_app_id}-{options.topic}" if options.topic else options.txn_app_id
    legal = re.sub(r"[^A-Za-z0-9._-]", "_", series)
    return _identity(
        options, options.application_id or f"kafka-eos-{legal}", f"txnAppId:{series}", versioned=True
    )


def _identity(
    options: WriteOptions,
    application_id: str,
    query_id: str,
    *,
    versioned: bool = False,
    once: bool = False,
) -> Identity:
    return Identity(
        application_id=application_id,
        group_id=options.group_id or application_id,
        query_id=query_id,
        anchor=TopicPartition(options.anchor_topic or options.topic or _ANCHOR_OF_LAST_RESORT, 0),
        versioned=versioned,
        once=once,
    )


@dataclass(frozen=True)
class Mark:
    """``<checkpoint>/kafka-eos/identity.json``: since when this checkpoint is committed through us.

    Without it a checkpoint of Spark's own sink could not be told from one whose token is lost.

    Attributes:
        application_id: the transactional id used.
        query_id: the checkpoint's id, so that a copied folder is noticed.
        first_batch: the first batch that was, or was about to be, committed.
    """

    application_id: str
    query_id: str
    first_batch: int


def mark(checkpoint: str, wanted: Mark) -> Mark:
    """The checkpoint's mark; ``wanted`` is written when there is none.

    Raises:
        InvalidOptionError: the checkpoint was committed under another ``application.id``.
        UnavailableError: the checkpoint cannot be written.
        OperatorError: its mark is damaged.
    """
    fs, root = file_system(checkpoint)
    path = f"{root}/{_MARK_FILE}"
    try:
        found = read_mark(checkpoint)
        if found is None:
            fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
            # another driver may be here at this moment, until Spark's log or Kafka stops one of the two
            own = f"{path}.{uuid.uuid4().hex}.new"
            with fs.open_output_stream(own) as out:
                out.write(json.dumps(asdict(wanted)).encode())
            fs.move(own, path)
            found = read_mark(checkpoint) or wanted
    except OSError as error:
        raise UnavailableError(
            f"the checkpoint {checkpoint!r} cannot be written: {error}.",
            fix="allow the driver to write there, or free space; then restart the query.",
        ) from error
    if found.application_id != wanted.application_id and found.query_id == wanted.query_id:
        raise InvalidOptionError(
            f"this checkpoint was committed with application.id={found.application_id!r}; the query now has "
            f"{wanted.application_id!r}, under which Kafka knows nothing of its batches.",
            fix=f"set .option('application.id', {found.application_id!r}) again, or use a new checkpoint.",
        )
    return found


def read_mark(checkpoint: str) -> Mark | None:
    """The checkpoint's mark; None = nothing was ever committed from it through us.

    Raises:
        OperatorError: it is damaged.
    """
    fs, root = file_system(checkpoint)
    try:
        with fs.open_input_stream(f"{root}/{_MARK_FILE}") as source:
            text = source.read()
    except FileNotFoundError:
        return None
    try:
        return Mark(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise OperatorError(
            f"{checkpoint}/{_MARK_FILE} is damaged ({error}); expected application_id, query_id and "
            "first_batch.",
            fix="restore it from a copy of the checkpoint; or write it anew: the query's application.id, the "
            "id in the file 'metadata', and 0.",
        ) from error

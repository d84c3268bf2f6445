"""Staged frames: frames of `map_in_read` whose rows the reading tasks stage for the sink themselves.

Each row of a staged frame is the report of one reading task: a binary value in the column `STAGED`, which
only the sink reads. The metadata of the column contain the schema of the rows, and the options of the sink
for which they are staged, without secrets (`described`). So the sink refuses a frame that was staged for
another one before the first batch.

Expressions over the column, such as a cast, drop the metadata, and the sink would write the reports as
records. So the source's planning process, which lives as long as the run, also holds a file of this host from
before it plans the first batch (`StagedRun`). Spark asks for the sink of each batch after that, also on the
driver, and the sink looks whether the file is held.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.in_read.step import BY_MAP_IN_READ, only_column
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.secrets import bare_url, is_secret
from kafka_eos_source.sinks.specs import SinkSpec

#: Column of a staged frame.
STAGED = "__kafka_eos_staged"

#: Keys in the metadata of that column: the schema of the rows (JSON of Spark), the options of the sink,
#: and who passed them.
_ROWS, _BY, _SINK = "kafka_eos.staged.rows", "kafka_eos.staged.by", "kafka_eos.staged.sink"

#: Who passes the options if `App.write` stages the rows in the read.
BY_APP = "App.write"

#: Fields of `WriteOptions` that only the commit uses. They may differ: a person adds some for one restart.
_OF_COMMIT = frozenset(
    {
        "missing_token",
        "foreign_query",
        "all_records_bad",
        "moved_offsets",
        "moved_checkpoint",
        "commit_timeout_ms",
        "source_cluster",
        "query_name",
        "txn_app_id",
        "txn_version",
    }
)

#: Options whose field in `WriteOptions` has another name.
_OPTION_NAMES = {
    "application_id": "application.id",
    "group_id": "kafka.group.id",
    "guarantee": "processing.guarantee",
    "checkpoint_location": "checkpointLocation",
    "staging_location": "staging.location",
    "staging_inline_bytes": "staging.inline.bytes",
    "include_timestamp": "includeTimestamp",
    "anchor_topic": "anchor.topic",
    "token_topic": "token.topic",
    "on_invalid_record": "onInvalidRecord",
    "dead_letter_topic": "deadLetter.topic",
}

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class StagedFrame:
    """What a staged frame tells the sink.

    Attributes:
        rows: schema of the rows that the reading tasks stage.
        sink: `described` options of the sink for which they stage them.
        by: who passed these, see `MapInRead.by`.
    """

    rows: StructType
    sink: Mapping[str, str]
    by: str

    def check_sink(self, options: WriteOptions) -> None:
        """Checks that the frame was staged with the options of this sink.

        Raises:
            InvalidOptionError: if not. It names the options that differ.
        """
        own = described(options)
        names = sorted(name for name in {*own, *self.sink} if own.get(name) != self.sink.get(name))
        if not names:
            return
        differences = "; ".join(
            f"{name!r} is {own.get(name, 'not set')} here and {self.sink.get(name, 'not set')} there"
            for name in names
        )
        if self.by == BY_APP:
            raise InvalidOptionError(
                "the tasks that read stage the rows of this query with the options that App.write() got, and "
                f"the sink has others: {differences}.",
                fix="pass the options to App.write(options={…}) or to App(options={…}), and not to option() "
                "or options() of the writer that write() returns.",
            )
        raise InvalidOptionError(
            f"the tasks that read stage the rows of this frame with the options in {self.by}, and "
            f"the sink has others: {differences}.",
            fix="pass one mapping to both: map_in_read(…, write=sink) and writeStream.options(**sink).",
        )


def described(options: WriteOptions) -> dict[str, str]:
    """Returns the options of a sink that decide how and where rows are staged, by name, without secrets.

    Of a URL, there is only a digest of what is neither user info nor query, because drivers and web services
    accept passwords in these.
    """
    found = {
        _OPTION_NAMES.get(field.name, field.name): _of_field(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.name not in (*_OF_COMMIT, "kafka", "sinks")
    }
    found |= {f"kafka.{name}": _shown(value) for name, value in options.kafka.items() if not is_secret(name)}
    return found | {f"sink.{each.name}": _described(each) for each in options.sinks}


def _of_field(value: object) -> str:
    """Returns the value of an option of the package; locations without user info and query."""
    return repr(bare_url(value) if isinstance(value, str) and _URL.match(value) else value)


def _described(sink: SinkSpec) -> str:
    """Returns type, columns and options of a sink outside Kafka; of an object only a digest."""
    text = f"type={sink.type}, columns={sink.columns}"
    if sink.pickled is not None:
        return f"{text}, {_digest(sink.pickled)}"
    for name, value in sorted(sink.options.items()):
        if isinstance(value, Mapping):  # `storage.*` stands for several options
            prefix = name.removesuffix("*")
            for rest, each in sorted(value.items()):
                text += f", {prefix}{rest}={_of_sink(sink, prefix + rest, each)}"
        else:
            text += f", {name}={_of_sink(sink, name, value)}"
    return text


def _of_sink(sink: SinkSpec, name: str, value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    if is_secret(name) or (name in sink.secret_options and not _URL.match(text)):
        return "…"
    if "://" in text:
        return _shown(text)
    for secret in sorted(sink.secret_values, key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _shown(value: str) -> str:
    """Returns a value, and only a digest of one that contains a URL."""
    return f"(URL {_digest(bare_url(value))})" if "://" in value else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def staged_frame_schema(rows: StructType, sink: WriteOptions, by: str = BY_MAP_IN_READ) -> StructType:
    """Returns the schema of a frame whose rows, of schema ``rows``, are staged for a sink.

    Args:
        rows: schema of the rows.
        sink: options of the sink.
        by: who passed these, see `MapInRead.by`.
    """
    metadata = {
        _ROWS: json.dumps(rows.jsonValue()),
        _BY: by,
        _SINK: json.dumps(described(sink), sort_keys=True),
    }
    return StructType([StructField(STAGED, BinaryType(), metadata=metadata)])


def staged_frame(schema: StructType) -> StagedFrame | None:
    """Returns what a staged frame tells the sink; None if the frame is not staged.

    Args:
        schema: schema of the frame.

    Raises:
        InvalidSchemaError: as `only_column`.
    """
    found = only_column(
        schema, STAGED, (_ROWS, _BY, _SINK), "reports of reading tasks", "whose rows are already staged"
    )
    if found is None:
        return None
    return StagedFrame(StructType.fromJson(parse_json(found[_ROWS])), parse_json(found[_SINK]), found[_BY])


# ------------------------------------------------------------------ runs of queries with staged frames

_log = logging.getLogger(__name__)


class StagedRun:
    """A run of a query whose reading tasks stage the rows; held by the source's planning process.

    Args:
        checkpoint: option ``checkpointLocation`` in ``write=`` of `map_in_read`.
    """

    def __init__(self, checkpoint: str) -> None:
        self._held: BinaryIO | None = None
        try:
            self._held = _folder().hold(_name(checkpoint))
        except OSError as error:  # the protection is missing, and nothing else
            _log.warning("the sink cannot check that it gets an unchanged staged frame: %s", error)

    def end(self) -> None:
        """Says that the run has ended."""
        if self._held is not None:
            self._held.close()


def is_staged_in_read(checkpoint: str) -> bool:
    """Returns whether the reading tasks of the query with this checkpoint stage its rows.

    Args:
        checkpoint: option ``checkpointLocation`` of the sink.
    """
    folder, name = _folder(), _name(checkpoint)
    try:
        return folder.stays_held(name)
    except OSError as error:
        _log.warning("cannot check that the frame is an unchanged staged frame: %s", error)
    return False


def _folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-live").folder("staged")


def _name(checkpoint: str) -> str:
    fs, path = file_system(checkpoint)
    if fs.type_name == "local":
        path = os.path.realpath(path)
    return hashlib.sha256(f"{fs.type_name}:{path.rstrip('/')}".encode()).hexdigest()[:32]

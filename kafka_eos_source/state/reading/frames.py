"""A store as a DataFrame: what is planned on the driver, and what each task reads. One task is one shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, StateError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.kafka.consumer import AssignedConsumer
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.committed import changelog_client
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.restore_target import ForwardingTarget
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.reading.cut import Changelog, Cut
from kafka_eos_source.state.reading.decode import BATCH_ROWS
from kafka_eos_source.state.reading.decoders import decoder
from kafka_eos_source.state.reading.local import StoreFolder, one_store
from kafka_eos_source.state.reading.options import StateReadOptions
from kafka_eos_source.state.reading.query import with_partition, with_partition_id
from kafka_eos_source.state.reading.snapshot import Snapshot, of_changelog, of_folders
from kafka_eos_source.state.store.views import StateView

#: Of a read with ``raw``.
RAW = pa.schema([("key", pa.binary()), ("value", pa.binary())])


@dataclass(frozen=True)
class Part:
    """What one task reads: a shard's database, or its changelog up to a cut."""

    shard: int
    folder: StoreFolder | None = None
    cut: Cut | None = None


def columns(options: StateReadOptions) -> pa.Schema:
    """The columns of the read.

    Of a changelog, one partition is read for the store's description, the shortest.

    Raises:
        StateError: there is no such store, or nothing was written to it yet.
        InvalidOptionError: it has no such variable, or several and none is named.
        KafkaEosError: as `snapshot.of_folders` and `Changelog.cut` say.
    """
    if options.raw:
        return with_partition_id(RAW)
    found = _description(options)
    if found is None:
        raise StateError(
            f"nothing was written yet to store {options.store!r} of application.id="
            f"{options.application_id!r}: what columns it has is not known.",
            fix="wait for its query's first batch.",
        )
    return _nullable(with_partition_id(decoder(found, options.choice).schema))


def plan(options: StateReadOptions) -> list[Part]:
    """The parts, by shard.

    Raises: as `columns`.
        InvalidOptionError: ``batchId`` is not the newest batch.
        StateError: a shard has no database on this machine.
    """
    deadline = Deadline.after_ms(options.timeout_ms)
    if options.state_dir is not None:
        _, _, found = one_store(options.state_dir, options.application_id, options.store)
        with of_folders(found, None, deadline) as snapshot:
            snapshot.check_here(range(snapshot.shards))
            for state in snapshot.states.values():
                _check_batch(options, None if state.batch is None else state.batch.batch_id)
            return [Part(each.shard, folder=each) for each in found if each.shard in snapshot.states]
    cut = options.changelog().cut(deadline)
    _check_batch(options, cut.batch_id)
    return [Part(shard, cut=cut) for shard in range(cut.shards)]


def read(options: StateReadOptions, part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of one part, in batches of this schema.

    Raises:
        InvalidSchemaError: the store holds other columns by now.
        KafkaEosError: as `snapshot.of_folders` and `snapshot.of_changelog` say.
    """
    deadline = Deadline.after_ms(options.timeout_ms)
    with _snapshot(options, part, deadline) as snapshot:
        for batch in _rows(options, snapshot.shard(part.shard).view):
            yield _cast(with_partition(batch, part.shard), schema)


def _snapshot(options: StateReadOptions, part: Part, deadline: Deadline) -> Snapshot:
    if part.folder is not None:
        return of_folders([part.folder], None, deadline)
    assert part.cut is not None
    return of_changelog(options.changelog(), part.cut, [part.shard], deadline)


def _rows(options: StateReadOptions, view: StateView) -> Iterator[pa.RecordBatch]:
    if options.raw:
        pairs = view.all()
        while chunk := list(islice(pairs, BATCH_ROWS)):
            keys, values = zip(*chunk, strict=True)
            yield pa.RecordBatch.from_arrays(
                [pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=RAW
            )
        return
    written = view.get(META_KEY)
    if written is not None:
        chosen = decoder(Description.from_json(written), options.choice)
        yield from chosen.batches(view.range(*chosen.span))


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.names != schema.names:
        raise InvalidSchemaError(
            f"the store holds the columns {batch.schema.names}; the read was planned with {schema.names}.",
            fix="read again; and remove .schema(…), which cannot be set.",
        )
    return pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)], schema=schema
    )


def _check_batch(options: StateReadOptions, batch_id: int | None) -> None:
    if options.batch_id is not None and options.batch_id != batch_id:
        raise InvalidOptionError(
            f"batchId is {options.batch_id}; the state is of {'no batch' if batch_id is None else batch_id}, "
            "and no other is kept.",
            fix="leave batchId out.",
        )


def _description(options: StateReadOptions) -> Description | None:
    deadline = Deadline.after_ms(options.timeout_ms)
    if options.state_dir is not None:
        _, _, found = one_store(options.state_dir, options.application_id, options.store)
        with of_folders(found, None, deadline) as snapshot:
            written = (state.view.get(META_KEY) for state in snapshot.states.values())
            return next((Description.from_json(each) for each in written if each is not None), None)
    changelog = options.changelog()
    return described(changelog, changelog.cut(deadline), deadline)


def described(changelog: Changelog, cut: Cut, deadline: Deadline) -> Description | None:
    """What the store says it holds, from the shortest partition that says it; None = none does.

    Raises:
        ChangelogError, UnavailableError, AuthorizationError: as `restore`.
    """
    with changelog_client(changelog.kafka, changelog.group_id) as consumer:
        for shard in sorted(range(cut.shards), key=lambda each: cut.ends[each]):
            found = _last_value(META_KEY, cut.tp(shard), cut.ends[shard], consumer, deadline)
            if found is not None:
                return Description.from_json(found)
    return None


def _last_value(
    key: bytes, tp: TopicPartition, end: int, consumer: AssignedConsumer, deadline: Deadline
) -> bytes | None:
    """Of one key in a partition of a changelog; None = it is not there, or was deleted."""
    last: bytes | None = None

    def look(keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        nonlocal last
        found = values.filter(pc.equal(keys, pa.scalar(key)))
        if len(found):
            last = found[-1].as_py()

    restore(ForwardingTarget(look), tp, end, ChangelogReader(consumer, tp), deadline=deadline)
    return last


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])

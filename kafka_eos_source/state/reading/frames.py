"""``spark.read.format("kafka-eos-state")``: its options, and how Spark reads a store as a DataFrame.

The driver plans one read per shard, and one task does each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, StateError
from kafka_eos_source.kafka import config
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.options.parse import has_brokers, parse_table, take_group_id
from kafka_eos_source.options.table import STATE_READ
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.state.changelog.restore import ForwardingTarget, restore
from kafka_eos_source.state.changelog.topic import changelog_client
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.reading.decode import BATCH_ROWS, Selection, decoder
from kafka_eos_source.state.reading.query import with_partition, with_partition_id
from kafka_eos_source.state.reading.snapshot import Snapshot, of_changelog, of_folders
from kafka_eos_source.state.reading.stores import Changelog, Cut, StoreFolder, one_store
from kafka_eos_source.state.store.views import StateView


@dataclass(frozen=True)
class StateReadOptions:
    """Parsed options of a read of state; ``docs/options.md`` describes each.

    Attributes:
        application_id: option ``application.id``; set unless ``state_dir`` is.
        store: option ``storeName``; set unless ``state_dir`` is.
        state_dir: directory of the databases to read; None = read the changelog.
        group_id: consumer group of the query; None = the default (`identity.group_of`).
        selection: the part of the store to read.
        raw: whether to return keys and values as they are stored.
        batch_id: batch that the state must be of; None = any.
        timeout_ms: limit for each wait for the brokers.
        kafka: librdkafka properties. They may contain passwords, so they are not printed.
        snapshot_location: where snapshots of the shards are, from which a read of the changelog may begin;
            None = it begins with the changelog. It may contain a password, so it is not printed.
    """

    application_id: str | None
    store: str | None
    state_dir: str | None
    group_id: str | None
    selection: Selection
    raw: bool
    batch_id: int | None
    timeout_ms: int
    kafka: Mapping[str, str] = field(repr=False)
    snapshot_location: str | None = field(default=None, repr=False)

    def changelog(self) -> Changelog:
        """Returns the changelog to read; ``state_dir`` must not be set."""
        assert self.application_id is not None
        assert self.store is not None
        group_id = group_of(self.application_id, self.group_id)
        return Changelog(self.application_id, self.store, group_id, self.kafka, self.snapshot_location)


def parse_state_read(options: Mapping[str, str]) -> StateReadOptions:
    """Parses the options of a read of state, without any access to brokers or files.

    Raises:
        InvalidOptionError: if an option is unknown, malformed or missing, or contradicts another one; or if
            PyArrow cannot open the location of snapshots.
    """
    values, kafka = parse_table(options, STATE_READ, needs_brokers=False)
    group_id = take_group_id(kafka)
    state_dir = values["state.dir"] or options.get("path")
    if state_dir is None:
        if not has_brokers(kafka):
            raise InvalidOptionError(
                "neither 'state.dir' nor 'kafka.bootstrap.servers' is set; expected one of them.",
                fix="to read the databases on this machine, set state.dir or load(path); to read the "
                "changelog, set the operator's kafka.* options.",
            )
        for name in ("application.id", "storeName"):
            if values[name] is None:
                raise InvalidOptionError(
                    f"option {name!r} is missing; it is part of the name of the changelog topic.",
                    fix="set it to the value that the query has; `kafka-eos state list` lists the values.",
                )
    elif has_brokers(kafka):
        raise InvalidOptionError(
            f"both 'state.dir' ({state_dir!r}) and 'kafka.bootstrap.servers' are set; expected one of them.",
            fix="keep the kafka.* options to read all shards at one batch from the changelog, or keep "
            "state.dir to read the databases on this machine. StateQuery accepts both.",
        )
    snapshot_location = values["state.snapshot.location"]
    if snapshot_location is not None:
        if state_dir is not None:
            raise InvalidOptionError(
                f"both 'state.dir' ({state_dir!r}) and 'state.snapshot.location' are set; a read of the "
                "databases uses no snapshots.",
                fix="remove state.snapshot.location; or remove state.dir, to read the changelog.",
            )
        file_system(snapshot_location)
    if values["raw"] and (values["stateVarName"] or values["readRegisteredTimers"]):
        raise InvalidOptionError(
            "'raw' is set together with 'stateVarName' or 'readRegisteredTimers'.", fix="keep one of them."
        )
    if values["stateVarName"] and values["readRegisteredTimers"]:
        raise InvalidOptionError(
            "'stateVarName' and 'readRegisteredTimers' are both set, but timers belong to no variable.",
            fix="keep one of them.",
        )
    return StateReadOptions(
        application_id=values["application.id"],
        store=values["storeName"],
        state_dir=state_dir,
        group_id=group_id,
        selection=Selection(
            values["stateVarName"], values["readRegisteredTimers"], values["flattenCollectionTypes"]
        ),
        raw=values["raw"],
        batch_id=values["batchId"],
        timeout_ms=values["state.timeout.ms"],
        kafka=config.check_consumer(kafka),
        snapshot_location=snapshot_location,
    )


# ------------------------------------------------------------------ plan and read

#: Columns of a read with ``raw``, without the shard.
RAW = pa.schema([("key", pa.binary()), ("value", pa.binary())])


@dataclass(frozen=True)
class ShardRead:
    """What one task reads: the database of a shard, or its changelog up to the offset in a `Cut`."""

    number: int
    folder: StoreFolder | None = None
    cut: Cut | None = None


def columns(options: StateReadOptions) -> pa.Schema:
    """Returns the columns of the DataFrame. Runs on the driver.

    A read of the changelog finds the store's description in the shortest partition that has it.

    Raises:
        StateError: if there is no such store, or it is still empty.
        InvalidOptionError: if the store has no such variable; or it has several, and none was named.
        KafkaEosError: as `snapshot.of_folders` and `Changelog.cut` describe.
    """
    if options.raw:
        return with_partition_id(RAW)
    description = _description(options)
    if description is None:
        raise StateError(
            f"store {options.store!r} of application.id={options.application_id!r} is still empty, so its "
            "columns are unknown.",
            fix="wait for the first batch of its query.",
        )
    return _nullable(with_partition_id(decoder(description, options.selection).schema))


def plan(options: StateReadOptions) -> list[ShardRead]:
    """Returns what to read, one task per shard. Runs on the driver.

    Raises:
        InvalidOptionError: if ``batchId`` is not the newest batch.
        StateError: if there is no such store, or a shard has no database on this machine.
        KafkaEosError: as `snapshot.of_folders` and `Changelog.cut` describe.
    """
    deadline = Deadline.after_ms(options.timeout_ms)
    if options.state_dir is not None:
        _, _, databases = one_store(options.state_dir, options.application_id, options.store)
        with of_folders(databases, None, deadline) as snapshot:
            snapshot.check_here(range(snapshot.shards))
            for state in snapshot.states.values():
                _check_batch(options, None if state.batch is None else state.batch.batch_id)
            return [ShardRead(each.shard, folder=each) for each in databases if each.shard in snapshot.states]
    cut = options.changelog().cut(deadline)
    _check_batch(options, cut.batch_id)
    return [ShardRead(shard, cut=cut) for shard in range(cut.shards)]


def read(options: StateReadOptions, shard: ShardRead, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Reads the rows of one shard. Runs in a task.

    Args:
        options: options of the read.
        shard: what the task reads.
        schema: columns of the batches, as `columns` returned them on the driver.

    Raises:
        InvalidSchemaError: if the store now has other columns.
        KafkaEosError: as `snapshot.of_folders` and `snapshot.of_changelog` describe.
    """
    deadline = Deadline.after_ms(options.timeout_ms)
    with _snapshot(options, shard, deadline) as snapshot:
        for batch in _rows(options, snapshot.shard(shard.number).view):
            yield _cast(with_partition(batch, shard.number), schema)


def _snapshot(options: StateReadOptions, shard: ShardRead, deadline: Deadline) -> Snapshot:
    if shard.folder is not None:
        return of_folders([shard.folder], None, deadline)
    assert shard.cut is not None
    return of_changelog(options.changelog(), shard.cut, [shard.number], deadline)


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
        table = decoder(Description.from_json(written), options.selection)
        yield from table.batches(view.range(*table.span))


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.names != schema.names:
        raise InvalidSchemaError(
            f"the store has the columns {batch.schema.names}; expected {schema.names}, as when the read was "
            "planned.",
            fix="read again, and remove .schema(…), which this source does not support.",
        )
    return pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)], schema=schema
    )


def _check_batch(options: StateReadOptions, batch_id: int | None) -> None:
    if options.batch_id is not None and options.batch_id != batch_id:
        of = "no batch" if batch_id is None else f"batch {batch_id}"
        raise InvalidOptionError(
            f"batchId is {options.batch_id}, but the state reflects {of}; older states are not kept.",
            fix="remove batchId.",
        )


def _description(options: StateReadOptions) -> Description | None:
    deadline = Deadline.after_ms(options.timeout_ms)
    if options.state_dir is not None:
        _, _, databases = one_store(options.state_dir, options.application_id, options.store)
        with of_folders(databases, None, deadline) as snapshot:
            written = (state.view.get(META_KEY) for state in snapshot.states.values())
            return next((Description.from_json(each) for each in written if each is not None), None)
    changelog = options.changelog()
    cut = changelog.cut(deadline)
    if changelog.snapshot_location is None:
        return described(changelog, cut, deadline)
    return _described_by_store(changelog, cut, deadline)


def described(changelog: Changelog, cut: Cut, deadline: Deadline) -> Description | None:
    """Reads the store's description from the shortest changelog partition that has it.

    Returns:
        The description; None = no partition has it, because the store is still empty.

    Raises:
        ChangelogError, UnavailableError, AuthorizationError: as `restore` describes.
    """
    with changelog_client(changelog.kafka) as consumer:
        for shard in _shortest_first(cut):
            written = _last_value(META_KEY, cut, shard, consumer, deadline)
            if written is not None:
                return Description.from_json(written)
    return None


def _described_by_store(changelog: Changelog, cut: Cut, deadline: Deadline) -> Description | None:
    """Reads the store's description as `described`, from databases that begin with snapshots."""
    for shard in _shortest_first(cut):
        with of_changelog(changelog, cut, [shard], deadline) as snapshot:
            written = snapshot.shard(shard).view.get(META_KEY)
        if written is not None:
            return Description.from_json(written)
    return None


def _shortest_first(cut: Cut) -> list[int]:
    return sorted(range(cut.shards), key=lambda shard: cut.ends[shard])


def _last_value(
    key: bytes, cut: Cut, shard: int, consumer: RangeConsumer, deadline: Deadline
) -> bytes | None:
    """Reads the newest value of one key from a changelog partition; None = no value, or a tombstone."""
    last: bytes | None = None

    def record_last(keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        nonlocal last
        matches = values.filter(pc.equal(keys, pa.scalar(key)))
        if len(matches):
            last = matches[-1].as_py()

    tp, source = cut.tp(shard), ChangelogReader(consumer, cut.tp(shard))
    restore(
        ForwardingTarget(record_last),
        tp,
        cut.ends[shard],
        source,
        owner=cut.owner,
        deadline=deadline,
        accepted_start=cut.log_start(shard),
    )
    return last


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])

"""`StateQuery`: reads a store from Python, also while its query runs.

It sees only committed data, as a ``read_committed`` view of KIP-892, and all results of one `StateQuery`
belong to the same moment. Kafka Streams calls this interactive queries. There, the reader asks the instance
that owns the store over the network; here, the reader opens the store's files or its changelog.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from types import TracebackType
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, NotUpToBoundError
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.encoding.layout import shards_of
from kafka_eos_source.state.model import BatchRecord, ShardsBy
from kafka_eos_source.state.reading.decode import Decoder, Selection, decoder
from kafka_eos_source.state.reading.snapshot import ChangelogCopy, Snapshot, newest_of_changelog, of_folders
from kafka_eos_source.state.reading.stores import Bound, Changelog, Cut, StoreFolder, check_batch, one_store
from kafka_eos_source.state.store.overlay import Pair
from kafka_eos_source.state.store.views import StateView


class StateQuery:
    """Reads one store of a query at one moment. It is a context manager and not thread-safe.

    With ``state_dir`` it reads the databases on this machine; with ``kafka`` it reads the changelog. With
    both, it reads the databases and uses Kafka to find the committed batch. Without Kafka, a shard may show
    the batch before the last one, so shards may differ by one batch; see `batches`.

    A row is a dict with the columns of ``spark.read.format("kafka-eos-state")``: ``key`` and ``value``, which
    are dicts themselves, and ``partition_id``.

    Args:
        application_id: the query's ``application.id``; None = the only one in ``state_dir``.
        store: name of the store; None = the only one in ``state_dir``.
        state_dir: the operator's option ``state.dir``, on this machine.
        kafka: the operator's Kafka options, such as ``kafka.bootstrap.servers`` and ``kafka.group.id``.
        at_least: what the state must reflect (KIP-796): a batch id, or for each input partition the offset of
            a record. The constructor waits for it. Offsets require ``kafka``, because they commit with the
            state in one Kafka transaction, and the databases do not record them.
        snapshot_location: the operator's option ``state.snapshot.location``. A read of the changelog then
            begins with the newest snapshot of each shard that fits, and reads only the rest of the changelog.
            The result is the same.
        timeout_ms: limit for the query to reach ``at_least``; afterwards, for the brokers to answer and for a
            task to bring a database to the newest batch.

    Raises:
        NotUpToBoundError: if the state does not reflect ``at_least`` in time, or a database is behind Kafka.
            Try again later.
        ChangelogCompactedError: if the broker compacted the changelog during the read, so that the result
            would be wrong. Try again.
        StateError: if this machine has no such store, or a shard of it is on another machine.
        ChangelogError: if the changelog does not exist.
        InvalidOptionError: if neither ``state_dir`` nor ``kafka`` is set, a name is missing, or ``at_least``
            is neither a batch id nor offsets, or has offsets without ``kafka``; or if ``snapshot_location``
            cannot be opened, or is set although the changelog is not read.
        UnavailableError, AuthorizationError: if Kafka does not answer, or refuses access.

    Example::

        with StateQuery("page-views", "aggregates", state_dir="/data/state") as query:
            query.get("music")  # {'views': 1207}, or None
    """

    def __init__(
        self,
        application_id: str | None = None,
        store: str | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        kafka: Mapping[str, str] | None = None,
        at_least: Bound | None = None,
        snapshot_location: str | None = None,
        timeout_ms: int = 30_000,
    ) -> None:
        self._source = SnapshotSource(application_id, store, state_dir, kafka, snapshot_location, timeout_ms)
        self._decoders: dict[Selection, Decoder] = {}
        self._snapshot = self._source.newest(at_least)

    @property
    def application_id(self) -> str:
        """The query's ``application.id``."""
        return self._snapshot.application_id

    @property
    def store(self) -> str:
        """Name of the store."""
        return self._snapshot.store

    @property
    def shards(self) -> int:
        """Number of shards of the store."""
        return self._snapshot.shards

    @property
    def batch_id(self) -> int | None:
        """Id of the newest micro-batch that the results reflect; None = no batch is committed yet."""
        return self._snapshot.batch_id

    @property
    def batches(self) -> Mapping[int, BatchRecord | None]:
        """The batch of each shard (None = no batch is committed yet). With ``kafka``, all are equal."""
        return {number: state.batch for number, state in sorted(self._snapshot.states.items())}

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts over all batches and shards, such as ``late_rows`` and ``future_rows``.

        The counts commit with the state, so a batch that ran twice is counted once.
        """
        total: Counter[str] = Counter()
        for batch in self.batches.values():
            if batch is not None:
                total.update(batch.counts)
        return dict(total)

    def refresh(self, at_least: Bound | None = None) -> None:
        """Moves to the newest committed batch. Open iterators fail after that.

        With ``kafka``, nothing happens if no batch was committed since. Without ``state_dir``, only the
        records that are new in the changelog are read. If it raises, the query stays at its present batch.

        Args:
            at_least: as in the constructor.

        Raises:
            KafkaEosError: as the constructor.
        """
        newer = self._source.newest(at_least, self._snapshot)
        if newer is not self._snapshot:
            self._decoders.clear()
            self._snapshot.close()
            self._snapshot = newer

    def close(self) -> None:
        """Closes the databases, and deletes temporary files. May be called repeatedly."""
        self._snapshot.close()
        self._source.close()

    def __enter__(self) -> StateQuery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ reads

    def description(self) -> Description | None:
        """Returns the description of the store's tables and columns; None = the store is still empty."""
        for number in sorted(self._snapshot.states):
            written = self._snapshot.states[number].view.get(META_KEY)
            if written is not None:
                return Description.from_json(written)
        return None

    def get(self, key: Any, variable: str | None = None) -> dict[str, Any] | None:
        """Returns the value of a key, for state with one value per key, such as aggregates and value state.

        Args:
            key: the value of the grouping column, a tuple if there are several, or a dict by their names.
            variable: name of the state variable; None = the only one.

        Returns:
            The columns of the value by name; None = the key has no value.

        Raises:
            InvalidOptionError: if there is no such variable, or it has several rows per key; use `rows` then.
            InvalidSchemaError: if the key does not fit the grouping columns.
            StateError: if the key's shard is not on this machine.
        """
        rows = list(self.rows(key, variable))
        if not rows:
            return None
        if len(rows) > 1 or "value" not in rows[0]:
            raise InvalidOptionError(
                f"key {key!r} has {len(rows)} rows of {', '.join(rows[0])}, and not a single value.",
                fix="use rows(key).",
            )
        value: dict[str, Any] = rows[0]["value"]
        return value

    def rows(
        self, key: Any, variable: str | None = None, *, timers: bool = False, flatten: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Yields all rows of a key: windows, elements of a list, entries of a map or timers.

        Tumbling and hopping windows are stored in the order of time and have no index by key, so this method
        reads the whole shard of the key. If the operator has ``shards="partitions"``, only Kafka's producers
        know the shard of a key, so this method looks for it in all shards.

        Args:
            key: the value of the grouping column, a tuple if there are several, or a dict by their names.
            variable, timers, flatten: as in `all`.

        Raises:
            InvalidOptionError: if there is no such variable.
            InvalidSchemaError: if the key does not fit the grouping columns.
            StateError: if the key's shard is not on this machine.
        """
        table = self._decoder(Selection(variable, timers, flatten))
        if table is None:
            return
        columns = table.key_columns(key)
        group_key = table.group_key(columns)
        for number in self._shards_with(columns):
            view = self._snapshot.shard(number).view
            if table.by_time:
                pairs = table.filter_by_key(group_key, view.range(*table.span))
            else:
                pairs = view.prefix_scan(layout.keyed(table.table, group_key))
            yield from _dicts(table.batches(pairs), number)

    def range(
        self, low: Any = None, high: Any = None, variable: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields the rows of a range of keys, shard after shard; within a shard in ascending order.

        For tumbling and hopping windows, ``low`` and ``high`` are ends of windows in ms since the epoch. For
        other state they are keys, which must be a single number, date or timestamp column.

        Args:
            low: lower bound (inclusive); None = unbounded.
            high: upper bound (exclusive); None = unbounded.
            variable: name of the state variable; None = the only one.

        Raises:
            InvalidOptionError: if there is no such variable, or the keys are not ordered because they are
                text, binary or several columns.
            InvalidSchemaError: if ``low`` or ``high`` does not fit the grouping columns.
            StateError: if a shard is not on this machine.
        """
        table = self._decoder(Selection(variable))
        if table is None:
            return
        start, end = table.span
        if table.by_time:
            start = start if low is None else layout.before(table.table, int(low))
            end = end if high is None else layout.before(table.table, int(high))
        elif not table.in_order:
            raise InvalidOptionError(
                "the keys of this store have no order, because they consist of several columns or have a "
                "variable length.",
                fix="use all() and compare, or to_arrow().filter(…).",
            )
        else:
            start = start if low is None else self._store_key(table, low)
            end = end if high is None else self._store_key(table, high)
        for number, view in self._views():
            yield from _dicts(table.batches(view.range(start, end)), number)

    def all(
        self, variable: str | None = None, *, timers: bool = False, flatten: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Yields all rows, shard after shard.

        Args:
            variable: name of the state variable; None = the only one.
            timers: read the registered timers instead of a variable.
            flatten: one row per element of a list or entry of a map, instead of one row per key.

        Raises:
            InvalidOptionError: if there is no such variable.
            StateError: if a shard is not on this machine.
        """
        table = self._decoder(Selection(variable, timers, flatten))
        if table is None:
            return
        for number, view in self._views():
            yield from _dicts(table.batches(view.range(*table.span)), number)

    def head(
        self, rows: int = 20, variable: str | None = None, *, timers: bool = False
    ) -> list[dict[str, Any]]:
        """Returns a few rows of all shards: the newest windows, else the first keys in the store's order.

        It reads only these rows, whatever the size of the store.

        Args:
            rows: the most rows to return.
            variable, timers: as in `all`.

        Raises:
            InvalidOptionError: if there is no such variable.
            StateError: if a shard is not on this machine.
        """
        table = self._decoder(Selection(variable, timers))
        if table is None:
            return []
        newest_first = table.by_time and not timers
        scans = [
            _numbered(view.range(*table.span, reverse=newest_first), number) for number, view in self._views()
        ]
        found: list[dict[str, Any]] = []
        for number, run in groupby(merge(*scans, reverse=newest_first), key=itemgetter(2)):
            while len(found) < rows and (chunk := list(islice(run, rows))):
                found += _dicts(table.batches((key, value) for key, value, _ in chunk), number)
            if len(found) >= rows:
                break
        return found[:rows]

    def to_arrow(
        self, variable: str | None = None, *, timers: bool = False, flatten: bool = True
    ) -> pa.Table:
        """Reads all rows into an Arrow table; takes the arguments and raises the errors of `all`.

        An empty store has no columns.
        """
        table = self._decoder(Selection(variable, timers, flatten))
        if table is None:
            return pa.table({})
        batches = [
            with_partition(batch, number)
            for number, view in self._views()
            for batch in table.batches(view.range(*table.span))
        ]
        return pa.Table.from_batches(batches, with_partition_id(table.schema))

    def raw(self) -> Iterator[tuple[int, Pair]]:
        """Yields all entries as they are stored: the shard, and a pair of key and value (see `layout`).

        Raises:
            StateError: if a shard is not on this machine.
        """
        for number, view in self._views():
            for pair in view.all():
                yield number, pair

    # ------------------------------------------------------------------ implementation

    def _views(self) -> Iterator[tuple[int, StateView]]:
        self._snapshot.check_here(range(self.shards))
        for number in range(self.shards):
            yield number, self._snapshot.states[number].view

    def _shards_with(self, columns: list[pa.Array]) -> Iterable[int]:
        """Returns the shards that may hold a key.

        Args:
            columns: the values of the grouping columns, one each.
        """
        description = self.description()
        if description is not None and description.shards_by is ShardsBy.INPUT_PARTITION:
            return range(self.shards)
        return [int(shards_of(columns, self.shards)[0])]

    def _decoder(self, selection: Selection) -> Decoder | None:
        """Returns the decoder of a table; None = the store is still empty."""
        if selection not in self._decoders:
            description = self.description()
            if description is None:
                return None
            self._decoders[selection] = decoder(description, selection)
        return self._decoders[selection]

    def _store_key(self, table: Decoder, key: Any) -> bytes:
        return layout.keyed(table.table, table.group_key(table.key_columns(key)))


def with_partition_id(schema: pa.Schema) -> pa.Schema:
    """Appends the column of the shard's number to the columns of a decoder."""
    return schema.append(pa.field("partition_id", pa.int32()))


def with_partition(batch: pa.RecordBatch, shard: int) -> pa.RecordBatch:
    """Appends the shard's number to its rows."""
    number = pa.repeat(pa.scalar(shard, pa.int32()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, number], schema=with_partition_id(batch.schema))


def _numbered(pairs: Iterator[Pair], shard: int) -> Iterator[tuple[bytes, bytes, int]]:
    for key, value in pairs:
        yield key, value, shard


def _dicts(batches: Iterator[pa.RecordBatch], shard: int) -> Iterator[dict[str, Any]]:
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (OverflowError, ValueError):
            columns = [[_object(each) for each in column] for column in batch.columns]
            rows = [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
        for row in rows:
            yield {**row, "partition_id": shard}


def _object(value: pa.Scalar) -> Any:
    """Returns a value as Arrow's ``as_py``; times after the year 9999, which Python lacks, as numbers."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        if isinstance(value, pa.StructScalar):
            return {name: _object(each) for name, each in value.items()}
        if isinstance(value, pa.MapScalar):
            return [(_object(each["key"]), _object(each["value"])) for each in value.values]
        if isinstance(value, pa.ListScalar):
            return [_object(each) for each in value.values]
        return value.value


# ------------------------------------------------------------------ where the store is found

_PREFIX = "kafka."
#: Pause between two looks at databases that are behind a batch: the first, and the longest after doubling.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 0.5


class SnapshotSource:
    """Takes snapshots of one store. Not thread-safe.

    Args:
        application_id, store, state_dir, kafka, snapshot_location, timeout_ms: as in `StateQuery`.

    Raises:
        InvalidOptionError: if ``snapshot_location`` cannot be opened, or there is no changelog to read.
    """

    def __init__(
        self,
        application_id: str | None,
        store: str | None,
        state_dir: str | os.PathLike[str] | None,
        kafka: Mapping[str, str] | None,
        snapshot_location: str | None,
        timeout_ms: int,
    ) -> None:
        if snapshot_location is not None:
            if state_dir is not None or kafka is None:
                raise InvalidOptionError(
                    "snapshot_location is set, but this read does not restore the state from the changelog, "
                    "so it uses no snapshots.",
                    fix="remove snapshot_location; or set kafka and no state_dir.",
                )
            file_system(snapshot_location)
        self._application_id = application_id
        self._store = store
        self._state_dir = state_dir
        self._kafka = kafka
        self._snapshot_location = snapshot_location
        self._timeout_ms = timeout_ms
        #: Follows the changelog, if there are no databases to read.
        self._copy: ChangelogCopy | None = None
        self._cut: Cut | None = None

    def newest(self, at_least: Bound | None, present: Snapshot | None = None) -> Snapshot:
        """Returns a snapshot of the newest batch, once it reflects ``at_least``.

        Args:
            at_least: as in `StateQuery`.
            present: the snapshot that this method returned last. It is returned again if Kafka has committed
                nothing to the store since.

        Raises:
            KafkaEosError: as `StateQuery` describes.
        """
        self._check_bound(at_least)
        application_id, store, found = self._application_id, self._store, None
        if self._state_dir is not None:
            application_id, store, found = one_store(self._state_dir, application_id, store)
        changelog = self._changelog(application_id, store)
        if changelog is None:
            if found is None:
                raise InvalidOptionError(
                    "neither state_dir nor kafka is set.",
                    fix="pass the operator's state.dir, its kafka.* options, or both.",
                )
            return self._of_databases(found, at_least)
        deadline = self._deadline()
        cut = changelog.cut(deadline) if at_least is None else changelog.cut_at_least(at_least, deadline)
        if present is not None and self._cut is not None and cut.same_state(self._cut):
            return present
        if found is None:
            return self._of_changelog(changelog, cut, present)
        return self._of_databases_at_cut(found, changelog, at_least)

    def close(self) -> None:
        """Deletes temporary files. May be called repeatedly."""
        if self._copy is not None:
            self._copy.close()

    def _of_databases(self, found: Collection[StoreFolder], at_least: Bound | None) -> Snapshot:
        deadline = self._deadline()

        def look() -> Snapshot:
            snapshot = of_folders(found, None, deadline)
            try:
                for state in snapshot.states.values():
                    if isinstance(at_least, int):
                        check_batch(None if state.batch is None else state.batch.batch_id, at_least)
            except NotUpToBoundError:
                snapshot.close()
                raise
            return snapshot

        return retry(look, NotUpToBoundError, Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))

    def _of_databases_at_cut(
        self, found: Collection[StoreFolder], changelog: Changelog, at_least: Bound | None
    ) -> Snapshot:
        cuts: list[Cut] = []

        def read_cut(remaining: Deadline) -> Cut:
            cut = changelog.cut(remaining, at_least)
            cut.check(at_least)
            cuts.append(cut)
            return cut

        snapshot = of_folders(found, read_cut, self._deadline())
        self._cut = cuts[-1]
        return snapshot

    def _of_changelog(self, changelog: Changelog, cut: Cut, present: Snapshot | None) -> Snapshot:
        copy = self._copy
        if copy is None or not copy.can_continue(cut):
            copy = ChangelogCopy(changelog, self._deadline())
        try:
            snapshot, reached = newest_of_changelog(copy, cut)
        except BaseException:
            if copy is not self._copy:
                copy.close()
            raise
        if self._copy is not None and copy is not self._copy:
            assert present is not None
            present.also_close(self._copy.close)
        self._copy, self._cut = copy, reached
        return snapshot

    def _check_bound(self, at_least: Bound | None) -> None:
        """Raises unless the bound can be compared with the state."""
        if at_least is None or (isinstance(at_least, int) and not isinstance(at_least, bool)):
            return
        if not isinstance(at_least, Mapping) or not all(
            isinstance(tp, TopicPartition) and isinstance(at, int) for tp, at in at_least.items()
        ):
            raise InvalidOptionError(
                f"at_least is {at_least!r}; expected a batch id, or offsets by TopicPartition.",
                fix="pass a batch id such as 17, or {TopicPartition('topic', 0): 1234}.",
            )
        if self._kafka is None:
            raise InvalidOptionError(
                f"at_least has the offsets {dict(at_least)!r}, but 'kafka' is not set; the databases in "
                "state_dir do not record which input offsets they reflect.",
                fix="pass kafka as well, whose committed offsets are compared; or pass a batch id.",
            )

    def _changelog(self, application_id: str | None, store: str | None) -> Changelog | None:
        if self._kafka is None:
            return None
        if application_id is None or store is None:
            raise InvalidOptionError(
                f"application_id is {application_id!r} and store is {store!r}; a read of the changelog needs "
                "both.",
                fix="pass both, with the values that the query has.",
            )
        properties = {key.lower().removeprefix(_PREFIX): str(value) for key, value in self._kafka.items()}
        group_id = group_of(application_id, properties.pop("group.id", None))
        kafka = check_consumer(properties)
        return Changelog(application_id, store, group_id, kafka, self._snapshot_location)

    def _deadline(self) -> Deadline:
        return Deadline.after_ms(self._timeout_ms)

"""Questions to a store while its query runs: `StateQuery`.

Committed data only, whatever the query does meanwhile (KIP-892's read_committed); all answers of one
`StateQuery` are of one moment. Kafka Streams calls this interactive queries; there the owner is asked over
the network, here its files or its changelog are read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, NotUpToBoundError
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state import layout
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.encoding.spark_hash import shards_of
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.reading.cut import Bound, Changelog, Cut, check_batch
from kafka_eos_source.state.reading.decode import Choice, Decoder
from kafka_eos_source.state.reading.decoders import decoder
from kafka_eos_source.state.reading.local import one_store
from kafka_eos_source.state.reading.snapshot import Snapshot, of_changelog, of_folders
from kafka_eos_source.state.store.overlay import Pair
from kafka_eos_source.state.store.views import StateView, check_bound

_PREFIX = "kafka."


class StateQuery:
    """One store of a query, read as it stands at one moment. A context manager; not thread-safe.

    With ``state_dir`` its databases on this machine are read, with Kafka's options its changelog. With both,
    the databases are read, and Kafka says which batch is committed: without it a shard may show the batch
    before the last one, and shards may differ by a batch (`batches` tells).

    A row is a dict by the columns of ``spark.read.format("kafka-eos-state")``: ``key`` and ``value``, which
    are dicts themselves, and ``partition_id``.

    Args:
        application_id: of the query; None = the only one in ``state_dir``.
        store: its name in the query; None = the only one.
        state_dir: the operator's option ``state.dir`` on this machine.
        kafka: options as the operator has them: ``kafka.bootstrap.servers``, ``kafka.group.id`` and others.
        at_least: a batch, or the input offset of each partition, that the answers must reflect (KIP-796).
            Offsets are those of records, not of what comes after them.
        timeout_ms: for Kafka, and for databases that a task is about to bring to the newest batch.

    Raises:
        NotUpToBoundError: ``at_least`` is not reached, or a database is behind Kafka. Ask again.
        StateError: there is no such store here; a shard of it may be on another machine.
        ChangelogError: there is no such changelog.
        InvalidOptionError: neither ``state_dir`` nor ``kafka``, or a name is missing.
        UnavailableError, AuthorizationError: of Kafka.
    """

    def __init__(
        self,
        application_id: str | None = None,
        store: str | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        kafka: Mapping[str, str] | None = None,
        at_least: Bound | None = None,
        timeout_ms: int = 30_000,
    ) -> None:
        self._names = application_id, store
        self._state_dir = state_dir
        self._kafka = kafka
        self._timeout_ms = timeout_ms
        self._decoders: dict[Choice, Decoder] = {}
        self._snapshot = self._taken(at_least)

    @property
    def application_id(self) -> str:
        return self._snapshot.application_id

    @property
    def store(self) -> str:
        return self._snapshot.store

    @property
    def shards(self) -> int:
        """How many the store has."""
        return self._snapshot.shards

    @property
    def batch_id(self) -> int | None:
        """The micro-batch that the answers belong to, the newest of `batches`; None = none was committed."""
        return self._snapshot.batch_id

    @property
    def batches(self) -> Mapping[int, BatchRecord | None]:
        """Of each shard. All the same, if Kafka was asked."""
        return {number: state.batch for number, state in sorted(self._snapshot.states.items())}

    @property
    def counts(self) -> Mapping[str, int]:
        """What the processor has counted in all batches and shards: ``late_rows``, ``null_time_rows``.

        It commits with the state: a batch that ran twice is counted once.
        """
        total: Counter[str] = Counter()
        for batch in self.batches.values():
            if batch is not None:
                total.update(batch.counts)
        return dict(total)

    def refresh(self, at_least: Bound | None = None) -> None:
        """Goes on to what is committed now. Iterators that are open end with an error.

        Raises: as the constructor; the old moment stays then.
        """
        newer = self._taken(at_least)
        self._snapshot.close()
        self._snapshot = newer

    def close(self) -> None:
        """Idempotent."""
        self._snapshot.close()

    def __enter__(self) -> StateQuery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ questions

    def description(self) -> Description | None:
        """What the store says it holds; None = nothing was written yet."""
        for number in sorted(self._snapshot.states):
            found = self._snapshot.states[number].view.get(META_KEY)
            if found is not None:
                return Description.from_json(found)
        return None

    def get(self, key: Any, variable: str | None = None) -> dict[str, Any] | None:
        """The value of a key that has one: an aggregate, a value state; None = the key has none.

        Args:
            key: the value of the grouping column, a tuple of several, or a dict by their names.
            variable: of the store, where it has several.

        Raises:
            InvalidOptionError: no such variable, or one that has many rows a key: use `rows`.
            InvalidSchemaError: it is no key of this store.
        """
        found = list(self.rows(key, variable))
        if not found:
            return None
        if len(found) > 1 or "value" not in found[0]:
            raise InvalidOptionError(
                f"key {key!r} has {len(found)} rows of {', '.join(found[0])} in this store.",
                fix="use rows(key).",
            )
        value: dict[str, Any] = found[0]["value"]
        return value

    def rows(
        self, key: Any, variable: str | None = None, *, timers: bool = False, flatten: bool = True
    ) -> Iterator[dict[str, Any]]:
        """All rows of a key: windows, elements of a list, entries of a map, timers.

        A store that is ordered by time (fixed windows) has no index by key: all of the key's shard is read.

        Raises: as `get`.
        """
        read = self._decoder(Choice(variable, timers, flatten))
        if read is None:
            return
        columns = read.columns(key)
        number = int(shards_of(columns, self.shards)[0])
        group_key = read.group_key(columns)
        view = self._snapshot.shard(number).view
        if read.by_time:
            pairs = read.of_key(group_key, view.range(*read.span))
        else:
            pairs = view.prefix_scan(layout.keyed(read.table, group_key))
        yield from _dicts(read.batches(pairs), number)

    def range(
        self, low: Any = None, high: Any = None, variable: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rows of keys from ``low`` (included) to ``high`` (excluded); None = unbounded. Shard after shard.

        In a store that is ordered by time ``low`` and ``high`` are times (ms since the epoch): of the ends of
        windows. In others they are keys, compared as their encoding is: numbers, dates and times by their
        values. In the order of either within a shard.

        Raises:
            InvalidOptionError: as `get`; or keys have no order here: they are text, or several columns.
            InvalidSchemaError: ``low`` or ``high`` is no key of this store.
        """
        read = self._decoder(Choice(variable))
        if read is None:
            return
        start, end = read.span
        if read.by_time:
            start = start if low is None else layout.before(read.table, int(low))
            end = end if high is None else layout.before(read.table, int(high))
        elif not read.in_order:
            raise InvalidOptionError(
                "keys of this store have no order: they are of several columns, or of variable length.",
                fix="use all() and compare, or to_arrow().filter(…).",
            )
        else:
            start = start if low is None else self._place(read, low)
            end = end if high is None else self._place(read, high)
        for number, view in self._views():
            yield from _dicts(read.batches(view.range(start, end)), number)

    def all(
        self, variable: str | None = None, *, timers: bool = False, flatten: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Every row, shard after shard. Raises: as `get`."""
        read = self._decoder(Choice(variable, timers, flatten))
        for number, view in self._views() if read is not None else ():
            assert read is not None
            yield from _dicts(read.batches(view.range(*read.span)), number)

    def to_arrow(
        self, variable: str | None = None, *, timers: bool = False, flatten: bool = True
    ) -> pa.Table:
        """Every row, in memory. A store to which nothing was written has no columns. Raises: as `get`."""
        read = self._decoder(Choice(variable, timers, flatten))
        if read is None:
            return pa.table({})
        found = []
        for number, view in self._views():
            for batch in read.batches(view.range(*read.span)):
                found.append(with_partition(batch, number))
        return pa.Table.from_batches(found, with_partition_id(read.schema))

    def raw(self) -> Iterator[tuple[int, Pair]]:
        """Every entry as it is kept: shard, key, value. See `layout`."""
        for number, view in self._views():
            for pair in view.all():
                yield number, pair

    # ------------------------------------------------------------------ inside

    def _views(self) -> Iterator[tuple[int, StateView]]:
        self._snapshot.check_here(range(self.shards))
        for number in range(self.shards):
            yield number, self._snapshot.states[number].view

    def _decoder(self, choice: Choice) -> Decoder | None:
        """None = nothing was written yet."""
        if choice not in self._decoders:
            description = self.description()
            if description is None:
                return None
            self._decoders[choice] = decoder(description, choice)
        return self._decoders[choice]

    def _place(self, read: Decoder, key: Any) -> bytes:
        return layout.keyed(read.table, read.group_key(read.columns(key)))

    def _taken(self, at_least: Bound | None) -> Snapshot:
        self._decoders.clear()
        deadline = Deadline.after_ms(self._timeout_ms)
        if self._state_dir is not None:
            return self._of_disk(deadline, at_least)
        changelog = self._changelog(*self._names)
        if changelog is None:
            raise InvalidOptionError(
                "neither state_dir nor kafka is given.",
                fix="give the operator's state.dir, or its kafka.* options, or both.",
            )
        cut = changelog.cut(deadline, at_least)
        cut.check(at_least)
        return of_changelog(changelog, cut, range(cut.shards), deadline)

    def _of_disk(self, deadline: Deadline, at_least: Bound | None) -> Snapshot:
        assert self._state_dir is not None
        application_id, store, found = one_store(self._state_dir, *self._names)
        changelog = self._changelog(application_id, store)
        if changelog is not None:

            def cut(left: Deadline) -> Cut:
                taken = changelog.cut(left, at_least)
                taken.check(at_least)
                return taken

            return of_folders(found, cut, deadline)
        snapshot = of_folders(found, None, deadline)
        try:
            for state in snapshot.states.values():
                if isinstance(at_least, int):
                    check_batch(None if state.batch is None else state.batch.batch_id, at_least)
                else:
                    check_bound(state.view.position(), at_least)
        except NotUpToBoundError:
            snapshot.close()
            raise
        return snapshot

    def _changelog(self, application_id: str | None, store: str | None) -> Changelog | None:
        if self._kafka is None:
            return None
        if application_id is None or store is None:
            raise InvalidOptionError(
                f"application_id={application_id!r}, store={store!r}: a changelog is named by both.",
                fix="give both.",
            )
        named = {key.lower().removeprefix(_PREFIX): str(value) for key, value in self._kafka.items()}
        group_id = named.pop("group.id", application_id)
        return Changelog(application_id, store, group_id, check_consumer(named))


def with_partition_id(schema: pa.Schema) -> pa.Schema:
    """The columns of a decoder, and the shard."""
    return schema.append(pa.field("partition_id", pa.int32()))


def with_partition(batch: pa.RecordBatch, shard: int) -> pa.RecordBatch:
    """Rows of one shard with its number."""
    number = pa.repeat(pa.scalar(shard, pa.int32()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, number], schema=with_partition_id(batch.schema))


def _dicts(batches: Iterator[pa.RecordBatch], shard: int) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for row in batch.to_pylist():
            yield {**row, "partition_id": shard}

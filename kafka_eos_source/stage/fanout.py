"""One task's rows to Kafka's staging and to every sink's: which rows, which columns, and what came of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StringType, StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.sinks.contract import SinkContext, Stage, StageContext, TwoPhaseSink
from kafka_eos_source.sinks.registry import KAFKA, SinkSpec
from kafka_eos_source.spark.schema import arrow_schema
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.proved_parts import ProvedParts
from kafka_eos_source.stage.spool import Spool

#: The column that says where a row goes: a sink's name, ``kafka``, or null = everywhere.
ROUTE = "sink"


@dataclass(frozen=True)
class Route:
    """One sink, and the columns that go there.

    Attributes:
        spec: the sink.
        columns: positions in the frame.
        schema: of those columns, as the sink gets them.
    """

    spec: SinkSpec
    columns: tuple[int, ...]
    schema: pa.Schema


@dataclass(frozen=True)
class Plan:
    """Where the rows of a frame go, beside or instead of Kafka. Picklable.

    Attributes:
        routes: one for each sink, in the order of the option.
        router: position of the column `sink`; None = every row goes everywhere.
        changelog: position of the column with an operator's changes, which are Kafka's alone.
        kafka: whether Kafka takes records.
    """

    routes: tuple[Route, ...]
    router: int | None
    changelog: int | None
    kafka: bool

    @classmethod
    def of(cls, specs: Sequence[SinkSpec], schema: StructType, *, kafka: bool) -> Plan:
        """Of a query's sinks.

        Raises:
            InvalidOptionError: a sink's columns are not there.
            InvalidSchemaError: the column `sink` is no string, or a type has no Arrow form.
        """
        names = schema.names
        router = names.index(ROUTE) if ROUTE in names else None
        if router is not None and not isinstance(found := schema.fields[router].dataType, StringType):
            raise InvalidSchemaError(
                f"column {ROUTE!r} has type {found.simpleString()}; expected string: it says where a row "
                "goes.",
                fix="rename it, or cast it to string.",
            )
        own = list(dict.fromkeys(each for each in names if each not in (ROUTE, CHANGELOG)))
        routes = []
        for spec in specs:
            wanted = spec.columns or tuple(own)
            missing = ", ".join(repr(each) for each in wanted if each not in own)
            if missing or not wanted:
                raise InvalidOptionError(
                    f"option 'sink.{spec.name}.columns' names {missing or 'nothing'}; the frame has "
                    f"{', '.join(map(repr, own)) or 'no columns'}.",
                    fix="correct it (names are case-sensitive), or select the columns.",
                )
            at = tuple(names.index(each) for each in wanted)
            routes.append(Route(spec, at, arrow_schema(StructType([schema.fields[each] for each in at]))))
        changelog = names.index(CHANGELOG) if CHANGELOG in names else None
        return cls(tuple(routes), router, changelog, kafka)


@dataclass(frozen=True)
class SinkPart:
    """What one task attempt staged for one sink.

    Attributes:
        sink: its name.
        rows: how many.
        token: of `contract.Stage.finish`.
    """

    sink: str
    rows: int
    token: Any


class Fanout:
    """One task attempt. Rows for a sink are staged as they pass on their way to Kafka's staging."""

    def __init__(
        self, plan: Plan, application_id: str, batch: str, folder: StagingFolder, inline_bytes: int
    ) -> None:
        self._plan = plan
        self._application_id = application_id
        self._batch = batch
        self._folder = folder
        self._inline_bytes = inline_bytes
        self._attempt = uuid.uuid4().hex
        self._sinks: dict[str, TwoPhaseSink] = {}
        self._stages: dict[str, Stage] = {}
        self._rows: dict[str, int] = {}

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What is left for Kafka, an operator's changes among it.

        Raises:
            InvalidRecordError: a row names a sink that there is not.
        """
        plan = self._plan
        for batch in batches:
            packets = None
            if plan.changelog is not None and batch.column(plan.changelog).null_count < batch.num_rows:
                packets = batch.filter(batch.column(plan.changelog).is_valid())
                batch = batch.filter(batch.column(plan.changelog).is_null())
            if packets is not None:
                yield packets
            if not batch.num_rows:
                continue
            to = None if plan.router is None else batch.column(plan.router)
            if to is not None:
                self._refuse_unknown(to)
            for route in plan.routes:
                self._write(route, batch if to is None else batch.filter(_meant(to, route.spec.name)))
            if plan.kafka:
                yield batch if to is None else batch.filter(_meant(to, KAFKA))

    def finish(self) -> tuple[SinkPart, ...]:
        """Every sink's rows are durable."""
        try:
            return tuple(
                SinkPart(name, self._rows[name], stage.finish()) for name, stage in self._stages.items()
            )
        finally:
            self._close()

    def discard(self) -> None:
        """The attempt failed."""
        try:
            for each in self._stages.values():
                each.discard()
        finally:
            self._close()

    def _write(self, route: Route, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        name = route.spec.name
        if name not in self._stages:
            self._stages[name] = self._open(route)
            self._rows[name] = 0
        chosen = batch.select(list(route.columns))
        self._stages[name].write(
            chosen if chosen.schema.equals(route.schema) else _cast(chosen, route.schema)
        )
        self._rows[name] += batch.num_rows

    def _open(self, route: Route) -> Stage:
        sink = self._sinks[route.spec.name] = route.spec.build()
        sink.open(SinkContext(route.spec.name, self._application_id))
        parts = partial(PartStage, route.schema, self._folder, self._batch, self._inline_bytes)
        return sink.stage(StageContext(int(self._batch), self._attempt, route.schema, parts))

    def _close(self) -> None:
        while self._sinks:
            self._sinks.popitem()[1].close()

    def _refuse_unknown(self, to: pa.Array) -> None:
        known = [*([KAFKA] if self._plan.kafka else []), *(route.spec.name for route in self._plan.routes)]
        wrong = pc.and_kleene(to.is_valid(), pc.invert(pc.is_in(to, value_set=pa.array(known, to.type))))
        first = pc.index(wrong, True).as_py()
        if first >= 0:
            raise InvalidRecordError(
                f"column {ROUTE!r} is {to[first].as_py()!r} (row {first} of its batch); expected "
                f"{', '.join(map(repr, known))}, or null for everywhere.",
                fix="correct the rows"
                + (
                    "."
                    if self._plan.kafka
                    else "; for 'kafka', set the option 'topic' or add a column 'topic'."
                ),
            )


class PartStage:
    """A sink's rows in the project's own staging: `StageContext.parts`. Its token is a `StagedPart`."""

    def __init__(
        self, schema: pa.Schema, folder: StagingFolder | None, batch: str, inline_bytes: int
    ) -> None:
        self._spool = Spool(folder, batch, inline_bytes)
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._spool, mode="w"), schema)
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._stream.write_batch(batch)
        self._rows += batch.num_rows

    def finish(self) -> StagedPart:
        self._stream.close()
        self._spool.finish()
        spool = self._spool
        return StagedPart(
            name=spool.name,
            rows=self._rows,
            size_bytes=spool.size,
            crc32=spool.crc32,
            inline=spool.inline(),
        )

    def discard(self) -> None:
        self._spool.discard()


class StagedForSink:
    """`contract.Staged` over the parts of the task attempts that count, proved whole as Kafka's are."""

    def __init__(
        self, folder: StagingFolder, batch: str, schema: pa.Schema, parts: Sequence[SinkPart]
    ) -> None:
        """Raises: StagedPartError: a part is missing, or is not what its task wrote."""
        self.schema = schema
        self.rows = sum(part.rows for part in parts)
        self.tokens = [part.token for part in parts]
        self._parts = ProvedParts(
            folder, batch, [part.token for part in parts if isinstance(part.token, StagedPart)]
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        return self._parts.batches()


def part_names(parts: Iterable[SinkPart]) -> list[str]:
    """Files in the staging folder that a sink's rows are in."""
    return [part.token.name for part in parts if isinstance(part.token, StagedPart) and part.token.name]


def _meant(to: pa.Array, name: str) -> pa.Array:
    return pc.or_kleene(to.is_null(), pc.fill_null(pc.equal(to, name), False))


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Spark may send another form of the same type: large strings, or a timestamp in the session's zone."""
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)

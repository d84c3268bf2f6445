"""Distributes the rows of a task to Kafka's staging and to the sinks outside Kafka."""

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
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.sinks.contract import SinkContext, Stage, StageContext, TwoPhaseSink
from kafka_eos_source.sinks.specs import KAFKA, SinkSpec
from kafka_eos_source.spark.arrow import arrow_schema, fit
from kafka_eos_source.spark.schema import INVALID, ORIGIN
from kafka_eos_source.stage.files import PartStage, StagingFolder
from kafka_eos_source.stage.parts import VerifiedParts

#: Column with the destination of a row: the name of a sink, ``kafka``, or null for all of them.
ROUTE = "sink"


@dataclass(frozen=True)
class Route:
    """One sink and the columns that it receives.

    Attributes:
        spec: name, type and options of the sink.
        columns: positions of its columns in the frame.
        schema: Arrow schema of these columns.
    """

    spec: SinkSpec
    columns: tuple[int, ...]
    schema: pa.Schema


@dataclass(frozen=True)
class Plan:
    """Destinations of the rows of a frame. Picklable.

    Attributes:
        routes: one for each sink outside Kafka, in the order of the option ``sinks``.
        router: position of the column `sink`; None = every row goes to every sink.
        changelog: position of the column with an operator's changes, which go to Kafka only.
        invalid: position of the column that marks invalid rows, which no sink outside Kafka receives.
        kafka: whether rows also become records in Kafka.
    """

    routes: tuple[Route, ...]
    router: int | None
    changelog: int | None
    kafka: bool
    invalid: int | None = None

    @classmethod
    def of(cls, specs: Sequence[SinkSpec], schema: StructType, *, kafka: bool) -> Plan:
        """Returns the plan for a query.

        Args:
            specs: sinks outside Kafka.
            schema: schema of the frame.
            kafka: whether rows also become records in Kafka.

        Raises:
            InvalidOptionError: if the frame lacks a column of a sink.
            InvalidSchemaError: if the column `sink` is not a string, or Arrow has no equivalent of a type.
        """
        names = schema.names
        router = names.index(ROUTE) if ROUTE in names else None
        if router is not None and not isinstance(found := schema.fields[router].dataType, StringType):
            raise InvalidSchemaError(
                f"column {ROUTE!r}, the destination of each row, has type {found.simpleString()}; expected "
                "string.",
                fix="rename it, or cast it to string.",
            )
        own = list(dict.fromkeys(each for each in names if each not in (ROUTE, CHANGELOG, INVALID, ORIGIN)))
        routes = []
        for spec in specs:
            wanted = spec.columns or tuple(own)
            missing = ", ".join(repr(each) for each in wanted if each not in own)
            if missing or not wanted:
                raise InvalidOptionError(
                    f"option 'sink.{spec.name}.columns' names {missing or 'no columns'}; the frame has "
                    f"{', '.join(map(repr, own)) or 'no columns'}.",
                    fix="correct the option (names are case-sensitive), or select the columns in the frame.",
                )
            at = tuple(names.index(each) for each in wanted)
            routes.append(Route(spec, at, arrow_schema(StructType([schema.fields[each] for each in at]))))
        changelog = names.index(CHANGELOG) if CHANGELOG in names else None
        invalid = names.index(INVALID) if INVALID in names else None
        return cls(tuple(routes), router, changelog, kafka, invalid)


@dataclass(frozen=True)
class SinkPart:
    """What one task attempt staged for one sink.

    Attributes:
        sink: name of the sink.
        rows: number of rows.
        receipt: what the sink's `contract.Stage.finish` returned.
    """

    sink: str
    rows: int
    receipt: Any


class Fanout:
    """Stages the rows of one task attempt for sinks outside Kafka, while they pass on to Kafka's staging."""

    def __init__(
        self,
        plan: Plan,
        application_id: str,
        cluster_id: str,
        batch: str,
        folder: StagingFolder,
        inline_bytes: int,
    ) -> None:
        self._plan = plan
        self._application_id = application_id
        self._cluster_id = cluster_id
        self._batch = batch
        self._folder = folder
        self._inline_bytes = inline_bytes
        self._task_attempt_id = uuid.uuid4().hex
        self._sinks: dict[str, TwoPhaseSink] = {}
        self._stages: dict[str, Stage] = {}
        self._rows: dict[str, int] = {}

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stages rows for the sinks, and yields the rows for Kafka, including state changes of operators.

        Raises:
            InvalidRecordError: if a row names an unknown sink.
        """
        plan = self._plan
        for batch in batches:
            if plan.changelog is not None and batch.column(plan.changelog).null_count < batch.num_rows:
                yield batch.filter(batch.column(plan.changelog).is_valid())
                batch = batch.filter(batch.column(plan.changelog).is_null())
            if plan.invalid is not None and batch.column(plan.invalid).null_count < batch.num_rows:
                yield batch.filter(batch.column(plan.invalid).is_valid())
                batch = batch.filter(batch.column(plan.invalid).is_null())
            if not batch.num_rows:
                continue
            to = None if plan.router is None else batch.column(plan.router)
            if to is not None:
                self._check_destinations(to)
            for route in plan.routes:
                self._write(route, batch if to is None else batch.filter(_destined(to, route.spec.name)))
            if plan.kafka:
                yield batch if to is None else batch.filter(_destined(to, KAFKA))

    def finish(self) -> tuple[SinkPart, ...]:
        """Makes the rows of every sink durable, and returns what was staged."""
        try:
            return tuple(
                SinkPart(name, self._rows[name], stage.finish()) for name, stage in self._stages.items()
            )
        finally:
            self._close()

    def discard(self) -> None:
        """Discards what was staged, because the task attempt failed."""
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
        self._stages[name].write(fit(batch.select(list(route.columns)), route.schema, "Spark passed"))
        self._rows[name] += batch.num_rows

    def _open(self, route: Route) -> Stage:
        sink = route.spec.build()
        with route.spec.naming.errors():
            sink.open(
                SinkContext(
                    route.spec.name, self._application_id, self._cluster_id, None, route.spec.secrets(sink)
                )
            )
            self._sinks[route.spec.name] = sink  # only an open sink is closed
            parts = partial(PartStage, route.schema, self._folder, self._batch, self._inline_bytes)
            return sink.stage(StageContext(int(self._batch), self._task_attempt_id, route.schema, parts))

    def _close(self) -> None:
        while self._sinks:
            self._sinks.popitem()[1].close()

    def _check_destinations(self, to: pa.Array) -> None:
        known = [*([KAFKA] if self._plan.kafka else []), *(route.spec.name for route in self._plan.routes)]
        wrong = pc.and_kleene(to.is_valid(), pc.invert(pc.is_in(to, value_set=pa.array(known, to.type))))
        first = pc.index(wrong, True).as_py()
        if first >= 0:
            raise InvalidRecordError(
                f"column {ROUTE!r} is {to[first].as_py()!r} in row {first} of the Arrow batch; expected "
                f"{', '.join(map(repr, known))}, or null for all sinks.",
                fix="correct the rows"
                + (
                    "."
                    if self._plan.kafka
                    else "; for 'kafka', set the option 'topic' or add a column 'topic'."
                ),
            )


class StagedForSink:
    """Implements `contract.Staged`: the verified rows of the successful task attempts, for one sink."""

    def __init__(
        self, folder: StagingFolder, batch: str, schema: pa.Schema, parts: Sequence[SinkPart]
    ) -> None:
        """Verifies the parts.

        Raises:
            StagedPartError: if a part is missing or is not what its task wrote.
        """
        self.schema = schema
        self.rows = sum(part.rows for part in parts)
        self.receipts = [part.receipt for part in parts]
        self._parts = VerifiedParts(
            folder, batch, [part.receipt for part in parts if isinstance(part.receipt, StagedPart)]
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        return self._parts.batches()


def part_names(parts: Iterable[SinkPart]) -> list[str]:
    """Returns the names of the files in the staging folder that contain rows for sinks."""
    return [part.receipt.name for part in parts if isinstance(part.receipt, StagedPart) and part.receipt.name]


def _destined(to: pa.Array, name: str) -> pa.Array:
    """Returns which rows go to the sink of this name."""
    return pc.or_kleene(to.is_null(), pc.fill_null(pc.equal(to, name), False))

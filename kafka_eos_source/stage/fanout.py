"""Distributes the valid rows of a task to Kafka's staging and to the sinks outside Kafka.

Usually each sink stages the columns that it receives. If a sink of the query may refuse rows when it prepares
the batch, the task stages the rows once more, in a part of their own: the *kept rows*. From them the driver
knows where a refused row came from, and can stage the rows of the task again without it. Sinks that stage
nothing elsewhere then read their columns from the kept rows, so that no row is staged more often than before.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StringType, StructType

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    KafkaEosError,
    SinkFailedError,
)
from kafka_eos_source.model import StagedPart
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.sinks.contract import SinkContext, Stage, StageContext, TwoPhaseSink
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.specs import KAFKA, SinkSpec
from kafka_eos_source.spark.arrow import arrow_schema, fit, has_arrow_type
from kafka_eos_source.spark.schema import INVALID, ORIGIN
from kafka_eos_source.stage.files import PartStage, StagingFolder
from kafka_eos_source.stage.parts import VerifiedParts

#: The most characters of an exception's text that an error quotes.
_MOST_CHARACTERS = 500
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
        kafka: whether rows also become records in Kafka.
        invalid: position of the column that marks invalid rows, which no output receives.
        own: positions of the columns that sinks may receive.
        frame: Arrow schema of the frame; None if it has a column that Arrow cannot represent, so that rows
            cannot be kept.
        not_in_arrow: such a column and its type, for people; "" if there is none.
        rules: by name of a sink, the rules of its target for rows (`sinks.contract`).
        refusing: names of the sinks that may refuse rows when they prepare the batch.
        sets_aside: whether invalid rows are set aside, so that rows of a task may have to be staged again.
    """

    routes: tuple[Route, ...]
    router: int | None
    changelog: int | None
    kafka: bool
    invalid: int | None = None
    own: tuple[int, ...] = ()
    frame: pa.Schema | None = None
    not_in_arrow: str = ""
    rules: Mapping[str, tuple[RowRule, ...]] = field(default_factory=dict)
    refusing: frozenset[str] = frozenset()
    sets_aside: bool = False

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
        frame, not_in_arrow = None, ""
        try:
            frame = arrow_schema(schema)
        except InvalidSchemaError:  # of a column that no sink receives
            odd = next(each for each in schema if not has_arrow_type(each))
            not_in_arrow = f"{odd.name!r} has type {odd.dataType.simpleString()}"
        positions = tuple(map(names.index, own))
        return cls(tuple(routes), router, changelog, kafka, invalid, positions, frame, not_in_arrow)

    def check_kept(self) -> None:
        """Checks that tasks can keep rows if the driver may have to stage them again.

        Raises:
            InvalidSchemaError: names the column that Arrow cannot represent.
        """
        if self.refusing and self.sets_aside and self.frame is None:
            names = ", ".join(map(repr, sorted(self.refusing)))
            raise InvalidSchemaError(
                f"sink {names} may refuse rows when it prepares a batch, and then the driver stages the "
                f"others again from Arrow files; but column {self.not_in_arrow}, which Arrow cannot "
                "represent.",
                fix="cast the column, for example to string, or leave it out of the frame; or set "
                "onInvalidRecord to 'fail'.",
            )

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Positions of the columns of the kept rows; empty if no rows are kept.

        These are all columns if the driver may have to stage rows again; else those that it needs to pass
        them to the sinks that may refuse rows, and to say where they came from.
        """
        if not self.refusing or self.frame is None:
            return ()
        names = self.frame.names
        if self.sets_aside:
            return tuple(at for at in range(len(names)) if at not in (self.changelog, self.invalid))
        needed = {at for each in self.routes if each.spec.name in self.refusing for at in each.columns}
        if ORIGIN in names:
            needed.add(names.index(ORIGIN))
        if self.router is not None:
            needed.add(self.router)
        return tuple(sorted(needed))

    def keeps(self, sink: str) -> bool:
        """Returns whether the kept rows have all rows of a sink."""
        return bool(self.kept) and (self.sets_aside or sink in self.refusing)

    def is_in_kept_rows(self, route: Route) -> bool:
        """Returns whether the kept rows have all rows and columns of a sink."""
        return self.keeps(route.spec.name) and set(route.columns) <= set(self.kept)

    @property
    def outputs(self) -> list[str]:
        """What the column `sink` may name."""
        return [*([KAFKA] if self.kafka else []), *(route.spec.name for route in self.routes)]

    def destined(self, batch: pa.RecordBatch, output: str) -> pa.Array:
        """Returns which rows of a frame with the column `sink` go to an output.

        Args:
            batch: rows with the columns of the frame.
            output: the name of a sink, or `specs.KAFKA`.
        """
        assert self.router is not None
        return destined(batch.column(self.router), output)


@dataclass(frozen=True)
class OfKeptRows:
    """Receipt of a sink whose rows are among the kept rows of its task.

    Attributes:
        part: the kept rows.
        columns: positions of the sink's columns in the part.
        router: position of the column `sink` in the part; None if all rows go to the sink.
    """

    part: StagedPart
    columns: tuple[int, ...]
    router: int | None


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
    """Stages the rows of one task attempt for sinks outside Kafka, and passes on the rows for Kafka."""

    def __init__(
        self,
        plan: Plan,
        application_id: str,
        cluster_id: str,
        batch: str,
        folder: StagingFolder,
        inline_bytes: int,
    ) -> None:
        self.plan = plan
        self._application_id = application_id
        self._cluster_id = cluster_id
        self._batch = batch
        self._folder = folder
        self._inline_bytes = inline_bytes
        self._task_attempt_id = uuid.uuid4().hex
        self._sinks: dict[str, TwoPhaseSink] = {}
        self._stages: dict[str, Stage] = {}
        self._rows: dict[str, int] = {}
        self._kept: PartStage | None = None
        self._kept_schema = plan.frame and pa.schema([plan.frame.field(each) for each in plan.kept])
        #: The kept rows; None if there are none. Set by `finish`.
        self.kept: StagedPart | None = None

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Stages valid rows for the sinks, and returns those for Kafka; None if rows never go there.

        Args:
            batch: rows that `stage.invalid_rows` found valid, so that each names a known destination.
        """
        plan = self.plan
        if not batch.num_rows:
            return batch if plan.kafka else None
        to = None if plan.router is None else batch.column(plan.router)
        if plan.kept:
            self._keep(batch)
        for route in plan.routes:
            self._write(route, batch if to is None else batch.filter(destined(to, route.spec.name)))
        if not plan.kafka:
            return None
        return batch if to is None else batch.filter(destined(to, KAFKA))

    def finish(self) -> tuple[SinkPart, ...]:
        """Makes the rows of every sink durable, and returns what was staged."""
        try:
            self.kept = None if self._kept is None else self._kept.finish()
            found = []
            for name, stage in self._stages.items():
                with self._named(name):
                    found.append(SinkPart(name, self._rows[name], stage.finish()))
            return tuple(found)
        finally:
            self._close()

    def discard(self) -> None:
        """Discards what was staged, because the task attempt failed."""
        try:
            for each in self._stages.values():
                each.discard()
            if self._kept is not None:
                self._kept.discard()
        finally:
            self._close()

    def _keep(self, batch: pa.RecordBatch) -> None:
        if not self.plan.sets_aside and self.plan.router is not None:
            wanted = [self.plan.destined(batch, each) for each in sorted(self.plan.refusing)]
            batch = batch.filter(_any_of(wanted))
            if not batch.num_rows:
                return
        if self._kept is None:
            self._kept = PartStage(self._kept_schema, self._folder, self._batch, self._inline_bytes)
        self._kept.write(_fitting(batch, self.plan.kept, self._kept_schema))

    def _write(self, route: Route, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        name = route.spec.name
        rows = _fitting(batch, route.columns, route.schema)
        with self._named(name):
            if name not in self._stages:
                self._stages[name] = self._open(route)
                self._rows[name] = 0
            self._stages[name].write(rows)
        self._rows[name] += batch.num_rows

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Names the sink in errors of the libraries that it uses.

        Raises:
            SinkFailedError: for any error that is neither this package's, nor one of the operating system.
        """
        try:
            yield
        except (KafkaEosError, OSError):
            raise
        except Exception as error:
            sink = self._sinks.get(name)
            text = str(error).partition("\n")[0][:_MOST_CHARACTERS]
            text = text if sink is None else sink.context.secrets.hide(text)
            raise SinkFailedError(
                f"sink {name!r} cannot stage the rows of a task: {type(error).__name__}: {text}.",
                fix="restart the query if the schema of its target was changed while it ran; else correct "
                "the rows that cause this, or set them aside with invalid_record().",
            ) from error

    def _open(self, route: Route) -> Stage:
        sink = route.spec.build()
        with route.spec.naming.errors():
            sink.open(
                SinkContext(
                    route.spec.name, self._application_id, self._cluster_id, None, route.spec.secrets(sink)
                )
            )
            self._sinks[route.spec.name] = sink  # only an open sink is closed
            parts = (
                partial(_InKeptRows, self, route)
                if self.plan.is_in_kept_rows(route)
                else partial(PartStage, route.schema, self._folder, self._batch, self._inline_bytes)
            )
            batch_id, checked = int(self._batch), self.plan.rules.get(route.spec.name, ())
            return sink.stage(StageContext(batch_id, self._task_attempt_id, route.schema, parts, checked))

    def _close(self) -> None:
        while self._sinks:
            self._sinks.popitem()[1].close()


class _InKeptRows:
    """`contract.Stage` of a sink whose rows are among the kept rows."""

    def __init__(self, fanout: Fanout, route: Route) -> None:
        self._fanout = fanout
        self._route = route

    def write(self, batch: pa.RecordBatch) -> None:
        """Does nothing: the rows are kept already."""

    def finish(self) -> OfKeptRows:
        plan, part = self._fanout.plan, self._fanout.kept
        assert part is not None, "the sink has rows"
        at = {position: number for number, position in enumerate(plan.kept)}
        router = None if plan.router is None else at[plan.router]
        return OfKeptRows(part, tuple(at[each] for each in self._route.columns), router)

    def discard(self) -> None:
        """Does nothing: the kept rows are discarded once."""


class StagedForSink:
    """Implements `contract.Staged`: the verified rows of the successful task attempts, for one sink."""

    def __init__(
        self,
        folder: StagingFolder,
        batch: str,
        schema: pa.Schema,
        parts: Sequence[SinkPart],
        before: StagedForSink | None = None,
    ) -> None:
        """Verifies the parts.

        Args:
            folder, batch: where the parts are.
            schema: schema of the rows.
            parts: what the tasks staged for the sink.
            before: the rows of the sink before some tasks staged theirs again; None if none did.

        Raises:
            StagedPartError: if a part is missing or is not what its task wrote.
        """
        self.schema = schema
        self.parts = tuple(parts)
        self.rows = sum(part.rows for part in parts)
        self.receipts = [part.receipt for part in parts]
        self._verified: VerifiedParts = VerifiedParts(
            folder,
            batch,
            [part for each in parts if (part := _part_of(each)) is not None],
            None if before is None else before._verified,
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        # the frames of a union may have their columns in different orders, and keep rows or not
        for each in self.parts:
            part = _part_of(each)
            if part is None:
                continue
            rows = self._verified.batches_of(part)
            yield from _of_sink(rows, each, self.schema) if isinstance(each.receipt, OfKeptRows) else rows


def _of_sink(kept: Iterable[pa.RecordBatch], part: SinkPart, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the rows and columns of a sink among the kept rows of a task."""
    receipt = part.receipt
    for each in kept:
        if receipt.router is not None:
            each = each.filter(destined(each.column(receipt.router), part.sink))
        if each.num_rows:
            columns = [each.column(position) for position in receipt.columns]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _part_of(part: SinkPart) -> StagedPart | None:
    """Returns the part of this package that has the rows; None if the sink has them elsewhere."""
    receipt = part.receipt.part if isinstance(part.receipt, OfKeptRows) else part.receipt
    return receipt if isinstance(receipt, StagedPart) else None


def part_names(parts: Iterable[SinkPart]) -> list[str]:
    """Returns the names of the files in the staging folder that contain rows for sinks."""
    return [part.name for each in parts if (part := _part_of(each)) is not None and part.name]


def _fitting(batch: pa.RecordBatch, columns: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
    """Returns columns of a batch, by their positions, with the types of a schema."""
    chosen = []
    for position, wanted in zip(columns, schema, strict=True):
        column = batch.column(position)
        if not column.type.equals(wanted.type):
            one = pa.RecordBatch.from_arrays([column], [wanted.name])
            column = fit(one, pa.schema([wanted]), "Spark passed").column(0)
        chosen.append(column)
    return pa.RecordBatch.from_arrays(chosen, schema=schema)


def destined(to: pa.Array, name: str) -> pa.Array:
    """Returns which rows go to the sink of this name."""
    return pc.or_kleene(to.is_null(), pc.fill_null(pc.equal(to, name), False))


def _any_of(masks: Sequence[pa.Array]) -> pa.Array:
    found = masks[0]
    for each in masks[1:]:
        found = pc.or_(found, each)
    return found

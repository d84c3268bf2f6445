"""Stages the rows of one task for all outputs of the batch, and again without rows that a sink refused.

The order within a task: the rows of the frame pass the rules of all outputs (`stage.invalid_rows`), and those
that break one are set aside; then the valid rows are distributed to the sinks outside Kafka (`stage.fanout`)
and to Kafka (`stage.rows`, `stage.staging`).

If a sink refuses rows when it prepares the batch, the driver runs the same code over the kept rows of each
affected task, without the refused rows, which become dead letters. Packets of operators and reads are copied
from what the task staged for Kafka.

Most queries have no sink outside Kafka, and tasks only stage, so the functions import what only other queries
or the driver need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.model import StagedPart
from kafka_eos_source.spark.arrow import CHANGES
from kafka_eos_source.spark.schema import ORIGIN, SinkColumns
from kafka_eos_source.stage.files import PartStage, StagingFolder
from kafka_eos_source.stage.invalid_rows import REFUSED, InvalidRows, Reasons, place_of
from kafka_eos_source.stage.row_rules import RecordLimits
from kafka_eos_source.stage.rows import from_batches, from_rows, staged_schema
from kafka_eos_source.stage.staging import SealingPlan, stage

if TYPE_CHECKING:
    from kafka_eos_source.sinks.contract import RowRefusal
    from kafka_eos_source.stage.fanout import Fanout, Plan, SinkPart


@dataclass(frozen=True)
class StagedTask:
    """What one task attempt staged.

    Attributes:
        part: the rows for Kafka, and packets.
        dead_letters: the dead letters: those of the task, and those of rows that sinks refused later.
        sinks: the rows for sinks outside Kafka.
        kept: the kept rows (`stage.fanout`); None if there are none. They count in no figure.
        columns: positions in its frame of the columns that become records.
        plan: destinations of its rows; None if all go to Kafka. In a union of frames of `map_in_read`, tasks
            differ in columns and plan. Neither is pickled into a commit message, because a plan has the
            options of sinks; the driver sets them again.
    """

    part: StagedPart
    dead_letters: tuple[StagedPart, ...] = ()
    sinks: tuple[SinkPart, ...] = ()
    kept: StagedPart | None = None
    columns: SinkColumns | None = None
    plan: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "columns": None, "plan": None}

    def keeps(self, sink: str) -> bool:
        """Returns whether the task kept all rows of a sink that it staged."""
        return self.plan is not None and self.plan.keeps(sink)

    @property
    def parts(self) -> tuple[StagedPart, ...]:
        """What the commit sends to Kafka."""
        return self.part, *self.dead_letters

    @property
    def files(self) -> list[str]:
        """Names of the files in the staging folder that the task wrote."""
        own = [*self.parts, *(() if self.kept is None else (self.kept,))]
        found = [each.name for each in own if each.name]
        if self.sinks:
            from kafka_eos_source.stage.fanout import part_names

            found += part_names(self.sinks)
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Staging:
    """How the tasks of one micro-batch or batch write stage their rows.

    Attributes:
        columns: positions of the columns that become records.
        folder: staging folder.
        batch: name of the micro-batch or batch write in it.
        inline_bytes: maximum size of a part that stays in the commit message.
        run_id: Spark's id of the streaming run; "" in batch writes.
        topic: option ``topic``; None if each row names its topic.
        sealing: how to encode rows as record batches; None = they are staged as rows.
        limits: what the topic accepts; None if an invalid row fails the batch.
        dead_letter_topic: option ``deadLetter.topic``; None if invalid rows fail the batch, or are dropped.
        origin: headers that all dead letters have.
        plan: destinations of the rows; None if all go to Kafka.
        application_id, cluster_id: the query, for sinks outside Kafka.
    """

    columns: SinkColumns
    folder: StagingFolder
    batch: str
    inline_bytes: int
    run_id: str = ""
    topic: str | None = None
    sealing: SealingPlan | None = None
    limits: RecordLimits | None = None
    dead_letter_topic: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    application_id: str = ""
    cluster_id: str = ""

    def batches(self, batches: Iterable[pa.RecordBatch]) -> StagedTask:
        """Stages Arrow batches with the columns of the frame.

        Raises:
            InvalidRecordError: if a row is invalid, and an invalid row fails the batch.
            KafkaEosError: as `staging.stage`.
        """
        return self._stage(partial(from_batches, batches, self.columns))

    def rows(self, rows: Iterable[Sequence[Any]]) -> StagedTask:
        """Stages Spark's rows, for Kafka only. Raises the errors of `batches`."""
        return self._stage(lambda invalid, _: from_rows(rows, self.columns, invalid))

    def again(self, before: StagedTask, refused: Mapping[int, tuple[str, RowRefusal]]) -> StagedTask:
        """Stages the rows of a task again without those that a sink refused, which become dead letters.

        Called on the driver. Columns and plan are those of the task.

        Args:
            before: what the task staged.
            refused: by number of the kept row: the sink that refuses it, and why.

        Raises:
            StagedPartError: if a part is not what the task wrote.
            KafkaEosError: as `staging.stage`.
        """
        from kafka_eos_source.stage.parts import VerifiedParts

        plan, kept, columns = before.plan, before.kept, before.columns
        assert columns is not None
        assert plan is not None
        assert kept is not None
        staging = replace(self, columns=columns, plan=plan)
        find = RefusedRows(refused).reasons
        rows = (_whole(each, plan) for each in VerifiedParts(self.folder, self.batch, [kept]).batches())
        packets = staging._packets(before.part)

        def without(invalid: InvalidRows | None, fanout: Fanout | None) -> Iterable[pa.RecordBatch]:
            return chain(packets, from_batches(rows, columns, invalid, fanout, find))

        staged = staging._stage(without, before.part)
        left = 0 if staged.kept is None else staged.kept.rows
        letters = sum(each.rows for each in staged.dead_letters)
        if left + len(refused) != kept.rows or (self.dead_letter_topic and letters != len(refused)):
            raise AssertionError(
                f"of {kept.rows} kept rows, {len(refused)} are refused; the driver staged {left} rows and "
                f"{letters} letters"
            )
        return replace(staged, dead_letters=(*before.dead_letters, *staged.dead_letters))

    def _packets(self, part: StagedPart) -> Iterator[pa.RecordBatch]:
        """Yields the packets of operators and reads that a task staged, as staged batches."""
        from kafka_eos_source.stage.parts import VerifiedParts

        names = staged_schema(self.columns).names
        if CHANGES not in names:
            return
        for each in VerifiedParts(self.folder, self.batch, [part]).batches():
            if each.column(CHANGES).null_count == 0:
                yield each.select(names)

    def _stage(
        self,
        staged: Callable[[InvalidRows | None, Fanout | None], Iterable[pa.RecordBatch]],
        before: StagedPart | None = None,
    ) -> StagedTask:
        """Stages the batches that a function makes.

        Args:
            staged: returns batches with the staged columns; passes invalid rows to its first argument, and
                valid ones to the second.
            before: what the task staged before, if it stages its rows again.
        """
        invalid, fanout = self._invalid_rows(), self._fanout()
        try:
            part = stage(
                staged(invalid, fanout),
                staged_schema(self.columns),
                folder=self.folder,
                batch=self.batch,
                inline_bytes=self.inline_bytes,
                run_id=self.run_id,
                topic=self.topic,
                sealing=self.sealing,
            )
            dead = None if invalid is None else invalid.finish()
            sinks = () if fanout is None else fanout.finish()
        except BaseException:
            for each in (invalid, fanout):
                if each is not None:
                    each.discard()
            raise
        dropped = 0 if invalid is None else invalid.dropped
        if before is None:
            # without an operator, no report of a shard can be missing
            is_silent = self.columns.only_bad_records and not part.shards
            part = replace(part, dropped=dropped, shards=None if is_silent else part.shards)
            if invalid is not None:
                part = replace(part, marked=invalid.marked.topics, unmarked=invalid.marked.unmarked)
        else:
            part = replace(
                part,
                dropped=before.dropped + dropped,
                shards=before.shards,
                reads=before.reads,
                senders=before.senders,
                marked=before.marked,
                unmarked=before.unmarked,
                measured=replace(before.measured, topics=part.measured.topics),
            )
        return StagedTask(
            part,
            () if dead is None else (replace(dead, run_id=self.run_id),),
            sinks,
            None if fanout is None else fanout.kept,
            self.columns,
            self.plan,
        )

    def _invalid_rows(self) -> InvalidRows | None:
        """Returns where this task puts invalid rows; None if an invalid row fails the batch."""
        if self.limits is None:
            return None
        stage_of = partial(PartStage, folder=self.folder, batch=self.batch, inline_bytes=self.inline_bytes)
        return InvalidRows(
            self.dead_letter_topic,
            self.limits,
            self.origin,
            self.topic,
            stage_of,
            escaped_names=self.columns.escaped_names,
        )

    def _fanout(self) -> Fanout | None:
        if self.plan is None:
            return None
        from kafka_eos_source.stage.fanout import Fanout

        return Fanout(
            self.plan, self.application_id, self.cluster_id, self.batch, self.folder, self.inline_bytes
        )


# -- rows that a sink refused ----------------------------------------------------------------------


class RefusedRows:
    """Finds the refused rows among the kept rows of a task, which come in their order.

    Args:
        refused: by number of the kept row: the sink that refuses it, and why.
    """

    def __init__(self, refused: Mapping[int, tuple[str, RowRefusal]]) -> None:
        self._refused = refused
        self._numbers = np.array(sorted(refused), np.int64)
        self._next = 0

    def reasons(self, batch: pa.RecordBatch) -> Reasons | None:
        """Returns why rows of the next batch are refused; None if none is."""
        first, self._next = self._next, self._next + batch.num_rows
        begin, end = np.searchsorted(self._numbers, (first, self._next))
        if begin == end:
            return None
        errors: list[str | None] = [None] * batch.num_rows
        messages, sinks = list(errors), list(errors)
        for number in self._numbers[begin:end].tolist():
            sink, refusal = self._refused[number]
            errors[number - first] = REFUSED
            messages[number - first] = text_of(sink, refusal)
            sinks[number - first] = sink
        return Reasons(*(pa.array(each, pa.string()) for each in (errors, messages, sinks)))


def text_of(sink: str, refusal: RowRefusal) -> str:
    """Returns why a sink refuses a row, as text for people."""
    column = f"column {refusal.column!r}: " if refusal.column else ""
    return f"sink {sink!r} refuses the row: {column}{refusal.why}"


@dataclass(frozen=True)
class KeptRows:
    """The kept rows of all tasks of a batch, on the driver.

    Attributes:
        folder, batch: where they are.
        tasks: what the tasks staged, in their order.
    """

    folder: StagingFolder
    batch: str
    tasks: Sequence[StagedTask]

    def numbers(self, sink: str, rows: Iterable[int]) -> dict[int, dict[int, int]]:
        """Returns which kept rows of which tasks those are that a sink counts by some numbers.

        Args:
            sink: name of the sink.
            rows: numbers, as `contract.Refused` counts them.

        Returns:
            By number of the task: by number of the kept row, the number that the sink gave. Rows of tasks
            that kept none are missing.

        Raises:
            StagedPartError: if a part is not what the task wrote.
        """
        wanted = np.array(sorted(rows), np.int64)
        found: dict[int, dict[int, int]] = {}
        first = 0
        for number, task in enumerate(self.tasks):
            count = sum(part.rows for part in task.sinks if part.sink == sink)
            begin, end = np.searchsorted(wanted, (first, first + count))
            if begin != end and task.keeps(sink):
                of_sink = wanted[begin:end]
                at = self._of_sink(task, sink, count)[of_sink - first]
                found[number] = dict(zip(at.tolist(), of_sink.tolist(), strict=True))
            first += count
        return found

    def origins(self, task: int, rows: Iterable[int]) -> dict[int, str]:
        """Returns where kept rows of a task were read, by their numbers (`invalid_rows.place_of`)."""
        wanted, found, first = sorted(rows), {}, 0
        for batch in self._batches(self.tasks[task]):
            names = batch.schema.names
            origin = names.index(ORIGIN) if ORIGIN in names else None
            for row in wanted:
                if first <= row < first + batch.num_rows:
                    found[row] = place_of(batch, origin, row - first)
            first += batch.num_rows
        return found

    def _of_sink(self, task: StagedTask, sink: str, count: int) -> npt.NDArray[np.int64]:
        """Returns the numbers of the kept rows that go to a sink."""
        plan = task.plan
        if plan is None or plan.router is None:
            return np.arange(count)
        from kafka_eos_source.stage.fanout import destined

        at = plan.kept.index(plan.router)
        masks = [
            destined(each.column(at), sink).to_numpy(zero_copy_only=False) for each in self._batches(task)
        ]
        return np.flatnonzero(np.concatenate(masks))

    def _batches(self, task: StagedTask) -> Iterator[pa.RecordBatch]:
        from kafka_eos_source.stage.parts import VerifiedParts

        parts = [] if task.kept is None else [task.kept]
        return VerifiedParts(self.folder, self.batch, parts).batches()


def _whole(kept: pa.RecordBatch, plan: Plan) -> pa.RecordBatch:
    """Returns kept rows as rows of the frame, without marks and packets."""
    assert plan.frame is not None
    at = {position: number for number, position in enumerate(plan.kept)}
    return pa.RecordBatch.from_arrays(
        [
            kept.column(at[number]) if number in at else pa.nulls(kept.num_rows, each.type)
            for number, each in enumerate(plan.frame)
        ],
        schema=plan.frame,
    )

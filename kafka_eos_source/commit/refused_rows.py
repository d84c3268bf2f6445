"""The rows of one micro-batch while it is committed, and what becomes of those that sinks refuse.

A sink outside Kafka may refuse rows when it prepares the batch (`sinks.contract.Refused`). If invalid rows
are set aside, the rows of the tasks that staged such rows are staged again without them. Otherwise, the query
stops with an error that names the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

import pyarrow as pa

from kafka_eos_source.commit import open_sinks, two_phase
from kafka_eos_source.errors import (
    InvalidRecordError,
    InvalidSchemaError,
    KafkaEosError,
    RestartQueryError,
)
from kafka_eos_source.model import StagedPart
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.stage.fanout import Plan
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.invalid_rows import SET_ASIDE
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.task import KeptRows, StagedTask, Staging


def parts_of(tasks: Iterable[StagedTask]) -> list[StagedPart]:
    """Returns what the commit sends to Kafka: the rows of the tasks, and the dead letters."""
    return [part for each in tasks for part in each.parts]


class BatchRows:
    """The rows of one micro-batch, which become fewer when sinks refuse some of them.

    Attributes:
        tasks: what the tasks staged, or the driver after sinks refused rows.
        staged: these rows, for Kafka.
    """

    def __init__(
        self,
        options: WriteOptions,
        folder: StagingFolder,
        application_id: str,
        batch_id: int,
        tasks: Sequence[StagedTask],
        staged: StagedRows,
        trace: Trace,
    ) -> None:
        self.tasks = list(tasks)
        self.staged = staged
        self._options = options
        self._folder = folder
        self._application_id = application_id
        self._batch_id = batch_id
        self._trace = trace
        self._sinks: two_phase.Sinks | None = None
        self._plan: Plan | None = None
        self._staging: Callable[[], Staging] | None = None

    def for_sinks(self, plan: Plan, staging: Callable[[], Staging] | None) -> two_phase.Sinks:
        """Returns the sinks with their rows.

        Args:
            plan, staging: as `commit_micro_batch` takes them.

        Raises:
            StagedPartError: if a staged part is missing or damaged.
            InvalidSchemaError: if tasks staged different columns for one sink.
        """
        _check_columns(plan, self.tasks)
        self._plan, self._staging = plan, staging
        self._sinks = self._opened()
        return self._sinks

    def without(self, refusal: two_phase.Refusal) -> tuple[StagedRows, two_phase.Sinks]:
        """Implements `request.Restage`."""
        assert self._staging is not None, "the query has sinks outside Kafka"
        staging = self._staging()
        kept = KeptRows(self._folder, str(self._batch_id), self.tasks)
        numbers = kept.numbers(refusal.sink, refusal.rows)
        if staging.limits is None or sum(map(len, numbers.values())) < len(refusal.rows):
            raise _refused(refusal, self._batch_id, _places(kept, numbers), fails=staging.limits is None)
        for task, rows in numbers.items():
            refused = {row: (refusal.sink, refusal.rows[number]) for row, number in rows.items()}
            self.tasks[task] = staging.again(self.tasks[task], refused)
        self.staged = StagedRows(
            self._folder, str(self._batch_id), parts_of(self.tasks), self.staged.shards, self.staged
        )
        self._sinks = self._opened()
        return self.staged, self._sinks

    def _opened(self) -> two_phase.Sinks:
        assert self._plan is not None
        return open_sinks.work(
            self._options,
            self._plan,
            self._folder,
            self._application_id,
            self._batch_id,
            [part for each in self.tasks for part in each.sinks],
            self._trace,
            self._sinks,
        )


def _places(kept: KeptRows, numbers: Mapping[int, Mapping[int, int]]) -> dict[int, str]:
    """Returns where the first refused rows were read, by the numbers that the sink gave them."""
    found: dict[int, str] = {}
    for task, rows in numbers.items():
        shown = dict(sorted(rows.items())[: open_sinks.SHOWN_REFUSED])
        found |= {shown[row]: place for row, place in kept.origins(task, shown).items()}
    return found


def _refused(
    refusal: two_phase.Refusal, batch_id: int, places: Mapping[int, str], *, fails: bool
) -> KafkaEosError:
    """Returns the error for refused rows that stop the query, because they cannot be set aside.

    Args:
        refusal: the refused rows.
        batch_id: Spark's id of the batch.
        places: where rows were read, by their numbers; "" = not known.
        fails: whether invalid rows fail the batch; otherwise a task did not keep the rows.
    """
    first = sorted(refusal.rows.items())[: open_sinks.SHOWN_REFUSED]
    shown = "; ".join(
        f"{'column ' + repr(each.column) + ': ' if each.column else ''}{each.why.rstrip('.')}"
        f"{f' ({places[number]})' if places.get(number) else ''}"
        for number, each in first
    )
    more = "" if len(first) == len(refusal.rows) else f"; and {len(refusal.rows) - len(first):,} more"
    # a sink stops to look for more once they are enough (`contract.SinkContext.enough_refused`)
    least = "at least " if fails and len(refusal.rows) < refusal.of else ""
    text = (
        f"sink {refusal.sink!r} refuses {least}{len(refusal.rows):,} of {refusal.of:,} rows of batch "
        f"{batch_id}: {shown}{more}. Nothing of the batch was committed."
    )
    if fails:
        return InvalidRecordError(text, fix=f"correct the rows or the target; or {SET_ASIDE}.")
    return RestartQueryError(
        f"{text} The rows cannot be set aside, because the sink had not said that it may refuse rows when "
        "the tasks ran.",
        fix="start the query again, which asks the sink again and repeats the batch. A sink of your own says "
        "by refuses_rows that it may refuse rows.",
    )


def _check_columns(plan: Plan, tasks: Iterable[StagedTask]) -> None:
    """Checks that all tasks staged the same columns for each sink.

    In a union of frames of `map_in_read`, each frame has its own schema.

    Raises:
        InvalidSchemaError: names the first column in which two frames differ.
    """
    wanted = {each.spec.name: each.schema for each in plan.routes}
    others = {id(each.plan.routes): each.plan.routes for each in tasks if each.plan is not None}
    for route in (route for routes in others.values() for route in routes):
        name, own = route.spec.name, wanted[route.spec.name]
        if route.schema == own:
            continue
        for here, there in zip_longest(own, route.schema):
            if _described(here) != _described(there):
                raise InvalidSchemaError(
                    f"the frames of a union differ in the columns for sink {name!r}: where one has "
                    f"{_described(here)}, another has {_described(there)}. Nothing of the batch was "
                    "committed.",
                    fix=f"return the same types from the functions of map_in_read; if only the order of the "
                    f"columns differs, set option 'sink.{name}.columns'.",
                )


def _described(field: pa.Field | None) -> str:
    return "no column" if field is None else f"column {field.name!r} of type {field.type}"

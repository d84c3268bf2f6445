"""The handle that a processor receives in ``init``: Spark's `StatefulProcessorHandle` on our store.

::

    CREATED -> INITIALIZED -> DATA_PROCESSED -> TIMER_PROCESSED -> CLOSED (also reachable from every phase)
    PRE_INIT -> CLOSED

A processor creates state variables in phase CREATED (in a task) or PRE_INIT (on the driver, which only
determines which variables there are), and uses timers in INITIALIZED and DATA_PROCESSED. Other uses are
refused with the same conditions as in Spark (`StatefulProcessorHandleImplBase`, `StateStoreErrors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar

from pyspark.sql.streaming import stateful_processor as spark
from pyspark.sql.types import StructType

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.spark.worker import running_task
from kafka_eos_source.state.processor.registry import Declaration, VariableInfo, VariableKind, check_types
from kafka_eos_source.state.processor.schema import as_struct
from kafka_eos_source.state.processor.variables import (
    KeyWindow,
    ListState,
    MapState,
    Timers,
    ValueState,
    Variable,
)

TimeMode = Literal["None", "ProcessingTime", "EventTime"]
V = TypeVar("V", bound=Variable)


class Phase(Enum):
    """Phase of a processor's batch; the names are those of Spark."""

    PRE_INIT = "PRE_INIT"
    CREATED = "CREATED"
    INITIALIZED = "INITIALIZED"
    DATA_PROCESSED = "DATA_PROCESSED"
    TIMER_PROCESSED = "TIMER_PROCESSED"
    CLOSED = "CLOSED"


_MOVES: dict[Phase, tuple[Phase, ...]] = {
    Phase.PRE_INIT: (Phase.CLOSED,),
    Phase.CREATED: (Phase.INITIALIZED, Phase.CLOSED),
    Phase.INITIALIZED: (Phase.DATA_PROCESSED, Phase.CLOSED),
    Phase.DATA_PROCESSED: (Phase.TIMER_PROCESSED, Phase.CLOSED),
    Phase.TIMER_PROCESSED: (Phase.CLOSED,),
    Phase.CLOSED: (),
}
#: Phases in which state variables may be created and deleted.
_DECLARING = (Phase.PRE_INIT, Phase.CREATED)
_INVALID_STATE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
#: Phases in which timers may be used.
_TIMING = (Phase.INITIALIZED, Phase.DATA_PROCESSED)


@dataclass(frozen=True)
class QueryInfo:
    """The query and batch that a processor works for, as in the `QueryInfo` of Spark's Scala handle."""

    query_id: str
    run_id: str
    batch_id: int

    def getQueryId(self) -> str:
        """Returns Spark's id of the query; "" outside a Spark task."""
        return self.query_id

    def getRunId(self) -> str:
        """Returns Spark's id of the run; "" outside a Spark task."""
        return self.run_id

    def getBatchId(self) -> int:
        """Returns the id of the micro-batch; -1 on the driver."""
        return self.batch_id


class StatefulProcessorHandle(spark.StatefulProcessorHandle):
    """Implements Spark's handle; the methods in camel case are those of Spark's class.

    Args:
        time_mode: time mode of the operator.
        keys: window of keys that variables and timers work on.
        batch_id: id of the micro-batch; -1 on the driver.
        phase: first phase: CREATED in a task, PRE_INIT on the driver.

    Attributes:
        declarations: variables that ``init`` has declared so far, in order.
        deleted: names of the variables that ``init`` has passed to ``deleteIfExists``.
        keys: the window of keys.
        timers: timers of the shard.
    """

    def __init__(
        self, time_mode: TimeMode, keys: KeyWindow, batch_id: int = -1, phase: Phase = Phase.CREATED
    ) -> None:
        self.declarations: list[Declaration] = []
        self.deleted: set[str] = set()
        self.timers = Timers(keys)
        self._time_mode = time_mode
        self.keys = keys
        self._batch_id = batch_id
        self._phase = phase
        self._variables: dict[str, Variable] = {}

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        """Creates a state variable with one row per key."""
        return self._declare("value", ValueState, stateName, schema, ttlDurationMs)

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        """Creates a state variable with a list of rows per key; each row has its own time to live."""
        return self._declare("list", ListState, stateName, schema, ttlDurationMs)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Creates a state variable with a map of rows per key; each row has its own time to live."""
        return self._declare("map", MapState, stateName, valueSchema, ttlDurationMs, userKeySchema)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Registers a timer for the current key. A timer in the past fires in this batch."""
        self._check_timing("register_timer")
        self.timers.register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Deletes a timer of the current key."""
        self._check_timing("delete_timer")
        self.timers.delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Returns the times of the current key's timers, earliest first, including a timer that fires now."""
        self._check_timing("list_timers")
        return iter(self.timers.times_ms())

    def deleteIfExists(self, stateName: str) -> None:
        """Deletes a state variable with its state for all keys."""
        self._check_declaring("delete_if_exists")
        self.deleted.add(stateName)

    def getQueryInfo(self) -> QueryInfo:
        """Returns the query, run and batch."""
        task = running_task()
        if task is None:
            return QueryInfo("", "", self._batch_id)
        return QueryInfo(task.query_id, task.run_id, self._batch_id)

    def move_to(self, phase: Phase) -> None:
        """Enters the next phase. Only the runner calls this.

        Raises:
            StatefulProcessorError: if the phase cannot follow the current one.
        """
        if phase not in _MOVES[self._phase]:
            raise StatefulProcessorError(
                f"the handle cannot move from phase {self._phase.value} to {phase.value}."
            )
        self._phase = phase

    def bind(self, variables: tuple[VariableInfo, ...], now_ms: int) -> None:
        """Assigns the variables their tables after ``init``. Only the runner calls this."""
        by_name = {info.name: info for info in variables}
        for declaration in self.declarations:
            info = by_name[declaration.name]
            self._variables[declaration.name].bind(info, now_ms, declaration.ttl_ms)

    def flush(self) -> None:
        """Writes the changes to the keys of the window to the store. Only the runner calls this."""
        for variable in self._variables.values():
            variable.flush()

    def sweep(self) -> int:
        """Removes expired values, and returns how many. Only the runner calls this."""
        return sum(variable.sweep() for variable in self._variables.values())

    def due_ms(self) -> int | None:
        """Returns the processing time at which the shard needs its next batch; None if it needs none.

        Timers of event time need none, because their time does not pass while there are no records. Only the
        runner calls this.
        """
        if self._time_mode != "ProcessingTime":
            return None
        sweeps = (variable.next_sweep_ms() for variable in self._variables.values())
        times = (self.timers.earliest_ms(), *sweeps)
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def _declare(
        self,
        kind: VariableKind,
        make: Callable[[str, KeyWindow], V],
        name: str,
        schema: StructType | str,
        ttl_ms: int | None,
        map_key: StructType | str | None = None,
    ) -> V:
        self._check_declaring(f"get_{kind}_state")
        if name in self._variables:
            raise StatefulProcessorError(
                f"STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED: init() creates {name!r} twice.",
                fix="give each state variable its own name.",
            )
        if ttl_ms is not None:
            self._check_ttl(name, ttl_ms)
        what = f"state variable {name!r}"
        key = None if map_key is None else as_struct(map_key, f"the keys of {what}")
        declaration = Declaration(name, kind, as_struct(schema, what), key, ttl_ms)
        check_types(declaration)
        self.declarations.append(declaration)
        variable = make(name, self.keys)
        self._variables[name] = variable
        return variable

    def _check_declaring(self, operation: str) -> None:
        if self._phase not in _DECLARING:
            raise self._wrong_phase(operation, "create and delete state variables only in init().")

    def _check_timing(self, operation: str) -> None:
        if self._time_mode == "None":
            raise StatefulProcessorError(
                f"STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE: {operation} with "
                "time_mode 'None', which has no timers.",
                fix="set time_mode of the operator to 'ProcessingTime' or 'EventTime'.",
            )
        if self._phase not in _TIMING:
            raise self._wrong_phase(
                operation,
                "use timers in handleInputRows(), handleExpiredTimer() and handleInitialState() only.",
            )

    def _check_ttl(self, name: str, ttl_ms: int) -> None:
        if self._time_mode != "ProcessingTime":
            raise StatefulProcessorError(
                f"STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL: state variable {name!r} has a time "
                f"to live, but time_mode is {self._time_mode!r}.",
                fix="set time_mode of the operator to 'ProcessingTime', or omit ttlDurationMs.",
            )
        if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int) or ttl_ms <= 0:
            raise StatefulProcessorError(
                f"STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE: ttlDurationMs of {name!r} is {ttl_ms!r}.",
                fix="set it to an int above 0, in milliseconds, or to None for no time to live.",
            )

    def _wrong_phase(self, operation: str, fix: str) -> StatefulProcessorError:
        return StatefulProcessorError(
            f"{_INVALID_STATE}: {operation} in handle state {self._phase.value}.",
            fix=fix,
        )

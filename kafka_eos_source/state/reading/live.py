"""``watch_state(…)``: a table in a notebook or a terminal that shows live what a store contains."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    InvalidSchemaError,
    KafkaEosError,
    StateMismatchError,
    UnavailableError,
)
from kafka_eos_source.observe.draw import Mark, StateTable, as_html, as_text
from kafka_eos_source.observe.notebook import Watch, bundle, notebook_display, show_in_terminal, view_of
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.reading.query import StateQuery

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

#: Columns that do not identify a row.
_VALUES = frozenset({"value", "user_map_value", "list_element"})
#: Errors of the caller, which waiting does not mend.
_PERMANENT = (InvalidOptionError, InvalidSchemaError, AuthorizationError, StateMismatchError)


def watch_state(
    query: StreamingQuery | str,
    store: str | None = None,
    interval: float = 1.0,
    *,
    state_dir: str | os.PathLike[str] | None = None,
    kafka: Mapping[str, str] | None = None,
    variable: str | None = None,
    timers: bool = False,
    rows: int = 20,
    snapshot_location: str | None = None,
    timeout_ms: int = 10_000,
) -> Watch[StateTable] | None:
    """Shows live what the state of a streaming query contains: a table that refreshes itself.

    In a notebook, the cell's output becomes the table, and the notebook stays usable. In a terminal, the call
    shows a screen until the query ends or Ctrl-C is pressed. The query is not affected, because the reads
    take no locks. A sign before a row says that the newest batch added it to the table (``+``) or changed it
    (``~``). If the state cannot be read for a while, such as before the first batch, the table says why and
    keeps the last rows.

    The arguments that `StateQuery` has too mean the same there.

    Args:
        query: what ``start()`` returned, as for `watch`; the table stops refreshing when the query ends. Or
            the ``application.id`` of a query that another program runs: then until `Watch.stop` or Ctrl-C.
        store: name of the operator's store; None = the only one.
        interval: time between two refreshes, in seconds.
        state_dir, kafka: where to read the store.
        variable: name of the state variable; None = the only one.
        timers: show the registered timers instead of a variable.
        rows: the most rows to show: those of `StateQuery.head`.
        snapshot_location: as in `StateQuery`; the first read begins there.
        timeout_ms: limit of one read.

    Returns:
        In a notebook, an object whose ``stop()`` ends the refreshing; in a terminal, None.

    Raises:
        InvalidOptionError, AuthorizationError, StateMismatchError: as `StateQuery`.
    """
    if rows < 1 or interval <= 0:
        raise InvalidOptionError(
            f"rows is {rows} and interval is {interval}; expected at least one row and more than 0 seconds."
        )
    if state_dir is None and kafka is None:
        raise InvalidOptionError(
            "neither state_dir nor kafka is set.",
            fix="set state_dir to read the databases of this machine, kafka to read the changelog, or both.",
        )

    def open_query() -> StateQuery:
        return StateQuery(
            query if isinstance(query, str) else _application_id(query),
            store,
            state_dir=state_dir,
            kafka=kafka,
            snapshot_location=snapshot_location,
            timeout_ms=timeout_ms,
        )

    table = LiveTable(
        open_query,
        (lambda: True) if isinstance(query, str) else (lambda: query.isActive),
        title=" / ".join(each for each in (query if isinstance(query, str) else "", store) if each)
        or str(state_dir or "state"),
        rows=rows,
        variable=variable,
        timers=timers,
    )
    with ExitStack() as stack:
        stack.callback(table.close)
        first, runs = table.look(is_first=True)
        display = notebook_display()
        if display is None:
            show_in_terminal(table.look, first, runs, as_text, interval)
            return None
        handle = display(_bundle(first), raw=True, display_id=True)
        made = Watch(table.look, lambda found: handle.update(_bundle(found), raw=True), interval, table.close)
        if runs:
            stack.pop_all()  # the thread closes the table
            made.start()
        return made


def _application_id(query: StreamingQuery) -> str:
    """Returns the ``application.id`` of a query, which its first micro-batch makes known.

    Raises:
        UnavailableError: if the query has not committed a micro-batch, or its figures are not known here.
    """
    found = view_of(query)[0].application_id
    if not found:
        raise UnavailableError(
            "the application.id of the query is not known yet: it has not committed a micro-batch, or it "
            "runs on a Spark server that reports no figures.",
            fix="wait for the first micro-batch, or pass the application.id instead of the query.",
        )
    return found


class LiveTable:
    """Looks at a store again and again, and marks the rows that change from batch to batch.

    Args:
        open_query: opens the store, which may not exist yet.
        runs: whether the query still runs.
        title: names the store until it is open.
        rows, variable, timers: as in `watch_state`.
    """

    def __init__(
        self,
        open_query: Callable[[], StateQuery],
        runs: Callable[[], bool],
        *,
        title: str,
        rows: int,
        variable: str | None = None,
        timers: bool = False,
    ) -> None:
        self._open_query = open_query
        self._runs = runs
        self._rows = rows
        self._variable = variable
        self._timers = timers
        self._query: StateQuery | None = None
        self._batches: Mapping[int, BatchRecord | None] | None = None
        #: The rows of the batch before, by what identifies them.
        self._before: dict[tuple[str, int], str] | None = None
        self._table = StateTable(title, "no batch yet")

    def look(self, *, is_first: bool = False) -> tuple[StateTable, bool]:
        """Returns the table as it is now, and whether the query runs.

        Args:
            is_first: raise errors of the caller, instead of showing them in the table.
        """
        runs = self._runs()  # before the read, so that the last table has the last batch
        try:
            if self._query is None:
                self._query = self._open_query()
            else:
                self._query.refresh()
            if self._batches != self._query.batches:
                self._table = self._read(self._query)
                self._batches = self._query.batches
            problem = ""
        except KafkaEosError as error:
            if is_first and isinstance(error, _PERMANENT):
                raise
            problem = f"Cannot read the state now: {error.message}"
        self._table = replace(self._table, problem=problem)
        return self._table, runs

    def close(self) -> None:
        """Closes the store. May be called again."""
        if self._query is not None:
            self._query.close()

    def _read(self, query: StateQuery) -> StateTable:
        found = query.head(self._rows + 1, self._variable, timers=self._timers)
        is_all = len(found) <= self._rows
        found = found[: self._rows]
        now: dict[tuple[str, int], str] = {}
        seen: Counter[str] = Counter()
        marks = []
        for row in found:
            name = text({column: each for column, each in row.items() if column not in _VALUES})
            key = name, seen[name]  # the elements of a list have the same key
            seen[name] += 1
            now[key] = text(row)
            if self._before is None:
                marks.append(Mark.NONE)
            elif key not in self._before:
                marks.append(Mark.NEW)
            else:
                marks.append(Mark.NONE if self._before[key] == now[key] else Mark.CHANGED)
        self._before = now
        flattened = [flat(row) for row in found]
        columns = list(dict.fromkeys(name for row in flattened for name in row))
        batch = "no batch yet" if query.batch_id is None else f"batch {query.batch_id}"
        amount = f"{len(found)} rows" if is_all else f"the first {len(found)} rows"
        return StateTable(
            f"{query.application_id} / {query.store}",
            f"{batch}, {query.shards} shards, {amount}",
            columns,
            [[text(row[name]) if name in row else "" for name in columns] for row in flattened],
            marks,
        )


def _bundle(table: StateTable) -> dict[str, str]:
    return bundle(as_html(table), as_text(table))


# ------------------------------------------------------------------ rows as text for people


def text(value: Any) -> str:
    """Returns a value as text for a person."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (datetime, date, Decimal)):
        return str(value)
    return value if isinstance(value, str) else json.dumps(value, default=text, ensure_ascii=False)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with the fields of key and value as columns of their own.

    A field of the value that has the name of a field of the key becomes ``value.<name>``.
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("key", "value") and isinstance(value, Mapping):
            for field, each in value.items():
                found[f"{name}.{field}" if field in found else field] = each
        else:
            found[f"column.{name}" if name in found else name] = value
    return found

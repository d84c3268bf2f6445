"""``watch(query)``: a panel in a notebook, or a screen in a terminal, that shows live what a query does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from kafka_eos_source.observe import draw
from kafka_eos_source.observe.display import Watch, bundle, show_in_terminal
from kafka_eos_source.observe.display import notebook_display as _notebook
from kafka_eos_source.observe.draw import panel
from kafka_eos_source.observe.journal import QueryJournal, newest_batches, query_journal
from kafka_eos_source.observe.lines import ProcessId
from kafka_eos_source.observe.progress import view_of_reports
from kafka_eos_source.observe.view import QueryView, Status, view
from kafka_eos_source.runtime.json_input import parse_json


class StreamingQuery(Protocol):
    """The members of PySpark's ``StreamingQuery``, classic or Connect, that are used here."""

    @property
    def id(self) -> str: ...
    @property
    def isActive(self) -> bool: ...  # noqa: N802
    @property
    def recentProgress(self) -> Any: ...  # noqa: N802
    @property
    def status(self) -> dict[str, Any]: ...
    def exception(self) -> Exception | None: ...


#: The panel of each query. There is one, because a notebook does not tell when a cell's output is replaced.
_watches: dict[str, Watch[QueryView]] = {}
#: The ``application.id`` of each query that was found on this host.
_names: dict[str, str] = {}


def watch(query: StreamingQuery, interval: float = 1.0) -> Watch[QueryView] | None:
    """Shows live what a streaming query does: rates, lag, micro-batches by step, and what it waits for.

    In a notebook, the cell's output becomes a panel that refreshes itself, and the notebook stays usable. A
    second call for the same query replaces the panel. In a terminal, the call shows a screen until the query
    ends or Ctrl-C is pressed. The query itself is not affected.

    On the driver's host, the figures come from the files that the query writes there. Over Spark Connect,
    they come from the query's progress reports, which need a source of this package and PySpark 4.2.

    Args:
        query: what ``start()`` returned.
        interval: time between two refreshes, in seconds.

    Returns:
        In a notebook, an object whose ``stop()`` ends the refreshing; in a terminal, None.
    """
    look = partial(view_of, query)
    first, runs = look()
    shell = _notebook()
    if shell is None:
        show_in_terminal(look, first, runs, lambda found, height: draw.frame([found], height), interval)
        return None
    former = _watches.pop(str(query.id), None)
    if former is not None:
        former.stop()
    handle = shell(_bundle(first), raw=True, display_id=True)
    made = Watch(look, lambda found: handle.update(_bundle(found), raw=True), interval)
    if runs:
        _watches[str(query.id)] = made
        made.start()
    return made


def view_of(query: StreamingQuery) -> tuple[QueryView, bool]:
    """Returns what a query does now, and whether it still runs."""
    runs, now = query.isActive, time.time()
    failure = None if runs else query.exception()
    error = "" if failure is None else _first_line(failure)
    journal = journal_of(str(query.id))
    if journal is not None:
        # Spark knows better than the files whether the query runs
        found = view(journal, now, ProcessId.is_alive if runs else _is_dead)
        if error:
            found = replace(found, status=Status.FAILED, status_text=error)
        elif runs and found.status in (Status.STOPPED, Status.FAILED):  # the files are of a former run
            found = replace(found, status=Status.RUNNING, status_since=None, status_text="")
        return found, runs
    reports = [_report(each) for each in query.recentProgress]
    works = bool(runs and query.status.get("isTriggerActive"))
    return view_of_reports(str(query.id), reports, now, runs=runs, works=works, error=error), runs


def _is_dead(_process: ProcessId) -> bool:
    return False


def journal_of(query_id: str) -> QueryJournal | None:
    """Returns what this host knows about a query; None if it knows nothing, or the files cannot be read."""
    try:
        if query_id not in _names:
            found = [each for each in newest_batches(0.0) if each.query_id == query_id]
            if not found:
                return None
            _names[query_id] = found[0].application_id
        return query_journal(_names[query_id])
    except (OSError, UnicodeError):
        return None  # the progress reports remain


def _report(progress: Any) -> Mapping[str, Any]:
    """Returns a progress report as an object of JSON. Old versions of PySpark return dictionaries."""
    found = progress if isinstance(progress, Mapping) else parse_json(progress.json)
    return dict(found)


def _first_line(failure: Exception) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0][:300]


def _bundle(found: QueryView) -> dict[str, str]:
    """Returns a frame as HTML, and as text for frontends that do not show HTML."""
    return bundle(panel(found), draw.frame([found], None))

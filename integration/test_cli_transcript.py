"""Every command of ``kafka-eos``, on one broker and one query; what they print is docs/cli-transcript.md.

The test compares what the commands print with that page, after it has replaced ids, times and paths. If they
differ, it writes the page anew and fails: look at the difference, and commit the page.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from integration.support.kafka import Admin
from kafka_eos_source import invalid_record
from kafka_eos_source.cli import main
from kafka_eos_source.operate.json_documents import ERROR, SHAPES, Lines
from kafka_eos_source.operate.shared import ExitCode
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.sinks.contract import SinkContext, cluster_hash
from kafka_eos_source.sinks.memory import SYSTEMS, Memory
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.operator.transform import aggregate
from tests.support.json_shapes import mismatches

PAGE = Path(__file__).parent.parent / "docs" / "cli-transcript.md"
APP = "carriers"
STORE = "flights-per-carrier"
_END_SECONDS = 60

#: What replaces parts of the output that differ from run to run.
_VOLATILE = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "8d4f1c2e-…"),
    (r"(start|end) [0-9a-f]{8,}", r"\1 5f0e…"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "2026-01-31 12:00:00 UTC"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?! UTC)", "2026-01-31 12:00:00"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", "2026-01-31T12:00:00+00:00"),
    (r"\d\d:\d\d:\d\d\.\d{3}", "12:00:00.000"),
    (r"-[0-9a-f]{20}\b", "-0123456789abcdef0123"),
    (r"planned [\d,]+ \w+ ago", "planned 5 seconds ago"),
    (r"run Python [\d.]+", "run Python 3.12.1"),
    (r", [\d,]+ per second", ", 9,999 per second"),
    (r"[1-9][\d,]* bytes", "999 bytes"),
    (r"(?m)^(  carriers +flights-per-carrier .*) [\d,]+$", r"\1 92,000"),
)


class Session:
    """Runs commands and keeps a transcript of them."""

    def __init__(self, folder: Path) -> None:
        self._replaced: dict[str, str] = {str(folder): "/data"}
        self._parts: list[str] = []
        self.seen: set[str] = set()

    def replace(self, volatile: Mapping[str, str]) -> None:
        """Replaces these texts in everything that is shown."""
        self._replaced.update(volatile)

    def say(self, text: str) -> None:
        self._parts.append(text)

    def show(self, line: str, output: str, code: int = 0) -> None:
        """Adds a command and its output to the transcript."""
        ended = "" if code == ExitCode.DONE else f"\n# exit code {code}"
        self._parts.append(f"```console\n$ {line}\n{output.rstrip()}{ended}\n```")

    def run(
        self, line: str, code: int = ExitCode.DONE, *, text: str | None = None, shape: bool = True
    ) -> str:
        """Runs a command line without and with ``--json``, and shows the first of the two.

        Args:
            line: arguments of ``kafka-eos``.
            code: expected exit code.
            text: standard input.
            shape: whether to run the command with ``--json`` too, and before, because --yes changes what
                there is to do.
        """
        arguments = shlex.split(line)
        name = next(n for n in (" ".join(arguments[:2]), arguments[0]) if n in SHAPES)
        self.seen.add(name)
        if shape:
            dry = [each for each in arguments if each != "--yes"]
            result = command(*dry, "--json", text=text)
            assert result.exit_code == (ExitCode.DONE if dry != arguments else code), result.output
            check_shape(name, result.stdout, ERROR if code == ExitCode.FAILED else SHAPES[name])
        result = command(*arguments, text=text)
        assert result.exit_code == code, (line, result.output, result.exception)
        self.show(f"kafka-eos {line}", result.output, code)
        return result.stdout

    def page(self) -> str:
        """Returns the transcript, with volatile parts replaced."""
        text = "\n\n".join(self._parts) + "\n"
        for volatile, instead in sorted(self._replaced.items(), key=lambda each: -len(each[0])):
            text = text.replace(volatile, instead)
        text = "\n".join(line.rstrip() for line in text.split("\n"))
        for pattern, instead in _VOLATILE:
            text = re.sub(pattern, instead, text)
        return text


def command(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=text, prog_name="kafka-eos")


def check_shape(name: str, output: str, shape: Any) -> None:
    documents = output.splitlines() if isinstance(shape, Lines) else [output]
    for each in documents:
        wrong = list(mismatches(shape, json.loads(each)))
        assert wrong == [], f"kafka-eos {name} --json: {wrong}"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return Session(tmp_path)


@pytest.fixture
def broker(session: Session, tmp_path: Path) -> Iterator[str]:
    """Runs ``kafka-eos broker`` in a process of its own, because it runs until it is stopped."""
    session.say("### A broker and a topic")
    with subprocess.Popen(
        [sys.executable, "-m", "kafka_eos_source.cli", "broker", "--port", "0", "--dir", "kafka", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            printed = "".join(process.stdout.readline() for _ in range(4))
            check_shape("broker", printed, SHAPES["broker"])
            session.seen.add("broker")
            servers = json.loads(printed)["bootstrap_servers"]
            session.replace({servers: "127.0.0.1:9092"})
            session.show("kafka-eos broker --dir kafka --json &", printed)
            yield str(servers)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(_END_SECONDS)
        assert code == ExitCode.DONE


def run_query(spark: SparkSession, broker: str, folder: Path) -> None:
    """Counts the flights of each carrier, with state in Kafka and a token topic."""
    connection = {"kafka.bootstrap.servers": broker, "application.id": APP}
    flights = (
        spark.readStream.format("kafka-eos")
        .options(**connection, subscribe="flights", startingOffsets="earliest")
        .load()
        .select(f.split(f.col("key").cast("string"), "-")[0].alias("carrier"))
    )
    options = {**connection, "state.dir": str(folder / "state")}
    counted = aggregate(
        flights, {"flights": agg.count()}, options=options, key="carrier", store=STORE, shards=2
    )
    changes = [name for name in counted.columns if name.startswith("__")]
    rows = counted.select(
        f.col("carrier").alias("key"), f.col("flights").cast("string").alias("value"), *changes
    )
    writer = rows.writeStream.format("kafka-eos").options(
        **connection,
        **{"topic": "counts", "token.topic": "tokens"},
        checkpointLocation=str(folder / "checkpoint"),
    )
    assert writer.trigger(availableNow=True).start().awaitTermination(120)


def run_checked_query(spark: SparkSession, broker: str, folder: Path) -> None:
    """Copies flights, and writes those of one carrier to a dead-letter topic."""
    connection = {"kafka.bootstrap.servers": broker, "application.id": "checked"}
    flights = (
        spark.readStream.format("kafka-eos")
        .options(**connection, subscribe="flights", startingOffsets="earliest")
        .load()
    )
    bad = invalid_record("CAST(key AS STRING) LIKE 'VX-%'", "carrier VX is not known", error="UnknownCarrier")
    writer = flights.select("key", "value", bad).writeStream.format("kafka-eos")
    writer = writer.options(
        **connection,
        **{"topic": "flights-checked", "onInvalidRecord": "dead-letter", "deadLetter.topic": "flights-dead"},
        checkpointLocation=str(folder / "checked"),
    )
    assert writer.trigger(availableNow=True).start().awaitTermination(120)


@pytest.mark.long
def test_every_command(session: Session, broker: str, spark: SparkSession, tmp_path: Path) -> None:
    at = f"--bootstrap-servers {broker}"
    who = f"{APP} {at}"
    store = f"{APP} --store {STORE} {at}"
    run = session.run
    run(f"flights --records 500 {at}", shape=False)
    run(f"flights {at}", code=ExitCode.FAILED)
    check_shape("flights", invoke(f"flights more --records 5 --json {at}"), SHAPES["flights"])
    run(f"topics create counts --partitions 2 {at}", shape=False)
    check_shape("topics create", invoke(f"topics create notes --json {at}"), SHAPES["topics create"])
    run(f"topics list {at}")
    session.replace({described("topics describe counts", at)["topic_id"]: "q1T7ZkYwQ5mT0x2bVJ9n5A"})
    run(f"topics describe counts {at}")
    run(f"produce notes --key-separator = {at}", text="a=first\nb=second\n", shape=False)
    check_shape("produce", invoke(f"produce notes --json {at}", text="c\n"), SHAPES["produce"])
    run(f"tail notes -n 2 {at}")

    session.say("### A token topic")
    invoke(f"token-topic create tokens {at}")
    session.replace({described("token-topic describe tokens", at)["topic_id"]: "m4KqPzXc8W2uY6sD0fLr1g"})
    run(f"token-topic create tokens {at}")

    run_query(spark, broker, tmp_path)
    session.say(
        "### A query\n\nIt counts the flights of each carrier from topic `flights` into topic `counts`, with "
        f"`application.id={APP}`, `token.topic=tokens`, and the state of store `{STORE}` in two shards."
    )
    found = described("inspect --checkpoint checkpoint", at)
    session.replace({found["kafka"]["cluster_id"]: "Zr8wN3vTQqyH5bKc1JmDxA"})
    run(f"inspect --checkpoint checkpoint {at}")
    run(f"inspect nobody {at}")
    run(
        "inspect --checkpoint checkpoint --bootstrap-servers 127.0.0.1:1 --timeout 1s",
        ExitCode.NEEDS_A_PERSON,
    )
    checks = " ".join(f"--check {each}" for each in ("brokers", "transactions", "replicas", "rights"))
    query = f"--checkpoint checkpoint --topic counts {at}"
    run(f"doctor {checks} --check retention --check staging {query}")
    run(f"acls --checkpoint checkpoint --topic counts --store {STORE}")
    check_shape("top", invoke(f"top --json {who}"), SHAPES["top"])
    session.seen.add("top")
    run(f"lag {APP} {at}")
    run(f"token-topic describe tokens {at}")
    run(f"token-topic show tokens {at}")
    run(f"sweep --checkpoint checkpoint --yes {at}")

    session.say("### Its state")
    run(f"state list {who} --state-dir state")
    run(f"state get {APP} AA --store {STORE} {at}")
    run(f"state get {store} --limit 3")
    run(f"state verify {store} --state-dir state")
    run(f"state restore {store} --state-dir restored --yes")
    run(f"state lower-time {store}")
    run(f"state rescale {store} --shards 3 --yes")

    session.say(
        "### Dead letters\n\nAnother query copies the flights, and writes those of one carrier to its "
        "dead-letter topic: `onInvalidRecord=dead-letter`, `deadLetter.topic=flights-dead`."
    )
    invoke(f"topics create flights-checked flights-dead {at}")
    run_checked_query(spark, broker, tmp_path)
    run(f"dead-letters list flights-dead -n 3 {at}")
    run(f"dead-letters replay flights-dead --dry-run {at}")
    run(f"dead-letters replay flights-dead {at}", shape=False)
    run(f"dead-letters replay flights-dead {at}", shape=False)

    session.say("### Repairs")
    run(f"fence {who} --yes")
    run(f"adopt {who} --checkpoint new-checkpoint")
    Admin(broker).delete_group(group_of(APP))
    run(f"token-topic restore tokens {who} --checkpoint checkpoint --yes")
    run(f"token-topic forget tokens {who} --yes")
    sinks(session, broker, tmp_path, found["kafka"]["cluster_id"])

    session.say("### Others")
    session.show("kafka-eos top --help", invoke("top --help"))
    session.show("kafka-eos metrics --help", invoke("metrics --help"))
    session.show("kafka-eos demo --help", invoke("demo --help"))
    session.seen |= {"demo", "metrics"}
    run("completion fish")
    compare(session)


def sinks(session: Session, broker: str, folder: Path, cluster_id: str) -> None:
    """Shows the commands for sinks, on prepared batches whose token is lost."""
    system = uuid.uuid4().hex
    context = SinkContext("warehouse", "orders", cluster_id)
    session.replace({cluster_hash(cluster_id): "6f1c0a93be27"})
    ids = [context.txn(number, uuid.uuid4().hex[:20]) for number in (7, 8)]
    SYSTEMS[system] = Memory({each: pa.table({"id": [1]}) for each in ids})
    (folder / "sink.properties").write_text(
        f"kafka.bootstrap.servers={broker}\ntopic=counts\napplication.id=orders\n"
        f"sinks=warehouse\nsink.warehouse.type=memory\nsink.warehouse.system={system}\n"
    )
    session.run("sinks list --options sink.properties", ExitCode.NEEDS_A_PERSON)
    session.run(f"sinks commit {ids[0]} --options sink.properties --yes")
    session.run(f"sinks abort {ids[1]} --options sink.properties --yes")
    session.run("sinks list --options sink.properties")


def described(line: str, at: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke(f"{line} --json {at}"))
    return found


def invoke(line: str, text: str | None = None) -> str:
    result = command(*shlex.split(line), text=text)
    assert result.exit_code == ExitCode.DONE, result.output
    return result.stdout


def compare(session: Session) -> None:
    assert session.seen == set(SHAPES), "a command is missing from the transcript"
    new, old = session.page(), PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if comparable(new) != comparable(old):
        PAGE.write_text(new, encoding="utf-8")
        changes = difflib.unified_diff(comparable(old), comparable(new), "committed", "printed", lineterm="")
        pytest.fail("docs/cli-transcript.md is out of date and was written anew:\n" + "\n".join(changes))


def comparable(page: str) -> list[str]:
    """Returns the lines without the width of columns, which depends on the length of what was replaced."""
    return [re.sub(r"[ ─]+", " ", line).strip() for line in page.splitlines()]

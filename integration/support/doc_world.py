"""What the code blocks of docs/ find when `integration.test_docs` executes them.

Every page has a namespace of its own with `spark`, `servers` and `kafka`, and with the names that its *scene*
prepares: frames that a reader would have, such as ``flights``. A scene can also replace texts of the page,
such as the address of a database.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from integration.support.kafka import Admin, produce, read_back
from kafka_eos_source.demo import flights as data
from tests.support.doc_pages import ROOT, Block
from tests.support.http_service import running

FLIGHTS = 300
TOPICS = (
    *("clicks", "counts", "delays", "hourly", "invoices", "late", "moved", "orders-out"),
    *("pageview-histogram", "pageview-windowed-counts", "very-late"),
)
BASH_SECONDS = 120
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_STATE = "org.apache.spark.sql.execution.streaming.state"


@dataclass
class World:
    """Brokers with the topic ``flights``, empty output topics, a Spark session and a folder.

    Attributes:
        servers: bootstrap servers; they replace ``127.0.0.1:9092`` and ``host:9092`` in the blocks.
        folder: replaces ``/data`` in the blocks, and is the working directory of shell commands.
        end: where a scene leaves what has to be ended after the page.
        names: what the Python code of the page sees.
        texts: replacements in the blocks of the page.
        page: name of the page.
        again: whether the blocks have been executed before, so that queries may find nothing new.
    """

    servers: str
    spark: SparkSession
    folder: Path
    end: ExitStack
    names: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    page: str = ""
    again: bool = False

    @property
    def kafka(self) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.servers}

    def flights(self) -> DataFrame:
        return (
            self.spark.readStream.format("kafka-eos")
            .options(**self.kafka, subscribe="flights", startingOffsets="earliest")
            .load()
        )

    def parsed(self) -> DataFrame:
        """Returns the flights with the columns of Kafka, and one for each field."""
        fields = "'carrier STRING, origin STRING, dest STRING, dep_delay INT'"
        return (
            self.flights()
            .selectExpr("key", "value", "timestamp", f"from_json(CAST(value AS STRING), {fields}) AS f")
            .selectExpr("key", "value", "timestamp", "f.*", "f.dep_delay AS delay", "timestamp AS departed")
        )

    def _enter(self, page: str) -> None:
        """Prepares the names and texts of a page."""
        self.page = page
        self.names = {
            "__name__": "a_page",  # cannot be imported, so that functions are pickled by value
            "spark": self.spark,
            "servers": self.servers,
            "kafka": self.kafka,
            "flights": self.flights(),
        }
        self.texts = {
            "127.0.0.1:9092": self.servers,
            "host:9092": self.servers,
            "/data/": f"{self.folder}/",
        }
        if page in SCENES:
            SCENES[page](self)

    def execute(self, block: Block) -> None:
        """Executes a block; then lets each query that it started process what there is, and stops it.

        Raises:
            AssertionError: if a command failed, or a query that was started read nothing.
        """
        if block.page.stem != self.page:
            self._enter(block.page.stem)
        code = block.code
        for old, new in self.texts.items():
            code = code.replace(old, new)
        if block.language == "bash":
            self._bash(code)
            return
        before = {query.id for query in self.spark.streams.active}
        exec(compile("\n" * block.line + code, str(block.page), "exec"), self.names)
        for query in self.spark.streams.active:
            if query.id not in before:
                query.processAllAvailable()
                rows = sum(progress["numInputRows"] for progress in query.recentProgress)
                query.stop()
                assert rows > 0 or self.again, f"{block}: the query read nothing"

    def _bash(self, code: str) -> None:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            ["bash", "-e", "-c", code],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=BASH_SECONDS,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def fill(servers: str, admin: Admin) -> None:
    """Creates the topics: ``flights`` with records, the others empty."""
    for topic in TOPICS:
        admin.create(topic)
    admin.create("tokens", cleanup_policy="compact")
    admin.create("flights", 2)
    frame = data.events(FLIGHTS)
    keys = (frame["carrier"] + "-" + frame["flight"].astype(str)).tolist()
    produce(servers, "flights", data.as_json(frame), keys=keys)


def _recipes(world: World) -> None:
    world.names["counts"] = world.parsed().groupBy("carrier").count()
    world.names["path"] = str(world.folder / "checkpoints" / "update")
    world.texts["postgresql+psycopg://eos@db/flights"] = f"sqlite:///{world.folder}/warehouse.db"


def _sinks(world: World) -> None:
    world.names["delays"] = world.parsed()
    world.texts["postgresql+psycopg://eos@db/flights"] = f"sqlite:///{world.folder}/warehouse.db"


def _aggregates(world: World) -> None:
    parsed = world.parsed()
    world.names["kafka"] = {**world.kafka, "application.id": "aggregates"}
    world.names["flights"] = parsed
    world.names["payments"] = parsed.selectExpr("CAST(key AS STRING) AS payment_id", "timestamp")
    world.names["readings"] = parsed.selectExpr("carrier AS sensor", "CAST(delay AS DOUBLE) AS value")


def _views(world: World) -> None:
    category = "IF(origin = 'JFK', 'music', 'books') AS category"
    world.names["views"] = world.parsed().selectExpr(category, "timestamp")


def _clicks(world: World) -> None:
    """Runs a query with Spark's own state, which the page migrates."""

    class Clicks(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.clicks = handle.getValueState("clicks", "clicks LONG")

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803  Spark's names
            self.clicks.update((sum(1 for _ in rows),))
            yield Row(user=key[0])

        def close(self) -> None: ...

    world.names["df"] = df = world.parsed().selectExpr("carrier AS user", "dest AS page")
    world.spark.conf.set(_PROVIDER, f"{_STATE}.RocksDBStateStoreProvider")
    world.end.callback(world.spark.conf.unset, _PROVIDER)
    old = df.groupBy("user").transformWithState(Clicks(), "user STRING", "update", "None")
    checkpoint = f"{world.folder}/checkpoints/old"
    query = old.writeStream.format("noop").outputMode("update").option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()


def _warehouse(world: World) -> None:
    world.names["events"] = world.flights()
    world.names["kafka"] = {**world.kafka, "application.id": "route-delays"}


def _service(world: World) -> None:
    service = world.end.enter_context(running(world.folder / "service"))
    world.texts["https://billing.example/batches"] = f"http://127.0.0.1:{service.port}"
    world.names["df"] = world.flights().select("key", "value")
    world.texts["BILLING_AUTH"] = (
        "PATH"  # a variable that the driver's JVM has; the service accepts any value
    )


def _records(world: World) -> None:
    world.names["rows"] = world.spark.createDataFrame([("k", "v")], "key STRING, value STRING")


def _runbooks(world: World) -> None:
    world.names["transform"] = lambda batch: batch
    world.texts['{"flights":{"0":700,"1":650}}'] = '{"flights":{"0":0,"1":0}}'
    world.texts['{"flights":{"0":800,"1":700}}'] = '{"flights":{"0":9,"1":9}}'


def _old_checkpoint(world: World) -> None:
    """Writes the newest files of a checkpoint as Spark's own Kafka source leaves them."""
    checkpoint = world.folder / "checkpoints" / "old-delta"
    offsets = 'v1\n{"batchWatermarkMs":0}\n{"flights":{"0":10,"1":10}}'
    for name, text in {"offsets/7": offsets, "commits/7": 'v1\n{"nextBatchWatermarkMs":0}'}.items():
        (checkpoint / name).parent.mkdir(parents=True)
        (checkpoint / name).write_text(text)


def _old_group(world: World) -> None:
    """Commits offsets as another system does; checks that the query continues exactly there."""
    Admin(world.servers).commit("the-old-group", {("flights", 0): (20, ""), ("flights", 1): (10, "")})

    def check() -> None:
        assert len(read_back(world.servers, "moved")) == FLIGHTS - 30

    world.end.callback(check)


def _tutorial(world: World) -> None:
    """Puts the files of the tutorial, whose paths are relative, into the folder; Spark has another one."""
    world.texts['"checkpoints/'] = f'"{world.folder}/checkpoints/'
    for text in ('"state.dir": "', 'connect("'):
        world.texts[text] = f"{text}{world.folder}/"
    world.texts["sqlite:///"] = f"sqlite:///{world.folder}/"


def _passwords(world: World) -> None:
    for name in ("KAFKA_PASSWORD", "KEY_PASSWORD", "CA_PEM", "CERTIFICATE_PEM", "KEY_PEM"):
        os.environ[name] = "secret"
        world.end.callback(os.environ.pop, name)


SCENES: Mapping[str, Callable[[World], None]] = {
    "aggregates": _aggregates,
    "from-foreachbatch-delta": _old_checkpoint,
    "from-transform-with-state": _clicks,
    "from-quix-streams": _old_group,
    "kafka-to-warehouse": _warehouse,
    "logins": _passwords,
    "recipes": _recipes,
    "runbooks": _runbooks,
    "sink-http": _service,
    "sinks": _sinks,
    "state": _views,
    "token-topic": _records,
    "tutorial": _tutorial,
    "windows": _views,
}

"""State can be read from outside its query: as a DataFrame, by lookups while it runs, on the command line."""

from __future__ import annotations

import datetime
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from integration.support.kafka import TIMEOUT_SECONDS, Admin, await_stable, read_back, transaction
from integration.support.rescaling import killed_at
from kafka_eos_source import watch_state
from kafka_eos_source.cli import main
from kafka_eos_source.commit.micro_batch import KafkaClients
from kafka_eos_source.errors import NotUpToBoundError, StateMismatchError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding.layout import hash_columns, shards_of
from kafka_eos_source.state.operator.transform import aggregate
from kafka_eos_source.state.reading import live
from kafka_eos_source.state.reading.query import StateQuery

_ROWS = 2_000
_SEED = 20_261_121

_TYPES = {
    "flag": pa.bool_(),
    "tiny": pa.int8(),
    "short": pa.int16(),
    "int": pa.int32(),
    "long": pa.int64(),
    "real": pa.float32(),
    "double": pa.float64(),
    "text": pa.string(),
    "bytes": pa.binary(),
    "day": pa.date32(),
    "moment": pa.timestamp("us", "UTC"),
    "local": pa.timestamp("us"),
    "small_decimal": pa.decimal128(18, 4),
    "large_decimal": pa.decimal128(38, 6),
}
_FLOATS = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-310, -1.5]
_TEXTS = ["", "a", "ab", "abc", "abcd", "żółć", "鍵", "🔑🗝", "\0", "e\u0301", "x" * 1000, "\uffff"]


def _value(name: str, type_: pa.DataType, random_: random.Random) -> Any:
    if random_.random() < 0.05:
        return None
    if pa.types.is_boolean(type_):
        return random_.random() < 0.5
    if pa.types.is_integer(type_):
        limit = 1 << (type_.bit_width - 1)
        return random_.choice([0, 1, -1, limit - 1, -limit, random_.randrange(-limit, limit)])
    if pa.types.is_floating(type_):
        value = random_.choice([*_FLOATS, random_.gauss(0, 1e6)])
        return float(np.float32(value)) if type_ == pa.float32() else value
    if pa.types.is_string(type_):
        return random_.choice(_TEXTS) + "".join(random_.choices("aż鍵🔑", k=random_.randrange(9)))
    if pa.types.is_binary(type_):
        return random_.randbytes(random_.randrange(20))
    if pa.types.is_date(type_):
        return datetime.date(1970, 1, 1) + datetime.timedelta(days=random_.randrange(-200_000, 200_000))
    if pa.types.is_timestamp(type_):
        at = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc if type_.tz else None)
        return at + datetime.timedelta(microseconds=random_.randrange(-(10**16), 10**16))
    digits = random_.randrange(1, type_.precision + 1)
    unscaled = random_.choice([1, -1]) * random_.randrange(10**digits)
    return Decimal(unscaled).scaleb(-type_.scale)


def _table(random_: random.Random) -> pa.Table:
    return pa.table(
        {
            name: pa.array([_value(name, type_, random_) for _ in range(_ROWS)], type_)
            for name, type_ in _TYPES.items()
        }
    )


def _columns(rows: pa.Table, names: list[str]) -> list[pa.Array]:
    return [rows.column(name).combine_chunks() for name in names]


def test_hash_and_shard_equal_those_of_spark(spark: SparkSession) -> None:
    random_ = random.Random(_SEED)
    rows = _table(random_)
    several = [random_.sample(sorted(_TYPES), random_.randrange(2, 5)) for _ in range(6)]
    groups = [[name] for name in _TYPES] + several
    frame = spark.createDataFrame(rows)
    found = frame.select(*(f.hash(*names).alias(f"h{n}") for n, names in enumerate(groups))).toArrow()
    for n, names in enumerate(groups):
        ours = hash_columns(_columns(rows, names))
        theirs = found.column(n).to_numpy()
        wrong = np.flatnonzero(ours != theirs)
        assert len(wrong) == 0, (names, rows.select(names).take(wrong[:3]).to_pylist())

    placed = frame.repartition(7, "text", "long").withColumn("shard", f.spark_partition_id()).toArrow()
    ours_placed = shards_of(_columns(placed, ["text", "long"]), 7)
    assert np.array_equal(ours_placed, placed.column("shard").to_numpy())
    assert len(set(ours_placed.tolist())) == 7


SHARDS = 3
STORE = "views"
#: A row of a live table: page and views.
_ROW = re.compile(r"^[+~ ]*(home|p\d+) +(\d+) ", re.MULTILINE)


class Pages:
    """A query that counts page views by page."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], folder: Path) -> None:
        self.spark = spark
        self.broker = broker
        self.source, self.sink = topic(1), topic(1)
        self.application = f"app-{self.sink}"
        self.state_dir = str(folder / "state")
        self.checkpoint = str(folder / "checkpoint")
        self.wanted: Counter[str] = Counter()
        self.aggregates: dict[str, Aggregate] = {"views": agg.count()}

    @property
    def connection(self) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.broker}

    def feed(self, pages: list[str]) -> None:
        """Sends rows in one transaction, so that they all land in the same batch."""
        producer = transaction(self.broker, f"feed-{self.source}")
        for page in pages:
            producer.produce(self.source, page)
        producer.commit_transaction(TIMEOUT_SECONDS)
        producer.close()
        await_stable(self.broker, self.source)  # else a query may end before it can read the rows
        self.wanted.update(pages)

    def start(self, shards: int = SHARDS, **trigger: Any) -> StreamingQuery:
        pages = (
            self.spark.readStream.format("kafka-eos")
            .options(**self.connection, subscribe=self.source, startingOffsets="earliest")
            .load()
            .select(f.col("value").cast("string").alias("page"))
        )
        counted = aggregate(
            pages,
            self.aggregates,
            options={
                **self.connection,
                "application.id": self.application,
                "state.dir": self.state_dir,
            },
            key="page",
            store=STORE,
            shards=shards,
        )
        changes = [name for name in counted.columns if name.startswith("__")]
        return (
            counted.select(f.col("page").alias("key"), f.col("views").cast("string").alias("value"), *changes)
            .writeStream.format("kafka-eos")
            .options(
                **self.connection,
                **{"application.id": self.application, "topic": self.sink},
                checkpointLocation=self.checkpoint,
            )
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )

    def run(self, shards: int = SHARDS) -> None:
        """Runs one batch over everything that was fed."""
        assert self.start(shards).awaitTermination(120)

    def frame(self, source: str, **more: str) -> DataFrame:
        """Returns the state as a DataFrame, read from the changelog or from the local databases."""
        where = self.connection if source == "changelog" else {"state.dir": self.state_dir}
        named = {"application.id": self.application, "storeName": STORE}
        return self.spark.read.format("kafka-eos-state").options(**{**where, **named, **more}).load()

    def query_state(self, **more: Any) -> StateQuery:
        return StateQuery(self.application, STORE, **more)


def views(frame: DataFrame) -> dict[str, int]:
    return {row.key.page: row.value.views for row in frame.collect()}


@pytest.fixture
def pages(spark: SparkSession, broker: str, topic: Callable[..., str], tmp_path: Path) -> Pages:
    return Pages(spark, broker, topic, tmp_path)


@pytest.mark.timeout(300)
def test_a_store_is_read_as_a_dataframe_and_by_lookups(pages: Pages) -> None:
    pages.feed(["home", "cart", "home", "żółć", "help"])
    pages.run()
    old = dict(pages.wanted)
    kafka = pages.connection
    early = pages.query_state(kafka=kafka)
    assert {row["key"]["page"]: row["value"]["views"] for row in early.all()} == old
    pages.feed(["cart", "new"])
    pages.run()
    copy = early._source._copy
    early.refresh()
    assert early._source._copy is copy, "it reads only what is new"
    assert {row["key"]["page"]: row["value"]["views"] for row in early.all()} == dict(pages.wanted)
    snapshot = early._snapshot
    early.refresh()
    assert early._snapshot is snapshot, "nothing was committed"
    early.close()

    of_changelog = pages.frame("changelog")
    assert of_changelog.schema.simpleString() == (
        "struct<key:struct<page:string>,value:struct<views:bigint>,partition_id:int>"
    )
    rows = of_changelog.collect()
    assert {row.key.page: row.value.views for row in rows} == dict(pages.wanted)
    placed = shards_of([pa.array([row.key.page for row in rows])], SHARDS).tolist()
    assert [row.partition_id for row in rows] == placed
    # the databases are one batch behind, because the last batch's changes are pending
    assert views(pages.spark.read.format("kafka-eos-state").load(pages.state_dir)) == old
    raw = pages.frame("changelog", raw="true")
    assert raw.schema.simpleString() == "struct<key:binary,value:binary,partition_id:int>"
    assert raw.count() == len(pages.wanted) + SHARDS, "one row per key, and one description in each shard"
    with pytest.raises(Exception, match="batchId is 0, but the state reflects batch 1"):
        pages.frame("changelog", batchId="0").count()
    with pytest.raises(AnalysisException, match="stateVarName is 'nothing'"):
        pages.frame("changelog", stateVarName="nothing")
    with pytest.raises(AnalysisException, match="no state of"):
        pages.frame("disk", **{"state.dir": pages.state_dir + "x"})

    for state in (pages.query_state(kafka=kafka), pages.query_state(kafka=kafka, state_dir=pages.state_dir)):
        with state:
            assert state.batch_id == 1
            assert {row["key"]["page"]: row["value"]["views"] for row in state.all()} == dict(pages.wanted)
            assert state.get("cart") == {"views": 2}
            assert state.get("nowhere") is None
            assert len({batch and batch.batch_id for batch in state.batches.values()}) == 1
    with pages.query_state(state_dir=pages.state_dir) as state:
        assert state.batch_id == 0
        assert state.get("cart") == {"views": 1}
    source = TopicPartition(pages.source, 0)
    pages.query_state(
        kafka=kafka, at_least={source: 7}
    ).close()  # a control record lies between the two transactions
    with pytest.raises(NotUpToBoundError, match=r"but not offset 99"):
        pages.query_state(kafka=kafka, at_least={source: 99}, timeout_ms=3_000)


class Notebook:
    """Stands in for IPython's ``display`` and its handle: keeps the text of all frames."""

    def __init__(self) -> None:
        self.frames: list[str] = []

    def __call__(self, frame: dict[str, str], **_: object) -> Notebook:
        self.frames.append(frame["text/plain"])
        return self

    update = __call__


@pytest.mark.timeout(300)
@pytest.mark.long
def test_state_is_read_before_and_after_its_query_changed(pages: Pages) -> None:
    """Readers see the groups that the changed query has not touched, and those that it has."""
    pages.feed(["home", "cart", "home"])
    pages.run()
    kafka = pages.connection
    with pages.query_state(kafka=kafka) as state:
        assert state.get("home") == {"views": 2}
        pages.aggregates = {"last": agg.max("page"), "views": agg.count()}
        pages.feed(["home", "help"])
        pages.run()
        wanted = {
            "home": {"last": "home", "views": 3},
            "cart": {"last": None, "views": 1},
            "help": {"last": "help", "views": 1},
        }
        state.refresh()
        assert {row["key"]["page"]: row["value"] for row in state.all()} == wanted
    found = {row.key.page: row.value.asDict() for row in pages.frame("changelog").collect()}
    assert found == wanted
    assert json.loads(command(pages, "get", "cart", "--json").output)["value"] == wanted["cart"]
    pages.aggregates = {"views": agg.max("page")}
    pages.feed(["cart"])
    with pytest.raises(StreamingQueryException, match=r"'views' was count\(\).*is now max\(page\)"):
        pages.run()
    found = {row.key.page: row.value.asDict() for row in pages.frame("changelog").collect()}
    assert found == wanted


@pytest.mark.timeout(300)
def test_lookups_while_the_query_runs_show_one_batch_each(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the query runs, each answer is the state of exactly one batch, and never of an earlier one.

    Databases and changelog are read in turn, and a live table reads both all the time.
    """
    pages.feed(["home"])
    query = pages.start(processingTime="0 seconds")
    notebook = Notebook()
    monkeypatch.setattr(live, "notebook_display", lambda: notebook)
    where = {"kafka": pages.connection, "state_dir": pages.state_dir}
    table = watch_state(query, STORE, 0.1, **where)  # type: ignore[arg-type]
    assert table is not None
    try:
        seen: list[int] = []
        fed = 1
        deadline = Deadline.after_seconds(200)
        states: dict[str | None, StateQuery] = {}
        for state_dir in cycle([pages.state_dir, None]):
            if fed == 8 or deadline.expired:
                break
            assert query.isActive, query.exception()
            try:
                if state_dir not in states:
                    states[state_dir] = pages.query_state(kafka=pages.connection, state_dir=state_dir)
                state = states[state_dir]
                state.refresh()
            except NotUpToBoundError:
                continue
            except Exception as error:
                if "does not exist" in str(error) or "no state of" in str(error):
                    continue  # the first task has not run yet
                raise
            found = {row["key"]["page"]: row["value"]["views"] for row in state.all()}
            seen.append(-1 if state.batch_id is None else state.batch_id)
            # each feed adds a new page, and a view of every page
            counts = sorted(found.values(), reverse=True)
            assert counts == list(range(len(counts), 0, -1)), found
            if len(counts) == fed:
                pages.feed(["home", *(f"p{n}" for n in range(fed))])
                fed += 1
        for state in states.values():
            state.close()
        assert fed == 8
        assert seen == sorted(seen)
        assert query.isActive, query.exception()
    finally:
        query.stop()
        table.stop()
    shown = [
        dict(_ROW.findall(frame)) for frame in notebook.frames if f"{pages.application} / {STORE}" in frame
    ]
    wholes = [{page: int(views) for page, views in rows.items()} for rows in shown if rows]
    assert len(wholes) > 1
    for counts in wholes:
        assert sorted(counts.values(), reverse=True) == list(range(len(counts), 0, -1)), counts
    sizes = [len(counts) for counts in wholes]
    assert sizes == sorted(sizes)


def words_of(pages: Pages, *words: object) -> list[str]:
    """Runs ``kafka-eos state …`` for the query's store."""
    named = [pages.application, "--store", STORE, "--bootstrap-servers", pages.broker]
    return ["state", *map(str, words), *named]


def command(pages: Pages, *words: object) -> Result:
    return CliRunner().invoke(main, words_of(pages, *words))


#: Failpoints in the order in which a rescale reaches them. Each process continues where the last was killed.
_STEPS = [
    "rescale.after_init",
    "rescale.between_topics",
    "rescale.before_commit",
    "rescale.after_commit",
    "rescale.between_topics",
    "rescale.after_remake",
    "rescale.before_commit",
    "rescale.after_commit",
]


@pytest.mark.fault("T135b", "the changelog topic grows, and the state is moved", "between two runs")
@pytest.mark.long
@pytest.mark.parametrize("shards", [SHARDS, 5])
def test_the_state_of_a_changelog_that_grew_is_found_and_moved(
    pages: Pages, admin: Admin, shards: int
) -> None:
    """The tokens name the number of shards: lookups find their keys, and a rescale moves the old shards."""
    names = [f"page-{n}" for n in range(100)]
    pages.feed(names + names[:30])
    pages.run()
    admin.grow(f"{pages.application}-{STORE}-changelog", 5)
    for name in names[:10]:
        shown = json.loads(command(pages, "get", name, "--json").output)
        assert shown["value"] == {"views": pages.wanted[name]}, name
    assert views(pages.frame("changelog")) == dict(pages.wanted)
    pages.feed(names[:20])
    for wrong in (SHARDS, 5):
        with pytest.raises((StateMismatchError, StreamingQueryException), match="STATE_MISMATCH"):
            pages.run(wrong)
    moved = command(pages, "rescale", "--shards", shards, "--yes")
    assert moved.exit_code == 0, moved.output
    assert f"copying {SHARDS} shards to {shards}" in moved.output
    pages.feed(names)
    pages.run(shards)
    assert views(pages.frame("changelog")) == dict(pages.wanted)


@pytest.mark.timeout(600)
@pytest.mark.fault("S09", "`kafka-eos state rescale` is killed", "between every two steps")
@pytest.mark.long
def test_a_killed_rescale_continues_to_more_and_to_fewer_shards(
    pages: Pages, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"page-{n}" for n in range(200)]
    pages.feed(names + names[:50])
    pages.run()
    assert "With --yes" in command(pages, "rescale", "--shards", 5).output
    to_five = words_of(pages, "rescale", "--shards", 5, "--yes")
    assert killed_at(_STEPS[:6], to_five)[0] == _STEPS[:6]
    assert "from 3 to 5 shards is under way" in command(pages, "rescale", "--shards", 4).output
    pages.feed(names[:70])
    with pytest.raises(StreamingQueryException, match="is being moved to 5 shards"):
        pages.run(5)
    assert killed_at(_STEPS[6:], to_five)[0] == _STEPS[6:]
    moved = command(pages, "rescale", "--shards", 5, "--yes")
    assert moved.exit_code == 0, moved.output
    assert "has 5 shards" in command(pages, "rescale", "--shards", 5).output
    assert not [each for each in admin.client.list_topics(timeout=10).topics if each.endswith("-rescale")]

    pages.run(5)
    frame = pages.frame("changelog")
    assert views(frame) == dict(pages.wanted)
    assert {row.partition_id for row in frame.collect()} == set(range(5))
    verified = command(pages, "verify", "--state-dir", pages.state_dir)
    assert verified.exit_code == 0, verified.output
    assert verified.output.count("identical") == 5

    fewer = command(pages, "rescale", "--shards", 2, "--yes")
    assert fewer.exit_code == 0, fewer.output
    restored = command(pages, "restore", "--state-dir", pages.state_dir, "--yes")
    assert restored.exit_code == 0, restored.output
    pages.feed(names)
    pages.run(2)
    with pages.query_state(kafka=pages.connection, state_dir=pages.state_dir) as state:
        assert state.shards == 2
        assert {row["key"]["page"]: row["value"]["views"] for row in state.all()} == dict(pages.wanted)
    shown = json.loads(command(pages, "get", "page-0", "--json").output)
    assert shown["value"] == {"views": pages.wanted["page-0"]}
    listed = json.loads(command(pages, "list", "--state-dir", pages.state_dir, "--json").output)
    assert {each["batch"] for each in listed["changelogs"]} == {2}
    written = read_back(pages.broker, pages.sink)
    assert len(written) == 200 + 70 + 200, "a row for each page of each batch"

    rival = KafkaClients({"bootstrap.servers": pages.broker}).producer(pages.application)

    def wakes_up(step: str) -> None:
        if step == "rescale.between_topics":
            rival.init(Deadline.after_seconds(30))

    monkeypatch.setattr("kafka_eos_source.runtime.failpoints.reach", wakes_up)
    refused = command(pages, "rescale", "--shards", 4, "--yes")
    rival.close()
    assert "is alive and took its transactional id back" in refused.output
    assert "nothing was changed" in refused.output
    assert views(pages.frame("changelog")) == dict(pages.wanted)

"""The mistakes of a new user, made in one session: what is printed, and when.

``pytest -s integration/test_mistakes.py`` prints the table in ``docs/troubleshooting.md``. The test asserts
the class of each error, what its text names, and how long it is, but no times.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from integration.support.kafka import Admin, produce
from integration.support.processes import await_condition
from integration.support.security import SecuredCluster
from kafka_eos_source.datasource.checks_on_server import check_on_server
from kafka_eos_source.datasource.start_checks import RunningQuery
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.state import CHANGELOG, deduplicate

_SECONDS = 150.0
#: A message has at most so many lines of so many characters.
_LINES, _COLUMNS = 15, 100
#: Where nothing listens.
_NOWHERE = "127.0.0.1:9"

Step = Callable[[DataFrame], DataFrame]


@dataclass
class Job:
    """A job that works, unless a test changes it.

    Attributes:
        read, write: options of the source and the sink.
        step: what is between them.
        operators: options of its operators, by store.
    """

    spark: SparkSession
    read: dict[str, str]
    write: dict[str, str]
    step: Step = lambda frame: frame.select("key", "value")
    operators: dict[str, dict[str, str]] = field(default_factory=dict)

    def frame(self) -> DataFrame:
        return self.step(self.spark.readStream.format("kafka-eos").options(**self.read).load())

    def start(self) -> StreamingQuery:
        return self.frame().writeStream.format("kafka-eos").options(**self.write).start()

    def run(self) -> None:
        """Runs the job until it fails, or has run a batch."""
        query = self.start()
        try:
            await_condition(lambda: not query.isActive or has_run(query), _SECONDS, "a batch")
            error = query.exception()
            if error is not None:
                raise error
        finally:
            query.stop()

    def check(self, *running: RunningQuery) -> list[str]:
        """Checks the job as App does, where Spark's driver runs."""
        schema = self.frame().schema
        return check_on_server(self.spark, [self.read], self.operators, self.write, schema, running)

    def stateful(self, store: str, application_id: str = "") -> Job:
        """Adds an operator with a store. Source and sink keep their own ``application.id``."""
        options = {"kafka.bootstrap.servers": self.read["kafka.bootstrap.servers"]}
        if application_id:
            options["application.id"] = application_id
        self.operators = {store: options}

        def step(frame: DataFrame) -> DataFrame:
            rows = frame.select("key", "value")
            found = deduplicate(rows, key="value", store=store, options=options, shards=1)
            return found.select("key", "value", CHANGELOG)

        self.step = step
        return self


def has_run(query: StreamingQuery) -> bool:
    return any(progress["numInputRows"] for progress in query.recentProgress)


@dataclass
class World:
    """Makes jobs.

    Attributes:
        orders, letters: topics with records; ``revenue``: the output.
    """

    spark: SparkSession
    broker: str
    secured: SecuredCluster
    folder: Path
    orders: str
    letters: str
    revenue: str
    jobs: int = 0

    def job(self, application_id: str = "", **common: str) -> Job:
        """Returns a job with a new checkpoint. ``common`` are options of source and sink, ``_`` for dots."""
        self.jobs += 1
        both = {"kafka.bootstrap.servers": self.broker}
        both |= {name.replace("_", "."): value for name, value in common.items()}
        own = {"application.id": application_id} if application_id else {}
        read = {**both, "subscribe": self.orders, "startingOffsets": "earliest"}
        checkpoint = str(self.folder / f"checkpoint-{self.jobs}")
        write = {**both, **own, "topic": self.revenue, "checkpointLocation": checkpoint}
        return Job(self.spark, read, write)


#: A mistake: prepares what came before, and returns the wrong job.
Make = Callable[[World], Job]


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the error that it must cause.

    Attributes:
        name: what the user did.
        make: the mistake.
        error: class of the error; "" = an error of Spark.
        said: what its text must contain.
        checked: whether `check_query` is asked; else ``load()`` fails before.
    """

    name: str
    make: Make
    error: str
    said: tuple[str, ...]
    checked: bool = True


def _typo_of_source(world: World) -> Job:
    job = world.job()
    job.read["startingOffset"] = "latest"
    return job


def _typo_of_sink(world: World) -> Job:
    job = world.job()
    job.write["aplication.id"] = "x"
    return job


def _address_of_sink(world: World) -> Job:
    job = world.job()
    job.write["kafka.bootstrap.servers"] = _NOWHERE
    return job


def _topic_of_source(world: World) -> Job:
    job = world.job()
    job.read["subscribe"] = world.orders[:-1]
    return job


def _topic_of_sink(world: World) -> Job:
    job = world.job()
    job.write["topic"] = world.revenue[:-1]
    return job


def _no_checkpoint(world: World) -> Job:
    job = world.job()
    del job.write["checkpointLocation"]
    return job


def _wrong_type(world: World) -> Job:
    job = world.job()
    job.step = lambda frame: frame.select("key", f.lit(1).alias("value"))
    return job


def _one_side(world: World) -> Job:
    return world.job().stateful("seen", f"one-{world.revenue}")


def _checkpoint_of_another(world: World) -> Job:
    first = world.job(f"first-{world.revenue}")
    first.run()
    job = world.job(f"second-{world.revenue}")
    job.write["checkpointLocation"] = first.write["checkpointLocation"]
    produce(world.broker, world.orders, ["another"], keys=["k"])
    return job


def _two_on_one_checkpoint(world: World) -> Job:
    first = world.job()
    query = first.start()
    await_condition(lambda: has_run(query) or not query.isActive, _SECONDS, "a batch")
    assert query.isActive
    job = world.job()
    job.read["subscribe"], job.write["checkpointLocation"] = world.letters, first.write["checkpointLocation"]
    return job


def _renamed(world: World) -> Job:
    application_id = f"renamed-{world.revenue}"
    first = world.job(application_id).stateful("seen", application_id)
    first.run()
    job = world.job(application_id).stateful("known", application_id)
    job.write["checkpointLocation"] = first.write["checkpointLocation"]
    produce(world.broker, world.orders, ["renamed"], keys=["k"])
    return job


def _password(world: World) -> Job:
    login = {
        name.replace(".", "_"): value for name, value in world.secured.options("alice", "wrong-3e").items()
    }
    return world.job(**login)


MISTAKES = (
    Mistake(
        "a typo in an option of the source",
        _typo_of_source,
        "InvalidOptionError",
        ("'startingoffset'", "Did you mean 'startingOffsets'"),
        checked=False,
    ),
    Mistake(
        "a typo in an option of the sink",
        _typo_of_sink,
        "InvalidOptionError",
        ("Did you mean 'application.id'",),
    ),
    Mistake(
        "a wrong address",
        lambda world: world.job(kafka_bootstrap_servers=_NOWHERE),
        "UnavailableError",
        (f"cannot connect to {_NOWHERE}: the connection was refused",),
        checked=False,
    ),
    Mistake(
        "a wrong address of the sink",
        _address_of_sink,
        "UnavailableError",
        (f"cannot connect to {_NOWHERE}: the connection was refused",),
    ),
    Mistake(
        "an address that does not resolve",
        lambda world: world.job(kafka_bootstrap_servers="no-such-host.invalid:9092"),
        "UnavailableError",
        ("cannot connect to no-such-host.invalid:9092: the host name does not resolve",),
        checked=False,
    ),
    Mistake(
        "a topic that the source does not find",
        _topic_of_source,
        "UnavailableError",
        ("does not exist", "Did you mean '{orders}'"),
        checked=False,
    ),
    Mistake(
        "a topic that the sink does not find",
        _topic_of_sink,
        "UnavailableError",
        ("looking up output topic", "does not exist", "Did you mean '{revenue}'"),
    ),
    Mistake("no checkpoint", _no_checkpoint, "", ("checkpointLocation",)),
    Mistake(
        "a column of the wrong type",
        _wrong_type,
        "InvalidSchemaError",
        ("column 'value' has type int", "cast"),
    ),
    Mistake(
        "`application.id` on one side",
        _one_side,
        "InvalidOptionError",
        ("different values of 'application.id'", "'one-{revenue}'"),
    ),
    Mistake(
        "the checkpoint of another query",
        _checkpoint_of_another,
        "InvalidOptionError",
        ("were committed with application.id='first-{revenue}'",),
    ),
    Mistake(
        "two queries on one checkpoint",
        _two_on_one_checkpoint,
        "DataLossError",
        ("this is probably the checkpoint of another query",),
    ),
    Mistake(
        "a renamed store",
        _renamed,
        "StateMismatchError",
        ("store 'known'", "set its store to 'seen' again"),
    ),
    Mistake(
        "a wrong password",
        _password,
        "AuthorizationError",
        ("SASL_AUTHENTICATION_FAILED", "kafka.sasl.password"),
        checked=False,
    ),
)


@dataclass(frozen=True)
class Printed:
    """What a user saw, and after how many seconds."""

    text: str
    seconds: float

    @property
    def own(self) -> list[str]:
        """The lines of our message, as a notebook wraps them."""
        ours = [line for line in self.text.splitlines() if "[KAFKA_EOS" in line]
        return textwrap.wrap(ours[-1], _COLUMNS) if ours else []

    @property
    def lines(self) -> int:
        return sum(max(1, len(textwrap.wrap(line, _COLUMNS))) for line in self.text.splitlines())


def printed(call: Callable[[], Any]) -> Printed:
    """Calls something that fails, and returns what is printed."""
    begun = time.monotonic()
    with pytest.raises((PySparkException, KafkaEosError)) as caught:
        call()
    seconds = time.monotonic() - begun
    is_ours = isinstance(caught.value, KafkaEosError)  # then a notebook prints the class, too
    return Printed(f"{type(caught.value).__name__ + ': ' if is_ours else ''}{caught.value}", seconds)


def expect(found: Printed, mistake: Mistake, names: Mapping[str, str]) -> None:
    for said in mistake.said:
        assert said.format(**names) in found.text, mistake.name
    assert "wrong-3e" not in found.text
    if mistake.error:
        assert f"{mistake.error}: [KAFKA_EOS." in found.text, mistake.name
        assert "Fix: " in found.text
        assert 0 < len(found.own) <= _LINES, (mistake.name, found.own)
        assert "site-packages/confluent" not in found.text


def test_each_mistake_is_named_with_its_fix(
    spark: SparkSession,
    broker: str,
    admin: Admin,
    secured_cluster: SecuredCluster,
    topic: Callable[..., str],
    tmp_path: Path,
) -> None:
    world = World(spark, broker, secured_cluster, tmp_path, topic(), topic(), topic())
    for each in (world.orders, world.letters):
        produce(broker, each, ["a", "b"], keys=["k", "k"])
    ready = world.job()
    ready.run()
    begun = time.monotonic()
    assert ready.check() == []
    rows = [f"a job without a mistake: {time.monotonic() - begun:.1f} s"]
    for mistake in MISTAKES:
        job = mistake.make(world)
        checked = None
        if mistake.error and mistake.checked:
            job.frame()  # not measured: the user has it already
            checked = printed(job.check)
            expect(checked, mistake, vars(world))
        plain = printed(job.run)
        expect(plain, mistake, vars(world))
        for query in spark.streams.active:
            query.stop()
        seconds = "" if checked is None else f"{checked.seconds:.1f}"
        rows.append(
            f"| {mistake.name} | {seconds} | {plain.seconds:.1f} | {len(plain.own)} | {plain.lines} |"
            f" {' '.join(plain.own) or plain.text}"
        )
    print("", *rows, sep="\n")
    assert not {world.orders[:-1], world.revenue[:-1]} & set(admin.client.list_topics(timeout=30).topics)


def test_two_queries_of_a_session_on_one_checkpoint_are_told_apart_by_their_names(
    spark: SparkSession,
    broker: str,
    topic: Callable[..., str],
    secured_cluster: SecuredCluster,
    tmp_path: Path,
) -> None:
    """Spark refuses the same name. With another one, it would stop the first query without a word."""
    world = World(spark, broker, secured_cluster, tmp_path, topic(), topic(), topic())
    produce(broker, world.orders, ["a"], keys=["k"])
    job = world.job()
    job.write["queryName"] = "revenue"
    query = job.start()
    try:
        await_condition(lambda: has_run(query) or not query.isActive, _SECONDS, "a batch")
        running = RunningQuery(str(query.id), "revenue")
        with pytest.raises(InvalidOptionError, match=r"the query 'revenue' \(.*\) already runs"):
            job.check(running)
        with pytest.raises(PySparkException, match="with name revenue"):
            job.start()
        job.write["queryName"] = "audit"
        with pytest.raises(InvalidOptionError, match="is the checkpoint of query 'revenue'"):
            job.check(running)
    finally:
        query.stop()

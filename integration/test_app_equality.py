"""A query of an `App` writes the same bytes whether the tasks that read make its records, or Spark does."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from integration.support.driver import run_until_killed
from integration.support.kafka import Admin, end_offsets, produce, read_back
from kafka_eos_source import App
from kafka_eos_source.protocol.identity import group_of

pytest.importorskip("duckdb")

_TEXTS = [
    "",
    "a",
    'quo"te',
    "back\\slash",
    "tab\tnew\nline",
    "\u2028",
    "Zürich",
    "日本",
    "🛫",
    "\x01",
    "a/b",
    "<&>",
]
#: Their text must not depend on the version of Java, so they have few digits.
_NUMBERS = [0.0, -0.0, 1.5, -2.25, 1e10, 1e-5, 12345678.0, 0.001, float("inf"), float("nan")]


class Chance:
    """Random types, and random JSON values of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> StructType:
        """Returns fields of all plain types and some nested ones, in random order."""
        types = [*self._plain(), *(self._nested(3) for _ in range(4))]
        self._random.shuffle(types)
        return StructType([StructField(f"f{n}", each) for n, each in enumerate(types)])

    def _plain(self) -> list[DataType]:
        types: list[DataType] = [
            StringType(),
            IntegerType(),
            LongType(),
            BooleanType(),
            DoubleType(),
            DateType(),
        ]
        types += [TimestampType(), TimestampNTZType(), BinaryType(), DecimalType(20, 4), DecimalType(38, 18)]
        return types

    def _nested(self, depth: int) -> DataType:
        kind = self._random.choice(["struct", "array", "map"] if depth else ["plain"])
        if kind == "plain":
            return self._random.choice(self._plain())
        below = [self._nested(self._random.randrange(depth)) for _ in range(self._random.randint(1, 3))]
        if kind == "array":
            return ArrayType(below[0])
        if kind == "map":
            return MapType(StringType(), below[0])
        return StructType([StructField(f"g{n}", each) for n, each in enumerate(below)])

    def document(self, schema: StructType) -> str:
        row = {each.name: self.value(each.dataType) for each in schema if self._random.random() < 0.9}
        return json.dumps(row, ensure_ascii=self._random.random() < 0.5)

    def value(self, type_: DataType) -> Any:
        pick = self._random
        if pick.random() < 0.15:
            return None
        if isinstance(type_, StructType):
            return {each.name: self.value(each.dataType) for each in type_ if pick.random() < 0.8}
        if isinstance(type_, ArrayType):
            return [self.value(type_.elementType) for _ in range(pick.randrange(4))]
        if isinstance(type_, MapType):
            return {
                f"{pick.choice(_TEXTS)}{n}": self.value(type_.valueType) for n in range(pick.randrange(4))
            }
        if isinstance(type_, StringType):
            return "".join(pick.choices(_TEXTS, k=2))
        if isinstance(type_, IntegerType):
            return pick.randint(-(2**31), 2**31 - 1)
        if isinstance(type_, LongType):
            return pick.randint(-(2**63), 2**63 - 1)
        if isinstance(type_, BooleanType):
            return pick.random() < 0.5
        if isinstance(type_, DoubleType):
            number = pick.choice(_NUMBERS)
            return number if number - number == 0 else {"inf": "Infinity", "nan": "NaN"}[str(number)]
        if isinstance(type_, DateType):
            return f"{pick.randint(1600, 2400)}-{pick.randint(1, 12):02}-{pick.randint(1, 28):02}"
        if isinstance(type_, DecimalType):
            return round(pick.uniform(-1e6, 1e6), pick.randrange(4))
        if isinstance(type_, BinaryType):
            return pick.choice(["", "AA==", "3q2+7w=="])
        day = f"{pick.randint(1900, 2100)}-{pick.randint(1, 12):02}-{pick.randint(1, 28):02}"
        time = f"T{pick.randrange(24):02}:{pick.randrange(60):02}:{pick.randrange(60):02}"
        fraction = pick.choice(["", ".5", ".123", ".123456"])
        zone = pick.choice(["", "Z", "+05:30"]) if isinstance(type_, TimestampType) else ""
        return day + time + fraction + zone


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_both_ways_write_the_same_bytes(
    broker: str, spark: SparkSession, topic: Callable[..., str], checkpoint: str, zone: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Random schemas and documents; the seed is in the name of the fields' topic if it fails."""
    seed = random.randrange(1 << 32)
    chance = Chance(seed)
    schema = chance.schema()
    source = topic()
    values = [chance.document(schema) for _ in range(300)]
    produce(broker, source, values, keys=[f"k{n}" for n in range(len(values))])
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", zone)
    plain = [
        each.name for each in schema if isinstance(each.dataType, (TimestampType, LongType, DecimalType))
    ]
    as_key = chance._random.choice(["key", plain[0], plain, [plain[-1], "key"]])
    written = []
    for step in (lambda frame: frame, lambda frame: frame.where(sf.lit(True))):
        target = topic()
        name = f"same-{uuid.uuid4().hex[:8]}"
        app = App(name, broker, checkpoint=f"{checkpoint}-{name}", spark=session)
        rows = app.sql("SELECT * FROM {rows}", rows=step(app.read(source, schema=schema, keep="key")))
        app.explain(step(rows), target, key=as_key)
        app.write(step(rows), target, key=as_key).trigger(availableNow=True).start().awaitTermination()
        written.append([(each.key, each.value) for each in read_back(broker, target)])
    said = capsys.readouterr().out
    assert said.count("no row passes through Spark") == 1, said
    assert len(written[0]) == len(values)
    for ours, theirs in zip(*written, strict=True):
        assert ours == theirs, f"seed {seed}, schema {schema.simpleString()}"


@pytest.mark.fault("T490", "SIGKILL to a worker", "A reading task runs SQL and stages the records")
@pytest.mark.fault("T491", "SIGKILL to the driver", "Records that reading tasks made by SQL just committed")
@pytest.mark.timeout(600)
def test_sql_in_the_read_is_exact_although_worker_and_driver_are_killed_and_the_way_changes(
    broker: str, admin: Admin, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    """Mutation: without the token check, the rows of the batch that had committed are written twice."""
    source, target = topic(2), topic(2)
    produce(broker, source, [json.dumps({"n": n}) for n in range(300)], keys=[f"k{n}" for n in range(300)])
    app = {
        "id": f"app-{target}",
        "brokers": broker,
        "checkpoint": checkpoint,
        "source": source,
        "schema": "n INT",
        "sql": "SELECT key, n, n * 2 AS twice FROM {rows} WHERE n % 3 = 0",
        "options": {"maxOffsetsPerTrigger": "100"},
        "write": {"topic": target, "key": "key"},
    }
    armed = {"read.after_transform": "kill-worker", "commit.after_commit": "kill"}
    killed = run_until_killed(driver, {"app": app, "restarts": 1}, tmp_path, armed)
    assert "QUERY FAILED" in killed.log.read_text(), "the killed worker ended the first run of the query"
    driver({"app": {**app, "through_spark": True}}).finish()
    found = sorted(json.loads(each.value or b"")["n"] for each in read_back(broker, target))
    assert found == list(range(0, 300, 3))
    group, ends = admin.group(group_of(app["id"])), end_offsets(broker, source)
    assert {number: group[(source, number)][0] for number in ends} == ends

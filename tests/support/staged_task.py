"""One task of a query whose rows go to Kafka and to two sinks outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from kafka_eos_source.protocol import records
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.sinks.row_checks import LongestText, RowRule
from kafka_eos_source.sinks.specs import SinkSpec
from kafka_eos_source.spark.arrow import SEALED, arrow_schema
from kafka_eos_source.spark.schema import ORIGIN, ORIGIN_TYPE, check_frame, only_changelog
from kafka_eos_source.stage.fanout import Plan, StagedForSink
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.row_rules import RecordLimits
from kafka_eos_source.stage.staging import SealingPlan, sealed_batches
from kafka_eos_source.stage.task import KeptRows, StagedTask, Staging

#: A frame whose rows go to Kafka and to two sinks outside of it.
FRAME = StructType(
    [
        StructField("key", StringType()),
        StructField("value", StringType()),
        StructField("id", LongType()),
        StructField("sink", StringType()),
        StructField(CHANGELOG, BinaryType()),
        StructField(ORIGIN, ORIGIN_TYPE),
    ]
)
TABLE, FILES = (
    SinkSpec("table", "memory", columns=("id", "value")),
    SinkSpec("files", "memory", columns=("id",)),
)
OF_TABLE: dict[str, tuple[RowRule, ...]] = {
    "table": (LongestText(column="value", most=5, of="varchar(5) of table 't'"),)
}


def frame(rows: Sequence[dict[str, Any]], packets: Sequence[bytes] = ()) -> pa.RecordBatch:
    """Returns rows, each with an id, as Spark passes them; packets are rows of their own."""
    full = [
        {
            "key": "k",
            "value": f"v{row['id']}",
            ORIGIN: {"topic": "in", "partition": 0, "offset": row["id"] * 10, "timestamp": 0},
            **row,
        }
        for row in rows
    ]
    return pa.RecordBatch.from_pylist(
        [*full, *({CHANGELOG: packet} for packet in packets)], arrow_schema(FRAME)
    )


@dataclass
class Letter:
    about: DeadLetter
    key: bytes | None
    value: bytes | None


@dataclass
class Task:
    """One query, and what a task of it stages."""

    folder: StagingFolder
    kafka: bool = True
    sets_aside: bool = True
    refusing: tuple[str, ...] = ("table",)
    rules: dict[str, tuple[RowRule, ...]] | None = None
    inline: int = 1 << 20
    sealing: SealingPlan | None = None
    frame: StructType = FRAME
    sinks: tuple[SinkSpec, ...] = (TABLE, FILES)

    @property
    def staging(self) -> Staging:
        plan = Plan.of(self.sinks, self.frame, kafka=self.kafka)
        plan = replace(
            plan,
            rules=OF_TABLE if self.rules is None else self.rules,
            refusing=frozenset(self.refusing),
            sets_aside=self.sets_aside,
        )
        topic = "out" if self.kafka else None
        return Staging(
            columns=check_frame(self.frame, topic_option="out", include_timestamp=False)
            if self.kafka
            else only_changelog(self.frame),
            folder=self.folder,
            batch="7",
            inline_bytes=self.inline,
            run_id="run",
            topic=topic,
            sealing=self.sealing,
            limits=RecordLimits(20_000) if self.sets_aside else None,
            dead_letter_topic="dead" if self.sets_aside else None,
            origin={records.APPLICATION: "app"},
            plan=plan,
            application_id="app",
            cluster_id="cluster",
        )

    def kept(self, *tasks: StagedTask) -> KeptRows:
        return KeptRows(self.folder, "7", tasks)

    def records(self, task: StagedTask) -> list[str]:
        """Returns the values of the rows that go to Kafka."""
        found = []
        for batch in StagedRows(self.folder, "7", [task.part]).batches():
            if SEALED in batch.schema.names:
                found += [f"sealed {partition}" for partition, _ in sealed_batches(batch)]
            else:
                found += [(each or b"").decode() for each in batch["value"].to_pylist()]
        return found

    def letters(self, task: StagedTask) -> list[Letter]:
        found = []
        for batch in StagedRows(self.folder, "7", task.dead_letters).batches():
            for row in batch.to_pylist():
                headers = [(each["key"], each["value"]) for each in row["headers"]]
                found.append(Letter(DeadLetter.parse(headers), row["key"], row["value"]))
        return found

    def of_sink(self, name: str, *tasks: StagedTask) -> list[int]:
        """Returns the ids of the rows that a sink gets."""
        plan = self.staging.plan
        assert plan is not None
        (route,) = (each for each in plan.routes if each.spec.name == name)
        parts = [part for task in tasks for part in task.sinks if part.sink == name]
        staged = StagedForSink(self.folder, "7", route.schema, parts)
        found = [each for batch in staged.batches() for each in batch["id"].to_pylist()]
        assert staged.rows == len(found)
        assert all(batch.schema == route.schema for batch in staged.batches())
        return found

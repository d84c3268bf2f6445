"""Rows that the tasks which read stage themselves (``write=`` of `map_in_read`), and their reports."""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from kafka_eos_source.commit import at_least_once, micro_batch
from kafka_eos_source.datasource import KafkaEosDataSource, sink, writer
from kafka_eos_source.datasource.sink import StagingPlan, StagingTask
from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidRecordError,
    InvalidSchemaError,
    RestartQueryError,
    StagedReadError,
    UnavailableError,
)
from kafka_eos_source.in_read import frame as in_read_frame
from kafka_eos_source.in_read.staged import STAGED, staged_frame, staged_frame_schema
from kafka_eos_source.in_read.step import MapInRead, ReadColumn, ReadColumns, packed_frame_schema
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.options.parse import parse_read, parse_sink_in_read, parse_write
from kafka_eos_source.options.table import SINK_IN_READ
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.read.fetch import ReadSettings
from kafka_eos_source.read.settings import schema_of
from kafka_eos_source.read.task import TaskRead
from kafka_eos_source.runtime import folders
from kafka_eos_source.secrets import bare_url
from kafka_eos_source.spark.arrow import arrow_schema
from kafka_eos_source.spark.pickled import to_bytes
from kafka_eos_source.spark.schema import INVALID
from kafka_eos_source.spark.worker import StreamingTask
from kafka_eos_source.stage import row_rules, staging
from kafka_eos_source.stage.row_rules import RecordLimits

TP = TopicPartition("t", 0)
ROWS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
pytestmark = pytest.mark.usefixtures("unknown_topic_limits")

READ = {"subscribe": "t", "kafka.bootstrap.servers": "h:1"}
START, END = SourcePosition({TP: 0}, {TP: 0}), SourcePosition({TP: 30}, {TP: 0})
RANGES = [(OffsetRange(TP, 0, 10),), (OffsetRange(TP, 10, 30),)]


class Query:
    """A streaming query that is at one batch: its checkpoint, and the task that runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
        self.checkpoint = folder / "checkpoint"
        self.task = StreamingTask("query", "0", "run")
        self.sink = {
            "kafka.bootstrap.servers": "b:9092",
            "topic": "out",
            "checkpointLocation": str(self.checkpoint),
            "application.id": "app",
        }
        self.plan_batch(0, END)
        (self.checkpoint / "metadata").write_text('{"id":"query"}')
        monkeypatch.setattr(sink, "running_task", lambda: self.task)
        monkeypatch.setattr(sink, "running_task", lambda: self.task)
        monkeypatch.setattr(at_least_once, "check_target", lambda options: None)

    def plan_batch(self, batch_id: int, end: SourcePosition) -> None:
        log = self.checkpoint / "offsets"
        log.mkdir(parents=True, exist_ok=True)
        (log / str(batch_id)).write_text(f'v1\n{{"batchTimestampMs":{batch_id}}}\n{end.to_json()}')

    def tasks(self, rows: StructType = ROWS, frame: str = "frame", **options: str) -> list[StagingTask]:
        """Returns the reading tasks of the batch, as they arrive in their workers."""
        plan = StagingPlan(frame, rows, parse_sink_in_read({**self.sink, **options}), lossy=False)
        found = plan.tasks(START.to_dict(), END.to_dict(), RANGES)
        return [each for each in pickle.loads(pickle.dumps(found)) if isinstance(each, StagingTask)]

    def writer(self, rows: StructType = ROWS, **options: str) -> Any:
        """Returns the writer of the batch in a task of the sink."""
        sink = parse_write({**self.sink, **options}, streaming=True)
        made = writer.stream_writer(sink, staged_frame_schema(rows, sink))
        return pickle.loads(pickle.dumps(made))


@pytest.fixture
def query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Query:
    return Query(tmp_path, monkeypatch)


def rows_of(*values: str, schema: StructType = ROWS) -> Iterator[pa.RecordBatch]:
    columns = [pa.array([each.encode() for each in values], pa.binary())] * 2
    if len(schema) > 2:
        columns.append(pa.array([None if each < "x" else "bad" for each in values], pa.string()))
    yield pa.RecordBatch.from_arrays(columns, schema=arrow_schema(schema))


def reports(query: Query, **options: str) -> list[pa.RecordBatch]:
    return [batch for task in query.tasks(**options) for batch in task.run(rows_of("a", "b"))]


def committed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records what the sink passes to the commit."""
    calls: list[dict[str, Any]] = []

    def commit(*arguments: Any) -> None:
        names = ["options", "folder", "tasks", "batch_id", "plan", "planned", "reads", "staging"]
        call = dict(zip(names, arguments, strict=True))
        call["parts"] = [part for task in call["tasks"] for part in task.parts]
        call["sink_parts"] = [part for task in call["tasks"] for part in task.sinks]
        calls.append(call)

    monkeypatch.setattr(micro_batch, "commit_micro_batch", commit)
    return calls


@pytest.mark.parametrize("as_rows", [True, False], ids=["PySpark 4.0", "Arrow"])
def test_the_commit_gets_the_parts_of_the_tasks_that_read_in_their_order(
    query: Query, as_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_rows:
        monkeypatch.setattr(writer, "_StreamArrowWriter", None)
    calls = committed(monkeypatch)
    first, second = reports(query)
    messages = []
    for batch in (second, first):  # a shuffle may pass them on in another order
        given = [(bytearray(batch[STAGED][0].as_py()),)] if as_rows else [batch]
        messages.append(query.writer().write(iter(given)))
    query.writer().commit(messages, 0)
    (call,) = calls
    assert [part.rows for part in call["parts"]] == [2, 2]
    assert [part.run_id for part in call["parts"]] == ["run", "run"]
    assert [(each.task, each.ranges) for each in call["reads"]] == list(enumerate(RANGES))
    assert len({each.task_attempt_id for each in call["reads"]}) == 2
    staged = pa.ipc.open_stream(call["parts"][0].inline).read_all().to_pylist()
    assert staged == [{"key": b"a", "value": b"a"}, {"key": b"b", "value": b"b"}]
    assert {each.batch_id for each in call["planned"]} == {0}


def test_reports_may_arrive_in_a_large_column(query: Query) -> None:
    """Spark passes such columns with ``spark.sql.execution.arrow.useLargeVarTypes``."""
    large = [pa.record_batch([each.column(0).cast(pa.large_binary())], [STAGED]) for each in reports(query)]
    found = query.writer().write(iter(large)).reports
    assert [each.read.ranges for each in found] == RANGES


def test_a_task_of_the_sink_without_reports_stages_an_empty_part_with_the_id_of_the_run(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that only renews the token has no reading tasks, but its token names the run."""
    calls = committed(monkeypatch)
    query.writer().commit([query.writer().write(iter(()))], 0)
    assert [(part.rows, part.run_id) for part in calls[0]["parts"]] == [(0, "run")]
    assert calls[0]["reads"] == []


def test_rows_of_other_frames_are_committed_without_a_check_of_reports(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = committed(monkeypatch)
    made: Any = writer.stream_writer(parse_write(query.sink, streaming=True), ROWS)
    made.commit([made.write(rows_of("a"))], 0)
    assert calls[0]["reads"] is None


def test_a_task_without_rows_reports_too(query: Query) -> None:
    """Otherwise nobody could tell an empty result from a lost report."""
    (batch,) = query.tasks()[0].run(iter(()))
    (report,) = query.writer().write(iter([batch])).reports
    assert report.staged.part.rows == 0
    assert report.read.ranges == RANGES[0]


def test_a_batch_without_anything_to_read_has_no_tasks_unless_its_position_moved(query: Query) -> None:
    plan = StagingPlan("frame", ROWS, parse_sink_in_read(query.sink), lossy=False)

    def tasks(start: SourcePosition, end: SourcePosition) -> int:
        return len(plan.tasks(start.to_dict(), end.to_dict(), []))

    assert tasks(END, END) == 0
    assert tasks(END, SourcePosition({TP: 30}, {TP: 0}, tick=1)) == 0
    assert tasks(START, SourcePosition({TP: 30}, {TP: 0}, jump=True)) == 0
    # with failOnDataLoss=false, nothing may be left of a batch; one report says so
    assert tasks(START, SourcePosition({TP: 30}, {TP: 0}, lossy=True)) == 1


def _with_a_last_row(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
    yield from rows_of("last")


def test_the_function_is_not_called_for_a_batch_of_which_nothing_is_left() -> None:
    """Without ``write=``, such a batch has no task, and so the function adds no row."""
    columns = ReadColumns((ReadColumn("key", "key"), ReadColumn("value", "value")))
    step = MapInRead(columns, ROWS, to_bytes(_with_a_last_row, "it", fix=""), "frame")
    read = TaskRead(ReadSettings(conf={}), step)
    assert list(read.mapped(())) == []


def test_dead_letters_and_sinks_outside_kafka_are_staged_in_the_read(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RecordLimits(100_000, 1, needs_key=False, before_ms=None, after_ms=None)
    monkeypatch.setattr(row_rules, "record_limits", lambda *_: limits)
    calls = committed(monkeypatch)
    marked = StructType([*ROWS.fields, StructField(INVALID, StringType())])
    sink = {
        "onInvalidRecord": "dead-letter",
        "deadLetter.topic": "dead",
        "sinks": "files",
        "sink.files.type": "filesystem",
        "sink.files.path": str(tmp_path / "files"),
        "sink.files.columns": "value",
    }
    monkeypatch.setattr("kafka_eos_source.commit.open_sinks.cluster_id", lambda *_, **_more: "cluster")
    monkeypatch.setattr("kafka_eos_source.commit.open_sinks.make_ready", lambda _, plan: plan)
    batches = [
        batch for task in query.tasks(marked, **sink) for batch in task.run(rows_of("a", "x", schema=marked))
    ]
    query.writer(marked, **sink).commit([query.writer(marked, **sink).write(iter(batches))], 0)
    (call,) = calls
    assert [(part.rows, part.dead_letters) for part in call["parts"]] == [(1, 0), (1, 1)] * 2
    assert [(part.sink, part.rows) for part in call["sink_parts"]] == [("files", 1)] * 2
    assert call["options"].kafka["batch.size"], "as for a task of the sink, batches fit the topics"


def test_the_commit_knows_the_columns_of_each_frame_of_a_union(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink only gets the schema of one of the frames, and not what their planners knew."""
    calls, refusing = committed(monkeypatch), iter([{"db"}, set(), set()])
    monkeypatch.setattr("kafka_eos_source.commit.open_sinks.cluster_id", lambda *_, **_more: "cluster")
    monkeypatch.setattr(
        "kafka_eos_source.commit.open_sinks.make_ready",
        lambda _, plan: replace(plan, refusing=frozenset(next(refusing, ()))),
    )
    sink = {"sinks": "db", "sink.db.type": "memory", "sink.db.columns": "key,value"}
    turned = StructType(list(reversed(ROWS.fields)))
    found = [
        (rows, list(task.run(rows_of("a", schema=rows))))
        for rows, frame in ((ROWS, "a"), (turned, "b"))
        for task in query.tasks(rows, frame, **sink)
    ]
    batches = [batch for _, of_task in found for batch in of_task]
    message = query.writer(ROWS, **sink).write(iter(reversed(batches)))
    assert [bool(each.rows) for each in message.reports] == [False, True] * 2, "once for each frame"
    assert {each.staged.plan for each in message.reports} == {None}, "it has the options of sinks"
    query.writer(ROWS, **sink).commit([message], 0)
    tasks = calls[0]["tasks"]
    assert [(each.columns.key, each.columns.value) for each in tasks] == [(0, 1)] * 2 + [(1, 0)] * 2
    assert [each.plan.routes[0].columns for each in tasks] == [(0, 1)] * 2 + [(1, 0)] * 2
    assert [each.plan.refusing for each in tasks] == [{"db"}] * 2 + [frozenset()] * 2
    query.writer(ROWS, **sink).commit([replace(message, reports=message.reports[2:])], 0)
    assert {each.plan.routes[0].columns for each in calls[1]["tasks"]} == {(0, 1)}
    query.writer(ROWS, **sink).commit([replace(message, reports=message.reports[:1])], 0)
    assert calls[2]["tasks"][0].plan is None, "the report that has the schema is missing"


def test_an_aborted_batch_deletes_the_files_of_the_tasks_that_read(query: Query) -> None:
    batches = reports(query, **{"staging.inline.bytes": "0"})
    message = query.writer(**{"staging.inline.bytes": "0"}).write(iter(batches))
    staging = query.checkpoint / "kafka-eos" / "staging" / "0"
    assert len(list(staging.glob("*.arrow"))) == 2
    query.writer(**{"staging.inline.bytes": "0"}).abort([message, None], 0)
    assert list(staging.glob("*.arrow")) == []


def test_a_task_that_fails_leaves_no_file(query: Query) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from rows_of("a")
        raise InvalidRecordError("no")

    with pytest.raises(InvalidRecordError):
        list(query.tasks(**{"staging.inline.bytes": "0"})[0].run(failing()))
    assert list(query.checkpoint.rglob("*.arrow")) == []


def test_the_driver_asks_before_the_tasks_are_pickled(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark tells Spark the number of tasks before it pickles them, so an error would be lost there."""

    def unreachable(*_: Any) -> Any:
        raise UnavailableError("the brokers do not answer")

    options = parse_sink_in_read({**query.sink, "onInvalidRecord": "drop"})
    plan = StagingPlan("frame", ROWS, options, lossy=False)
    limits = RecordLimits(100_000, 1, needs_key=False, before_ms=None, after_ms=None)
    monkeypatch.setattr(row_rules, "record_limits", lambda *_: limits)
    found = plan.tasks(START.to_dict(), END.to_dict(), RANGES)
    for module, name in (
        (row_rules, "record_limits"),
        (staging, "sealing_plan"),
        (sink.offset_log, "newest"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, unreachable)
            pickle.dumps(found)
            with pytest.raises(UnavailableError, match="do not answer"):
                plan.tasks(START.to_dict(), END.to_dict(), RANGES)


# -- identity --------------------------------------------------------------------------------------


def test_a_frame_that_another_query_reads_is_refused_in_its_tasks(query: Query) -> None:
    tasks = query.tasks()
    query.task = StreamingTask("other", "0", "run")
    with pytest.raises(InvalidOptionError, match="query other reads the frame"):
        list(tasks[0].run(rows_of("a")))


@pytest.mark.parametrize("running", ["1", "7"])
def test_a_task_for_another_batch_than_the_newest_in_the_log_is_refused(query: Query, running: str) -> None:
    tasks = query.tasks()
    query.task = StreamingTask("query", running, "run")
    with pytest.raises(
        RestartQueryError, match=f"reads for batch {running}, but .* is at batch 0"
    ) as refused:
        list(tasks[0].run(rows_of("a")))
    assert "asyncProgressTrackingEnabled" in str(refused.value)


def test_a_checkpoint_that_does_not_exist_is_refused_on_the_driver(query: Query) -> None:
    with pytest.raises(InvalidOptionError, match="holds no checkpoint"):
        query.tasks(checkpointLocation=f"{query.checkpoint}-2")


@pytest.mark.parametrize(
    "task",
    [
        StreamingTask("query", "1", "run"),
        StreamingTask("query", "0", "run 2"),
        StreamingTask("q", "0", "run"),
    ],
)
def test_a_report_of_another_batch_run_or_query_is_refused(query: Query, task: StreamingTask) -> None:
    (batch, _) = reports(query)
    query.task = task
    with pytest.raises(StagedReadError, match="is no report of a task that read"):
        query.writer().write(iter([batch]))


@pytest.mark.parametrize("value", [b"", b"x" * 31, b"x" * 200, pickle.dumps("not signed")])
def test_bytes_of_strangers_are_never_unpickled(query: Query, value: bytes) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([value])], names=[STAGED])
    with pytest.raises(StagedReadError, match="is no report"):
        query.writer().write(iter([batch]))


# -- options ---------------------------------------------------------------------------------------

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"topic": "other"}, "'topic' is 'other' here and 'out' there"),
        ({"application.id": "app-2"}, "'application.id'"),
        ({"checkpointLocation": "/other"}, "'checkpointLocation'"),
        ({"staging.location": "/other"}, "'staging.location'"),
        ({"staging.inline.bytes": "7"}, "'staging.inline.bytes'"),
        ({"processing.guarantee": "at_least_once"}, "'processing.guarantee' is 'at_least_once' here"),
        ({"kafka.compression.type": "lz4"}, "'kafka.compression.type' is lz4 here and not set there"),
        ({"onInvalidRecord": "drop"}, "'onInvalidRecord'"),
        (
            {"sinks": "files", "sink.files.type": "filesystem", "sink.files.path": "/f"},
            r"'sink\.files' is type=filesystem",
        ),
    ],
)
def test_a_frame_that_was_staged_for_other_options_is_refused_and_they_are_named(
    query: Query, options: dict[str, str], named: str
) -> None:
    schema = staged_frame_schema(ROWS, parse_sink_in_read(query.sink))
    with pytest.raises(InvalidOptionError, match=named):
        writer.stream_writer(parse_write({**query.sink, **options}, streaming=True), schema)


def test_options_that_only_the_commit_uses_may_differ(query: Query) -> None:
    """A person adds them for one restart, where they are documented: on the sink."""
    schema = staged_frame_schema(ROWS, parse_sink_in_read(query.sink))
    more = {"onMissingToken": "assume_committed:4", "commitTimeoutMs": "5000", "queryName": "name"}
    writer.stream_writer(parse_write({**query.sink, **more}, streaming=True), schema)


def test_neither_the_schema_of_the_frame_nor_an_error_about_it_contains_secrets(
    query: Query, tmp_path: Path
) -> None:
    sink = {
        **query.sink,
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "me",
        "kafka.sasl.password": SECRET,
        "sinks": "web",
        "sink.web.type": "http",
        "sink.web.url": "https://example.com/x",
        "sink.web.auth": f"Bearer {SECRET}",
        "sink.web.mode": "idempotency-key",
    }
    options = parse_sink_in_read(sink)
    schema = staged_frame_schema(ROWS, options)
    assert SECRET not in json.dumps(schema.jsonValue())
    found = staged_frame(schema)
    assert found is not None
    found.check_sink(options)
    with pytest.raises(InvalidOptionError) as refused:
        found.check_sink(parse_sink_in_read({**sink, "topic": "other"}))
    assert SECRET not in str(refused.value)


SQL = {"sinks": "h", "sink.h.type": "sql", "sink.h.table": "t"}
LAKE = {"sinks": "h", "sink.h.type": "delta", "sink.h.path": "file:///lake"}
WEB = {"sinks": "h", "sink.h.type": "http", "sink.h.mode": "idempotency-key"}


@pytest.mark.parametrize(
    ("options", "name", "value", "other"),
    [
        (SQL, "sink.h.url", f"postgresql+psycopg://host/db?user=u&password={SECRET}", "host2"),
        (SQL, "sink.h.url", f"postgresql+psycopg://u:{SECRET}@host/db", "host2"),
        (SQL, "sink.h.url", f"postgresql+psycopg://u:a/{SECRET}@host/db", "host2"),
        (SQL, "sink.h.url", f"postgresql+psycopg://u:pw@host/db?password={SECRET}@x", "host2"),
        (WEB, "sink.h.url", f"https://host/rows?apikey={SECRET}", "host2"),
        (LAKE, "sink.h.storage.endpoint", f"http://u:{SECRET}@host:9000", "host2"),
        ({}, "kafka.sasl.oauthbearer.token.endpoint.url", f"https://u:{SECRET}@host/token", "host2"),
        ({}, "staging.location", f"s3://u:{SECRET}@host/staging?secret_key={SECRET}", "host2"),
    ],
)
def test_of_a_url_the_schema_knows_the_host_and_no_secret(
    query: Query, options: dict[str, str], name: str, value: str, other: str
) -> None:
    options = {**query.sink, **options, name: value}
    schema = staged_frame_schema(ROWS, parse_sink_in_read(options))
    written = json.dumps(schema.jsonValue())
    assert SECRET not in written
    assert hashlib.sha256(SECRET.encode()).hexdigest()[:16] not in written
    found = staged_frame(schema)
    assert found is not None
    found.check_sink(parse_sink_in_read(options))
    found.check_sink(parse_sink_in_read({**options, name: value.replace(SECRET, "another")}))
    with pytest.raises(InvalidOptionError, match=r"here and .* there") as refused:
        found.check_sink(parse_sink_in_read({**options, name: value.replace("host", other)}))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("http://host:1/path", "http://host:1/path"),
        ("http://u:p@host:1/path?q=s#s", "http://host:1/path"),
        ("http://u:p@host/a?q=s@s", "http://host/a"),
        ("http://u:s/s@host/a", "http://host/a"),
        ("http://u:s?s@host/a", "http://"),
        ("http://host:1/a?q=s@s", "http://"),
        ("http://host/a?q=s@s", "http://host/a"),
        ("http://host/a@b", "http://host/a@b"),
        ("sqlite:///file.db", "sqlite:///file.db"),
    ],
)
def test_what_may_be_a_password_is_not_part_of_a_bare_url(url: str, bare: str) -> None:
    assert bare_url(url) == bare


@pytest.mark.parametrize("shown", ["token", "account_key", "sas", "password"])
def test_secret_options_of_a_library_are_not_in_the_schema(query: Query, shown: str) -> None:
    options = {**query.sink, **LAKE, f"sink.h.storage.{shown}": SECRET, "sink.h.storage.region": "eu-1"}
    schema = staged_frame_schema(ROWS, parse_sink_in_read(options))
    assert SECRET not in json.dumps(schema.jsonValue())
    with pytest.raises(InvalidOptionError, match="eu-2"):
        staged_frame(schema).check_sink(  # type: ignore[union-attr]
            parse_sink_in_read({**options, "sink.h.storage.region": "eu-2"})
        )


def test_each_option_of_the_sink_keeps_its_name_as_an_option_of_the_source(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So Spark masks the secrets among them by name, and so do people who have set their own pattern."""
    made = in_read_frame._options_of_source(
        _frame(), {**query.sink, "kafka.ssl.key.password": SECRET, "includeTimestamp": True}
    )
    assert made[f"{SINK_IN_READ}kafka.ssl.key.password"] == SECRET
    assert made[f"{SINK_IN_READ}includeTimestamp"] == "true"
    step = MapInRead(ReadColumns((ReadColumn("value", "value"),)), ROWS, None, "frame").to_option()
    # Spark may change the case of names
    options = parse_read(
        {**READ, "step.in.read": step, **{name.lower(): v for name, v in made.items()}}, streaming=True
    )
    assert options.sink == parse_write(
        {**query.sink, "kafka.ssl.key.password": SECRET, "includeTimestamp": "true"}, streaming=True
    )
    assert schema_of(options).names == [STAGED]
    assert SECRET not in repr(options)


def _frame(streaming: bool = True) -> Any:
    return SimpleNamespace(isStreaming=streaming)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topc": "out"}, "unknown option 'topc'"),
        ({"topic": None}, "'topic' is None"),
        ({"checkpointLocation": None}, "'checkpointLocation' is None"),
        ({"processing.guarantee": "at_least_once"}, "expected exactly_once"),
        ({"txnAppId": "a", "txnVersion": "1"}, "txnAppId"),
    ],
)
def test_wrong_options_of_the_sink_are_refused_at_once(
    query: Query, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidOptionError, match=f"write= of map_in_read: .*{said}"):
        in_read_frame._options_of_source(_frame(), {**query.sink, **options})


def test_missing_options_of_the_sink_are_refused_at_once(query: Query) -> None:
    for name, said in (
        ("checkpointLocation", "'checkpointLocation' is missing"),
        ("kafka.bootstrap.servers", "missing"),
    ):
        left = {each: value for each, value in query.sink.items() if each != name}
        with pytest.raises(InvalidOptionError, match=said):
            in_read_frame._options_of_source(_frame(), left)


def test_a_batch_read_cannot_be_staged(query: Query) -> None:
    with pytest.raises(InvalidOptionError, match="the frame is a batch read"):
        in_read_frame._options_of_source(_frame(streaming=False), query.sink)


def test_options_of_a_sink_without_a_function_are_refused(query: Query) -> None:
    with pytest.raises(InvalidOptionError, match=r"'step\.in\.read' is not"):
        parse_read({**READ, f"{SINK_IN_READ}topic": "out"}, streaming=True)


def test_columns_that_the_sink_cannot_write_are_refused_when_the_frame_is_made(query: Query) -> None:
    only_key = StructType([StructField("key", BinaryType())])
    step = MapInRead(ReadColumns((ReadColumn("key", "key"),)), only_key, None, "frame").to_option()
    sink = {f"{SINK_IN_READ}{name}": value for name, value in query.sink.items()}
    with pytest.raises(InvalidSchemaError, match="the frame has no column 'value'"):
        KafkaEosDataSource({**READ, "step.in.read": step, **sink}).schema()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda field: StructType([StructField(STAGED, BinaryType())]), "has no metadata"),
        (
            lambda field: StructType([field, StructField("more", StringType())]),
            "column\\(s\\) 'more' in addition",
        ),
        (
            lambda field: StructType([StructField("value", BinaryType(), metadata=field.metadata)]),
            "column 'value' is column '__kafka_eos_staged' of map_in_read under another name",
        ),
        (
            lambda field: StructType(
                [*ROWS.fields, StructField("__KAFKA_EOS_STAGED", BinaryType(), metadata=field.metadata)]
            ),
            "column '__KAFKA_EOS_STAGED' is",
        ),
    ],
)
def test_a_staged_frame_that_a_step_changed_is_refused(
    query: Query, change: Callable[[StructField], StructType], said: str
) -> None:
    options = parse_sink_in_read(query.sink)
    schema = change(staged_frame_schema(ROWS, options).fields[0])
    with pytest.raises(InvalidSchemaError, match=said):
        writer.stream_writer(options, schema)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_frame_that_was_computed_from_reports_is_refused(
    query: Query, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expressions drop the metadata of a column, so only the run tells the sink about them."""
    monkeypatch.setattr(folders, "_PATIENCE_SECONDS", 0.0)
    cast = StructType([StructField("value", StringType())])
    options = parse_write({**query.sink, "processing.guarantee": guarantee}, streaming=True)
    plan = StagingPlan("frame", ROWS, parse_sink_in_read(query.sink), lossy=False)
    writer.stream_writer(options, cast)
    plan.tasks(START.to_dict(), END.to_dict(), RANGES)
    with pytest.raises(InvalidSchemaError, match=r"write= of map_in_read.*computed other columns"):
        writer.stream_writer(options, cast)
    other = replace(options, checkpoint_location=f"{query.checkpoint}-2")
    writer.stream_writer(other, cast)


def test_a_query_that_was_restarted_without_write_waits_for_the_end_of_the_run_before(query: Query) -> None:
    plan = StagingPlan("frame", ROWS, parse_sink_in_read(query.sink), lossy=False)
    plan.tasks(START.to_dict(), END.to_dict(), RANGES)
    ends = threading.Timer(0.2, plan.close)
    ends.start()
    writer.stream_writer(parse_write(query.sink, streaming=True), ROWS)
    ends.join()


def test_a_staged_frame_is_written_while_its_run_lives(query: Query) -> None:
    plan = StagingPlan("frame", ROWS, parse_sink_in_read(query.sink), lossy=False)
    plan.tasks(START.to_dict(), END.to_dict(), RANGES)
    assert query.writer()._sink.in_read


def test_a_batch_write_of_a_staged_frame_is_refused(query: Query) -> None:
    schema = staged_frame_schema(ROWS, parse_sink_in_read(query.sink))
    options = parse_write({"kafka.bootstrap.servers": "b:9092", "topic": "out"}, streaming=False)
    with pytest.raises(InvalidSchemaError, match=r"a batch write \(df\.write, foreachBatch\)"):
        writer.batch_writer(options, schema)


def test_a_frame_that_is_not_staged_has_no_sink() -> None:
    assert staged_frame(ROWS) is None
    assert staged_frame(packed_frame_schema(ROWS)) is None

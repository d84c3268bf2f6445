"""The sink's checks in a task before the task stages rows."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import BinaryType, CalendarIntervalType, StructField, StructType

from kafka_eos_source.commit import at_least_once, micro_batch, open_sinks
from kafka_eos_source.datasource import sink
from kafka_eos_source.datasource import writer as stream_writer
from kafka_eos_source.datasource.sink import CommitMessage, StagedSink
from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    RestartQueryError,
    StateLostError,
)
from kafka_eos_source.in_read.step import with_column_of_packets
from kafka_eos_source.model import StagedPart, TaskFigures, WrittenPart
from kafka_eos_source.observe import background
from kafka_eos_source.observe.journal import query_journal, query_journals
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.protocol.offset_log import PlannedBatch
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.schema import check_frame
from kafka_eos_source.spark.worker import StreamingTask
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import reports
from kafka_eos_source.stage.task import StagedTask

pytestmark = pytest.mark.usefixtures("unknown_topic_limits")

FRAME = StructType([StructField("value", BinaryType())])
Sink = Callable[[str], StagedSink]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """Returns a sink in a task that sees another folder than the driver, with rows that fit into messages."""
    monkeypatch.setattr(sink, "running_task", lambda: StreamingTask("q", "0", "r"))
    options = parse_write(
        {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": str(tmp_path)},
        streaming=True,
    )
    columns = check_frame(FRAME, topic_option="out", include_timestamp=False)
    own = StagingFolder.at(str(tmp_path / "staging"))
    folder = StagingFolder(own.location, "what the driver wrote")
    return lambda name: StagedSink(options, columns, folder, name)


def rows() -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": pa.array([b"x"], pa.binary())})]


@pytest.mark.parametrize(
    ("name", "folder", "why"),
    [
        ("named", "'/named'", "the folder that Spark uses for this query name"),
        (None, "'/NAME'", "another folder at each start"),
    ],
)
def test_a_checkpoint_that_only_the_session_names_is_refused_before_a_broker_is_asked(
    name: str | None, folder: str, why: str
) -> None:
    """Spark's session setting does not reach a sink in Python: the fix names the folder that Spark chose."""
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "out"}
    if name is not None:
        options["queryname"] = name  # as Spark passes it
    with pytest.raises(InvalidOptionError, match="'checkpointLocation' is not set") as caught:
        stream_writer.stream_writer(parse_write(options, streaming=True), FRAME)
    setting = "spark.conf.get('spark.sql.streaming.checkpointLocation')"
    assert f".option('checkpointLocation', {setting} + {folder})" in caught.value.fix
    assert why in caught.value.fix


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (StagingFolder("/s", "probe"), "set staging.location to storage"),
        (
            StagingFolder("/s", "probe", option="checkpointLocation or staging.location"),
            "set checkpointLocation or staging.location to storage",
        ),
    ],
    ids=["batch write", "stream"],
)
def test_a_folder_that_is_not_shared_is_answered_with_the_options_of_this_write(
    given: StagingFolder, named: str
) -> None:
    """A batch write has no option checkpointLocation."""
    with pytest.raises(InvalidOptionError, match="is not shared") as caught:
        given.check_shared()
    assert named in caught.value.fix


def test_a_batch_write_names_staging_location_alone(tmp_path: Path) -> None:
    options = {"kafka.bootstrap.servers": "b:9092", "topic": "out"}
    both = {**options, "checkpointLocation": str(tmp_path)}
    stream = parse_write(both, streaming=True)
    columns = check_frame(FRAME, topic_option="out", include_timestamp=False)
    of_stream = StagedSink.of_stream(stream, columns, None, in_read=False).folder
    assert of_stream.option == "checkpointLocation or staging.location"
    own = parse_write({**both, "staging.location": str(tmp_path / "own")}, streaming=True)
    assert StagedSink.of_stream(own, columns, None, in_read=False).folder.option == "staging.location"


def test_a_staging_folder_that_is_not_shared_is_refused_before_rows_need_it(elsewhere: Sink) -> None:
    with pytest.raises(InvalidOptionError, match="is not shared"):
        elsewhere("").write_frame(rows())


def test_a_batch_write_that_fits_into_commit_messages_needs_no_staging_folder(elsewhere: Sink) -> None:
    """A batch write skips the check of the folder: it has no checkpoint and no later batch."""
    part = elsewhere("write-1").write_frame(rows()).staged.part
    assert part is not None
    assert part.inline is not None


FRAME_WITH_STATE = StructType([*FRAME.fields, StructField(CHANGELOG, BinaryType())])


def test_a_query_with_state_cannot_be_at_least_once() -> None:
    options = {"kafka.bootstrap.servers": "b:9092", "topic": "out", "processing.guarantee": "at_least_once"}
    with pytest.raises(InvalidSchemaError, match=CHANGELOG):
        stream_writer.stream_writer(parse_write(options, streaming=True), FRAME_WITH_STATE)


@pytest.mark.parametrize("streams", [True, False])
def test_bad_records_in_packets_cannot_be_at_least_once(streams: bool) -> None:
    frame = with_column_of_packets(FRAME)
    options = {"kafka.bootstrap.servers": "b:9092", "topic": "out"}
    if streams:
        options["processing.guarantee"] = "at_least_once"
    made = stream_writer.stream_writer if streams else stream_writer.batch_writer
    with pytest.raises(InvalidSchemaError, match=r"read with on_bad='dead-letter', but .* on_bad='fail'"):
        made(parse_write(options, streaming=streams), frame)


@pytest.mark.parametrize("only_bad_records", [True, False])
def test_a_batch_without_packets_says_whether_reports_of_operators_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_bad_records: bool
) -> None:
    """In a batch that does not run the source, nothing sends packets."""
    monkeypatch.setattr(sink, "running_task", lambda: StreamingTask("q", "0", "r"))
    options = parse_write(
        {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": str(tmp_path)},
        streaming=True,
    )
    frame = with_column_of_packets(FRAME) if only_bad_records else FRAME_WITH_STATE
    columns = check_frame(frame, topic_option="out", include_timestamp=False)
    part = StagedSink(options, columns, StagingFolder.at(str(tmp_path)), "").write_frame(()).staged.part
    assert part is not None
    if only_bad_records:
        assert reports([part], "q", 0) == ()
        return
    with pytest.raises(StateLostError, match="no shard of the operator sent a report"):
        reports([part], "q", 0)


def test_a_batch_write_with_state_is_refused() -> None:
    options = {"kafka.bootstrap.servers": "b:9092", "topic": "out"}
    with pytest.raises(InvalidSchemaError, match=CHANGELOG):
        stream_writer.batch_writer(parse_write(options, streaming=False), FRAME_WITH_STATE)


class RecordingSink:
    """Records what a writer asks of its sink."""

    name = "write-1"

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def commit_micro_batch(self, messages: list[object], batch_id: int) -> None:
        self.calls.append(("commit", len(messages)))

    def discard(self, messages: list[object], batch_id: int | None = None) -> None:
        self.calls.append(("discard", len(messages)))


PART = StagedPart("", 1, 2, 3, inline=b"rows")


@pytest.fixture
def direct_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the writer of an ``at_least_once`` query, whose checkpoint has planned batches 0 and 1."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(at_least_once, "check_target", lambda options: None)
    options = {
        "kafka.bootstrap.servers": "b:9092",
        "topic": "out",
        "processing.guarantee": "at_least_once",
        "application.id": "app",
        "checkpointLocation": str(tmp_path / "checkpoint"),
    }
    log(tmp_path / "checkpoint", 0, 10)
    log(tmp_path / "checkpoint", 1, 25)
    return stream_writer.stream_writer(parse_write(options, streaming=True), FRAME)


def direct_messages(query: str = "query") -> list[CommitMessage]:
    tasks = [
        WrittenPart(number, query, "run", TaskFigures(2.0, 0.5, {"out": (number, 10)})) for number in (3, 4)
    ]
    return [CommitMessage(None, written=each) for each in tasks]


def test_a_batch_that_tasks_wrote_themselves_has_figures(direct_writer: Any) -> None:
    """With ``at_least_once`` there is no commit, but the driver knows from the tasks what they wrote."""
    direct_writer.commit(direct_messages(), 1)
    found = query_journal(derived_application_id("query"))
    assert found is not None
    (batch,) = found.batches
    assert (batch.query_id, batch.run_id, batch.batch_id) == ("query", "run", 1)
    assert (batch.counts["records"], batch.counts["offsets_read"]) == (7, 15)
    assert batch.topics == {"out": {"records": 7, "bytes": 20}}
    assert batch.gauges["longest_task_seconds"] == 2.0
    assert batch.sequence is None, "there is no token"


def test_queries_without_a_commit_that_share_an_application_id_do_not_share_a_journal(
    direct_writer: Any,
) -> None:
    """In one journal, each batch would look like a restart of the query."""
    for batch_id in (0, 1):
        for query in ("one", "two"):
            direct_writer.commit(direct_messages(query), batch_id)
    assert {each.batches[-1].query_id for each in query_journals()} == {"one", "two"}
    for each in query_journals():
        assert [batch.runs for batch in each.batches] == [1, 1]
        assert each.batches[-1].totals["batches"] == 2


def test_a_store_that_hangs_does_not_stop_a_query_without_a_commit(
    direct_writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is read for the figures only, after the records are written."""
    answers, has_returned = threading.Event(), threading.Event()
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(background, "_background", background.Background())
    monkeypatch.setattr(offset_log, "read", lambda *_: answers.wait(60))

    def commit() -> None:
        direct_writer.commit(direct_messages(), 1)
        has_returned.set()

    threading.Thread(target=commit, daemon=True).start()
    try:
        assert has_returned.wait(30), "the commit waits for the checkpoint"
    finally:
        answers.set()


@pytest.mark.parametrize("other", [None, WriterCommitMessage()])
def test_a_commit_without_the_message_of_a_task_is_refused(other: WriterCommitMessage | None) -> None:
    """Without the check, the rows of that task would be lost although Spark considers them written."""
    sink = RecordingSink()
    writer = stream_writer._ArrowStreamWriter(cast(Any, sink), None)
    message = CommitMessage(StagedTask(PART))
    with pytest.raises(RestartQueryError, match=r"1 of its 3 tasks \(the first is task 1\)") as caught:
        writer.commit([message, other, message], 5)
    assert "again" in caught.value.fix
    assert sink.calls == []
    writer.commit([message, message], 5)
    writer.commit([], 6)
    assert sink.calls == [("commit", 2), ("commit", 0)]


def test_a_batch_write_without_the_message_of_a_task_is_refused(
    elsewhere: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: list[int] = []
    monkeypatch.setattr(
        micro_batch,
        "commit_batch_write",
        lambda _options, _folder, _name, parts: committed.append(len(parts)),
    )
    writer = stream_writer._BatchWriter(elsewhere("write-1"), None)
    message = CommitMessage(StagedTask(PART))
    with pytest.raises(RestartQueryError, match="1 of its 2 tasks"):
        writer.commit([message, None])
    assert committed == []
    writer.commit([message, message])
    assert committed == [2]


def test_the_tasks_report_the_plan_that_spark_had_logged_when_it_pickled_their_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer commits: what that one finds in the log may be the plan of another driver."""
    monkeypatch.setattr(sink, "running_task", lambda: StreamingTask("q", "1", "r"))
    monkeypatch.setattr(at_least_once, "check_target", lambda options: None)
    reported: list[Any] = []
    monkeypatch.setattr(micro_batch, "commit_micro_batch", lambda *given: reported.append(given[5]))
    options = parse_write(
        {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": str(tmp_path)},
        streaming=True,
    )
    log(tmp_path, 0, 10)
    log(tmp_path, 1, 20)
    ours: Any = pickle.loads(pickle.dumps(stream_writer.stream_writer(options, FRAME)))
    log(tmp_path, 1, 30)
    theirs: Any = pickle.loads(pickle.dumps(stream_writer.stream_writer(options, FRAME)))
    log(tmp_path, 2, 40)
    messages = [ours.write(iter(rows())), theirs.write(iter(rows()))]
    for each in messages:
        stream_writer.stream_writer(options, FRAME).commit([each], 1)
    first, second = (next(iter(planned)) for planned in reported)
    assert (first.batch_id, second.batch_id) == (1, 1)
    assert first.digest != second.digest
    entry = offset_log.read(str(tmp_path), 1)
    assert entry is not None
    logged = PlannedBatch(1, entry.digest)
    micro_batch._refuse_another_plan({second}, logged, str(tmp_path))
    for planned in ({first}, {first, second}, {None}, {PlannedBatch(2, entry.digest)}):
        with pytest.raises(RestartQueryError, match="the entry of batch 1 in the offset log"):
            micro_batch._refuse_another_plan(planned, logged, str(tmp_path))


def test_the_newest_plan_is_the_highest_batch_and_not_a_temporary_file(tmp_path: Path) -> None:
    assert offset_log.newest(str(tmp_path)) is None
    for batch_id in (9, 10, 2):
        log(tmp_path, batch_id, 5)
    for name in (".11.5e6f.tmp", ".11.crc", "11.tmp"):
        (tmp_path / "offsets" / name).write_text("")
    found = offset_log.newest(str(tmp_path))
    assert found is not None
    assert found.batch_id == 10


def log(checkpoint: Path, batch_id: int, end: int) -> None:
    """Writes an entry of the offset log."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets" / str(batch_id)).write_text(
        f'v1\n{{"batchTimestampMs":{end}}}\n{{"a":{{"0":{end}}}}}'
    )


def test_an_abort_tolerates_tasks_that_sent_no_message(elsewhere: Sink) -> None:
    sink = RecordingSink()
    stream_writer._ArrowStreamWriter(cast(Any, sink), None).abort([None, CommitMessage(StagedTask(PART))], 5)
    assert sink.calls == [("discard", 1)]
    stream_writer._BatchWriter(elsewhere("write-1"), None).abort([None, CommitMessage(StagedTask(PART))])


@pytest.fixture
def with_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StagedSink:
    """Returns a sink with a sink outside Kafka that may refuse rows, and a column unknown to Arrow."""
    (tmp_path / "metadata").write_text('{"id":"query"}')
    given = {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": str(tmp_path)}
    given |= {"sinks": "db", "sink.db.type": "memory", "sink.db.columns": "value"}
    given |= {"onInvalidRecord": "dead-letter", "deadLetter.topic": "dead"}
    options = parse_write(given, streaming=True)
    columns, plan = sink.sink_columns(
        options, StructType([*FRAME.fields, StructField("every", CalendarIntervalType())])
    )
    monkeypatch.setattr(open_sinks, "make_ready", lambda _, plan: replace(plan, refusing=frozenset({"db"})))
    return StagedSink.of_stream(options, columns, plan, in_read=False)


def test_rows_that_cannot_be_kept_are_refused_on_the_driver(with_a_sink: StagedSink) -> None:
    with pytest.raises(InvalidSchemaError, match="column 'every' has type interval"):
        _ = with_a_sink.destinations
    lenient = replace(with_a_sink, options=replace(with_a_sink.options, on_invalid_record="fail"))
    assert lenient.destinations is not None


def test_after_an_abort_the_sinks_are_asked_again(
    with_a_sink: StagedSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may have failed by a rule, and somebody then corrects the table and starts the query again."""
    asked: list[WriteOptions] = []
    monkeypatch.setattr(open_sinks, "ask_again", asked.append)
    with_a_sink.discard([], 0)
    assert asked == [with_a_sink.options]

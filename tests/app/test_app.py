"""What `App` computes without a session: options of each part, ids, checkpoints, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source import App, files
from kafka_eos_source.app.plan import plan_query, writer_of
from kafka_eos_source.app.records import Records
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import ReadColumn, ReadColumns
from kafka_eos_source.options.parse import parse_read, parse_write
from kafka_eos_source.state.options import parse_state

BROKERS = "one:9092,two:9092"
LOGIN = {
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.sasl.mechanism": "PLAIN",
    "kafka.sasl.username": "me",
    "kafka.sasl.password": "secret",
}


def app(**arguments: Any) -> App:
    return App("revenue", BROKERS, **{"checkpoint": "/data/revenue", **arguments})


@pytest.mark.parametrize("steps", ["none", "a decoder", "SQL"])
@pytest.mark.parametrize("needed_by", ["a sink", "dead letters", "nothing"])
def test_rows_have_their_origin_where_a_letter_or_an_error_may_name_it(
    monkeypatch: pytest.MonkeyPatch, steps: str, needed_by: str, tmp_path: Path
) -> None:
    rows = StructType([StructField("value", BinaryType())])
    columns = ReadColumns((ReadColumn("value", "value"),))
    if steps != "none":
        columns = replace(columns, before=RowsInRead(columns, rows, b"", steps, is_aligned=steps != "SQL"))
    made: list[Any] = []
    origin = SimpleNamespace(columns=columns, read=lambda step, *_: made.append(step))
    monkeypatch.setattr("kafka_eos_source.app.plan.trace", lambda *_: origin)
    monkeypatch.setattr("kafka_eos_source.app.plan.steps_in_read", lambda _: ())
    frame: Any = SimpleNamespace(schema=rows, columns=["value"], sparkSession=None)
    sinks = {"lake": files(str(tmp_path))} if needed_by == "a sink" else {}
    letters = {"onInvalidRecord": "dead-letter", "deadLetter.topic": "d"}
    stated = {**app().options("sink"), "topic": "out", **(letters if needed_by == "dead letters" else {})}
    plan_query(frame, Records("out"), sinks, stated, has_timestamp=False)
    (step,) = made
    has_origin = needed_by != "nothing" and steps != "SQL"
    assert step.rows.names == ["value", *(["kafka_eos_origin"] if has_origin else [])]
    assert step.columns.schema.names == step.rows.names


def test_each_part_gets_the_options_that_it_takes() -> None:
    query = app(
        options={**LOGIN, "state.dir": "/data/state", "token.topic": "tokens", "failOnDataLoss": False}
    )
    common = {"kafka.bootstrap.servers": BROKERS, "application.id": "revenue", **LOGIN}
    assert query.options() == {
        "source": {**common, "failOnDataLoss": "false"},
        "operator": {**common, "state.dir": "/data/state"},
        "sink": {**common, "token.topic": "tokens", "checkpointLocation": "/data/revenue"},
    }


def test_each_part_accepts_its_options() -> None:
    query = app(options={**LOGIN, "state.dir": "/data/state", "kafka.group.id": "mine"})
    read = parse_read({**query.options("source"), "subscribe": "orders"}, streaming=True)
    state = parse_state(query.options("operator"))
    write = parse_write({**query.options("sink"), "topic": "revenue"}, streaming=True)
    assert read.application_id == state.application_id == write.application_id == "revenue"
    assert read.group_id == state.group_id == write.group_id == "mine"
    assert write.checkpoint_location == "/data/revenue"


def test_options_that_a_part_prints_hide_secrets() -> None:
    shown = repr(app(options=LOGIN).options())
    assert "secret" not in shown
    assert "one:9092" in shown


def test_brokers_may_be_a_list_and_the_checkpoint_a_path() -> None:
    query = App("revenue", ["one:9092", "two:9092"], checkpoint=Path("/data/revenue"))
    assert query.options("sink") == app().options("sink")


def test_another_query_has_an_id_and_a_checkpoint_of_its_own() -> None:
    first = app(options={"state.dir": "/data/state"})
    audit = first.query("audit")
    assert (audit.id, audit.checkpoint) == ("revenue-audit", "/data/revenue/queries/audit")
    assert audit.options("operator") == {**first.options("operator"), "application.id": "revenue-audit"}


class Session:
    """Records the options of a read, as a session of Spark is given them."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.readStream = self

    def format(self, _: str) -> Session:
        return self

    def options(self, **options: str) -> Session:
        self.found = options
        return self

    def load(self) -> Session:
        return self


@pytest.mark.parametrize(
    ("of_app", "of_call", "expected"),
    [
        ({}, {}, {"startingOffsets": "earliest"}),
        ({"startingOffsets": "latest"}, {}, {"startingOffsets": "latest"}),
        ({"startingoffsets": "latest"}, {"starting": "group"}, {"startingOffsets": "group"}),
        ({}, {"options": {"STARTINGOFFSETS": "latest"}}, {"STARTINGOFFSETS": "latest"}),
        (
            {"startingOffsets": "group"},
            {"options": {"startingoffsets": "latest"}},
            {"startingoffsets": "latest"},
        ),
    ],
)
def test_a_read_has_one_option_of_each_name(
    of_app: dict[str, str], of_call: dict[str, Any], expected: dict[str, str]
) -> None:
    """That of the call comes before that of the App; the server of Spark Connect may take any of several."""
    session: Any = Session()
    app(options=of_app, spark=session).read("orders", **of_call)
    assert {n: v for n, v in session.found.items() if n.lower() == "startingoffsets"} == expected
    assert session.found["subscribe"] == "orders"


def test_another_query_has_a_group_of_its_own() -> None:
    """Two queries in one group would overwrite each other's tokens."""
    first = app(options={"kafka.group.id": "mine"})
    groups = {part: options["kafka.group.id"] for part, options in first.query("audit").options().items()}
    assert groups == dict.fromkeys(("source", "operator", "sink"), "mine-audit")
    assert first.options("sink")["kafka.group.id"] == "mine"


@pytest.mark.parametrize("name", ["", "a b", "..", "a/b", "x" * 101])
def test_the_name_of_another_query_is_checked(name: str) -> None:
    with pytest.raises(InvalidOptionError, match="query"):
        app().query(name)


def test_without_a_checkpoint_there_are_only_options() -> None:
    query = App("revenue", BROKERS)
    assert "checkpointLocation" not in query.options("sink")
    assert query.query("audit").checkpoint is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"state.dri": "/data"}}, r"unknown option 'state\.dri'.*'state\.dir'"),
        ({"options": {"application.id": "other"}}, r"'application\.id'.*argument 'id'"),
        ({"options": {"checkpointlocation": "/x"}}, r"'checkpointlocation'.*argument 'checkpoint'"),
        (
            {"options": {"endingOffsets": "latest"}},
            r"'endingOffsets' cannot be used for a stream",
        ),
    ],
)
def test_options_that_no_part_takes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        app(**arguments)


@pytest.mark.parametrize(
    ("id", "brokers"), [("a b", BROKERS), ("", BROKERS), ("revenue", " "), ("revenue", [])]
)
def test_id_and_brokers_are_checked(id: str, brokers: Any) -> None:
    with pytest.raises(InvalidOptionError, match="App"):
        App(id, brokers, checkpoint="/data/revenue")


def test_options_of_a_call_cannot_replace_what_the_app_sets() -> None:
    with pytest.raises(InvalidOptionError, match=r"'application\.id', which the App sets"):
        app().read("orders", options={"application.id": "other"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schema": "id INT", "registry": "http://registry"}, "schema= and registry= are both set"),
        ({"topics": ["a", "b"], "registry": "http://registry"}, "registry= is set for 2 topics"),
        ({"schema": "id WRONG"}, "WRONG"),
        ({"options": {"maxOffsetPerTrigger": "5"}}, "Did you mean 'maxOffsetsPerTrigger'"),
        ({"starting": "earliset"}, "'startingOffsets' has the value 'earliset'"),
        ({"schema": "id INT", "on_bad": "drop"}, "'on_bad' has the value 'drop'; expected 'fail' or 'null'"),
        ({"on_bad": "null"}, "on_bad='null' is set, but neither schema= nor registry="),
    ],
)
def test_a_wrong_read_is_refused_before_there_is_a_session(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KafkaEosError, match=message):
        app().read(**{"topics": "orders", **arguments})


class Writer:
    """Takes the place of DataStreamWriter; it keeps the options."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def option(self, key: str, value: Any) -> Writer:
        self.found[key] = value
        return self

    def options(self, **options: Any) -> Writer:
        self.found |= options
        return self

    def itself(self, *_: Any) -> Writer:
        return self

    format = queryName = foreach = foreachBatch = toTable = itself  # noqa: N815

    def start(self, path: Any = None, format: Any = None, outputMode: Any = None, **options: Any) -> Any:  # noqa: N803
        return {**self.found, **options}


@pytest.mark.parametrize(
    "change",
    [
        lambda writer, name, value: writer.option(name, value),
        lambda writer, name, value: writer.options(**{name: value}),
        lambda writer, name, value: writer.start(**{name: value}),
    ],
)
def test_the_writer_refuses_other_options_than_those_that_were_checked(
    change: Callable[[Any, str, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafka_eos_source.spark.operator_frame.check_changelog", lambda _: None)
    sink = {"checkpointLocation": "/data/revenue", "kafka.sasl.password": "one-secret", "flag": "true"}
    rows: Any = SimpleNamespace(columns=["n"])

    def writer() -> Any:
        frame: Any = SimpleNamespace(writeStream=Writer())
        return writer_of(rows, frame, "revenue", sink)

    with pytest.raises(
        InvalidOptionError, match=r"'/data/other' on the writer of App.* '/data/revenue'"
    ) as bad:
        change(writer(), "checkpointlocation", "/data/other")
    assert "app.query(name)" in bad.value.fix
    with pytest.raises(InvalidOptionError) as bad:
        change(writer(), "kafka.sasl.password", "two-secret")
    assert "secret" not in str(bad.value)
    for name, value in (
        ("flag", True),
        ("checkpointLocation", "/data/revenue"),
        ("other", 1),
        ("flag", None),
    ):
        change(writer(), name, value)
    assert writer().start(other=1) == {**sink, "other": 1}
    with pytest.raises(InvalidOptionError, match=r"toTable\(\) on the writer of App.write"):
        writer().toTable("t")


def test_an_app_that_is_written_to_a_second_topic_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "kafka_eos_source.app.app.plan_query",
        lambda frame, records, sinks, stated, **_: SimpleNamespace(frame=frame, sink=stated, text=str),
    )
    monkeypatch.setattr("kafka_eos_source.app.app.is_of_source", lambda *_: False)
    monkeypatch.setattr("kafka_eos_source.app.app.writer_of", lambda *_: None)
    query, frame = app(), SimpleNamespace(isStreaming=True)
    monkeypatch.setattr(App, "_check", lambda *_: None)
    for topic in ("one", "one"):
        query.write(frame, topic)  # type: ignore[arg-type]
    query.query("audit").write(frame, "two")  # type: ignore[arg-type]
    assert not caplog.records
    query.write(frame, "two")  # type: ignore[arg-type]
    query.write(frame)  # type: ignore[arg-type]
    assert [each.levelname for each in caplog.records] == ["WARNING"] * 2
    assert "written to 'two', and was written to 'one' before" in caplog.text
    assert "written to the column 'topic', and was written to 'two' before" in caplog.text


def test_the_sink_knows_the_static_tables_of_sql(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = object()
    tables = {"rates": "1"}
    monkeypatch.setattr("kafka_eos_source.app.app.sql_frame", lambda text, frames: (frame, tables))
    query = app()
    audit = query.query("audit")
    assert "sql.tables" not in query.options("sink")
    assert query.sql("SELECT 1") is frame
    for each in (query, audit):
        stated = {**each.options("sink"), "topic": "t", "onChangedTable": "continue"}
        found = parse_write(stated, streaming=True)
        assert (found.static_tables, found.changed_table) == (tables, "continue")
    tables = {"rates": "2", "codes": "3"}
    query.sql("SELECT 2")
    found = parse_write({**query.options("sink"), "topic": "t"}, streaming=True)
    assert found.static_tables == {"rates": "1 2", "codes": "3"}
    query.sql("SELECT 1")  # as a notebook does, after the table has changed
    found = parse_write({**query.options("sink"), "topic": "t"}, streaming=True)
    assert found.static_tables == {"rates": "2", "codes": "3"}

"""Options of sinks: values that the driver refuses, and secrets that are never shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kafka_eos_source import sink_options
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import SinkOption
from kafka_eos_source.sinks.constructors import custom
from kafka_eos_source.sinks.contract import OK, Outcome, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.filesystem import FilesystemSink
from kafka_eos_source.sinks.memory import MemorySink
from kafka_eos_source.sinks.specs import TYPES, SinkSpec, require, sink_class

BASE = {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": "/tmp/c"}


class OwnSink(TwoPhaseSink):
    """A sink that a user wrote."""

    OPTIONS = (SinkOption("token.url", lambda _name, text: text, None, "URL", "Where.", secret=True),)

    def __init__(self, token_url: str | None = None) -> None:
        self.token_url = token_url

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        return OK

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return []


def sinks(options: Mapping[str, str]) -> tuple[SinkSpec, ...]:
    return parse_write({**BASE, **options}, streaming=True).sinks


def test_sinks_by_type_and_by_import_path() -> None:
    files, own = sinks(
        {
            "sinks": "files, own",
            "sink.files.type": "filesystem",
            "sink.files.path": "/data/orders",
            "SINK.FILES.FORMAT": "csv",
            "sink.files.columns": "id,amount",
            "sink.own.type": f"{__name__}:OwnSink",
            "sink.own.token.url": "https://me:hunter2@host",
        }
    )
    made = files.build()
    assert isinstance(made, FilesystemSink)
    assert (made.path, made.format, files.columns) == ("/data/orders", "csv", ("id", "amount"))
    found = own.build()
    assert isinstance(found, OwnSink)
    assert found.token_url == "https://me:hunter2@host"
    assert "hunter2" not in f"{files!r} {own!r}"
    hidden = own.secrets(found).hide("cannot reach https://me:hunter2@host")
    assert hidden == "cannot reach https://me:********@host"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": "a"}, r"'sink.a.type' is missing.*filesystem"),
        ({"sinks": "a", "sink.a.type": "filesytem"}, "is not a type of sink.*Did you mean 'filesystem'"),
        ({"sinks": "a", "sink.a.type": "no.such.module:Sink"}, "cannot be imported"),
        ({"sinks": "a", "sink.a.type": "json:JSONDecoder"}, "no subclass"),
        ({"sinks": "a", "sink.a.type": "filesystem"}, r"'sink.a.path' is missing"),
        (
            {"sinks": "a", "sink.a.type": "filesystem", "sink.a.path": "/x", "sink.a.formt": "secret"},
            r"unknown option 'sink.a.formt'.*'sink.a.format'",
        ),
        (
            {"sinks": "a", "sink.a.type": "filesystem", "sink.a.path": "/x", "sink.a.format": "xml"},
            "'xml'; expected parquet or json or csv",
        ),
        ({"sinks": "Warehouse"}, "lower-case"),
        ({"sinks": "kafka"}, "not 'kafka'"),
        ({"sinks": "a,a"}, "each once"),
        ({"sink.a.type": "memory"}, "belongs to no sink"),
        (
            {"sinks": "a", "sink.a.type": "memory", "sink.b.type": "memory"},
            "'sink.b.type' belongs to no sink",
        ),
        ({"sinks": "a", "sink.a.type": "memory", "processing.guarantee": "at_least_once"}, "exactly_once"),
        (
            {
                "sinks": "a",
                "sink.a.type": "sql",
                "sink.a.url": "sqlite://",
                "sink.a.table": "t",
                "sink.a.mode": "upsert",
            },
            r"option 'sink.a.mode' has the value 'upsert', and option 'sink.a.keys' is not set; .* Fix: .*"
            r"'sink.a.keys'",
        ),
        (
            {
                "sinks": "a",
                "sink.a.type": "http",
                "sink.a.url": "http://h/",
                "sink.a.auth": "x",
                "sink.a.auth.env": "Y",
            },
            "options 'sink.a.auth' and 'sink.a.auth.env' are both set",
        ),
    ],
)
def test_an_invalid_sink_option_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        sinks(options)


def test_a_batch_write_with_sinks_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="cannot be used for a batch write"):
        parse_write({**BASE, "sinks": "a", "sink.a.type": "memory"}, streaming=False)


def test_the_error_of_an_invalid_secret_hides_its_value() -> None:
    with pytest.raises(
        InvalidOptionError, match=r"\(not shown\) that is not valid; expected SQLAlchemy URL"
    ) as refused:
        sinks({"sinks": "a", "sink.a.type": "sql", "sink.a.url": " ", "sink.a.table": "t"})
    assert "' '" not in str(refused.value)


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(InvalidOptionError, match=r"pip install 'kafka-eos-source\[database\]'"):
        require("no_such_module_of_sql", "database")


@pytest.mark.parametrize("name", TYPES)
def test_every_type_loads_without_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sqlalchemy", None)
    assert issubclass(sink_class("x", name), TwoPhaseSink)


def test_sinks_can_be_passed_as_objects() -> None:
    own, other = sinks(sink_options({"own": custom(OwnSink("x"), columns=["id"]), "b": custom(MemorySink())}))
    assert (own.columns, other.columns) == (("id",), None)
    made = own.build()
    assert isinstance(made, OwnSink)
    assert made.token_url == "x"
    assert isinstance(other.build(), MemorySink)


def test_the_password_of_an_object_is_not_shown() -> None:
    sink = custom(OwnSink("https://me:swordfish@host"))
    (own,) = sinks(sink_options({"own": sink}))
    assert own.secrets(own.build()).hide("me:swordfish@host") == "me:********@host"
    assert repr(sink) == f"Sink(custom, {__name__}:OwnSink)"


def test_an_object_that_is_not_a_sink_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"custom\(\).* is a str"):
        custom("no sink")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"'a' is of the class OwnSink.*custom\(MySink"):
        sink_options({"a": OwnSink()})  # type: ignore[dict-item]
    unpicklable = OwnSink()
    unpicklable.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(InvalidOptionError, match="cannot be pickled"):
        custom(unpicklable)


def test_sink_transaction_ids_are_parsed_and_printed() -> None:
    txn = SinkTxn("my-app-7", "0123456789ab", "a_1", 12, "0123456789abcdef0123")
    assert str(txn) == "my-app-7-0123456789ab-a_1-12-0123456789abcdef0123"
    assert SinkTxn.parse(str(txn)) == txn
    assert [SinkTxn.parse(text) for text in ("", "a-1", "a-x-0123456789", "a-1-XYZ", "-1-0123456789")] == [
        None
    ] * 5

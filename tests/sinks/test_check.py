"""The check of a sink's target finds what would stop the first batch, and leaves no trace."""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    KafkaEosError,
    SinkFailedError,
    SinkUnavailableError,
    UnavailableError,
)
from kafka_eos_source.runtime import watchdog
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.constructors import Sink, custom, delta, files, http, iceberg, s3, sql
from kafka_eos_source.sinks.memory import MemorySink
from kafka_eos_source.sinks.specs import parsed
from kafka_eos_source.sinks.watched import check_targets
from tests.support.http_service import HttpService, running

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
WIDER = SCHEMA.append(pa.field("more", pa.int32()))
AS_TEXT = pa.schema([("id", pa.string()), ("name", pa.string())])


def check(sink: Sink, schema: pa.Schema = SCHEMA, seconds: float = 4.0) -> KafkaEosError | None:
    """Checks one sink of the name ``a``; returns what is wrong."""
    return check_targets([(parsed("a", dict(sink.stated)), schema)], seconds=seconds).get("a")


def content(folder: Path) -> dict[str, bytes | None]:
    """Returns the bytes of all files below a folder, and None for each folder."""
    return {
        str(each.relative_to(folder)): None if each.is_dir() else each.read_bytes()
        for each in sorted(folder.rglob("*"))
    }


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """Returns a folder for targets, which a test must leave as it is when `settled` was called last."""
    folder = tmp_path / "target"
    folder.mkdir()
    _SETTLED.clear()
    yield folder
    assert content(folder) == _SETTLED.get(folder, {}), "the check changed its target"


_SETTLED: dict[Path, dict[str, bytes | None]] = {}


def settled(folder: Path) -> None:
    _SETTLED[folder] = content(folder)


# -- folders -----------------------------------------------------------------------------------------


def test_files(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(files(target / "new" / "folder")) is None
    found = check(files(target / "new", format="csv"), pa.schema([("id", pa.list_(pa.int64()))]))
    assert isinstance(found, InvalidSchemaError)
    assert "sink.a.columns" in found.fix
    (target / "file").touch()
    settled(target)
    found = check(files(target / "file" / "below"))
    assert isinstance(found, InvalidOptionError)
    assert "option 'sink.a.path'" in found.message
    assert f"{target}/file' is not a folder" in found.message
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(target))
    found = check(files(target / "new"))
    assert isinstance(found, UnavailableError)
    assert "sink 'a'" in found.message
    assert "no right to write" in found.message


# -- tables ------------------------------------------------------------------------------------------


def test_delta(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deltalake = pytest.importorskip("deltalake")
    path = target / "t"
    assert check(delta(path)) is None
    found = check(delta(path, create=False))
    assert isinstance(found, InvalidOptionError)
    assert "there is no Delta table" in found.message
    found = check(delta(path, partition_by="day"))
    assert isinstance(found, InvalidOptionError)
    assert "option 'sink.a.partition.by' has the value 'day'" in found.message
    assert isinstance(check(delta(path), pa.schema([("id", pa.uint64())])), InvalidSchemaError)
    deltalake.DeltaTable.create(str(path), SCHEMA)
    settled(target)
    assert check(delta(path)) is None
    found = check(delta(path), AS_TEXT)
    assert isinstance(found, InvalidSchemaError)
    assert "column 'id' is string in the frame and int64 in the table" in found.message
    found = check(delta(path), WIDER)
    assert isinstance(found, InvalidSchemaError)
    assert "it has no column 'more'" in found.message
    assert check(delta(path, schema_evolution="add"), WIDER) is None
    found = check(delta(path, schema_evolution="add"), AS_TEXT.append(pa.field("more", pa.int32())))
    assert isinstance(found, InvalidSchemaError)
    assert "'more'" not in found.message
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert isinstance(check(delta(path)), UnavailableError)


def test_a_delta_table_in_a_store_that_is_down() -> None:
    pytest.importorskip("deltalake")
    storage = {"aws_endpoint_url": "http://127.0.0.1:9", "aws_allow_http": "true", "aws_region": "x"}
    storage |= {"aws_access_key_id": "me", "aws_secret_access_key": "hunter2"}
    found = check(delta("s3://bucket/t", storage=storage))
    assert isinstance(found, SinkUnavailableError)
    assert "sink 'a'" in found.message
    assert "127.0.0.1:9" in found.message
    assert "\x1b" not in found.message
    assert "hunter2" not in str(found)
    assert "sink.a.*" in found.fix


def test_iceberg(target: Path) -> None:
    pyiceberg = pytest.importorskip("pyiceberg.catalog")
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{target}/catalog.db",
        "warehouse": f"file://{target}/warehouse",
    }

    def made(**options: Any) -> Sink:
        return iceberg("db.t", catalog=catalog, **options)

    assert check(made()) is None, "neither catalog nor table exist"
    assert check(made(partition_by=["bucket(4, id)", "name"])) is None
    found = check(made(partition_by="day"))
    assert isinstance(found, InvalidSchemaError)
    assert "day" in found.message
    assert "partition.by" in found.fix
    found = check(made(partition_by="hours(id)"))
    assert isinstance(found, InvalidSchemaError)
    assert "hour does not take a column of the type long, as 'id' is" in found.message
    found = check(made(create=False))
    assert isinstance(found, InvalidOptionError)
    assert "has no Iceberg table 'db.t'" in found.message
    sqlite3.connect(target / "catalog.db").close()
    (target / "catalog.db").touch()
    settled(target)
    assert check(made()) is None, "the database exists and holds no catalog"
    loaded = pyiceberg.load_catalog("default", **catalog)
    loaded.create_namespace("db")
    settled(target)
    assert check(made()) is None, "the catalog exists and holds no table"
    loaded.create_table("db.t", SCHEMA)
    loaded.close()
    settled(target)
    assert check(made()) is None
    found = check(made(), AS_TEXT)
    assert isinstance(found, InvalidSchemaError)
    assert "column 'id' is string in the frame and int64 in the table" in found.message
    assert isinstance(check(made(), WIDER), InvalidSchemaError)
    assert check(made(schema_evolution="add"), WIDER) is None
    found = check(made(schema_evolution="add"), AS_TEXT)
    assert isinstance(found, InvalidSchemaError)
    assert "cannot be evolved" in found.message


def test_an_iceberg_catalog_that_is_down_or_unknown(target: Path) -> None:
    pytest.importorskip("pyiceberg.catalog")
    down = check(iceberg("db.t", catalog={"type": "rest", "uri": "http://127.0.0.1:9/", "token": "hunter2"}))
    assert isinstance(down, SinkUnavailableError)
    assert "hunter2" not in str(down)
    unknown = check(iceberg("db.t", catalog={"type": "no-such"}))
    assert isinstance(unknown, InvalidOptionError)
    assert "sink.a.catalog.type" in unknown.fix
    nowhere = check(iceberg("db.t", catalog={"type": "sql", "uri": f"sqlite:///{target}/no/catalog.db"}))
    assert isinstance(nowhere, InvalidOptionError)
    assert "does not exist" in nowhere.message


# -- databases ---------------------------------------------------------------------------------------


def test_sql(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    file = target / "a.db"
    url = f"sqlite:///{file}"
    assert check(sql(url, "t")) is None, "the database does not exist yet"
    found = check(sql(f"sqlite:///{target}/no/such/folder.db", "t"))
    assert isinstance(found, InvalidOptionError)
    assert f"{target}/no/such/folder.db' does not exist" in found.message
    found = check(sql(url, "t", mode="upsert", keys="key"))
    assert isinstance(found, InvalidOptionError)
    assert "option 'sink.a.keys' names 'key'" in found.message
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("CREATE TABLE strict (id INTEGER, need TEXT NOT NULL)")
    settled(target)
    assert check(sql(url, "t")) is None
    assert check(sql(url, "t", mode="upsert", keys="id")) is None
    assert check(sql(url, "new")) is None
    found = check(sql(url, "new", create=False))
    assert isinstance(found, InvalidSchemaError)
    assert "no table 'new'" in found.message
    assert "sink.a.create=true" in found.fix
    for schema, table, options, message in (
        (WIDER, "t", {}, "has no column 'more'; its columns are 'id', 'name'"),
        (AS_TEXT, "t", {}, None),
        (pa.schema([("id", pa.int64())]), "strict", {}, "requires the column 'need'"),
        (SCHEMA, "t", {"mode": "upsert", "keys": "name"}, "no primary key or unique constraint"),
        (pa.schema([("x", pa.duration("s"))]), "new", {}, "no SQL type"),
    ):
        found = check(sql(url, table, **options), schema)
        assert found is None if message is None else isinstance(found, InvalidSchemaError)
        assert message is None or message in str(found)
    found = check(sql(url, "t", two_phase="require"))
    assert isinstance(found, InvalidOptionError)
    assert "option 'sink.a.two.phase' has the value 'require'" in found.message
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert isinstance(check(sql(url, "t")), UnavailableError)


def test_a_file_that_is_no_database(target: Path) -> None:
    pytest.importorskip("sqlalchemy")
    (target / "a.db").write_bytes(b"not a database" * 100)
    settled(target)
    found = check(sql(f"sqlite:///{target}/a.db", "t"))
    assert isinstance(found, SinkUnavailableError)
    assert "file is not a database" in found.message
    assert "option 'sink.a.url'" in found.fix


def test_a_check_of_a_database_that_a_query_writes_to(target: Path) -> None:
    """Another process holds the lock for writing."""
    pytest.importorskip("sqlalchemy")
    file = target / "a.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("CREATE TABLE t (id INTEGER, name TEXT)")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO t VALUES (1, 'a')")
        assert check(sql(f"sqlite:///{file}", "t")) is None
        writer.execute("COMMIT")
        assert writer.execute("SELECT * FROM t").fetchall() == [(1, "a")]
    settled(target)


# -- services ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture
def service(process: HttpService) -> HttpService:
    process.reset()
    return process


@pytest.mark.parametrize("status", ["401", "404"])
def test_http_two_phase(service: HttpService, status: str) -> None:
    assert check(http(service.url)) is None
    service.fault(("pending", status))
    found = check(http(service.url, auth="Bearer hunter2"))
    assert isinstance(found, SinkFailedError)
    assert f"HTTP {status}" in found.message
    assert "option 'sink.a.url', the credentials" in found.fix
    assert "hunter2" not in str(found)
    assert service.log() == [], "the check sent no batch"


def test_http_idempotency_key(service: HttpService) -> None:
    url = f"{service.url}/rows"
    assert check(http(url, mode="idempotency-key")) is None
    with_state = http(url, mode="idempotency-key", status_url=f"{service.url}/status/{{id}}")
    assert check(with_state) is None
    service.fault(("status", "403"))
    found = check(with_state)
    assert isinstance(found, SinkFailedError)
    assert "option 'sink.a.status.url'" in found.fix
    assert service.log() == [], "the check sent no batch"


def test_http_wrong_rows_and_credentials(service: HttpService) -> None:
    found = check(http(service.url), pa.schema([("x", pa.null())]))
    assert isinstance(found, InvalidSchemaError)
    found = check(http(service.url, auth_env="KAFKA_EOS_TEST_UNSET"))
    assert isinstance(found, InvalidOptionError)
    assert "option 'sink.a.auth.env'" in found.message


@pytest.mark.parametrize(
    "make",
    [
        lambda: http("http://127.0.0.1:9/"),
        lambda: http("http://127.0.0.1:9/", mode="idempotency-key"),
        lambda: s3("s3://bucket/t", endpoint="http://127.0.0.1:9", region="x"),
        lambda: sql("postgresql+psycopg://me:hunter2@127.0.0.1:9/shop", "t"),
        lambda: sql("mysql+pymysql://me:hunter2@127.0.0.1:9/shop", "t"),
    ],
    ids=["two-phase", "idempotency-key", "s3", "postgres", "mysql"],
)
def test_a_system_that_refuses_connections(make: Callable[[], Sink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    found = check(make())
    if isinstance(found, InvalidOptionError) and "not installed" in str(found):
        pytest.skip(str(found))
    assert isinstance(found, SinkUnavailableError), found
    assert "sink 'a'" in found.message
    assert "hunter2" not in str(found)
    assert "'sink.a." in found.fix


@pytest.fixture
def silent() -> Iterator[str]:
    """Returns host and port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "make",
    [
        lambda at: http(f"http://{at}/"),
        lambda at: s3("s3://bucket/t", endpoint=f"http://{at}", region="x"),
        lambda at: sql(f"postgresql+psycopg://me:pw@{at}/shop", "t"),
    ],
    ids=["http", "s3", "postgres"],
)
def test_a_system_that_never_answers(
    silent: str, make: Callable[[str], Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.3)
    found = check(make(silent), seconds=0.3)
    if isinstance(found, InvalidOptionError) and "not installed" in str(found):
        pytest.skip(str(found))
    assert isinstance(found, SinkUnavailableError)
    assert "sink 'a'" in found.message


# -- all sinks of a query ----------------------------------------------------------------------------


class Slow(MemorySink):
    """A user's sink whose check waits until all of the others have begun."""

    barrier = threading.Barrier(3)

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        self.barrier.wait(deadline.remaining_seconds())
        raise ConnectionError(f"{self.system} is down")


class Broken(MemorySink):
    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        raise KeyError("x")


class Plain(MemorySink):
    """A user's sink without a check."""


def specs(sinks: Mapping[str, Sink]) -> Sequence[tuple[Any, pa.Schema]]:
    return [(parsed(name, dict(each.stated)), SCHEMA) for name, each in sinks.items()]


def test_all_sinks_are_checked_at_once_and_each_error_names_its_sink() -> None:
    sinks = {name: custom(Slow, system=name) for name in ("a", "b", "c")}
    found = check_targets(specs({**sinks, "d": custom(Broken, system="d"), "e": custom(Plain, system="e")}))
    assert list(found) == ["a", "b", "c", "d"]
    assert all(isinstance(each, SinkUnavailableError) for each in found.values())
    assert [f"sink {name!r}" in each.message for name, each in found.items()] == [True] * 4
    assert "ConnectionError: b is down" in found["b"].message
    assert "KeyError" in found["d"].message


def test_two_sinks_on_one_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="'a' and 'b' write to the same target"):
        check_targets(specs({"a": files(tmp_path), "b": files(tmp_path, format="json")}))


def test_no_sinks() -> None:
    assert check_targets([]) == {}

"""The typed constructors say what the table of options says, and their options parse to what was passed."""

from __future__ import annotations

import inspect
import pickle
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source import sink_options
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import SinkOption, constructors
from kafka_eos_source.sinks.constructors import Sink, custom, delta, files, http, iceberg, s3, sql
from kafka_eos_source.sinks.contract import OK, Outcome, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.iceberg import partition_by
from kafka_eos_source.sinks.sink_options import COMMON
from kafka_eos_source.sinks.specs import TYPES, parse, sink_class

#: The type that each constructor makes.
MADE: dict[Callable[..., Sink], str] = {
    delta: "delta",
    iceberg: "iceberg",
    sql: "sql",
    files: "filesystem",
    s3: "s3",
    http: "http",
}
REQUIRED: dict[Callable[..., Sink], dict[str, Any]] = {
    delta: {"path": "/lake/t"},
    iceberg: {"table": "db.t"},
    sql: {"url": "sqlite:////data/a.db", "table": "t"},
    files: {"path": "/data/t"},
    s3: {"path": "s3://bucket/t"},
    http: {"url": "https://host/in"},
}


def argument(option: SinkOption) -> str:
    return option.name.removesuffix(".*").replace(".", "_")


def options_of(make: Callable[..., Sink]) -> dict[str, SinkOption]:
    """Returns the options of the type that a constructor makes, by argument."""
    return {argument(each): each for each in (*sink_class("x", MADE[make]).OPTIONS, *COMMON[1:])}


@pytest.mark.parametrize("make", MADE, ids=MADE.values())
def test_arguments_and_defaults_are_those_of_the_table(make: Callable[..., Sink]) -> None:
    declared, signature = options_of(make), inspect.signature(make)
    assert list(signature.parameters) == list(declared)
    for name, parameter in signature.parameters.items():
        option = declared[name]
        positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert positional is option.required, name
        if option.required:
            assert parameter.default is inspect.Parameter.empty, name
        elif isinstance(option.default, dict):
            assert (parameter.default, option.default) == (None, {}), name
        elif isinstance(parameter.default, str):
            assert option.parse(name, parameter.default) == option.default, name
        else:
            assert parameter.default == option.default, name


@pytest.mark.parametrize("make", MADE, ids=MADE.values())
def test_choices_and_types_are_those_of_the_table(make: Callable[..., Sink]) -> None:
    hints = typing.get_type_hints(make)
    for name, option in options_of(make).items():
        shown = re.findall(r"`([^`]+)`", option.kind) if re.fullmatch("`.*`", option.kind) else []
        literals = {text for kind in _members(hints[name]) for text in _choices(kind)}
        if len(shown) > 1:
            assert literals == set(shown), name
        else:
            assert not literals, name
        if isinstance(option.default, bool | int) and option.kind != "time":
            assert hints[name] is type(option.default), name


def _members(hint: Any) -> tuple[Any, ...]:
    return (hint,) if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


@pytest.mark.parametrize("make", MADE, ids=MADE.values())
def test_the_docstring_describes_each_argument_as_the_table_does(make: Callable[..., Sink]) -> None:
    declared = options_of(make)
    text = inspect.getdoc(make) or ""
    described = dict(
        re.findall(r"^    (\w+): ((?:.|\n(?!    \w+: |\n))*)", text.split("Args:")[1].split("\n\n")[0], re.M)
    )
    assert list(described) == list(declared)
    names = {each.name: name for name, each in declared.items()}
    for name, option in declared.items():
        wanted = re.sub(r"`([^`]+)`", lambda found: f"`{names.get(found[1], found[1])}`", option.meaning)
        if option.prefix:  # the option form shows the names of the options, the argument the keys of a dict
            wanted = wanted.replace(f"`{option.prefix}", "`")
        assert " ".join(described[name].split()).startswith(wanted.removesuffix(".")), name


def test_every_type_for_users_has_a_constructor() -> None:
    assert set(MADE.values()) == set(TYPES) - {"memory"}


# -- round trips -------------------------------------------------------------------------------------

#: A constructor and its arguments.
Call = tuple[Callable[..., Sink], dict[str, Any]]

_words = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=8)
_names = st.from_regex(r"[a-z][a-z0-9._-]{0,8}", fullmatch=True)
_columns = st.lists(_words, min_size=1, max_size=3, unique=True)
#: Values of options whose texts have a form of their own.
_SPECIAL = {
    "endpoint": st.just("https://store:9000"),
    "part.bytes": st.integers(5 << 20, 5 << 30),
    "upload.threads": st.integers(1, 64),
    "auth.header": st.just("X-Key"),
    "key.header": st.just("X-Id"),
    "status.url": st.just("https://host/state/{id}"),
    "buffer.bytes": st.integers(1 << 20, 1 << 40),
    "timeout": st.one_of(st.integers(1, 10**6), st.just("5s")),
}
_SQL_UPSERT = ("mode", "keys")


def _value_of(option: SinkOption) -> st.SearchStrategy[Any]:
    if option.name in _SPECIAL:
        return _SPECIAL[option.name]
    if isinstance(option.default, bool):
        return st.booleans()
    if isinstance(option.default, int):
        return st.integers(1, 10**6)
    if isinstance(option.default, dict):
        return st.dictionaries(_names.filter(lambda name: name != "name"), _words, max_size=3)
    if isinstance(option.default, tuple) or option.name == "columns":
        return _columns
    if re.fullmatch("`.*`", option.kind):
        return st.sampled_from(re.findall(r"`([^`]+)`", option.kind))
    return _words


@st.composite
def _calls(draw: st.DrawFn) -> Call:
    make = draw(st.sampled_from(list(MADE)))
    optional = {name: each for name, each in options_of(make).items() if not each.required}
    chosen = draw(st.sets(st.sampled_from(sorted(optional))))
    arguments = {name: draw(_value_of(optional[name])) for name in sorted(chosen)}
    if make is sql:
        keys = arguments.pop("keys", None)
        arguments.pop("mode", None)
        arguments |= {"mode": "upsert", "keys": keys} if keys else {}
    if make is http:
        if arguments.get("mode") != "idempotency-key":
            for name in ("key_header", "status_url", "on_conflict"):
                arguments.pop(name, None)
        if "auth" in arguments:
            arguments.pop("auth_env", None)
    return make, {**REQUIRED[make], **arguments}


@settings(max_examples=300, deadline=None)
@given(_calls(), st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True).filter(lambda name: name != "kafka"))
def test_options_parse_to_what_was_passed(
    call: tuple[Callable[..., Sink], dict[str, Any]], name: str
) -> None:
    make, arguments = call
    sink = make(**arguments)
    options = sink_options({name: sink})
    assert all(isinstance(each, str) for each in options.values())
    (spec,) = parse([name], {own: text for own, text in options.items() if own != "sinks"})
    declared = options_of(make)
    assert spec.type == MADE[make]
    for own, option in declared.items():
        wanted = arguments.get(own, option.default)
        found = spec.columns if own == "columns" else spec.options[option.name]
        if isinstance(wanted, list):
            wanted = (
                partition_by("x", ",".join(wanted)) if make is iceberg and own == "partition_by" else wanted
            )
            wanted = tuple(wanted)
        elif option.kind == "time":
            wanted = option.parse(own, str(wanted))
        assert found == wanted, own
    assert pickle.loads(pickle.dumps(sink)) == sink
    assert make(**arguments) == sink


def test_only_what_differs_from_the_defaults_is_stated() -> None:
    sink = sql("sqlite:////a.db", "t", create=True, keys=(), batch_rows=10_000, schema=None)
    assert sink.options("db") == {
        "sink.db.type": "sql",
        "sink.db.url": "sqlite:////a.db",
        "sink.db.table": "t",
    }


def test_sink_options_are_options_of_a_query() -> None:
    found = sink_options({"lake": delta("/lake", columns=["id"]), "files": files("/data")})
    assert found["sinks"] == "lake,files"
    specs = parse_write(
        {"kafka.bootstrap.servers": "b:9092", "checkpointLocation": "/tmp/c", **found}, streaming=True
    ).sinks
    assert [(each.name, each.type, each.columns) for each in specs] == [
        ("lake", "delta", ("id",)),
        ("files", "filesystem", None),
    ]


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: delta("/t", compression="lz4"), "'compression' of delta.*'sink.<name>.compression'.*'lz4'"),
        (lambda: delta("/t", create="yes"), r"'create' of delta\(\).*sink.<name>.create.*str; expected True"),
        (
            lambda: delta("/t", buffer_bytes="1GB"),
            "'buffer_bytes'.*sink.<name>.buffer.bytes.*expected an int",
        ),
        (lambda: delta("/t", buffer_bytes=True), "'buffer_bytes'.*bool; expected an int"),
        (lambda: delta("/t", buffer_bytes=1), "'buffer_bytes'.*'sink.<name>.buffer.bytes' has the value '1'"),
        (lambda: delta("/t", partition_by=["a,b"]), "'partition_by'.*no text contains a comma"),
        (lambda: delta("/t", partition_by=["a", "a"]), "'partition_by'.*without duplicates"),
        (lambda: delta("/t", partition_by=7), "'partition_by'.*int; expected a list of texts"),
        (lambda: delta("/t", columns=[]), "'columns' of delta"),
        (lambda: delta("/t", columns=[" id"]), "'columns'.*blanks"),
        (lambda: delta("/t", storage="a=b"), "'storage' of delta.*str; expected a dict"),
        (lambda: delta("/t", properties=["x"]), "'properties'.*list; expected a dict"),
        (lambda: delta(5), "'path' of delta.*int; expected a text"),
        (lambda: iceberg("t"), r"iceberg\(\): option 'sink.<name>.table'.*namespace.table"),
        (lambda: iceberg("a.t", catalog={"URI": "x"}), "'catalog'.*lower case"),
        (lambda: iceberg("a.t", catalog={"name": "x"}), "'name'.*use the argument 'catalog_name'"),
        (lambda: iceberg("a.t", catalog={"uri": ""}), "sink.<name>.catalog.uri"),
        (lambda: iceberg("a.t", partition_by=["bucket(x)"]), "'partition_by' of iceberg.*bucket"),
        (
            lambda: iceberg("a.t", catalog={"uri": "http://far/", "token": "hunter2"}),
            r"iceberg\(\): option 'sink.<name>.catalog.uri'.*without encryption",
        ),
        (lambda: sql("sqlite://", "t", mode="upsert"), r"sql\(\): .*'sink.<name>.keys' is not set"),
        (lambda: sql(" ", "t"), r"'url' of sql\(\).*not shown"),
        (lambda: sql(7, "t"), "'url' of sql.*int; expected a text"),
        (lambda: sql("sqlite://", None), "'table' of sql.*NoneType; expected a text"),
        (lambda: files("/t", format="xml"), "'format' of files.*'xml'; expected parquet or json or csv"),
        (lambda: s3("bucket/t"), "'path' of s3"),
        (lambda: s3("s3://bucket/t", timeout=1.5), "'timeout' of s3.*float; expected time"),
        (lambda: http("https://u:p@host"), r"'url' of http\(\)"),
        (lambda: http("https://host", key_header="X"), r"http\(\): option 'sink.<name>.key.header' requires"),
    ],
)
def test_a_wrong_value_names_the_argument_and_the_option(make: Callable[[], Sink], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message) as refused:
        make()
    assert "hunter2" not in str(refused.value)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="formt"):
        files("/t", formt="csv")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["Lake", "kafka", "a b", "", "a,b"])
def test_a_name_that_no_sink_may_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidOptionError, match="'sinks'"):
        sink_options({name: files("/t")})


def test_a_repr_shows_options_and_no_secret() -> None:
    made = [
        sql("postgresql+psycopg://me:hunter2@db/shop?sslkey=hunter2", "t"),
        delta("s3://me:hunter2@b/t", storage={"aws_secret_access_key": "hunter2", "aws_region": "eu"}),
        iceberg("a.t", catalog={"uri": "https://me:hunter2@host", "token": "hunter2"}),
        http("https://host/in", auth="Bearer hunter2"),
        http("https://host/in?key=hunter2-hunter2", mode="idempotency-key"),
        files("s3://me:hunter2@bucket/x"),
    ]
    assert not any("hunter2" in f"{each!r} {each}" for each in made)
    assert repr(made[0]) == "Sink(sql, url='postgresql+psycopg://db/shop?sslkey=********', table='t')"
    assert "storage.aws_region='eu'" in repr(made[1])


# -- sinks of users ----------------------------------------------------------------------------------


class Queue(TwoPhaseSink):
    """A user's sink, in a module that others can import."""

    OPTIONS = (
        SinkOption("queue", lambda _name, text: text, None, "name", "Name.", required=True),
        SinkOption("max.size", lambda _name, text: int(text), None, "count", "Size."),
        SinkOption("broker.*", lambda _name, text: text, {}, "text", "Properties."),
    )

    def __init__(self, queue: str, max_size: int | None = None, broker: dict[str, str] | None = None) -> None:
        self.given = (queue, max_size, broker)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        return OK

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return []


def test_a_class_becomes_its_import_path_with_its_options() -> None:
    sink = custom(Queue, queue="q", max_size=7, broker={"host": "h"}, columns="id,name")
    assert sink.options("q") == {
        "sink.q.type": f"{__name__}:Queue",
        "sink.q.queue": "q",
        "sink.q.max.size": "7",
        "sink.q.broker.host": "h",
        "sink.q.columns": "id,name",
    }
    (spec,) = parse(["q"], sink.options("q"))
    found = spec.build()
    assert isinstance(found, Queue)
    assert found.given == ("q", 7, {"host": "h"})


def test_a_wrong_call_of_custom_is_refused() -> None:
    class Local(Queue):
        pass

    with pytest.raises(TypeError, match="unexpected argument 'quue'"):
        custom(Queue, quue="q")
    with pytest.raises(TypeError, match="no argument 'queue'"):
        custom(Queue)
    with pytest.raises(TypeError, match="with an object"):
        custom(Queue("q"), max_size=7)
    with pytest.raises(InvalidOptionError, match=r"cannot be imported.*custom\(Local"):
        custom(Local, queue="q")
    with pytest.raises(InvalidOptionError, match="no subclass"):
        custom(dict)  # type: ignore[arg-type]


def test_the_constructors_are_public() -> None:
    import kafka_eos_source

    for name in ("custom", "delta", "files", "http", "iceberg", "s3", "sink_options", "sql"):
        assert getattr(kafka_eos_source, name) is getattr(constructors, name)

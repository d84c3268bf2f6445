"""How the driver uses sinks: ids in tokens, errors when sinks fail, and queries that it refuses."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.commit import micro_batch, open_sinks
from kafka_eos_source.commit.two_phase import Fate, Sinks, fate, named_by
from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    RestartQueryError,
    SinkFailedError,
    SinkUndecidedError,
    UnavailableError,
)
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.protocol.token import UNDECIDED, PreparedSinks, Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import Secrets
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import (
    Fatal,
    Outcome,
    Retryable,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.memory import Memory, MemorySink
from kafka_eos_source.sinks.row_checks import LongestText, RowRule
from kafka_eos_source.sinks.sink_options import SinkNaming
from kafka_eos_source.sinks.specs import SinkSpec, parse, targets
from kafka_eos_source.sinks.targets import refuse_shared
from kafka_eos_source.sinks.watched import WatchedSink
from kafka_eos_source.spark.pickled import to_option
from kafka_eos_source.stage.fanout import Plan, Route
from kafka_eos_source.testing.sinks import ROWS, Given, deadline
from tests.sinks.scripted_sink import NAMES, Scripted, staged, token

ATTEMPT = "0123456789abcdef0123"
CONTEXTS = {name: SinkContext(name, "app", "cluster") for name in NAMES}


ASK_FOR_CLUSTER_ID = open_sinks.cluster_id


@pytest.fixture(autouse=True)
def _a_cluster_without_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sinks, "cluster_id", lambda _options: "cluster")


def memories() -> dict[str, TwoPhaseSink]:
    """Returns two open sinks that write to one system."""
    system = uuid.uuid4().hex
    found: dict[str, TwoPhaseSink] = {}
    for name in NAMES:
        found[name] = MemorySink(system)
        found[name].open(CONTEXTS[name])
    return found


def memory_of(sinks: dict[str, TwoPhaseSink]) -> Memory:
    sink = sinks["left"]
    assert isinstance(sink, MemorySink)
    return sink.memory


def scripted(left: list[Outcome], right: list[Outcome]) -> tuple[Scripted, Scripted, Sinks, Token]:
    """Returns two sinks with a prepared batch that Kafka has committed, and the token of the batch."""
    system = uuid.uuid4().hex
    one, two = Scripted(system, *left), Scripted(system, *right)
    for name, sink in zip(NAMES, (one, two), strict=True):
        sink.open(CONTEXTS[name])
    work = Sinks({"left": one, "right": two}, staged(), 5, sleep=lambda _seconds: None)
    return one, two, work, token(sinks=work.prepare(9, deadline()))


def test_sink_transaction_ids_contain_sequence_number_and_sink_but_no_batch_id() -> None:
    sinks = memories()
    work = Sinks(sinks, staged(), 5)
    prepared = work.prepare(9, deadline())
    assert prepared is not None
    memory = memory_of(sinks)
    assert sorted(memory.prepared) == [
        CONTEXTS[name].txn(9, prepared.sink_transaction_id) for name in sorted(NAMES)
    ]
    work.finish(token(sinks=prepared), deadline())
    assert not memory.prepared
    assert len(memory.committed) == 2, "two sinks on one system: none took the other's"


class WithTypo(MemorySink):
    """A user's sink with a mistake."""

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        return {}["pass:word"]


def test_a_mistake_in_a_users_sink_is_logged_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    sink = WithTypo(uuid.uuid4().hex)
    sink.open(replace(CONTEXTS["left"], secrets=Secrets(frozenset({"pass:word"}))))
    for _ in range(2):
        with pytest.raises(SinkFailedError, match="KeyError"):
            Sinks({"left": sink}, {"left": staged()["left"]}, 5).prepare(9, deadline())
    first, second = (each.getMessage() for each in caplog.records)
    assert first.startswith("sink 'left' raised an exception:\nTraceback")
    assert Path(__file__).name in first
    assert "in prepare" in first
    assert second.startswith("sink 'left' raised KeyError")
    assert "pass:word" not in caplog.text


def test_a_permanent_failure_is_raised_at_once_although_another_sink_is_down() -> None:
    """An earlier version raised it only when the other sink was back, or at the commit's deadline."""
    one, two, work, named = scripted([Fatal("the disk is gone", "restore it.")], [Retryable("down")] * 1000)
    with pytest.raises(SinkFailedError) as raised:
        work.finish(named, deadline())
    for text in ("'left'", "the disk is gone", "'right'", "down", "restore it", "-left-9-"):
        assert text in str(raised.value)
    assert (one.commits, two.commits) == (1, 1), "the driver calls each sink once before it raises"


def test_after_a_permanent_failure_the_next_start_commits_in_the_other_sinks() -> None:
    """A sink that was down still has the batch prepared."""
    one, two, work, named = scripted([Fatal("no")], [Retryable("down")])
    with pytest.raises(SinkFailedError):
        work.finish(named, deadline())
    assert [txn.sink for txn in two.memory.prepared] == ["left", "right"]
    again = Sinks({"left": one, "right": two}, {}, 6)
    again.list_prepared(deadline())
    again.resolve_prepared(named, deadline())
    assert not two.memory.prepared
    assert [txn.sink for txn in two.memory.committed] == ["left", "right"]


def test_the_error_names_every_permanent_failure() -> None:
    _, _, work, named = scripted([Fatal("one")], [Fatal("two")])
    with pytest.raises(SinkFailedError, match=r"'left'.*one.*'right'.*two"):
        work.finish(named, deadline())


def test_the_other_sinks_commit_before_a_failure_is_raised() -> None:
    _, two, work, named = scripted([Fatal("no")], [])
    with pytest.raises(SinkFailedError, match="'left'"):
        work.finish(named, deadline())
    assert [txn.sink for txn in two.memory.committed] == ["right"]


def test_a_sink_transaction_id_in_the_token_that_no_sink_knows_fails_the_query() -> None:
    """Another checkpoint wrote the token; `OK` would lose the batch silently."""
    work = Sinks(memories(), {}, 6)
    named = token(sinks=PreparedSinks(ATTEMPT, NAMES))
    with pytest.raises(SinkFailedError, match=r"'left' cannot commit app-.*'right' cannot commit app-"):
        work.finish(named, deadline())


def test_without_a_token_an_operator_decides_even_after_the_batch_is_written_again() -> None:
    """A sequence number does not identify the batch."""
    sinks = memories()
    memory = memory_of(sinks)
    memory.prepared[CONTEXTS["left"].txn(5, ATTEMPT)] = ROWS
    work = Sinks({"left": sinks["left"]}, {}, 5)
    work.list_prepared(deadline())
    with pytest.raises(SinkUndecidedError, match="-left-5-"):
        work.resolve_prepared(None, deadline())


@given(
    held=st.none() | st.integers(0, 9),
    prepared=st.none()
    | st.sampled_from([UNDECIDED, *(PreparedSinks(ATTEMPT, names) for names in (NAMES, ("left",)))]),
    sink=st.sampled_from(NAMES),
    number=st.integers(0, 9),
    attempt=st.sampled_from([ATTEMPT, "f" * 20]),
)
def test_only_prepared_work_that_the_token_names_is_committed(
    held: int | None, prepared: PreparedSinks | None, sink: str, number: int, attempt: str
) -> None:
    txn = CONTEXTS[sink].txn(number, attempt)
    read = None if held is None else token(held, sinks=prepared)
    decided = fate(CONTEXTS[sink], txn, read)
    speaks = read is not None and read.sinks != UNDECIDED
    names = (
        speaks
        and prepared is not None
        and sink in prepared.names
        and attempt == prepared.sink_transaction_id
        and number == held
    )
    assert (decided is Fate.COMMIT) is bool(names)
    after_it = held is not None and number > held
    assert (decided is Fate.LEAVE) is (not speaks and not after_it)


def test_a_token_decides_nothing_for_a_sink_that_it_does_not_name() -> None:
    named = token(sinks=PreparedSinks(ATTEMPT, ("left",)))
    assert named_by(named, CONTEXTS["left"]) == CONTEXTS["left"].txn(9, ATTEMPT)
    assert named_by(named, CONTEXTS["right"]) is None
    assert named_by(token(sinks=UNDECIDED), CONTEXTS["left"]) is None


class Unknown(MemorySink):
    def target(self) -> str | None:
        return None


SAME: list[tuple[TwoPhaseSink, TwoPhaseSink]] = [
    (constructors.files("/data/x").build(), constructors.files("file:///data/./x/", format="json").build()),
    (constructors.files("s3://bucket/x/").build(), constructors.s3("s3a://bucket/x").build()),
    (
        constructors.s3("s3://bucket/x", endpoint="http://a:1", allow_http=True).build(),
        constructors.s3("s3://bucket/x/", format="json", endpoint="http://a:1", allow_http=True).build(),
    ),
    (constructors.http("http://Host/batches").build(), constructors.http("http://host:80/batches/").build()),
    (
        constructors.files("s3://key:secret@bucket/x?endpoint_override=A:9000&scheme=http").build(),
        constructors.s3("s3a://bucket/x", endpoint="http://a:9000/", allow_http=True).build(),
    ),
    (
        constructors.http("https://h/in?table=x&token=secret", mode="idempotency-key").build(),
        constructors.http("https://h/in/?token=hidden&table=x", mode="idempotency-key").build(),
    ),
    (MemorySink("a"), MemorySink("a")),
]
APART: list[tuple[TwoPhaseSink, TwoPhaseSink]] = [
    (constructors.files("/data/x").build(), constructors.files("/data/y").build()),
    (constructors.s3("s3://bucket/x").build(), constructors.s3("s3://other/x").build()),
    (
        constructors.s3("s3://bucket/x", endpoint="http://a:1", allow_http=True).build(),
        constructors.s3("s3://bucket/x", endpoint="http://b:1", allow_http=True).build(),
    ),
    (constructors.http("http://host/a").build(), constructors.http("https://host/a").build()),
    (
        constructors.files("s3://b/x?endpoint_override=a:1").build(),
        constructors.files("s3://b/x?endpoint_override=b:1").build(),
    ),
    (
        constructors.http("https://h/in?table=x", mode="idempotency-key").build(),
        constructors.http("https://h/in?table=y", mode="idempotency-key").build(),
    ),
    (MemorySink("a"), MemorySink("b")),
    (Unknown("a"), Unknown("a")),
]


def databases(*pairs: tuple[dict[str, Any], dict[str, Any]]) -> list[tuple[TwoPhaseSink, TwoPhaseSink]]:
    pytest.importorskip("sqlalchemy")

    return [(constructors.sql(**one).build(), constructors.sql(**two).build()) for one, two in pairs]


def tables(same: bool) -> list[tuple[TwoPhaseSink, TwoPhaseSink]]:
    pytest.importorskip("deltalake")
    pytest.importorskip("pyiceberg")

    rest = {"type": "rest", "uri": "https://me:secret@catalog/v1", "credential": "hidden"}
    if same:
        return [
            (constructors.delta("/data/t").build(), constructors.files("/data/t/").build()),
            (
                constructors.delta(
                    "s3a://bucket/t",
                    storage={"AWS_ENDPOINT_URL": "http://A:1", "aws_secret_access_key": "hidden"},
                ).build(),
                constructors.s3("s3://bucket/t", endpoint="http://a:1", allow_http=True).build(),
            ),
            (
                constructors.iceberg(
                    "a.t", catalog_name="one", catalog={**rest, "warehouse": "s3a://me:secret@b/w/"}
                ).build(),
                constructors.iceberg(
                    "a.t", catalog_name="one", catalog={**rest, "warehouse": "s3://b/w"}
                ).build(),
            ),
            (
                constructors.iceberg("a.t", catalog_name="one", catalog=rest).build(),
                constructors.iceberg(
                    "a.t", catalog_name="two", catalog={**rest, "uri": "https://catalog/v1/"}
                ).build(),
            ),
        ]
    return [
        (constructors.delta("/data/t").build(), constructors.delta("/data/u").build()),
        (
            constructors.iceberg("a.t", catalog_name="one", catalog=rest).build(),
            constructors.iceberg("a.u", catalog_name="one", catalog=rest).build(),
        ),
        (
            constructors.iceberg("a.t", catalog_name="one").build(),
            constructors.iceberg("a.t", catalog_name="two").build(),
        ),
    ]


def test_two_sinks_on_one_target_are_refused_and_both_named() -> None:
    postgres = "postgresql+psycopg://me:secret@Db/shop"
    sql = databases(
        ({"url": postgres, "table": "t"}, {"url": "postgresql+psycopg2://you@db:5432/shop", "table": "t"}),
        (
            {"url": "sqlite:////data/../data/a.db", "table": "t"},
            {"url": "sqlite:////data/a.db", "table": "t"},
        ),
    )
    for one, two in [*SAME, *sql, *tables(same=True)]:
        assert one.target() == two.target()
        with pytest.raises(InvalidOptionError, match="'left' and 'right'") as raised:
            refuse_shared({"left": one, "right": two})
        assert not any(secret in str(raised.value) for secret in ("secret", "hidden"))


def test_two_sinks_on_two_targets_are_not_refused() -> None:
    url = "postgresql+psycopg://me@db/shop"
    sql = databases(
        ({"url": url, "table": "t"}, {"url": url, "table": "u"}),
        ({"url": url, "table": "t"}, {"url": url, "table": "t", "schema": "s"}),
        ({"url": url, "table": "t"}, {"url": f"{url}2", "table": "t"}),
    )
    for one, two in [*APART, *sql, *tables(same=False)]:
        refuse_shared({"left": one, "right": two})


def test_a_sink_without_a_target_is_described_by_its_type_and_options() -> None:
    def spec(**options: str) -> SinkSpec:
        stated = {"sink.a.type": f"{__name__}:Unknown", **{f"sink.a.{n}": v for n, v in options.items()}}
        (found,) = parse(["a"], stated)
        return found

    assert spec(system="one").target() == spec(system="one").target()
    assert spec(system="one").target() != spec(system="two").target()
    assert targets([spec(system="one")]) == {"a": f"{__name__}:Unknown {{'system': 'one'}}"}
    as_object = SinkSpec("a", "object", pickled=to_option(MemorySink("m"), "sink 'a'", fix=""))
    assert as_object.target() == "memory 'm'"
    secret = "https://h/in?table=x&token=secret"
    (http,) = parse(["a"], {"sink.a.type": "http", "sink.a.url": secret, "sink.a.mode": "idempotency-key"})
    assert "secret" not in http.target()


def test_a_link_and_its_folder_are_the_same_target(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert (
        constructors.files(str(tmp_path / "a")).build().target()
        == constructors.files(str(tmp_path / "b")).build().target()
    )


def test_a_process_asks_once_for_the_cluster_and_the_planning_process_again_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str | Exception] = []

    class Admin:
        def __init__(self, _kafka: object) -> None: ...
        def __enter__(self) -> Admin:
            return self

        def __exit__(self, *_: object) -> None: ...
        def cluster_id(self, _deadline: Deadline) -> str:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    options = given_options(tmp_path, **{"kafka.bootstrap.servers": uuid.uuid4().hex, "sinks": "left"})
    monkeypatch.setattr(open_sinks, "TopicAdmin", Admin)
    ask = ASK_FOR_CLUSTER_ID
    answers[:] = [UnavailableError("down")]
    with pytest.raises(UnavailableError):
        ask(options)
    answers[:] = ["A"]
    assert (ask(options), ask(options, renew=True)) == ("A", "A")
    monkeypatch.setattr(open_sinks, "_CLUSTER_SECONDS", 0.0)
    answers[:] = [UnavailableError("down"), "B"]
    assert ask(options, renew=True) == "A", "what is known, if no broker answers"
    assert (ask(options, renew=True), ask(options)) == ("B", "B")
    answers[:] = ["C"]
    open_sinks.close(options, "app")
    assert ask(options) == "C", "after an error it asks again"


def plan(options: Any) -> Plan:
    return Plan(tuple(Route(spec, (0, 1, 2), ROWS.schema) for spec in options.sinks), None, None, kafka=True)


def given_options(tmp_path: Path, **more: str) -> Any:
    return parse_write(
        {
            "kafka.bootstrap.servers": "b:9092",
            "topic": "out",
            "checkpointlocation": str(tmp_path / "checkpoint"),
            "application.id": uuid.uuid4().hex,
            "sinks": "left,right",
            "sink.left.type": "filesystem",
            "sink.left.path": str(tmp_path / "rows"),
            **more,
        },
        streaming=True,
    )


def test_the_check_before_the_first_batch_refuses_a_shared_target(tmp_path: Path) -> None:
    same = {
        "sink.right.type": "filesystem",
        "sink.right.path": f"{tmp_path}/rows/",
        "sink.right.format": "json",
    }
    with pytest.raises(InvalidOptionError, match="'left' and 'right' write to the same target"):
        open_sinks.make_ready(given_options(tmp_path, **same), plan(given_options(tmp_path, **same)))
    assert not (tmp_path / "rows").exists(), "nothing was made there"


def test_an_error_of_a_check_names_the_sink_and_its_options(tmp_path: Path) -> None:
    """A query may have several sinks of one type, and each knows only the short names of its options."""
    url = {"sink.right.type": "sql", "sink.right.url": "pass:word", "sink.right.table": "t"}
    options = given_options(tmp_path, **url)
    with pytest.raises(InvalidOptionError, match=r"option 'sink\.right\.url' has a value \(not shown\)"):
        open_sinks.make_ready(options, plan(options))


class Choosy(MemorySink):
    """A user's sink whose check refuses every schema."""

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        raise InvalidSchemaError("column 'id' has type int64.", fix="correct sink.<name>.columns.")


def test_an_error_of_a_users_sink_names_the_sink(tmp_path: Path) -> None:
    options = given_options(tmp_path, **{"sink.right.type": f"{__name__}:Choosy"})
    with pytest.raises(
        InvalidSchemaError, match=r"sink 'right': column 'id' .* correct sink\.right\.columns"
    ):
        open_sinks.make_ready(options, plan(options))


class WithRules(MemorySink):
    """A user's sink whose table may change."""

    most: ClassVar[int] = 5
    error: ClassVar[Exception | None] = None
    asked: ClassVar[int] = 0
    column: ClassVar[str] = "name"

    @property
    def refuses_rows(self) -> bool:
        return True

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        if WithRules.error is not None:
            raise WithRules.error

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        WithRules.asked += 1
        if WithRules.error is not None:
            raise WithRules.error
        return (LongestText(column=WithRules.column, most=WithRules.most),)


@pytest.fixture
def with_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Plan]:
    """Returns what the driver does for each batch of a query with a sink that has rules for rows."""
    monkeypatch.setattr(WithRules, "asked", 0)
    options = given_options(tmp_path, **{"sink.right.type": f"{__name__}:WithRules"})
    return lambda: open_sinks.make_ready(options, plan(options))


@pytest.mark.parametrize("fails_in", ["this process", "another process"])
def test_after_a_batch_has_failed_sinks_are_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    """An error says that the next start asks the sink again. Another process may pickle the tasks then."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(WithRules, "asked", 0)
    options = given_options(tmp_path, **{"sink.right.type": f"{__name__}:WithRules"})
    other = given_options(tmp_path, **{"sink.right.type": f"{__name__}:WithRules"})
    for each in (options, other, options):
        open_sinks.make_ready(each, plan(each))
    assert WithRules.asked == 2
    monkeypatch.setattr(WithRules, "most", 7)
    if fails_in == "this process":
        open_sinks.ask_again(options)
    else:
        with monkeypatch.context() as process:
            for name in ("_ready", "_marks"):
                process.setattr(open_sinks, name, {})
            process.setattr(open_sinks, "_opened", OrderedDict())
            open_sinks.ask_again(options)
    for _ in range(2):
        found = open_sinks.make_ready(options, plan(options))
    assert found.rules["right"] == (LongestText(column="name", most=7),)
    open_sinks.make_ready(other, plan(other))
    assert WithRules.asked == 3, "once, and only the query that failed"


def test_a_commit_that_fails_lets_sinks_be_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, *_: object, **__: object) -> None: ...

        def run(self) -> None:
            raise RestartQueryError("a row that nobody kept")

    asked: list[object] = []
    monkeypatch.setattr(micro_batch, "Commit", Failing)
    monkeypatch.setattr(open_sinks, "ask_again", asked.append)
    options = given_options(tmp_path, **{"sink.right.type": "memory"})
    batch = SimpleNamespace(application_id=options.application_id, batch_id=7)
    work: Any = SimpleNamespace(
        request=SimpleNamespace(batch=batch), staged=None, identity_file=None, sinks=object(), restage=None
    )
    with pytest.raises(RestartQueryError):
        micro_batch._commit(options, work, Trace())
    assert asked == [options]


def test_the_rules_of_a_sink_are_asked_for_once_a_minute(
    with_rules: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        found = with_rules()
        assert found.rules["right"] == (LongestText(column="name", most=5),)
        assert [type(each).__name__ for each in found.rules["left"]] == ["Utf8"]
        assert found.refusing == {"right"}
    assert WithRules.asked == 1
    monkeypatch.setattr(open_sinks, "_RULES_SECONDS", -1.0)
    monkeypatch.setattr(WithRules, "most", 7)
    assert with_rules().rules["right"] == (LongestText(column="name", most=7),), "somebody widened the column"


@pytest.mark.parametrize("error", [OSError("down"), InvalidSchemaError("the table is gone")])
def test_the_rules_that_are_known_count_while_the_target_cannot_be_asked(
    with_rules: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """If the failure persists, prepare reports it."""
    before = with_rules()
    monkeypatch.setattr(open_sinks, "_RULES_SECONDS", -1.0)
    monkeypatch.setattr(WithRules, "error", error)
    assert with_rules() == before


def test_the_rows_are_kept_while_a_target_is_not_ready(
    with_rules: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rules are not known yet, so the sink may refuse more rows when it prepares the batch."""
    monkeypatch.setattr(WithRules, "error", OSError("down"))
    found = with_rules()
    assert (found.rules["right"], found.refusing) == ((), {"right"})
    monkeypatch.setattr(WithRules, "error", None)
    assert with_rules().rules["right"]


def test_a_rule_that_does_not_fit_the_columns_of_the_sink_is_refused(
    with_rules: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, every task would fail."""
    for column in ("amount", "nowhere"):
        monkeypatch.setattr(WithRules, "column", column)
        with pytest.raises(SinkFailedError, match=f"'right' has a rule .*column='{column}'"):
            with_rules()


def test_an_outcome_names_options_in_full(tmp_path: Path) -> None:
    class Down(MemorySink):
        def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
            return Fatal("the option 'path' is 'path'", "correct the options 'path' and 'x'.")

    watched = WatchedSink(Down(), SinkNaming("right", ("path",)))
    watched.open(CONTEXTS["right"])
    answer = watched.prepare(CONTEXTS["right"].txn(1, ATTEMPT), Given(ROWS.schema, 1, [[ROWS]]), deadline())
    assert answer == Fatal(
        "the option 'sink.right.path' is 'path'", "correct the options 'sink.right.path' and 'x'."
    )
    watched.close()

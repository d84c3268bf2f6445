"""``kafka-eos sinks``: lists prepared batches, and commits or aborts them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from kafka_eos_source.cli import main
from kafka_eos_source.commit.request import OwnOffsets
from kafka_eos_source.commit.verdict import Held
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate import sinks as operating
from kafka_eos_source.operate.inspection import KafkaView
from kafka_eos_source.protocol.token import UNDECIDED, PreparedSinks, Token
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn, cluster_hash
from kafka_eos_source.sinks.memory import SYSTEMS, Memory, MemorySink

ATTEMPT = "0123456789abcdef0123"
TXN = SinkContext("box", "app", "cluster").txn(7, ATTEMPT)
ANCHOR = TopicPartition("out", 0)


@pytest.fixture
def memory() -> Memory:
    name = uuid.uuid4().hex
    SYSTEMS[name] = Memory({TXN: pa.table({"id": [1]})})
    SYSTEMS[name].prepared[replace(TXN, application_id="other")] = pa.table({"id": [1]})
    return SYSTEMS[name]


@pytest.fixture
def file(memory: Memory, tmp_path: Path) -> Path:
    (name,) = (name for name, each in SYSTEMS.items() if each is memory)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text(json.dumps({"id": "query"}))
    path = tmp_path / "sink.properties"
    path.write_text(
        f"kafka.bootstrap.servers=b:9092\ntopic=out\napplication.id=app\ncheckpointLocation={checkpoint}\n"
        f"sinks=box\nsink.box.type=memory\nsink.box.system={name}\n"
    )
    return path


def kafka(token: Token | None) -> KafkaView:
    return KafkaView("cluster", {}, Held("app", {}, token), ANCHOR, False, OwnOffsets({}, {}, True))


def run(monkeypatch: pytest.MonkeyPatch, token: Token | None, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(operating, "read_kafka", lambda query, deadline: kafka(token))
    result = CliRunner().invoke(main, ["sinks", *arguments])
    return result.exit_code, result.output


def token(sinks: PreparedSinks | None) -> Token:
    return Token("app", "query", "run", 7, 7, "", "", 1, sinks=sinks)


@pytest.mark.parametrize(
    ("newest_token", "code", "message"),
    [
        (token(PreparedSinks(ATTEMPT, ("box",))), 0, "the next start of the query will commit it"),
        (token(None), 0, "the next start of the query will abort it"),
        (None, 3, "no token"),
    ],
)
def test_list_shows_prepared_batches_and_their_fate(
    monkeypatch: pytest.MonkeyPatch, file: Path, newest_token: Token | None, code: int, message: str
) -> None:
    found = run(monkeypatch, newest_token, "list", "--options", str(file))
    assert found[0] == code
    assert f"box\t{TXN}\t{message}" in found[1]
    assert "application.id='app' on the Kafka cluster 'cluster'" in found[1]
    assert "other" not in found[1]


@pytest.mark.parametrize(
    ("sequence", "message"), [(6, "the next start of the query will abort it"), (7, "no token")]
)
def test_a_token_written_by_an_operator_decides_only_what_was_prepared_after_it(
    monkeypatch: pytest.MonkeyPatch, file: Path, memory: Memory, sequence: int, message: str
) -> None:
    written = replace(token(UNDECIDED), sequence=sequence)
    assert f"box\t{TXN}\t{message}" in run(monkeypatch, written, "list", "--options", str(file))[1]
    arguments = ["abort", "--options", str(file), str(TXN), "--yes"]
    assert run(monkeypatch, written, *arguments)[0] == (1 if sequence == 6 else 0)
    assert (TXN in memory.prepared) is (sequence == 6)


@pytest.mark.parametrize("word", ["commit", "abort"])
def test_an_operator_commits_or_aborts_a_prepared_batch(
    monkeypatch: pytest.MonkeyPatch, file: Path, memory: Memory, word: str
) -> None:
    arguments = [word, "--options", str(file), str(TXN)]
    assert "With --yes" in run(monkeypatch, None, *arguments)[1]
    assert TXN in memory.prepared, "without --yes the command must change nothing"
    assert run(monkeypatch, None, *arguments, "--yes")[0] == 0
    assert (TXN in memory.committed) is (word == "commit")
    assert TXN not in memory.prepared
    code, message = run(monkeypatch, None, *arguments, "--yes")
    assert (code, "does not hold" in message) == (1, True)


@pytest.mark.parametrize("word", ["commit", "abort"])
def test_the_id_names_the_sink_and_the_options_must_have_it(
    monkeypatch: pytest.MonkeyPatch, file: Path, memory: Memory, word: str
) -> None:
    of_bag = replace(TXN, sink="bag")
    memory.prepared[of_bag] = pa.table({"id": [1]})
    code, message = run(monkeypatch, None, word, str(of_bag), "--options", str(file), "--yes")
    assert code == 1
    assert "have no sink 'bag', which prepared" in message
    assert "Nothing was changed" in message
    assert of_bag in memory.prepared


@pytest.mark.parametrize("word", ["commit", "abort"])
@pytest.mark.parametrize(
    ("whose", "named"),
    [
        (replace(TXN, application_id="other"), "application.id='other' on"),
        (SinkContext("box", "app", "elsewhere").txn(7, ATTEMPT), cluster_hash("elsewhere")),
    ],
    ids=["application", "cluster"],
)
def test_work_of_another_owner_is_refused_and_both_owners_are_named(
    monkeypatch: pytest.MonkeyPatch, file: Path, memory: Memory, word: str, whose: SinkTxn, named: str
) -> None:
    memory.prepared[whose] = pa.table({"id": [1]})
    before = dict(memory.prepared)
    arguments = [word, "--options", str(file), str(whose)]
    for more in ([], ["--yes"]):
        code, message = run(monkeypatch, None, *arguments, *more)
        assert code == 1
        for text in (named, "application.id='app' on", "cluster 'cluster'", "Nothing was changed"):
            assert text in message
    assert memory.prepared == before
    assert not memory.committed


def test_a_fate_that_the_token_decides_cannot_be_overridden(
    monkeypatch: pytest.MonkeyPatch, file: Path, memory: Memory
) -> None:
    arguments = ["abort", "--options", str(file), str(TXN), "--yes"]
    code, message = run(monkeypatch, token(PreparedSinks(ATTEMPT, ("box",))), *arguments)
    assert code == 1
    assert "start the query" in message
    assert TXN in memory.prepared


@pytest.mark.parametrize("failing", ["recover", "commit", "nothing"])
@pytest.mark.parametrize("arguments", [["list"], ["commit", str(TXN), "--yes"]])
def test_every_sink_is_closed_even_after_an_error(
    monkeypatch: pytest.MonkeyPatch, file: Path, failing: str, arguments: list[str]
) -> None:
    with file.open("a") as options:
        options.write(f"sinks=box,other\nsink.other.type=memory\nsink.other.system={uuid.uuid4().hex}\n")
    closed: list[str] = []

    def fail(*_arguments: object) -> None:
        raise OSError("the connection is gone")

    monkeypatch.setattr(MemorySink, "close", lambda sink: closed.append(sink.context.name))
    if failing != "nothing":
        monkeypatch.setattr(MemorySink, failing, fail)
    code, _ = run(monkeypatch, None, arguments[0], "--options", str(file), *arguments[1:])
    assert (code == 0) is (failing == "nothing" and arguments[0] == "commit")
    assert sorted(closed) == ["box", "other"]


def test_the_other_sinks_are_closed_if_one_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    with file.open("a") as options:
        options.write(f"sinks=box,other\nsink.other.type=memory\nsink.other.system={uuid.uuid4().hex}\n")
    closed: list[str] = []
    open_sink = MemorySink.open

    def open_first(sink: MemorySink, context: SinkContext) -> None:
        if context.name == "other":
            raise OSError("the connection is refused")
        open_sink(sink, context)

    monkeypatch.setattr(MemorySink, "open", open_first)
    monkeypatch.setattr(MemorySink, "close", lambda sink: closed.append(sink.context.name))
    assert run(monkeypatch, None, "list", "--options", str(file))[0] == 1
    assert closed == ["box"]


def test_a_query_without_external_sinks_has_nothing_to_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: Mapping[str, str] = {"kafka.bootstrap.servers": "b:9092", "topic": "out"}
    path = tmp_path / "sink.properties"
    path.write_text("\n".join(f"{name}={value}" for name, value in options.items()))
    code, message = run(monkeypatch, None, "list", "--options", str(path))
    assert (code, "name no sinks" in message) == (1, True)

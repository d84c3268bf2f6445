"""The parts of the demo that need neither a broker nor a JVM."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kafka_eos_source.demo import __main__ as program
from kafka_eos_source.demo import flights, report
from kafka_eos_source.demo.report import Marker, draw, markers
from kafka_eos_source.demo.run import AT_LEAST_ONCE, EXACTLY_ONCE, History, schedule
from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka import playground
from kafka_eos_source.testing.verdict import judge

_EVENTS = st.lists(st.integers(0, 20))


@given(_EVENTS, _EVENTS)
def test_the_verdict_counts_lost_and_duplicate_rows(expected: list[int], found: list[int]) -> None:
    verdict = judge(expected, found)
    assert verdict.expected == len(expected)
    assert verdict.found == len(found)
    assert verdict.found == verdict.expected - verdict.missing + verdict.doubled + verdict.foreign
    assert verdict.exactly_once == (sorted(expected) == sorted(found))


def test_the_verdict_names_what_is_wrong() -> None:
    verdict = judge(["a", "b", "c"], ["a", "b", "b", "x"])
    assert (verdict.missing, verdict.doubled, verdict.foreign) == (1, 1, 1)
    assert verdict.examples == ("missing: c", "doubled: b", "foreign: x")


def test_the_same_seed_kills_at_the_same_moments() -> None:
    assert schedule(7) == schedule(7)
    assert schedule(7) != schedule(8)
    assert [kill.failpoint for kill in schedule(7)].count("commit.after_commit") == 1
    assert [kill.failpoint for kill in schedule(7)].count("direct.after_flush") == 1
    assert [kill.failpoint for kill in schedule(7, compare=False)].count("direct.after_flush") == 0
    assert [kill.failpoint for kill in schedule(7, 0)] == ["commit.after_commit", "direct.after_flush"]
    shares = [kill.at_share for kill in schedule(7, 5) if kill.at_share is not None]
    assert len(shares) == 5
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 0.85


def test_the_data_set_is_whole() -> None:
    frame = flights.events()
    assert len(frame) == 336_776
    assert frame["id"].is_unique
    assert len(flights.as_json(frame.head(3))) == 3


def test_the_expected_output_equals_that_of_a_query_without_failures() -> None:
    frame = flights.events(2000)
    wanted = flights.expected(frame, flights.Names.of_the_data_set())
    assert {outcome[0] for outcome in wanted} == set(flights.STATUSES)
    status, row_id, airline, flight, origin, destination, delay = wanted[0]
    assert (status, row_id, airline, flight) == ("ontime", 0, "United Air Lines Inc.", 1545)
    assert destination == "George Bush Intercontinental"
    value = {
        "id": row_id,
        "airline": airline,
        "flight": flight,
        "origin": origin,
        "destination": destination,
        "dep_delay": delay,
    }
    assert flights.found("x.ontime", json.dumps(value).encode()) == wanted[0]


@pytest.mark.parametrize(
    ("delay", "status"), [(None, "cancelled"), (15, "ontime"), (16, "delayed"), (-5, "ontime")]
)
def test_flights_are_routed_by_delay_and_status(delay: int | None, status: str) -> None:
    assert flights.status(delay) == status


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    history = History([0.0, 1.0, 2.0], [0, 5, 10], [0, 6, 12], [(1.5, "random"), (1.8, "commit.x")], 3)
    draw(history, 10, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@given(st.data())
def test_every_lost_and_every_duplicate_event_is_counted(data: st.DataObject) -> None:
    frame = flights.events(200)
    wanted = flights.expected(frame, flights.Names.of_the_data_set())
    chosen = st.sets(st.integers(0, len(wanted) - 1), max_size=20)
    lost, doubled = data.draw(chosen), data.draw(chosen)
    doubled -= lost
    output = [event for index, event in enumerate(wanted) if index not in lost]
    output += [wanted[index] for index in doubled]
    verdict = judge(wanted, data.draw(st.permutations(output)))
    assert (verdict.missing, verdict.doubled, verdict.foreign) == (len(lost), len(doubled), 0)
    assert verdict.exactly_once == (not lost and not doubled)
    assert len(verdict.examples) == min(5, len(lost)) + min(5, len(doubled))


def test_an_event_with_a_wrong_value_or_topic_counts_as_missing_and_unexpected() -> None:
    wanted = flights.expected(flights.events(3), flights.Names.of_the_data_set())
    verdict = judge(wanted, [*wanted[:2], ("cancelled", *wanted[2][1:])])
    assert (verdict.missing, verdict.doubled, verdict.foreign) == (1, 0, 1)


def test_transactions_are_counted_by_their_control_records() -> None:
    def marker(partition: str, committed: bool, epoch: int, offset: int = 0) -> Marker:
        return Marker(partition, offset, committed, 4000, epoch)

    found = [
        *(marker(partition, True, 0) for partition in ("out-0", "out-1", "__consumer_offsets-7")),
        *(marker(partition, True, 0, 1) for partition in ("out-0", "__consumer_offsets-7")),
        *(marker(partition, False, 1) for partition in ("out-0", "out-1")),
        *(marker(partition, False, 2) for partition in ("out-1", "__consumer_offsets-7")),
    ]
    assert report.count_transactions(found) == (2, 2)


@pytest.mark.parametrize("counted", [(17, 2), None])
def test_the_table_shows_both_guarantees(counted: tuple[int, int] | None) -> None:
    history = History(kills=[(1.5, "random")], starts=2)
    verdicts = {EXACTLY_ONCE: judge("abc", "abc"), AT_LEAST_ONCE: judge("abc", "abcc")}
    console = Console(record=True, width=100, file=StringIO())
    console.print(report.table(verdicts, history, counted, 17))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.export_text().splitlines()
        if "│" in line
    ]
    assert ["duplicated", "0", "1"] in rows
    assert ["events out (read_committed)", "3", "4"] in rows
    assert (["transactions aborted", "2", "-"] in rows) == (counted is not None)


def control_batch(offset: int, committed: bool, epoch: int) -> bytes:
    """Encodes a control record: the key holds version and type, the value version and coordinator epoch."""
    key = struct.pack(">hh", 0, int(committed))
    value = struct.pack(">hi", 0, 0)
    record = bytes([0, 0, 0, len(key) << 1]) + key + bytes([len(value) << 1]) + value + b"\x00"
    records = bytes([len(record) << 1]) + record
    body = struct.pack(">ibIhiqqqhii", 0, 2, 0, 0x30, 0, 0, 0, 4000, epoch, -1, 1) + records
    return struct.pack(">qi", offset, len(body)) + body


def test_control_records_are_read_from_log_segments(tmp_path: Path) -> None:
    folder = tmp_path / "out-0"
    folder.mkdir()
    plain = struct.pack(">ibIhiqqqhii", 0, 2, 0, 0, 0, 0, 0, 4000, 1, 0, 1) + b"xxxx"
    segment = struct.pack(">qi", 0, len(plain)) + plain
    segment += control_batch(1, True, 1) + control_batch(2, False, 2) + bytes(100)
    (folder / "00000000000000000000.log").write_bytes(segment)
    found = [(each.partition, each.offset, each.committed, each.producer_epoch) for each in markers(tmp_path)]
    assert found == [("out-0", 1, True, 1), ("out-0", 2, False, 2)]


Spoil = Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]


@pytest.mark.parametrize(
    ("spoil", "exit_code", "said"),
    [
        (lambda output: output, 0, "every event exactly once"),
        (lambda output: [*output, output[7]], 1, "doubled: ("),
        (lambda output: output[1:], 1, "missing: ("),
    ],
    ids=["whole", "one doubled", "one missing"],
)
def test_the_exit_code_follows_the_verdict(
    spoil: Spoil, exit_code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaces Kafka and Spark: the records read back are made from the events that were sent."""
    names = flights.Names.of_the_data_set()
    sent: list[str] = []

    def send(_servers: str, _topic: str, values: list[str], _keys: list[str], tell: Any) -> None:
        sent.extend(values)
        tell(len(values))

    class NoRun:
        def __init__(self, *_: object) -> None: ...

        def to_the_end(self) -> History:
            return History([0.0], [len(sent)], [0], [], 1)

    def read_back(_servers: str, topics: Mapping[str, int]) -> list[tuple[str, bytes]]:
        output = []
        for event in map(json.loads, sent):
            status = flights.status(event["dep_delay"])
            (topic,) = (name for name in topics if name.endswith(status))
            airline, destination = names.airlines[event["carrier"]], names.airports.get(event["dest"])
            value = event | {"airline": airline, "destination": destination}
            output.append((topic, json.dumps(value).encode()))
        return spoil(output)

    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    monkeypatch.setattr(program, "Run", NoRun)
    monkeypatch.setattr(program.playground, "create_topics", lambda *_: None)
    monkeypatch.setattr(program.playground, "send", send)
    monkeypatch.setattr(program.playground, "read_back", read_back)
    arguments = [
        "--events",
        "500",
        "--bootstrap-servers",
        "nowhere:1",
        "--no-compare",
        "--output",
        str(tmp_path),
    ]
    finished = CliRunner().invoke(program.main, arguments)
    assert finished.exit_code == exit_code, finished.output
    assert said in finished.output
    assert (tmp_path / "kills.png").exists()


@pytest.mark.parametrize(("held", "sent"), [(None, 100), (0, 100), (100, 0), (150, 0)])
def test_filling_a_topic_with_flights_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, held: int | None, sent: int
) -> None:
    created, records = [], []
    monkeypatch.setattr(playground, "records_in", lambda _servers, _topic: held)
    monkeypatch.setattr(playground, "create_topics", lambda _servers, topics: created.extend(topics))
    monkeypatch.setattr(playground, "send", lambda _servers, _topic, values, *_: records.extend(values))
    assert flights.fill("b:1", "flights", 100) == len(records) == sent
    assert created == (["flights"] if held is None else [])


def test_a_topic_that_was_filled_in_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "records_in", lambda _servers, _topic: 7)
    with pytest.raises(OperatorError, match="exists with 7 records"):
        flights.fill("b:1", "flights", 100)

"""Rows that a web service refuses: named in its answer, or found by preparing parts of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import OK, Fatal, Refused, Retryable, RowRefusal
from kafka_eos_source.sinks.http_client import Answer, refused_rows
from kafka_eos_source.testing.sinks import System, deadline, new_txn, opened, stage
from tests.support import foreign_manifests as foreign
from tests.support.http_service import HttpService, running


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture
def service(process: HttpService) -> HttpService:
    process.reset()
    return process


def system(service: HttpService, **options: Any) -> System:
    return System(sink=lambda: constructors.http(service.url, **options).build(), visible=list)


def rows(count: int, poison: dict[int, str]) -> pa.Table:
    names = [poison.get(number, f"good {number}") for number in range(count)]
    return pa.table({"id": pa.array(range(count), pa.int64()), "name": names})


def numbers(outcome: object) -> list[int]:
    assert isinstance(outcome, Refused), outcome
    return sorted(outcome.rows)


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("named", [None, 2, 1, 0], ids=["all named", "two named", "one named", "none named"])
def test_all_refused_rows_are_found(service: HttpService, status: int, named: int | None) -> None:
    service.refuse("x", "y", status=status, names=named)
    poison = {0: "x", 41: "y", 42: "x", 99: "x", 77: "y"}
    with opened(system(service)) as sink:
        assert sink.refuses_rows
        txn = new_txn()
        outcome = sink.prepare(txn, stage(sink, rows(100, poison)), deadline())
        assert numbers(outcome) == sorted(poison)
        assert isinstance(outcome, Refused)
        if named is None:
            assert set(outcome.rows.values()) == {RowRefusal("is poison", "name")}
        else:
            assert all("poison" in each.why for each in outcome.rows.values())
        assert list(sink.recover(deadline())) == [], "a part of the batch is still prepared"
        good = rows(100, poison).filter(pa.array([number not in poison for number in range(100)]))
        assert sink.prepare(txn, stage(sink, good), deadline()) == OK
    requests = len([each for each in service.log() if each["path"].startswith("/prepare")])
    assert requests <= (3 if named is None else 70)


@pytest.mark.parametrize("named", [5, 0], ids=["five named", "none named"])
def test_the_search_ends_when_enough_rows_are_found(service: HttpService, named: int) -> None:
    service.refuse("x", names=named)
    with opened(system(service)) as sink:
        sink.open(replace(sink.context, enough_refused=3))
        outcome = sink.prepare(new_txn(), stage(sink, rows(100, dict.fromkeys(range(50), "x"))), deadline())
        assert numbers(outcome) == list(range(named or 3))
    requests = [each for each in service.log() if each["path"].startswith("/prepare")]
    assert len(requests) == 1 if named else len(requests) < 30


def test_a_batch_of_one_row_is_refused_without_more_requests(service: HttpService) -> None:
    service.refuse("x", names=0)
    with opened(system(service)) as sink:
        outcome = sink.prepare(new_txn(), stage(sink, rows(1, {0: "x"}), tasks=1), deadline())
    assert numbers(outcome) == [0]
    assert len(service.log()) == 1


@pytest.mark.parametrize("status", ["401", "403", "404", "413", "409"])
def test_other_statuses_are_not_about_rows(service: HttpService, status: str) -> None:
    with opened(system(service, retries=0)) as sink:
        service.fault(("prepare", status))
        outcome = sink.prepare(new_txn(), stage(sink, rows(10, {})), deadline())
        assert isinstance(outcome, (Fatal, Retryable))
        assert status in outcome.why
    assert len(service.log()) == 1
    expected = {"401": "option", "403": "option", "404": "'url'", "413": "maxOffsetsPerTrigger"}
    assert status == "409" or (isinstance(outcome, Fatal) and expected[status] in outcome.fix)


@pytest.mark.parametrize(("at", "fault"), [("abort", "401"), ("abort", "503"), ("status", "500")])
def test_a_search_that_cannot_go_on_names_no_rows_and_leaves_its_parts_to_the_next_start(
    service: HttpService, at: str, fault: str
) -> None:
    service.refuse("x", names=0)
    with opened(system(service, retries=0)) as sink:
        txn = new_txn()
        service.fault(*[(at, fault)] * 5, *([("abort", "500")] if at == "status" else []))
        outcome = sink.prepare(txn, stage(sink, rows(10, {7: "x"})), deadline())
        assert isinstance(outcome, (Fatal, Retryable)), outcome
        service.fault()
        left = list(sink.recover(deadline()))
        assert txn not in left
        assert len(left) == 1
        assert sink.abort(left[0], deadline()) == OK
        assert list(sink.recover(deadline())) == []


def test_a_driver_that_dies_in_the_search_leaves_an_id_that_no_token_names(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DiedError(BaseException):
        pass

    def die(name: str) -> None:
        if name == "sink.http.within_search":
            raise DiedError

    monkeypatch.setattr(failpoints, "reach", die)
    service.refuse("x", names=0)
    txn = new_txn()
    with opened(system(service)) as sink, pytest.raises(DiedError):
        sink.prepare(txn, stage(sink, rows(10, {7: "x"})), deadline())
    with opened(system(service)) as sink:
        (left,) = sink.recover(deadline())
        assert left != txn
        assert left.sequence == txn.sequence
        assert sink.abort(left, deadline()) == OK
        assert list(sink.recover(deadline())) == []


def test_a_service_that_refuses_only_the_whole_batch_is_reported(service: HttpService) -> None:
    service.refuse("x", names=0, least=2)
    with opened(system(service)) as sink:
        outcome = sink.prepare(new_txn(), stage(sink, rows(10, {1: "x", 8: "x"})), deadline())
        assert isinstance(outcome, Fatal)
        assert "accepts each part of the batch alone" in outcome.why
        assert list(sink.recover(deadline())) == []


@pytest.mark.parametrize("limit", ["requests", "time"])
def test_the_search_is_bounded(service: HttpService, limit: str) -> None:
    service.refuse("x", names=0)
    every = rows(1000, dict.fromkeys(range(1000), "x"))
    with opened(system(service)) as sink:
        until = deadline() if limit == "requests" else Deadline.after_seconds(1e-9)
        if limit == "time":
            service.refuse("x", names=0)
        outcome = sink.prepare(new_txn(), stage(sink, every), until)
        assert isinstance(outcome, (Fatal, Retryable))
        if limit == "requests":
            assert isinstance(outcome, Fatal)
            assert "docs/sink-http.md" in outcome.fix
            assert "row 0: HTTP 422" in outcome.why
    assert len(service.log()) <= 201


def test_the_other_mode_says_at_the_start_that_rows_can_only_be_refused_late(service: HttpService) -> None:
    sink = constructors.http(f"{service.url}/rows", mode="idempotency-key").build()
    assert not sink.refuses_rows
    (risk,) = sink.risks()
    assert "because of a single row" in risk
    assert constructors.http(service.url).build().risks() == ()


def test_text_that_is_not_utf8_is_a_rule(service: HttpService) -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff"], pa.binary()).buffers())
    with opened(system(service)) as sink:
        (rule,) = sink.row_rules(pa.schema([("name", pa.string())]), deadline())
    assert rule.broken(bad).to_pylist() == [False, True]


# -- the answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"rows": []}',
        b'{"rows": 3}',
        b'{"rows": [3]}',
        b'{"rows": [{"row": 3}]}',
        b'{"rows": [{"row": -1}]}',
        b'{"rows": [{"row": true}]}',
        b'{"rows": [{"row": 1.0}]}',
        b'{"rows": [{"row": "1"}]}',
        b'{"rows": [{"row": 0}, {"row": 1}, {"row": 2}, {"row": 2}]}',
    ],
)
def test_an_answer_that_names_no_rows_of_the_body_is_not_believed(body: bytes) -> None:
    assert refused_rows(Answer(422, body), 3) is None


def test_an_answer_that_names_rows_is_bounded() -> None:
    body = b'{"rows": [{"row": 2, "reason": "%s\\n", "column": "a\\u0000"}, {"row": 0, "reason": 7}]}' % (
        b"r" * 999
    )
    found = refused_rows(Answer(400, body), 3)
    assert found == {2: RowRefusal("r" * 200, "a "), 0: RowRefusal("HTTP 400")}


@given(foreign.garbage | st.binary(), st.integers(1, 5))
@settings(deadline=None)
def test_no_answer_raises_or_names_other_rows(body: bytes, count: int) -> None:
    for each in (body, b'{"rows": %s}' % body, b'{"rows": [%s]}' % body, b'{"rows": [{"row": %s}]}' % body):
        found = refused_rows(Answer(422, each), count)
        assert found is None or set(found) <= set(range(count))

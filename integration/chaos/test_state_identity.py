"""State is never taken for what it is not: names that join to one topic, wrong clocks, lost beginnings.

The tests run the operator in the chaos loop, without Spark. Each test also runs with its rule switched off,
which proves that it can fail.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from integration.chaos.stateful import SHARDS, STORE
from integration.chaos.stateful_case import Case
from integration.support.driver import Driver
from integration.support.kafka import Admin, produce, read_back
from integration.support.processes import await_condition
from kafka_eos_source.cli import main
from kafka_eos_source.commit import report_checks
from kafka_eos_source.errors import InvalidOptionError, StateError, StateLostError, TokenMissingError
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.operator import shard as shard_module

_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)
TEN_YEARS_MS = 10 * 365 * 86_400_000


def rule(name: str, fault: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Runs a test with a rule and without it."""
    return pytest.mark.parametrize(
        "mutations",
        [
            pytest.param((), marks=fault, id="with-the-rule"),
            pytest.param((name,), marks=_SWITCHED_OFF, id="mutated"),
        ],
    )


@pytest.fixture
def case(broker: str, topic: Callable[..., str], tmp_path: Path) -> Case:
    return Case(broker, topic, tmp_path)


@pytest.fixture
def start(driver: Callable[..., Driver]) -> Callable[..., Driver]:
    return partial(driver, module="integration.chaos.loop")


def refused(running: Driver, condition: str, *texts: str) -> None:
    assert running.wait() == 1, running.tail()
    said = running.log.read_text()
    for each in (f"KAFKA_EOS.{condition}", *texts):
        assert each in said, running.tail()


def is_broken(case: Case) -> bool:
    try:
        case.check()
    except AssertionError:
        return True
    return False


@rule(
    "changelog owner",
    pytest.mark.fault(
        "T340", "two applications choose one changelog topic", "before and after the other one's first commit"
    ),
)
def test_t340_two_applications_whose_names_join_to_one_topic_never_share_a_changelog(
    broker: str,
    topic: Callable[..., str],
    tmp_path: Path,
    start: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    mutations: Sequence[str],
) -> None:
    """``X`` with store ``eu-counts``, and ``X-eu`` with store ``counts``: both write X-eu-counts-changelog.

    The second one has found the topic empty when the first one commits, so only its commit can notice.
    """
    first, second = (Case(broker, topic, tmp_path / name) for name in ("first", "second"))
    second.application = f"{first.application}-eu"
    first.feed(100)
    their_store = f"eu-{STORE}"
    ran: list[str] = []

    def run_the_first(name: str) -> None:
        if name == "commit.before_begin" and not ran:
            ran.append(name)
            start(first.spec(store=their_store)).finish()

    monkeypatch.setattr(failpoints, "reach", run_the_first)
    if mutations:
        monkeypatch.setattr("kafka_eos_source.commit.transaction.is_alone", lambda *_: True)
        second.run()
    else:
        with pytest.raises(StateError, match=f"holds the state of store '{their_store}' of application.id"):
            second.run()
        assert read_back(broker, second.sink) == [], "nothing of the second one was committed"
        shutil.rmtree(second.state)
        refused(start(second.spec()), "CHANGELOG", f"store '{their_store}' of application.id", "joined with")
    monkeypatch.undo()
    produce(broker, first.source, ["k00"] * 100)
    first.wanted["k00"] += 100
    # This commit covers what the second one has written, and the next restore reads it for all other keys.
    start(first.spec(store=their_store, mutations=mutations)).finish()
    shutil.rmtree(first.state)
    first.feed(200)
    start(first.spec(store=their_store, mutations=mutations)).finish()
    assert is_broken(first) is bool(mutations)


@rule(
    "clock check",
    pytest.mark.fault(
        "T341", "the clock of an executor's host is ten years ahead for one batch", "in a task"
    ),
)
def test_t341_a_batch_with_a_processing_time_in_the_future_is_refused_and_a_recorded_one_is_lowered(
    case: Case, admin: Admin, monkeypatch: pytest.MonkeyPatch, mutations: Sequence[str]
) -> None:
    def recorded_ahead_ms() -> int:
        group = admin.group(group_of(case.application))
        tokens = [Token.decode(text) for (name, _), (_, text) in group.items() if name.endswith("-changelog")]
        times = [token.shard.time_ms for token in tokens if token is not None and token.shard is not None]
        assert len(times) == SHARDS
        return max(times) - time.time_ns() // 1_000_000

    ahead = SimpleNamespace(time_ns=lambda: time.time_ns() + TEN_YEARS_MS * 1_000_000)
    if mutations:
        monkeypatch.setattr(report_checks, "_check_clock", lambda *_: None)
        with monkeypatch.context() as wrong:
            wrong.setattr(shard_module, "time", ahead)
            case.run()
        case.feed(200)
        case.run()
        assert recorded_ahead_ms() > TEN_YEARS_MS / 2, "no timer would fire for ten years"
        return
    case.run()
    case.feed(200)
    before = len(read_back(case.broker, case.sink))
    with monkeypatch.context() as wrong:
        wrong.setattr(shard_module, "time", ahead)
        with pytest.raises(
            StateError, match=r"the clock of host '.+', which ran shard .* s ahead of the clock"
        ):
            case.run()
        assert len(read_back(case.broker, case.sink)) == before, "nothing was written"
        case.run(operator={"state.clock.max.ahead": "100000h"})  # as if the driver's clock had been wrong too
    assert recorded_ahead_ms() > TEN_YEARS_MS / 2
    case.feed(200)
    with pytest.raises(StateError, match="the recorded processing time of shard") as caught:
        case.run()
    assert f"state lower-time QUERY --store {STORE}" in caught.value.fix
    known = [case.application, "--bootstrap-servers", case.broker, "--store", STORE]
    for more, said in (([], "With --yes"), (["--yes"], "Start the query"), (["--yes"], "No recorded time")):
        result = CliRunner().invoke(main, ["state", "lower-time", *known, *more])
        assert result.exit_code == 0, result.output
        assert said in result.output
    assert recorded_ahead_ms() <= 0
    case.run()
    case.check()


@rule(
    "changelog beginning",
    pytest.mark.fault(
        "T342",
        "the beginning of the changelog is removed, and the state moves to another host",
        "between runs",
    ),
)
def test_t342_a_changelog_without_its_beginning_restores_nothing_unless_a_person_says_so(
    case: Case, admin: Admin, start: Callable[..., Driver], tmp_path: Path, mutations: Sequence[str]
) -> None:
    start(case.spec()).finish()
    changelog = f"{case.application}-{STORE}-changelog"
    ends = {
        number: offset
        for (name, number), (offset, _) in admin.group(group_of(case.application)).items()
        if name == changelog
    }
    admin.configure(changelog, {"cleanup.policy": "compact,delete"})
    for shard, end in ends.items():
        await_condition(partial(admin.deleted_records, changelog, shard, end - 2), 30, "records are deleted")
    admin.configure(changelog, {"cleanup.policy": "compact"})
    case.feed(200)
    kept = case.state.rename(tmp_path / "kept")
    if mutations:
        start(case.spec(mutations=mutations)).finish()
        assert is_broken(case), "counts began again"
        return
    before = len(read_back(case.broker, case.sink))
    refused(start(case.spec()), "STATE_LOST", "begins at offset", "there is no local state")
    assert len(read_back(case.broker, case.sink)) == before, "nothing was written"
    shutil.rmtree(case.state)
    kept.rename(case.state)
    start(case.spec()).finish()
    case.check()  # the host that has the state continues with it
    # a person accepts the loss, once; the next host then needs no other answer
    newest = max(int(path.name) for path in (case.checkpoint / "commits").glob("[0-9]*"))
    shutil.rmtree(case.state)
    case.feed(200)
    start(case.spec(operator={"onMissingState": f"changelog:{newest + 1}"})).finish()
    shutil.rmtree(case.state)
    case.feed(200)
    start(case.spec()).finish()


@rule(
    "store names",
    pytest.mark.fault("T343", "the store of an operator is renamed; a new store is declared", "between runs"),
)
def test_t343_a_renamed_store_is_answered_with_the_names_that_exist(
    case: Case, start: Callable[..., Driver], mutations: Sequence[str]
) -> None:
    start(case.spec()).finish()
    case.feed(200)
    renamed = start(case.spec(store="totals", mutations=mutations))
    if mutations:
        renamed.finish()
        assert is_broken(case), "the query began with empty state, without a word"
        return
    before = len(read_back(case.broker, case.sink))
    refused(
        renamed, "STATE_MISMATCH", "store 'totals' of application.id", f"'{STORE}', which the last batch had"
    )
    assert len(read_back(case.broker, case.sink)) == before, "nothing was written"
    start(case.spec()).finish()
    case.check()
    newest = max(int(path.name) for path in (case.checkpoint / "commits").glob("[0-9]*"))
    case.feed(200)
    start(case.spec(store="totals", operator={"onMissingState": f"new:{newest + 1}"})).finish()
    assert is_broken(case), "the declared new store counts from zero"


@pytest.mark.fault("T344", "the operator has another application.id than the sink", "before the first batch")
def test_t344_an_operator_with_another_name_is_refused_before_the_genesis_token(
    case: Case, admin: Admin
) -> None:
    for wrong in ({"application.id": f"{case.application}-x"}, {"kafka.group.id": f"{case.application}-g"}):
        with pytest.raises(
            InvalidOptionError, match=r"the parts of one query .* Nothing of batch 0 was written"
        ):
            case.run(operator=wrong)
    assert read_back(case.broker, case.sink) == []
    assert not admin.group(group_of(case.application), may_be_empty=True), "not even the genesis token"


@pytest.mark.parametrize("newer", [200, 400], ids=["the-same-id", "a-later-id"])
@pytest.mark.fault(
    "T345", "the group is deleted, and an older copy of the checkpoint is restored", "between two runs"
)
def test_t345_state_newer_than_a_restored_checkpoint_is_refused_although_the_group_is_lost(
    case: Case, admin: Admin, tmp_path: Path, newer: int
) -> None:
    """Only the changelog knows that the output has these batches; batch ids alone would not tell which.

    After the restore, Spark plans the next batch with other offsets than before, under the same id.
    """
    case.run()
    newest = max(int(path.name) for path in (case.checkpoint / "commits").glob("[0-9]*"))
    shutil.copytree(case.checkpoint, tmp_path / "copy")
    case.feed(newer)
    case.run()
    before = len(read_back(case.broker, case.sink))
    shutil.rmtree(case.checkpoint)
    shutil.copytree(tmp_path / "copy", case.checkpoint)
    admin.delete_group(group_of(case.application))
    source = {**case.spec()["source"], "maxOffsetsPerTrigger": "100"}
    for answer in (None, "assume_not_committed", "assume_committed"):
        sink = {} if answer is None else {"onMissingToken": f"{answer}:{newest + 1}"}
        with pytest.raises((StateLostError, TokenMissingError)) as caught:
            case.run(sink=sink, source=source)
        if answer is not None or newer == 400:
            assert f"batch {newest + 1}" in caught.value.message
            assert isinstance(caught.value, StateLostError), "no answer leads to a loss"
    assert len(read_back(case.broker, case.sink)) == before

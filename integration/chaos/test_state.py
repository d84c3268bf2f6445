"""A stateful query keeps exact counts when its driver is killed, its state deleted or its group removed.

The tests run the operator in the chaos loop, without Spark.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration.chaos.stateful import SHARDS, STORE
from integration.chaos.stateful_case import PER_BATCH, ROWS, Case, WindowedCase
from integration.support.driver import Driver
from integration.support.kafka import Admin, end_offsets, produce, read_back
from integration.support.processes import await_condition
from kafka_eos_source.errors import (
    NotUpToBoundError,
    RestartQueryError,
    StateLostError,
    TokenMissingError,
    UnavailableError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.reading import snapshot
from kafka_eos_source.state.reading.query import StateQuery

DIES_IN_BATCH = 2

#: A few bytes of memory, so that the changes of each batch go to disk in several slices.
SPILLS = {"statestore.uncommitted.max.bytes": "400"}
#: Steps of a batch whose changes are on disk: its slices, and how the next task applies them.
SPILL_STEPS = [
    "state.before_spill",
    "state.after_spill*3",
    "state.after_seal",
    "state.after_pending",
    "state.apply_began",
    "state.apply_slice",
    "state.apply_written",
    "state.apply_ended",
]


@pytest.fixture
def case(broker: str, topic: Callable[..., str], tmp_path: Path) -> Case:
    return Case(broker, topic, tmp_path)


@pytest.mark.fault("S03", "the driver is killed while state commits", "before, within and after the commit")
@pytest.mark.fault("S04", "the state of one shard is deleted, then of all", "between two runs")
def test_counts_stay_exact_although_the_driver_is_killed_and_state_is_deleted(
    case: Case, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """The driver is killed around the commit, and local state is deleted between runs.

    Tasks run inside the driver process, so they die with it; the next start recovers their pending changes.
    """
    start = partial(driver, module="integration.chaos.loop")
    for number, step in enumerate(["state.after_pending", "commit.before_commit", "commit.after_commit"]):
        once = tmp_path / f"once-{number}"
        killed = start(case.spec(), f"{step}=kill*{number + 1}@{once}")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
        if number == 1:
            shutil.rmtree(case.state / case.application / STORE / "0")
        if number == 2:
            shutil.rmtree(case.state)
    start(case.spec()).finish()
    case.check()


@pytest.mark.fault("T160", "the driver is killed while state changes go to disk", "eight steps")
def test_t160_a_killed_driver_neither_loses_nor_doubles_state_changes_on_disk(
    case: Case, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    for number, step in enumerate(SPILL_STEPS):
        case.feed(100)
        once = tmp_path / f"once-{number}"
        name, _, times = step.partition("*")
        killed = driver(
            case.spec(operator=SPILLS), f"{name}=kill*{times or 1}@{once}", module="integration.chaos.loop"
        )
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
    driver(case.spec(operator=SPILLS), module="integration.chaos.loop").finish()
    case.check()
    assert len(list(case.state.rglob("spill/*"))) <= SHARDS, "only the last batch is still pending"


@pytest.mark.fault("T161", "a large batch is recorded as applied before its rows are", "while it is applied")
def test_t161_without_the_record_of_an_unfinished_batch_a_kill_loses_its_changes(
    case: Case, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """Proves that the test above can fail."""
    once, start = tmp_path / "once", partial(driver, module="integration.chaos.loop")
    mutated = case.spec(operator=SPILLS, mutations=["applying"])
    assert start(mutated, f"state.apply_began=kill@{once}").wait() != 0
    assert once.exists()
    start(mutated).finish()
    with pytest.raises(AssertionError):
        case.check()


@pytest.mark.long
@pytest.mark.fault(
    "T210",
    "the driver is killed while a batch of windows is divided and goes to disk, and while many windows close",
    "five steps",
)
def test_t210_divided_batches_of_windows_emit_each_window_once_although_drivers_are_killed(
    broker: str, topic: Callable[..., str], driver: Callable[..., Driver], tmp_path: Path
) -> None:
    case, start = WindowedCase(broker, topic, tmp_path), partial(driver, module="integration.chaos.loop")

    def kill(step: str, times: int, name: str) -> None:
        once = tmp_path / name
        killed = start(case.spec(operator=SPILLS), f"{step}=kill*{times}@{once}")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"

    kill("state.after_spill", 7, "divided")
    kill("state.apply_slice", 3, "applied")
    start(case.spec(operator=SPILLS)).finish()  # the rows of the later day make all others late
    case.end()
    kill("test.within_process", 12, "closing")
    kill("state.after_pending", 2, "pending")
    kill("commit.after_commit", 1, "committed")
    start(case.spec(operator=SPILLS)).finish()
    case.check()


@pytest.mark.long
@pytest.mark.fault(
    "T211", "a large batch of windows is recorded as applied before it is", "while it is applied"
)
def test_t211_without_the_record_of_an_unfinished_batch_a_kill_loses_windows(
    broker: str, topic: Callable[..., str], driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """Proves that the test above can fail."""
    case, once = WindowedCase(broker, topic, tmp_path), tmp_path / "once"
    start = partial(driver, module="integration.chaos.loop")
    mutated = case.spec(operator=SPILLS, mutations=["applying"])
    assert start(mutated, f"state.apply_began=kill@{once}").wait() != 0
    assert once.exists()
    start(mutated).finish()
    case.end()
    start(mutated).finish()
    with pytest.raises(AssertionError):
        case.check()


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param(
            (),
            id="with-the-log",
            marks=pytest.mark.fault(
                "T165",
                "the driver is killed while changes are only in the logs of closed stores",
                "three steps",
            ),
        ),
        pytest.param(
            ("state log",),
            id="mutated",
            marks=pytest.mark.fault(
                "T54", "a rule is switched off; the others' tests must then fail", "its own"
            ),
        ),
    ],
)
def test_t165_counts_stay_exact_although_closed_stores_have_no_tables(
    case: Case, driver: Callable[..., Driver], tmp_path: Path, mutations: tuple[str, ...]
) -> None:
    """Small changes stay in the log when a task closes its store; the next open reads them."""
    start = partial(driver, case.spec(mutations=mutations), module="integration.chaos.loop")
    for number, step in enumerate(["state.within_close", "state.after_emit", "commit.after_commit"]):
        once = tmp_path / f"once-{number}"
        killed = start(failpoints=f"{step}=kill*{number + 1}@{once}")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
    if not mutations:
        assert not list(case.state.rglob("*.sst")), "otherwise this test shows nothing"
    start().finish()
    if mutations:
        with pytest.raises(AssertionError):
            case.check()
    else:
        case.check()


@pytest.mark.fault(
    "T213", "the driver is killed, and the changelog's start moves to its last commit", "after the commit"
)
def test_t213_a_quiet_shard_needs_no_restore_although_its_changelog_begins_after_its_last_change(
    case: Case, admin: Admin, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """In Kafka Streams 4.3, such a store has an old offset after a kill, and is restored whole (KAFKA-20663).

    Here every batch moves the offset of every shard. A restore would lose what the changelog has lost.
    """
    start = partial(driver, module="integration.chaos.loop")
    start(case.spec()).finish()
    produce(case.broker, case.source, ["k00"] * 600)  # from here on, all other shards are quiet
    case.wanted["k00"] += 600
    once = tmp_path / "once"
    assert start(case.spec(), f"commit.after_commit=kill*2@{once}").wait() != 0
    assert once.exists()
    changelog = f"{case.application}-{STORE}-changelog"
    group = admin.group(group_of(case.application))
    admin.configure(changelog, {"cleanup.policy": "compact,delete"})
    for shard in range(SHARDS):
        offset, _ = group[(changelog, shard)]
        await_condition(partial(admin.deleted_records, changelog, shard, offset), 30, "records are deleted")
    admin.configure(changelog, {"cleanup.policy": "compact"})
    start(case.spec()).finish()
    case.check()


@pytest.mark.fault(
    "S08", "the group is deleted while a batch is in Kafka and not in Spark's log", "after the commit"
)
def test_the_changelog_identifies_a_batch_whose_group_was_deleted(case: Case, admin: Admin) -> None:
    """With the group deleted, the changelog still knows a batch that an operator declares as committed.

    ``assume_committed:…`` skips the batch; without the changelog the state would count it twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        armed = f"commit.after_commit=raise*{DIES_IN_BATCH + 1}"
        patch.setenv(failpoints.ENVIRONMENT_VARIABLE, armed)
        failpoints._armed.cache_clear()
        with pytest.raises(RestartQueryError, match="armed to raise"):
            case.run()
    failpoints._armed.cache_clear()
    commits = case.checkpoint / "commits"
    assert {path.name for path in commits.iterdir()} == {str(each) for each in range(DIES_IN_BATCH)}
    admin.delete_group(group_of(case.application))
    with pytest.raises(TokenMissingError):
        case.run()
    case.run(sink={"onMissingToken": f"assume_committed:{DIES_IN_BATCH}"})
    case.check()


@pytest.mark.fault(
    "T346",
    "the group is deleted; the token.topic has what a shard without recent changes needs",
    "between two runs",
)
def test_a_shard_without_changes_in_the_last_batches_continues_after_its_group_was_deleted(
    case: Case, admin: Admin, topic: Callable[..., str]
) -> None:
    """The newest batch record in its changelog is older than the token."""
    tokens = topic(1)
    admin.configure(tokens, {"cleanup.policy": "compact"})
    case.run(sink={"token.topic": tokens})
    produce(case.broker, case.source, ["k00"] * 50)
    case.wanted["k00"] += 50
    case.run(sink={"token.topic": tokens})
    admin.delete_group(group_of(case.application))
    case.feed(200)
    case.run(sink={"token.topic": tokens})
    case.check()


@pytest.mark.fault("S05", "a filter drops rows with state", "between operator and sink")
def test_a_filter_that_drops_state_changes_fails_the_batch_before_kafka(case: Case) -> None:
    with pytest.raises(StateLostError):
        case.run(drops_state=True)
    assert read_back(case.broker, case.sink) == []


def counts_of(query: StateQuery) -> Counter[str]:
    """Returns the counts that a store holds, as `RunningCounts` encodes them."""
    return Counter({key[5:].decode(): int(value) for _, (key, value) in query.raw() if key[:1] == b"\x01"})


@pytest.mark.fault(
    "T183",
    "the driver is killed, and a service asks for state that includes its newest record",
    "around Kafka's commit, before the databases have the batch",
)
@pytest.mark.parametrize("step", ["commit.before_commit", "commit.after_commit"])
def test_state_that_must_include_a_record_is_never_older_although_the_driver_was_killed(
    case: Case, driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The databases hold the last batch as pending changes only.

    Before the commit, each query fails, because Kafka does not know the batch yet.
    """
    last_batch = ROWS // PER_BATCH - 1
    killed = driver(case.spec(), f"{step}=kill*{last_batch + 1}", module="integration.chaos.loop")
    assert killed.wait() == -9, killed.tail()
    ends = end_offsets(case.broker, case.source)
    newest = {TopicPartition(case.source, partition): end - 1 for partition, end in ends.items()}
    kafka = {"kafka.bootstrap.servers": case.broker}
    forms: list[dict[str, Any]] = [{"kafka": kafka}, {"kafka": kafka, "state_dir": case.state}]

    def ask(form: dict[str, Any], at_least: Any, timeout_ms: int = 60_000) -> Counter[str]:
        with StateQuery(case.application, STORE, **form, at_least=at_least, timeout_ms=timeout_ms) as state:
            assert state.batch_id == last_batch
            return counts_of(state)

    if step == "commit.before_commit":
        for form in forms:
            with pytest.raises((NotUpToBoundError, UnavailableError)):
                ask(form, newest, 3_000)
        return
    for form in forms:
        assert ask(form, newest) == case.wanted
        assert ask(form, last_batch) == case.wanted
    with pytest.raises(NotUpToBoundError, match=f"reflects batch {last_batch - 1}; expected"):
        ask({"state_dir": case.state}, last_batch, 3_000)
    monkeypatch.setattr(snapshot, "_view_at_cut", lambda reader, *_: reader)
    assert ask(forms[1], newest) != case.wanted, "without the pending changes, the state is older"

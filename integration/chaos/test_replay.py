"""`kafka-eos dead-letters replay` is killed: each letter is sent exactly once."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from integration.support.driver import Driver
from integration.support.kafka import Admin, await_stable, end_offsets, read_back, transaction, values
from integration.support.processes import await_condition
from kafka_eos_source.cli import main
from kafka_eos_source.operate import json_documents
from kafka_eos_source.protocol import records
from tests.support.json_shapes import mismatches

LETTERS = 50
STEPS = ("replay.before_begin", "replay.after_flush", "replay.before_commit", "replay.after_commit")


class Letters:
    """A dead-letter topic with letters of two origins, and the replays of it."""

    def __init__(self, broker: str, topic: Callable[..., str], driver: Callable[..., Driver]) -> None:
        self.broker, self._driver = broker, driver
        self.dead, self.origin, self.output = topic(2), topic(3), topic(2)
        self.time_ms = time.time_ns() // 1_000_000 - 24 * 3_600_000

    def write(self, values: Sequence[str], partition: int = 0, **headers: str | None) -> None:
        """Writes letters as the sink does. ``headers`` replaces those of a marked record; None = none."""
        usual = {
            "ERROR": "NotJson",
            "MESSAGE": "no JSON",
            "ORIGIN_TOPIC": self.origin,
            "ORIGIN_PARTITION": "2",
            "ORIGIN_OFFSET": "1",
            "ORIGIN_TIMESTAMP": str(self.time_ms),
            "APPLICATION": "app",
            "BATCH": "7",
            "HOLDS": records.INPUT,
        }
        named = {name: text for name, text in {**usual, **headers}.items() if text is not None}
        listed = [
            ("trace", b"1"),
            *((getattr(records, name), text.encode()) for name, text in named.items()),
        ]
        # in a transaction: the log ends with a control record, as that of a query does
        producer = transaction(self.broker, f"letters-{uuid.uuid4().hex[:8]}")
        for value in values:
            producer.produce(self.dead, value, f"k{value}", partition=partition, headers=listed)
        producer.commit_transaction(30)
        await_stable(self.broker, self.dead)

    def arguments(self, *more: str) -> list[str]:
        return ["dead-letters", "replay", self.dead, "--bootstrap-servers", self.broker, *more]

    def start(self, failpoints: str, *more: str, mutations: Sequence[str] = ()) -> Driver:
        """Starts a replay, with transactions of ten records, in a process that a failpoint kills."""
        spec = {"arguments": self.arguments("--at-once", "10", *more), "mutations": list(mutations)}
        return self._driver(spec, failpoints, module="integration.chaos.command")

    def run(self, *more: str) -> Result:
        found = CliRunner().invoke(main, self.arguments(*more))
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return found

    def replayed(self, *more: str) -> dict[str, Any]:
        """Replays to the end, and returns what the command prints as JSON."""
        found = self.run("--json", *more)
        assert found.exit_code == 0, found.output
        printed: dict[str, Any] = json.loads(found.stdout)
        assert list(mismatches(json_documents.SHAPES["dead-letters replay"], printed)) == []
        return printed

    def sent(self) -> list[str]:
        return values(read_back(self.broker, self.origin))


@pytest.fixture
def letters(broker: str, topic: Callable[..., str], driver: Callable[..., Driver]) -> Letters:
    return Letters(broker, topic, driver)


def numbers(first: int, end: int) -> list[str]:
    return [f"{number:04d}" for number in range(first, end)]


@pytest.mark.fault("T121", "the replay of dead letters is killed", "four steps, in two of its transactions")
@pytest.mark.timeout(300)
def test_t121_a_replay_that_is_killed_neither_loses_nor_doubles_a_letter(
    letters: Letters, tmp_path: Path
) -> None:
    letters.write(numbers(0, LETTERS))
    letters.write(numbers(LETTERS, 2 * LETTERS), partition=1)
    for number, step in enumerate(STEPS):
        killed = letters.start(f"{step}=kill*{1 + number % 2}@{tmp_path}/{number}")
        assert killed.wait() == -9, f"{step} was not reached:\n{killed.tail()}"
    assert letters.replayed()["records"] > 0
    assert letters.sent() == numbers(0, 2 * LETTERS)
    assert letters.replayed()["records"] == 0
    letters.write(numbers(100, 110))
    assert letters.replayed()["records"] == 10
    assert letters.sent() == numbers(0, 110)


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_a_replay_whose_offsets_commit_separately_sends_letters_twice(
    letters: Letters, tmp_path: Path
) -> None:
    """Proves that the test above can fail."""
    letters.write(numbers(0, LETTERS))
    rule = ["replay offsets in the transaction"]
    point = f"test.between_records_and_offsets=kill*2@{tmp_path}/once"
    assert letters.start(point, mutations=rule).wait() == -9
    assert letters.start("", mutations=rule).wait() == 0
    found = letters.sent()
    assert len(found) == LETTERS + 10, "the letters of one transaction come twice"


@pytest.mark.fault(
    "T122", "a second replay of the same group runs while the first is paused", "before commit"
)
def test_t122_a_paused_replay_does_not_send_what_another_one_has_sent(
    letters: Letters, tmp_path: Path
) -> None:
    letters.write(numbers(0, LETTERS))
    once = tmp_path / "once"
    paused = letters.start(f"replay.before_commit=stop*2@{once}")
    await_condition(once.exists, 120, "the replay has an open transaction")
    paused.await_stopped()
    assert letters.replayed()["records"] == LETTERS - 10
    paused.resume()
    assert paused.wait() == 1
    assert "run the same command again" in paused.log.read_text(), paused.tail()
    assert letters.sent() == numbers(0, LETTERS)


def replaced_within(
    letters: Letters, admin: Admin, tmp_path: Path, name: str, partitions: int, *mutations: str
) -> Driver:
    """Deletes a topic and creates it again while the second transaction of a replay is open."""
    letters.write(numbers(0, LETTERS))
    once = tmp_path / "once"
    paused = letters.start(f"replay.after_flush=stop*2@{once}", mutations=mutations)
    await_condition(once.exists, 120, "the replay has an open transaction")
    paused.await_stopped()
    admin.delete(name)
    admin.create(name, partitions)
    paused.resume()
    return paused


@pytest.mark.fault("T155", "a topic is deleted and created again while a replay runs", "after flush")
def test_t155_a_replay_loses_no_letter_with_the_topic_to_which_it_was_sent(
    letters: Letters, admin: Admin, tmp_path: Path
) -> None:
    replay = replaced_within(letters, admin, tmp_path, letters.origin, 3)
    assert replay.wait() == 1
    said = replay.log.read_text()
    assert re.search(f"topic '{letters.origin}' was deleted.* while the replay ran", said)
    assert letters.sent() == [], "a record of the refused transaction is visible"
    assert letters.replayed()["records"] == LETTERS - 10
    assert letters.sent() == numbers(10, LETTERS), "the first ten were in the old topic"


@pytest.mark.fault("T155", "a topic is deleted and created again while a replay runs", "after flush")
def test_t155_letters_of_a_dead_letter_topic_that_was_created_again_are_sent_once(
    letters: Letters, admin: Admin, tmp_path: Path
) -> None:
    replay = replaced_within(letters, admin, tmp_path, letters.dead, 2)
    assert replay.wait() == 1
    said = replay.log.read_text()
    assert re.search(f"topic '{letters.dead}' was deleted.* while the replay ran", said)
    assert letters.sent() == numbers(0, 10)
    letters.write(numbers(100, 130))
    again = letters.run()
    if again.exit_code:  # the coordinator has not yet deleted the offsets of the old topic
        assert "was deleted since and created again" in again.output
        assert letters.replayed("--group", f"g-{uuid.uuid4().hex[:8]}")["records"] == 30
    assert letters.sent() == [*numbers(0, 10), *numbers(100, 130)]


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_check_of_topic_ids_a_replay_loses_letters(
    letters: Letters, admin: Admin, tmp_path: Path
) -> None:
    """Proves that the tests above notice it."""
    replaced_within(letters, admin, tmp_path, letters.origin, 3, "topic ids").wait()
    letters.replayed()
    assert letters.sent() == numbers(20, LETTERS), "the letters of the open transaction are gone"


def test_a_letter_that_is_larger_than_its_topic_accepts_is_refused_before_any_is_sent(
    letters: Letters, admin: Admin
) -> None:
    """Many letters together may be larger than the limit, which the broker compares with whole batches."""
    small = [f"{number:04d}" + "x" * 400 for number in range(200)]
    admin.configure(letters.origin, {"max.message.bytes": "20000"})
    letters.write([*small, "y" * 20_000])
    refused = letters.run()
    assert refused.exit_code == 1
    assert "too_large: 1" in refused.output
    assert letters.sent() == []
    admin.configure(letters.origin, {"max.message.bytes": "50000"})
    await_condition(lambda: letters.replayed("--dry-run")["refused"] == {}, 60, "the limit is raised")
    assert letters.replayed()["records"] == 201
    assert letters.sent() == [*small, "y" * 20_000]


def test_a_record_comes_back_as_it_was(letters: Letters) -> None:
    letters.write(["a"])
    letters.replayed()
    (record,) = read_back(letters.broker, letters.origin)
    assert (record.key, record.value, record.headers) == (b"ka", b"a", [("trace", b"1")])
    assert (record.partition, record.timestamp_ms) == (2, letters.time_ms)


def test_a_record_that_its_topic_would_delete_at_once_is_refused(letters: Letters, admin: Admin) -> None:
    admin.configure(letters.origin, {"retention.ms": "604800000"})
    letters.write(["old"], ORIGIN_TIMESTAMP="1400000000000")
    await_condition(lambda: letters.replayed("--dry-run")["refused"] != {}, 60, "the retention is known")
    refused = letters.run()
    assert refused.exit_code == 1
    assert "past_retention: 1" in refused.output
    assert letters.replayed("--timestamps", "now")["records"] == 1
    (record,) = read_back(letters.broker, letters.origin)
    assert record.timestamp_ms > letters.time_ms


def test_letters_that_cannot_be_sent_are_refused_by_name_and_count(letters: Letters, admin: Admin) -> None:
    letters.write(["in"])
    letters.write(["out", "out"], HOLDS=records.OUTPUT)
    letters.write(["cut"], VALUE_BYTES="2000000")
    letters.write(["lost"], ORIGIN_TOPIC=None)
    letters.write(["other"], HOLDS=None)
    letters.write(["self"], ORIGIN_TOPIC=letters.dead)
    refused = letters.run()
    assert refused.exit_code == 1
    for named in ("output_row: 2", "incomplete: 1", "no_origin: 1", "unknown_contents: 1", "own_topic: 1"):
        assert named in refused.output
    assert letters.sent() == []
    dry = letters.replayed("--dry-run", "--to", letters.output)
    assert (dry["sent"], dry["topics"]) == (False, {letters.origin: 1, letters.output: 2})
    assert letters.sent() == []
    assert admin.group(dry["group_id"], may_be_empty=True) == {}, "a dry run commits nothing"
    done = letters.replayed("--to", letters.output, "--skip-refused")
    assert done["topics"] == {letters.origin: 1, letters.output: 2}
    assert done["refused"] == {"incomplete": 1, "no_origin": 1, "unknown_contents": 1, "own_topic": 1}
    assert values(read_back(letters.broker, letters.output)) == ["out", "out"]
    assert letters.sent() == ["in"]


def test_each_set_of_filters_has_a_group_of_its_own(letters: Letters) -> None:
    letters.write(["a"], ERROR="A")
    letters.write(["b"], ERROR="B", BATCH="8")
    first = letters.replayed("--error", "A")
    assert (first["records"], first["unselected"]) == (1, 1)
    second = letters.replayed("--batch", "8")
    assert second["group_id"] != first["group_id"]
    assert letters.sent() == ["a", "b"]
    mixed = letters.run("--error", "B", "--group", first["group_id"])
    assert mixed.exit_code == 1
    assert "has replayed this topic with other filters ({'error': 'A'})" in mixed.output
    assert letters.sent() == ["a", "b"]


def test_the_group_of_another_program_is_refused(letters: Letters, admin: Admin) -> None:
    letters.write(["a"])
    group = f"g-{uuid.uuid4().hex[:8]}"
    admin.commit(group, {(letters.origin, 0): (5, "")})
    refused = letters.run("--group", group)
    assert refused.exit_code == 1
    assert "holds offsets of another program or topic" in refused.output


def test_open_and_aborted_letters_are_neither_listed_nor_sent(letters: Letters) -> None:
    letters.write(["committed"])
    aborted = transaction(letters.broker, f"x-{uuid.uuid4().hex[:8]}")
    aborted.produce(letters.dead, "aborted", partition=0)
    aborted.abort_transaction(30)
    await_stable(letters.broker, letters.dead)
    running = transaction(letters.broker, f"x-{uuid.uuid4().hex[:8]}")
    running.produce(letters.dead, "open", partition=0)
    assert running.flush(30) == 0
    listed = CliRunner().invoke(
        main, ["dead-letters", "list", letters.dead, "--bootstrap-servers", letters.broker, "--json"]
    )
    (letter,) = [json.loads(line) for line in listed.stdout.splitlines()]
    assert list(mismatches(json_documents.SHAPES["dead-letters list"], letter)) == []
    assert (letter["value"], letter["error"], letter["holds"]) == ("committed", "NotJson", "input")
    done = letters.replayed()
    assert (done["records"], done["waiting_offsets"]) == (1, 1)
    running.abort_transaction(30)


def test_the_table_counts_all_letters_and_shows_the_newest(letters: Letters) -> None:
    letters.write(numbers(0, 30))
    letters.write(["x"], ERROR="RecordTooLarge", HOLDS=records.OUTPUT)
    shown = CliRunner().invoke(
        main, ["dead-letters", "list", letters.dead, "--bootstrap-servers", letters.broker, "-n", "3"]
    )
    assert shown.exit_code == 0, shown.output
    assert "the newest 3 of 31 dead letters" in shown.output
    assert shown.output.count("NotJson") == 3, "two letters and one line of the summary"


def test_letters_of_a_topic_that_was_created_again_are_sent(letters: Letters, admin: Admin) -> None:
    """Kafka deletes the group's offsets of a deleted topic."""
    letters.write(["a"])
    group = letters.replayed()["group_id"]
    admin.delete(letters.dead)

    def is_forgotten() -> bool:
        return all(topic != letters.dead for topic, _ in admin.group(group, may_be_empty=True))

    await_condition(is_forgotten, 60, "the coordinator has deleted the offsets of the topic")
    admin.create(letters.dead, 2)
    letters.write(["b"])
    assert letters.replayed()["records"] == 1
    assert letters.sent() == ["a", "b"]


def test_a_missing_origin_topic_is_named_before_anything_is_sent(letters: Letters) -> None:
    letters.write(["a"])
    letters.write(["b"], ORIGIN_TOPIC="gone")
    letters.write(["c"], ORIGIN_TOPIC="no name")
    refused = letters.run()
    assert refused.exit_code == 1
    assert "no_topic: 2" in refused.output
    assert "Topics that do not exist: 'gone'" in refused.output
    assert letters.sent() == []
    assert end_offsets(letters.broker, letters.origin) == {0: 0, 1: 0, 2: 0}
    assert letters.replayed("--input-to", letters.output, "--dry-run")["records"] == 3
    passed = letters.replayed("--skip-refused")
    assert (passed["records"], passed["refused"], passed["missing_topics"]) == (1, {"no_topic": 2}, ["gone"])
    assert letters.sent() == ["a"]


def test_letters_that_a_broker_would_refuse_do_not_stop_the_others(letters: Letters, admin: Admin) -> None:
    letters.write(["good"])
    letters.write(["ahead"], ORIGIN_TIMESTAMP=str(letters.time_ms + 48 * 3_600_000))
    admin.configure(letters.origin, {"message.timestamp.after.max.ms": "3600000"})
    assert "timestamp_limit: 1" in letters.run().output
    assert letters.replayed("--skip-refused")["refused"] == {"timestamp_limit": 1}
    assert letters.sent() == ["good"]


def test_a_replay_commits_the_offsets_of_all_partitions(letters: Letters, admin: Admin) -> None:
    """Kafka deletes the offset of a partition some time after its last commit."""
    letters.write(["a"])
    first = letters.replayed()
    held = admin.group(first["group_id"])
    assert first["new_group"]
    assert {tp: offset for tp, (offset, _) in held.items()} == {(letters.dead, 0): 2, (letters.dead, 1): 0}
    admin.grow(letters.dead, 3)
    letters.write(["b"], partition=2)
    refused = letters.run()
    assert refused.exit_code == 1
    assert f"none of {letters.dead}-2" in refused.output.replace("\n", " ")
    again = letters.replayed("--new-partitions")
    assert (again["records"], again["new_group"]) == (1, False)
    assert len(admin.group(first["group_id"])) == 3
    assert letters.sent() == ["a", "b"]

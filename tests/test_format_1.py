"""What a version with tokens of format 1 left behind is read, and a query continues with it exactly once.

`data/format_1` was recorded when that version was killed in its third batch;
`integration.test_operations_upgrade` runs that version.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from kafka_eos_source.commit.facts import Batch, Digests, Held
from kafka_eos_source.commit.first_batch import read_first_batch
from kafka_eos_source.commit.sources import ranges
from kafka_eos_source.commit.verdict import Verdict, batch_verdict
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate import staging
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.token import FORMAT, Token
from kafka_eos_source.state import layout
from kafka_eos_source.state.batch_record import decode_batch, record_of

RECORDED = Path(__file__).parent / "data" / "format_1"
CHECKPOINT = str(RECORDED / "checkpoint")
LAST_COMMITTED = 1


@pytest.fixture(scope="module")
def group() -> dict[TopicPartition, GroupOffset]:
    rows = json.loads((RECORDED / "group.json").read_text())
    return {
        (tp := TopicPartition(topic, partition)): GroupOffset(tp, offset, metadata)
        for topic, partition, offset, metadata in rows
    }


@pytest.fixture(scope="module")
def held(group: dict[TopicPartition, GroupOffset]) -> Held:
    (application_id,) = {json.loads(each.metadata)["app"] for each in group.values()}
    return Held.of(application_id, group)


def batch(held: Held, batch_id: int) -> Batch:
    """Returns a batch of the recorded offset log as the commit describes it."""
    before = offset_log.read(CHECKPOINT, batch_id - 1)
    logged = offset_log.read(CHECKPOINT, batch_id)
    assert before is not None
    assert logged is not None
    (source,) = ranges(logged, before)
    return Batch(
        application_id=held.application_id,
        query_id=offset_log.query_id(CHECKPOINT),
        run_id="run",
        batch_id=batch_id,
        start=Digests(before.digest, before.digest_of_format_1),
        end=Digests(logged.digest, logged.digest_of_format_1),
        starts=source.start,
        ends=source.end,
        promised=True,
    )


def anchor(group: dict[TopicPartition, GroupOffset]) -> TopicPartition:
    return min(tp for tp in group if tp.topic.startswith("t-"))


def test_the_token_is_read_and_its_batch_id_serves_as_the_sequence(held: Held) -> None:
    token = held.whole_token
    assert token is not None
    assert (token.format, token.sequence, token.batch_id) == (1, LAST_COMMITTED, LAST_COMMITTED)
    assert held.next_sequence() == LAST_COMMITTED + 1
    assert all(held.is_marked(tp) for tp in held.offsets)


def test_the_committed_batch_is_skipped_and_the_planned_one_is_written(
    held: Held, group: dict[TopicPartition, GroupOffset]
) -> None:
    assert batch_verdict(batch(held, LAST_COMMITTED), held, anchor(group)) is Verdict.SKIP
    assert batch_verdict(batch(held, LAST_COMMITTED + 1), held, anchor(group)) is Verdict.WRITE


def test_a_token_that_is_written_again_has_the_current_format(held: Held) -> None:
    token = held.whole_token
    assert token is not None
    again = Token.decode(token.encode())
    assert again is not None
    assert again.format == FORMAT
    assert again.sequence == LAST_COMMITTED


def test_the_first_batch_file_promises_a_token_after_the_first_batch() -> None:
    found = read_first_batch(CHECKPOINT)
    assert found is not None
    assert not found.promises_token(0)
    assert found.promises_token(1)


def test_the_changelog_ends_with_the_batch_and_attempt_that_each_shards_token_names(
    group: dict[TopicPartition, GroupOffset],
) -> None:
    last = {}
    for partition, offset, key, value in json.loads((RECORDED / "changelog.json").read_text()):
        if base64.b64decode(key) == layout.BATCH_KEY:
            last[partition] = (offset, decode_batch(base64.b64decode(value)))
    shards = {tp.partition: each for tp, each in group.items() if tp.topic.endswith("-changelog")}
    assert last.keys() == shards.keys() == {0, 1}
    for partition, (offset, found) in last.items():
        token = Token.decode(shards[partition].metadata)
        assert token is not None
        named = record_of(token)
        assert (found.batch_id, found.task_attempt_id) == (named.batch_id, named.task_attempt_id)
        assert offset < shards[partition].offset


def test_a_staged_part_is_swept_once_kafka_holds_later_batches() -> None:
    """The next start stages the batch again, under new names; nobody reads the part of the former version."""
    entries = staging.entries(str(Path(CHECKPOINT, "kafka-eos", "staging")))
    (entry,) = (each for each in entries if each.batch_id == LAST_COMMITTED + 1)
    for token_batch, deleted in ((LAST_COMMITTED, False), (LAST_COMMITTED + 2, True)):
        (decision,) = staging.sweep_decisions(
            [entry], token_batch=token_batch, older_than_seconds=1e12, now_seconds=0.0
        )
        assert decision.delete is deleted, decision

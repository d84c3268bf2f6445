"""Whether the commit uses the group or the record in the token topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from kafka_eos_source.commit.ownership import recover
from kafka_eos_source.commit.verdict import Held
from kafka_eos_source.errors import OperatorError, TokenMissingError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token, TokenRecord
from kafka_eos_source.runtime.deadline import Deadline

APP, GROUP, TOPIC_ID = "orders", "orders-group", "id-1"
IN, OTHER, OUT = TopicPartition("in", 0), TopicPartition("in", 1), TopicPartition("out", 0)


def token(sequence: int, batch_id: int | None = None, query_id: str = "query-1", app: str = APP) -> Token:
    batch = sequence if batch_id is None else batch_id
    return Token(app, query_id, "run", sequence, batch, f"s{batch}", f"e{batch}", 10)


def record(of: Token, topic_id: str = TOPIC_ID) -> TokenRecord:
    at = 10 * of.sequence
    return TokenRecord(of, {IN: at, OTHER: at + 1, OUT: of.batch_id}, OUT, GROUP, topic_id, 0, 0)


def group(of: Token) -> dict[TopicPartition, GroupOffset]:
    return record(of).group_offsets()


@dataclass
class Topic:
    """A token topic, with the record that each kind of read returns."""

    certain: TokenRecord | None = None
    quick: TokenRecord | None = None
    name: str = "tokens"
    topic_id: str = TOPIC_ID
    reads: list[bool] = field(default_factory=list)

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        assert application_id == APP
        self.reads.append(certain)
        return self.certain if certain else self.quick


def from_group(offsets: Mapping[TopicPartition, GroupOffset]) -> Held:
    return Held.of(APP, offsets)


def recovered(
    offsets: Mapping[TopicPartition, GroupOffset],
    topic: Topic,
    missing_token: str = "fail",
    is_complete: bool = True,
) -> Held:
    return recover(
        from_group(offsets),
        GROUP,
        topic,
        Deadline.after_seconds(10),
        batch_id=4,
        missing_token=missing_token,
        is_complete=is_complete,
    )


def test_the_token_record_replaces_a_lost_group() -> None:
    topic = Topic(certain=record(token(3)))
    found = recovered({}, topic)
    assert found == from_group(group(token(3)))
    assert found.token == token(3)
    assert topic.reads == [True], "a missing token needs a certain read"
    assert all(found.is_marked(tp) for tp in (IN, OTHER, OUT)), "every offset carries a mark"


def test_a_new_query_has_neither_group_nor_token_record() -> None:
    topic = Topic()
    assert recovered({}, topic) == from_group({})
    assert topic.reads == [True]


def test_an_existing_group_is_used_without_waiting_for_open_transactions() -> None:
    topic = Topic(quick=record(token(3)))
    assert recovered(group(token(3)), topic) == from_group(group(token(3)))
    assert topic.reads == [False]


def test_a_token_topic_that_the_query_never_used_is_not_required_to_hold_a_record() -> None:
    assert recovered(group(token(3)), Topic()) == from_group(group(token(3)))


def test_a_record_is_outdated_if_later_batches_had_no_token_topic() -> None:
    assert recovered(group(token(8)), Topic(quick=record(token(3)))) == from_group(group(token(8)))


def test_a_newer_record_replaces_a_group_that_lost_its_newest_offsets() -> None:
    assert recovered(group(token(2)), Topic(quick=record(token(3)))) == from_group(group(token(3)))


def without_token(of: Token) -> dict[TopicPartition, GroupOffset]:
    """Returns the group after the anchor's topic and its full token were deleted; the marks remain."""
    return {tp: offset for tp, offset in group(of).items() if tp != OUT}


def test_the_record_replaces_a_token_that_was_deleted_with_its_anchor_topic() -> None:
    topic = Topic(certain=record(token(3)))
    assert recovered(without_token(token(3)), topic).token == token(3)
    older = {**without_token(token(3)), OUT: group(token(2))[OUT]}
    assert recovered(older, topic).token == token(3)
    assert topic.reads == [True, True]


def test_a_record_that_is_older_than_a_mark_does_not_replace_a_lost_token() -> None:
    """Later transactions were committed while the query had no token topic."""
    lost = without_token(token(5))
    assert recovered(lost, Topic(certain=record(token(4)))) == from_group(lost)


def test_sequence_numbers_are_compared_and_not_batch_ids() -> None:
    """After a checkpoint was rolled back and healed, batch ids go back and sequence numbers do not."""
    own = group(token(5, batch_id=2))
    assert recovered(own, Topic(quick=record(token(4, batch_id=4)))) == from_group(own)
    assert recovered(own, Topic(quick=record(token(6, batch_id=2)))).token == token(6, batch_id=2)


def test_a_group_and_a_record_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OperatorError, match=r"batch 9 of query query-1.*sequence number 1, .*batch 5.*forg"):
        recovered(group(token(1, batch_id=9)), Topic(quick=record(token(5, batch_id=5))))


def test_a_record_of_another_query_does_not_replace_an_existing_group() -> None:
    foreign = record(token(50, query_id="query-0"))
    assert recovered(group(token(1)), Topic(quick=foreign)) == from_group(group(token(1)))


def test_a_record_of_another_query_replaces_a_lost_group() -> None:
    """So a new checkpoint with an application.id in use is refused, although the group is gone."""
    foreign = token(50, query_id="query-0")
    assert recovered({}, Topic(certain=record(foreign))).token == foreign


def test_a_token_of_another_application_in_a_shared_group_is_ignored() -> None:
    elsewhere = TopicPartition("elsewhere", 0)
    shared = {elsewhere: GroupOffset(elsewhere, 1, token(90, app="invoices").encode())}
    topic = Topic(certain=record(token(3)))
    found = recovered(shared, topic)
    assert (found.token, topic.reads) == (token(3), [True])
    assert found.offsets[elsewhere] == shared[elsewhere]


def test_offsets_that_others_committed_after_the_loss_stay_visible() -> None:
    moved = {IN: GroupOffset(IN, 7, ""), OTHER: GroupOffset(OTHER, 31, token(1, app="invoices").encode())}
    found = recovered(moved, Topic(certain=record(token(3))))
    assert found.token == token(3)
    assert {tp: found.offsets[tp] for tp in moved} == moved
    assert [found.is_marked(tp) for tp in (IN, OTHER, OUT)] == [False, False, True]


COPIED = pytest.param("id-0", True, "is a copy, .* id id-0, and the id of this topic is id-1", id="copied")
INCOMPLETE = pytest.param(TOPIC_ID, False, "committed batches without a record since", id="incomplete")


@pytest.mark.parametrize(("topic_id", "is_complete", "doubt"), [COPIED, INCOMPLETE])
def test_a_record_that_may_be_outdated_is_refused(topic_id: str, is_complete: bool, doubt: str) -> None:
    doubtful = record(token(3), topic_id=topic_id)
    topic = Topic(certain=doubtful, quick=doubtful)
    older = group(token(2))
    for offsets in ({}, without_token(token(3)), older):
        with pytest.raises(TokenMissingError, match=rf"'tokens' \(transaction 3, batch 3\).*{doubt}"):
            recovered(offsets, topic, is_complete=is_complete)
        for answer in ("assume_committed:4", "assume_not_committed:4"):
            assert recovered(offsets, topic, answer, is_complete) == from_group(offsets)
        with pytest.raises(TokenMissingError, match="may not be the newest"):
            recovered(offsets, topic, "assume_not_committed:3", is_complete)
    for newer in (group(token(3)), group(token(4)), group(token(2, query_id="query-0"))):
        assert recovered(newer, topic, is_complete=is_complete) == from_group(newer)


def test_a_query_continues_after_its_group_was_renamed(caplog: pytest.LogCaptureFixture) -> None:
    old = replace(record(token(3)), group_id="old-group")
    with caplog.at_level("WARNING"):
        assert recovered({}, Topic(certain=old)).token == token(3)
    assert "committed in group 'old-group'" in caplog.text

"""The journal of a rescale: what it says survives, and it only continues the copy of the same state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.operate.json_documents import PROGRESS, document
from kafka_eos_source.operate.rescale import kept_deletes, unkept_deletes
from kafka_eos_source.operate.rescale_copy import (
    CopyJournal,
    Progress,
    decode_notes,
    digest,
    encode_notes,
    filled_until,
    with_filled,
)
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.state.changelog.move import Move
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.reading.stores import Cut

CUT = Cut("app", "counts", "t", "id", 2, {0: 5, 1: 9}, {0: BatchRecord("q", 3, "a"), 1: None})
TOKEN = Token("app", "query", "run", 7, 7, "start", "end", 12, transaction_number=2)
MOVE = Move("counts", 3, 5, "old", TOKEN, "rescale-1", 1000, None, {"late_rows": 5})


def test_a_journal_survives_encoding_and_is_neither_a_token_nor_a_move_record() -> None:
    journal = CopyJournal(digest(CUT), 5, "copy", 1, 77, 12, 40, 1_700_000_000_000)
    text = journal.encode()
    assert len(text) < 256
    assert CopyJournal.decode(text) == CopyJournal.decode(text + "\0") == journal
    assert Token.decode(text) is None
    assert Move.decode(text) is None
    for other in (
        "",
        "free text",
        "[]",
        '{"rescale":2}',
        '{"rescale":1,"x":1}',
        TOKEN.encode(),
        MOVE.encode(),
    ):
        assert CopyJournal.decode(other) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(CUT, topic_id="new"),
        replace(CUT, ends={0: 5, 1: 10}),
        replace(CUT, batches={0: BatchRecord("q", 3, "b"), 1: None}),
        replace(CUT, batches={0: BatchRecord("q", 4, "a"), 1: None}),
    ],
)
def test_a_copy_of_another_state_is_not_continued(other: Cut) -> None:
    journal = CopyJournal(digest(CUT), 5, "copy", 1, 77, 12, 40)
    assert journal.continues(CUT, 5, "copy")
    assert not journal.continues(other, 5, "copy")
    assert not journal.continues(CUT, 4, "copy")
    assert not journal.continues(CUT, 5, "another copy")


def test_the_move_record_tells_how_far_the_changelog_is_filled() -> None:
    text = with_filled(MOVE, "new", 70)
    assert Move.decode(text) == MOVE  # also for a release that does not know slices
    assert len(text) < 1500
    assert filled_until(text + "\0", "new") == 70
    assert filled_until(text, "created again") == 0
    for other in ("", "text", MOVE.encode()):
        assert filled_until(other, "new") == 0


entries = st.dictionaries(st.binary(max_size=9), st.binary(max_size=9), max_size=3)


@given(entries, entries)
def test_notes_survive_encoding(done: dict[bytes, bytes], running: dict[bytes, bytes]) -> None:
    assert decode_notes(encode_notes(done, running)) == (done, running)


def test_progress_estimates_from_what_this_run_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress("copy", done=40, total=100)
    assert progress.left_seconds is None
    assert str(progress) == "copy: 40 %, 0 records (0 bytes) in 0 transaction(s)"
    now = 110.0
    progress.done, progress.records, progress.size_bytes, progress.slices = 60, 15, 3 << 20, 2
    assert progress.left_seconds == 20
    assert str(progress) == "copy: 60 %, 15 records (3.0 MiB) in 2 transaction(s), about 20 s left"
    progress.done = 100
    assert str(progress).endswith("transaction(s)")
    assert document(PROGRESS, progress) == {
        "stage": "copy",
        "records": 15,
        "bytes": 3 << 20,
        "slices": 2,
        "offsets_done": 100,
        "offsets_total": 100,
        "seconds": 10.0,
        "left_seconds": 0.0,
    }


@pytest.mark.parametrize("own", [{}, {"delete.retention.ms": "0"}, {"delete.retention.ms": "86400000"}])
def test_the_changelog_gets_back_the_configuration_that_the_copy_had_changed(own: dict[str, str]) -> None:
    config = {"cleanup.policy": "compact", **own}
    copy = kept_deletes(config)
    assert int(copy["delete.retention.ms"]) >= 10 * 365 * 86_400_000
    assert unkept_deletes(copy) == config

"""Vectorised session windows agree with plain Python: they grow, merge, and drop late rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import session
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.sessions import join_spans
from kafka_eos_source.state.vector.versions import ListCodec
from kafka_eos_source.state.vector.windows import Session
from tests.state.vector.vector_model import (
    BASE,
    SCHEMA,
    Row,
    Stream,
    as_partials,
    batch_of,
    inputs,
    key_of,
    ms,
    results,
    row_at,
    rows,
    same,
    sharded,
    split,
)

KEYS = ["j", "k"]
SOME = {
    "n": agg.count(),
    "sum": agg.sum("i"),
    "min": agg.min("s"),
    "mean": agg.avg("i"),
    "new": agg.last("s", by=("ts", "seq")),
}


@st.composite
def gaps(draw: st.DrawFn, *, grace: bool = True) -> Session:
    late = draw(st.integers(0, 20)) * 500 if grace else 10**9
    return Session("ts", draw(st.integers(1, 12)) * 500, late)


@dataclass
class Model:
    """Sessions as lists of rows, merged one row at a time."""

    window: Session
    shards: int
    open: list[dict[Any, list[list[Row]]]] = field(default_factory=list)
    event_time_ms: int | None = None
    late: int = 0
    no_time: int = 0

    def __post_init__(self) -> None:
        self.open = [{} for _ in range(self.shards)]

    def span(self, some: list[Row]) -> tuple[int, int]:
        times = [row["ts"] for row in some]
        return min(times), max(times) + self.window.gap_ms

    def closed(self, some: list[Row], until_ms: int | None) -> bool:
        return until_ms is not None and self.span(some)[1] + self.window.grace_ms <= until_ms

    def take_closed(self, found: dict[Any, list[list[Row]]], until_ms: int | None) -> dict[Any, Any]:
        """Removes the sessions that are over, and returns their results."""
        over: dict[Any, Any] = {}
        for key, some in found.items():
            over |= {(key, self.span(one)): results(one, SOME) for one in some if self.closed(one, until_ms)}
            found[key] = [one for one in some if not self.closed(one, until_ms)]
        return over

    def add(self, found: dict[Any, list[list[Row]]], row: Row) -> None:
        start, end = self.span([row])
        key = key_of(row, KEYS)
        mine = found.setdefault(key, [])
        touching = [some for some in mine if self.span(some)[0] < end and start < self.span(some)[1]]
        whole = sorted([row, *(other for some in touching for other in some)], key=lambda each: each["seq"])
        found[key] = [*(some for some in mine if some not in touching), whole]

    def run_shard(self, found: dict[Any, list[list[Row]]], batch: list[Row]) -> tuple[Any, set[Any], Any]:
        """Returns the sessions that a batch updates, retracts and closes."""
        over = self.take_closed(found, self.event_time_ms)  # the watermark is known before the rows are
        before = {(key, self.span(some)) for key, mine in found.items() for some in mine}
        timed = [row for row in batch if row["ts"] is not None]
        self.no_time += len(batch) - len(timed)
        for row in timed:
            self.add(found, row)
        new = {row["seq"] for row in timed}
        for key, mine in found.items():
            late = [
                s for s in mine if self.closed(s, self.event_time_ms) and new.issuperset(r["seq"] for r in s)
            ]
            self.late += sum(map(len, late))
            found[key] = [some for some in mine if some not in late]
        updated = {
            (key, self.span(some)): results(some, SOME)
            for key, mine in found.items()
            for some in mine
            if not new.isdisjoint(row["seq"] for row in some)
        }
        removed = before - {(key, self.span(some)) for key, mine in found.items() for some in mine}
        times = [row["ts"] for row in timed] + ([] if self.event_time_ms is None else [self.event_time_ms])
        over |= self.take_closed(found, max(times, default=None))
        return updated, removed, over

    def run(self, batches: list[list[Row]]) -> tuple[Any, set[Any], Any]:
        updated: dict[Any, Any] = {}
        removed: set[Any] = set()
        over: dict[Any, Any] = {}
        for found, batch in zip(self.open, batches, strict=True):
            one, two, three = self.run_shard(found, batch)
            updated, removed, over = updated | one, removed | two, over | three
        times = [row["ts"] for batch in batches for row in batch if row["ts"] is not None]
        self.event_time_ms = max(
            [*times, *([] if self.event_time_ms is None else [self.event_time_ms])], default=None
        )
        return updated, removed, over


def emitted(found: list[Row]) -> tuple[dict[Any, Any], set[Any]]:
    """Checks and returns what a processor emitted: each session once, retractions first."""
    kept: dict[Any, Any] = {}
    removed: set[Any] = set()
    for row in found:
        place = (key_of(row, KEYS), (ms(row["window_start"]), ms(row["window_end"])))
        assert place not in kept
        if row.get("removed"):
            assert all(row[name] is None for name in SOME)
            assert place not in removed
            removed.add(place)
        else:
            kept[place] = tuple(same(row[name]) for name in SOME)
    return kept, removed


@settings(max_examples=25)
@given(rows(), gaps(), st.booleans(), st.data())
def test_the_output_of_every_batch_equals_that_of_the_model(
    some: list[Row], window: Session, on_close: bool, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, 2))
    processor = AggregateProcessor(
        SCHEMA, KEYS, SOME, window=window, emit="on_close" if on_close else "on_update"
    )
    stream, model = Stream(processor, shards), Model(window, shards)
    for batch in split(data.draw, some):
        own = sharded(batch, KEYS, shards)
        updated, removed, over = model.run(own)
        found = emitted(stream.run(inputs(data.draw, processor, own)))
        assert found == ((over, set()) if on_close else (updated, removed))
        for state, mine in zip(stream.states, model.open, strict=True):
            keys = sum(1 for sessions in mine.values() if sessions)
            # each key has its sessions and one timer entry, which is not later than its first session
            assert len(state.rows) == 1 + 2 * keys
    assert stream.rows_left_out() == (model.late, model.no_time)


@settings(max_examples=25)
@given(rows(), gaps(grace=False), st.data())
def test_within_grace_the_sessions_do_not_depend_on_batches(
    some: list[Row], window: Session, data: st.DataObject
) -> None:
    processor = AggregateProcessor(SCHEMA, KEYS, SOME, window=window)
    whole, parts = Stream(processor), Stream(processor)
    whole.run([[batch_of(some)]])
    kept: dict[Any, Any] = {}
    for batch in split(data.draw, some):
        updated, removed = emitted(parts.run([as_partials(processor, split(data.draw, batch, 3))]))
        assert removed <= kept.keys()
        kept = {place: row for place, row in kept.items() if place not in removed} | updated
    # results that were emitted and not retracted are the final sessions
    assert kept == Model(window, 1).run([some])[0]
    assert _stored(processor, parts) == _stored(processor, whole)


def _stored(processor: AggregateProcessor, stream: Stream) -> list[Any]:
    """Returns the sessions in the state, without the timer entries of their keys."""
    codec = ListCodec(processor.description.tables[2].value)
    values = {key: value for key, value in stream.states[0].rows.items() if key[0] == 2}
    found = codec.decode(pa.array(list(values.values()), pa.binary()))
    columns = [list(map(same, column.to_pylist())) for column in found.columns]
    counted = iter(zip(*columns, strict=True))
    return sorted(
        (key, [next(counted) for _ in range(count_)])
        for key, count_ in zip(values, found.counts, strict=True)
    )


def _run(stream: Stream, *times: int) -> list[Any]:
    found = stream.run([[batch_of([row_at("a", time) for time in times])]])
    spans = ((ms(row["window_start"]) - BASE, ms(row["window_end"]) - BASE, row) for row in found)
    return [(start, end, "removed" if row.get("removed") else row["n"]) for start, end, row in spans]


def test_sessions_grow_merge_and_close() -> None:
    window = session("5s", on="ts", grace="10s")
    update = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window))
    close = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window, emit="on_close"))

    def run(*times: int) -> tuple[list[Any], list[Any]]:
        return _run(update, *times), _run(close, *times)

    assert run(0, 8000) == ([(0, 5000, 1), (8000, 13_000, 1)], [])
    joined = [(0, 5000, "removed"), (8000, 13_000, "removed"), (0, 13_000, 3)]
    assert run(4000) == (joined, [])
    assert run(6000) == ([(0, 13_000, 4)], [])  # within the session
    assert run(13_000) == ([(13_000, 18_000, 1)], [])  # exactly one gap later: a new session
    assert run(23_000) == ([(23_000, 28_000, 1)], [(0, 13_000, 4)])
    assert run(7999) == ([], [])  # late, because its session is closed
    # a row at 9 s alone would be late, but another row of the batch extends its session
    assert run(9000, 13_500, 10_000) == ([(13_000, 18_000, "removed"), (9000, 18_500, 4)], [])
    assert run(60_000)[1] == [(9000, 18_500, 4), (23_000, 28_000, 1)]
    assert update.metrics == close.metrics == {"late_rows": 1}


@settings(max_examples=10)
@given(rows(), gaps(grace=False))
def test_partial_rows_of_one_session_are_merged_in_the_read(some: list[Row], window: Session) -> None:
    processor = AggregateProcessor(SCHEMA, KEYS, SOME, window=window)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kafka_eos_source.state.vector.arrays.CHUNK_ROWS", 2)
        partial = list(processor.partial([batch_of([row]) for row in some]))
    assert len(partial) <= 1  # each session once, however it was combined
    assert partial == [] or partial[0].num_rows <= len(some)
    assert emitted(Stream(processor).run([partial]))[0] == Model(window, 1).run([some])[0]


def test_the_timer_entry_of_a_growing_session_is_rarely_moved() -> None:
    """If a session grows in every batch, its timer entry is moved only when it fires."""
    stream = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=session("10s", on="ts")))
    state = stream.states[0]
    moves = 0
    for second in range(40):
        before = {key for key in state.rows if key[0] > layout.TIMED}
        _run(stream, second * 1000)
        after = {key for key in state.rows if key[0] > layout.TIMED}
        assert len(after) == 1
        moves += before != after
    assert moves == 4
    assert _run(stream, 60_000) == [(60_000, 70_000, 1)]
    assert len(state.rows) == 3


@pytest.mark.parametrize("emit", ["on_close", "on_update"])
def test_a_session_that_another_shards_event_time_closed_accepts_no_rows(emit: str) -> None:
    processor = AggregateProcessor(
        SCHEMA, ["k"], {"n": agg.count()}, window=session("5s", on="ts"), emit=emit
    )
    stream = Stream(processor, 2)
    stream.run([[batch_of([row_at("a", 0)])], [batch_of([row_at("b", 6000)])]])
    # the row itself is not late; its session [0, 5 s) is over, but the shard has not processed it since
    (row,) = stream.run([[batch_of([row_at("a", 4000)])], []])
    span = (ms(row["window_start"]) - BASE, ms(row["window_end"]) - BASE)
    assert (row["k"], span, row["n"]) == ("a", (0, 5000) if emit == "on_close" else (4000, 9000), 1)
    assert [len(state.rows) for state in stream.states] == [3, 3]


def test_an_earlier_session_of_a_key_is_closed_on_time() -> None:
    window = session("5s", on="ts", grace="10s")
    stream = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window, emit="on_close"))
    assert _run(stream, 20_000) == []
    assert _run(stream, 12_000) == []  # the key's timer entry is now earlier
    found = stream.run([[batch_of([row_at("b", 27_000)])]])
    assert [(row["k"], ms(row["window_end"]) - BASE) for row in found] == [("a", 17_000)]
    assert _run(stream, 35_000) == [(20_000, 25_000, 1)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-8, 8), st.integers(1, 5)), max_size=9).map(
        lambda spans: [(key, start, start + length) for key, start, length in spans]
    )
)
def test_overlapping_spans_are_merged(spans: list[tuple[int, int, int]]) -> None:
    found = join_spans(*(np.array([span[at] for span in spans], np.int64) for at in range(3))).tolist()
    groups = [{number} for number in range(len(spans))]
    for one, (key, start, end) in enumerate(spans):
        for other, (other_key, other_start, other_end) in enumerate(spans):
            if key == other_key and start < other_end and other_start < end:
                both = next(g for g in groups if one in g) | next(g for g in groups if other in g)
                groups = [*(group for group in groups if not group & both), both]
    assert sorted(map(sorted, groups)) == sorted(
        [number for number, session_ in enumerate(found) if session_ == each] for each in set(found)
    )
    # numbered by key and start
    firsts = [
        min((spans[n][0], spans[n][1]) for n, s in enumerate(found) if s == each)
        for each in sorted(set(found))
    ]
    assert firsts == sorted(firsts)


_LISTS = st.lists(
    st.lists(
        st.tuples(st.integers(-9, 9), st.none() | st.text(max_size=3), st.none() | st.binary(max_size=3)),
        max_size=3,
    ),
    max_size=5,
)


@given(_LISTS, st.booleans())
def test_lists_of_rows_survive_encoding_and_decoding(
    lists: list[list[tuple[int, str | None, bytes | None]]], variable: bool
) -> None:
    fields = [
        pa.field("i", pa.int64(), nullable=False),
        pa.field("s", pa.string()),
        pa.field("b", pa.binary()),
    ]
    fields = fields if variable else fields[:1]
    codec = ListCodec(pa.schema(fields))
    flat = [row for some in lists for row in some]
    columns = [pa.array([row[at] for row in flat], each.type) for at, each in enumerate(fields)]
    counts = np.array([len(some) for some in lists], np.int64)
    due = np.arange(len(lists)) * -7
    values = codec.encode(due, counts, columns)
    assert [value is None for value in values.to_pylist()] == [not some for some in lists]
    found = codec.decode(values)
    assert found.counts.tolist() == counts.tolist()
    assert found.due_ms.to_pylist() == [-7 * at if some else None for at, some in enumerate(lists)]
    assert [column.to_pylist() for column in found.columns] == [column.to_pylist() for column in columns]


def test_a_value_that_is_not_an_encoded_list_is_refused() -> None:
    codec = ListCodec(pa.schema([pa.field("i", pa.int64(), nullable=False)]))
    good = codec.encode(np.array([1]), np.array([2]), [pa.array([1, 2])])[0].as_py()
    for bad, message in (
        (good[:5], "expected 13 or more"),
        (b"\x02" + good[1:], "an encoded list does not begin with"),
        (good[:-1], "shorter than its rows"),
        (good + b"x", "longer or shorter"),
    ):
        with pytest.raises(ValueError, match=message):
            codec.decode(pa.array([good, bad]))

"""Partial aggregation inside the read gives the same partial rows as the same step after the read."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given
from pyspark.sql.pandas.types import to_arrow_schema

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.in_read.step import ReadColumn, ReadColumns, step_in_read
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.read.settings import schema_of
from kafka_eos_source.spark.arrow import read_arrow_schema
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import session, shard_rows, tumbling
from kafka_eos_source.state.encoding.layout import shards_of
from kafka_eos_source.state.shard_rows import (
    PACKED_BATCH,
    PACKED_SCHEMA,
    ROUTE,
    SHARD,
    pack,
    routes,
    unpack,
)
from kafka_eos_source.state.vector.in_read import AggregateInRead, used_columns
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import Window

SHARDS = 3
READ = {"subscribe": "t", "kafka.bootstrap.servers": "h:1"}
COLUMNS = ReadColumns(
    (
        ReadColumn("page", "key", as_text=True),
        ReadColumn("raw", "value"),
        ReadColumn("at", "timestamp"),
        ReadColumn("offset", "offset"),
    )
)
AGGREGATES = {"n": agg.count("raw"), "last": agg.last("raw", by="offset"), "late": agg.max("offset")}
WINDOWS: tuple[Window | None, ...] = (
    None,
    tumbling("10 s", on="at", grace="5 s"),
    session("10 s", on="at", grace="5 s"),
)


def in_read(window: Window | None = None) -> AggregateInRead:
    return AggregateInRead(COLUMNS, ("page",), AGGREGATES, window, SHARDS)


@st.composite
def batches(draw: st.DrawFn) -> list[pa.RecordBatch]:
    one = st.tuples(
        st.none() | st.sampled_from([b"", b"a", b"\xff\xfe", "ü".encode()]),
        st.none() | st.binary(max_size=3),
        st.integers(0, 60_000_000),
        st.integers(0, 2**40),
    )
    schema = read_arrow_schema(False, ("key", "value", "timestamp", "offset"))
    return [
        pa.RecordBatch.from_arrays(
            [
                pa.array([row[at] for row in rows], field.type)
                for at, field in zip(range(4), schema, strict=True)
            ],
            schema=schema,
        )
        for rows in draw(st.lists(st.lists(one, max_size=8), max_size=4))
    ]


@pytest.mark.parametrize("window", WINDOWS)
@given(read=batches())
def test_aggregating_in_the_read_equals_a_step_after_the_read(
    window: Window | None, read: list[pa.RecordBatch]
) -> None:
    """The results agree even for keys that are not UTF-8, because Spark's cast keeps the bytes."""
    schema = pa.schema(
        [
            pa.field("page", pa.string()),
            pa.field("raw", pa.binary()),
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("offset", pa.int64()),
        ]
    )
    frames = [
        pa.RecordBatch.from_arrays(
            [batch.column("key").view(pa.string()), *(batch.column(at) for at in (1, 2, 3))], schema=schema
        )
        for batch in read
    ]
    after = list(AggregateProcessor(schema, ["page"], AGGREGATES, window=window).partial(frames))
    pushed = in_read(window)
    for shard, rows in enumerate(_delivered(pushed(read), pushed.partial_schema)):
        wanted = [row for batch in after for row in _rows(batch) if _shard(row) == shard]
        assert rows == wanted


def _delivered(packed: Iterator[pa.RecordBatch], schema: pa.Schema) -> list[list[dict[str, object]]]:
    """Returns the input of each shard, routed as Spark does."""
    found: list[list[dict[str, object]]] = [[] for _ in range(SHARDS)]
    for batch in packed:
        assert batch.schema == PACKED_SCHEMA
        route = shards_of([batch.column(ROUTE)], SHARDS)
        assert route.tolist() == batch.column(SHARD).to_pylist()
        for shard, value in zip(route, batch.column(PACKED_BATCH), strict=True):
            for rows in unpack(pa.array([value.as_py()], pa.binary()), schema):
                found[shard] += _rows(rows)
    return found


def _rows(batch: pa.RecordBatch) -> list[dict[str, object]]:
    """Returns rows with text as bytes."""
    columns = {
        name: column.view(pa.binary()) if pa.types.is_string(column.type) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return pa.RecordBatch.from_pydict(columns).to_pylist()


def _shard(row: dict[str, object]) -> int:
    return int(shards_of([pa.array([row["page"]], pa.binary())], SHARDS)[0])


@pytest.mark.parametrize("window", WINDOWS)
def test_the_option_describes_the_whole_step_to_the_read(window: Window | None) -> None:
    step = in_read(window)
    assert step.partial_schema
    options = parse_read({**READ, "step.in.read": step.to_option()}, streaming=True)
    found = step_in_read(options)
    assert found == step
    assert found.columns.of_source == ("key", "value", "timestamp", "offset")
    assert found.columns == COLUMNS
    assert to_arrow_schema(schema_of(options)).names == PACKED_SCHEMA.names


@pytest.mark.parametrize("columns", [(), (ReadColumn("page", "nope"),), (ReadColumn("k", "key"),)])
def test_an_aggregation_that_does_not_fit_its_columns_is_refused_on_the_driver(
    columns: tuple[ReadColumn, ...],
) -> None:
    step = AggregateInRead(ReadColumns(columns), ("page",), {"n": agg.count()}, None, SHARDS)
    options = parse_read({**READ, "step.in.read": step.to_option()}, streaming=True)
    with pytest.raises(InvalidOptionError, match=r"'step\.in\.read' has the value"):
        schema_of(options)


def test_each_used_column_is_listed_once() -> None:
    assert used_columns(["page", "at"], AGGREGATES, WINDOWS[1]) == ["page", "at", "raw", "offset"]


@pytest.mark.parametrize("shards", [1, 2, 7, 200])
def test_rows_can_be_routed_to_every_shard(shards: int) -> None:
    assert shards_of([pa.array(routes(shards), pa.int32())], shards).tolist() == list(range(shards))


def test_large_rows_need_several_packed_batches_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_rows, "PACKED_BATCH_BYTES", 1000)
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.binary())])
    rows = pa.record_batch([[7] * 30, [bytes([n]) * 100 for n in range(30)]], schema=schema)
    (packed,) = pack([rows.slice(0, 0), rows], schema, ["k"], 4)
    assert packed.num_rows > 3
    assert pa.Table.from_batches(unpack(packed.column(PACKED_BATCH), schema)).to_pylist() == rows.to_pylist()

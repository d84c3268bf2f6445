"""Whatever a record contains, it becomes a row or the error of a row, and its neighbours do not matter."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

from kafka_eos_source.in_read.converted_columns import ConvertedColumns
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.read.columns import Run, record_batches
from kafka_eos_source.registry.columns import _with_errors
from kafka_eos_source.spark.schema import INVALID
from tests.support.fetched_log import Batch, Record, decoded
from tests.support.foreign_records import JSON_DOCUMENTS, Case, cases, check, payloads

CASES = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
ROWS = (
    StructType()
    .add("value", BinaryType())
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
)


@CASES
def test_each_strange_value_is_a_row_or_an_error(case: Case) -> None:
    for payload in (*case.valid, *case.strange):
        check(case, [case.framed(payload)])
    _, errors = check(case, [case.framed(each) for each in case.valid])
    assert errors == [None] * len(case.valid)


@CASES
@settings(max_examples=60)
@given(data=st.data())
def test_any_record_is_a_row_or_an_error_whatever_its_neighbours_are(case: Case, data: st.DataObject) -> None:
    values = data.draw(st.lists(payloads(case), max_size=6))
    found, errors = check(case, values)
    alone = [check(case, [each]) for each in values]
    assert [error for _, (error,) in alone] == errors
    assert [value for (value,), _ in alone] == found


def test_the_order_of_json_documents_does_not_matter() -> None:
    """Arrow's parser gets those documents that stand together, and Python's the others."""
    case = next(each for each in cases() if each.name == "json-arrow")
    values = [case.framed(each) for each in JSON_DOCUMENTS]
    found, errors = check(case, values)
    assert check(case, values[::-1]) == (found[::-1], errors[::-1])
    good = [row for row, error in enumerate(errors) if error is None]
    again = check(case, [values[row] for row in good])
    assert again == ([found[row] for row in good], [None] * len(good))


# -- the options for bad records


@CASES
@settings(max_examples=25)
@given(data=st.data())
def test_permissive_returns_the_value_or_the_error(case: Case, data: st.DataObject) -> None:
    values = data.draw(st.lists(payloads(case), max_size=4))
    column = pa.concat_arrays(
        [_with_errors(each) for each in case.decoding().slices(pa.array(values, pa.binary()))]
    )
    column.validate(full=True)
    both = zip(*(column.field(at).is_valid().to_pylist() for at in (0, 1)), strict=True)
    for value, (has_value, has_error) in zip(values, both, strict=True):
        assert not (has_value and has_error)
        assert has_value or has_error or value is None or case.schema.format == "JSON"  # the document null


@CASES
@settings(max_examples=25)
@given(data=st.data())
def test_map_in_read_marks_the_others_with_their_bytes_and_place(case: Case, data: st.DataObject) -> None:
    values = data.draw(st.lists(payloads(case), min_size=1, max_size=4))
    batch = pa.RecordBatch.from_pydict(
        {
            "value": pa.array(values, pa.binary()),
            "topic": ["t"] * len(values),
            "partition": pa.array(range(len(values)), pa.int32()),
            "offset": pa.array(range(len(values)), pa.int64()),
        }
    )
    taken: list[int] = []

    def function(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        for each in batches:
            taken.extend(each.column("partition").to_pylist())
            yield each.set_column(0, "value", pa.nulls(each.num_rows, pa.binary()))

    step = ConvertedColumns(function, {"value": case.decoding()}, {}, ROWS)
    marked = [row for each in step(iter([batch])) for row in each.to_pylist() if row[INVALID] is not None]
    assert sorted([*taken, *(row[INVALID]["partition"] for row in marked)]) == list(range(len(values)))
    for row in marked:
        mark = row[INVALID]
        assert (mark["topic"], mark["offset"]) == ("t", mark["partition"])
        assert mark["message"].startswith("column 'value': ")
        assert row["value"] == values[mark["offset"]]


# -- records without a schema


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            Record,
            st.just(0),
            st.none() | st.binary(max_size=5),
            st.none() | st.binary(max_size=5),
            st.lists(st.tuples(st.binary(max_size=5), st.none() | st.binary(max_size=5)), max_size=3),
            st.integers(-(1 << 62), (1 << 62)) | st.integers(-2, 2).map(lambda sign: sign * ((1 << 61) - 1)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_record_is_a_row_of_the_source(records: list[Record]) -> None:
    placed = [Record(at, each.key, each.value, each.headers, each.ms) for at, each in enumerate(records)]
    tp = TopicPartition("t", 0)
    messages = decoded({tp: Batch(0, len(placed) - 1, placed)})
    (batch,) = record_batches([Run(tp, messages, messages.offsets)], True)
    batch.validate(full=True)
    assert batch.column("offset").to_pylist() == list(range(len(placed)))
    assert batch.column("key").to_pylist() == [each.key for each in placed]
    microseconds = batch.column("timestamp").cast(pa.int64()).to_pylist()
    assert microseconds == [each.ms * 1000 if abs(each.ms * 1000) < 1 << 63 else None for each in placed]

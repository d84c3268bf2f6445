"""State changes travel to the commit in packets with reports, so that a missing part is detected."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructType

from kafka_eos_source.errors import StagedPartError, StateError, StateLostError
from kafka_eos_source.model import ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packing import CHANGELOG, pack_packets, unpack_packet
from kafka_eos_source.spark.schema import INVALID, SinkColumns, check_frame
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows, batch_of, reports
from kafka_eos_source.stage.rows import from_batches, from_rows, staged_schema
from kafka_eos_source.stage.staging import stage
from kafka_eos_source.state.model import BatchContext, Owner, decode_batch
from kafka_eos_source.state.store.uncommitted import CHANGES

COLUMNS = SinkColumns(
    value=0, key=None, topic=None, partition=None, headers=None, timestamp=None, changelog=1
)
TOPIC = "app-counts-changelog"


def report(shard: int = 0, *, shards: int = 2, task_attempt_id: str = "", **values: object) -> ShardReport:
    made = ShardReport(
        tp=TopicPartition(TOPIC, shard),
        task_attempt_id=task_attempt_id or f"attempt-{shard}",
        shards=shards,
        query_id="query",
        batch_id=7,
        next_offset=40 + shard,
        time_ms=1000,
        application_id="app",
        store="counts",
    )
    return replace(made, **values)  # type: ignore[arg-type]


def changes(*pairs: tuple[bytes, bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([key for key, _ in pairs], pa.binary()), pa.array([v for _, v in pairs], pa.binary())],
        schema=CHANGES,
    )


def packets_of(made: ShardReport, batches: list[pa.RecordBatch]) -> list[bytes]:
    """Returns the packets of a shard's task attempt."""
    return [each.to_pybytes() for each in pack_packets(made, batches)]


def frame(values: list[bytes], packets: list[bytes]) -> pa.RecordBatch:
    """Returns a batch as an operator emits it: output rows, then packets."""
    return pa.record_batch(
        [
            pa.array([*values, *[None] * len(packets)], pa.binary()),
            pa.array([*[None] * len(values), *packets], pa.binary()),
        ],
        ["value", CHANGELOG],
    )


def staged(values: list[bytes], packets: list[bytes]) -> StagedPart:
    return stage(
        from_batches([frame(values, packets)], COLUMNS),
        staged_schema(COLUMNS),
        folder=None,
        batch="7",
        inline_bytes=1 << 20,
        topic="out",
    )


def both_shards() -> list[StagedPart]:
    return [
        staged([b"x"], packets_of(report(0, event_time_ms=5), [changes((b"\x01k", b"v"), (b"\x01d", None))])),
        staged([b"y", b"z"], packets_of(report(1, event_time_ms=9), [])),
    ]


def test_a_batch_fails_if_no_report_of_an_operator_that_ran_arrives() -> None:
    """Lost state changes fail the batch: their column was dropped or overwritten by another operator's."""
    without = [replace(part, shards=None, senders=(TOPIC,)) for part in both_shards()]
    with pytest.raises(
        StateLostError, match=rf"the operator of {TOPIC} ran, but none of its state changes reached the sink"
    ):
        reports(without, "query", 7)
    first, second = both_shards()
    heard = [replace(first, senders=(TOPIC,)), second]
    assert len(reports(heard, "query", 7)) == 2
    with pytest.raises(StateLostError, match="the operator of app-a-changelog ran"):
        reports([*heard, replace(second, shards=(), senders=("app-a-changelog", TOPIC))], "query", 7)


def test_the_sink_ignores_what_expressions_made_of_the_other_columns_of_a_packet() -> None:
    """A user's ``coalesce`` or UDF also runs on rows with packets; none of them may become a record."""
    schema = (
        StructType()
        .add("value", StringType())
        .add("topic", StringType())
        .add("partition", IntegerType())
        .add(INVALID, StringType())
        .add(CHANGELOG, BinaryType())
    )
    columns = check_frame(schema, topic_option=None, include_timestamp=False)
    packets = packets_of(report(), [changes((b"\x01k", b"v"))])
    rows = [
        ("record", "out", 1, None, None),
        ("made of nulls", "no topic!", -5, "marked as invalid", packets[0]),
        (None, None, None, None, packets[1]),
    ]
    batch = pa.Table.from_pylist(
        [dict(zip(schema.names, row, strict=True)) for row in rows],
        schema=pa.schema(
            [
                ("value", pa.string()),
                ("topic", pa.string()),
                ("partition", pa.int32()),
                (INVALID, pa.string()),
                (CHANGELOG, pa.binary()),
            ]
        ),
    ).to_batches()[0]
    for staged_rows in (from_batches([batch], columns), from_rows(rows, columns)):
        found = [row for each in staged_rows for row in each.to_pylist()]
        assert [row["value"] for row in found if row["changelog"] is None] == [b"record"]
        carried = [row for row in found if row["changelog"] is not None]
        assert [row.pop("changelog") for row in carried] == packets
        assert all(value is None for row in carried for value in row.values())


def test_a_packet_decodes_to_what_was_encoded() -> None:
    made = report(counts={"late_rows": 3})
    first, last = map(unpack_packet, packets_of(made, [changes((b"\x01k", b"v"), (b"\x01d", None))]))
    assert [batch.to_pylist() for batch in first.batches()] == [
        [{"key": b"\x01k", "value": b"v"}, {"key": b"\x01d", "value": None}]
    ]
    assert (first.number, first.report, last.number) == (0, None, 1)
    assert last.report == replace(made, packets=2, records=2)
    assert list(last.batches()) == []


def test_what_a_shard_measured_travels_with_its_report() -> None:
    measured = {"keys": 5, "bytes": 1_000, "restore_seconds": 1.23456}
    (packet,) = pack_packets(report(measured=measured), [])
    found = unpack_packet(packet).report
    assert found is not None
    assert found.measured == {"keys": 5, "bytes": 1_000, "restore_seconds": 1.235}


def test_a_processor_may_report_only_few_metrics_with_short_names() -> None:
    context = BatchContext(batch_id=0, shard=0, shards=1, first=True, time_ms=0)
    for number in range(32):
        context.count(f"metric-{number % 16}", 2)
    assert set(context.metrics.values()) == {4}
    for name, counted in (("one more", context), ("n" * 65, replace(context, metrics={}))):
        with pytest.raises(StateError, match="expected up to 16 metrics with names of up to 64"):
            counted.count(name, 1)


@pytest.mark.parametrize(
    "junk", [b"", b"\x00", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\xffjunk", b"hello world"]
)
def test_invalid_bytes_are_not_a_packet(junk: bytes) -> None:
    with pytest.raises(StateError, match=CHANGELOG):
        unpack_packet(junk)


def test_a_packet_of_a_newer_version_is_refused() -> None:
    (packet,) = packets_of(report(), [])
    with pytest.raises(StateError, match="version 2"):
        unpack_packet(packet.replace(b'"v":1', b'"v":2'))


def test_output_rows_and_state_changes_are_separated() -> None:
    parts = both_shards()
    found = reports(parts, "query", 7)
    rows = StagedRows(StagingFolder("no file is written"), "7", parts, found)
    rows.end_digest = "digest"
    assert [batch.to_pydict() for batch in rows.batches() if batch.num_rows] == [
        {"value": [b"x"]},
        {"value": [b"y", b"z"]},
    ]
    (tp, batch), (record_tp, record) = rows.changes()
    assert tp == record_tp == TopicPartition(TOPIC, 0)
    assert batch.to_pydict() == {"key": [b"\x01k", b"\x01d"], "value": [b"v", None], "partition": [0, 0]}
    assert record.column("key").to_pylist() == [Owner("app", "counts", 2).key]
    assert decode_batch(record.column("value")[0].as_py()) == batch_of(found[0], "digest")
    assert rows.rows == 3 + 2 + 1, "records, changes, and the batch record of the one shard that has changes"
    assert rows.topics == {"out": -1, TOPIC: 1}


def test_output_rows_and_state_changes_are_separated_on_the_oldest_pyspark() -> None:
    packets = packets_of(report(), [changes((b"\x01k", b"v"))])
    rows = [(b"x", None), (None, packets[0]), (b"y", None), (None, packets[1])]
    batches = list(from_rows(rows, COLUMNS))
    assert [batch.column("changelog").to_pylist() for batch in batches] == [packets, [None, None]]
    assert batches[1].column("value").to_pylist() == [b"x", b"y"]


def test_event_time_is_the_largest_of_all_shards() -> None:
    assert [found.event_time_ms for found in reports(both_shards(), "query", 7)] == [9, 9]


def test_a_batch_without_operators_has_no_reports() -> None:
    columns = replace(COLUMNS, changelog=None)
    batch = pa.record_batch([pa.array([b"x"])], ["value"])
    part = stage(
        from_batches([batch], columns),
        staged_schema(columns),
        folder=None,
        batch="7",
        inline_bytes=1 << 20,
        topic="out",
    )
    assert part.shards is None
    assert reports([part], "query", 7) == ()


def test_a_missing_report_fails_the_commit() -> None:
    packets = packets_of(report(0, shards=1), [changes((b"\x01k", b"v"))])
    with pytest.raises(StateLostError, match="report of shard 0"):
        reports([staged([b"x"], packets[:1])], "query", 7)


def test_a_missing_packet_fails_the_commit() -> None:
    packets = packets_of(report(0, shards=1), [changes((b"\x01k", b"v"))])
    with pytest.raises(StateLostError, match="of the 2 packets"):
        reports([staged([b"x"], packets[1:])], "query", 7)


def test_a_duplicate_packet_fails_the_commit() -> None:
    packets = packets_of(report(0, shards=1), [changes((b"\x01k", b"v"))])
    with pytest.raises(StateLostError, match="in 3 rows"):
        reports([staged([b"x"], [*packets, packets[0]])], "query", 7)


def test_a_missing_shard_fails_the_commit() -> None:
    with pytest.raises(StateLostError, match=r"the shards \[0\] sent no report"):
        reports(both_shards()[1:], "query", 7)


def test_missing_reports_of_all_shards_fail_the_commit() -> None:
    with pytest.raises(StateLostError, match="no shard of the operator sent a report"):
        reports([staged([b"x"], [])], "query", 7)


def test_reports_of_two_task_attempts_fail_the_commit() -> None:
    mixed = [
        staged([], packets_of(report(0, shards=1), [changes((b"\x01k", b"v"))])[:1]),
        staged([], packets_of(report(0, shards=1, task_attempt_id="other"), [changes((b"\x01k", b"w"))])[1:]),
    ]
    with pytest.raises(StagedPartError, match="2 attempts"):
        reports(mixed, "query", 7)


@pytest.mark.parametrize(("query", "batch"), [("query", 8), ("other", 7)])
def test_changes_of_another_batch_fail_the_commit(query: str, batch: int) -> None:
    with pytest.raises(StagedPartError, match="belong to batch 7 of query query; expected"):
        reports(both_shards(), query, batch)


def test_the_column_of_state_changes_is_found_in_a_frame() -> None:
    schema = StructType().add("value", StringType()).add(CHANGELOG, BinaryType())
    assert check_frame(schema, topic_option="out", include_timestamp=False).changelog == 1

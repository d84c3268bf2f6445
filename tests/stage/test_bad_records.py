"""Bad records that a read set aside become dead letters; the commit notices packets that did not arrive."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from kafka_eos_source.errors import (
    InvalidRecordError,
    StagedPartError,
    StagedReadError,
    StateError,
    UnavailableError,
)
from kafka_eos_source.in_read.bad_records import Records, bad_records
from kafka_eos_source.in_read.step import with_column_of_packets
from kafka_eos_source.model import ReadTask, StagedPart
from kafka_eos_source.protocol import packing, records
from kafka_eos_source.protocol.packing import BadRecords, BadRecordsOfTask, unpack_packet
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.spark.arrow import HEADERS_ARROW, arrow_schema
from kafka_eos_source.spark.packet_senders import sender_of_read
from kafka_eos_source.spark.schema import SinkColumns, check_frame, only_changelog
from kafka_eos_source.stage.files import PartStage, StagingFolder
from kafka_eos_source.stage.invalid_rows import InvalidRows
from kafka_eos_source.stage.parts import StagedRows, check_reads, reports
from kafka_eos_source.stage.row_rules import RecordLimits
from kafka_eos_source.stage.rows import from_batches, from_rows, staged_schema
from kafka_eos_source.stage.staging import stage

#: A frame without key and headers, as a query may write it.
FRAME = with_column_of_packets(StructType([StructField("value", StringType())]))
COLUMNS = check_frame(FRAME, topic_option="out", include_timestamp=False)
TASK = ReadTask("f", "p", 0, 1)

READ = pa.record_batch(
    {
        "key": pa.array([b"a", None], pa.binary()),
        "value": pa.array([b'{"n":"x"}', b"\xff\x00"], pa.binary()),
        "topic": ["in", "in"],
        "partition": pa.array([3, 3], pa.int32()),
        "offset": pa.array([7, 9], pa.int64()),
        "timestamp": pa.array([1_700_000_000_123_000, None], pa.timestamp("us", "UTC")),
        "headers": pa.array([[{"key": "trace", "value": b"1"}], None], HEADERS_ARROW),
    }
)


def set_aside(task: ReadTask = TASK) -> list[bytes]:
    """Returns the packets of a task that set two records aside: one packet of each, and the report."""
    made = BadRecordsOfTask(task)
    found: list[bytes] = []
    for row in (0, 1):
        of = bad_records(Records.of([READ]).slice(row, 1), {0: f"no number in row {row}"})
        found += [each.to_pybytes() for each in made.packets(of)]
    return [*found, made.report().to_pybytes()]


def nothing_bad(task: ReadTask) -> list[bytes]:
    return [BadRecordsOfTask(task).report().to_pybytes()]


def frame(values: Sequence[str], packets: Sequence[bytes]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            pa.array([*values, *[None] * len(packets)], pa.string()),
            pa.array([*[None] * len(values), *packets], pa.binary()),
        ],
        schema=arrow_schema(FRAME),
    )


class Sink:
    """What a task of the sink stages: the records, and the dead letters."""

    def __init__(self, folder: Path, *, drop: bool = False) -> None:
        self.folder = StagingFolder.at(str(folder))
        stage_of = partial(PartStage, folder=self.folder, batch="0", inline_bytes=1 << 20)
        self.invalid = InvalidRows(
            None if drop else "dead", RecordLimits(20_000), {records.BATCH: "0"}, "out", stage_of
        )

    def write(
        self, batches: Sequence[pa.RecordBatch], columns: SinkColumns = COLUMNS, *, as_rows: bool = False
    ) -> StagedPart:
        if as_rows:
            rows = [tuple(row.values()) for each in batches for row in each.to_pylist()]
            found = from_rows(rows, columns, self.invalid)
        else:
            found = from_batches(batches, columns, self.invalid)
        return stage(found, staged_schema(columns), folder=None, batch="0", inline_bytes=1 << 20, topic="out")

    def letters(self) -> Iterator[dict[str, Any]]:
        part = self.invalid.finish()
        for each in () if part is None else StagedRows(self.folder, "0", [part]).batches():
            yield from each.to_pylist()

    def records_of(self, part: StagedPart) -> list[bytes]:
        return [
            row["value"]
            for each in StagedRows(self.folder, "0", [part]).batches()
            for row in each.to_pylist()
        ]


@pytest.mark.parametrize("as_rows", [False, True], ids=["Arrow", "rows of PySpark 4.0"])
def test_a_bad_record_becomes_a_letter_with_all_that_was_read(tmp_path: Path, as_rows: bool) -> None:
    """Although the frame has neither key nor headers."""
    sink = Sink(tmp_path)
    part = sink.write([frame(["good"], set_aside())], as_rows=as_rows)
    assert sink.records_of(part) == [b"good"]
    first, second = sink.letters()
    assert (first["key"], first["value"], first["topic"]) == (b"a", b'{"n":"x"}', "dead")
    headers = [(each["key"], each["value"]) for each in first["headers"]]
    assert headers[0] == ("trace", b"1")
    assert DeadLetter.parse(headers) == DeadLetter(
        error="UndecodableRecord",
        message="no number in row 0",
        origin_topic="in",
        origin_partition=3,
        origin_offset=7,
        origin_timestamp_ms=1_700_000_000_123,
        batch=0,
        holds=records.INPUT,
        target_topic="out",
    )
    assert (second["key"], second["value"]) == (None, b"\xff\x00")
    assert sink.invalid.count == 2
    check_reads([part], 0)
    assert reports([part], "q", 0) == ()


def test_packets_are_no_records_and_keep_none_of_their_bytes(tmp_path: Path) -> None:
    """The records of a packet are staged once: as dead letters."""
    sink = Sink(tmp_path)
    part = sink.write([frame(["good"], set_aside())])
    staged = StagedRows(sink.folder, "0", [part])
    assert (staged.rows, staged.changelog_rows, list(staged.changes())) == (1, 0, [])
    assert part.inline is not None
    assert b'{"n":"x"}' not in part.inline


def test_bad_records_are_dropped_and_counted(tmp_path: Path) -> None:
    sink = Sink(tmp_path, drop=True)
    sink.write([frame(["good"], set_aside())])
    assert (sink.invalid.dropped, list(sink.letters())) == (2, [])


def test_bad_records_fail_the_batch_if_the_sink_says_so() -> None:
    with pytest.raises(
        InvalidRecordError,
        match=r"topic in, partition 3, offset 7 cannot be decoded: no number in row 0\. The value is "
        r"'\{\"n\":\"x\"\}'.*onInvalidRecord",
    ):
        list(from_batches([frame([], set_aside())], COLUMNS))


def test_bad_records_become_letters_where_all_rows_go_to_other_sinks(tmp_path: Path) -> None:
    schema = with_column_of_packets(StructType([StructField("n", BinaryType())]))
    sink, columns = Sink(tmp_path), only_changelog(schema)
    batch = frame(["5"], set_aside()).rename_columns(["n", schema.names[1]])
    sink.write([batch], columns)
    assert [each["value"] for each in sink.letters()] == [b'{"n":"x"}', b"\xff\x00"]


def test_a_damaged_packet_is_refused(tmp_path: Path) -> None:
    first, _, _ = set_aside()
    with pytest.raises(StateError, match="not a packed batch"):
        Sink(tmp_path).write([frame([], [first[:-40]])])


def test_a_large_batch_of_bad_records_travels_in_several_packets() -> None:
    rows = 3000
    many = pa.record_batch({"value": [b"x" * 2000] * rows})
    made = BadRecordsOfTask(TASK)
    found = list(made.packets(bad_records(Records.of([many]), dict.fromkeys(range(rows), "bad"))))
    assert len(found) > 1
    assert max(each.size for each in found) < 4 << 20
    packets = [unpack_packet(each) for each in (*found, made.report())]
    assert sum(each.num_rows for packet in packets for each in packet.batches()) == rows
    assert [packet.number for packet in packets] == list(range(len(packets)))


# -- lost and doubled packets --------------------------------------------------------------------


def arrived(*packets: bytes, senders: Sequence[str] = ()) -> StagedPart:
    """Returns the part of a task of the sink that received these packets."""
    found = stage(
        from_batches(
            [frame(["good"], packets)], COLUMNS, InvalidRows(None, RecordLimits(1 << 20), {}, None, PartStage)
        ),
        staged_schema(COLUMNS),
        folder=None,
        batch="0",
        inline_bytes=1 << 20,
        topic="out",
    )
    return replace(found, senders=tuple(senders))


def two_tasks() -> tuple[list[bytes], list[bytes]]:
    return set_aside(ReadTask("f", "p", 0, 2)), nothing_bad(ReadTask("f", "p", 1, 2))


def test_packets_may_arrive_in_any_task_and_any_order() -> None:
    first, second = two_tasks()
    check_reads([arrived(first[2], *second), arrived(), arrived(first[1], first[0])], 0)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (0, "2 packets of reading task 0 reached the sink; expected 3"),
        (1, "2 packets of reading task 0 reached the sink; expected 3"),
        (2, "2 packets of reading task 0 reached the sink; expected its report too"),
        (3, "1 of 2 reading tasks sent nothing .the first is task 1"),
    ],
)
def test_each_lost_packet_is_noticed(lost: int, said: str) -> None:
    first, second = two_tasks()
    left = [*first, *second]
    del left[lost]
    with pytest.raises(StagedReadError, match=said):
        check_reads([arrived(*left)], 0)


def test_a_doubled_packet_is_noticed() -> None:
    first, second = two_tasks()
    with pytest.raises(StagedReadError, match="4 packets of reading task 0"):
        check_reads([arrived(*first, *second), arrived(first[0])], 0)


def test_a_frame_that_is_read_twice_is_noticed() -> None:
    first, second = two_tasks()
    again = nothing_bad(ReadTask("f", "another plan", 0, 1))
    with pytest.raises(StagedReadError, match="more than once"):
        check_reads([arrived(*first, *second, *again)], 0)
    other = nothing_bad(ReadTask("another frame", "p", 0, 1))
    check_reads([arrived(*first, *second, *other)], 0)


def test_two_attempts_of_a_task_are_noticed() -> None:
    first, second = two_tasks()
    again, _ = two_tasks()
    with pytest.raises(StagedPartError, match="several attempts of reading task 0"):
        check_reads([arrived(*first, *second), arrived(again[1])], 0)


def test_a_dropped_column_is_noticed_where_a_reading_task_ran_on_the_host() -> None:
    part = replace(arrived(), shards=None, reads=())
    check_reads([part], 0)
    with pytest.raises(StagedReadError, match="nothing that they sent reached the sink"):
        check_reads([replace(part, senders=("app-counts-changelog", sender_of_read("f")))], 0)
    check_reads([arrived(*nothing_bad(TASK), senders=[sender_of_read("f")])], 0)


def test_a_report_without_bad_records_is_one_packet() -> None:
    (only,) = nothing_bad(TASK)
    found = unpack_packet(only)
    assert isinstance(found, BadRecords)
    assert (found.task, found.number, found.total, list(found.batches())) == (TASK, 0, 1, [])


@pytest.mark.parametrize("most_bytes", [1 << 20, 1, 300])
def test_packets_wait_in_memory_or_in_a_file(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    """If all records of a micro-batch are bad, their packets may be larger than the memory."""
    monkeypatch.setattr(packing, "_MOST_WAITING_BYTES", most_bytes)
    waiting = packing.WaitingPackets()
    for turn in range(2):  # it may be used again
        sent = [b"%d-%d" % (turn, number) * 20 for number in range(10)]
        for at in range(0, 10, 2):
            waiting.append(pa.array(sent[at : at + 2], pa.large_binary() if at else pa.binary()))
        waiting.append(pa.array([], pa.binary()))
        found = [value for each in waiting.taken() for value in each.to_pylist()]
        assert sorted(found) == sent
        assert list(waiting.taken()) == []


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packing, "_MOST_WAITING_BYTES", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UnavailableError, match=r"temporary folder '.*missing' cannot hold the packets"):
        packing.WaitingPackets().append(pa.array([b"x"]))

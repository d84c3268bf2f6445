"""What the native client makes of the bytes that brokers send: of every log, and of damaged bytes."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.consumer import FetchResponse

import tests.support.fetched_log as model
from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.kafka import compression, fetched_batches
from kafka_eos_source.kafka.compression import TooLargeError, decompressed
from kafka_eos_source.kafka.fetched_batches import DamagedBatchError, FetchedBatches, Part, decode
from kafka_eos_source.kafka.kernel import WANTS, kernel
from kafka_eos_source.kafka.messages import fetch_answer
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.columns import Run, record_batches
from kafka_eos_source.read.fetch import Progress
from tests.kafka.wire_kit import CODECS, any_records
from tests.support import sanitized
from tests.support.fetched_log import ABORT, COMMIT, Batch, Log, Record

TP = TopicPartition("t", 3)
KERNEL = kernel()
ALL = sum(set(WANTS.values()))
#: More than any batch of these tests has.
MOST = 1 << 30

_how = st.fixed_dictionaries(
    {
        "codec": st.sampled_from(CODECS),
        "append_ms": st.none() | st.integers(0, 2**41),
        "horizon_ms": st.none() | st.integers(0, 2**41),
    }
)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Logs of several producers, as compaction leaves them."""
    log = Log()
    for _ in range(draw(st.integers(0, 14))):
        producer = draw(st.integers(1, 3))
        step = draw(st.sampled_from(["plain", "write", "write", "commit", "abort", "abort"]))
        if step == "plain":
            log.append(draw(st.lists(any_records(), min_size=1, max_size=4)), **draw(_how))
        elif step == "write":
            records = draw(st.lists(any_records(), min_size=1, max_size=4))
            log.append(records, producer=producer, transactional=True, **draw(_how))
        elif producer in log.open:
            log.finish(producer, COMMIT if step == "commit" else ABORT)
    if draw(st.booleans()):
        _compact(draw, log)
    return log


def _compact(draw: st.DrawFn, log: Log) -> None:
    """Removes records as the log cleaner does: a marker only when nothing is left of its transaction."""
    kept: list[Batch] = []
    left: set[tuple[int, int | None]] = set()
    for batch in log.batches:
        transaction = (batch.producer, batch.transaction)
        if batch.marker is None:
            batch.records = [each for each in batch.records if draw(st.integers(0, 2))]
            keeps = bool(batch.records) or (batch.producer > 0 and draw(st.booleans()))
            if keeps and batch.records:
                left.add(transaction)
        else:
            keeps = transaction in left or draw(st.booleans())
            if transaction not in left:
                # the cleaner forgets the transaction, and may keep the batch without its record
                log.aborted = [each for each in log.aborted if each[:2] != transaction]
                batch.records = batch.records if draw(st.booleans()) else []
        if keeps:
            kept.append(batch)
    log.batches = kept


def read(
    log: Log, start: int, end: int, *, committed: bool, most_bytes: int = 1 << 20, seed: int = 0
) -> list[tuple[Any, ...]]:
    """Reads a range as the product does, and returns its rows."""
    progress = Progress([OffsetRange(TP, start, end)])
    rows: list[tuple[Any, ...]] = []
    position, chance = start, random.Random(seed)
    while not progress.done:
        data, aborted = log.fetched(position, most_bytes, committed=committed, chance=chance)
        found = FetchedBatches.of(KERNEL, TP, position, memoryview(data), aborted)
        if found.past_offset <= position:
            assert not data
            # compaction may have removed everything up to the end that a reader may see
            bound = log.stable() if committed else log.end
            assert not any(each.last >= position and each.first < bound for each in log.batches)
            break
        runs = []
        for messages, reached in parts_of(found, end, committed=committed):
            if len(messages):
                kept = progress.accept(TP, messages.offsets)
                if kept.start < kept.stop:
                    runs.append(Run(TP, messages[kept], messages.offsets[kept]))
            progress.advance(TP, reached[TP])
        rows += rows_of(record_batches(runs, True, None) if runs else [])
        assert found.past_offset > position
        position = found.past_offset
    return rows


def parts_of(found: FetchedBatches, end: int, *, committed: bool = True) -> list[Part]:
    return list(decode(KERNEL, ALL, [(found, end)], committed=committed, most_bytes=MOST))


def rows_of(batches: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Returns key, value, offset, time, kind of time, and headers of each row."""
    return [
        (
            row["key"],
            row["value"],
            row["offset"],
            None if row["timestamp"] is None else round(row["timestamp"].timestamp() * 1000),
            row["timestampType"],
            [(each["key"], each["value"]) for each in row["headers"] or ()],
        )
        for batch in batches
        for row in batch.to_pylist()
    ]


def expected(log: Log, start: int, end: int, *, committed: bool) -> list[tuple[Any, ...]]:
    """Returns the rows that the model says a reader sees."""
    times = {
        record.offset: (record.ms, 0) if batch.append_ms is None else (batch.append_ms, 1)
        for batch in log.batches
        for record in batch.records
    }
    return [
        (
            each.key,
            each.value,
            each.offset,
            *times[each.offset],
            # names end at their first NUL, as in librdkafka
            [(name.split(b"\0")[0].decode(), value) for name, value in each.headers],
        )
        for each in log.visible(start, end, committed=committed)
    ]


@settings(max_examples=150, deadline=None)
@given(logs(), st.data(), st.booleans(), st.integers(0, 1 << 16), st.sampled_from([0, 20_000]))
def test_readers_see_what_they_may_see(
    log: Log, data: st.DataObject, committed: bool, seed: int, part_bytes: int
) -> None:
    """Every range, in steps of every size, with whatever transactions the broker names besides the needed."""
    start = data.draw(st.integers(0, log.end), "start")
    end = data.draw(st.integers(start, log.end), "end")
    most_bytes = data.draw(st.sampled_from([0, 50, 200, 1000, 30_000, 1 << 20]), "most_bytes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetched_batches, "_PART_BYTES", part_bytes or 32 << 20)
        found = read(log, start, end, committed=committed, most_bytes=most_bytes, seed=seed)
    assert found == expected(log, start, end, committed=committed)


def interleaved() -> Log:
    """Two producers abort and commit in turn, and one of them is open at the end."""
    log = Log()
    for number in range(6):
        for producer in (1, 2):
            log.append([Record(0, value=b"%d" % number)] * 3, producer=producer, transactional=True)
        log.append([Record(0, value=b"plain")])
        log.finish(1, ABORT if number % 2 else COMMIT)
        log.append([Record(0, value=b"later")], producer=1, transactional=True)
        log.finish(2, COMMIT if number % 2 else ABORT)
        log.finish(1, COMMIT if number % 2 else ABORT)
    log.append([Record(0, value=b"open")], producer=1, transactional=True)
    return log


@pytest.mark.parametrize("most_bytes", [0, 150, 300, 1000, 1 << 20])
def test_every_range_of_interleaved_transactions(most_bytes: int) -> None:
    log = interleaved()
    for start in range(log.end):
        for end in (start + 1, start + 7, log.end):
            for committed in (True, False):
                found = read(log, start, end, committed=committed, most_bytes=most_bytes, seed=start)
                assert found == expected(log, start, end, committed=committed)


def test_an_empty_marker_ends_no_transaction() -> None:
    """Compaction keeps the last batch of a producer, without its record, also if it is a control batch."""
    log = Log()
    log.append([Record(0, value=b"aborted")], producer=1, transactional=True)
    log.batches.append(Batch(1, 1, [], 1, 0, ABORT))
    log.end = 2
    log.aborted = [(1, 0, 3)]
    log.append([Record(0, value=b"aborted")], producer=1, transactional=True)
    log.open.clear()
    log.batches.append(model.marker(3, 1, 0, ABORT))
    log.end = 4
    log.append([Record(0, value=b"visible")])
    found, aborted = log.fetched(0, 1 << 20, committed=True)
    batches = FetchedBatches.of(KERNEL, TP, 0, memoryview(found), aborted)
    parts = parts_of(batches, 100)
    assert [(list(messages.offsets), reached) for messages, reached in parts] == [([4], {TP: 5})]


def test_header_names_that_are_not_utf_8_are_repaired() -> None:
    log = Log()
    log.append([Record(0, value=b"v", headers=[(b"good", b""), (b"\xff\0x", None)])])
    ((*_, headers),) = read(log, 0, 1, committed=True)
    assert [name for name, _ in headers] == ["good", "\ufffd"]  # a name ends at its first NUL


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_partitions_that_are_decoded_together_give_what_each_gives_alone(data: st.DataObject) -> None:
    """Their parts follow each other, and nothing is reached that a later part still has."""
    tps = [TopicPartition(topic, number) for topic in ("t", "u") for number in range(2)]
    group: list[tuple[FetchedBatches, int]] = []
    alone: dict[TopicPartition, list[int]] = {}
    for tp in data.draw(st.permutations(tps)):
        log = Log()
        for _ in range(data.draw(st.integers(0, 4))):
            records = [Record(0, value=bytes(1000))] * data.draw(st.integers(1, 3))
            log.append(records, codec=data.draw(st.sampled_from(CODECS)))
        sent, _ = log.fetched(0, 1 << 20, committed=True)
        fetched = FetchedBatches.of(KERNEL, tp, 0, memoryview(sent))
        group.append((fetched, log.end))
        alone[tp] = list(range(log.end))
    found: dict[TopicPartition, list[int]] = {tp: [] for tp in tps}
    reached = dict.fromkeys(tps, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetched_batches, "_PART_BYTES", data.draw(st.sampled_from([1, 3000, 1 << 20])))
        for messages, now in decode(KERNEL, ALL, group, committed=True, most_bytes=MOST):
            for index in range(len(messages)):
                tp = messages.partition_at(index)
                assert int(messages.offsets[index]) >= reached[tp]
                found[tp].append(int(messages.offsets[index]))
            reached |= now
    assert found == alone
    assert reached == {fetched.tp: fetched.past_offset for fetched, _ in group}


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_small_answer_with_much_data_comes_in_parts(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compression makes a fetch limit no limit; what is decompressed at a time has its own."""
    monkeypatch.setattr(fetched_batches, "_PART_BYTES", 1 << 20)
    log = Log()
    for number in range(12):
        how = {"producer": 1, "transactional": True} if number % 3 == 0 else {}
        log.append([Record(0, value=bytes(300_000))], codec=codec, **how)  # type: ignore[arg-type]
        if how:
            log.finish(1, ABORT)
    data, aborted = log.fetched(0, 1 << 30, committed=True)
    found = FetchedBatches.of(KERNEL, TP, 0, memoryview(data), aborted)
    parts = parts_of(found, log.end)
    assert [len(messages) for messages, _ in parts] == [4, 4]
    # what is reached never lies behind a record of a later part
    assert parts[0].reached == {TP: int(parts[1].messages.offsets[0])}
    assert parts[-1].reached == {TP: log.end}
    assert read(log, 0, log.end, committed=True) == expected(log, 0, log.end, committed=True)


def test_small_compressed_batches_do_not_keep_large_buffers() -> None:
    """An answer may have thousands of batches of a few hundred bytes."""
    for codec in CODECS[1:]:
        data = decompressed(
            model.SNAPPY if codec == model.XERIAL else codec,
            memoryview(model.compressed(b"x" * 900, codec)),
            MOST,
        )
        assert bytes(data) == b"x" * 900
        assert memoryview(data.obj).nbytes <= 2 * 900


# -- damaged bytes


def decoded_rows(data: bytes, aborted: tuple[tuple[int, int], ...] = (), *, checks: bool) -> int:
    """Returns the number of rows, of whatever the product accepts; raises what it finds damaged."""
    found = FetchedBatches.of(KERNEL, TP, 0, memoryview(data), aborted, checks=checks)
    rows = 0
    for messages, _ in parts_of(found, 1 << 62):
        rows += len(messages)
        if len(messages):
            offsets = messages.offsets
            assert (offsets[1:] > offsets[:-1]).all()
            assert offsets[-1] < found.past_offset
            # times beyond what Arrow knows, or names that are not UTF-8
            with contextlib.suppress(InvalidRecordError, pa.ArrowInvalid, OverflowError):
                record_batches([Run(TP, messages, offsets)], True, None)
    if found.damage is not None:
        raise found.damage
    return rows


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes that were changed, cut off, repeated or removed."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if not changed:
            break
        at = draw(st.integers(0, len(changed) - 1))
        step = draw(st.sampled_from(["flip", "set", "cut", "repeat", "remove", "number"]))
        if step == "flip":
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif step == "set":
            changed[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        elif step == "cut":
            del changed[at:]
        elif step == "repeat":
            changed[at:at] = changed[at : at + draw(st.integers(1, 70))]
        elif step == "remove":
            del changed[at : at + draw(st.integers(1, 70))]
        else:
            number = draw(st.sampled_from([-1, 0, 2**31 - 1, -(2**31), 1 << 24]))
            changed[at : at + 4] = struct.pack(">i", number)
    return bytes(changed)


@settings(max_examples=300, deadline=None)
@given(logs(), st.data(), st.booleans())
def test_damaged_bytes_are_refused_or_decoded_without_harm(
    log: Log, data: st.DataObject, fixes: bool
) -> None:
    sent, aborted = log.fetched(0, 1 << 20, committed=True)
    damaged = data.draw(damages(sent), "damaged")
    if fixes and len(damaged) > 61:
        damaged = model.with_checksum(damaged)
    for checks in (True, False):
        with contextlib.suppress(DamagedBatchError, InvalidRecordError):
            decoded_rows(damaged, aborted, checks=checks)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(CODECS))
def test_checksums_find_every_change_of_a_batch(data: st.DataObject, codec: int) -> None:
    log = Log()
    log.append([Record(0, b"k", b"value" * 10, [(b"h", b"1")], 7)] * 3, codec=codec)
    (batch,) = log.batches
    sent = bytearray(batch.encoded())
    at = data.draw(st.integers(17, len(sent) - 1))
    sent[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedBatchError, match="its checksum is 0x"):
        decoded_rows(bytes(sent), checks=True)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(-1, 1000), st.integers(0, 0x7F), st.integers(-1, 40))
def test_records_that_lie(body: bytes, count: int, attributes: int, last_delta: int) -> None:
    """Bodies of random bytes, with a right checksum."""
    batch = model.sealed(0, body, count=count, attributes=attributes, last_delta=last_delta, producer=1)
    for checks in (True, False):
        with contextlib.suppress(DamagedBatchError):
            decoded_rows(batch, ((1, 0),), checks=checks)


@pytest.mark.parametrize(
    "body",
    [
        model.varint(2**62),
        model.varint(-1) * 8,
        b"\xff" * 12,
        model.varint(6) + b"\0" + model.varint(0) * 2 + model.varint(-2) + b"\0\0",
        model.varint(8) + b"\0" + model.varint(0) * 2 + model.varint(2**40) + b"\0\0",
        model.varint(7) + b"\0" + model.varint(0) * 2 + model.varint(-1) * 2 + model.varint(-1),
        model.varint(7) + b"\0" + model.varint(0) * 2 + model.varint(-1) * 2 + model.varint(60) + b"\0",
    ],
)
def test_lengths_that_lie_are_refused(body: bytes) -> None:
    for count in (1, 2, 2**31 - 1):
        with pytest.raises(DamagedBatchError, match="cannot be decoded"):
            decoded_rows(model.sealed(0, body, count=count, last_delta=5), checks=True)


@pytest.mark.parametrize("codec", [model.GZIP, model.SNAPPY, model.XERIAL, model.LZ4, model.ZSTD])
def test_decompression_has_a_limit(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_LARGEST_PART_BYTES", 100_000)
    monkeypatch.setattr(compression, "_GZIP_PART_BYTES", 100_000)
    for size in (0, 1, 65_535, 65_536, 65_537, 165_536, 165_537, 1 << 20):
        plain = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
        packed = memoryview(model.compressed(plain, codec))
        number = model.SNAPPY if codec == model.XERIAL else codec
        assert bytes(decompressed(number, packed, size)) == plain
        if size:
            with pytest.raises(TooLargeError):
                decompressed(number, packed, size - 1)


_MEMORY = r"""
import sys
from pathlib import Path

from tests.support.fetched_log import compressed, sealed, varint
from kafka_eos_source.kafka.kernel import kernel, wants
from kafka_eos_source.kafka.fetched_batches import DamagedBatchError, FetchedBatches, decode
from kafka_eos_source.model import TopicPartition

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10

size, most_bytes, count, batches = map(int, sys.argv[2:])
if count == 1:
    body = b"\0\0\0\1" + varint(size) + bytes(size) + b"\0"
    records = varint(len(body)) + body
else:
    records = b"".join(varint(6) + b"\0\0" + varint(at) + b"\1\1\0" for at in range(count))
packed = compressed(records, int(sys.argv[1]))
data = b"".join(
    sealed(at * count, packed, count=count, attributes=int(sys.argv[1]), last_delta=count - 1)
    for at in range(batches)
)
del packed
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
before = peak()
found = FetchedBatches.of(kernel(), TopicPartition("t", 0), 0, memoryview(data))
rows = 0
try:
    for part in decode(kernel(), wants(("key", "value", "timestamp")), [(found, 1 << 62)], committed=True,
                       most_bytes=most_bytes):
        rows += len(part.messages)
        del part
    print(peak() - before, rows)
except DamagedBatchError as error:
    assert error.is_too_large
    print(peak() - before, -1)
"""


def peak_mib(codec: int, size: int, *, most: int, count: int = 1, batches: int = 1) -> tuple[int, int]:
    """Returns by how many MiB memory grows at most while batches are decoded, and the rows; -1 = refused."""
    ran = subprocess.run(
        [sys.executable, "-c", _MEMORY, *map(str, (codec, size, most << 20, count, batches))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stderr
    grown, rows = map(int, ran.stdout.split())
    return grown, rows


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("codec", [model.GZIP, model.SNAPPY, model.LZ4, model.ZSTD])
def test_a_batch_that_is_too_large_takes_no_more_memory_than_the_limit(codec: int) -> None:
    grown, rows = peak_mib(codec, 200 << 20, most=40)
    assert rows == -1
    assert grown < 60
    grown, rows = peak_mib(codec, 100 << 20, most=120)
    assert rows == 1
    assert grown < 250  # decompressed, and then decoded


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_many_batches_of_a_fetch_and_many_small_records_are_limited_too() -> None:
    grown, rows = peak_mib(model.ZSTD, 10 << 20, most=40, batches=100)  # 1,000 MiB
    assert rows == 100
    assert grown < 150
    grown, rows = peak_mib(model.ZSTD, 0, most=40, count=1_000_000)  # 7 bytes each, and 48 for their numbers
    assert rows == -1
    assert grown < 60


_ONE, _TWO = b"one" * 50, b"two" * 70


def _packed(data: bytes, codec: int) -> bytes:
    return model.compressed(data, codec)


@pytest.mark.parametrize("codec", [model.GZIP, model.XERIAL, model.ZSTD])
def test_all_members_of_a_stream_are_read_as_javas_clients_do(codec: int) -> None:
    number = model.SNAPPY if codec == model.XERIAL else codec
    several = _packed(_ONE, codec) + _packed(b"", codec) * (codec != model.XERIAL) + _packed(_TWO, codec)
    assert bytes(decompressed(number, memoryview(several), MOST)) == _ONE + _TWO
    assert bytes(decompressed(number, memoryview(_packed(_ONE, codec) * 300), MOST)) == _ONE * 300


def test_of_an_lz4_stream_only_the_first_frame_is_read_as_javas_clients_do() -> None:
    one, two = _packed(_ONE, model.LZ4), _packed(_TWO, model.LZ4)
    for rest in (b"", two, b"x", b"garbage", two[:9]):
        assert bytes(decompressed(model.LZ4, memoryview(one + rest), MOST)) == _ONE
    for missing in range(1, len(one)):
        with pytest.raises(OSError, match="Truncated"):
            decompressed(model.LZ4, memoryview(one[:-missing]), MOST)


@pytest.mark.parametrize("rest", [b"x", b"garbage that is longer than a header", b"\x1f\x8b\x08", bytes(40)])
def test_what_follows_a_gzip_stream_is_ignored_as_javas_clients_do(rest: bytes) -> None:
    assert bytes(decompressed(model.GZIP, memoryview(_packed(_ONE, model.GZIP) + rest), MOST)) == _ONE


def test_a_second_member_that_is_damaged_is_refused() -> None:
    one, two = _packed(_ONE, model.GZIP), bytearray(_packed(_TWO, model.GZIP))
    for spoiled in (two[:-1], two[:10] + b"\xff" + two[11:], two[:-8] + bytes(8)):
        with pytest.raises((ValueError, zlib.error)):
            decompressed(model.GZIP, memoryview(one + spoiled), MOST)


@pytest.mark.parametrize("rest", [b"x", b"garbage"])
def test_what_follows_a_zstd_frame_is_refused_as_javas_clients_do(rest: bytes) -> None:
    with pytest.raises(OSError, match="Unknown frame"):
        decompressed(model.ZSTD, memoryview(_packed(_ONE, model.ZSTD) + rest), MOST)


def test_batches_that_overlap_are_refused() -> None:
    """Checksums do not cover offsets, and a reader would take records for others that it has."""
    first, second = Log(), Log(end=1)
    first.append([Record(0)] * 3)
    second.append([Record(0)] * 3)
    data = first.batches[0].encoded() + second.batches[0].encoded()
    with pytest.raises(DamagedBatchError, match="overlap"):
        decoded_rows(data, checks=True)


@pytest.mark.parametrize("magic", [0, 1])
def test_old_formats_are_named_where_they_begin(magic: int) -> None:
    log = Log()
    log.append([Record(0)] * 3)
    new, old = log.batches[0].encoded(), bytearray(model.sealed(3, b"", count=1, magic=magic))
    old[12:16] = zlib.crc32(old[16:]).to_bytes(4, "big")  # of these formats
    with pytest.raises(InvalidRecordError, match=f"offset 3 of t-3 has the record format {magic}"):
        FetchedBatches.of(KERNEL, TP, 3, memoryview(old))
    found = FetchedBatches.of(KERNEL, TP, 0, memoryview(new + old))
    assert (found.past_offset, found.damage) == (3, None)
    old[16] ^= 1
    found = FetchedBatches.of(KERNEL, TP, 0, memoryview(new + old))
    assert f"offset 3 of t-3 is damaged: its format is {1 - magic}; expected 2" in str(found.damage)


# -- answers


def _answer(version: int, throttle_ms: int, code: int, topics: dict[str, list[dict[str, Any]]]) -> bytes:
    kind = FetchResponse.FetchableTopicResponse
    made = FetchResponse(
        throttle_time_ms=throttle_ms,
        error_code=code,
        session_id=0,
        responses=[
            kind(
                topic=name,
                partitions=[
                    kind.PartitionData(
                        partition_index=each["number"],
                        error_code=each["code"],
                        high_watermark=each["high"],
                        last_stable_offset=each["stable"],
                        log_start_offset=0,
                        aborted_transactions=each["aborted"]
                        and [
                            kind.PartitionData.AbortedTransaction(
                                producer_id=producer, first_offset=first, version=version
                            )
                            for producer, first in each["aborted"]
                        ],
                        preferred_read_replica=-1,
                        records=each["records"],
                        version=version,
                    )
                    for each in partitions
                ],
                version=version,
            )
            for name, partitions in topics.items()
        ],
        version=version,
    )
    made.with_header(correlation_id=0)
    return bytes(made.encode(framed=False, header=True))[4:]


_longs = st.integers(-1, 2**63 - 1)
_partitions = st.fixed_dictionaries(
    {
        "number": st.integers(0, 2**31 - 1),
        "code": st.integers(-1, 120),
        "high": _longs,
        "stable": _longs,
        "aborted": st.none() | st.lists(st.tuples(_longs, _longs), max_size=3),
        "records": st.none() | st.binary(max_size=40) | st.just(bytes(300)),
    }
)
_topics = st.dictionaries(
    st.text("abc-_.", min_size=1, max_size=200), st.lists(_partitions, max_size=3), max_size=3
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([11, 12]), st.integers(0, 2**31 - 1), st.integers(-1, 120), _topics)
def test_answers_are_what_kafka_python_encodes(
    version: int, throttle_ms: int, code: int, topics: dict[str, list[dict[str, Any]]]
) -> None:
    found = fetch_answer(version, memoryview(_answer(version, throttle_ms, code, topics)))
    assert (found.throttle_time_ms, found.error_code) == (throttle_ms, code)
    assert [
        (
            each.tp,
            each.error_code,
            each.high_watermark,
            each.last_stable_offset,
            each.aborted,
            bytes(each.records),
        )
        for each in found.partitions
    ] == [
        (
            TopicPartition(name, each["number"]),
            each["code"],
            each["high"],
            each["stable"],
            tuple(each["aborted"] or ()),
            each["records"] or b"",
        )
        for name, partitions in topics.items()
        for each in partitions
    ]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([11, 12]), _topics, st.data())
def test_damaged_answers_raise_only_what_connections_expect(
    version: int, topics: dict[str, list[dict[str, Any]]], data: st.DataObject
) -> None:
    damaged = data.draw(damages(_answer(version, 0, 0, topics)), "damaged")
    with contextlib.suppress(ValueError, IndexError, struct.error):
        fetch_answer(version, memoryview(damaged))


def test_sanitizers_find_nothing_in_the_decoder(tmp_path: Path) -> None:
    tests = "readers_see or header_names or damaged_bytes or lie"
    # Python's own allocator puts small buffers next to each other, where no read beyond one is noticed
    environment = {"PYTHONMALLOC": "malloc"}
    sanitized.check("kernel", tmp_path, ["kafka/test_fetch.py"], tests, environment)

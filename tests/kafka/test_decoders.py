"""Every decoder of what brokers send, against bytes that no broker sends.

None may crash, hang, take memory for a length that lies, or hand out a wrong record. Whatever it raises must
end the connection (`ValueError`) or name a damaged batch, and never end the process.
"""

from __future__ import annotations

import contextlib
import gzip
import random
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import lz4.frame
import pyarrow as pa
import pytest
import snappy
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kafka.protocol.metadata import MetadataRequest

import tests.support.fetched_log as model
from kafka_eos_source.errors import AuthorizationError, KafkaEosError
from kafka_eos_source.kafka import connection
from kafka_eos_source.kafka.compression import TooLargeError, decompressed
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.fetched_batches import DamagedBatchError, FetchedBatches, decode
from kafka_eos_source.kafka.kernel import WANTS, kernel
from kafka_eos_source.kafka.messages import decoded
from kafka_eos_source.kafka.probe import broker_ids
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from tests.kafka.wire_kit import CODECS, any_records
from tests.support import sanitized
from tests.support.fetched_log import Record
from tests.support.simulated_kafka import SimulatedKafka, name_of

TP = TopicPartition("t", 0)
KERNEL: Any = kernel()
ALL = sum(set(WANTS.values()))
#: More than any batch of these tests has.
MOST = 1 << 30
#: Far more than any of these inputs may cost.
SECONDS = 5.0


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes that were changed, cut off, repeated or removed, with numbers that lie."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        step = draw(st.sampled_from(["flip", "set", "cut", "repeat", "remove", "number", "run"]))
        if step == "flip" and changed:
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif step == "set" and changed:
            changed[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        elif step == "cut":
            del changed[at:]
        elif step == "repeat":
            changed[at:at] = changed[at : at + draw(st.integers(1, 70))]
        elif step == "remove":
            del changed[at : at + draw(st.integers(1, 70))]
        elif step == "number":
            number = draw(st.sampled_from([-1, 0, 2**31 - 1, -(2**31), 1 << 24]))
            changed[at : at + 4] = struct.pack(">i", number)
        else:
            changed[at:at] = b"\xff" * draw(st.sampled_from([4, 5, 9, 10, 3000]))
    return bytes(changed)


# -- messages of kafka-python


class Answer(NamedTuple):
    request: Any
    data: bytes


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Returns an answer of each kind and version that the client asks for."""
    found: dict[tuple[int, int], Answer] = {}

    def recording(request: Any, data: memoryview, correlation_id: int) -> Any:
        found[request.API_KEY, request.API_VERSION] = Answer(request, bytes(data))
        return decoded(request, data, correlation_id)

    soon = Deadline.after_seconds(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection.Connection.send, "__defaults__", (None, recording, 0.0))
        patch.setattr("kafka_eos_source.kafka.access.decoded", recording)
        for version in (2, 1, 0):
            with SimulatedKafka({"t": 3}, brokers=2, version=version) as cluster:
                cluster.users = {"alice": "hunter2"}
                login = {"security.protocol": "sasl_plaintext", "sasl.mechanisms": "PLAIN"}
                login |= {"sasl.username": "alice", "sasl.password": "hunter2"}
                config = producer_config({"bootstrap.servers": cluster.bootstrap, **login}, "app")
                client = TransactionalProducer(config)
                client.init(soon)
                client.begin()
                client.send(pa.record_batch({"value": pa.array([b"v"] * 9, pa.binary())}), "t", soon)
                client.flush(soon)
                client.send_offsets([GroupOffset(TP, 1, "token")], "group", soon)
                client.ends([TP])
                client.commit(soon)
                client._cluster.epoch_ends({TP: 0}, soon)
                client.close()
    names = {name_of(key) for key, _ in found}
    assert {"ApiVersions", "SaslAuthenticate", "Metadata", "Produce", "EndTxn", "ListOffsets"} <= names
    assert len(names) >= 13
    return list(found.values())


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_answers_raise_only_what_ends_a_connection(
    answers: list[Answer], data: st.DataObject
) -> None:
    answer = data.draw(st.sampled_from(answers))
    (correlation_id,) = struct.unpack_from(">i", answer.data)
    sent = answer.data[:4] + data.draw(mutated(answer.data[4:]))
    begun = time.monotonic()
    with contextlib.suppress(ValueError):
        decoded(answer.request, sent, correlation_id)
    assert time.monotonic() - begun < SECONDS


def test_every_beginning_of_an_answer_is_refused_or_decoded(answers: list[Answer]) -> None:
    for answer in answers:
        (correlation_id,) = struct.unpack_from(">i", answer.data)
        decoded(answer.request, answer.data, correlation_id)
        for size in range(4, len(answer.data)):
            with contextlib.suppress(ValueError):
                decoded(answer.request, answer.data[:size], correlation_id)


def test_a_number_that_never_ends_costs_nothing() -> None:
    """The decoders that kafka-python generates would take minutes."""
    head = bytes(4) + b"\0" + bytes(4)
    with pytest.raises(ValueError, match="a number is too long"):
        decoded(MetadataRequest(topics=[], version=12), head + b"\xff" * (1 << 20), 0)


@pytest.mark.parametrize("count", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x08"])
def test_a_count_that_lies_takes_no_memory(count: bytes) -> None:
    request = MetadataRequest(topics=[], version=12)
    tracemalloc.start()
    with pytest.raises(ValueError, match="MetadataResponse"):
        decoded(request, bytes(4) + b"\0" + bytes(4) + count + b"\0" * 100, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


# -- record batches


class Row(NamedTuple):
    offset: int
    ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[bytes, bytes | None]]


class WrongBatchError(Exception):
    """What the independent decoder says of a batch."""


class WrongCompressionError(WrongBatchError):
    """What an independent library says of compressed records."""


def _varint(data: bytes, at: int, bits: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(data) or shift >= 70:
            raise WrongBatchError("a number is cut off, or too long")
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    number &= (1 << bits) - 1
    return (number >> 1) ^ -(number & 1), at


def _bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _varint(data, at, 64)
    if size < -1 or size > len(data) - at:
        raise WrongBatchError("a length does not fit")
    return (None, at) if size < 0 else (data[at : at + size], at + size)


def independent(batch: bytes) -> list[Row]:
    """Decodes one batch as the documentation of the format says, byte by byte."""
    first, length, _epoch, magic, _crc, attributes, last, first_ms, max_ms, *_, count = struct.unpack_from(
        ">qiibIhiqqqhii", batch
    )
    if magic != 2 or length != len(batch) - 12 or count < 0:
        raise WrongBatchError("its header is wrong")
    codec, body, rows = attributes & 7, batch[61:], []
    if attributes & 0x20:
        return []  # readers do not see control records
    if count and codec:
        body = independently_decompressed(codec, body)
    at, before = 0, -1
    for _ in range(count):
        size, at = _varint(body, at, 64)
        if size < 1 or size > len(body) - at:
            raise WrongBatchError("a record does not fit")
        record, at = body[at : at + size], at + size
        delta_ms, place = _varint(record, 1, 64)
        delta, place = _varint(record, place, 64)
        key, place = _bytes(record, place)
        value, place = _bytes(record, place)
        headers, place = _varint(record, place, 64)
        found = []
        if not 0 <= headers <= len(record) - place:
            raise WrongBatchError("its headers do not fit")
        for _ in range(headers):
            name, place = _bytes(record, place)
            header, place = _bytes(record, place)
            if name is None:
                raise WrongBatchError("a header has no name")
            found.append((name.split(b"\0")[0].decode(errors="replace").encode(), header))
        if place != len(record) or not before < delta <= last:
            raise WrongBatchError("a record is longer than its contents, or out of order")
        before = delta
        # no broker appended anything before 1970, so that such a time is none
        ms = (
            max_ms
            if attributes & 8 and max_ms >= 0
            else (first_ms + delta_ms + (1 << 63)) % (1 << 64) - (1 << 63)
        )
        rows.append(Row(first + delta, ms, key, value, found))
    if at != len(body):
        raise WrongBatchError("bytes follow its records")
    return rows


def independently_decompressed(codec: int, data: bytes) -> bytes:
    try:
        if codec == model.GZIP:
            return gzip.decompress(data)
        if codec == model.LZ4:
            return bytes(lz4.frame.LZ4FrameDecompressor().decompress(data))
        if codec == model.ZSTD:
            return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        if codec == model.SNAPPY:
            if data[:8] != b"\x82SNAPPY\0":
                return bytes(snappy.decompress(data))
            out, at = b"", 16
            while at + 4 <= len(data):
                (size,) = struct.unpack_from(">i", data, at)
                out, at = out + bytes(snappy.decompress(data[at + 4 : at + 4 + size])), at + 4 + size
            return out
    except Exception as error:  # of four libraries
        raise WrongCompressionError(str(error)) from error
    raise WrongCompressionError(f"codec {codec}")


def ours(batch: bytes, *, checks: bool = True) -> list[Row]:
    """Decodes one batch with the product; raises `DamagedBatchError`."""
    found = FetchedBatches.of(KERNEL, TP, 0, memoryview(batch), checks=checks)
    rows: list[Row] = []
    for messages, _ in decode(KERNEL, ALL, [(found, 1 << 62)], committed=False, most_bytes=MOST):
        if not len(messages):
            continue
        block = messages.block
        names = block.header_names.cast(pa.binary()).to_pylist()
        headers = list(zip(names, block.header_values.to_pylist(), strict=True))
        for index in range(messages.first, messages.past):
            begin, past = block.header_starts[index : index + 2]
            rows.append(
                Row(
                    int(block.offsets[index]),
                    int(block.timestamps_ms[index]),
                    block.keys[index].as_py(),
                    block.values[index].as_py(),
                    headers[begin:past],
                )
            )
    if found.damage is not None:
        raise found.damage
    return rows


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """Batches as producers and brokers make them, and as compaction leaves them."""
    log = model.Log(end=draw(st.sampled_from([0, 7, 1 << 40])))
    log.append(
        draw(st.lists(any_records(-(2**40), 130, broken_names=True), min_size=1, max_size=5)),
        codec=draw(st.sampled_from(CODECS)),
        append_ms=draw(st.none() | st.integers(0, 2**41)),
        horizon_ms=draw(st.none() | st.integers(0, 2**41)),
    )
    batch = log.batches[0]
    batch.records = [each for each in batch.records if draw(st.integers(0, 3))]
    return batch.encoded()


@settings(max_examples=150)
@given(batches())
def test_batches_are_decoded_as_an_independent_decoder_does(batch: bytes) -> None:
    assert ours(batch) == independent(batch)


@st.composite
def resealed(draw: st.DrawFn) -> bytes:
    """Batches that were damaged before they got their checksum, such as by a defect of a producer."""
    batch = draw(batches())
    part = draw(st.sampled_from(["header", "records"]))
    if part == "header":
        changed = bytearray(batch)
        for _ in range(draw(st.integers(1, 2))):
            changed[draw(st.integers(21, 60))] = draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]))
        return model.with_checksum(bytes(changed))
    body = draw(mutated(batch[61:]))
    return model.with_checksum(batch[:8] + struct.pack(">i", 49 + len(body)) + batch[12:61] + body)


@settings(max_examples=400)
@given(resealed(), st.booleans())
@example(model.sealed(0, b"\x0e\0\0\0\x01\x01\0\xff", count=1), True)
def test_a_batch_that_lies_is_refused_or_decoded_as_an_independent_decoder_does(
    batch: bytes, checks: bool
) -> None:
    begun = time.monotonic()
    try:
        found = ours(batch, checks=checks)
    except DamagedBatchError:
        return
    finally:
        assert time.monotonic() - begun < SECONDS
    with contextlib.suppress(WrongCompressionError):  # Java ignores what follows some streams, and so do we
        assert found == independent(batch)


def test_sanitizers_find_nothing_in_the_decoder(tmp_path: Path) -> None:
    environment = {"PYTHONMALLOC": "malloc"}
    sanitized.check("kernel", tmp_path, ["kafka/test_decoders.py"], "batch", environment)


# -- decompression


@settings(max_examples=250)
@given(st.sampled_from(CODECS[1:]), st.binary(max_size=40), st.integers(1, 60), st.data())
def test_mutated_compressed_bytes_are_refused_or_decompressed_as_other_libraries_do(
    codec: int, data: bytes, times: int, draws: st.DataObject
) -> None:
    number = model.SNAPPY if codec == model.XERIAL else codec
    packed = draws.draw(mutated(model.compressed(data * times, codec)))
    begun = time.monotonic()
    try:
        found = bytes(decompressed(number, memoryview(packed), MOST))
    except (OSError, ValueError, zlib.error):
        return
    finally:
        assert time.monotonic() - begun < SECONDS
    with contextlib.suppress(WrongCompressionError):
        assert found == independently_decompressed(number, packed)


_XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)


@pytest.mark.parametrize("head", [b"", _XERIAL + struct.pack(">i", 8)], ids=["plain", "xerial"])
def test_a_size_that_no_snappy_block_can_have_takes_no_memory(head: bytes) -> None:
    with pytest.raises(ValueError, match="a block of 8 bytes cannot have 1073741823"):
        decompressed(model.SNAPPY, memoryview(head + b"\xff\xff\xff\xff\x03abc"), MOST)


def test_the_blocks_of_one_snappy_stream_have_one_limit() -> None:
    block = model.compressed(bytes(400 << 10), model.SNAPPY)
    two, three = (_XERIAL + (struct.pack(">i", len(block)) + block) * count for count in (2, 3))
    assert len(decompressed(model.SNAPPY, memoryview(two), 1 << 20)) == 800 << 10
    with pytest.raises(TooLargeError):
        decompressed(model.SNAPPY, memoryview(three), 1 << 20)


# -- logins, and whole clients


def garbling(seed: int, kinds: Collection[str], share: float = 1.0) -> Callable[[str, bytes], bytes]:
    """Returns a `SimulatedKafka.garble` that damages answers to these kinds of requests."""
    chance = random.Random(seed)

    def garble(kind: str, answer: bytes) -> bytes:
        if kind not in kinds or chance.random() >= share:
            return answer
        changed = bytearray(answer)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(changed) + 1)
            end = at + chance.choice([0, 1, 4, 30])
            changed[at:end] = chance.choice([b"", b"\0", b"\xff" * 4, b"\x7f", b"\xff" * 300, bytes(4)])
        return bytes(changed)

    return garble


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([b"r=x,s=QQ==,i=4096", b"r=,s=,i=", b"e=other-error", b"v=", b"", b"r=\xff"])
    | st.binary(max_size=30),
    st.sampled_from(["PLAIN", "SCRAM-SHA-256"]),
    st.none() | st.integers(),
)
@example(b"r=,s=,i=", "SCRAM-SHA-256", 986)
def test_whatever_a_server_answers_to_a_login_ends_as_a_connection_or_a_login(
    text: bytes, mechanism: str, seed: int | None
) -> None:
    """A SCRAM client has to read the server's text; PLAIN ignores it."""
    with SimulatedKafka({}) as cluster:
        cluster.mechanisms, cluster.challenge = ["PLAIN", "SCRAM-SHA-256"], text
        cluster.users = {"alice": "hunter2"}
        if seed is not None:
            cluster.garble = garbling(seed, {"ApiVersions", "SaslHandshake", "SaslAuthenticate"})
        host, _, port = cluster.bootstrap.partition(":")
        login = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanisms": mechanism,
            "sasl.username": "alice",
            "sasl.password": "hunter2",
        }
        begun = time.monotonic()
        with contextlib.suppress(OSError, KafkaEosError):
            broker_ids(host, int(port), login, 1.0)
        assert time.monotonic() - begun < SECONDS


@pytest.mark.parametrize(
    ("offered", "said"),
    [(["SCRAM-SHA-512"], "the broker supports SCRAM-SHA-512, not PLAIN"), ([], "listener has no login")],
)
def test_a_mechanism_that_a_listener_does_not_have_is_named(offered: list[str], said: str) -> None:
    login = {"security.protocol": "sasl_plaintext", "sasl.mechanisms": "PLAIN"}
    with SimulatedKafka({}) as cluster:
        cluster.mechanisms = offered
        host, _, port = cluster.bootstrap.partition(":")
        with pytest.raises(AuthorizationError, match=said):
            broker_ids(host, int(port), {**login, "sasl.username": "a", "sasl.password": "b"}, SECONDS)


_ASKED = frozenset({"Metadata", "FindCoordinator", "ListOffsets", "OffsetForLeaderEpoch", "Fetch"})


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(), st.sampled_from([0.2, 0.6]))
def test_a_consumer_survives_whatever_brokers_answer(seed: int, share: float) -> None:
    """It hands out rows, or names what is wrong; and it reads on when brokers answer rightly again.

    If an answer named a leader of a higher epoch than there is, it waits for that one and says so: a broker
    that is cut off also names a leader whose epoch is lower than the known one, and its log may be shorter.
    """
    log = model.Log()
    for number in range(20):
        log.append([Record(0, None, b"%d" % number)] * 3, producer=1, transactional=True)
        log.finish(1, model.ABORT if number % 4 == 0 else model.COMMIT)
    with SimulatedKafka({"t": [log]}, brokers=2) as cluster:
        cluster.garble = garbling(seed, _ASKED, share)
        conf = {"bootstrap.servers": cluster.bootstrap, "isolation.level": "read_committed"}
        consumer = RangeConsumer({**conf, "socket.timeout.ms": "300"})
        try:
            limit = Deadline.after_seconds(1.0)
            while not limit.expired:
                with contextlib.suppress(KafkaEosError):
                    consumer.assign({TP: 0}, WANTS, {TP: log.end})
                    while not limit.expired:
                        taken = consumer.take(0.05)
                        for tp in (*taken.out_of_range, *taken.gone, *taken.cut):
                            consumer.drop([tp])
            cluster.garble = lambda _, answer: answer
            consumer.assign({TP: 0}, WANTS, {TP: log.end})
            if consumer.cluster.leaders.epoch(TP) > cluster.shift:
                limit = Deadline.after_seconds(30.0)
                # the named leader may also be a broker that the right answers do not have
                said = ("epoch is newer", "is not in the cluster's metadata")
                while not any(each in consumer.last_complaint for each in said) and not limit.expired:
                    assert not len(consumer.take(0.2).messages)
                assert any(each in consumer.last_complaint for each in said)
                consumer.close()
                consumer = RangeConsumer(conf)
                consumer.assign({TP: 0}, WANTS, {TP: log.end})
            offsets: list[int] = []
            wanted = [each.offset for each in log.visible(0, log.end, committed=True)]
            limit = Deadline.after_seconds(30.0)
            while len(offsets) < len(wanted) and not limit.expired:
                messages = consumer.take(0.2).messages
                offsets += [] if not len(messages) else messages.offsets.tolist()
            assert offsets == wanted
        finally:
            consumer.close()

"""The native consumer against brokers that refuse, lose, delay, cut, repeat and damage answers."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from kafka_eos_source.errors import AuthorizationError, DataLossError, InvalidRecordError, RecordsDamagedError
from kafka_eos_source.kafka import damage, fetched_batches, kernel
from kafka_eos_source.kafka import fetch as wire_consumer
from kafka_eos_source.kafka.fetch import RangeConsumer, Taken
from kafka_eos_source.kafka.fetched_batches import Arrived, FetchedBatches
from kafka_eos_source.kafka.reader import POOL, LogEnds
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.operate import records
from kafka_eos_source.read import fetch
from kafka_eos_source.read.fetch import ReadSettings, read_ranges
from tests.kafka.consumer_kit import (
    ALL,
    SECONDS,
    conf,
    consuming,
    expected,
    log_of,
    plain_log,
    read,
    spoiled,
    take_until,
    whole,
)
from tests.support.fetched_log import ABORT, COMMIT, GZIP, LZ4, SNAPPY, ZSTD, Batch, Log, Record
from tests.support.simulated_kafka import Fault, Partition, SimulatedKafka


@pytest.fixture(autouse=True)
def _closed_consumers() -> Iterator[None]:
    yield
    POOL.close()


def brokers_with(logs: Mapping[Partition, Log], *, brokers: int = 1) -> SimulatedKafka:
    """Returns brokers with these logs; partitions that are not named are empty."""
    topics: dict[str, list[Log]] = {}
    for (topic, number), log in logs.items():
        topics.setdefault(topic, []).extend(Log() for _ in range(number + 1 - len(topics[topic])))
        topics[topic][number] = log
    return SimulatedKafka(topics, brokers=brokers)


def by_partition(taken: Taken) -> dict[TopicPartition, list[int]]:
    """Returns the offsets of the messages."""
    found: dict[TopicPartition, list[int]] = {}
    for index in range(len(taken.messages)):
        tp = taken.messages.partition_at(index)
        found.setdefault(tp, []).append(int(taken.messages.offsets[index]))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


_faults = st.dictionaries(
    st.tuples(st.sampled_from(["Fetch", "Fetch", "Fetch", "Metadata", "ListOffsets"]), st.integers(0, 8)),
    st.one_of(
        st.builds(Fault, st.just("error"), st.sampled_from([3, 5, 6, 7, 9, 13, 56, 74, 75, 78])),
        st.builds(Fault, st.sampled_from(["cut", "lost", "move", "twice"])),
        st.builds(Fault, st.sampled_from(["delay", "throttle", "trickle"]), st.sampled_from([1, 30])),
        st.builds(Fault, st.just("truncate"), st.integers(0, 3000)),
    ),
    max_size=6,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_faults, st.sampled_from([500, 5_000, 1 << 20]), st.sampled_from([500, 5_000, 1 << 20]))
def test_faults_neither_lose_nor_double_records(
    faults: dict[tuple[str, int], Fault], most_bytes: int, most_of_partition: int
) -> None:
    logs = {("t", number): log_of(6 + 10 * number, size=100) for number in range(3)}
    with brokers_with(logs, brokers=2) as cluster:
        cluster.fault = lambda kind: faults.get((kind, cluster.received[kind]))
        sizes = {
            "fetch.max.bytes": str(max(1000, most_bytes)),
            "message.max.bytes": "1000",
            "max.partition.fetch.bytes": str(most_of_partition),
        }
        assert read(cluster, **sizes) == expected(cluster)


def test_damaged_records_are_fetched_again() -> None:
    with brokers_with({("t", 0): log_of(40)}) as cluster:
        left = [3]

        def spoil(_: Partition, records: bytes) -> bytes:
            left[0] -= 1
            return (
                records if left[0] < 0 or not records else records[:-1] + bytes([records[-1] ^ 1 << left[0]])
            )

        cluster.spoil = spoil
        assert read(cluster) == expected(cluster)
        assert left[0] < 0


_HOW = ("record", "last offset", "length", "format", "first offset", "compressed", "decoded")


@pytest.mark.parametrize("checks", ["true", "false"])
@pytest.mark.parametrize("how", _HOW)
def test_a_damaged_batch_is_named_after_everything_before_it_was_returned(
    how: str, checks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the read at once, and not when ``kafkaConsumer.pollTimeoutMs`` is over."""
    if checks == "false" and how in ("record", "last offset"):
        pytest.skip("without checksums, nobody notices")
    log = plain_log(8)
    spoiled(log, {5: how})
    seen, said = [], ""
    with brokers_with({("t", 0): log, ("t", 1): plain_log(3)}) as cluster:
        properties = conf(cluster, **{"check.crcs": checks})
        wanted = ReadSettings(properties, poll_timeout_ms=3_600_000)
        monkeypatch.setattr(fetch, "ENOUGH_ROWS", 1)
        try:
            for batch in read_ranges(wanted, whole(cluster)):
                seen += [row["offset"] for row in batch.to_pylist() if row["partition"] == 0]
        except RecordsDamagedError as error:
            said = str(error)
    assert seen == list(range(15))
    assert "offsets 15 to 17 of t-0 cannot be read" in said
    assert """.option('skipDamagedRecords', '{"t":{"0":[15]}}')""" in said


@pytest.mark.parametrize("how", _HOW)
@pytest.mark.parametrize("index", [0, 5, 7], ids=["first", "within", "last"])
def test_only_the_damaged_batch_is_passed_over_and_only_if_it_is_named(how: str, index: int) -> None:
    log = plain_log(8)
    lost = spoiled(log, {index: how})
    tp = TopicPartition("t", 0)
    with brokers_with({("t", 0): log}) as cluster:
        everything = expected(cluster)["t", 0]
        for start, end in ((0, 24), (0, 3 * index + 1), (3 * index + 1, 24), (3 * index + 2, 3 * index + 3)):
            found = read(cluster, [OffsetRange(tp, start, end)], skip={tp: (3 * index + 1,)})
            wanted = [row for row in everything if row[0] not in lost and start <= row[0] < end]
            assert found.get(("t", 0), []) == wanted, (start, end)
        others = tuple(offset for offset in range(-1, 30) if offset // 3 != index)
        with pytest.raises(RecordsDamagedError):
            read(cluster, skip={tp: others})


_CODECS = {GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}


@pytest.mark.parametrize("codec", _CODECS)
def test_a_batch_that_is_too_large_is_refused_at_once_and_passed_over_if_it_is_named(codec: int) -> None:
    """A batch of some KB may hold a GiB. No broker is asked for it again: all copies are alike."""
    log = plain_log(3)
    log.append([Record(0, None, bytes(3 << 20))] * 2, codec=codec)
    log.append([Record(0, b"k", b"last")], codec=codec)
    tp, most = TopicPartition("t", 0), {"max.decompressed.batch.bytes": str(4 << 20)}
    with brokers_with({("t", 0): log, ("t", 1): plain_log(2)}) as cluster:
        with pytest.raises(RecordsDamagedError) as refused:
            read(cluster, poll_timeout_ms=3_600_000, **most)
        assert cluster.received["Fetch"] <= 3
        everything = expected(cluster)
        assert read(cluster) == everything
        everything["t", 0] = [row for row in everything["t", 0] if row[0] not in (9, 10)]
        assert read(cluster, skip={tp: (10,)}, **most) == everything
        with pytest.raises(RecordsDamagedError):
            read(cluster, skip={tp: (8, 11)}, **most)
    packed = len(log.batches[3].encoded()) - 61
    assert refused.value.message == (
        f"offsets 9 to 10 of t-0 cannot be read, because the record batch is too large: its 2 record(s) are "
        f"{packed} bytes as {_CODECS[codec]}, and need more than {4 << 20} bytes of memory."
    )
    assert "set the option 'max.decompressed.batch.bytes' on the source to more" in refused.value.fix
    assert """.option('skipDamagedRecords', '{"t":{"0":[9]}}')""" in refused.value.fix


def test_a_command_is_not_told_to_set_an_option_that_it_does_not_have() -> None:
    log = plain_log(20)
    spoiled(log, {7: "record"})
    tp = TopicPartition("t", 0)
    with brokers_with({("t", 0): log}) as cluster, pytest.raises(RecordsDamagedError) as refused:
        list(
            records.read(
                {"bootstrap.servers": cluster.bootstrap},
                {tp: (0, log.end)},
                {tp: LogEnds(0, log.end, log.end)},
            )
        )
    assert "skipDamagedRecords" not in refused.value.fix
    assert f"before offset {log.batches[8].first} of the partition" in refused.value.fix


@pytest.mark.parametrize("how", ["record", "last offset", "compressed", "decoded"])
@pytest.mark.parametrize("index", [0, 5, 7], ids=["first", "within", "last"])
def test_the_end_of_the_damage_is_found_although_brokers_limit_answers(
    how: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "_MOST_BYTES", 100)
    log = plain_log(8)
    lost = spoiled(log, {index: how})
    with brokers_with({("t", 0): log}) as cluster:
        wanted = [row for row in expected(cluster)["t", 0] if row[0] not in lost]
        assert read(cluster, skip={TopicPartition("t", 0): (3 * index,)}) == {("t", 0): wanted}


def test_transactions_aborted_before_a_damage_hide_nothing_behind_it() -> None:
    """What follows a wrong length is taken from an answer that also names transactions before it."""
    log = Log()
    for number in range(12):
        log.append([Record(0, b"k", b"%d" % number)] * 2, producer=1, transactional=True)
        log.finish(1, ABORT if number in (2, 3) else COMMIT)
    lost = spoiled(log, {8: "length", 9: "record"})
    with brokers_with({("t", 0): log}) as cluster:
        cluster.hides = lambda _, offset: 12 <= offset < 30
        wanted = [row for row in expected(cluster)["t", 0] if row[0] not in lost]
        assert read(cluster, skip={TopicPartition("t", 0): tuple(lost)}) == {("t", 0): wanted}


def test_a_partition_for_which_answers_have_no_room_is_not_taken_for_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer has room for one of three partitions, and the caller takes its time between them."""
    monkeypatch.setattr(wire_consumer, "_STALL_SECONDS", 0.0)
    monkeypatch.setattr(damage.Examination, "run", lambda *_: pytest.fail("nothing is damaged"))
    logs = {("t", number): plain_log(20) for number in range(3)}
    with brokers_with(logs) as cluster:
        assert read(cluster, **{"fetch.max.bytes": "400"}) == expected(cluster)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from([300, 1 << 20]), st.sampled_from([0, 3, 9]))
def test_whatever_is_damaged_everything_else_is_read_once(
    data: st.DataObject, most_bytes: int, hidden: int
) -> None:
    """Also if brokers do not find what is behind a wrong length, up to the next entry of their index."""
    logs = {("t", number): plain_log(9) for number in range(2)}
    skip: dict[TopicPartition, tuple[int, ...]] = {}
    lost: dict[Partition, set[int]] = {}
    behind: dict[Partition, set[int]] = {}
    for tp, log in logs.items():
        # A wrong first offset is found only where the batch before or behind it is intact. Between two wrong
        # lengths, brokers may seem to find nothing if the first one is at the beginning of the log.
        how = data.draw(
            st.dictionaries(st.integers(0, 8), st.sampled_from(_HOW), max_size=3), f"damage of {tp}"
        )
        how = {
            at: each
            for at, each in how.items()
            if (each != "first offset" or not {at - 1, at + 1} & how.keys())
            and (each != "length" or not at or how.get(0) != "length")
        }
        lost[tp] = spoiled(log, how)
        wrong = [3 * index for index, each in how.items() if each == "length"]
        behind[tp] = {offset for first in wrong for offset in range(first, min(first + hidden, log.end))}
        if 0 in behind[tp]:  # nothing can be asked for that is before it
            lost[tp] |= set(range(hidden))
        skip[TopicPartition(*tp)] = tuple(3 * index for index in how)
    with brokers_with(logs, brokers=2) as cluster:
        cluster.hides = lambda tp, offset: offset in behind[tp]
        sizes = {"max.partition.fetch.bytes": str(most_bytes)}
        found = read(cluster, skip=skip, poll_timeout_ms=10_000, **sizes)
        for tp, rows in expected(cluster).items():
            seen = found.get(tp, [])
            assert [row for row in seen if row[0] not in lost[tp]] == [
                row for row in rows if row[0] not in lost[tp]
            ]
            assert seen == [row for row in rows if row in seen], "one of two neighbours may be saved"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_faults, st.sampled_from(_HOW))
def test_faults_during_the_examination_of_a_damaged_batch_lose_nothing_else(
    faults: dict[tuple[str, int], Fault], how: str
) -> None:
    logs = {("t", number): plain_log(8) for number in range(2)}
    lost = spoiled(logs["t", 1], {4: how})
    with brokers_with(logs, brokers=2) as cluster:
        cluster.fault = lambda kind: faults.get((kind, cluster.received[kind]))
        wanted = {
            tp: [row for row in rows if tp == ("t", 0) or row[0] not in lost]
            for tp, rows in expected(cluster).items()
        }
        assert read(cluster, skip={TopicPartition("t", 1): (12,)}) == wanted


# -- the end of a log


def test_the_end_of_a_log_is_told_after_the_records_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their reader takes them for read, and loses them if the log ends before the range."""
    monkeypatch.setattr(fetch, "SHORT_LOG_GRACE_SECONDS", SECONDS)
    logs = {("t", number): log_of(20) for number in range(3)}
    with brokers_with(logs) as cluster:
        ends = {tp: log.end for tp, log in logs.items()}
        with consuming(cluster) as consumer:
            positions = {TopicPartition(*tp): 0 for tp in logs}
            consumer.assign(positions, ALL, dict.fromkeys(positions, 1 << 40))
            told: set[TopicPartition] = set()
            reached: dict[TopicPartition, int] = {}
            while len(told) < len(positions):
                # two fetches are answered before the first record is taken
                before = cluster.received["Fetch"]
                consumer._fetch()
                deadline = time.monotonic() + SECONDS
                while cluster.received["Fetch"] < before + 2 and len(consumer._arrived) < 3:
                    consumer._fetch()
                    consumer.cluster.network.wait(0.05)
                    assert time.monotonic() < deadline
                    if not consumer._events.empty:
                        break
                taken = consumer.take(1)
                for tp, reach in taken.reached.items():
                    reached[tp] = reach
                for tp, end in taken.log_ends.items():
                    assert reached.get(tp) == end == ends[tp.topic, tp.partition]
                    told.add(tp)


def test_what_is_in_remote_storage_is_waited_for_and_not_taken_for_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Kafka 3.8, a broker gives up reading remote storage when the wait of the Fetch ends."""
    monkeypatch.setattr(wire_consumer, "_STALL_SECONDS", 0.3)
    with brokers_with({("t", 0): log_of(40), ("t", 1): log_of(40)}) as cluster:
        cluster.remote_ms = lambda tp, offset: 800 if tp == ("t", 1) and offset < 100 else 0
        assert read(cluster, **{"fetch.max.bytes": "1000"}) == expected(cluster)
        waits_in_vain = cluster.received["Fetch"]
        assert waits_in_vain < 60


def test_a_log_that_ends_too_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is told once: a task that hears it again and again would wait for ever."""
    monkeypatch.setattr(fetch, "SHORT_LOG_GRACE_SECONDS", 0.5)
    with brokers_with({("t", 0): log_of(3)}) as cluster:
        end = cluster.logs["t", 0].end
        ranges = [OffsetRange(TopicPartition("t", 0), 0, end + 5)]
        with within(SECONDS), pytest.raises(DataLossError, match=f"the log now ends at offset {end}"):
            read(cluster, ranges)
        with within(SECONDS):
            assert read(cluster, ranges, fail_on_data_loss=False) == expected(cluster, ranges)


def test_a_log_that_grows_later_is_read_to_the_end() -> None:
    with brokers_with({("t", 0): log_of(3), ("t", 1): log_of(3)}) as cluster:
        log = cluster.logs["t", 0]
        ranges = [OffsetRange(TopicPartition("t", number), 0, log.end + 3) for number in (0, 1)]

        def grow() -> None:
            wait_for(lambda: cluster.received["Fetch"] > 6)
            for each in cluster.logs.values():
                each.append([Record(0, value=b"late")] * 5)

        thread = threading.Thread(target=grow)
        thread.start()
        found = read(cluster, ranges)
        thread.join()
        assert found == expected(cluster, ranges)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails instead of hanging: `take` never returns silence after that time."""
    deadline = time.monotonic() + seconds
    original = RangeConsumer.take

    def take(self: RangeConsumer, wait_seconds: float) -> Taken:
        assert time.monotonic() < deadline, "it hangs"
        return original(self, wait_seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RangeConsumer, "take", take)
        yield


# -- brokers that are slow or away


def test_a_broker_that_hangs_does_not_stop_the_others() -> None:
    logs = {("t", number): log_of(30) for number in range(4)}
    limits = {"socket.timeout.ms": "1000", "socket.connection.setup.timeout.ms": "1000"}
    with brokers_with(logs, brokers=2) as cluster:
        positions = {TopicPartition(*tp): 0 for tp in logs}
        with consuming(cluster, **limits) as consumer:
            consumer.assign(positions, ALL, {TopicPartition(*tp): log.end for tp, log in logs.items()})
            hung = cluster.leader(1)
            cluster.hung = {hung}
            alive = {tp for tp in positions if cluster.leader(tp.partition) != hung}
            reached: dict[TopicPartition, int] = {}
            deadline = time.monotonic() + SECONDS
            while any(reached.get(tp, 0) < logs[tp.topic, tp.partition].end for tp in alive):
                reached |= consumer.take(0.2).reached
                assert time.monotonic() < deadline
            assert reached.keys() == alive
            cluster.hung = set()
            while any(reached.get(tp, 0) < logs[tp.topic, tp.partition].end for tp in positions):
                reached |= consumer.take(0.2).reached
                assert time.monotonic() < deadline + SECONDS


def test_a_large_answer_may_take_longer_than_the_limit_while_bytes_arrive() -> None:
    with brokers_with({("t", 0): log_of(100, size=2000)}) as cluster:
        cluster.fault = lambda kind: Fault("trickle", 2500) if kind == "Fetch" else None
        assert read(cluster, poll_timeout_ms=20_000, **{"socket.timeout.ms": "1000"}) == expected(cluster)
        assert cluster.received["Fetch"] <= 3


def test_the_wait_of_a_fetch_does_not_count_as_silence() -> None:
    with brokers_with({("t", 0): log_of(1)}) as cluster:
        cluster.fault = lambda kind: Fault("delay", 1500) if kind == "Fetch" else None
        more = {"socket.timeout.ms": "1000", "fetch.wait.max.ms": "2000"}
        with consuming(cluster, **more) as consumer:
            consumer.assign({TopicPartition("t", 0): 0}, ALL)
            take_until(consumer, lambda taken: bool(taken.reached))
            assert cluster.received["Fetch"] <= 2
            assert consumer.last_complaint == ""


def test_at_most_two_answers_of_a_leader_wait() -> None:
    with brokers_with({("t", 0): log_of(200, size=1000)}) as cluster:
        small = {
            "fetch.max.bytes": "20000",
            "max.partition.fetch.bytes": "20000",
            "message.max.bytes": "2000",
        }
        with consuming(cluster, **small) as consumer:
            consumer.assign({TopicPartition("t", 0): 0}, ALL)
            take_until(consumer, lambda taken: bool(taken.reached))
            for _ in range(20):
                consumer._fetch()
                consumer.cluster.network.wait(0.02)
            assert len(consumer._arrived) == 2
            assert consumer._arrived.size_bytes <= 2 * 20_000


# -- answers that nobody waits for any more


@pytest.mark.parametrize("change", ["move", "drop", "release", "assign"])
def test_late_answers_to_earlier_requests_are_ignored(change: str) -> None:
    logs = {("t", 0): log_of(5), ("u", 0): log_of(7)}
    t, u = TopicPartition("t", 0), TopicPartition("u", 0)
    with brokers_with(logs) as cluster, consuming(cluster) as consumer:
        cluster.fault = lambda kind: Fault("delay", 1500) if kind == "Fetch" else None
        consumer.assign({t: 0, u: 0}, ALL)
        assert consumer.take(0.05).empty
        asked = cluster.received["Fetch"]
        cluster.fault = lambda kind: None
        if change == "move":
            consumer.move(t, 4)
        elif change == "drop":
            consumer.drop([t])
        else:
            consumer.release()
        if change in ("release", "assign"):
            consumer.assign({u: 2}, ALL)
        first: dict[TopicPartition, int] = {}
        reached: dict[TopicPartition, int] = {}
        wanted = {t, u} if change == "move" else {u}
        deadline = time.monotonic() + SECONDS
        while reached.keys() != wanted:
            assert time.monotonic() < deadline
            taken = consumer.take(0.2)
            reached |= taken.reached
            for tp, offsets in by_partition(taken).items():
                first.setdefault(tp, offsets[0])
        assert asked >= 1
        if change == "move":
            assert first[t] >= 3  # the batch of offset 4 begins there or later
        if change in ("release", "assign"):
            assert first[u] >= 2


@pytest.mark.parametrize("change", ["drop", "move"])
def test_a_partition_is_left_while_a_part_of_it_is_decoded(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_batches, "_PART_BYTES", 1)
    logs = {("t", 0): Log(), ("u", 0): Log()}
    for log in logs.values():
        for number in range(4):
            log.append([Record(0, value=b"%d" % number)] * 2, codec=GZIP)
    with brokers_with(logs) as cluster, consuming(cluster) as consumer:
        positions = {TopicPartition(*tp): 0 for tp in logs}
        consumer.assign(positions, ALL, dict.fromkeys(positions, 8))
        deadline = time.monotonic() + SECONDS
        while len(consumer._arrived) < 2:
            assert time.monotonic() < deadline
            consumer._fetch()
            consumer.cluster.network.wait(0.05)
        taken = consumer.take(1)
        (left,) = taken.reached
        assert list(taken.messages.offsets) == [0, 1]
        if change == "drop":
            consumer.drop([left])
        else:
            consumer.move(left, 4)
        wanted = {tp: list(range(8)) for tp in positions if tp != left}
        if change == "move":
            wanted[left] = list(range(4, 8))
        found: dict[TopicPartition, list[int]] = {}
        while found != wanted:
            assert time.monotonic() < deadline, found
            taken = consumer.take(0.2)
            for tp, offsets in by_partition(taken).items():
                found.setdefault(tp, []).extend(offsets)


# -- partitions that are gone, refused or in an old format


def test_a_missing_permission_is_an_error() -> None:
    with brokers_with({("t", 0): log_of(1)}) as cluster:
        cluster.refuse = lambda tp: 29
        with pytest.raises(AuthorizationError):
            read(cluster)


def test_a_deleted_topic_is_reported() -> None:
    with brokers_with({("t", 0): log_of(3), ("u", 0): log_of(3)}) as cluster:
        ranges = [OffsetRange(TopicPartition("t", 0), 0, 500), OffsetRange(TopicPartition("u", 0), 0, 5)]

        def delete() -> None:
            wait_for(lambda: cluster.received["Fetch"] > 4)
            cluster.remove_topic("t")

        thread = threading.Thread(target=delete)
        thread.start()
        with within(SECONDS), pytest.raises(DataLossError, match="was deleted"):
            read(cluster, ranges)
        thread.join()


def test_a_topic_that_was_created_again_with_fewer_records_is_reported() -> None:
    with brokers_with({("t", 0): log_of(30)}) as cluster:
        ranges = [OffsetRange(TopicPartition("t", 0), 20, 40)]
        cluster.remove_topic("t")
        cluster.add_topic("t", [log_of(1)])
        with within(SECONDS), pytest.raises(DataLossError, match="the log now ends at offset"):
            read(cluster, ranges)


def test_retention_is_reported_after_the_records_that_arrived() -> None:
    with brokers_with({("t", 0): log_of(30)}) as cluster:
        cluster.logs["t", 0].start = 10
        with pytest.raises(DataLossError, match="the log now starts at offset 10"):
            read(cluster)
        ranges = [OffsetRange(TopicPartition("t", 0), 10, cluster.logs["t", 0].end)]
        assert read(cluster, fail_on_data_loss=False) == expected(cluster, ranges)


@dataclass
class OldBatch(Batch):
    """A record in the format of Kafka 0.10."""

    def encoded(self) -> bytes:
        builder = LegacyRecordBatchBuilder(magic=1, compression_type=0, batch_size=1 << 20)
        (record,) = self.records
        builder.append(0, timestamp=record.ms, key=record.key, value=record.value)
        return struct.pack(">q", self.first) + bytes(builder.build())[8:]


def test_records_in_an_old_format_are_refused() -> None:
    """The error names the first of them. A range behind them is read."""
    log = log_of(5)
    old = log.end
    for number in range(3):
        log.batches.append(OldBatch(log.end, log.end, [Record(log.end, b"k", b"old %d" % number)]))
        log.end += 1
    log.append([Record(0, value=b"new")] * 3)
    with brokers_with({("t", 0): log}) as cluster:
        with pytest.raises(
            InvalidRecordError, match=rf"offset {old} of t-0 has the record format 1"
        ) as error:
            read(cluster)
        assert "startingOffsets" in str(error.value)
        behind = [OffsetRange(TopicPartition("t", 0), old + 3, log.end)]
        assert read(cluster, behind) == expected(cluster, behind)


def test_many_leaders_share_the_memory() -> None:
    logs = {("t", number): log_of(2) for number in range(6)}
    with brokers_with(logs, brokers=6) as cluster:
        assert read(cluster) == expected(cluster)
        assert 1 << 20 < cluster.most_asked <= (64 << 20) // 12
    with brokers_with(logs) as cluster:
        assert read(cluster) == expected(cluster)
        assert cluster.most_asked == 16 << 20


def test_many_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one answer are decoded together: one by one, 1,000 partitions took three times as long."""
    takes = []
    take = RangeConsumer.take
    monkeypatch.setattr(RangeConsumer, "take", lambda *args: takes.append(take(*args)) or takes[-1])
    logs = {("t", number): log_of(2) for number in range(300)}
    with brokers_with(logs, brokers=2) as cluster:
        assert read(cluster) == expected(cluster)
    assert sum(len(taken.messages) > 0 for taken in takes) < 30


def test_another_broker_is_asked_for_leaders_but_not_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """An election takes seconds, and each change of the broker costs a connection and a login."""
    with brokers_with({("t", 0): log_of(2)}) as cluster, consuming(cluster) as consumer:
        consumer.assign({TopicPartition("t", 0): 0}, ALL)
        consumer._look_for_leaders()
        changes: list[int] = []
        monkeypatch.setattr(consumer.cluster, "ask_another", lambda: changes.append(consumer._lookup.tries))
        for _ in range(19):
            consumer._look_for_leaders()
        assert changes == [2, 4, 8, 16]


def test_two_answers_of_a_partition_are_decoded_one_by_one() -> None:
    """They may overlap. Their reader leaves out what it has only if it gets one after the other."""
    library = kernel.kernel()
    log, tp = log_of(6, abort_every=100), TopicPartition("t", 0)
    data, _ = log.fetched(0, 1 << 20, committed=True)
    arrived = Arrived(library, committed=True, most_bytes=1 << 30)
    for number in range(2):
        arrived.add(1, number, FetchedBatches.of(library, tp, 0, memoryview(data)))
    offsets = []
    while arrived:
        messages, _ = arrived.next_part(sum(set(kernel.WANTS.values())), lambda _tp: 1 << 40)
        offsets.append(messages.offsets.tolist())
        assert offsets[-1] == sorted(set(offsets[-1]))
    assert len(offsets) == 2
    assert offsets[0] == offsets[1] != []

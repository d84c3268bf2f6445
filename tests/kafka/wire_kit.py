"""What tests of the native clients share: transactions, faults, and records of any kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pyarrow as pa
from hypothesis import strategies as st

import tests.support.fetched_log as model
from kafka_eos_source.errors import KafkaEosError, OutcomeUnknownError
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.fetched_log import Record
from tests.support.simulated_kafka import (
    CONCURRENT,
    NOT_COORDINATOR,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
    Fault,
    SimulatedKafka,
)

TOPIC, PARTITIONS, ROWS = "t", 3, 60
SOURCE = TopicPartition("source", 0)
#: More than any step takes that does not hang.
SECONDS = 20.0
TRANSIENT = [NOT_LEADER, 7, NOT_COORDINATOR, NOT_ENOUGH_REPLICAS, 14, 15, 20, CONCURRENT]
#: What a broker may do to one request.
FAULT = st.one_of(
    st.builds(Fault, st.sampled_from(["error", "unsure"]), st.sampled_from(TRANSIENT)),
    st.builds(Fault, st.sampled_from(["cut", "lost", "silent", "move"])),
    st.builds(Fault, st.sampled_from(["late", "delay"]), st.sampled_from([5, 60, 300])),
    st.builds(Fault, st.just("truncate"), st.integers(0, 80)),
    st.builds(Fault, st.just("throttle"), st.sampled_from([1, 40])),
)

CODECS = (model.NONE, model.GZIP, model.SNAPPY, model.XERIAL, model.LZ4, model.ZSTD)


#: Pieces of header names. Some are not UTF-8.
_PIECES = (
    *(b"a", b"\0", b"\x80", b"\xc2", b"\xe0\xa0", b"\xed\xa0\x80", b"\xf0\x90\x80", b"\xf5"),
    "é€😀".encode(),
)


def any_records(
    lowest_ms: int = 0, most_bytes: int = 20_000, *, broken_names: bool = False
) -> st.SearchStrategy[Record]:
    """Returns records of any kind, whose offsets the log chooses.

    Args:
        lowest_ms: lowest time.
        most_bytes: size of the largest keys and values.
        broken_names: whether names of headers may be bytes that are not UTF-8.
    """
    contents = st.none() | st.binary(max_size=5) | st.sampled_from([b"x" * 130, b"y" * most_bytes])
    names = st.sampled_from([b"", b"a", b"a", "é".encode(), b"with\0nul", b"long" * 40])
    if broken_names:
        names |= st.lists(st.sampled_from(_PIECES)).map(b"".join)
    headers = st.lists(st.tuples(names, st.none() | st.binary(max_size=3)), max_size=3)
    return st.builds(Record, st.just(0), contents, contents, headers, st.integers(lowest_ms, 2**41))


def producer(cluster: SimulatedKafka, **properties: str) -> TransactionalProducer:
    """Returns a client whose batches are tiny, so that each partition has many of them."""
    config = {
        "bootstrap.servers": cluster.bootstrap,
        "socket.timeout.ms": "200",
        "socket.connection.setup.timeout.ms": "300",
        "batch.size": "300",
        **properties,
    }
    return TransactionalProducer(producer_config(config, "app"))


def soon(seconds: float = SECONDS) -> Deadline:
    return Deadline.after_seconds(seconds)


def rows(transaction: int, count: int = ROWS) -> pa.RecordBatch:
    values = [b"%d-%04d" % (transaction, number) for number in range(count)]
    partitions = [number % PARTITIONS for number in range(count)]
    return pa.record_batch(
        {"value": pa.array(values, pa.binary()), "partition": pa.array(partitions, pa.int32())}
    )


def write(client: TransactionalProducer, transaction: int, count: int = ROWS) -> None:
    """Runs one transaction, whose token is its number."""
    client.begin()
    client.send(rows(transaction, count), TOPIC, soon())
    client.flush(soon())
    client.send_offsets([GroupOffset(SOURCE, transaction, "token")], "group", soon())
    client.commit(soon())


def expected(transactions: int, count: int = ROWS) -> dict[int, list[bytes]]:
    return {
        partition: [
            b"%d-%04d" % (transaction, number)
            for transaction in range(transactions)
            for number in range(partition, count, PARTITIONS)
        ]
        for partition in range(PARTITIONS)
    }


def write_until_committed(cluster: SimulatedKafka, transactions: int, **properties: str) -> None:
    """Writes transactions as `commit.machine` does: after an error, a new producer and the token decide."""
    client: TransactionalProducer | None = None
    limit = soon(60)
    number = 0
    while number < transactions:
        assert not limit.expired, f"transaction {number} was never committed"
        try:
            if client is None:
                client = producer(cluster, **properties)
                client.init(soon())
                # a token that is there decides: the transaction whose outcome was unknown was committed
                number = cluster.offsets.get(SOURCE, (-1, ""))[0] + 1
                continue
            assert client.is_clean()
            write(client, number)
            number += 1
        except KafkaEosError as error:
            if client is not None:
                if not isinstance(error, OutcomeUnknownError):
                    client.abort(soon())
                client.close()
            client = None
    if client is not None:
        client.close()


def planned(*faults: tuple[str, int, Fault]) -> Callable[[str], Fault | None]:
    """Returns a `SimulatedKafka.fault` that misbehaves at the n-th request of a kind."""
    seen: Counter[str] = Counter()
    plan = {(kind, number): fault for kind, number, fault in faults}

    def fault(kind: str) -> Fault | None:
        seen[kind] += 1
        return plan.get((kind, seen[kind]))

    return fault

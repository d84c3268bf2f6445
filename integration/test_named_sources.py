"""A query whose sources have names may change them; Spark then writes version 2 of its offset log."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from integration.support.kafka import Admin, end_offsets, final_end_offsets, produce, read_back, values
from integration.support.query import Query
from kafka_eos_source.protocol import offset_log

#: Spark's setting for source evolution; every source of a query must then have a name.
EVOLUTION = "spark.sql.streaming.queryEvolution.enableSourceEvolution"


@pytest.fixture
def query(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Query:
    session = spark.newSession()
    session.conf.set(EVOLUTION, "true")
    return Query(session, broker, topic(2), topic(2), checkpoint)


def union(query: Query, **topics: str) -> DataFrame:
    """Returns the union of named sources, in this order."""
    frames = [query.frame(topic, name=name) for name, topic in topics.items()]
    return reduce(lambda left, right: left.unionByName(right), frames)


def rows(first: int, end: int) -> list[str]:
    return [f"{row:05d}" for row in range(first, end)]


def named(query: Query, batch_id: int) -> set[str]:
    """Returns the names of the sources in Spark's offset log, which must have version 2."""
    assert Path(query.checkpoint, "offsets", str(batch_id)).read_text().startswith("v2\n")
    logged = offset_log.read(query.checkpoint, batch_id)
    assert logged is not None
    return set(logged.sources)


@pytest.mark.fault("T02", "commits/N is deleted, and Spark's offset log names the sources", "restart")
def test_a_replay_of_named_sources_is_skipped_in_any_order_of_the_sources(
    query: Query, broker: str, admin: Admin, topic: Callable[..., str]
) -> None:
    orders, returns = query.source, topic(1)
    produce(broker, orders, rows(0, 60))
    produce(broker, returns, rows(60, 100))
    query.run(union(query, orders=orders, returns=returns))
    assert named(query, 0) == {"orders", "returns"}
    ends = final_end_offsets(broker, query.sink)

    query.forget_commit(0)
    query.run(union(query, returns=returns, orders=orders))
    assert end_offsets(broker, query.sink) == ends, "the replay wrote something"
    assert values(read_back(broker, query.sink)) == rows(0, 100)
    _is_committed_to_the_end(query, admin, orders, returns)


@pytest.mark.fault("T02", "commits/N is deleted, and Spark's offset log names the sources", "restart")
def test_a_replay_of_the_first_batch_with_an_added_source_is_skipped(
    query: Query, broker: str, admin: Admin, topic: Callable[..., str]
) -> None:
    """The added source is missing in the previous batch's offset log entry."""
    orders, returns, claims = query.source, topic(1), topic(1)
    produce(broker, orders, rows(0, 30))
    produce(broker, returns, rows(30, 50))
    query.run(union(query, orders=orders, returns=returns))

    produce(broker, orders, rows(50, 70))
    produce(broker, claims, rows(70, 100))
    changed = {"claims": claims, "orders": orders}
    query.run(union(query, **changed))
    assert named(query, 1) == set(changed)
    ends = final_end_offsets(broker, query.sink)

    query.forget_commit(1)
    produce(broker, claims, rows(100, 110))
    query.run(union(query, **changed))
    assert values(read_back(broker, query.sink)) == rows(0, 110)
    written = sum(end_offsets(broker, query.sink).values()) - sum(ends.values())
    assert 10 < written <= 12, "only the new records and one control record for each partition"
    _is_committed_to_the_end(query, admin, orders, returns, claims)


def _is_committed_to_the_end(query: Query, admin: Admin, *topics: str) -> None:
    group = admin.group(query.group)
    for topic in topics:
        ends = end_offsets(query.broker, topic)
        assert {number: group[(topic, number)][0] for number in ends} == ends

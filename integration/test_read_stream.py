"""``spark.readStream`` on a real broker: start positions, limits, restarts, replays and changing topics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from integration.support import broker as brokers
from integration.support.driver import await_condition
from integration.support.kafka import Admin
from integration.support.reading import Reader, Topics, texts, values
from kafka_eos_source.embedded import EmbeddedKafka

SINCE_4_2 = pytest.mark.skipif(pyspark.__version__ < "4.2", reason="Spark tells start and limit since 4.2")
BASE_MS = 1_700_000_000_000


@pytest.fixture
def topics(broker: str, admin: Admin) -> Topics:
    return Topics(broker, admin)


@pytest.fixture
def reader(spark: SparkSession, broker: str, tmp_path: Path) -> Reader:
    return Reader(spark, broker, tmp_path)


def offset_log(checkpoint: Path, batch_id: int) -> dict[str, object]:
    """Returns the source's line of an entry in Spark's offset log."""
    found = json.loads((checkpoint / "offsets" / str(batch_id)).read_text().splitlines()[2])
    assert isinstance(found, dict)
    return found


def delete_commit(checkpoint: Path, batch_id: int) -> None:
    """Deletes a commit log entry, as if the driver had died right before Spark wrote it."""
    for path in (checkpoint / "commits").glob(f"*{batch_id}*"):
        path.unlink()


# -- where a query starts


@pytest.mark.core
def test_a_query_starts_at_latest_by_default_and_continues_after_a_restart(
    reader: Reader, topics: Topics
) -> None:
    topic = topics.new(2)
    topics.send(topic, ["old"])
    assert reader.run(subscribe=topic) == []
    topics.send(topic, range(3))
    assert values(reader.run(subscribe=topic)) == texts(range(3))
    topics.send(topic, range(3, 6), partition=1)
    assert values(reader.run(subscribe=topic, startingOffsets="earliest")) == texts(range(3, 6))
    assert reader.run(subscribe=topic) == []


@pytest.mark.core
def test_a_running_query_reads_from_earliest(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    topics.send(topic, range(3))
    with reader.running(subscribe=topic, startingOffsets="earliest") as (query, batches):
        query.processAllAvailable()
        topics.send(topic, range(3, 6), partition=1)
        query.processAllAvailable()
        topics.committed(topic, range(6, 8), partition=1)
        query.processAllAvailable()
    assert [values(each) for each in batches] == [texts(range(3)), texts(range(3, 6)), texts(range(6, 8))]


def test_a_query_starts_at_offsets_or_timestamps(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    for number in range(5):
        topics.send(topic, [number], timestamp_ms=BASE_MS + number)
        topics.send(topic, [10 + number], partition=1, timestamp_ms=BASE_MS + number)
    by_offset = json.dumps({topic: {"0": 3, "1": -1}})
    assert values(reader.run("a", subscribe=topic, startingOffsets=by_offset)) == ["3", "4"]
    by_topic = json.dumps({topic: "earliest"})
    assert len(values(reader.run("b", subscribe=topic, startingOffsets=by_topic))) == 10
    times = {
        "startingTimestamp": str(BASE_MS + 4),
        "startingOffsetsByTimestamp": json.dumps({topic: {"0": BASE_MS + 2, "1": BASE_MS + 3}}),
        "startingOffsets": "earliest",
    }
    assert values(reader.run("c", subscribe=topic, **times)) == ["4", "14"]
    del times["startingTimestamp"]
    assert values(reader.run("d", subscribe=topic, **times)) == ["2", "3", "4", "13", "14"]


def test_a_query_starts_at_the_offsets_of_a_group(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    topics.send(topic, range(5))
    topics.send(topic, range(10, 12), partition=1)
    topics.admin.reset_offsets(f"g-{topic}", topic, {0: 4})
    group = {"subscribe": topic, "startingOffsets": "group", "kafka.group.id": f"g-{topic}"}
    assert values(reader.run(**group)) == ["4", "10", "11"]


def test_a_checkpoint_of_sparks_own_source_is_continued(
    reader: Reader, topics: Topics, tmp_path: Path
) -> None:
    """A checkpoint of ``format("kafka")``, whose source lines have no key ``@``, is continued."""
    topic = topics.new(2)
    topics.send(topic, range(5))
    reader.run(subscribe=topic, startingOffsets="earliest")
    log = tmp_path / "c" / "offsets" / "0"
    lines = log.read_text().splitlines()
    lines[2] = json.dumps({topic: {"1": 0, "0": 5}}, separators=(",", ":"))
    log.write_text("\n".join(lines))
    (log.parent / ".0.crc").unlink(missing_ok=True)
    topics.send(topic, range(5, 8))
    topics.send(topic, range(8, 9), partition=1)
    assert values(reader.run(subscribe=topic)) == texts(range(5, 9))
    assert "@" in offset_log(tmp_path / "c", 1)


# -- replays


@pytest.mark.core
def test_a_replay_of_batch_0_reads_the_same_rows(reader: Reader, topics: Topics, tmp_path: Path) -> None:
    """The query began at *latest*, which has moved since."""
    topic = topics.new()
    topics.send(topic, ["old"])
    with reader.running(subscribe=topic) as (query, batches):
        await_condition(lambda: (tmp_path / "c" / "commits" / "0").exists(), 60, "batch 0")
        topics.send(topic, range(4))
        query.processAllAvailable()
    assert values(batches) == texts(range(4))
    first, log = tmp_path / "c", tmp_path / "c" / "offsets"
    planned = offset_log(first, max(int(each.name) for each in log.iterdir() if each.name.isdigit()))

    merged = tmp_path / "one-batch"  # the checkpoint as it would be if the first batch had read all records
    shutil.copytree(first, merged)
    for each in [*(merged / "offsets").iterdir(), *(merged / "commits").iterdir()]:
        each.unlink()
    lines = (log / "0").read_text().splitlines()
    zero = json.loads(lines[2])
    planned["@"] = zero["@"]
    assert zero["@"]["start"] == {topic: {"0": 1}}
    (merged / "offsets" / "0").write_text("\n".join([*lines[:2], json.dumps(planned)]))
    topics.send(topic, range(4, 6))
    replayed = reader.run_all("one-batch", subscribe=topic)
    assert [values(each) for each in replayed] == [texts(range(4)), texts(range(4, 6))]


@pytest.mark.core
def test_a_replay_of_a_later_batch_reads_the_same_rows(
    reader: Reader, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.new()
    for start in (0, 3):
        topics.send(topic, range(start, start + 3))
        reader.run(subscribe=topic, startingOffsets="earliest")
    delete_commit(tmp_path / "c", 1)
    topics.send(topic, range(6, 8))
    replayed = reader.run_all(subscribe=topic, startingOffsets="earliest")
    assert [values(each) for each in replayed] == [texts(range(3, 6)), texts(range(6, 8))]


# -- topics that change


def test_partitions_that_were_added_while_running_or_stopped_are_read(reader: Reader, topics: Topics) -> None:
    topic = topics.new(1)
    with reader.running(subscribe=topic) as (query, batches):
        query.processAllAvailable()
        topics.admin.grow(topic, 2)
        topics.send(topic, range(3), partition=1)
        await_condition(lambda: values(batches) == texts(range(3)), 60, "the new partition")
        query.processAllAvailable()  # Spark's commit log is written, so the next run replays nothing
    topics.admin.grow(topic, 3)
    topics.send(topic, range(3, 5), partition=2)
    assert values(reader.run(subscribe=topic)) == texts(range(3, 5))


def test_assign_does_not_read_added_partitions(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    topics.send(topic, ["no"])
    topics.send(topic, ["yes"], partition=1)
    one = {"assign": json.dumps({topic: [1]}), "startingOffsets": "earliest"}
    assert values(reader.run(**one)) == ["yes"]
    topics.admin.grow(topic, 3)
    topics.send(topic, ["no"], partition=2)
    assert reader.run(**one) == []


def test_a_pattern_finds_new_topics(reader: Reader, topics: Topics) -> None:
    first = topics.new(prefix="p")
    stem = first[2:]
    options = {"subscribePattern": f"{stem}", "startingOffsets": "earliest"}
    topics.send(first, ["a"])
    assert values(reader.run(**options)) == ["a"]
    topics.new(name=f"other-{stem}-more")
    topics.send(f"other-{stem}-more", ["b"])
    assert values(reader.run(**options)) == ["b"]


def test_internal_topics_match_no_pattern(reader: Reader, topics: Topics, broker: str) -> None:
    topics.admin.reset_offsets("some-group", topics.new(), {0: 0})  # creates the topic __consumer_offsets
    assert reader.batch(subscribePattern="consumer_offsets|transaction_state").collect() == []


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_deleted_topic_fails_the_query_or_is_skipped(reader: Reader, topics: Topics, fail: str) -> None:
    kept = topics.new(prefix="p")
    gone = topics.new(name=f"x-{kept}")
    options = {"subscribePattern": kept, "startingOffsets": "earliest", "failOnDataLoss": fail}
    topics.send(kept, ["a"])
    topics.send(gone, ["b"])
    assert values(reader.run(**options)) == ["a", "b"]
    topics.admin.delete(gone)
    topics.send(kept, ["c"])
    if fail == "true":
        with pytest.raises(Exception, match=f"DATA_LOSS.*PARTITIONS_GONE: {gone}-0"):
            reader.run(**options)
        return
    assert values(reader.run(**options)) == ["c"]
    topics.new(name=gone)
    topics.send(gone, ["d"])
    assert values(reader.run(**options)) == ["d"]


@pytest.mark.parametrize("records", [2, 9])
def test_a_recreated_topic_is_detected_by_its_id(reader: Reader, topics: Topics, records: int) -> None:
    """It is detected however many records it holds."""
    topic = topics.new()
    topics.send(topic, range(5))
    assert len(values(reader.run(subscribe=topic, startingOffsets="earliest"))) == 5
    topics.admin.delete(topic)
    await_condition(lambda: _create(topics, topic), 60, "the topic anew")
    topics.send(topic, range(100, 100 + records))
    with pytest.raises(Exception, match=f"DATA_LOSS.*TOPIC_RECREATED: topic '{topic}'"):
        reader.run(subscribe=topic)
    found = reader.run(subscribe=topic, failOnDataLoss="false")
    assert values(found) == texts(range(100, 100 + records))


def _create(topics: Topics, topic: str) -> bool:
    from confluent_kafka import KafkaException

    try:
        topics.new(name=topic)
    except KafkaException:  # the old topic is still being deleted
        return False
    return True


@pytest.mark.parametrize("fail", ["true", "false"])
def test_expired_records_fail_the_query_or_are_skipped(reader: Reader, topics: Topics, fail: str) -> None:
    topic = topics.new()
    options = {"subscribe": topic, "startingOffsets": "earliest", "failOnDataLoss": fail}
    topics.send(topic, range(3))
    assert len(values(reader.run(**options))) == 3
    topics.send(topic, range(3, 10))
    topics.admin.delete_records(topic, 0, 6)
    if fail == "true":
        with pytest.raises(Exception, match=r"DATA_LOSS.*offsets 3 to 5 of .* cannot be read"):
            reader.run(**options)
    else:
        assert values(reader.run(**options)) == texts(range(6, 10))


def test_a_start_after_the_end_of_the_log_is_an_error(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(10))
    options = {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 50}})}
    with pytest.raises(
        Exception, match=r"DATA_LOSS.*the query is at offset 50, but the log ends at offset 10"
    ):
        reader.run(**options)
    assert reader.run("again", **options, failOnDataLoss="false") == []
    topics.send(topic, ["next"])
    assert values(reader.run("again", **options, failOnDataLoss="false")) == ["next"]


# -- transactions


@pytest.mark.core
def test_a_query_reads_up_to_an_open_transaction(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    topics.committed(topic, range(3))
    with topics.open_transaction(topic, ["aborted"]):
        topics.send(topic, ["behind"])
        assert values(reader.run(**options)) == texts(range(3))
        assert reader.run(**options) == []
        uncommitted = reader.run("u", **options, **{"kafka.isolation.level": "read_uncommitted"})
        assert values(uncommitted) == [*texts(range(3)), "aborted", "behind"]
    assert values(reader.run(**options)) == ["behind"]


def test_batches_may_contain_only_control_records_and_aborted_records(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    with reader.running(subscribe=topic) as (query, batches):
        query.processAllAvailable()
        topics.aborted(topic, range(3))
        query.processAllAvailable()
        topics.committed(topic, ["a"])
        query.processAllAvailable()
    assert values(batches) == ["a"]


# -- limits and triggers


@SINCE_4_2
def test_available_now_reads_in_limited_batches(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(15))
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "5"}
    assert [len(each) for each in reader.run(**options)] == [5, 5, 5]


@SINCE_4_2
def test_available_now_ignores_the_minimum(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(33))
    limits = {"minOffsetsPerTrigger": "15", "maxOffsetsPerTrigger": "20"}
    found = reader.run(subscribe=topic, startingOffsets="earliest", **limits)
    assert [len(each) for each in found] == [20, 13]


@SINCE_4_2
def test_trigger_once_ignores_limits(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(33))
    found = reader.run(once=True, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="5")
    assert [len(each) for each in found] == [33]


@SINCE_4_2
def test_small_partitions_share_a_limit(reader: Reader, topics: Topics) -> None:
    topic = topics.new(6)
    for partition in range(6):
        topics.send(topic, [0, 1], partition=partition)
    found = reader.run(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="5")
    assert [len(each) for each in found] == [5, 5, 2]


@SINCE_4_2
def test_a_batch_waits_for_the_minimum(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(3))
    limits = {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "10m"}
    with reader.running(subscribe=topic, startingOffsets="earliest", **limits) as (query, batches):
        await_condition(lambda: len(batches) == 1, 60, "the first batch, which never waits")
        topics.send(topic, range(3, 9))
        query.processAllAvailable()
        assert len(batches) == 1
        topics.send(topic, range(9, 15))
        await_condition(lambda: len(batches) == 2, 60, "the second batch")
    assert [len(each) for each in batches] == [3, 12]


@pytest.mark.skipif(pyspark.__version__ >= "4.2", reason="limits work since 4.2")
@pytest.mark.core
def test_the_error_of_a_limit_names_the_pyspark_it_needs(reader: Reader) -> None:
    with pytest.raises(Exception, match=r"'maxOffsetsPerTrigger' requires PySpark 4\.2"):
        reader.stream(subscribe="t", maxOffsetsPerTrigger="5")


@SINCE_4_2
def test_progress_reports_the_position_and_the_lag(reader: Reader, topics: Topics, tmp_path: Path) -> None:
    topic = topics.new()
    topics.send(topic, range(6))
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "4"}
    query = (
        reader.stream(**options)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "p"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    seen = [json.loads(each.json) for each in query.recentProgress]
    ends = [each["sources"][0]["endOffset"][topic]["0"] for each in seen if each["numInputRows"]]
    latest = [each["sources"][0]["latestOffset"][topic]["0"] for each in seen]
    assert ends == [4, 6]
    assert set(latest) == {6}
    assert sum(each["numInputRows"] for each in seen) == 6


# -- errors


def test_a_query_with_retries_survives_a_broker_outage(spark: SparkSession, tmp_path: Path) -> None:
    """A query without retries fails and names the broker."""
    with EmbeddedKafka(java_options=brokers.JAVA_OPTIONS) as kafka:
        topics = Topics(kafka.bootstrap_servers, Admin(kafka.bootstrap_servers))
        topic = topics.new()
        reader = Reader(spark, kafka.bootstrap_servers, tmp_path)
        impatient = reader.running("impatient", subscribe=topic, **{"fetchOffset.numRetries": "0"})
        with reader.running("patient", subscribe=topic) as (patient, found), impatient as (query, _):
            patient.processAllAvailable()
            query.processAllAvailable()
            kafka.kill_node(1)
            with pytest.raises(
                Exception, match=rf"UNAVAILABLE.*no answer from Kafka at .*{kafka.bootstrap_servers}"
            ):
                query.awaitTermination(60)
            kafka.start_node(1)
            topics.send(topic, range(3))
            await_condition(lambda: values(found) == texts(range(3)), 90, "the records sent afterwards")
            assert patient.isActive


@pytest.mark.core
def test_a_missing_topic_is_an_error_at_once(reader: Reader) -> None:
    with pytest.raises(Exception, match=r"UNAVAILABLE.*no-such-topic.*create the topic"):
        reader.run(subscribe="no-such-topic", **{"fetchOffset.numRetries": "0"})


def test_ending_options_are_refused_for_streams(reader: Reader, topic: Callable[..., str]) -> None:
    with pytest.raises(Exception, match=r"INVALID_OPTION.*endingOffsets"):
        reader.run(subscribe=topic(), endingOffsets="latest")

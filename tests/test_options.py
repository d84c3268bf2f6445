"""Options: Spark's names and meanings; whatever is wrong is said by name, value, expectation and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.option_table import OPTIONS, documentation
from kafka_eos_source.options import Bound, Subscription, parse_read, parse_write

SERVERS = {"kafka.bootstrap.servers": "b:9092"}
READ = {**SERVERS, "subscribe": "t"}


def read(streaming: bool = True, pyspark_version: str = "4.3.0", **options: str) -> Any:
    named = {name.replace("__", "."): value for name, value in options.items()}
    return parse_read({**READ, **named}, streaming=streaming, pyspark_version=pyspark_version)


def test_defaults_of_a_stream() -> None:
    options = read()
    assert options.subscription == Subscription("subscribe", topics=("t",))
    assert options.starting == Bound("latest")
    assert options.ending == Bound("latest")
    assert options.fail_on_data_loss
    assert options.isolation_level == "read_committed"
    assert options.max_trigger_delay_ms == 900_000
    assert options.fetch_num_retries == 3
    assert options.kafka == {"bootstrap.servers": "b:9092"}


def test_a_batch_read_starts_at_the_earliest() -> None:
    assert read(streaming=False).starting == Bound("earliest")


@pytest.mark.parametrize("case", [str.lower, str.upper, str])
def test_names_are_matched_in_any_letter_case(case: Any) -> None:
    options = parse_read(
        {
            case("kafka.bootstrap.servers"): "b",
            case("subscribePattern"): "t.*",
            case("includeHeaders"): "TRUE",
        },
        streaming=True,
    )
    assert options.include_headers
    assert options.subscription == Subscription("subscribePattern", pattern="t.*")


def test_subscriptions() -> None:
    assert read(subscribe=" a , b,,a ").subscription.topics == ("a", "b")
    options = parse_read({**SERVERS, "assign": '{"a":[1,0],"b":[4]}'}, streaming=True)
    assert options.subscription.partitions == (
        TopicPartition("a", 0),
        TopicPartition("a", 1),
        TopicPartition("b", 4),
    )


def test_starting_offsets() -> None:
    bound = read(startingOffsets='{"a.b":{"0":9999999999,"1":-1},"c":"earliest"}').starting
    assert bound.kind == "offsets"
    assert bound.offsets == {TopicPartition("a.b", 0): 9999999999, TopicPartition("a.b", 1): -1}
    assert bound.topic_defaults == {"c": -2}
    assert read(startingOffsets=" Earliest ").starting.kind == "earliest"


def test_times_win_over_offsets_and_one_time_over_many() -> None:
    by_partition = '{"t":{"0":5}}'
    assert read(startingOffsets="earliest", startingOffsetsByTimestamp=by_partition).starting == Bound(
        "timestamps", timestamps_ms={TopicPartition("t", 0): 5}
    )
    one = read(
        startingOffsets="earliest",
        startingOffsetsByTimestamp=by_partition,
        startingTimestamp="7",
        startingOffsetsByTimestampStrategy="LATEST",
    )
    assert one.starting == Bound("timestamp", timestamp_ms=7, no_match="latest")


def test_an_ending_time_without_a_record_is_the_latest() -> None:
    assert read(streaming=False, endingTimestamp="7").ending == Bound(
        "timestamp", timestamp_ms=7, no_match="latest"
    )


def test_starting_where_a_group_stands_needs_a_group() -> None:
    assert read(startingOffsets="group", kafka__group__id="g").group_id == "g"
    assert read(startingOffsets="group", application__id="a").application_id == "a"
    with pytest.raises(InvalidOptionError, match=r"kafka\.group\.id"):
        read(startingOffsets="group")


@pytest.mark.parametrize(
    ("text", "ms"), [("15m", 900_000), ("500ms", 500), ("30 s", 30_000), ("7", 7), ("1h", 3_600_000)]
)
def test_durations(text: str, ms: int) -> None:
    assert read(maxTriggerDelay=text).max_trigger_delay_ms == ms


def test_isolation_level_by_either_name() -> None:
    assert read(isolation__level="READ_UNCOMMITTED").isolation_level == "read_uncommitted"
    options = read(kafka__isolation__level="read_uncommitted")
    assert options.isolation_level == "read_uncommitted"
    assert "isolation.level" not in options.kafka


BAD_READS: list[tuple[bool, dict[str, str], str]] = [
    (True, {"maxOffsetPerTrigger": "5"}, "Did you mean 'maxOffsetsPerTrigger'"),
    (True, {"kafkaa.bootstrap.servers": "x"}, "Did you mean 'kafka.bootstrap.servers'"),
    (True, {"subscribePattern": "x"}, "'subscribe' and 'subscribePattern' are set"),
    (True, {"subscribe": " , "}, "'subscribe' has the value ' , '"),
    (True, {"subscribe": "a/b"}, "expected a topic name"),
    (
        True,
        {"startingOffsets": "first"},
        "'startingOffsets' has the value 'first'; expected earliest, latest",
    ),
    (True, {"startingOffsets": '{"t":{"0":1'}, "malformed"),
    (True, {"startingOffsets": '{"t":{"0":"1"}}'}, 't-0 has "1"'),
    (True, {"startingOffsets": '{"t":{"0":-3}}'}, "t-0 has -3"),
    (True, {"startingOffsets": '{"t":[0]}'}, "topic 't' has [0]"),
    (True, {"startingOffsets": "{}"}, "one topic at least"),
    (True, {"startingTimestamp": "yesterday"}, "'startingTimestamp' has the value 'yesterday'"),
    (True, {"startingTimestamp": "-1"}, "0 or more"),
    (True, {"startingOffsetsByTimestamp": '{"t":{"0":-5}}'}, "t-0 has -5"),
    (True, {"startingOffsetsByTimestampStrategy": "zzz"}, "expected error or latest"),
    (True, {"endingOffsets": "latest"}, "cannot be used for a stream read"),
    (True, {"endingTimestamp": "1"}, "Trigger.AvailableNow"),
    (True, {"endingOffsetsByTimestamp": '{"t":{"0":5}}'}, "cannot be used for a stream read"),
    (True, {"maxOffsetsPerTrigger": "0"}, "1 or more"),
    (True, {"maxOffsetsPerTrigger": "-1"}, "1 or more"),
    (True, {"maxOffsetsPerTrigger": "abc"}, "a whole number"),
    (True, {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "at most maxOffsetsPerTrigger (5)"),
    (True, {"minPartitions": "1.0"}, "a whole number"),
    (True, {"minPartitions": "0"}, "1 or more"),
    (True, {"maxRecordsPerPartition": "0"}, "1 or more"),
    (True, {"maxTriggerDelay": "zz"}, "a time such as"),
    (True, {"failOnDataLoss": "maybe"}, "true or false"),
    (True, {"includeHeaders": "1"}, "true or false"),
    (True, {"isolation.level": "zzz"}, "read_committed or read_uncommitted"),
    (True, {"kafka.isolation.level": "zzz"}, "read_committed or read_uncommitted"),
    (True, {"topic": "x"}, "cannot be used for a stream read"),
    (True, {"pushFilters": "true"}, "cannot be used for a stream read"),
    (True, {"asyncProgressTrackingEnabled": "true"}, "asynchronous progress tracking"),
    (True, {"kafka.group.id": " "}, "some text"),
    (True, {"application.id": "a b"}, "letters, digits"),
    (
        False,
        {"startingOffsets": "latest"},
        "'startingOffsets' has the value 'latest'; expected earliest, group",
    ),
    (False, {"startingOffsets": '{"t":{"0":-1}}'}, "no -1 or latest"),
    (False, {"endingOffsets": "earliest"}, "'endingOffsets' has the value 'earliest'"),
    (False, {"endingOffsets": '{"t":{"0":-2}}'}, "no -2 or earliest"),
    (False, {"maxOffsetsPerTrigger": "5"}, "cannot be used for a batch read"),
    (
        False,
        {"startingOffsets": '{"t":{"0":9}}', "endingOffsets": '{"t":{"0":5}}'},
        "starts t-0 at 9, 'endingOffsets' ends it at 5",
    ),
]


@pytest.mark.parametrize(("streaming", "options", "message"), BAD_READS)
def test_bad_reads(streaming: bool, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse_read({**READ, **options}, streaming=streaming, pyspark_version="4.3.0")
    assert message in str(caught.value)
    assert caught.value.fix or "expected" in caught.value.message


@pytest.mark.parametrize("pattern", ["*(", "[a"])
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(InvalidOptionError, match="a regular expression"):
        parse_read({**SERVERS, "subscribePattern": pattern}, streaming=True)


@pytest.mark.parametrize("value", ["", "t", "[1]", '{"t":0}', '{"t":["0"]}', '{"t":[-1]}', "{}"])
def test_bad_assignments(value: str) -> None:
    with pytest.raises(InvalidOptionError, match="'assign'"):
        parse_read({**SERVERS, "assign": value}, streaming=True)


def test_nothing_to_read_and_no_brokers() -> None:
    with pytest.raises(InvalidOptionError, match="none of subscribe, subscribePattern, assign"):
        parse_read(SERVERS, streaming=True)
    for parse in (parse_read, parse_write):
        with pytest.raises(InvalidOptionError, match=r"'kafka\.bootstrap\.servers' is missing"):
            parse({"subscribe": "t"} if parse is parse_read else {"topic": "t"}, streaming=True)


def test_offsets_must_name_the_assigned_partitions() -> None:
    options = {**SERVERS, "assign": '{"t":[0,1]}'}
    with pytest.raises(InvalidOptionError, match="names the partitions t-0; 'assign' has t-0, t-1"):
        parse_read({**options, "startingOffsets": '{"t":{"0":1}}'}, streaming=True)
    parse_read({**options, "startingOffsets": '{"t":{"0":1,"1":-2}}'}, streaming=True)


@pytest.mark.parametrize(
    ("option", "value", "streaming", "works", "fails"),
    [
        ("maxOffsetsPerTrigger", "5", True, "4.2.0", "4.1.1"),
        ("minOffsetsPerTrigger", "5", True, "4.3.0.dev1", "4.0.0"),
        ("pushFilters", "true", False, "4.1.0", "4.0.1"),
    ],
)
def test_options_that_need_a_newer_pyspark(
    option: str, value: str, streaming: bool, works: str, fails: str
) -> None:
    read(streaming=streaming, pyspark_version=works, **{option: value})
    with pytest.raises(InvalidOptionError, match=f"'{option}' needs PySpark 4.* this is {fails}"):
        read(streaming=streaming, pyspark_version=fails, **{option: value})


def write(streaming: bool = True, **options: str) -> Any:
    named = {name.replace("__", "."): value for name, value in options.items()}
    return parse_write({**SERVERS, **named}, streaming=streaming)


def test_defaults_of_a_sink() -> None:
    options = write(topic=" t ", checkpointLocation="/c", queryName="q", path="/p")
    assert options.topic == "t"
    assert options.guarantee == "exactly_once"
    assert options.staging_inline_bytes == 262_144
    assert options.commit_timeout_ms == 300_000
    assert (options.missing_token, options.foreign_query, options.source_cluster) == ("fail", "fail", "auto")


BAD_WRITES: list[tuple[bool, dict[str, str], str]] = [
    (True, {"topc": "t"}, "Did you mean 'topic'"),
    (True, {"topic": " "}, "a topic name"),
    (True, {"topic": "a b"}, "a topic name"),
    (True, {"subscribe": "t"}, "cannot be used for a stream write"),
    (True, {"txnAppId": "a", "txnVersion": "1"}, "foreachBatch"),
    (False, {"txnAppId": "a"}, "'txnAppId' is set and 'txnVersion' is not"),
    (False, {"txnVersion": "1"}, "'txnVersion' is set and 'txnAppId' is not"),
    (False, {"txnAppId": "a", "txnVersion": "-1"}, "0 or more"),
    (False, {"txnAppId": "a", "txnVersion": "1", "processing.guarantee": "at_least_once"}, "exactly_once"),
    (True, {"processing.guarantee": "best_effort"}, "exactly_once or at_least_once"),
    (True, {"commitTimeoutMs": "10"}, "1000 or more"),
    (True, {"onMissingToken": "guess"}, "fail or assume_committed or assume_not_committed"),
    (True, {"kafka.transactional.id": "x"}, "set the option application.id"),
    (True, {"kafka.enable.idempotence": "false"}, "expected true: exactly-once needs"),
    (True, {"kafka.acks": "1"}, "expected all: exactly-once needs"),
    (True, {"kafka.max.in.flight.requests.per.connection": "6"}, "at most 5"),
    (True, {"_asyncProgressTrackingEnabled": "true"}, "asynchronous progress tracking"),
]


@pytest.mark.parametrize(("streaming", "options", "message"), BAD_WRITES)
def test_bad_writes(streaming: bool, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse_write({**SERVERS, **options}, streaming=streaming)
    assert message in str(caught.value)
    assert caught.value.fix or "expected" in caught.value.message


def test_at_least_once_may_have_what_exactly_once_may_not() -> None:
    options = write(
        processing__guarantee="at_least_once", kafka__acks="1", kafka__enable__idempotence="false"
    )
    assert options.kafka["acks"] == "1"


def test_the_documentation_is_that_of_the_table() -> None:
    committed = Path(__file__).parent.parent / "docs" / "options.md"
    assert committed.read_text(encoding="utf-8") == documentation(), "run ./dev docs"
    assert all(f"`{option.name}`" in documentation() for option in OPTIONS)

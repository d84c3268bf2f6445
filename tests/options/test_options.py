"""Options have Spark's names and meanings; errors name option, value, expectation and fix."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.options.__main__ import documentation
from kafka_eos_source.options.checked import Bound, Subscription
from kafka_eos_source.options.parse import is_for_stream_only, parse_read, parse_write
from kafka_eos_source.options.table import OPTIONS
from tests import ROOT

#: Texts on which careless parsers raise an unexpected error.
_TRICKY = [
    "²",
    "9" * 5000,
    '{"t":{"²":1}}',
    "[" * 50_000,
    '{"t":{"0":NaN}}',
    "1e400",
    "[[a]",
    "\ud800",
    "\0",
    "+",
    "٣",
]

SERVERS = {"kafka.bootstrap.servers": "b:9092"}
READ = {**SERVERS, "subscribe": "t"}


def read(streaming: bool = True, pyspark_version: str = "4.3.0", **options: str) -> Any:
    named = {name.replace("__", "."): value for name, value in options.items()}
    return parse_read({**READ, **named}, streaming=streaming, pyspark_version=pyspark_version)


def test_a_stream_read_has_the_documented_defaults() -> None:
    options = read()
    assert options.subscription == Subscription("subscribe", topics=("t",))
    assert options.starting == Bound("latest")
    assert options.ending == Bound("latest")
    assert options.fail_on_data_loss
    assert options.isolation_level == "read_committed"
    assert options.max_trigger_delay_ms == 900_000
    assert options.fetch_num_retries == 3
    assert options.kafka == {"bootstrap.servers": "b:9092"}


def test_a_batch_read_starts_at_the_earliest_offset_by_default() -> None:
    assert read(streaming=False).starting == Bound("earliest")


@pytest.mark.parametrize("case", [str.lower, str.upper, str])
def test_option_names_are_not_case_sensitive(case: Any) -> None:
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


def test_offsets_of_damaged_records_are_parsed_for_what_is_read() -> None:
    assert read().skip_damaged == {}
    named = read(skipDamagedRecords='{"t":{"0":[17,1042],"1":[0]}}').skip_damaged
    assert named == {TopicPartition("t", 0): (17, 1042), TopicPartition("t", 1): (0,)}
    assert read(streaming=False, skipDamagedRecords='{"t":{"0":[17]}}').skip_damaged
    for unread in ({"subscribe": "u"}, {"assign": '{"t":[1]}', "subscribe": None}):
        options = {**SERVERS, **unread, "skipDamagedRecords": '{"t":{"0":[17]}}'}
        given = {name: value for name, value in options.items() if value is not None}
        with pytest.raises(InvalidOptionError, match="names t-0; expected partitions that are read"):
            parse_read(given, streaming=True)


@pytest.mark.parametrize(
    "value",
    ["17", "t:0:17", "{}", '{"t":{}}', '{"t":{"0":17}}', '{"t":{"0":[]}}', '{"t":{"0":[-1]}}', '{"t":[17]}'],
)
def test_malformed_offsets_of_damaged_records_are_refused(value: str) -> None:
    with pytest.raises(InvalidOptionError, match=r'skipDamagedRecords.*such as \{"topic":\{"0":\[17\]\}\}'):
        read(skipDamagedRecords=value)


def test_a_limit_of_decompressed_bytes_keeps_the_offsets_of_columns_in_range() -> None:
    assert read().most_decompressed_bytes == 256 << 20
    assert read(**{"max.decompressed.batch.bytes": str(1 << 30)}).most_decompressed_bytes == 1 << 30
    for value in ("0", str((1 << 30) + 1), "1g"):
        with pytest.raises(InvalidOptionError, match="an integer, from 1048576 to 1073741824"):
            read(**{"max.decompressed.batch.bytes": value})


def test_subscribe_and_assign_are_parsed_into_topics_and_partitions() -> None:
    assert read(subscribe=" a , b,,a ").subscription.topics == ("a", "b")
    options = parse_read({**SERVERS, "assign": '{"a":[1,0],"b":[4]}'}, streaming=True)
    assert options.subscription.partitions == (
        TopicPartition("a", 0),
        TopicPartition("a", 1),
        TopicPartition("b", 4),
    )


def test_starting_offsets_are_parsed_with_defaults_per_topic() -> None:
    bound = read(startingOffsets='{"a.b":{"0":9999999999,"1":-1},"c":"earliest","*":-1}').starting
    assert bound.kind == "offsets"
    assert bound.offsets == {TopicPartition("a.b", 0): 9999999999, TopicPartition("a.b", 1): -1}
    assert bound.topic_defaults == {"c": -2, "*": -1}
    assert (bound.default_of("c"), bound.default_of("d")) == (-2, -1)
    assert read(startingOffsets=" Earliest ").starting.kind == "earliest"


def test_a_timestamp_overrides_offsets_and_one_timestamp_overrides_those_per_partition() -> None:
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


def test_an_ending_timestamp_with_no_record_after_it_means_the_latest_offset() -> None:
    assert read(streaming=False, endingTimestamp="7").ending == Bound(
        "timestamp", timestamp_ms=7, no_match="latest"
    )


def test_starting_at_the_committed_offsets_requires_a_group() -> None:
    assert read(startingOffsets="group", kafka__group__id="g").group_id == "g"
    assert read(startingOffsets="group", application__id="a").application_id == "a"
    with pytest.raises(InvalidOptionError, match=r"kafka\.group\.id"):
        read(startingOffsets="group")


@pytest.mark.parametrize(
    ("text", "ms"), [("15m", 900_000), ("500ms", 500), ("30 s", 30_000), ("7", 7), ("1h", 3_600_000)]
)
def test_a_duration_is_parsed_with_its_unit(text: str, ms: int) -> None:
    assert read(maxTriggerDelay=text).max_trigger_delay_ms == ms


def test_the_isolation_level_is_accepted_under_both_names() -> None:
    assert read(isolation__level="READ_UNCOMMITTED").isolation_level == "read_uncommitted"
    options = read(kafka__isolation__level="read_uncommitted")
    assert options.isolation_level == "read_uncommitted"
    assert "isolation.level" not in options.kafka


def assert_error_names_option_value_and_fix(
    error: InvalidOptionError, options: dict[str, str], message: str
) -> None:
    """Checks that the error names an option that was set, its value where it can be shown, and a fix."""
    assert message in error.message or message in error.fix
    assert any(name.lower() in error.message.lower() for name in options)
    without_a_value = ("unknown option", "not case-sensitive", "starts t-0 at 9")
    assert any(value in error.message for value in options.values()) or any(
        text in error.message for text in without_a_value
    )
    assert error.fix.endswith(".")
    assert error.message.endswith((".", "?"))


INVALID_READS: list[tuple[bool, dict[str, str], str]] = [
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
    (True, {"startingOffsets": "{}"}, "at least one topic"),
    (True, {"startingTimestamp": "yesterday"}, "'startingTimestamp' has the value 'yesterday'"),
    (True, {"startingTimestamp": "-1"}, "0 or more"),
    (True, {"startingOffsetsByTimestamp": '{"t":{"0":-5}}'}, "t-0 has -5"),
    (True, {"startingOffsetsByTimestampStrategy": "zzz"}, "expected error or latest"),
    (True, {"endingOffsets": "latest"}, "cannot be used for a stream read"),
    (True, {"endingTimestamp": "1"}, "Trigger.AvailableNow"),
    (True, {"endingOffsetsByTimestamp": '{"t":{"0":5}}'}, "cannot be used for a stream read"),
    (True, {"maxOffsetsPerTrigger": "0"}, "1 or more"),
    (True, {"maxOffsetsPerTrigger": "-1"}, "1 or more"),
    (True, {"maxOffsetsPerTrigger": "abc"}, "an integer"),
    (True, {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "value of 'maxOffsetsPerTrigger', 5"),
    (True, {"minPartitions": "1.0"}, "an integer"),
    (True, {"minPartitions": "0"}, "1 or more"),
    (True, {"maxRecordsPerPartition": "0"}, "1 or more"),
    (True, {"maxTriggerDelay": "zz"}, "a time such as"),
    (True, {"maxTriggerDelay": "-5s"}, "a time such as"),
    (True, {"maxTriggerDelay": "5 weeks"}, "a time such as"),
    (True, {"startingOffsets": '{"t":{"0":1},"t":{"1":2}}'}, "the key 't' occurs twice"),
    (True, {"startingOffsets": '{"t":{"²":1}}'}, "the partition '²'"),
    (True, {"startingOffsets": '{"t":{"01":1}}'}, "the partition '01'"),
    (True, {"startingOffsets": '{"t":{"4294967296":1}}'}, "the partition '4294967296'"),
    (True, {"startingOffsets": '{"t":{"0":9223372036854775808}}'}, "t-0 has 9223372036854775808"),
    (True, {"startingOffsets": '{"t":{"0":1.0}}'}, "t-0 has 1.0"),
    (True, {"startingOffsets": '{"t":{"0":true}}'}, "t-0 has true"),
    (True, {"startingOffsets": '{"t":{}}'}, "topic 't' has {}"),
    (True, {"startingOffsets": '{"t":"first"}'}, "'t' has \"first\""),
    (True, {"startingOffsets": '{"t":5}'}, "'t' has 5"),
    (True, {"startingOffsets": '{"*":{"0":5}}'}, "topic '*' has"),
    (True, {"startingOffsets": '{"a b":{"0":5}}'}, "'a b' is not a valid topic name"),
    (True, {"startingOffsets": '["t"]'}, "or JSON such as"),
    (True, {"startingOffsetsByTimestamp": '{"*":{"0":5}}'}, "'*' is not a valid topic name"),
    (True, {"startingOffsetsByTimestamp": '{"t":5}'}, "topic 't' has 5"),
    (True, {"startingOffsetsByTimestamp": "5"}, "a JSON object"),
    (True, {"isolation.level": "read_committed", "kafka.isolation.level": "read_uncommitted"}, "keep one"),
    (True, {"failondataloss": "false", "failOnDataLoss": "true"}, "not case-sensitive"),
    (True, {"groupIdPrefix": ""}, "a non-empty text"),
    (True, {"fetchOffset.numRetries": "-1"}, "0 or more"),
    (True, {"fetchOffset.retryIntervalMs": "1s"}, "an integer"),
    (True, {"kafkaConsumer.pollTimeoutMs": "0"}, "1 or more"),
    (True, {"security.protocol": "SSL"}, "Did you mean 'kafka.security.protocol'"),
    (True, {"kakfa.security.protocol": "SSL"}, "Did you mean 'kafka.security.protocol'"),
    (True, {"ssl.truststore.location": "/x"}, "Did you mean 'kafka.ssl.truststore.location'"),
    (True, {"onMissingToken": "fail"}, "set it on the sink"),
    (True, {"_asyncProgressTrackingOverrideSinkSupportCheck": "true"}, "asynchronous progress tracking"),
    (True, {"asyncProgressTrackingCheckpointIntervalMs": "5"}, "asynchronous progress tracking"),
    (True, {"failOnDataLoss": "maybe"}, "true or false"),
    (True, {"includeHeaders": "1"}, "true or false"),
    (True, {"columns": "key,valeu"}, "some of the columns key, value, topic"),
    (True, {"columns": "key, KEY"}, "each at most once"),
    (True, {"columns": ","}, "some of the columns"),
    (False, {"step.in.read": "{}"}, "cannot be used for a batch read"),
    (True, {"isolation.level": "zzz"}, "read_committed or read_uncommitted"),
    (True, {"kafka.isolation.level": "zzz"}, "read_committed or read_uncommitted"),
    (True, {"topic": "x"}, "cannot be used for a stream read"),
    (True, {"pushFilters": "true"}, "cannot be used for a stream read"),
    (True, {"asyncProgressTrackingEnabled": "true"}, "asynchronous progress tracking"),
    (True, {"kafka.group.id": " "}, "a non-empty text"),
    (True, {"application.id": "a b"}, "letters, digits"),
    (
        False,
        {"startingOffsets": "latest"},
        "'startingOffsets' has the value 'latest'; expected earliest, group",
    ),
    (False, {"startingOffsets": '{"t":{"0":-1}}'}, "offsets other than -1 (latest)"),
    (False, {"endingOffsets": "earliest"}, "'endingOffsets' has the value 'earliest'"),
    (False, {"endingOffsets": '{"t":{"0":-2}}'}, "offsets other than -2 (earliest)"),
    (False, {"maxOffsetsPerTrigger": "0"}, "1 or more"),
    (
        False,
        {"startingOffsets": '{"t":{"0":9}}', "endingOffsets": '{"t":{"0":5}}'},
        "starts t-0 at 9, but option 'endingOffsets' ends it at 5",
    ),
]


@pytest.mark.parametrize(("streaming", "options", "message"), INVALID_READS)
def test_an_invalid_option_of_a_read_is_refused_with_its_value_and_the_fix(
    streaming: bool, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse_read({**READ, **options}, streaming=streaming, pyspark_version="4.3.0")
    assert_error_names_option_value_and_fix(caught.value, options, message)


@pytest.mark.parametrize("pattern", ["*(", "[a", r"\p{Alpha}", "[a-z&&[^b]]", "(?<x>a)", " "])
def test_a_subscribe_pattern_that_is_not_a_valid_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidOptionError, match="'subscribePattern' has the value"):
        parse_read({**SERVERS, "subscribePattern": pattern}, streaming=True)


@pytest.mark.parametrize("value", ["", "t", "[1]", '{"t":0}', '{"t":["0"]}', '{"t":[-1]}', "{}"])
def test_an_invalid_assign_option_is_refused(value: str) -> None:
    with pytest.raises(InvalidOptionError, match="'assign'"):
        parse_read({**SERVERS, "assign": value}, streaming=True)


def test_a_missing_subscription_and_missing_brokers_are_errors() -> None:
    with pytest.raises(
        InvalidOptionError, match="exactly one of the options subscribe, subscribePattern, assign, but none"
    ):
        parse_read(SERVERS, streaming=True)
    for parse in (parse_read, parse_write):
        with pytest.raises(InvalidOptionError, match=r"'kafka\.bootstrap\.servers' is missing"):
            parse({"subscribe": "t"} if parse is parse_read else {"topic": "t"}, streaming=True)


@pytest.mark.parametrize(
    ("subscription", "offsets", "message"),
    [
        (
            {"assign": '{"t":[0,1]}'},
            '{"t":{"0":1}}',
            "names the partitions t-0, but option 'assign' has t-0, t-1",
        ),
        ({"assign": '{"t":[0,1]}'}, '{"t":{"0":1,"2":1},"*":-2}', "names the partitions t-0, t-2"),
        (
            {"assign": '{"t":[0,1]}'},
            '{"t":"earliest","u":"earliest"}',
            "names the topic 'u', which option 'assign' does not include",
        ),
        ({"subscribe": "t,u"}, '{"t":{"0":1}}', "names no partition of 'u'"),
        ({"subscribe": "t"}, '{"t":{"0":1},"u":{"0":1}}', "the topic 'u', which option 'subscribe' does not"),
        (
            {"subscribePattern": "^t"},
            '{"ut":{"0":1}}',
            "the topic 'ut', which option 'subscribePattern' does not",
        ),
    ],
)
def test_the_offsets_of_a_batch_read_must_name_exactly_the_partitions_it_reads(
    subscription: dict[str, str], offsets: str, message: str
) -> None:
    options = {**SERVERS, **subscription, "startingOffsets": offsets}
    with pytest.raises(InvalidOptionError) as caught:
        parse_read(options, streaming=False)
    assert message in caught.value.message
    assert "'startingOffsets'" in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    ("subscription", "offsets"),
    [
        ({"assign": '{"t":[0,1]}'}, '{"t":{"0":1,"1":-2}}'),
        ({"assign": '{"t":[0,1]}'}, '{"t":"EARLIEST"}'),
        ({"assign": '{"t":[0,1]}'}, '{"t":{"0":5},"*":"earliest"}'),
        ({"subscribe": "t,u"}, '{"t":{"0":1},"*":-2}'),
        ({"subscribePattern": "t"}, '{"ut":{"0":1}}'),
    ],
)
def test_offsets_of_a_batch_read_may_use_a_default_for_other_partitions(
    subscription: dict[str, str], offsets: str
) -> None:
    parse_read({**SERVERS, **subscription, "startingOffsets": offsets}, streaming=False)


def test_the_starting_offsets_of_a_stream_are_not_compared_with_its_topics_while_parsing() -> None:
    """With a checkpoint Spark ignores them: topics may have been created or deleted in the meantime."""
    options = {**SERVERS, "subscribe": "t,new", "startingOffsets": '{"t":{"0":1},"old":{"0":1}}'}
    assert parse_read(options, streaming=True).starting.kind == "offsets"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"startingOffsets": '{"t":{"0":1}}', "endingOffsets": '{"t":{"1":5}}'},
            "only one of the options 'startingOffsets' and 'endingOffsets' names the partition(s) t-0, t-1",
        ),
        (
            {"startingTimestamp": "9", "endingTimestamp": "5"},
            "'startingTimestamp' starts every partition at 9, but option 'endingTimestamp' ends it at 5",
        ),
        (
            {
                "startingOffsetsByTimestamp": '{"t":{"0":9}}',
                "endingOffsetsByTimestamp": '{"t":{"0":5}}',
            },
            "'startingOffsetsByTimestamp' starts t-0 at 9, but option 'endingOffsetsByTimestamp' ends it at "
            "5",
        ),
    ],
)
def test_a_start_after_its_end_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        read(streaming=False, **options)
    assert message in caught.value.message
    assert caught.value.fix


def test_a_start_equal_to_its_end_reads_nothing() -> None:
    read(streaming=False, startingOffsets='{"t":{"0":5}}', endingOffsets='{"t":{"0":5}}')
    read(streaming=False, startingOffsets='{"t":{"0":5}}', endingOffsets='{"t":{"0":-1}}')
    read(streaming=False, startingTimestamp="5", endingTimestamp="5")


@pytest.mark.parametrize(
    ("option", "value", "streaming", "new_enough", "too_old"),
    [
        ("maxOffsetsPerTrigger", "5", True, "4.2.0", "4.1.1"),
        ("minOffsetsPerTrigger", "5", True, "4.3.0.dev1", "4.0.0"),
        ("maxOffsetsPerTrigger", "5", True, "4.2rc1", "4.1.0+vendor"),
        ("maxOffsetsPerTrigger", "5", True, "10.0", "4.1"),
        ("pushFilters", "true", False, "4.1.0", "4.0.1"),
    ],
)
def test_an_option_that_needs_a_newer_pyspark_is_refused_on_an_older_one(
    option: str, value: str, streaming: bool, new_enough: str, too_old: str
) -> None:
    read(streaming=streaming, pyspark_version=new_enough, **{option: value})
    message = f"'{option}' requires PySpark 4.* this is PySpark {re.escape(too_old)}"
    with pytest.raises(InvalidOptionError, match=message):
        read(streaming=streaming, pyspark_version=too_old, **{option: value})


def test_rate_limits_of_streams_have_no_effect_on_batch_reads_and_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Spark's own Kafka source does the same."""
    limits = {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "9", "maxTriggerDelay": "1h"}
    options = read(streaming=False, **limits)
    assert (options.max_offsets_per_trigger, options.min_offsets_per_trigger) == (None, None)
    assert [name for name in limits if f"{name!r} has no effect on a batch read" in caplog.text] == [*limits]


def test_an_option_that_only_streams_have_identifies_a_stream() -> None:
    assert is_for_stream_only(["subscribe", "MAXTRIGGERDELAY"])
    assert not is_for_stream_only(
        ["subscribe", "kafka.max.poll.records", "pushFilters", "checkpointLocation"]
    )


def test_options_that_spark_itself_adds_are_accepted() -> None:
    added_by_spark = {
        "path": "/x",
        "paths": "[]",
        "queryName": "q",
        "checkpointLocation": "/c",
        "asyncProgressTrackingEnabled": "false",
        "__internal": "x",
    }
    for streaming in (True, False):
        assert parse_read({**READ, **added_by_spark}, streaming=streaming) == read(streaming=streaming)
        found = parse_write({**SERVERS, **added_by_spark}, streaming=streaming)
        assert (found.query_name, found.checkpoint_location) == ("q" if streaming else None, "/c")


def test_a_sink_accepts_include_headers_without_effect() -> None:
    assert write(includeHeaders="true") == write()


@pytest.mark.parametrize("name", ["kafka.sasl.password", "kafka.ssl.key.password"])
def test_the_repr_of_parsed_options_hides_secrets(name: str) -> None:
    for parsed in (read(**{name: "hunter2"}), write(**{name: "hunter2"})):
        assert "hunter2" in parsed.kafka.values()
        assert "hunter2" not in repr(parsed)


@pytest.mark.parametrize(
    "name",
    ["sasl.password", "kakfa.sasl.password", "topic.password", "pasword", "kafka.sasl.passwort", "secret"],
)
def test_an_error_about_a_misspelled_option_hides_a_password_in_its_value(name: str) -> None:
    for parse, options in ((parse_read, READ), (parse_write, SERVERS)):
        with pytest.raises(InvalidOptionError) as caught:
            parse({**options, name: "hunter2"}, streaming=True)
        assert name in caught.value.message
        assert "hunter2" not in str(caught.value)


_WORDS = [option.name for option in OPTIONS] + ["kafka.acks", "kafka.linger.ms", "kafka.sasl.jaas.config"]


@given(
    st.dictionaries(st.sampled_from(_WORDS) | st.text(), st.text() | st.sampled_from(_TRICKY), max_size=4),
    st.booleans(),
)
@example({"startingTimestamp": "0\x1f"}, False)
@settings(deadline=None)
def test_arbitrary_options_are_parsed_or_raise_invalid_option_error(
    options: dict[str, str], streaming: bool
) -> None:
    """Parsing raises no other error, and the error has a message and a fix."""
    for parse, required in ((parse_read, READ), (parse_write, SERVERS)):
        try:
            parse({**required, **options}, streaming=streaming)
        except InvalidOptionError as error:
            texts = (error.message, error.fix)
        else:
            texts = ("accepted", "no fix is needed")
        assert all(texts)


def write(streaming: bool = True, **options: str) -> Any:
    named = {name.replace("__", "."): value for name, value in options.items()}
    return parse_write({**SERVERS, **named}, streaming=streaming)


def test_a_stream_write_has_the_documented_defaults() -> None:
    options = write(topic=" t ", checkpointLocation="/c", queryName="q", path="/p")
    assert options.topic == "t"
    assert options.guarantee == "exactly_once"
    assert options.staging_inline_bytes == 262_144
    assert options.commit_timeout_ms == 300_000
    assert options.token_topic is None
    assert write(topic="t", token__topic=" tokens ").token_topic == "tokens"
    assert (options.missing_token, options.foreign_query, options.source_cluster) == ("fail", "fail", "auto")


INVALID_WRITES: list[tuple[bool, dict[str, str], str]] = [
    (True, {"topc": "t"}, "Did you mean 'topic'"),
    (True, {"topic": " "}, "a topic name"),
    (True, {"topic": "a b"}, "a topic name"),
    (True, {"subscribe": "t"}, "cannot be used for a stream write"),
    (True, {"startingOffsets": "latest"}, "set it on the source"),
    (True, {"staging.inline.bytes": "-1"}, "0 or more"),
    (True, {"includeHeaders": "perhaps"}, "true or false"),
    (True, {"includeTimestamp": "yes"}, "true or false"),
    (True, {"anchor.topic": "a/b"}, "a topic name"),
    (True, {"application.id": "a/b"}, "letters, digits"),
    (True, {"source.cluster": "mine"}, "auto or same or other"),
    (True, {"onForeignQuery": "take"}, "fail or adopt"),
    (False, {"onForeignQuery": "adopt"}, "cannot be used for a batch write"),
    (True, {"txnAppId": "a", "txnVersion": "1"}, "foreachBatch"),
    (False, {"txnAppId": "a"}, "'txnAppId' has the value 'a', but 'txnVersion' is not set"),
    (False, {"txnVersion": "1"}, "'txnVersion' has the value '1', but 'txnAppId' is not set"),
    (False, {"txnAppId": "a", "txnVersion": "-1"}, "0 or more"),
    (False, {"txnAppId": "a", "txnVersion": "1", "processing.guarantee": "at_least_once"}, "exactly_once"),
    (True, {"token.topic": "t", "processing.guarantee": "at_least_once"}, "exactly_once, because"),
    (True, {"token.topic": "out", "topic": "out"}, "may contain only tokens"),
    (True, {"token.topic": "a topic"}, "a topic name"),
    (False, {"token.topic": "tokens"}, "'txnAppId' is not set"),
    (True, {"processing.guarantee": "best_effort"}, "exactly_once or at_least_once"),
    (True, {"commitTimeoutMs": "10"}, "1000 or more"),
    (True, {"onMissingToken": "guess"}, "fail or assume_committed:… or assume_not_committed:…"),
    (True, {"kafka.transactional.id": "x"}, "set the option application.id"),
    (True, {"kafka.enable.idempotence": "false"}, "expected true: exactly-once needs"),
    (True, {"kafka.acks": "1"}, "expected all: exactly-once needs"),
    (True, {"kafka.max.in.flight.requests.per.connection": "6"}, "at most 5"),
    (True, {"_asyncProgressTrackingEnabled": "true"}, "asynchronous progress tracking"),
]


@pytest.mark.parametrize(("streaming", "options", "message"), INVALID_WRITES)
def test_an_invalid_option_of_a_write_is_refused_with_its_value_and_the_fix(
    streaming: bool, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse_write({**SERVERS, **options}, streaming=streaming)
    assert_error_names_option_value_and_fix(caught.value, options, message)


def test_at_least_once_accepts_producer_settings_that_exactly_once_refuses() -> None:
    options = write(
        processing__guarantee="at_least_once", kafka__acks="1", kafka__enable__idempotence="false"
    )
    assert options.kafka["acks"] == "1"


def test_the_options_page_is_generated_from_the_table() -> None:
    committed = ROOT / "docs" / "options.md"
    assert committed.read_text(encoding="utf-8") == documentation(), "run ./dev docs"
    assert all(f"`{option.name}`" in documentation() for option in OPTIONS)

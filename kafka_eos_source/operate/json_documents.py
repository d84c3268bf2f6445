"""What each command prints with ``--json``: shapes, from which the documents and docs/cli-json.md follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union

from kafka_eos_source.runtime.commands import print_json
from kafka_eos_source.secrets import shown_text

if TYPE_CHECKING:
    from kafka_eos_source.kafka.reader import LogEnds
    from kafka_eos_source.model import TopicPartition
    from kafka_eos_source.operate.doctor.finding import Finding as Checked
    from kafka_eos_source.operate.inspection import (
        Checkpoint,
        Finding,
        Inspection,
        KafkaView,
        PartitionView,
        StagedEntry,
    )
    from kafka_eos_source.operate.records import TopicDescription
    from kafka_eos_source.operate.repair import Adoption, Sweep, SweepDecision
    from kafka_eos_source.operate.replay import Outcome
    from kafka_eos_source.operate.rescale_copy import Progress
    from kafka_eos_source.operate.rights import Grant
    from kafka_eos_source.operate.stores import (
        ChangelogShard,
        LocalShard,
        LoweredShard,
        RestoredShard,
        Verified,
    )
    from kafka_eos_source.operate.token_topics import Entry, TokenTopicDescription
    from kafka_eos_source.operate.topics import GroupLag, PartitionLag
    from kafka_eos_source.protocol.token import Token, TokenRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Lines:
    """Several JSON documents, one on each line.

    Attributes:
        shape: shape of each document.
    """

    shape: Shape


@dataclass(frozen=True)
class OrNull:
    """A value that may be null.

    Attributes:
        shape: shape of the value.
        when: when it is null.
    """

    shape: Shape
    when: str


@dataclass(frozen=True)
class Optional:
    """A field that may be absent.

    Attributes:
        shape: shape of the value.
    """

    shape: Shape


@dataclass(frozen=True)
class AnyNames:
    """A JSON object with any names, for a mapping.

    Attributes:
        shape: shape of each value.
    """

    shape: Shape


@dataclass(frozen=True)
class Value(Generic[T]):
    """A field whose value is not the attribute of the same name.

    Attributes:
        shape: shape of the value.
        of: returns the value, given the object that the document describes.
    """

    shape: Shape
    of: Callable[[T], object]


class Object(Generic[T]):
    """A JSON object that describes an object of the program.

    Args:
        fields: the shape of each field. Its value is the attribute of the same name, or that of a `Value`.
    """

    def __init__(
        self, **fields: str | list[Any] | OrNull | Optional | AnyNames | Object[Any] | Value[T]
    ) -> None:
        self.fields = fields


#: A text describes a simple value, or one that is printed as it is; ``[shape]`` is an array.
Shape = Union[str, list[Any], OrNull, Optional, AnyNames, "Object[Any]"]


def document(shape: object, value: Any, **given: object) -> Any:
    """Returns a value as JSON values.

    Args:
        shape: shape of the document.
        value: what it describes: an object, or a sequence of them for an array.
        given: values of fields that do not follow from ``value``.
    """
    if isinstance(shape, Lines):
        return document(shape.shape, value, **given)
    if isinstance(shape, OrNull):
        return None if value is None else document(shape.shape, value)
    if isinstance(shape, list):
        return [document(shape[0], each) for each in value]
    if isinstance(shape, AnyNames):
        return {str(name): document(shape.shape, each) for name, each in value.items()}
    if not isinstance(shape, Object):
        return value
    assert given.keys() <= shape.fields.keys(), "a field is not documented"
    found = {}
    for name, field in shape.fields.items():
        inner = field.shape if isinstance(field, Value) else field
        if name in given:
            found[name] = document(inner, given[name])
        elif isinstance(field, Value):
            found[name] = document(inner, field.of(value))
        else:
            found[name] = document(inner, value[name] if isinstance(value, Mapping) else getattr(value, name))
    return found


def print_document(command: str, value: Any = None, **given: object) -> None:
    """Prints what a command found or did; see `document`."""
    print_json(document(SHAPES[command], value, **given))


def rendered(shape: object) -> str:
    """Returns a shape as a Markdown block."""
    return "```text\n" + _rendered(shape, "") + "\n```"


def _rendered(shape: object, indent: str) -> str:
    inner = indent + "  "
    if isinstance(shape, OrNull):
        return f"null if {shape.when}, else {_rendered(shape.shape, indent)}"
    if isinstance(shape, Optional):
        return f"may be absent: {_rendered(shape.shape, indent)}"
    if isinstance(shape, list):
        return f"[{_rendered(shape[0], indent)}, …]"
    if isinstance(shape, Value):
        return _rendered(shape.shape, indent)
    if isinstance(shape, AnyNames):
        return f"{{\n{inner}…: {_rendered(shape.shape, inner)}\n{indent}}}"
    if isinstance(shape, Object):
        fields = (f'{inner}"{name}": {_rendered(each, inner)}' for name, each in shape.fields.items())
        return "{\n" + "\n".join(fields) + f"\n{indent}}}"
    return str(shape)


# -- parts that several commands use, or that are long

FINDING: Object[Finding] = Object(
    condition=Value(
        "name of the error condition, as in docs/runbooks.md; null = no error",
        lambda each: each.condition or None,
    ),
    text="what was found",
    fix=Value("what to do; null = nothing", lambda each: each.fix or None),
)
TOKEN = AnyNames("field of the token; `batch`, `seq` and `rows` are numbers")
LOG: Object[tuple[TopicPartition, LogEnds]] = Object(
    partition=Value("number of the partition", lambda each: each[0].partition),
    earliest=Value("first offset of the log", lambda each: each[1].earliest),
    stable=Value(
        "last stable offset: what read_committed consumers can read up to", lambda each: each[1].stable
    ),
    end=Value("end of the log", lambda each: each[1].end),
)


def _token(token: Token | None) -> Mapping[str, Any] | None:
    return None if token is None else token.to_json()


_RECORD: Mapping[str, Value[TokenRecord]] = {
    "token": Value(OrNull(TOKEN, "the record cannot be decoded"), lambda each: _token(each.token)),
    "time_ms": Value("when the record was written, ms since 1970", lambda each: each.time_ms),
    "group_id": Value("consumer group of the query", lambda each: each.group_id),
    "topic_id": Value("topic id of the token topic when the record was written", lambda each: each.topic_id),
    "anchor": Value("anchor partition of the query", lambda each: str(each.anchor)),
    "offsets": Value(
        OrNull(AnyNames("next offset of this partition"), "the record cannot be decoded"),
        lambda each: dict(sorted(each.ends.items())),
    ),
}


def _of_record(field: Value[TokenRecord]) -> Value[Entry]:
    """Returns a field of a record as a field of the entry, which has none if it cannot be decoded."""
    return Value(field.shape, lambda each: None if each.record is None else field.of(each.record))


ENTRY: Object[Entry] = Object(
    application_id="the query",
    partition=Value("partition of its record", lambda each: each.found.tp.partition),
    offset=Value("offset of its record", lambda each: each.found.offset),
    problem=Value("why the record cannot be decoded; null = it can", lambda each: each.problem or None),
    **{name: _of_record(field) for name, field in _RECORD.items()},
)
CHECKPOINT: Object[Checkpoint] = Object(
    location=Value("the checkpoint", lambda each: shown_text(each.location)),
    query_id="Spark's id of the query",
    planned="newest batch of the offset log; null = none",
    planned_at_seconds="when it was planned, seconds since 1970",
    committed="newest batch of the commit log; null = none",
    next_batch="batch that a restart runs",
    replays="whether a restart repeats a planned batch",
    identity_file=Value(
        OrNull(
            Object(
                application_id="the query's application.id",
                query_id="Spark's id of the query",
                first_batch="first batch for which Kafka holds a token",
                location=Value(
                    "where the checkpoint was when a batch was committed last",
                    lambda each: shown_text(each.location),
                ),
                unproven_since="first batch without a token, because of at_least_once; null = none",
            ),
            "no batch was committed",
        ),
        lambda each: each.identity,
    ),
)
PARTITION: Object[PartitionView] = Object(
    topic=Value("name of the topic", lambda each: each.tp.topic),
    partition=Value("number of the partition", lambda each: each.tp.partition),
    start="first offset of the next batch; null = not read",
    end="end of the next batch; null = not planned",
    group="committed offset of the group; null = none",
    token_batch=Value(
        "batch of the token in that offset; null = none", lambda each: each.token and each.token.batch_id
    ),
    earliest=Value(
        "first offset of the log; null = no such partition", lambda each: each.log and each.log.earliest
    ),
    stable=Value("last stable offset", lambda each: each.log and each.log.stable),
    log_end=Value("end of the log", lambda each: each.log and each.log.end),
    transaction_since="first offset of an open transaction; null = none is open",
)
KAFKA: Object[KafkaView] = Object(
    cluster_id="Kafka's id of the cluster",
    token=Value(OrNull(TOKEN, "Kafka holds no token"), lambda each: _token(each.token)),
    pending="whether an unfinished transaction is about to change the group's offsets",
    partitions=[PARTITION],
    losses=[Object(kind="kind of the loss, as in docs/runbooks.md, DATA_LOSS", text="what was lost")],
)
STAGED: Object[StagedEntry] = Object(
    name="entry of the staging folder",
    batch_id="its micro-batch; null = it is none",
    files="number of files",
    bytes=Value("size of all files", lambda each: each.size_bytes),
)
SWEPT: Object[SweepDecision] = Object(
    name=Value("name of the entry", lambda each: each.entry.name),
    batch_id=Value("its micro-batch; null = it is none", lambda each: each.entry.batch_id),
    files=Value("number of files", lambda each: each.entry.files),
    bytes=Value("size of all files", lambda each: each.entry.size_bytes),
    delete="whether it can be deleted",
    deleted="whether it was deleted",
    reason="why it can be deleted or not, or why deleting it failed",
)
SWEEP: Object[Sweep] = Object(
    location=Value("the staging folder", lambda each: shown_text(each.location)),
    token_batch="newest batch that Kafka holds; null = not known",
    why_unknown=Value("why that batch is not known; null = it is", lambda each: each.why_unknown or None),
    entries=Value([SWEPT], lambda each: each.decisions),
)
ADOPTION: Object[Adoption] = Object(
    adopted="whether the token was committed",
    batch=Value(
        OrNull(
            Object(batch_id="batch that the token names", query_id="query that the token names"),
            "there is nothing to commit",
        ),
        lambda each: each.request and each.request.batch,
    ),
    messages=["a sentence about the situation"],
    options=AnyNames(AnyNames("value of this option of the query's source or sink")),
    refused=OrNull(FINDING, "nothing was refused"),
)
FENCED: Object[Inspection] = Object(
    application_id="the transactional id",
    group_id="consumer group of the query",
    fenced="whether older producers were fenced; false = only shown, because --yes is missing",
    token=Value(
        OrNull(TOKEN, "Kafka holds no token"),
        lambda each: _token(None if each.kafka is None else each.kafka.token),
    ),
    pending=Value(
        "whether an unfinished transaction is about to change the group's offsets",
        lambda each: each.kafka and each.kafka.pending,
    ),
)
INSPECTION: Object[Inspection] = Object(
    application_id="the transactional id",
    group_id="consumer group of the query",
    checkpoint=OrNull(CHECKPOINT, "no checkpoint was named"),
    kafka=OrNull(KAFKA, "no brokers were named, or none answered"),
    staged=[STAGED],
    findings=[FINDING],
)
HEADERS = Optional(
    [
        Object(
            key="name of the header",
            value=Optional("its value as text"),
            value_base64=Optional("its value, if that is not UTF-8"),
        )
    ]
)
LETTER: Object[Any] = Object(
    topic="the dead-letter topic",
    partition="number of the partition",
    offset="offset of the letter",
    timestamp_ms="when it was written, ms since 1970",
    error="class of the error; null = the record is no dead letter",
    message="the reason",
    origin_topic="topic from which the record was read; null = not known",
    origin_partition="its partition there; null = not known",
    origin_offset="its offset there; null = not known",
    origin_timestamp_ms="its timestamp, ms since 1970; null = not known",
    application_id="the query",
    batch="micro-batch that wrote the letter; null = a batch write",
    holds="`input`: key and value of the record that was read; `output`: of a row that the query made",
    target_topic="topic for which the row was meant; null = none was named",
    target_partition="partition for which the row was meant; null = none was named",
    sink="sink outside Kafka that cannot hold the row; null = Kafka cannot, or the row is marked",
    value_bytes="original size of a value of which the letter has the beginning; null = it is complete",
    key=Optional("its key as text; null = no key"),
    key_base64=Optional("its key, if that is not UTF-8; then `key` is absent"),
    value=Optional("its value as text; null = a tombstone"),
    value_base64=Optional("its value, if that is not UTF-8; then `value` is absent"),
    headers=HEADERS,
)
REPLAY: Object[Outcome] = Object(
    group_id="consumer group that remembers what was sent",
    sent="whether the records were sent; false = only shown, because of --dry-run",
    records=Value("number of records", lambda each: each.sent.total()),
    topics=Value(AnyNames("number of records for this topic"), lambda each: each.sent),
    refused=AnyNames("number of letters that cannot be sent for this reason"),
    missing_topics=["topic that letters name and that does not exist"],
    unselected="number of letters that the filters do not select",
    expired_offsets=Value(
        "number of offsets that retention deleted before this group read them", lambda each: each.expired
    ),
    waiting_offsets=Value("number of offsets that wait for an open transaction", lambda each: each.waiting),
    new_group="whether the group had no offsets, so that the replay starts at the first letter",
)
SINK_ACTION: Object[Any] = Object(
    sink="name of the sink",
    id="sink transaction id",
    application_id="the query's application.id",
    cluster_id="Kafka's id of the cluster that commits the query's transactions",
    action="`commit` or `abort`",
    done="whether the sink did it; false = only shown, because --yes is missing",
)
RIGHT: Object[Grant] = Object(
    principal="who needs the right, such as `User:sink`",
    part=Value("the part of the query, or the command", lambda each: each.need.part),
    other_cluster=Value(
        "whether it is needed on the cluster of the topics read, not on the sink's",
        lambda each: each.elsewhere,
    ),
    operation=Value("Kafka's name of the right", lambda each: each.need.title),
    resource=Value("`topic`, `group`, `transactional id` or `cluster`", lambda each: each.need.kind),
    name=Value("name of the resource", lambda each: each.need.name),
    prefixed=Value("whether the name is a prefix", lambda each: each.need.prefixed),
    purpose=Value("what it is for", lambda each: each.need.purpose),
    without=Value(
        "what happens without it; null = the part ends with an error", lambda each: each.need.without or None
    ),
)
CHECKED: Object[Checked] = Object(
    check="name of the check",
    severity=Value("`ok`, `note`, `warning` or `bad`", lambda each: each.severity.value),
    what="what was found",
    why=Value("why it matters; null = nothing is wrong", lambda each: each.why or None),
    fix=Value("what to do; null = nothing", lambda each: each.fix or None),
    repair=Value("what --fix does about it; null = nothing", lambda each: each.repair and each.repair.what),
)
LAG: Object[PartitionLag] = Object(
    topic=Value("name of the topic", lambda each: each.tp.topic),
    partition=Value("number of the partition", lambda each: each.tp.partition),
    committed="next offset that the group reads",
    end="last stable offset",
    lag="offsets between the two",
    open_transaction=Value("whether a transaction is open in the partition", lambda each: each.is_open),
)
GROUP_LAG: Object[GroupLag] = Object(
    group=Value("the consumer group", lambda each: each.group_id),
    at=Value(
        "when it was measured, ISO 8601",
        lambda each: datetime.fromtimestamp(each.at_seconds, timezone.utc).isoformat(timespec="milliseconds"),
    ),
    lag=Value("sum over all partitions", lambda each: each.total),
    partitions=[LAG],
)
DATABASE: Object[LocalShard] = Object(
    application_id=Value("the query", lambda each: each.folder.application_id),
    store=Value("name of the store", lambda each: each.folder.store),
    shard=Value("number of the shard", lambda each: each.folder.shard),
    shards=Value(
        "number of all shards; null = the database cannot be read",
        lambda each: each.identity and each.identity.shards,
    ),
    path=Value("folder of the database", lambda each: str(each.folder.path)),
    batch=Value("batch whose state it has; null = none", lambda each: each.batch and each.batch.batch_id),
    next_offset="changelog offset from which to continue; null = not recorded",
    pending=["batch whose changes wait for their token"],
    bytes=Value("size of its files", lambda each: each.size_bytes),
    problem=Value("why it cannot be read; null = it can", lambda each: each.problem or None),
)
CHANGELOG: Object[ChangelogShard] = Object(
    store="name of the store",
    topic=Value("changelog topic", lambda each: each.tp.topic),
    partition=Value("number of the shard", lambda each: each.tp.partition),
    earliest=Value("first offset of the log", lambda each: each.log.earliest),
    stable=Value("last stable offset", lambda each: each.log.stable),
    log_end=Value("end of the log", lambda each: each.log.end),
    committed="committed offset; null = none",
    lag="offsets from the committed one to the end",
    batch=Value(
        "batch of the committed offset; null = none", lambda each: each.token and each.token.batch_id
    ),
    problem=Value("why its token cannot be decoded; null = it can", lambda each: each.problem or None),
)
LOWERED: Object[LoweredShard] = Object(
    shard="number of a shard whose recorded time was later",
    recorded_ms=Value("that time, ms since the epoch", lambda each: each.was_ms),
)
PROGRESS: Object[Progress] = Object(
    stage="`copy` or `fill`",
    records="records that this run of the command has committed",
    bytes=Value("size of their keys and values", lambda each: each.size_bytes),
    slices="number of transactions",
    offsets_done=Value("offsets that are processed", lambda each: each.done),
    offsets_total=Value("all offsets of the stage", lambda each: each.total),
    seconds=Value("duration of the stage, s", lambda each: round(each.seconds, 3)),
    left_seconds=Value(
        "estimated remaining duration, s; null = unknown",
        lambda each: None if each.left_seconds is None else round(each.left_seconds, 3),
    ),
)
RESTORED: Object[RestoredShard] = Object(
    shard="number of the shard",
    batch=Value("batch whose state it has now", lambda each: each.batch_id),
    snapshot=Value(
        "changelog offset of the snapshot with which it began; null = not with one",
        lambda each: each.snapshot_offset,
    ),
    records="number of changelog records read",
    promoted="whether its pending batch was the committed one",
    wiped="why the old database was discarded; null = it was not",
    ms=Value("duration, ms", lambda each: round(each.ms)),
)
VERIFIED: Object[Verified] = Object(
    shard="number of the shard",
    batch=Value("batch that was compared; null = none", lambda each: each.batch_id),
    offset=Value("changelog offset up to which both were read", lambda each: each.end),
    entries="number of entries in the changelog",
    differing="number of keys that differ",
    differences=[
        Object(
            kind=Value("how the key differs", lambda each: each.kind.value),
            key=Value("the key, hexadecimal", lambda each: each.key.hex()),
        )
    ],
)
TOKEN_TOPIC: Object[TokenTopicDescription] = Object(
    topic=Value("name of the topic", lambda each: each.topic.name),
    topic_id=Value("Kafka's id of the topic", lambda each: each.topic.topic_id),
    config=AnyNames("value of this property"),
    application_ids="number of queries with a record",
    records=Value("number of records, including outdated ones", lambda each: each.survey.records),
    bytes=Value("size of these records", lambda each: each.survey.size_bytes),
    partitions=Value([LOG], lambda each: sorted(each.logs.items())),
    warnings=Value(["a sentence about its configuration"], lambda each: each.topic.warnings),
)
TOPIC: Object[TopicDescription] = Object(
    topic=Value("name of the topic", lambda each: each.name),
    topic_id="Kafka's id of the topic",
    replication_factor="number of replicas of each partition",
    partitions=Value([LOG], lambda each: sorted(each.logs.items())),
    config=AnyNames("value of this property"),
)
VIEW: Object[Any] = Object(
    application_id="the transactional id; empty = not known",
    query_id="Spark's id of the query; empty = no batch was committed",
    run_id="Spark's id of the run",
    at="when the view was made, ISO 8601",
    status="`running`, `waiting for data`, `waiting`, `retrying`, `failed`, `stopped`, `not on this host`",
    status_since="since when, ISO 8601; null = not known",
    status_text="what it waits for, or why it failed",
    read_per_second="offsets read per second, over the last minute",
    records_per_second="records written per second, over the last minute",
    lag=AnyNames(
        Object(
            offsets="offsets behind in this topic",
            seconds="how long the oldest of them has been there, s",
            at_least="whether it may have been there longer",
            partitions=AnyNames("offsets behind in this partition"),
        )
    ),
    sources=["what a source reads"],
    batches=[
        Object(
            batch_id="Spark's id of the batch",
            outcome="how its commit ended",
            ended_at="when, ISO 8601",
            seconds=AnyNames("duration of this group of steps, s"),
            offsets_read="offsets read",
            records="records written",
            changes="changes of the state",
            retried="number of tries that failed",
        )
    ],
    totals=AnyNames("sum over this run"),
    totals_since="when its first batch began, ISO 8601; null = no batch",
    sinks=AnyNames(AnyNames("sum over this run")),
    token_at="when the newest transaction was committed, ISO 8601; null = not known",
    sequence="sequence number of the newest token; null = not known",
    pressure="uncommitted state of the fullest shard, as a fraction of its limit",
    processor_counts=AnyNames("what stateful processors counted, such as `late_rows`"),
    events=[Object(at="when, ISO 8601", kind="kind of the event", text="what happened")],
)


# -- what each command prints


#: What a command prints if it fails with exit code 1.
ERROR: Object[Any] = Object(
    error=Object(
        condition="name of the error condition",
        message="what happened",
        fix="what to do; null = the message says it",
    )
)
#: What each command prints if it succeeds, by the command's name.
SHAPES: Mapping[str, Shape | Lines] = {
    "acls": Object(looked_up="whether topics were looked up in the query's group", rights=[RIGHT]),
    "adopt": ADOPTION,
    "broker": Object(
        bootstrap_servers="address of the brokers; printed once they answer", directory="folder with the data"
    ),
    "completion": Object(shell="name of the shell", script="the script", install="how to install it"),
    "dead-letters list": Lines(LETTER),
    "dead-letters replay": REPLAY,
    "demo": Object(
        events="number of events",
        batches="number of micro-batches of the exactly-once query",
        kills=[Object(seconds="time of the kill, since the start", cause="where the driver was killed")],
        outputs=AnyNames(
            Object(
                exactly_once="whether the output is exactly the expected one",
                expected="number of rows that should be in the output",
                found="number of rows in the output",
                missing="rows that are missing",
                doubled="rows that are there too often",
                foreign="rows that should not be there",
            )
        ),
        picture="path of the picture",
    ),
    "doctor": Object(
        severity="highest severity of all findings: `ok`, `note`, `warning` or `bad`",
        findings=[CHECKED],
        repairs=[
            Object(
                repair="what --fix did",
                done="whether it succeeded",
                problem="why it failed; null = it did not",
            )
        ],
    ),
    "fence": FENCED,
    "flights": Object(
        topic="name of the topic", records="number of records sent", partitions="number of partitions"
    ),
    "inspect": INSPECTION,
    "lag": Lines(GROUP_LAG),
    "metrics": Object(url="where Prometheus finds the metrics"),
    "produce": Object(topic="name of the topic", records="number of records sent"),
    "sinks abort": SINK_ACTION,
    "sinks commit": SINK_ACTION,
    "sinks list": [
        Object(
            sink="name of the sink",
            id="sink transaction id",
            application_id="the query's application.id",
            cluster_id="Kafka's id of the cluster that commits the query's transactions",
            fate="what the next start of the query does: `commit`, `abort` or `leave`",
            needs_a_person="whether no token decides its fate",
        )
    ],
    "state get": Lines(
        AnyNames("field of the row; `key` and `value` are objects with a field for each column")
    ),
    "state list": Object(local=[DATABASE], changelogs=[CHANGELOG]),
    "state lower-time": Object(
        application_id="the query",
        store="name of the store",
        time_ms="time of this machine, ms since the epoch",
        lowered="whether the command lowered recorded times to it",
        shards=[LOWERED],
    ),
    "state rescale": Object(
        application_id="the query",
        store="name of the store",
        shards="wanted number of shards",
        next_stage="`copy`, `remake`, `fill`, `clean`, or `done`",
        moved="whether the command moved the state",
        steps=["a sentence about a step of the move"],
        progress=[PROGRESS],
    ),
    "state restore": Object(
        application_id="the query",
        store="name of the store",
        shards=[
            Object(
                shard="number of the shard",
                batch="batch that Kafka holds; null = none",
                offset="committed end of the changelog",
            )
        ],
        restored=[RESTORED],
    ),
    "state verify": [VERIFIED],
    "sweep": SWEEP,
    "tail": Lines(
        Object(
            topic="name of the topic",
            partition="number of the partition",
            offset="offset of the record",
            timestamp_ms="its timestamp, ms since 1970; null = none",
            key=Optional("its key as text; null = no key"),
            key_base64=Optional("its key, if that is not UTF-8; then `key` is absent"),
            value=Optional("its value as text; null = a tombstone"),
            value_base64=Optional("its value, if that is not UTF-8; then `value` is absent"),
            headers=HEADERS,
            state="`committed`, `open` or `aborted`",
        )
    ),
    "token-topic create": Object(
        topic="name of the topic",
        topic_id="Kafka's id of the topic; null = it does not exist, and --yes is missing",
        created="whether the command created it",
        warnings=["a sentence about its configuration"],
    ),
    "token-topic describe": TOKEN_TOPIC,
    "token-topic forget": Object(
        topic="name of the topic", records=[ENTRY], deleted="whether the record was deleted"
    ),
    "token-topic restore": Object(
        group_id="consumer group of the query",
        record=Object(**_RECORD),
        restored="whether the group was changed",
    ),
    "token-topic show": [ENTRY],
    "top": Lines(VIEW),
    "topics create": [Object(topic="name of the topic", created="false = it existed already")],
    "topics describe": TOPIC,
    "topics list": [Object(topic="name of the topic", partitions="number of partitions")],
}


def documentation() -> str:
    """Returns the text of docs/cli-json.md."""
    parts = [
        "<!-- written by python -m kafka_eos_source.operate.json_documents -->",
        "A command that fails with exit code 1 prints this; with exit code 2, it prints nothing in JSON:",
        rendered(ERROR),
    ]
    for name, shape in sorted(SHAPES.items()):
        lines = isinstance(shape, Lines)
        parts.append(f"**`kafka-eos {name} --json`**{', one document on each line' if lines else ''}")
        parts.append(rendered(shape.shape if isinstance(shape, Lines) else shape))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    (Path(__file__).parents[2] / "docs" / "cli-json.md").write_text(documentation(), encoding="utf-8")

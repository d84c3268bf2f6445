"""The commit token: the last link of a query's chain of transactions, stored in Kafka.

Each transaction commits its token together with its records, so the token, and not Spark's log, shows what
Kafka holds. Three forms are stored:

* The **full token** is the metadata of offsets in the consumer group of the query: of the anchor partition,
  of the first source partition and of the changelog partitions. `Token` describes it.
* A short **mark** is the metadata of every other source partition. It names the application and the sequence
  number of the transaction, so that an offset that another program moved is recognised by its missing mark.
* A **token record** is written to the token topic, if the query has one. `TokenRecord` describes it.

Tokens form a chain: each one carries a sequence number, one higher than that of the token before it, and the
digests of the offset log entries where its micro-batch starts and ends.

Tokens, token records and identity files name the version of this package that wrote them, under the key
``by``. Every later format keeps this key, so that an older version can read it although it can read nothing
else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kafka_eos_source.errors import NewerVersionError, OperatorError, StateError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

if TYPE_CHECKING:
    import pyarrow as pa

#: Format of the tokens that this version writes and reads. A token that lacks a key is damaged; unknown keys
#: are ignored.
FORMAT = 1
_TOKEN_START = '{"kafka-eos":'
_MARK = re.compile(r"kafka-eos:([0-9a-f]{12}):([0-9]{1,19})")

#: Key of the text that replaces the token while an operator's state is moved to other shards. No query may
#: commit then.
MOVING = "moving"

#: Key of the version in JSON that this package writes.
BY = "by"
_PACKAGE = "kafka-eos-source"


@dataclass(frozen=True)
class ShardProgress:
    """The part of a token on a changelog partition that describes the shard's state.

    Attributes:
        task_attempt_id: the operator's task attempt whose changes are in the changelog. Pending changes of
            any other attempt must never be applied.
        time_ms: processing time of the batch in this shard, in ms since the epoch.
        event_time_ms: largest event time that any shard of the operator has seen; None if there is none.
        counts: the counters of the shard's processor over all batches (for example ``late_rows``).
        log_start: first offset of the changelog when a person accepted that its beginning is lost
            (``onMissingState``); 0 = the state needs the whole changelog.
    """

    task_attempt_id: str
    time_ms: int
    event_time_ms: int | None
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)
    log_start: int = 0


@dataclass(frozen=True)
class Due:
    """When the operators of a query need a micro-batch, even if no records arrive.

    Attributes:
        at_ms: earliest processing time that a shard requested, in ms since the epoch.
        clock_ms: processing time of the batch in that shard: what the clock of its host showed.
    """

    at_ms: int
    clock_ms: int


@dataclass(frozen=True)
class PreparedSinks:
    """The sinks outside Kafka that prepared this batch, and must commit it because the token exists.

    Attributes:
        sink_transaction_id: the random part of the id of the prepared work (`SinkTxn.attempt`).
        names: names of the sinks that had rows.
        digests: what each sink must find when it commits (`Ok.digest`), by its name, if it returned one.
    """

    sink_transaction_id: str
    names: tuple[str, ...]
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, list[str]]:
        """Returns the members of a token's JSON object, the digests in the order of the names."""
        found = {"sinks": [self.sink_transaction_id, *self.names]}
        if self.digests:
            found["digests"] = [self.digests.get(name, "") for name in self.names]
        return found


#: The sinks of a token that a person wrote (``onMissingToken``, ``kafka-eos adopt``). Such a token does not
#: tell sinks to commit anything.
UNDECIDED = PreparedSinks("?", ())


#: Stands for Spark's run id in a token that ``kafka-eos adopt`` wrote.
ADOPTED = "kafka-eos adopt"


@dataclass(frozen=True)
class Token:
    """One committed transaction of a query.

    Attributes:
        application_id: the transactional id that committed it.
        query_id: Spark's id of the query (from the checkpoint), or the identity of a series of batch writes.
        run_id: Spark's id of the run, "" if it is not known.
        sequence: one higher for each transaction of the application, 0 for the genesis token. Spark's batch
            ids can go back after a checkpoint was restored; sequence numbers never do.
        batch_id: Spark's batch id, or ``txnVersion``.
        start_digest, end_digest: digests of the offset log entries before and of this batch.
        rows: number of records written.
        target: digest of where the rows of the batch go (`identity.target`). Offsets show that Kafka holds a
            batch only if the token's target is that of the batch.
        cluster_id: Kafka's id of the cluster that committed it. Tools that mirror a cluster copy the offsets
            of groups with their metadata, at another time than the records. "" = not known.
        partitions: how many partitions, the anchor among them, got an offset in the transaction; -1 = not
            known. Fewer marks with the token's sequence number in the group mean that offsets were deleted.
        transaction_number: how many transactions this commit call began for the batch, this one included.
        shard: on a changelog partition only.
        shards: on a changelog partition only: number of shards of the operator. Partitions that somebody adds
            to the changelog do not change it.
        in_read: on a changelog partition only: whether the tasks that read Kafka run the operator.
        sinks: None if no sink outside Kafka took part.
        due: None if no operator requested a micro-batch.
        unproven_since: the first batch that may have been written with ``at_least_once`` since this token,
            which such batches do not replace; -1 = there is none.
    """

    application_id: str
    query_id: str
    run_id: str
    sequence: int
    batch_id: int
    start_digest: str
    end_digest: str
    rows: int
    target: str = ""
    cluster_id: str = ""
    transaction_number: int = 1
    partitions: int = -1
    shard: ShardProgress | None = None
    shards: int = -1
    in_read: bool = False
    sinks: PreparedSinks | None = None
    due: Due | None = None
    unproven_since: int = -1

    def encode(self) -> str:
        """Returns compact JSON: mostly less than 1 KB, at most 4096 bytes, which is what brokers accept."""
        return json.dumps({**self.to_json(), BY: package_version()}, separators=(",", ":"))

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of `encode` without the version of the package, which is the writer's."""
        return {
            "kafka-eos": FORMAT,
            "app": self.application_id,
            "query": self.query_id,
            "run": self.run_id,
            "seq": self.sequence,
            "batch": self.batch_id,
            "start": self.start_digest,
            "end": self.end_digest,
            "rows": self.rows,
            "target": self.target,
            "cluster": self.cluster_id,
            "txn": self.transaction_number,
            "parts": self.partitions,
            **({} if self.sinks is None else self.sinks.to_json()),
            **({} if self.shard is None else {"shard": list(astuple(self.shard))}),
            **({} if self.shards < 0 else {"shards": self.shards}),
            **({"in_read": True} if self.in_read else {}),
            **({} if self.due is None else {"due": list(astuple(self.due))}),
            **({} if self.unproven_since < 0 else {"unproven": self.unproven_since}),
        }

    @classmethod
    def decode(cls, metadata: str) -> Token | None:
        """Reads the full token in an offset's metadata.

        Returns:
            None if the metadata holds no full token: a mark, or another program's text.

        Raises:
            NewerVersionError: if the token has a newer format. It never counts as "no token".
            OperatorError: if the token is damaged.
            StateError: if the state of an operator is being moved to other shards (`state.changelog.move`).
        """
        text = metadata.rstrip("\0")
        if not text.startswith(_TOKEN_START):
            return None
        try:
            found = parse_json(text)
            if MOVING in found:
                raise StateError(
                    f"the state of store {found[MOVING]['store']!r} is being moved to {found[MOVING]['to']} "
                    "shards: `kafka-eos state rescale` was started and did not finish.",
                    fix="run that command again with the same number of shards; it continues where it "
                    "stopped.",
                )
            _check_format(found)
            return cls(
                application_id=found["app"],
                query_id=found["query"],
                run_id=found["run"],
                sequence=int(found["seq"]),
                batch_id=int(found["batch"]),
                start_digest=found["start"],
                end_digest=found["end"],
                rows=int(found["rows"]),
                target=str(found["target"]),
                cluster_id=str(found["cluster"]),
                transaction_number=int(found["txn"]),
                partitions=int(found.get("parts", -1)),
                shard=ShardProgress(*found["shard"]) if "shard" in found else None,
                shards=int(found.get("shards", -1)),
                in_read=bool(found.get("in_read", False)),
                sinks=_sinks(found["sinks"], found.get("digests")) if "sinks" in found else None,
                due=_due(*found["due"]) if "due" in found else None,
                unproven_since=int(found.get("unproven", -1)),
            )
        except SHAPE_ERRORS as error:
            raise OperatorError(
                f"the token in Kafka is damaged ({error!r}): {text}",
                fix="find out which program commits offsets to this group.",
            ) from error


@dataclass(frozen=True)
class Mark:
    """Proof that a transaction of this package committed an offset.

    Attributes:
        application: hash of the application id, 12 hex digits (`application_hash`).
        sequence: sequence number of the transaction.
    """

    application: str
    sequence: int

    @classmethod
    def of(cls, token: Token) -> Mark:
        """Returns the mark of the transaction that a token describes."""
        return cls(application_hash(token.application_id), token.sequence)

    def encode(self) -> str:
        """Returns text of less than 50 bytes, so that one request can commit thousands of partitions."""
        return f"kafka-eos:{self.application}:{self.sequence}"

    @classmethod
    def decode(cls, metadata: str) -> Mark | None:
        """Reads the mark of an offset, or derives it from a full token.

        Returns:
            None if the metadata holds neither, because another program committed the offset.

        Raises:
            OperatorError, StateError: see `Token.decode`.
        """
        text = metadata.rstrip("\0")
        found = _MARK.fullmatch(text)
        if found:
            return cls(found[1], int(found[2]))
        token = Token.decode(text)
        return None if token is None else cls.of(token)


@lru_cache(maxsize=64)
def application_hash(application_id: str) -> str:
    """Returns the name of an application in marks: the first 48 bits of the SHA-256 of its id, in hex."""
    return hashlib.sha256(application_id.encode()).hexdigest()[:12]


def newest(offsets: Iterable[GroupOffset], application_id: str | None = None) -> Token | None:
    """Returns the newest token. Partitions that the last transaction did not touch carry older tokens.

    Of the tokens of one transaction, it is the one that is not on a changelog partition, because only that
    one has `Token.partitions`.

    Args:
        offsets: the committed offsets of a consumer group.
        application_id: only tokens of this application count; None means any application.

    Returns:
        None if there is no token.
    """
    tokens = [token for each in offsets if (token := Token.decode(each.metadata)) is not None]
    own = [token for token in tokens if application_id in (None, token.application_id)]
    return max(own, key=lambda token: (token.sequence, token.shard is None), default=None)


def number_of_shards(tokens: Iterable[Token | None]) -> int | None:
    """Returns the number of shards whose state a changelog holds, which its newest token names.

    Args:
        tokens: the tokens of the changelog's partitions; None for a partition without one.

    Returns:
        None if no partition has a token.
    """
    known = [token for token in tokens if token is not None and token.shards > 0]
    return max(known, key=lambda token: token.sequence).shards if known else None


def digest(parts: Iterable[str]) -> str:
    """Returns 64 bits of SHA-256 over these texts, in hex: enough to distinguish two plans of one batch."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _check_format(found: Mapping[str, object]) -> None:
    """Checks the format of a token's JSON.

    Raises:
        NewerVersionError: if a newer version of this package wrote it.
        ValueError: if no version did.
    """
    version = found["kafka-eos"]
    if type(version) is int and version > FORMAT:
        raise newer_version("the token in Kafka", found, version, FORMAT)
    if type(version) is not int or version != FORMAT:
        raise ValueError(f"format {version!r}")


def _due(at_ms: object, clock_ms: object) -> Due:
    return Due(int(str(at_ms)), int(str(clock_ms)))


def _sinks(found: list[str], digests: list[str] | None) -> PreparedSinks:
    sink_transaction_id, *names = map(str, found)
    if digests is None:
        return PreparedSinks(sink_transaction_id, tuple(names))
    if not isinstance(digests, list):
        raise TypeError(f"digests {digests!r}")
    by_name = {name: str(digest) for name, digest in zip(names, digests, strict=True) if digest}
    return PreparedSinks(sink_transaction_id, tuple(names), by_name)


# -- the record in the token topic ----------------------------------------------------------------------

#: Format of the records that this version writes and reads. The token inside has a format of its own.
RECORD_FORMAT = 1
_FORMAT_KEY = "kafka-eos-record"
#: Keys of a record. It must have the first set, may have the second, and has no other key: whoever adds a key
#: raises the format.
_REQUIRED = frozenset({_FORMAT_KEY, BY, "token", "group", "anchor", "topic-id", "partition", "time", "ends"})
_OPTIONAL = frozenset({"shards", "in-read"})
_LONG_MAX = 2**63 - 1


@dataclass(frozen=True)
class TokenRecord:
    """The record of one query in the token topic: its newest token and every offset committed with it.

    A consumer group can be deleted, and Kafka forgets the offsets of a group that nobody uses. The token
    topic is compacted, so its record of a query stays. The commit writes the record in the transaction of the
    batch, which makes it exactly as new as the token in the group.

    The key of the record is the ``application.id``. Its value is compact JSON::

        {"kafka-eos-record":1, "by":"1.2.0", "token":"<text of the token>", "group":"orders",
         "anchor":["out",0], "topic-id":"<id of the token topic>", "partition":0, "time":1760000000123,
         "ends":{"in":[[0,120,98,131],[7,55]]},
         "shards":{"orders-counts-changelog":[[0,"<task attempt>",1760000000000,null,{},0]]},
         "in-read":["orders-counts-changelog"]}

    ``ends`` holds runs of partitions: ``[7,55]`` is partition 7 at offset 55, and ``[0,120,98,131]`` are the
    partitions 0, 1 and 2. The record of a topic with 4,000 partitions has 44 KB.

    Attributes:
        token: the token of the newest transaction.
        ends: every offset that the transaction committed in the group: the end offsets of the source
            partitions, the anchor, and the changelog partitions.
        anchor: the partition that carries the full token in the group.
        group_id: the group.
        topic_id: Kafka's id of the token topic that the record was written to. A record that was copied to
            another topic still names the first one.
        partition: partition of the token topic that the record was written to.
        time_ms: when the record was written, by the clock of the committing process, in ms since the epoch.
            It is for people; no decision depends on it.
        shards: progress of the shards of stateful operators, by changelog partition.
        in_read: changelog topics of the operators that run in the tasks that read Kafka.
    """

    token: Token
    ends: Mapping[TopicPartition, int] = field(hash=False)
    anchor: TopicPartition
    group_id: str
    topic_id: str
    partition: int
    time_ms: int
    shards: Mapping[TopicPartition, ShardProgress] = field(default_factory=dict, hash=False)
    in_read: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        token: Token,
        offsets: Iterable[GroupOffset],
        anchor: TopicPartition,
        group_id: str,
        topic_id: str,
        partition: int,
        time_ms: int,
    ) -> TokenRecord:
        """Returns the record of a transaction.

        Args:
            token: the token of the transaction.
            offsets: all offsets that the transaction commits in the group, with their metadata.
            anchor: the partition that carries the full token in the group.
            group_id: the group.
            topic_id, partition: where the record is written.
            time_ms: the time now, in ms since the epoch.
        """
        ends: dict[TopicPartition, int] = {}
        shards: dict[TopicPartition, ShardProgress] = {}
        in_read: set[str] = set()
        for each in offsets:
            ends[each.tp] = each.offset
            own = Token.decode(each.metadata)
            if own is not None and own.shard is not None:
                shards[each.tp] = own.shard
                if own.in_read:
                    in_read.add(each.tp.topic)
            elif own is not None and each.tp == anchor:
                token = own  # as the group holds it
        return cls(token, ends, anchor, group_id, topic_id, partition, time_ms, shards, frozenset(in_read))

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return self.token.application_id.encode()

    def encode(self) -> bytes:
        """Returns the value of the record."""
        fields: dict[str, Any] = {
            _FORMAT_KEY: RECORD_FORMAT,
            BY: package_version(),
            "token": self.token.encode(),
            "group": self.group_id,
            "anchor": list(self.anchor),
            "topic-id": self.topic_id,
            "partition": self.partition,
            "time": self.time_ms,
            "ends": _runs(self.ends),
        }
        if self.shards:
            fields["shards"] = {
                topic: [[tp.partition, *astuple(self.shards[tp])] for tp in partitions]
                for topic, partitions in _by_topic(self.shards)
            }
        if self.in_read:
            fields["in-read"] = sorted(self.in_read)
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, key: bytes, value: bytes) -> TokenRecord:
        """Reads a record. A record that is not exactly as `encode` writes it is refused, never guessed at.

        Raises:
            NewerVersionError: if the record, or the token in it, has a newer format.
            OperatorError: if the record is damaged.
        """
        try:
            found = parse_json(value)
            version = _whole(found[_FORMAT_KEY])
            if version <= RECORD_FORMAT:
                return _parsed(key, found)
        except SHAPE_ERRORS as error:
            raise OperatorError(
                f"the record of {_shown(key)} in the token topic is damaged ({error!r}): "
                f"{value[:200].decode(errors='replace')}",
                fix="find out which program writes to the token topic, and let only kafka-eos do so.",
            ) from error
        raise newer_version(f"the record of {_shown(key)} in the token topic", found, version, RECORD_FORMAT)

    def group_offsets(self) -> dict[TopicPartition, GroupOffset]:
        """Returns the offsets of the group after the transaction, each with its token or mark."""
        mark = Mark.of(self.token).encode()
        full = self.token.encode()
        numbers = Counter(tp.topic for tp in self.shards)  # every transaction names all shards of an operator

        def metadata(tp: TopicPartition) -> str:
            if tp in self.shards:
                # only tokens on source partitions store the number of partitions
                of_shard = replace(self.token, shard=self.shards[tp], shards=numbers[tp.topic])
                return replace(of_shard, partitions=-1, in_read=tp.topic in self.in_read).encode()
            return full if tp == self.anchor else mark

        return {tp: GroupOffset(tp, end, metadata(tp)) for tp, end in self.ends.items()}


def record_batch(record: TokenRecord) -> pa.RecordBatch:
    """Returns the record as rows that `kafka.producer.RecordProducer.send` accepts.

    The batch has one row, so ``producer.enqueued`` grows by 1.
    """
    return _row(record.key, record.encode(), record.partition)


def tombstone_batch(key: bytes, partition: int) -> pa.RecordBatch:
    """Returns a tombstone as rows that `kafka.producer.RecordProducer.send` accepts."""
    return _row(key, None, partition)


def _row(key: bytes, value: bytes | None, partition: int) -> pa.RecordBatch:
    import pyarrow as pa  # processes that only read tokens start faster without it

    return pa.record_batch(
        {
            "key": pa.array([key], pa.binary()),
            "value": pa.array([value], pa.binary()),
            "partition": pa.array([partition], pa.int32()),
        }
    )


def _parsed(key: bytes, found: Mapping[str, Any]) -> TokenRecord:
    """Builds the record from its JSON. Any exception means that the record is damaged."""
    if found[_FORMAT_KEY] != RECORD_FORMAT or not _REQUIRED <= found.keys() <= _REQUIRED | _OPTIONAL:
        raise ValueError(f"format {found[_FORMAT_KEY]} with the keys {sorted(found)}")
    token = Token.decode(_string(found["token"]))
    if token is None:
        raise ValueError("it contains no token")
    if token.application_id.encode() != key:
        raise ValueError(f"its token belongs to application.id={token.application_id!r}")
    topic, partition = found["anchor"]
    record = TokenRecord(
        token=token,
        ends=_ends(found["ends"]),
        anchor=TopicPartition(_string(topic), _whole(partition)),
        group_id=_string(found["group"]),
        topic_id=_string(found["topic-id"]),
        partition=_whole(found["partition"]),
        time_ms=_integer(found["time"]),
        shards=_shards(found.get("shards", {})),
        in_read=_in_read(found["in-read"]) if "in-read" in found else frozenset(),
    )
    if not record.in_read <= {tp.topic for tp in record.shards}:
        raise ValueError("an operator in the read has no shard")
    if not record.shards.keys() <= record.ends.keys():
        raise ValueError("a shard has no offset")
    return record


def _by_topic(partitions: Iterable[TopicPartition]) -> Iterable[tuple[str, list[TopicPartition]]]:
    for topic, own in groupby(sorted(partitions), key=lambda tp: tp.topic):
        yield topic, list(own)


def _runs(ends: Mapping[TopicPartition, int]) -> dict[str, list[list[int]]]:
    """Returns offsets by topic as runs of partitions: the first partition, then one offset for each."""
    found: dict[str, list[list[int]]] = {}
    for topic, partitions in _by_topic(ends):
        runs: list[list[int]] = []
        for tp in partitions:
            if not runs or tp.partition != runs[-1][0] + len(runs[-1]) - 1:
                runs.append([tp.partition])
            runs[-1].append(ends[tp])
        found[topic] = runs
    return found


def _ends(found: Mapping[str, list[list[int]]]) -> dict[TopicPartition, int]:
    ends: dict[TopicPartition, int] = {}
    for topic, runs in found.items():
        for first, *offsets in runs:
            for number, offset in enumerate(offsets, _whole(first)):
                tp = TopicPartition(topic, number)
                if tp in ends:
                    raise ValueError(f"{tp} occurs twice")
                ends[tp] = _whole(offset)
    return ends


def _shards(found: Mapping[str, list[list[Any]]]) -> dict[TopicPartition, ShardProgress]:
    shards: dict[TopicPartition, ShardProgress] = {}
    for topic, rows in found.items():
        for partition, task_attempt_id, time_ms, event_time_ms, counts, log_start in rows:
            tp = TopicPartition(topic, _whole(partition))
            if tp in shards:
                raise ValueError(f"shard {tp} occurs twice")
            shards[tp] = ShardProgress(
                _string(task_attempt_id),
                _integer(time_ms),
                None if event_time_ms is None else _integer(event_time_ms),
                {name: _integer(count) for name, count in counts.items()},
                _whole(log_start),
            )
    return shards


def _in_read(found: list[str]) -> frozenset[str]:
    topics = frozenset(map(_string, found))
    if not topics or found != sorted(topics):
        raise ValueError(f"operators in the read are {found!r}")
    return topics


def _integer(found: object) -> int:
    if type(found) is not int or abs(found) > _LONG_MAX:
        raise ValueError(f"{found!r} is not an integer of 64 bits")
    return found


def _whole(found: object) -> int:
    number = _integer(found)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def _string(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is not a string")
    return found


def _shown(key: bytes) -> str:
    return f"application.id={key[:300].decode(errors='replace')!r}"


# -- the version that wrote something -------------------------------------------------------------------


@lru_cache(maxsize=1)
def package_version() -> str:
    """Returns the version of this package; "" if it runs from a folder that is not installed."""
    from importlib import metadata  # takes 7 ms, and only a commit needs it

    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


def writer_of(found: object) -> str:
    """Returns the version that wrote this JSON, for messages about what only a newer version can read."""
    by = found.get(BY) if isinstance(found, dict) else None
    return f"kafka-eos {by}" if isinstance(by, str) and by else "a newer version of kafka-eos"


def newer_version(what: str, found: object, version: object, readable: int) -> NewerVersionError:
    """Returns the error for something that a newer version of this package wrote.

    Args:
        what: what was found, for the message.
        found: the JSON that was read.
        version: its format.
        readable: the newest format that this version reads.
    """
    writer = writer_of(found)
    own = f"kafka-eos {package_version()}" if package_version() else "a copy of kafka-eos without a version"
    return NewerVersionError(
        f"{what} has format {version}, written by {writer}; this is {own}, which reads format {readable}.",
        fix=f"run the query with {writer}, which has committed batches that this version cannot continue "
        "(docs/upgrading.md).",
    )

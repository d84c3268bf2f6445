"""The commit token: the last link of a query's chain of transactions, stored as offset metadata in Kafka.

Each transaction commits its token together with its records, so the token, and not Spark's log, shows what
Kafka holds. Two forms are stored in the consumer group of the query:

* The **full token** is stored on the anchor partition, on the first source partition and on the changelog
  partitions. `Token` describes it.
* A short **mark** is stored on every other source partition. It names the application and the sequence number
  of the transaction, so that an offset that another program moved is recognised by its missing mark.

Tokens form a chain: each one carries a sequence number, one higher than that of the token before it, and the
digests of the offset log entries where its micro-batch starts and ends.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from typing import Any

from kafka_eos_source.errors import OperatorError, StateError
from kafka_eos_source.model import GroupOffset
from kafka_eos_source.protocol.writer_version import BY, newer_version, package_version
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

#: Format of the tokens that this version writes and reads. A token that lacks a key is damaged; unknown keys
#: are ignored.
FORMAT = 1
_TOKEN_START = '{"kafka-eos":'
_MARK = re.compile(r"kafka-eos:([0-9a-f]{12}):([0-9]{1,19})")

#: Key of the text that replaces the token while an operator's state is moved to other shards. No query may
#: commit then.
MOVING = "moving"


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

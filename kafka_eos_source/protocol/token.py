"""The token: which batch Kafka holds. Written as offset metadata inside the batch's own transaction.

Because it commits atomically with the records, the token and not Spark's log says what is in Kafka.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

from kafka_eos_source.errors import OperatorError, StateError
from kafka_eos_source.model import GroupOffset

_VERSION = 1
_MARK = '{"kafka-eos":'

#: Key of what stands in place of a token while an operator's state moves: nobody else may commit then.
MOVING = "moving"


@dataclass(frozen=True)
class ShardMark:
    """What the token on a changelog partition says of its shard, beside the batch.

    Attributes:
        attempt: the operator's task attempt whose changes are in the changelog: no other one's pending
            changes may ever be applied.
        time_ms: processing time of the batch there, ms since the epoch.
        event_time_ms: largest event time that any shard of the operator has seen; None = none.
        counts: what the shard's processor has counted in all batches (``late_rows``).
    """

    attempt: str
    time_ms: int
    event_time_ms: int | None
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class SinkMark:
    """What the token says of sinks outside Kafka: what they prepared for the batch, they shall commit.

    Attributes:
        attempt: of their id, ``<application.id>-<batch>-<attempt>`` (`sinks.contract.SinkTxn`).
        names: of the sinks that had rows.
    """

    attempt: str
    names: tuple[str, ...]


#: In a token that a person had written (``onMissingToken``, ``kafka-eos adopt``): it says nothing of sinks.
UNDECIDED = SinkMark("?", ())


@dataclass(frozen=True)
class Token:
    """One committed batch.

    Attributes:
        application_id: the transactional id that committed it.
        query_id: Spark's id of the query (from the checkpoint), or ``txnAppId:…`` of a batch write.
        run_id: Spark's id of the run, "" when not known.
        batch_id: Spark's batch id, or ``txnVersion``.
        start_digest, end_digest: of the batch's start and end offsets, all sources.
        rows: records written.
        attempt: how many transactions were begun for the batch by this commit call, this one included.
        shard: on a changelog partition only.
        sinks: None = no sink outside Kafka took part.
    """

    application_id: str
    query_id: str
    run_id: str
    batch_id: int
    start_digest: str
    end_digest: str
    rows: int
    attempt: int = 1
    shard: ShardMark | None = None
    sinks: SinkMark | None = None

    def encode(self) -> str:
        """Compact JSON, under 1 KB, or 2 KB with counts (a broker takes 4096 bytes of metadata)."""
        return json.dumps(
            {
                "kafka-eos": _VERSION,
                "app": self.application_id,
                "query": self.query_id,
                "run": self.run_id,
                "batch": self.batch_id,
                "start": self.start_digest,
                "end": self.end_digest,
                "rows": self.rows,
                "attempt": self.attempt,
                **({} if self.sinks is None else {"sinks": [self.sinks.attempt, *self.sinks.names]}),
                **({} if self.shard is None else {"shard": list(astuple(self.shard))}),
            },
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, metadata: str) -> Token | None:
        """The token in an offset's metadata; None when the metadata is not ours.

        Raises:
            OperatorError: it is a token of a newer format, or damaged. Never read as "no token".
            StateError: in its place is the mark of a move of state to other shards (`state.changelog.move`).
        """
        text = metadata.rstrip("\0")
        if not text.startswith(_MARK):
            return None
        try:
            found = json.loads(text)
            if MOVING in found:
                raise StateError(
                    f"the state of store {found[MOVING]['store']!r} is being moved to {found[MOVING]['to']} "
                    "shards: `kafka-eos state rescale` was begun, and did not come to its end.",
                    fix="give that command again, with the same number of shards: it goes on where it was.",
                )
            if found["kafka-eos"] != _VERSION:
                raise OperatorError(
                    f"the token in Kafka has format {found['kafka-eos']}; this version of kafka-eos reads "
                    f"format {_VERSION}: {text}",
                    fix="run the query with the newer version of kafka-eos that wrote it.",
                )
            return cls(
                application_id=found["app"],
                query_id=found["query"],
                run_id=found["run"],
                batch_id=int(found["batch"]),
                start_digest=found["start"],
                end_digest=found["end"],
                rows=int(found["rows"]),
                attempt=int(found["attempt"]),
                shard=ShardMark(*found["shard"]) if "shard" in found else None,
                sinks=_sinks(found["sinks"]) if "sinks" in found else None,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise OperatorError(
                f"the token in Kafka is damaged ({error!r}): {text}",
                fix="find out which program commits offsets to this group.",
            ) from error


def _sinks(found: list[str]) -> SinkMark:
    attempt, *names = found
    return SinkMark(str(attempt), tuple(map(str, names)))


def newest(offsets: Iterable[GroupOffset]) -> Token | None:
    """The token of the last batch: partitions that later batches did not touch carry older ones."""
    tokens = [token for each in offsets if (token := Token.decode(each.metadata)) is not None]
    return max(tokens, key=lambda token: token.batch_id, default=None)


def digest(lines: Iterable[str]) -> str:
    """64 bits of SHA-256 over the offset log's lines: enough to tell two plans of one batch apart."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

"""Selects the queries that ``kafka-eos top`` shows, and makes their views."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.kafka.cluster_reader import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.observe.journal import query_journal, query_journals
from kafka_eos_source.observe.view import QueryView, Status, TopicLag, view
from kafka_eos_source.operate import checkpoint as checkpoints
from kafka_eos_source.operate.lag import GroupLag, measure_lag
from kafka_eos_source.operate.target import Target
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token, newest
from kafka_eos_source.runtime.deadline import Deadline

#: Queries that ended longer ago than this are shown only on request.
_ENDED_SECONDS = 600.0
#: Queries that have neither committed nor planned for this long are not read.
_RECENT_SECONDS = 26 * 3600.0

T = TypeVar("T")


def views_of_host(*, ended: bool) -> list[QueryView]:
    """Returns the queries of this user on this host, running ones first.

    Args:
        ended: whether to include queries that ended more than ten minutes ago.

    Raises:
        OperatorError: if the figures cannot be read.
    """
    now = time.time()
    found = [
        view(each, now) for each in _readable(lambda: query_journals(0.0 if ended else now - _RECENT_SECONDS))
    ]
    if not ended:
        found = [each for each in found if not _has_ended(each, now)]
    return sorted(
        found, key=lambda each: (each.status in (Status.STOPPED, Status.FAILED), each.application_id)
    )


def view_source(target: Target, timeout: Callable[[], Deadline]) -> Callable[[], QueryView]:
    """Returns a function that returns the present view of one query.

    If this host has no figures about the query, the function reads the token and the lag from Kafka.

    Args:
        target: the query.
        timeout: returns the deadline of one look at Kafka.

    Raises:
        InvalidOptionError: if the ``application.id`` is not known.
        OperatorError: if the figures cannot be read, or the checkpoint is damaged.
    """
    found = checkpoints.read_checkpoint(target.checkpoint) if target.checkpoint is not None else None
    application_id = checkpoints.known_application_id(target.application_id, found)
    group_id = group_of(application_id, target.group_id)

    def look() -> QueryView:
        journal = _readable(lambda: query_journal(application_id))
        if journal is not None:
            return view(journal, time.time())
        if target.kafka is None:
            raise InvalidOptionError(
                f"this host has no figures about application.id={application_id!r}: this user has not run "
                "the query here during the last days, or it has not committed a micro-batch yet.",
                fix="run the command on the driver's host, as the user who runs the query; or add "
                "--bootstrap-servers to see the token and the lag that Kafka knows.",
            )
        with ClusterReader(admin_config(target.kafka)) as cluster:
            deadline = timeout()
            offsets, _ = cluster.group(group_id, (), deadline)
            measured = measure_lag(cluster, group_id, deadline)
        return remote_view(application_id, newest(offsets.values(), application_id), measured)

    return look


def remote_view(application_id: str, token: Token | None, measured: GroupLag) -> QueryView:
    """Returns what Kafka knows about a query that runs on another host, or does not run.

    Args:
        application_id: the transactional id.
        token: the newest token in the group; None if there is none.
        measured: the lag of the group.
    """
    topics: dict[str, dict[int, int]] = {}
    for each in measured.partitions:
        topics.setdefault(each.tp.topic, {})[each.tp.partition] = each.lag
    text = "this host has no figures; shown is what Kafka knows"
    if token is not None:
        text += f": batch {token.batch_id} is committed, with {token.rows:,} records"
    return QueryView(
        application_id=application_id,
        query_id="" if token is None else token.query_id,
        run_id="" if token is None else token.run_id,
        at=measured.at_seconds,
        status=Status.ELSEWHERE,
        status_since=None,
        status_text=text,
        read_per_second=0.0,
        records_per_second=0.0,
        lag={topic: TopicLag(sum(each.values()), 0.0, False, each) for topic, each in topics.items()},
        sources=tuple(topics),
        batches=(),
        totals={},
        totals_since=None,
        sequence=None if token is None else token.sequence,
    )


def _readable(read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, UnicodeError) as error:
        raise OperatorError(
            f"cannot read the figures of the queries on this host: {error}.",
            fix="check the folder kafka-eos-live-<user id> in the system's temporary folder, or delete it.",
        ) from error


def _has_ended(each: QueryView, now: float) -> bool:
    ended = each.status in (Status.STOPPED, Status.FAILED)
    return ended and (each.status_since is None or now - each.status_since > _ENDED_SECONDS)

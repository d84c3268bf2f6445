"""Stops a query whose first records are all bad, before anything of them is written.

A wrong schema, or a wrong schema registry, makes each record of a topic a bad one. With
``onInvalidRecord=dead-letter`` or ``drop``, the query would then move the whole topic to the dead letters, or
drop it. So the first batch of each run is looked at: if all records of a topic in it are bad, and they are at
least `LEAST_OF_TOPIC`, the batch is refused until a person says that this is meant
(``onAllRecordsBad=continue``). Fewer bad records decide nothing: the next batch is looked at too, until there
is a good record, or enough bad ones.

Two kinds of counts show what is bad:

- A read that sets bad records aside counts exactly: the report of each reading task says how many records of
  each topic it read, and how many of them are bad.
- Of rows that the frame marks (``kafka_eos_invalid``), only the marked ones say from which topic they come,
  and a step of the query may have dropped others. So all are bad if each offset of the topic in the batch is
  marked; or if no valid row reached the sink and at least half of the offsets are marked, because control
  records of transactions have offsets too.

What is decided holds for one run of the query. Spark may run each commit in another process on the driver's
host, so a private file there remembers it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.bad_records import LEAST_OF_TOPIC
from kafka_eos_source.model import StagedPart, TopicRecords
from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.runtime.logs import warn_once

_log = logging.getLogger(__name__)

#: Files of queries that have not committed for this long are deleted.
_KEPT_SECONDS = 7 * 24 * 3600.0

#: The topics that need no look any more, by query: Spark's id of the run, and their names.
_settled: dict[str, tuple[str, frozenset[str]]] = {}


@dataclass(frozen=True)
class FirstRecords:
    """What one batch shows of each topic.

    Attributes:
        good: topics with a good record.
        bad: topics of which all records are bad: how many there are, and why the first is. The name "" stands
            for all topics of the batch, if its rows do not name theirs.
    """

    good: frozenset[str]
    bad: Mapping[str, TopicRecords]

    @classmethod
    def of(cls, parts: Sequence[StagedPart], offsets: Mapping[str, int]) -> FirstRecords:
        """Returns what the staged parts of a batch show.

        Args:
            parts: the parts.
            offsets: number of offsets that the batch read, by topic.
        """
        read = _sums(each for part in parts for of_task in part.reads for each in of_task.topics)
        marked = _sums(_named(each, offsets) for part in parts for each in part.marked)
        unmarked = sum(part.unmarked for part in parts)
        bad = {topic: each for topic, each in read.items() if each.bad and each.bad >= each.records}
        for topic, each in marked.items():
            total = offsets.get(topic, 0) if topic else sum(offsets.values())
            if each.bad == total or (not unmarked and 2 * each.bad >= total):
                bad[topic] = each
        known = {*read, *(offsets if unmarked else marked)}
        return cls(frozenset(known - bad.keys()), bad)

    def refusal(
        self, settled: Collection[str], topics: Collection[str], batch_id: int
    ) -> InvalidRecordError | None:
        """Returns the error that refuses the batch; None if it may be written.

        Args:
            settled: topics that need no look.
            topics: all topics of the batch.
            batch_id: Spark's id of the batch.
        """
        for topic, found in self.bad.items():
            if topic in settled or found.bad < LEAST_OF_TOPIC:
                continue
            names = ", ".join(map(repr, [topic] if topic else sorted(topics)))
            return InvalidRecordError(
                f"all {found.bad:,} records of topic {names} in batch {batch_id} are bad. The first one: "
                f"{found.reason or 'no reason is given'}. Probably schema=, registry= or the condition that "
                "marks rows is that of another topic, or the records have another frame than it assumes. "
                "Nothing was written, and no offset was committed.",
                fix="correct the schema, the registry or the condition, and start the query again, which "
                "repeats the batch. If these records are bad indeed, start it with the option "
                "onAllRecordsBad=continue on the sink (with App: write(options={…})) until a batch is "
                "committed; onInvalidRecord then decides what becomes of them.",
            )
        return None

    @property
    def settles(self) -> frozenset[str]:
        """The topics that need no look in later batches of the run, once this batch is committed."""
        return self.good | {topic for topic, each in self.bad.items() if each.bad >= LEAST_OF_TOPIC}


def _named(marked: TopicRecords, offsets: Mapping[str, int]) -> TopicRecords:
    """Returns marked rows with their topic if the batch reads only one."""
    if marked.topic or len(offsets) != 1:
        return marked
    return TopicRecords(next(iter(offsets)), marked.records, marked.bad, marked.reason)


def _sums(counts: Iterable[TopicRecords]) -> dict[str, TopicRecords]:
    found: dict[str, TopicRecords] = {}
    for each in counts:
        before = found.get(each.topic, TopicRecords(each.topic, 0, 0))
        records, bad = before.records + each.records, before.bad + each.bad
        found[each.topic] = TopicRecords(each.topic, records, bad, before.reason or each.reason)
    return found


# -- what is known of the run ----------------------------------------------------------------------


def settled(application_id: str, run_id: str) -> frozenset[str]:
    """Returns the topics that earlier batches of a run have settled.

    Args:
        application_id: the query.
        run_id: Spark's id of the run.
    """
    known = _settled.get(application_id)
    if known is None or known[0] != run_id:
        known = _read(application_id)
    return known[1] if known[0] == run_id else frozenset()


def settle(application_id: str, run_id: str, topics: frozenset[str]) -> None:
    """Remembers that topics need no look any more in this run. Call it after their batch is committed."""
    before = settled(application_id, run_id)
    now = before | topics
    _settled[application_id] = run_id, now
    if now == before:
        return
    try:
        _folder().write(_file(application_id), json.dumps({"run": run_id, "topics": sorted(now)}))
        _folder().tidy(_KEPT_SECONDS)
    except (OSError, UnicodeDecodeError) as error:
        warn_once(
            _log,
            f"the commit cannot remember which topics of application.id={application_id!r} have good "
            f"records: {error}. If Spark starts another process for a commit, and all records of its batch "
            "are bad, the query stops there.",
        )


def _read(application_id: str) -> tuple[str, frozenset[str]]:
    try:
        text = _folder().read(_file(application_id))
        if text is not None:
            found = parse_json(text)
            return str(found["run"]), frozenset(map(str, found["topics"]))
    except (OSError, UnicodeDecodeError, *SHAPE_ERRORS) as error:
        _log.info(
            "cannot read which topics of application.id=%r have good records: %s", application_id, error
        )
    return "", frozenset()


def _folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-first-records")


def _file(application_id: str) -> str:
    return f"{application_id}.json"

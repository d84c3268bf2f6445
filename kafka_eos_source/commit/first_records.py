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

What is decided holds for one run of the query (`run_notes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafka_eos_source.commit.run_notes import RunNotes
from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.bad_records import LEAST_OF_TOPIC
from kafka_eos_source.model import StagedPart, TopicRecords

#: The topics of a run that need no look any more. Add those of a batch after it is committed.
SETTLED = RunNotes(
    "kafka-eos-first-records",
    "which topics have good records",
    "the query stops if all records of its batch are bad",
)


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

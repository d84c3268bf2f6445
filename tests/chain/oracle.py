"""The oracle of the chain model: each record takes effect once, in its target, and each refusal has a reason.

A query owes its records to its target: the topic of its option ``topic``, and the system of each of its
sinks. The oracle knows for each record whether it is there once, is lost, is doubled, or went to another
target only. A query that is refused by name owes nothing more, but what it has written must still be right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from kafka_eos_source.errors import KafkaEosError
from tests.chain.cluster import Cluster, Process, Topic, records
from tests.chain.others import Consumer
from tests.chain.product import TopicPartition, changelog_name, group_of
from tests.chain.query import Query
from tests.chain.sinks import SYSTEMS
from tests.chain.spark import Checkpoint, Outside, Run, Settings
from tests.chain.state import StateWorld, changelog_state

#: Id of the second cluster.
FAR = "far"

EVENTS: Counter[str] = Counter()

#: Events that justify a refusal, by error condition. For other conditions, any event in `ALWAYS` or a fault
#: does.
ALWAYS = frozenset(
    {
        *("rival", "copied", "shared group", "recreated", "expired", "reset", "rolled back"),
        *("stale coordinator", "retargeted", "consumer", "region", "joined names", "clock", "truncated"),
        *("changelog cut", "guarantee", "renamed store", "misconfigured"),
    }
)
EXCUSES = {
    "TOKEN_MISSING": frozenset(
        {"expired", "recreated", "reset", "stale coordinator", "guarantee", "joined names", "renamed store"}
    ),
    "FOREIGN_QUERY": frozenset(
        {"lost checkpoint", "shared group", "copied", "stale coordinator", "joined names"}
    ),
    "OFFSETS_MOVED": frozenset({"reset", "shared group", "consumer"}),
    "GROUP_IN_USE": frozenset({"consumer", "shared group", "reset"}),
    "CHECKPOINT_MOVED": frozenset({"copied"}),
    "GUARANTEE_CHANGED": frozenset({"guarantee"}),
    "DATA_LOSS": frozenset({"recreated", "truncated"}),
    "CHECKPOINT_ROLLED_BACK": ALWAYS | {"lost checkpoint"},
    "CHECKPOINT_AHEAD": ALWAYS | {"lost checkpoint"},
}

#: How far the clock of an executor may be ahead. A timer may then fire too early, but not much too late.
CLOCK_TOLERANCE_MS = 60_000


class Violation(AssertionError):
    """A row was lost, duplicated, torn or misplaced, or a query was refused without a reason."""


@dataclass
class Place:
    """One checkpoint, and the driver that uses it.

    Attributes:
        groups: the groups that its queries used. A new checkpoint may have another query id, and so another
            default group.
        exempt: effects that it does not owe to its target, because its checkpoint already was beyond them
            when it was copied, or when the target changed.
        stopped: whether nobody starts it again.
        ending: condition of the error that refused its last batch; "" if none did.
    """

    query: Query
    checkpoint: Checkpoint
    process: Process
    settings: Settings = field(default_factory=Settings)
    run: Run | None = None
    backups: list[dict[str, bytes]] = field(default_factory=list)
    refused: KafkaEosError | None = None
    groups: set[str] = field(default_factory=set)
    exempt: set[str] = field(default_factory=set)
    stopped: bool = False
    ending: str = ""

    @property
    def group(self) -> str:
        """The consumer group of the query, as the checkpoint is now."""
        query = self.query
        query_id = "" if query.application_id or query.group_id else self.checkpoint.query_id()
        return group_of(query_id, query.application_id, query.group_id)

    @property
    def cluster(self) -> Cluster:
        return self.process.cluster


class Oracle:
    """Compares the visible rows with the records that were read.

    Attributes:
        excuses: events that may justify a refusal.
        faulted: whether a client or a sink failed, so that a restart may be necessary.
        consumers: programs that read Kafka with a plain consumer.
        complaint: what to do with a violation; raises by default.
    """

    state: StateWorld

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.clusters = {"": self.cluster}
        self.outside = Outside()
        self.excuses: set[str] = set()
        self.faulted = False
        self.places: dict[str, Place] = {}
        self.consumers: list[Consumer] = []
        self.versions: dict[tuple[str, str, int], Counter[bytes]] = {}
        self.complaint: Callable[[str], None] = _raise
        self._running: list[Process] = []

    # -- what happened to each record

    def effects(self, place: Place) -> dict[str, Counter[str]]:
        """Counts, by topic, how often the queries of a place's groups made each source record visible.

        Records that tasks wrote without a transaction count once, as the guarantee promises no more, and only
        if Spark has logged their batch: until then the batch may be written again.
        """
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for each in place.cluster.written:
            if each.group in place.groups and each.effect:
                found[each.topic][each.effect] += 1
        settled = {
            (each.topic, each.effect)
            for each in place.cluster.direct
            if each.settled and each.group in place.groups
        }
        for topic, effect in settled:
            found[topic][effect] += 1
        return found

    def misplaced(self, place: Place) -> dict[str, set[str]]:
        """Returns effects that the place owes to its topic, and that are in other topics only, by topic."""
        missing = self.owed(place) - self._present(place, place.query.topic)
        found = {topic: missing & effects.keys() for topic, effects in self.effects(place).items()}
        return {topic: effects for topic, effects in found.items() if effects}

    def owed(self, place: Place) -> set[str]:
        """Returns the effects that the place owes to its target: those of all records that exist now."""
        return {
            f"{number}|{value}"
            for number, source in enumerate(place.query.sources)
            for value in self._wanted(place, source)
        } - place.exempt

    # -- what must hold at any moment

    def check(self) -> None:
        """Checks what must hold at any moment.

        Raises:
            Violation: if something does not hold.
        """
        if self._running:
            return
        for cluster in self.clusters.values():
            for group, tp, before, after in cluster.backwards:
                readers = [each.query for each in self.places.values() if tp.topic in each.query.topics]
                # an offset that is committed while a topic is recreated, which the user accepts, is right one
                # batch later
                if not readers or ("recreated" in self.excuses and all(each.tolerant for each in readers)):
                    continue
                if "truncated" in self.excuses:
                    continue  # the log is shorter, and a user may accept that
                self.complaint(f"group {group}: a commit moved {tp} back from {before} to {after}")
        seen = set()
        for place in self.places.values():
            if (key := (place.query.region, *sorted(place.groups))) not in seen:
                seen.add(key)
                self._check_group(place)
        for each in self.consumers:
            if harm := each.harm():
                self.complaint(harm)
        self._check_versions()

    def _check_group(self, place: Place) -> None:
        for topic, effects in self.effects(place).items():
            duplicated = sorted(each for each, times in effects.items() if times > 1)
            if duplicated:
                self.complaint(f"doubled in topic {topic!r}: {len(duplicated)} records, {duplicated}")
        present = self._present(place)
        self._check_offsets(place, present)
        self._check_sinks(place, present)
        if place.query.stateful:
            self._check_numbers(place)

    def _check_offsets(self, place: Place, present: set[str]) -> None:
        """Checks that every record below a committed offset took effect in some target."""
        committed = place.cluster.ours(place.group)
        query = place.query
        # after a topic is recreated, which the user accepts, the offsets of the group are right one batch
        # later
        if query.tolerant and self.excuses & {"recreated", "truncated"}:
            return
        present = present | place.exempt
        for number, source in enumerate(query.sources):
            kind, _, name = source.partition(":")
            topic = None if kind == "far" else place.cluster.topics.get(name)
            for tp, offset, record in () if topic is None else records(topic):
                assert topic is not None
                assert record.value is not None
                if offset >= committed.get(tp, 0) or f"{number}|{record.value.decode()}" in present:
                    continue
                if not topic.epoch_at(tp.partition, offset):
                    # otherwise nobody has noticed yet that the log was cut and refilled
                    self.complaint(f"lost: {record.value!r}, although its offset is committed")

    def _check_sinks(self, place: Place, present: set[str]) -> None:
        """Checks that sinks show each row once, and only rows that Kafka holds, and hold all the others."""
        group = [each for each in self.places.values() if each.groups & place.groups]
        for name in sorted({name for each in group for name, _ in each.query.sinks}):
            systems = sorted({s for each in group for n, s in each.query.sinks if n == name})
            mine = Counter(
                row.partition(":")[2].partition("#")[0]
                for system in systems
                for row in SYSTEMS[system].visible().elements()
                if row.startswith(name) and self._is_from(place.cluster, row)
            )
            for row, times in mine.items():
                if times > 1:
                    self.complaint(f"doubled in sink {name}: {row}")
                if row not in present:
                    self.complaint(f"torn: sink {name} shows {row}, Kafka does not")
            held = {
                row.partition(":")[2].partition("#")[0]
                for system in systems
                for _, rows in SYSTEMS[system].prepared.values()
                for row in rows
            }
            gone = sorted(present - mine.keys() - held - place.exempt)
            if gone and all(dict(each.query.sinks).get(name) for each in group):
                self.complaint(f"lost in sink {name}: Kafka shows {gone}, and the sink no longer holds them")

    def _check_numbers(self, place: Place) -> None:
        """Checks that the operator counted the records of each key from 1 on, without a gap."""
        numbers = defaultdict(list)
        for each in place.cluster.written:
            value = each.record.value
            if each.group in place.groups and each.effect and value is not None:
                numbers[each.record.key].append(int(value.rpartition(b"#")[2]))
        for key, found in numbers.items():
            if sorted(found) != list(range(1, len(found) + 1)):
                self.complaint(f"state: {key!r} was counted {len(found)} times, and its counts are {found}")

    def _check_versions(self) -> None:
        for (_, topic, _), rows in self.versions.items():
            for value, times in rows.items():
                seen = sum(
                    each.record.value == value and each.topic == topic for each in self.cluster.written
                )
                if seen != times:
                    self.complaint(f"batch write {value!r}: {seen} times in the output")

    # -- what must hold in the end

    def check_complete(self, place: Place) -> None:
        """Checks that a query that has caught up has paid everything that it owes to its target."""
        query = place.query
        owed, here = self.owed(place), self._present(place, query.topic)
        for topic, effects in sorted(self.misplaced(place).items()):
            if "truncated" not in self.excuses or not query.tolerant:
                self.complaint(
                    f"misplaced: {len(effects)} of {len(owed)} records of {query.name!r} are in topic "
                    f"{topic!r} only, and not in {query.topic!r}: {sorted(effects)}"
                )
        missing = sorted(owed - self._present(place))
        if missing and not (query.tolerant and "truncated" in self.excuses):
            self.complaint(
                f"lost: {len(missing)} of {len(owed)} records of {query.name!r}, which has caught up: "
                f"{missing}"
            )
        for name, system in query.sinks:
            rows = {row.partition(":")[2].partition("#")[0] for row in SYSTEMS[system].visible()}
            if missing := sorted((here & owed) - rows):
                self.complaint(f"lost or misplaced: {len(missing)} records are not in sink {name}: {missing}")
        if query.stateful:
            self._check_changelog(place)
            self._check_clock(place)

    def _check_changelog(self, place: Place) -> None:
        """Checks that the changelog holds the counts of the output."""
        application = place.query.application_id or place.group
        changelog = changelog_name(application, place.query.store)
        if changelog not in place.cluster.topics:
            return
        mine = (each for each in place.cluster.written if each.transactional_id == application)
        wanted = Counter(each.record.key for each in mine if each.effect)
        if not wanted and "joined names" in self.excuses:
            return  # without records it has not learned yet that the changelog is another application's
        state = changelog_state(place.cluster, changelog)
        if dict(wanted) != state:
            self.complaint(f"state: the changelog holds {state}, the output {dict(wanted)}")

    def _check_clock(self, place: Place) -> None:
        """Checks that processing time is not so far ahead that a timer would not fire for long."""
        name = changelog_name(place.query.application_id or place.group, place.query.store)
        for disk in self.state.disks.values():
            if disk.batch is None or name != disk.changelog:
                continue
            ahead_ms = disk.batch.time_ms - self.outside.clock_ms
            if ahead_ms > CLOCK_TOLERANCE_MS:
                self.complaint(
                    f"clock: processing time of {name} is {ahead_ms / 1000:.0f} s ahead of every clock, so "
                    "no timer fires until then"
                )

    # -- reasons of refusals

    def _check_excuse(self, error: KafkaEosError) -> None:
        EVENTS[f"error {error.condition}"] += 1
        short = error.condition.removeprefix("KAFKA_EOS.")
        legitimate = EXCUSES.get(short, ALWAYS) & self.excuses
        if not legitimate and not (self.faulted and short not in EXCUSES):
            raise Violation(f"refused without a reason: {error}") from error

    def _would_be_forgotten(self, goes: Callable[[TopicPartition], bool]) -> bool:
        """Whether neither Kafka nor the checkpoint of a query would show that it ever ran.

        Such a query is a new one, and correctly starts from the beginning. Only a token topic
        (`token.topic`) could refuse it.
        """
        unpromised = (place.group for place in self.places.values() if not place.checkpoint.promises())
        return any(all(map(goes, ours)) for group in unpromised if (ours := self.remembered(group)))

    def remembered(self, group: str) -> list[TopicPartition]:
        """Returns the partitions whose offsets show queries without its state to whom the group belongs."""
        return [tp for tp in self.cluster.ours(group) if not tp.topic.endswith("-changelog")]

    def _excuse(self, what: str) -> None:
        EVENTS[what] += 1
        self.excuses.add(what)

    # -- private

    def _present(self, place: Place, topic: str | None = None) -> set[str]:
        """Returns the effects that are visible in a topic (None = in any), however often."""
        cluster, groups = place.cluster, place.groups
        found = {
            each.effect
            for each in chain(cluster.written, cluster.direct)
            if each.group in groups and topic in (None, each.topic)
        }
        return found - {""}

    def _wanted(self, place: Place, source: str) -> list[str]:
        kind, _, topic = source.partition(":")
        if kind == "files":
            return list(self.outside.files)
        if kind == "rate":
            return [f"tick/{tick}" for tick in range(self.outside.ticks)]
        cluster = self.clusters[FAR] if kind == "far" else place.cluster
        existing: Topic | None = cluster.topics.get(topic)
        found = () if existing is None else records(existing)
        return [record.value.decode() for _, _, record in found if record.value]

    def _is_from(self, cluster: Cluster, row: str) -> bool:
        """Whether a row of a sink, which two regions may share, came from this cluster."""
        is_far = f"|{FAR}." in row
        return is_far is (cluster.cluster_id == FAR)


def _raise(text: str) -> None:
    raise Violation(text)

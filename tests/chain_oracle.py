"""The oracle of the chain model: every record takes effect once, and every refusal has a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from chain_cluster import Cluster, Process, records
from chain_product import TopicPartition
from chain_query import OUTPUT, Query
from chain_sinks import SYSTEMS
from chain_spark import Checkpoint, Outside, Run, Settings
from chain_state import changelog_state

from kafka_eos_source.errors import KafkaEosError

EVENTS: Counter[str] = Counter()

#: Events that justify a refusal, by error condition. For other conditions, any event in `ALWAYS` or a fault
#: does.
ALWAYS = frozenset(
    {"rival", "copied", "shared group", "recreated", "expired", "reset", "rolled back", "stale coordinator"}
)
EXCUSES = {
    "TOKEN_MISSING": frozenset({"expired", "recreated", "reset", "stale coordinator"}),
    "FOREIGN_QUERY": frozenset({"lost checkpoint", "shared group", "copied", "stale coordinator"}),
    "OFFSETS_MOVED": frozenset({"reset", "shared group"}),
    "DATA_LOSS": frozenset({"recreated"}),
    "CHECKPOINT_ROLLED_BACK": ALWAYS | {"lost checkpoint"},
    "CHECKPOINT_AHEAD": ALWAYS | {"lost checkpoint"},
}


class Violation(AssertionError):
    """A row was lost, duplicated or torn, or a query was refused without a reason."""


@dataclass
class Place:
    """One checkpoint, and the driver that uses it."""

    query: Query
    checkpoint: Checkpoint
    process: Process
    settings: Settings = field(default_factory=Settings)
    run: Run | None = None
    backups: list[dict[str, bytes]] = field(default_factory=list)
    refused: KafkaEosError | None = None


class Oracle:
    """Compares the visible rows with the records that were read.

    Attributes:
        excuses: events that may justify a refusal.
        faulted: whether a client or a sink failed, so that a restart may be necessary.
    """

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.outside = Outside()
        self.excuses: set[str] = set()
        self.faulted = False
        self.places: dict[str, Place] = {}
        self.versions: dict[tuple[str, str, int], Counter[bytes]] = {}
        self._running: list[Process] = []

    def check(self) -> None:
        """Checks what must hold at any moment.

        Raises:
            Violation: if something does not hold.
        """
        if self._running:
            return
        for group, tp, before, after in self.cluster.backwards:
            readers = [each.query for each in self.places.values() if tp.topic in each.query.topics]
            # an offset that is committed while a topic is recreated, which the user accepts, is right one
            # batch later
            if not readers or ("recreated" in self.excuses and all(each.tolerant for each in readers)):
                continue
            raise Violation(f"group {group}: a commit moved {tp} back from {before} to {after}")
        for group in {place.query.group for place in self.places.values()}:
            self._check_group(group)
        self._check_versions()

    def effects(self, group: str) -> Counter[str]:
        """Counts how often the queries of one group made each source record visible in the output."""
        found = (each for each in self.cluster.written if each.group == group and each.topic == OUTPUT)
        return Counter(each.record.value.decode().partition("#")[0] for each in found if each.record.value)

    def _check_group(self, group: str) -> None:
        effects = self.effects(group)
        duplicated = sorted(effect for effect, times in effects.items() if times > 1)
        if duplicated:
            raise Violation(f"duplicated: {duplicated}")
        committed = self.cluster.ours(group)
        query = next(place.query for place in self.places.values() if place.query.group == group)
        # after a topic is recreated, which the user accepts, the offsets of the group are right one batch
        # later
        accepted = query.tolerant and "recreated" in self.excuses
        for number, source in enumerate(() if accepted else query.sources):
            topic = self.cluster.topics.get(source.partition(":")[2])
            for tp, offset, record in () if topic is None else records(topic):
                assert record.value is not None
                if offset < committed.get(tp, 0) and f"{number}|{record.value.decode()}" not in effects:
                    raise Violation(f"lost: {record.value!r}, although its offset is committed")
        for name, system in query.sinks:
            mine = Counter({row: n for row, n in SYSTEMS[system].visible().items() if row.startswith(name)})
            for row, times in mine.items():
                if times > 1:
                    raise Violation(f"duplicated in sink {name}: {row}")
                if row.partition(":")[2].partition("#")[0] not in effects:
                    raise Violation(f"torn: sink {name} shows {row}, Kafka does not")
        if query.stateful:
            self._check_state(query)

    def _check_state(self, query: Query) -> None:
        changelog = f"{query.application_id}-counts-changelog"
        if changelog not in self.cluster.topics:
            return
        mine = (each for each in self.cluster.written if each.transactional_id == query.application_id)
        wanted = Counter(each.record.key for each in mine if each.topic == OUTPUT)
        state = changelog_state(self.cluster, changelog)
        if dict(wanted) != state:
            raise Violation(f"state: the changelog holds {state}, the output {dict(wanted)}")

    def _check_versions(self) -> None:
        for (_, topic, _), rows in self.versions.items():
            for value, times in rows.items():
                seen = sum(
                    each.record.value == value and each.topic == topic for each in self.cluster.written
                )
                if seen != times:
                    raise Violation(f"batch write {value!r}: {seen} times in the output")

    def _check_complete(self, query: Query) -> None:
        effects = self.effects(query.group)
        for number, source in enumerate(query.sources):
            for value in self._wanted(source):
                if f"{number}|{value}" not in effects:
                    raise Violation(f"lost: {value} of source {number}; the query has caught up")
        for name, system in query.sinks:
            rows = {
                row.partition(":")[2].partition("#")[0]
                for row in SYSTEMS[system].visible()
                if row.startswith(name)
            }
            if missing := sorted(set(effects) - rows):
                raise Violation(f"lost in sink {name}: {missing}")

    def _wanted(self, source: str) -> list[str]:
        kind, _, topic = source.partition(":")
        if kind == "files":
            return list(self.outside.files)
        if kind == "rate":
            return [f"tick/{tick}" for tick in range(self.outside.ticks)]
        existing = self.cluster.topics.get(topic)
        return (
            []
            if existing is None
            else [record.value.decode() for _, _, record in records(existing) if record.value]
        )

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
        unpromised = (place.query.group for place in self.places.values() if not place.checkpoint.promises())
        return any(all(map(goes, ours)) for group in unpromised if (ours := self.remembered(group)))

    def remembered(self, group: str) -> list[TopicPartition]:
        """Returns the partitions whose offsets show queries without its state to whom the group belongs."""
        return [tp for tp in self.cluster.ours(group) if not tp.topic.endswith("-changelog")]

    def _excuse(self, what: str) -> None:
        EVENTS[what] += 1
        self.excuses.add(what)

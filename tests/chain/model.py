"""The world of the chain model: the events that may happen to queries."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import tests.chain.product as product
from kafka_eos_source.errors import KafkaEosError, OperatorError
from tests.chain.cluster import (
    RETENTION_MS,
    Cluster,
    Interruption,
    Killed,
    ModelDirectProducer,
    ModelKafka,
    Process,
    Record,
    records,
)
from tests.chain.oracle import EVENTS, FAR, Oracle, Place, Violation
from tests.chain.others import Consumer
from tests.chain.product import GroupOffset, TopicPartition
from tests.chain.query import COPIED, OUTPUT, Query, QuerySink, make_sources, write_once
from tests.chain.sinks import SYSTEMS, System
from tests.chain.spark import Checkpoint, Run, Settings, SparkConflictError
from tests.chain.state import StateWorld, on_host

KEYS = (b"a", b"b", b"c")
#: Advice in the texts of errors that users can follow.
_ADVICE = re.compile(
    r"(?P<group>startingOffsets=group)|(?P<state>onMissingState=changelog)|"
    r"(?P<sinks>kafka-eos sinks)|'onMovedOffsets', '(?P<overwrite>[^']+)'"
)
#: Topics of each cluster, with their number of partitions.
TOPICS = {"in": 2, "in2": 1, OUTPUT: 2, COPIED: 2, "west": 1, "eu-west": 1}


class World(Oracle):
    """A cluster, outside systems, and the queries that run on them."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        root = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(dir=root)))
        # the product's own temporary files too: its folders hold the files of all other queries of this host
        self._stack.enter_context(patch.object(tempfile, "tempdir", str(self.root)))
        self.worker = 0
        self._numbers = count()
        self.state = StateWorld(self.current, lambda: self.outside.clock_ms)
        SYSTEMS.clear()
        for name in ("a", "b"):
            SYSTEMS[name] = System(self.current)
        self._stack.enter_context(
            product.installed(
                lambda: ModelKafka(self.current()),
                lambda: ModelDirectProducer(self.current),
                lambda: self.outside.clock_ms,
                self.state.now_ms,
                self.state.seams(),
            )
        )
        for name, partitions in TOPICS.items():
            self.cluster.create(name, partitions)

    def close(self) -> None:
        self._stack.close()

    def current(self) -> Process:
        """The process that is running."""
        return self._running[-1]

    # -- input

    def produce(
        self, topic: str = "in", partition: int = 0, number: int = 1, gap: bool = False, region: str = ""
    ) -> None:
        tp = TopicPartition(topic, partition)
        cluster = self.clusters[region]
        there = cluster.topics[topic]
        for _ in range(number):
            at = cluster.end(tp)
            epoch, _ = there.epochs[partition][-1]
            value = f"{there.topic_id}/{partition}/{at}" + (f"@{epoch}" if epoch else "")
            cluster.append(tp, [Record(KEYS[at % len(KEYS)], value.encode())])
        if gap:
            cluster.append(tp, [None])

    def repeat(self, topic: str = "in", partition: int = 0) -> None:
        """Sends the newest records of a log again, as a producer that is not idempotent does."""
        log = self.cluster.topics[topic].logs[partition]
        log += log[-4:]

    def add_file(self) -> None:
        self.outside.files.append(f"file/{len(self.outside.files)}")

    def tick(self, number: int = 1) -> None:
        self.outside.ticks += number

    def idle(self) -> None:
        """Lets time pass, nearly as long as the brokers keep the offsets of a group."""
        EVENTS["idle for long"] += 1
        self.outside.clock_ms += RETENTION_MS - 60_000

    # -- queries

    def start(self, query: Query) -> Place:
        """Creates the checkpoint and the driver of a query. Nothing runs yet."""
        place = Place(query, Checkpoint(self.root / query.name), self._process(cluster=query.region))
        if query.application_id or query.group_id:
            place.groups.add(place.group)
        self.places[query.name] = place
        return place

    def open_region(self, region: str) -> None:
        """Adds a second Kafka cluster. Sinks outside Kafka are shared by both."""
        if region not in self.clusters:
            self._excuse("region")
            self.clusters[region] = Cluster(region)
            for name, partitions in TOPICS.items():
                self.clusters[region].create(name, partitions)

    def restart(self, name: str, *, new_process: bool = True, **settings: object) -> None:
        """Restarts the query before its next micro-batch."""
        place = self.places[name]
        if new_process:
            place.process.dead = True
            place.process = self._process(cluster=place.query.region)
        place.run = None
        place.settings = replace(place.settings, **settings)  # type: ignore[arg-type]

    def stop(self, name: str) -> None:
        """Stops the query for good."""
        self.restart(name)
        self.places[name].stopped = True

    def change(self, name: str, **changes: object) -> None:
        """Restarts the query with another definition, such as another ``topic``."""
        place = self.places[name]
        self._excuse("retargeted")
        self.restart(name)
        place.exempt |= self._covered(place)
        place.query = replace(place.query, **changes)  # type: ignore[arg-type]

    def batch(
        self,
        name: str,
        *,
        interruptions: Iterable[tuple[int | str, Callable[[], None]]] = (),
        worker: int = 0,
        host: int = 0,
    ) -> str:
        """Lets a query run one micro-batch.

        Returns:
            ``done``, ``idle``, ``died``, ``failed`` (a restart may help), ``refused`` or ``conflict``.
        """
        place = self.places[name]
        process = place.process
        process.calls.clear()
        process.interruptions = [Interruption(at, action) for at, action in interruptions]
        before, self.worker = self.worker, worker
        try:
            with on_host(self.state, host), self._runs(place):
                if place.run is None:
                    place.run = self._run(place)
                outcome = "done" if place.run.batch() else "idle"
        except Killed:
            outcome = "died"
        except SparkConflictError:
            outcome = "conflict"
        except KafkaEosError as error:
            place.refused = error
            outcome = "refused" if isinstance(error, OperatorError) else "failed"
            self._check_excuse(error)
        finally:
            self.worker = before
            process.interruptions = []
        if outcome in ("died", "conflict"):
            self.restart(name)
        elif outcome in ("failed", "refused"):
            self.restart(name, new_process=False)
        if outcome == "done" and place.settings.adopt and not place.settings.keeps_adopt:
            place.settings = replace(place.settings, adopt=False)  # later starts do not need it
        EVENTS[f"batch {outcome}"] += 1
        is_refused = outcome == "refused" and place.refused is not None
        place.ending = place.refused.condition.removeprefix("KAFKA_EOS.") if is_refused else ""
        if outcome == "done":
            for each in place.cluster.direct:
                if each.settled is None and each.group == place.group:
                    each.settled = place.settings.guarantee == "at_least_once"
            place.backups.append(place.checkpoint.snapshot())
        self.check()
        return outcome

    def guarantee(self, name: str, guarantee: str) -> None:
        """Restarts the query with another ``processing.guarantee``."""
        self._excuse("guarantee")
        self.restart(name, guarantee=guarantee)

    def follow(self, name: str) -> None:
        """Does what the error which refused the query advises first, and starts the query again."""
        EVENTS["advice"] += 1
        place = self.places[name]
        found = None if place.refused is None else _ADVICE.search(place.refused.fix)
        if found is None:
            return
        if found["group"]:
            self.lose(name)
        elif found["sinks"]:
            here = {each.effect for each in place.cluster.written}
            for sink, system in place.query.sinks:
                SYSTEMS[system].decide(sink, lambda row: row.partition("#")[0] in here)
        elif found["state"]:
            self.restart(name, missing_state="changelog")
        else:
            self.restart(name, moved_offsets=found["overwrite"])

    def answer(self, name: str) -> None:
        """Looks whether the pending batch is in the output, sets ``onMissingToken``, and leaves it there."""
        place = self.places[name]
        pending = place.checkpoint.last("offsets")
        if pending is None:
            return
        batch = self._covered(place) - self._covered(place, pending - 1)
        is_written = batch <= self.effects(place)[place.query.topic].keys()
        EVENTS["answer"] += 1
        value = "assume_committed" if is_written else "assume_not_committed"
        self.restart(name, missing=product.answer(value, pending))

    def kill(self) -> None:
        EVENTS["kill"] += 1
        self.current().kill()

    def fail(self, error: type[KafkaEosError]) -> Callable[[], None]:
        """Lets a call of a client raise."""

        def action() -> None:
            self.faulted = True
            EVENTS[f"fault {error.__name__}"] += 1
            raise error("a fault of the schedule")

        return action

    def stale(self, behind: int) -> Callable[[], None]:
        """Lets a coordinator that was cut off give the next answer about committed offsets."""

        def action() -> None:
            self._excuse("stale coordinator")
            self.current().stale = behind

        return action

    def rival(self, name: str, batches: int = 1) -> Callable[[], None]:
        """Stops the driver at a call while another driver takes over the query and runs some batches."""

        def action() -> None:
            EVENTS["rival"] += 1
            self.excuses.add("rival")
            place = self.places[name]
            mine = (place.process, place.run)
            place.process, place.run = self._process(cluster=place.query.region), None
            for _ in range(batches):
                self.batch(name)
            place.process, place.run = mine

        return action

    # -- what happens to checkpoints

    def roll_back(self, name: str, age: int, **settings: object) -> None:
        """Restores the checkpoint from a backup; ``age`` 0 is the newest one."""
        place = self.places[name]
        if not place.backups:
            return
        at = max(0, len(place.backups) - 1 - age)
        del place.backups[at + 1 :]
        place.checkpoint.restore(place.backups[at])
        self._excuse("rolled back")
        self.restart(name, **settings)

    def lose(self, name: str, *, adopt: bool = True, from_group: bool = True) -> None:
        """Deletes the checkpoint; the query starts again with a new one."""
        place = self.places[name]
        offsets = place.cluster.groups.get(place.group, {})
        if not place.cluster.ours(place.group):
            return  # nothing would show that the query ever ran, so nothing could refuse it
        if set(offsets) != set(place.cluster.ours(place.group)):
            return  # only an operator decides whether to adopt offsets that another program reset
        place.checkpoint.restore({})
        place.backups.clear()
        self._excuse("lost checkpoint")
        self.restart(name, adopt=adopt, from_group=from_group)

    def copy(self, name: str, to: str, *, age: int = 0, mounted: bool = False, **changes: object) -> None:
        """Starts a second driver from a copy of the checkpoint. The first one may keep running.

        Args:
            name: the query.
            to: name of the copy.
            age: 0 copies the checkpoint as it is; higher numbers copy older backups of it.
            mounted: whether the copy is at the path of the original, as with a cloned volume on another host.
            changes: fields of `Query` in which the copy differs.
        """
        place = self.places[name]
        if not place.checkpoint.promises() or (mounted and self._running):
            return  # a copy of an empty checkpoint is a new query, and it is open which of the two continues
        content = place.checkpoint.snapshot()
        if age and place.backups:
            content = place.backups[max(0, len(place.backups) - 1 - age)]
        twin = self.start(replace(place.query, name=to, **changes))  # type: ignore[arg-type]
        twin.checkpoint.restore(content)
        if mounted:
            twin.checkpoint = Checkpoint(place.checkpoint.folder, stored=twin.checkpoint.folder)
            if place.checkpoint.stored is None:
                stored = self.root / f"{name}-volume"
                place.checkpoint.folder.rename(stored)
                place.checkpoint.stored = stored
        twin.groups |= place.groups
        twin.exempt = self._covered(twin)
        self._excuse("copied")

    def share(self, query: Query, *, adopt: bool) -> None:
        """Starts another query with the consumer group of the first one, if that group holds offsets."""
        if query.group_id is None or not self.remembered(query.group_id):
            return
        self._excuse("shared group")
        self.start(query).settings = Settings(adopt=adopt, from_group=adopt)

    # -- what happens to Kafka

    def consume(self, group: str, topic: str, region: str = "") -> Consumer:
        """Starts a plain consumer, which has nothing to do with the query but the name of its group."""
        self._excuse("consumer")
        self.consumers.append(Consumer(self.clusters[region], group, topic))
        return self.consumers[-1]

    def truncate(self, topic: str, partition: int, lost: int) -> None:
        """Loses the newest records of a source's log, in all replicas that are left."""
        tp = TopicPartition(topic, partition)
        if lost and self.cluster.end(tp) and not self.consumers:
            self._excuse("truncated")
            self.cluster.truncate(tp, max(0, self.cluster.end(tp) - lost))

    def cut_changelog(self, topic: str) -> None:
        """Removes the beginning of a changelog, as far as the records that are there now."""
        self._excuse("changelog cut")
        for tp in self.cluster.partitions([topic]):
            self.cluster.delete_records(tp, self.cluster.end(tp))

    def skew(self, host: int, ahead_ms: int) -> None:
        """Sets the clock of an executor; 0 sets it right again."""
        if ahead_ms:
            self._excuse("clock")
        self.state.ahead_ms[host] = ahead_ms

    def reset(self, group: str, tp: TopicPartition, offset: int) -> None:
        """Sets an offset of the group, as an operator does with Kafka's own tool."""
        adopted = all(each.checkpoint.promises() for each in self.places.values())
        if self.consumers:
            return  # the consumer's own offsets would move, and nobody but the person who did it is to blame
        if tp in self.cluster.groups.get(group, {}) and adopted:
            self._excuse("reset")
            self.cluster.groups[group][tp] = GroupOffset(tp, min(offset, self.cluster.end(tp)), "")

    def forget(self, group: str, partitions: Collection[TopicPartition] | None = None) -> None:
        """Deletes the group, or the offsets of some partitions."""
        offsets = self.cluster.groups.get(group, {})
        gone = [tp for tp in offsets if partitions is None or tp in partitions]
        if not gone or self.consumers or self._would_be_forgotten(lambda tp: tp in gone):
            return
        self._excuse("expired")
        for tp in gone:
            del offsets[tp]

    def recreate(self, topic: str) -> None:
        if self.consumers or self._would_be_forgotten(lambda tp: tp.topic == topic):
            return
        self._excuse("recreated")
        self.cluster.recreate(topic)

    def lose_state(self, host: int) -> None:
        EVENTS["state lost"] += 1
        for key in [each for each in self.state.disks if each[0] == host]:
            del self.state.disks[key]

    # -- batch writes

    def write(self, series: str, topic: str, version: int, at: int | str = 0) -> None:
        """Runs a versioned batch write, and repeats it after a kill."""
        EVENTS["batch write"] += 1
        newest = max((v for s, t, v in self.versions if (s, t) == (series, topic)), default=-1)
        rows = self.versions.setdefault((series, topic, version), Counter())
        value = f"{series}|{topic}|{version}".encode()
        process = self._process([Interruption(at, self.kill)] if at else [])
        for _ in range(2):
            self._running.append(process)
            try:
                write_once(process, self.root / "staging", series, topic, version, [value])
                rows[value] = max(
                    rows[value], int(version >= newest)
                )  # older versions are skipped, because versions only grow
                break
            except Killed:
                process = self._process()
            finally:
                self._running.pop()
        self.check()

    # -- the end

    def catch_up(self, batches: int = 40) -> None:
        """Restarts every query without faults until it has read everything or is refused.

        Args:
            batches: an upper bound of the batches that a query needs.
        """
        for name, place in list(self.places.items()):
            if place.stopped:
                continue
            for system in SYSTEMS.values():
                system.answers.clear()
            outcome = "done"
            self.restart(name)
            for _ in range(batches):
                outcome = self.batch(name)
                if outcome == "failed":
                    self.restart(name)
                elif outcome not in ("done", "conflict"):
                    break
            EVENTS[f"in the end {outcome}"] += 1
            if outcome == "idle":
                self.check_complete(place)
            elif outcome != "refused":
                raise Violation(f"{name} never catches up: {outcome}, {place.refused}")
        for each in self.consumers:
            each.stop()
            each.poll()
        self.check()

    # -- private

    def _process(self, interruptions: Iterable[Interruption] = (), cluster: str = "") -> Process:
        return Process(f"driver-{next(self._numbers)}", self.clusters[cluster], list(interruptions))

    @contextmanager
    def _runs(self, place: Place) -> Iterator[None]:
        """Makes the place's driver the running process, with the place's volume at its path."""
        with place.checkpoint.mounted():
            place.groups.add(place.group)
            place.process.group = place.group
            self._running.append(place.process)
            try:
                yield
            finally:
                self._running.pop()

    def _covered(self, place: Place, last: int | None = None) -> set[str]:
        """Returns the effects of all records that the batches of a checkpoint cover.

        Args:
            place: the checkpoint.
            last: the last batch; None means the last one that was planned.
        """
        with place.checkpoint.mounted():
            last = place.checkpoint.last("offsets") if last is None else None if last < 0 else last
            lines = [] if last is None else place.checkpoint.offsets(last)
            effects = set()
            for number, (source, line) in enumerate(zip(place.query.sources, lines, strict=False)):
                topic = place.cluster.topics.get(source.partition(":")[2])
                if line is not None and topic is not None:
                    ends = json.loads(line)[topic.name]
                    for tp, offset, record in records(topic):
                        if offset < ends.get(str(tp.partition), 0) and record.value is not None:
                            effects.add(f"{number}|{record.value.decode()}")
                elif line is not None:
                    effects |= {f"{number}|{value}" for value in self._wanted(place, source)}
        return effects

    def _run(self, place: Place) -> Run:
        query, process = place.query, place.process
        far = next((each for each in self.clusters.values() if each is not place.cluster), None)
        sources = make_sources(query, process, far, self.outside, place.checkpoint, place.settings)
        sink = QuerySink(
            query, place.checkpoint.folder, place.settings, self.state, process, lambda: self.worker
        )
        return Run(place.checkpoint, process, sources, sink, self.outside, distinct=query.distinct)


__all__ = ["COPIED", "EVENTS", "FAR", "Violation", "World"]

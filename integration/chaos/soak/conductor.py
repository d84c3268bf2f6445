"""Runs the soak chunk by chunk: feed and inject, come to rest, judge, delete what was judged."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import KafkaException

from integration.chaos.soak import readers, samples
from integration.chaos.soak.cluster import Cluster
from integration.chaos.soak.faults import TRANSACTION_TIMEOUT_MS, Faults
from integration.chaos.soak.feeder import Feeder
from integration.chaos.soak.folder import RunFolder
from integration.chaos.soak.hosts import Host
from integration.chaos.soak.judge import Judgement, Printed, Seen, judge
from integration.chaos.soak.readers import JavaConsumer, Offsets, Sinks
from integration.chaos.soak.watch import Watch, prune
from integration.chaos.soak.workload import (
    OUTPUTS,
    PARTITIONS,
    QUERIES,
    SOURCE,
    SPARK,
    Carry,
    Counts,
    Query,
    value_of,
)
from integration.support import processes
from integration.support.driver import Driver
from integration.support.history import read_history
from integration.support.kafka import Admin
from integration.support.processes import await_condition
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry

_VISIBLE_SECONDS = 120.0
_KEEP_SECONDS = 0.25
#: How many entries the logs of a loop keep, as many as those of Spark.
_KEPT_BATCHES = 100
_SAMPLE_SECONDS = 10.0
#: How long brokers take to end after the soak was killed: their supervisors give them ten seconds.
_ORPHANS_SECONDS = 60.0
#: So many chunks with fatal faults take turns with as many without, in which processes grow old.
_CHUNKS_OF_A_PHASE = 3
#: How often a fault does not wait until the queries have recovered from the last one.
_OVERLAPS = 0.25


class StuckError(Exception):
    """The queries did not come to rest although they were helped."""


class WrongError(Exception):
    """A chunk is not what its input implies. The folder keeps everything."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run, which a resumed run keeps.

    Attributes:
        seed: seed of the faults; each chunk has a schedule of its own.
        rows_per_second: rate of the input.
        chunk_seconds: length of a chunk.
        fault_seconds: mean pause between faults, from 0.5 to 1.5 of this; 0 = no faults.
        stuck_seconds: how long a query with input may commit nothing before its process is killed to help it.
    """

    seed: int
    rows_per_second: float = 80.0
    chunk_seconds: float = 240.0
    fault_seconds: float = 20.0
    stuck_seconds: float = 300.0


class Conductor:
    """One session of a run. It begins where the last session's last judged chunk ended.

    The caller holds the run's folder (`RunFolder.held`).

    Args:
        run: the run's folder.
        settings: the run's settings.
        tell: called with one line for each thing that happens.
    """

    def __init__(self, run: RunFolder, settings: Settings, tell: Callable[[str], None]) -> None:
        self._run = run
        self._settings = settings
        self._tell = tell
        self._over = threading.Event()
        self._closed = threading.Event()
        self._failed: Exception | None = None
        last = run.chunks.last()
        self._chunk = 0 if last is None else last["chunk"] + 1
        carried = {} if last is None else last["carry"]
        self._carries = {
            query.name: Carry.from_json(carried[query.name]) if carried else Carry() for query in QUERIES
        }
        self._ends: Offsets = _offsets(last["ends"] if last else {})
        self._last_row = -1 if last is None else last["last_row"]
        self._fault = sum(1 for each in run.faults if each["kind"] == "fault")
        self._sinks = {query.name: Sinks(self._folder(query)) for query in QUERIES if query.sinks}
        self._resume_at: dict[str, float] = {}

    def stop(self) -> None:
        """Ends the run after the chunk that is under way, which ends at once."""
        self._over.set()

    def run(self, minutes: float) -> None:
        """Runs chunks for ``minutes``, which begin when the brokers run.

        Raises:
            WrongError: if a chunk is wrong.
            StuckError: if the queries do not come to rest.
            BrokenBrokerError: if a broker broke its promise.
        """
        with ExitStack() as stack:
            self._open(stack)
            until = Deadline.after_seconds(60 * minutes)
            while not until.expired and not self._over.is_set():
                seconds = min(self._settings.chunk_seconds, until.remaining_seconds())
                self._run_chunk(seconds)

    # -- set-up

    def _open(self, stack: ExitStack) -> None:
        path = self._run.path
        self._end_orphans()
        os.environ[processes.SOAK] = str(path)  # every process that this session starts inherits it
        stack.callback(os.environ.pop, processes.SOAK)
        self._tell("starting the brokers")
        self._cluster = stack.enter_context(Cluster(path / "kafka"))
        self._admin = Admin(self._cluster.direct, log_level=0)
        known = self._admin.client.list_topics(timeout=60).topics
        for topic in (SOURCE, *OUTPUTS):
            if topic not in known:
                self._admin.create(topic, PARTITIONS)
        await_condition(lambda: self._cluster.is_whole(self._admin), 120, "all replicas are in sync")
        self._delete_judged(None)
        unjudged = readers.read(self._cluster.direct, self._starts([SOURCE]))
        first = max((int(each.value) for each in unjudged), default=self._last_row) + 1
        self._unacknowledged = len(unjudged)  # acknowledged to an earlier session, as far as this one knows
        self._java: JavaConsumer = JavaConsumer(self._cluster.direct, OUTPUTS, path)
        stack.callback(self._java.close)
        self._java.keep()
        self._feeder = Feeder(self._cluster.direct, first, self._settings.rows_per_second)
        stack.callback(self._feeder.close)
        self._hosts = {name: self._host(name) for name in dict.fromkeys(query.host for query in QUERIES)}
        checkpoints = {query.name: self._checkpoint(query) for query in QUERIES}
        self._watch = Watch(checkpoints, self._carries, self._run.faults, self._run.batches)
        databases = [sink.database for sink in self._sinks.values()]
        self._faults = Faults(self._cluster, self._hosts, self._admin, path / "state", databases, self._over)
        self._run.events.append(kind="session", chunk=self._chunk, first_row=first)
        keeper = threading.Thread(target=self._keep, daemon=True)
        for host in self._hosts.values():
            stack.callback(host.close)
        stack.callback(lambda: keeper.join(60))
        stack.callback(self._closed.set)
        keeper.start()

    def _end_orphans(self) -> None:
        """Ends processes of an earlier session that was killed.

        They end by themselves when their parent is gone, and brokers in good order. Only a process that is
        paused cannot notice that, so it would stay for ever.
        """
        path = str(self._run.path)

        def only_paused_ones_are_left() -> bool:
            left = processes.marked(processes.SOAK, path)
            return all(each.info["status"] == psutil.STATUS_STOPPED for each in left)

        await_condition(only_paused_ones_are_left, _ORPHANS_SECONDS, "the last session's processes ended")
        for each in processes.marked(processes.SOAK, path):
            self._tell(f"killing process {each.pid} ({each.info['name']}), which the last session paused")
        processes.kill_marked(processes.SOAK, path)

    def _folder(self, query: Query) -> Path:
        return self._run.path / "queries" / query.name

    def _checkpoint(self, query: Query) -> Path:
        return self._folder(query) / "checkpoint"

    def _host(self, name: str) -> Host:
        queries = [query for query in QUERIES if query.host == name]
        for query in queries:
            self._folder(query).mkdir(parents=True, exist_ok=True)
        servers = {"kafka.bootstrap.servers": self._cluster.for_queries}
        source = {
            **servers,
            "subscribe": SOURCE,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "1000",
        }
        sinks = {query.name: {**servers, **self._sink(query)} for query in queries}
        if name == SPARK:
            state = {**servers, "application.id": "counts", "state.dir": str(self._run.path / "state")}
            module = "integration.chaos.soak.spark_driver"
            spec: dict[str, Any] = {
                "folder": str(self._run.path),
                "source": source,
                "sinks": sinks,
                "state": state,
            }
        else:
            (query,) = queries
            module = "integration.chaos.loop"
            spec = {
                "source": source,
                "sink": sinks[query.name],
                "checkpoint": str(self._checkpoint(query)),
                "prefix": f"{query.name}:",
                "available_now": False,
            }
        drivers = self._run.path / "drivers" / name

        def start(failpoints: str) -> Driver:
            history = {} if name == SPARK else {"history": str(self._new_history(name))}
            return Driver({**spec, **history}, drivers, failpoints, module)

        return Host(name, self._run, start, random.Random(f"{self._settings.seed}-{name}-{self._chunk}"))

    def _new_history(self, host: str) -> Path:
        folder = self._run.path / "history"
        folder.mkdir(exist_ok=True)
        return folder / f"{host}-{time.time_ns()}.jsonl"

    def _histories(self, host: str = "*") -> list[Path]:
        return sorted((self._run.path / "history").glob(f"{host}-*.jsonl"))

    def _sink(self, query: Query) -> dict[str, str]:
        only_topic = {"topic": query.topics[0]} if len(query.topics) == 1 else {}
        return {
            **only_topic,
            "application.id": query.name,
            "checkpointLocation": str(self._checkpoint(query)),
            "kafka.transaction.timeout.ms": str(TRANSACTION_TIMEOUT_MS),
            "kafka.socket.timeout.ms": "5000",
            "commitTimeoutMs": "60000",
            **(self._sinks[query.name].options() if query.sinks else {}),
        }

    def _starts(self, topics: list[str]) -> Offsets:
        """Returns where this chunk begins in these topics."""
        return {
            (topic, number): self._ends.get((topic, number), 0)
            for topic in topics
            for number in range(PARTITIONS)
        }

    # -- what runs all the time

    def _keep(self) -> None:
        """Keeps processes running, follows the checkpoints, and takes samples."""
        next_sample = 0.0
        try:
            while not self._closed.wait(_KEEP_SECONDS):
                for host in self._hosts.values():
                    host.keep()
                    self._record_failpoint(host)
                self._watch.look()
                if time.monotonic() >= next_sample:
                    next_sample = time.monotonic() + _SAMPLE_SECONDS
                    for sample in samples.take(self._roles()):
                        self._run.samples.append(**sample)
        except Exception as error:  # noqa: BLE001 - `_check` raises it in the main thread
            self._failed = error

    def _roles(self) -> dict[int, str]:
        roles = {pid: role for host in self._hosts.values() for pid, role in host.processes().items()}
        return roles | self._cluster.roles()

    def _record_failpoint(self, host: Host) -> None:
        fired = host.take_fired()
        if fired is not None:
            self._record_fault("failpoint", f"{host.name} {fired}")
            if "=stop" in fired:
                self._resume_at[host.name] = time.monotonic() + TRANSACTION_TIMEOUT_MS / 1000 + 2
        if time.monotonic() >= self._resume_at.get(host.name, float("inf")):
            del self._resume_at[host.name]
            host.resume()

    def _record_fault(self, kind: str, detail: str) -> None:
        self._run.faults.append(kind="fault", fault=self._fault, what=kind, detail=detail)
        self._watch.injected(self._fault)
        self._fault += 1
        self._tell(f"{kind}: {detail}")

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        self._cluster.check()

    # -- one chunk

    def _run_chunk(self, seconds: float) -> None:
        fatal = self._chunk // _CHUNKS_OF_A_PHASE % 2 == 0
        self._tell(f"chunk {self._chunk} begins, {'all faults' if fatal else 'no driver is killed'}")
        for host in self._hosts.values():
            host.armed = fatal and self._settings.fault_seconds > 0
        began = time.monotonic()
        self._feeder.go()
        self._await_first_commits()
        self._disturb(seconds, fatal)
        self._feeder.rest()
        self._watch.end_input()
        fed = time.monotonic() - began
        for host in self._hosts.values():
            host.armed = False
        self._faults.end_all()
        self._come_to_rest()
        self._judge_chunk(fed)
        self._delete_judged(self._java)
        self._chunk += 1

    def _await_first_commits(self) -> None:
        """Waits until each query has committed in this session. Until then, no fault is injected.

        Raises:
            StuckError: if a query does not.
        """

        def all_have_committed() -> bool:
            self._check()
            return self._over.is_set() or not self._watch.without_commit

        self._watch.begin_input()
        try:
            await_condition(all_have_committed, self._settings.stuck_seconds, "all queries have committed")
        except AssertionError as error:
            raise self._stuck(self._watch.without_commit, error) from error

    def _disturb(self, seconds: float, fatal: bool) -> None:
        """Injects faults for the time of the chunk."""
        chance = random.Random(f"{self._settings.seed}-{self._chunk}")
        kinds = [name for name in Faults.KINDS if fatal or name not in Faults.FATAL]
        pause, until = self._settings.fault_seconds, time.monotonic() + seconds
        next_at = time.monotonic() + chance.uniform(0.5, 1.5) * pause
        overlaps = False
        while time.monotonic() < until and not self._over.is_set():
            self._over.wait(0.5)
            self._check()
            self._help(self._watch.stalled(self._settings.stuck_seconds))
            if not pause or time.monotonic() < next_at or (self._watch.open_faults and not overlaps):
                if self._watch.open_faults and not overlaps:  # the pause begins when all have recovered
                    next_at = max(next_at, time.monotonic() + 0.25 * pause)
                continue
            kind = chance.choice(kinds)
            try:
                detail = self._faults.inject(kind, chance)
            except (KafkaException, sqlite3.OperationalError) as error:
                self._tell(f"{kind}: was impossible, {error}")
                detail = ""
            if detail:
                self._record_fault(kind, detail)
                overlaps = chance.random() < _OVERLAPS
            next_at = time.monotonic() + (chance.uniform(0.5, 1.5) * pause if detail else 0)

    def _help(self, stuck: list[str]) -> None:
        """Kills the processes of queries that are stuck. A run that needed this is not good."""
        if not stuck:
            return
        hosts = dict.fromkeys(query.host for query in QUERIES if query.name in stuck)
        logs = [each.driver.log.name for name, each in self._hosts.items() if name in hosts and each.driver]
        self._run.events.append(kind="help", queries=stuck, logs=logs)
        self._tell(
            f"HELP: {', '.join(stuck)} committed nothing for {self._settings.stuck_seconds:.0f} s; see {logs}"
        )
        self._watch.helped()
        for name in hosts:
            self._hosts[name].kill()
        self._watch.begin_input()

    def _come_to_rest(self) -> None:
        """Waits until all queries have committed all input; kills their processes once if they do not.

        Raises:
            StuckError: if that did not help either.
        """
        await_condition(lambda: self._cluster.is_whole(self._admin), 180, "all replicas are in sync")
        ends = {number: end for (_, number), end in readers.ends_of(self._cluster.direct, [SOURCE]).items()}

        def at_rest() -> bool:
            self._check()
            return not self._watch.unfinished(ends)

        for help_is_left in (True, False):
            try:
                await_condition(at_rest, self._settings.stuck_seconds, "all queries have committed all input")
                return
            except AssertionError as error:
                stuck = self._watch.unfinished(ends)
                if not help_is_left:
                    raise self._stuck(stuck, error) from error
                self._run.events.append(kind="help", queries=stuck, logs=[])
                self._tell(f"HELP: {', '.join(stuck)} did not come to rest")
                self._watch.helped()
                for query in QUERIES:
                    if query.name in stuck:
                        self._hosts[query.host].kill()

    def _stuck(self, queries: list[str], error: AssertionError) -> StuckError:
        self._run.events.append(kind="stuck", queries=queries, logs=[])
        return StuckError(f"{', '.join(queries)}: {error}")

    # -- the verdict

    def _judge_chunk(self, fed: float) -> None:
        direct = self._cluster.direct
        ends, hidden = self._await_visible()
        source = readers.read(direct, self._starts([SOURCE]))
        written = readers.read(direct, self._starts(list(OUTPUTS)))
        printed = self._await_printed(len(written))
        results, carries = {}, {}
        for query in QUERIES:
            seen = Seen(
                printed=printed[query.name],
                records=[each for each in written if each.topic in query.topics],
                hidden=[f"{topic}-{number}" for topic, number in hidden if topic in query.topics],
                sinks=self._sinks[query.name].values() if query.sinks else {},
                states=self._states(query),
                sequence=self._sequence(query),
                history=None if query.host == SPARK else read_history(self._histories(query.host)),
                now_ns=time.monotonic_ns(),
            )
            batches = self._watch.take_batches(query.name)
            results[query.name], carries[query.name] = judge(
                query, self._carries[query.name], batches, source, seen
            )
        lost_input = self._feeder.acknowledged + self._unacknowledged - len(source)
        good = lost_input == 0 and all(each.good for each in results.values())
        stall, stalled = self._watch.longest_stall
        self._carries, self._ends = carries, ends
        self._last_row = max((int(each.value) for each in source), default=self._last_row)
        self._run.chunks.append(
            chunk=self._chunk,
            good=good,
            seconds=fed,
            calm=self._watch.take_calm(),
            input_rows=len(source),
            lost_input=lost_input,
            stall=stall,
            stalled=stalled,
            queries={name: each.to_json() for name, each in results.items()},
            carry={name: each.to_json() for name, each in carries.items()},
            ends=_nested(ends),
            last_row=self._last_row,
        )
        self._feeder.acknowledged = self._unacknowledged = 0
        self._tell(self._summary(results, fed, good))
        if not good:
            examples = [example for each in results.values() for example in each.examples]
            raise WrongError(
                f"chunk {self._chunk} is wrong; lost input: {lost_input}\n" + "\n".join(examples)
            )

    def _summary(self, results: Mapping[str, Judgement], fed: float, good: bool) -> str:
        transactions = sum(each.transactions for each in results.values())
        each_query = ", ".join(f"{name} {each.transactions}" for name, each in results.items())
        verdict = "exactly once" if good else "WRONG"
        return (
            f"chunk {self._chunk}: {verdict}; {transactions} transactions in {fed:.0f} s "
            f"({transactions / fed:.1f}/s): {each_query}"
        )

    def _await_visible(self) -> tuple[Offsets, list[tuple[str, int]]]:
        """Waits until no transaction is open.

        Returns:
            The ends of all topics, and the output partitions whose end stays invisible.
        """
        direct, topics = self._cluster.direct, [SOURCE, *OUTPUTS]
        ends: Offsets = {}
        hidden: list[tuple[str, int]] = []

        def nothing_is_open() -> bool:
            nonlocal ends, hidden
            ends = readers.ends_of(direct, topics)
            stable = readers.ends_of(direct, topics, "read_committed")
            hidden = [partition for partition, end in ends.items() if stable[partition] < end]
            return not hidden

        try:
            await_condition(nothing_is_open, _VISIBLE_SECONDS, "no transaction is open")
        except AssertionError:
            self._tell(f"HIDDEN: {hidden}")  # the judge counts it
        return ends, hidden

    def _await_printed(self, records: int) -> dict[str, list[Printed]]:
        """Waits until the Java consumer has printed as many records as librdkafka has read."""
        lines: list[Printed] = []

        def complete() -> bool:
            nonlocal lines
            self._java.keep()
            lines = list(dict.fromkeys(self._java.printed()))
            return len(lines) >= records

        try:
            await_condition(complete, _VISIBLE_SECONDS, "the Java consumer has read everything")
        except AssertionError:
            self._tell(f"the Java consumer printed {len(lines)} of {records} records")  # the judge counts it
        by_query: dict[str, list[Printed]] = defaultdict(list)
        names = {query.name for query in QUERIES}
        for line in lines:
            name = line.value.partition(":")[0]
            by_query[name if name in names else QUERIES[0].name].append(line)
        return by_query

    def _states(self, query: Query) -> dict[str, dict[str, tuple[int, int]]]:
        if not isinstance(query, Counts):
            return {}
        return readers.states(query.name, self._run.path / "state", self._cluster.direct)

    def _sequence(self, query: Query) -> int:
        def read() -> dict[tuple[str, int], tuple[int, str]]:
            # a client that is older than the coordinator might wait for the last one (librdkafka issue 5511)
            return Admin(self._cluster.direct, log_level=0).group(group_of(query.name), may_be_empty=True)

        group = retry(read, KafkaException, Pauses(Deadline.after_seconds(_VISIBLE_SECONDS), 0.2))
        tokens = [token for _, text in group.values() if (token := Token.decode(text)) is not None]
        return max((token.sequence for token in tokens), default=0)

    def _delete_judged(self, java: JavaConsumer | None) -> None:
        """Deletes what was judged. Repeating this does nothing, so a resumed run begins with it.

        Args:
            java: None at the beginning of a session, when the chunk under way may have begun already. Its
                batches and histories then stay; the judge ignores those of earlier chunks.
        """
        await_condition(self._records_are_deleted, _VISIBLE_SECONDS, "what was judged is deleted from Kafka")
        if java is not None:
            java.forget()
            self._run.batches.clear()
            for path in self._histories():
                os.truncate(path, 0)  # a process that runs goes on at the beginning
        for name, sinks in self._sinks.items():
            if self._last_row >= 0:
                sinks.forget(f"{name}:{value_of(self._last_row)}")
        for query in QUERIES:
            if query.host != SPARK:
                prune(self._checkpoint(query), self._carries[query.name].next_batch - _KEPT_BATCHES)

    def _records_are_deleted(self) -> bool:
        try:
            for (topic, number), end in self._ends.items():
                if end:
                    self._admin.delete_records(topic, number, end)
        except KafkaException as error:
            if not error.args[0].retriable():
                raise
            return False  # a leader has just moved
        return True


def _nested(offsets: Offsets) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = defaultdict(dict)
    for (topic, number), offset in offsets.items():
        nested[topic][str(number)] = offset
    return nested


def _offsets(nested: Mapping[str, Mapping[str, int]]) -> Offsets:
    return {
        (topic, int(number)): offset
        for topic, offsets in nested.items()
        for number, offset in offsets.items()
    }

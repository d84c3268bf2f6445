"""The faults of the soak: what each one does, and which may come in which phase."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import psutil

from integration.chaos.proxy import END_TXN, PRODUCE, TXN_OFFSET_COMMIT, Action, Rule
from integration.chaos.soak.cluster import Cluster
from integration.chaos.soak.hosts import Host, signal_all
from integration.chaos.soak.workload import QUERIES, SPARK
from integration.support.kafka import Admin
from integration.support.processes import await_condition
from kafka_eos_source.protocol.identity import group_of

#: Longer than `TRANSACTION_TIMEOUT_MS`, so that the coordinator aborts what a paused process has open.
_LONG_PAUSE_SECONDS = 12.0
TRANSACTION_TIMEOUT_MS = 10_000
_WHOLE_SECONDS = 180.0


class Faults:
    """Injects faults, one at a time.

    Args:
        cluster: the brokers and proxies.
        hosts: the driver processes, by name.
        admin: admin client with a direct connection.
        state_dir: folder of the local state.
        databases: SQLite files of the sinks.
        over: set when the run must stop; ends a fault that takes its time.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: dict[str, Host],
        admin: Admin,
        state_dir: Path,
        databases: list[Path],
        over: threading.Event,
    ) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._admin = admin
        self._state_dir = state_dir
        self._databases = databases
        self._over = over
        self._late: list[Rule] = []

    def inject(self, name: str, chance: random.Random) -> str:
        """Injects a fault; returns what exactly happened, "" if it was impossible at the moment."""
        return self.KINDS[name](self, chance)

    def end_all(self) -> None:
        """Ends every fault that lasts."""
        self._deliver_late(random.Random(0))
        for host in self._hosts.values():
            host.end_zombie()
            host.resume()
        self._cluster.start_all()

    # -- processes

    def _kill_driver(self, chance: random.Random) -> str:
        host = chance.choice(list(self._hosts.values()))
        host.kill()
        return host.name

    def _kill_worker(self, chance: random.Random) -> str:
        worker = self._worker(chance)
        if worker is None:
            return ""
        worker.kill()
        return f"{worker.pid}"

    def _pause_driver(self, chance: random.Random) -> str:
        host = chance.choice(list(self._hosts.values()))
        driver, seconds = host.driver, chance.choice([0.5, 3.0, _LONG_PAUSE_SECONDS])
        if driver is None:
            return ""
        signal_all(driver, signal.SIGSTOP)
        self._over.wait(seconds)
        signal_all(driver, signal.SIGCONT)
        return f"{host.name} {seconds:g} s"

    def _pause_worker(self, chance: random.Random) -> str:
        worker, seconds = self._worker(chance), chance.choice([1.0, _LONG_PAUSE_SECONDS])
        if worker is None:
            return ""
        worker.suspend()
        self._over.wait(seconds)
        if worker.is_running():
            worker.resume()
        return f"{worker.pid} {seconds:g} s"

    def _overtake(self, chance: random.Random) -> str:
        host = chance.choice(list(self._hosts.values()))
        resume = host.overtaken(seconds=10.0)
        if resume is None:
            return ""
        self._over.wait(chance.uniform(2.0, 20.0))
        resume()
        return host.name

    def _lose_state(self, _chance: random.Random) -> str:
        host = self._hosts[SPARK]
        with host.without_process():
            shutil.rmtree(self._state_dir, ignore_errors=True)
        return host.name

    def _worker(self, chance: random.Random) -> psutil.Process | None:
        """Returns a Python process that Spark started; None if there is none at the moment."""
        pids = [pid for pid, role in self._hosts[SPARK].processes().items() if role.endswith("Python")]
        try:
            return psutil.Process(chance.choice(pids)) if pids else None
        except psutil.NoSuchProcess:
            return None

    # -- brokers

    def _kill_broker(self, chance: random.Random, node: int | None = None) -> str:
        self._await_whole()
        node = node or chance.choice(self._cluster.kafka.nodes)
        down = chance.choice([0.0, 5.0, 15.0])
        self._cluster.kafka.kill_node(node)
        self._over.wait(down)
        self._cluster.kafka.start_node(node)
        return f"broker {node} down {down:g} s"

    def _pause_broker(self, chance: random.Random) -> str:
        self._await_whole()
        node, seconds = chance.choice(self._cluster.kafka.nodes), chance.choice([1.0, 4.0, 12.0])
        self._cluster.kafka.pause_node(node)
        self._over.wait(seconds)
        self._cluster.kafka.resume_node(node)
        return f"broker {node} {seconds:g} s"

    def _move_coordinator(self, chance: random.Random) -> str:
        """Kills the coordinator of a query's transactions or group, which then moves to another broker."""
        topic = chance.choice(["__transaction_state", "__consumer_offsets"])
        query = chance.choice(QUERIES)
        name = group_of(query.name) if topic == "__consumer_offsets" else query.name
        return f"{topic} of {query.name}: {self._kill_broker(chance, self._coordinator(topic, name))}"

    def _coordinator(self, topic: str, name: str) -> int:
        """Returns the leader of the partition of ``topic`` that Java's hash of the name selects."""
        hashed = 0
        for character in name:
            hashed = (31 * hashed + ord(character)) & 0xFFFFFFFF
        signed = hashed - (1 << 32) if hashed >= 1 << 31 else hashed
        partitions = self._admin.client.list_topics(topic, timeout=_WHOLE_SECONDS).topics[topic].partitions
        return int(partitions[abs(signed) % len(partitions)].leader)

    def _await_whole(self) -> None:
        """Waits until the brokers have recovered from the last fault; two at once would lose the quorum."""
        await_condition(
            lambda: self._over.is_set() or self._cluster.is_whole(self._admin),
            _WHOLE_SECONDS,
            "all partitions have all replicas in sync",
        )

    # -- network

    def _cut(self, chance: random.Random) -> str:
        proxies = list(self._cluster.proxies.values())
        chosen = chance.choice([proxies, [chance.choice(proxies)]])
        seconds = chance.choice([0.2, 2.0, 6.0])
        cutting = [threading.Thread(target=each.cut_for, args=(seconds,)) for each in chosen]
        for each in cutting:
            each.start()
        for each in cutting:
            each.join()
        return f"{len(chosen)} of {len(proxies)} brokers, {seconds:g} s"

    def _lose_answer(self, chance: random.Random) -> str:
        api_key = chance.choice([END_TXN, END_TXN, PRODUCE, TXN_OFFSET_COMMIT])
        for proxy in self._cluster.proxies.values():
            proxy.catch(api_key, Action.DROP_ANSWER)
        return f"API key {api_key}"

    def _hold_commit(self, chance: random.Random) -> str:
        """Holds back EndTxn requests, which the clients send again; the held ones arrive at a later time."""
        times = chance.choice([1, 3])
        self._late += [
            proxy.catch(END_TXN, Action.HOLD, times=times) for proxy in self._cluster.proxies.values()
        ]
        return f"{times} for each broker"

    def _deliver_late(self, chance: random.Random) -> str:
        held = [caught for rule in self._late for caught in rule.caught]
        for rule in self._late:
            rule.caught.clear()
        self._late = [rule for rule in self._late if rule.times]
        delivered = 0
        for caught in held:
            try:
                caught.deliver(chance.choice([None, False]))
                delivered += 1
            except OSError:  # the broker is down; the request is lost, which is a fault too
                continue
        return f"{delivered} requests" if delivered else ""

    # -- sinks

    def _lock_database(self, chance: random.Random) -> str:
        path, seconds = chance.choice(self._databases), chance.choice([2.0, 10.0])
        if not path.exists():
            return ""
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            self._over.wait(seconds)
            connection.execute("ROLLBACK")
        return f"{path.parent.name} {seconds:g} s"

    KINDS: ClassVar[dict[str, Callable[[Faults, random.Random], str]]] = {
        "kill driver": _kill_driver,
        "kill Python worker": _kill_worker,
        "pause driver": _pause_driver,
        "pause Python worker": _pause_worker,
        "overtake driver": _overtake,
        "lose state": _lose_state,
        "kill broker": _kill_broker,
        "pause broker": _pause_broker,
        "move coordinator": _move_coordinator,
        "cut network": _cut,
        "lose answer": _lose_answer,
        "hold commit": _hold_commit,
        "deliver late": _deliver_late,
        "lock database": _lock_database,
    }
    #: These end driver processes, or keep them down for long. Phases without them let processes live long
    #: enough to see whether they grow.
    FATAL: ClassVar[frozenset[str]] = frozenset(
        {"kill driver", "kill Python worker", "overtake driver", "lose state", "pause driver"}
    )

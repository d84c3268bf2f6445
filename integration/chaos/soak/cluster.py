"""Three brokers. The queries reach each of them through a proxy; everybody else connects directly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaException

from integration.chaos.proxy import Proxy
from integration.support import broker as brokers
from integration.support.kafka import Admin
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import HOST, Node, Ports, free_ports

BROKERS = 3
_SEGMENT_BYTES = str(16 * 2**20)
_CONFIG = {
    # the cluster notices a dead broker within two seconds instead of nine
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "replica.lag.time.max.ms": "5000",
    # what was judged can be deleted, and what is compacted is compacted soon
    "log.segment.bytes": _SEGMENT_BYTES,
    "offsets.topic.segment.bytes": _SEGMENT_BYTES,
    "transaction.state.log.segment.bytes": _SEGMENT_BYTES,
    "log.retention.check.interval.ms": "60000",
    "log.cleaner.dedupe.buffer.size": str(32 * 2**20),
}
_LISTENERS = {"PLAINTEXT": "PLAINTEXT", "CLIENTS": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}

#: A broker logs this when it finishes a transaction without writing its control records (KAFKA-20734). A
#: committed batch then stays invisible in some partitions, whatever a client does.
_SKIPPED_MARKERS = b"these partitions are likely deleted already and hence can be skipped"


class BrokenBrokerError(Exception):
    """The broker broke its own promise, so the run says nothing about the product."""


class _Proxied(EmbeddedKafka):
    """Brokers with one more listener, which advertises the address of a proxy."""

    def __init__(self, directory: Path, proxies: Mapping[int, Proxy]) -> None:
        super().__init__(
            len(proxies),
            directory=directory,
            config=_CONFIG,  # and the JVM's optimising compiler, because these brokers live for hours
            **brokers.version(os.environ),
        )
        self._proxies = proxies

    def _properties(self, node: Node, ports: Mapping[int, Ports]) -> dict[str, str]:
        proxy, own = self._proxies[node.node_id], ports[node.node_id]
        (proxy.upstream_port,) = free_ports([0])
        return {
            **super()._properties(node, ports),
            "listeners": f"PLAINTEXT://{HOST}:{own.client},CLIENTS://{HOST}:{proxy.upstream_port},"
            f"CONTROLLER://{HOST}:{own.controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{own.client},CLIENTS://{HOST}:{proxy.port}",
            "listener.security.protocol.map": ",".join(f"{name}:{of}" for name, of in _LISTENERS.items()),
        }


class Cluster:
    """The brokers and their proxies; a context manager.

    Attributes:
        proxies: the proxy of each broker, by node id.
        kafka: the brokers.
    """

    def __init__(self, directory: Path) -> None:
        self.proxies = {number: Proxy() for number in range(1, BROKERS + 1)}
        self.kafka = _Proxied(directory, self.proxies)
        self._logs = [directory / f"node-{number}" / "broker.log" for number in self.proxies]
        self._read_to = dict.fromkeys(self._logs, 0)

    def __enter__(self) -> Cluster:
        try:
            self.kafka.start()
        except BaseException:
            self._close_proxies()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kafka.stop()
        self._close_proxies()

    @property
    def for_queries(self) -> str:
        """Bootstrap servers of the queries: the proxies."""
        return ",".join(f"{HOST}:{proxy.port}" for proxy in self.proxies.values())

    @property
    def direct(self) -> str:
        """Bootstrap servers of the run itself."""
        return self.kafka.bootstrap_servers

    def is_whole(self, admin: Admin) -> bool:
        """Whether all brokers run, and each partition has a leader and all its replicas in sync."""
        try:
            listed = admin.client.list_topics(timeout=10)
        except KafkaException:  # no broker answers
            return False
        partitions = [each for topic in listed.topics.values() for each in topic.partitions.values()]
        return len(listed.brokers) == BROKERS and all(
            each.leader > 0 and len(each.isrs) == len(each.replicas) for each in partitions
        )

    def roles(self) -> dict[int, str]:
        """Returns the role of each running broker, by process id."""
        return {pid: f"broker {number}" for number, pid in self.kafka.pids().items()}

    def start_all(self) -> None:
        """Resumes and starts all brokers, and ends what the proxies do to the connections."""
        for node in self.kafka.nodes:
            self.kafka.resume_node(node)
            self.kafka.start_node(node)
        for proxy in self.proxies.values():
            proxy.catch_nothing()

    def check(self) -> None:
        """Raises BrokenBrokerError if a broker has left a transaction unfinished.

        Raises:
            BrokenBrokerError: see there.
        """
        for path in self._logs:
            if not path.exists():
                continue
            with open(path, "rb") as log:
                log.seek(max(0, self._read_to[path] - len(_SKIPPED_MARKERS)))
                text = log.read()
                self._read_to[path] = log.tell()
            if _SKIPPED_MARKERS in text:
                raise BrokenBrokerError(
                    f"{path.parent.name} finished a transaction without writing its control records "
                    "(KAFKA-20734, see 'A committed transaction that hangs' in docs/runbooks.md). "
                    "Run the soak again, with another seed."
                )

    def _close_proxies(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()

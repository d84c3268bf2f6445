"""The name under which tests of consumers know `simulated.kafka`."""

from __future__ import annotations

from collections.abc import Mapping

from fetched_log import Log
from simulated.kafka import CORRUPT_MESSAGE, Partition, SimulatedKafka

__all__ = ["CORRUPT_MESSAGE", "FetchCluster"]


class FetchCluster(SimulatedKafka):
    """Brokers with the given logs, of the partitions 0, 1, … of each topic."""

    def __init__(self, logs: Mapping[Partition, Log], *, brokers: int = 1) -> None:
        topics: dict[str, list[Log]] = {}
        for (topic, number), log in sorted(logs.items()):
            assert number == len(topics.setdefault(topic, [])), "the partitions begin at 0"
            topics[topic].append(log)
        super().__init__(topics, brokers=brokers)

"""A `wire_cluster.WireCluster` that answers requests for records and offsets from models of logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fetched_log import Log
from kafka.protocol.consumer import FetchResponse, ListOffsetsResponse, OffsetForLeaderEpochResponse
from wire_cluster import NOT_LEADER, UNKNOWN_TOPIC, Partition, WireCluster

OUT_OF_RANGE, CORRUPT_MESSAGE, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH = 1, 2, 74, 75


class FetchCluster(WireCluster):
    """Brokers with the given logs.

    Attributes:
        logs: the log of each partition.
        refuse: returns the error code with which a Fetch of a partition is answered; 0 = none.
        hides: returns whether a broker does not find an offset, because a length before it is wrong.
        spoil: returns what is sent instead of these record batches of a partition.
        most_asked: the most bytes that one Fetch asked for.
    """

    def __init__(self, logs: dict[Partition, Log], *, brokers: int = 1) -> None:
        self.logs = logs
        self.refuse: Callable[[Partition], int] = lambda tp: 0
        self.hides: Callable[[Partition, int], bool] = lambda tp, offset: False
        self.spoil: Callable[[Partition, bytes], bytes] = lambda tp, records: records
        self.most_asked = 0
        counts: dict[str, int] = {}
        for topic, number in logs:
            counts[topic] = max(counts.get(topic, 0), number + 1)
        super().__init__(counts, brokers=brokers)

    def remove_topic(self, name: str) -> None:
        """Deletes a topic."""
        with self._lock:
            del self._topics[name]
            self.logs = {tp: log for tp, log in self.logs.items() if tp[0] != name}

    def add_topic(self, name: str, logs: list[Log]) -> None:
        """Creates a topic."""
        with self._lock:
            self._topics[name] = len(logs)
            self.logs |= {(name, number): log for number, log in enumerate(logs)}

    def _code(self, node: int, tp: Partition, epoch: int) -> int:
        if tp not in self.logs:
            return UNKNOWN_TOPIC
        if node != self._node_of(tp[1]):
            return NOT_LEADER
        if epoch not in (-1, self._shift):
            return FENCED_LEADER_EPOCH if epoch < self._shift else UNKNOWN_LEADER_EPOCH
        return 0

    def _on_Fetch(self, node: int, request: Any, version: int, refusal: int) -> dict[str, Any]:  # noqa: N802
        kind = FetchResponse.FetchableTopicResponse
        committed = request.isolation_level == 1
        left, is_first = request.max_bytes, True
        self.most_asked = max(self.most_asked, left)
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                tp = (topic.topic, each.partition)
                code = refusal or self.refuse(tp) or self._code(node, tp, each.current_leader_epoch)
                log = self.logs.get(tp, Log())
                if not code and not log.start <= each.fetch_offset <= log.end:
                    code = OUT_OF_RANGE
                if not code and self.hides(tp, each.fetch_offset):
                    code = CORRUPT_MESSAGE
                records, aborted, diverging = b"", (), None
                if not code and version >= 12 and each.last_fetched_epoch >= 0:
                    epoch, epoch_end = log.epoch_end(each.last_fetched_epoch)
                    if epoch_end < 0:
                        code = OUT_OF_RANGE
                    elif epoch < each.last_fetched_epoch or epoch_end < each.fetch_offset:
                        diverging = kind.PartitionData.EpochEndOffset(
                            epoch=epoch, end_offset=epoch_end, version=version
                        )
                if not code and diverging is None:
                    most = min(left, each.partition_max_bytes)
                    records, aborted = log.fetched(each.fetch_offset, most, committed=committed)
                    if not is_first and len(records) > most:
                        records = b""  # only the first partition gets a batch beyond the limit
                    left = max(0, left - len(records))
                    is_first = is_first and not records
                told = {} if diverging is None else {"diverging_epoch": diverging}
                partitions.append(
                    kind.PartitionData(
                        **told,
                        partition_index=each.partition,
                        error_code=code,
                        high_watermark=-1 if code else log.end,
                        last_stable_offset=-1 if code else log.stable(),
                        log_start_offset=-1 if code else log.start,
                        aborted_transactions=[
                            kind.PartitionData.AbortedTransaction(
                                producer_id=producer, first_offset=first, version=version
                            )
                            for producer, first in aborted
                        ],
                        preferred_read_replica=-1,
                        records=self.spoil(tp, records),
                        version=version,
                    )
                )
            topics.append(kind(topic=topic.topic, partitions=partitions, version=version))
        return {"throttle_time_ms": 0, "error_code": 0, "session_id": 0, "responses": topics}

    def _on_ListOffsets(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        kind = ListOffsetsResponse.ListOffsetsTopicResponse
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                tp = (topic.name, each.partition_index)
                code = refusal or self._code(node, tp, -1)
                log = self.logs.get(tp, Log())
                end = log.stable() if request.isolation_level == 1 else log.end
                partitions.append(
                    kind.ListOffsetsPartitionResponse(
                        partition_index=each.partition_index,
                        error_code=code,
                        timestamp=-1,
                        offset=-1 if code else log.start if each.timestamp == -2 else end,
                        leader_epoch=self._shift,
                        version=version,
                    )
                )
            topics.append(kind(name=topic.name, partitions=partitions, version=version))
        return {"throttle_time_ms": 0, "topics": topics}

    def _on_OffsetForLeaderEpoch(  # noqa: N802
        self, node: int, request: Any, version: int, refusal: int
    ) -> dict[str, Any]:
        kind = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                tp = (topic.topic, each.partition)
                code = refusal or self._code(node, tp, each.current_leader_epoch)
                epoch, end = self.logs.get(tp, Log()).epoch_end(each.leader_epoch)
                partitions.append(
                    kind.EpochEndOffset(
                        partition=each.partition,
                        error_code=code,
                        leader_epoch=-1 if code else epoch,
                        end_offset=-1 if code else end,
                        version=version,
                    )
                )
            topics.append(kind(topic=topic.topic, partitions=partitions, version=version))
        return {"throttle_time_ms": 0, "topics": topics}

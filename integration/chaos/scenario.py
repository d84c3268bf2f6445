"""One query under fault injection: its topics, its input, the processes that run it, and the verdict."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.chaos.oracle import Outcome, outcome
from integration.support.driver import Driver
from integration.support.kafka import Admin, final_end_offsets, produce
from integration.support.processes import await_condition
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import group_of

_KEYS = 10
_SECONDS = 120.0


class Scenario:
    """A query that copies one topic to another, run by `loop` in processes that tests stop and kill.

    Args:
        bootstrap: bootstrap servers of the cluster that it reads and writes.
        folder: folder for its checkpoint and other files.
        start: starts a process that ends with the test (the fixture ``driver``).
        partitions: number of partitions of each topic.
        batch: maximum number of records in a micro-batch.

    Attributes:
        sent: key and value of every record sent to the source, in order.
        sent_from: number in the value of the first record, so that two scenarios can send different ones.
        partitions: number of partitions of each topic.
        starts: number of processes started.
        last_outcome: the result of the last call of `outcome`.
    """

    def __init__(
        self,
        bootstrap: str,
        folder: Path,
        start: Callable[..., Driver],
        *,
        partitions: int = 2,
        batch: int = 50,
    ) -> None:
        name = uuid.uuid4().hex[:8]
        self.bootstrap = bootstrap
        self.admin = Admin(bootstrap)
        self.source = self.admin.create(f"in-{name}", partitions)
        self.sink = self.admin.create(f"out-{name}", partitions)
        self.application_id = f"app-{name}"
        self.checkpoint = folder / f"checkpoint-{name}"
        self.folder = folder
        self.sent: list[tuple[str, str]] = []
        self.sent_from = 0
        self.partitions = partitions
        self.starts = 0
        self.last_outcome: Outcome | None = None
        self._start = start
        self._batch = batch

    @property
    def planned(self) -> int:
        """The newest batch that Spark has planned."""
        newest = offset_log.newest(str(self.checkpoint))
        assert newest is not None, "the query has planned a batch"
        return newest.batch_id

    def feed(self, rows: int) -> None:
        """Sends ``rows`` new records to the source topic."""
        first = self.sent_from + len(self.sent)
        new = [(f"k{row % _KEYS}", f"{row:06d}") for row in range(first, first + rows)]
        produce(
            self.bootstrap,
            self.source,
            [value for _, value in new],
            keys=[key for key, _ in new],
            config={"enable.idempotence": True},  # the input itself must hold each record once
        )
        self.sent += new

    def start(
        self,
        failpoints: str = "",
        *,
        mutations: Sequence[str] = (),
        source: Mapping[str, str] | None = None,
        sink: Mapping[str, str] | None = None,
        checkpoint: Path | None = None,
        program: Mapping[str, Path] | None = None,
        **spec: Any,
    ) -> Driver:
        """Starts a process that runs the query.

        Args:
            failpoints: failpoints to arm in it.
            mutations: rules to switch off in it, see `mutations`.
            source, sink: further options.
            checkpoint: another checkpoint than the scenario's own.
            program: another version of the code, as ``root`` and ``python`` of `Driver`.
            spec: further keys of the spec of `loop`.
        """
        self.starts += 1
        servers = {"kafka.bootstrap.servers": self.bootstrap}
        return self._start(
            {
                "source": {
                    **servers,
                    "subscribe": self.source,
                    "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": str(self._batch),
                    **(source or {}),
                },
                "sink": {
                    **servers,
                    "topic": self.sink,
                    "application.id": self.application_id,
                    "checkpointLocation": str(checkpoint or self.checkpoint),
                    "commitTimeoutMs": "60000",
                    **(sink or {}),
                },
                "checkpoint": str(checkpoint or self.checkpoint),
                "mutations": list(mutations),
                **spec,
            },
            failpoints,
            module="integration.chaos.loop",
            **(program or {}),
        )

    def run(self, **spec: Any) -> None:
        """Runs the query to its end without a fault."""
        self.start(**spec).finish()

    def once(self, name: str) -> Path:
        """Returns the path of a file that a failpoint creates when it fires."""
        return self.folder / f"once-{name}"

    def stopped_at(self, failpoint: str, at_time: int = 1, *, then: str = "", **spec: Any) -> Driver:
        """Starts the query; returns once SIGSTOP has stopped it at its ``at_time``-th pass of a failpoint.

        Args:
            failpoint: name of the failpoint.
            at_time: how often the query passes it until it stops.
            then: further failpoints to arm.
            spec: as `start`.
        """
        once = self.once(uuid.uuid4().hex[:6])
        process = self.start(f"{failpoint}=stop*{at_time}@{once},{then}", **spec)
        await_condition(once.exists, _SECONDS, f"{failpoint} is reached")
        process.await_stopped()
        return process

    def killed_at_each(self, steps: Sequence[str], sink: Mapping[str, str]) -> None:
        """Kills the query once at each step, with new input before each start; then runs it to its end."""
        for step in steps:
            self.feed(60)
            killed = self.start(f"{step}=kill-worker@{self.once(step)}", sink=sink)
            assert killed.wait() == -9, f"{step} was not reached:\n{killed.tail()}"
        self.run(sink=sink)

    def unfinished(self, fault: Callable[[], object], sink: Mapping[str, str]) -> Driver:
        """Breaks an external sink when Kafka has committed the first batch and the sink has not.

        The query waits for the sink until its timeout, then fails with SINK_UNFINISHED.
        """
        self.feed(100)
        # the time includes the transaction of a new broker, and that in which the driver is stopped
        stopped = self.stopped_at("commit.after_commit", sink={**sink, "commitTimeoutMs": "10000"})
        fault()
        stopped.resume()
        assert stopped.wait() == 1
        assert "SINK_UNFINISHED" in stopped.log.read_text(), stopped.tail()
        return stopped

    def written(self) -> int:
        """Returns the sum of the output's end offsets: all records and control records, committed or not.

        Waits until the partitions have the control records of a driver's last transaction.
        """
        return sum(final_end_offsets(self.bootstrap, self.sink).values())

    def outcome(self) -> Outcome:
        """Compares output with input; call it when no process is running any more."""
        group = group_of(self.application_id)
        self.last_outcome = outcome(self.bootstrap, self.source, self.sink, group, self.sent)
        return self.last_outcome

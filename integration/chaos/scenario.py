"""One query under fault: its topics, what was sent to it, the processes that run it, and the verdict."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.chaos.oracle import Outcome, outcome
from integration.support.driver import Driver
from integration.support.kafka import Admin, end_offsets, produce
from integration.support.processes import await_condition

_KEYS = 10
_SECONDS = 120.0


class Scenario:
    """A query from topic to topic, run by `loop`.

    Args:
        bootstrap: of the cluster it reads and writes.
        folder: for its files.
        start: starts processes that end with the test (the fixture ``driver``).
        partitions: of both topics.
        batch: records of a micro-batch.

    Attributes:
        sent: key and value of every record sent to the source, in order.
        starts: processes started.
        last_outcome: the last verdict asked for.
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
        self.starts = 0
        self.last_outcome: Outcome | None = None
        self._start = start
        self._batch = batch

    def feed(self, rows: int) -> None:
        """Sends as many more records."""
        first = len(self.sent)
        new = [(f"k{row % _KEYS}", f"{row:06d}") for row in range(first, first + rows)]
        produce(
            self.bootstrap,
            self.source,
            [value for _, value in new],
            keys=[key for key, _ in new],
            config={"enable.idempotence": True},  # it is not the feeder that is to be judged
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
        **spec: Any,
    ) -> Driver:
        """A process that runs the query; ``restarts``, ``available_now`` as in `loop`."""
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
        )

    def run(self, **spec: Any) -> None:
        """The query to its end, undisturbed."""
        self.start(**spec).finish()

    def once(self, name: str) -> Path:
        """A file that a failpoint makes when it fires."""
        return self.folder / f"once-{name}"

    def stopped_at(self, failpoint: str, at_time: int = 1, **spec: Any) -> Driver:
        """A process that is stopped (SIGSTOP) by now, where it came to the failpoint for the n-th time."""
        once = self.once(uuid.uuid4().hex[:6])
        process = self.start(f"{failpoint}=stop*{at_time}@{once}", **spec)
        await_condition(once.exists, _SECONDS, f"{failpoint} is reached")
        process.await_stopped()
        return process

    def killed_at_each(self, steps: Sequence[str], sink: Mapping[str, str]) -> None:
        """The query is fed and killed again and again, each time a step later; then it runs to its end."""
        for step in steps:
            self.feed(60)
            killed = self.start(f"{step}=kill-worker@{self.once(step)}", sink=sink)
            assert killed.wait() == -9, f"{step} was not reached:\n{killed.tail()}"
        self.run(sink=sink)

    def unfinished(self, fault: Callable[[], object], sink: Mapping[str, str]) -> Driver:
        """Fed, and stopped when Kafka has the first batch; then something happens to an outside system.

        The query waits for it, then fails with a name.
        """
        self.feed(100)
        stopped = self.stopped_at("commit.after_commit", sink={**sink, "commitTimeoutMs": "4000"})
        fault()
        stopped.resume()
        assert stopped.wait() == 1
        assert "SINK_UNFINISHED" in stopped.log.read_text(), stopped.tail()
        return stopped

    def written(self) -> int:
        """Records in the output, committed or not, markers included."""
        return sum(end_offsets(self.bootstrap, self.sink).values())

    def outcome(self) -> Outcome:
        """The verdict, once nothing runs any more."""
        self.last_outcome = outcome(self.bootstrap, self.source, self.sink, self.application_id, self.sent)
        return self.last_outcome

"""A query under load: records arrive and are read all the time, while a test changes the brokers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from confluent_kafka import Consumer, TopicPartition

from integration.chaos.brokers import await_complete
from integration.chaos.scenario import Scenario
from integration.support.checker import check
from integration.support.driver import Driver
from integration.support.history import Record, Recorder, read_history
from integration.support.kafka import end_offsets
from integration.support.processes import await_condition

_ROWS, _EVERY_SECONDS = 20, 0.2
_SECONDS = 180.0


class Load:
    """Feeds a scenario's source and reads its output in two threads, and records what the reader sees.

    Args:
        scenario: the query. While the load runs, only the load feeds it.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._folder = scenario.folder / f"history-{scenario.application_id}"
        self._folder.mkdir()
        self._fed, self._read, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._seen = 0
        self._threads = ThreadPoolExecutor(2)
        self._feeder = self._threads.submit(self._feed)
        self._reader = self._threads.submit(self._record_reads)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._fed.set()
        self._abandoned.set()
        self._threads.shutdown()

    def start(self, failpoints: str = "", **spec: object) -> Driver:
        """Starts a driver that runs until it is told to stop, and records its batches in the history."""
        history = self._folder / f"loop-{self._scenario.starts}.jsonl"
        return self._scenario.start(failpoints, available_now=False, history=str(history), **spec)

    def stopped_at(self, failpoint: str, **spec: object) -> Driver:
        """Starts such a driver; returns once SIGSTOP has stopped it at its second pass of a failpoint."""
        history = self._folder / f"loop-{self._scenario.starts}.jsonl"
        return self._scenario.stopped_at(failpoint, 2, available_now=False, history=str(history), **spec)

    def await_progress(self, driver: Driver, rows: int = 5 * _ROWS) -> None:
        """Waits until the reader has seen ``rows`` more records, so that the query has met what was changed.

        Fails the test if the driver or one of the threads ends meanwhile.
        """
        enough = self._seen + rows
        await_condition(
            lambda: (
                driver.process.poll() is not None
                or self._feeder.done()
                or self._reader.done()
                or self._seen >= enough
            ),
            _SECONDS,
            f"{rows} more records are in the output",
        )
        assert driver.process.poll() is None, f"the driver ended by itself:\n{driver.tail()}"
        for thread in (self._feeder, self._reader):
            if thread.done():
                thread.result()

    def judge(self, driver: Driver) -> None:
        """Ends the load, lets this driver commit everything without a restart, and checks the result.

        The check compares output and input, and looks for contradictions in what all readers saw.
        """
        self._fed.set()
        self._feeder.result(_SECONDS)
        await_complete(self._scenario, driver)
        driver.tell("stop")
        driver.finish()
        self._read.set()
        self._reader.result(_SECONDS)
        found = self._scenario.outcome()
        assert found.exactly_once, found
        findings = check(read_history(sorted(self._folder.glob("*.jsonl"))))
        assert findings.ok, findings

    def _feed(self) -> None:
        while not self._fed.wait(_EVERY_SECONDS):
            self._scenario.feed(_ROWS)

    def _record_reads(self) -> None:
        """Reads the output with one read_committed consumer, from the first record to the last."""
        ends: dict[int, int] = {}
        with (
            _reading(self._scenario) as consumer,
            Recorder(self._folder / "reader.jsonl", "reader") as recorder,
        ):
            while not self._abandoned.is_set():
                if self._read.is_set() and not ends:
                    ends = end_offsets(self._scenario.bootstrap, self._scenario.sink)
                found = [each for each in consumer.consume(1000, 0.2) if each.error() is None]
                if found:
                    self._seen += len(found)
                    recorder.polled(
                        Record(
                            each.topic(),
                            each.partition(),
                            each.offset(),
                            each.key().decode(),
                            each.value().decode(),
                        )
                        for each in found
                    )
                elif ends and all(
                    each.offset >= ends[each.partition] for each in consumer.position(consumer.assignment())
                ):
                    return


@contextmanager
def _reading(scenario: Scenario) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": scenario.bootstrap,
            "group.id": "load",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        partitions = range(scenario.partitions)
        consumer.assign([TopicPartition(scenario.sink, number, 0) for number in partitions])
        yield consumer
    finally:
        consumer.close()

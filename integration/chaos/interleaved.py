"""Input of several transactional producers that commit and abort, and a reader that takes all of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from confluent_kafka import KafkaException, Producer

from integration.chaos.scenario import Scenario
from integration.support.driver import ROOT
from integration.support.kafka import TIMEOUT_SECONDS

_PRODUCERS = 3
_RULE = "if committed and self.aborted:"


class Interleaved:
    """Feeds the source of a scenario with transactions that are open at the same time.

    Args:
        scenario: the scenario; `Scenario.sent` gets only what was committed.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rounds = 0
        self._producers = [
            Producer(
                {
                    "bootstrap.servers": scenario.bootstrap,
                    "transactional.id": f"{scenario.source}-{number}",
                    "linger.ms": 0,
                    "compression.type": ("none", "zstd", "lz4")[number],
                }
            )
            for number in range(_PRODUCERS)
        ]
        for producer in self._producers:
            producer.init_transactions(TIMEOUT_SECONDS)

    def feed(self, rounds: int) -> None:
        """Writes rounds of transactions, one of each producer; one of them is aborted."""
        for _ in range(rounds):
            self._rounds += 1
            written: list[list[tuple[str, str]]] = [[] for _ in self._producers]
            for producer in self._producers:
                producer.begin_transaction()
            for row in range(4):
                for number, producer in enumerate(self._producers):
                    # each producer has its own keys, whose order is that of its transactions
                    record = f"k{number}-{row % 2}", f"{self._rounds:04d}-{number}-{row}"
                    producer.produce(self._scenario.source, record[1], record[0])
                    producer.flush(TIMEOUT_SECONDS)  # batches of all producers alternate in the log
                    written[number].append(record)
            for number, producer in enumerate(self._producers):
                if (self._rounds + number) % _PRODUCERS == 0:
                    _finished(producer.abort_transaction)
                else:
                    _finished(producer.commit_transaction)
                    self._scenario.sent += written[number]


def _finished(end: object) -> None:
    """Calls a producer's commit or abort until it is done; only a repeatable failure is repeated."""
    while True:
        try:
            end(TIMEOUT_SECONDS)  # type: ignore[operator]
            return
        except KafkaException as failure:
            if not failure.args[0].retriable():
                raise


def without_the_abort_rule(folder: Path) -> Path:
    """Returns a copy of the code whose native reader returns records of aborted transactions."""
    root = folder / "without-the-abort-rule"
    for name in ("kafka_eos_source", "integration"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = root / "kafka_eos_source/kafka/fetched_batches.py"
    code = file.read_text()
    assert code.count(_RULE) == 1
    file.write_text(code.replace(_RULE, "if False:"))
    return root

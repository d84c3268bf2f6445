"""Writes the input at a steady rate, without duplicates and in order."""

from __future__ import annotations

import threading
import time

from confluent_kafka import KafkaError, Message, Producer

from integration.chaos.soak.workload import SOURCE, key_of, partition_of, value_of

_EVERY_SECONDS = 0.05
_FLUSH_SECONDS = 180.0


class Feeder:
    """A thread that sends numbered rows to the source topic while it is not paused.

    Args:
        bootstrap: bootstrap servers, without a proxy.
        first: number of the first row.
        rows_per_second: rate.

    Attributes:
        next: number of the next row.
        acknowledged: how many rows the brokers acknowledged.
    """

    def __init__(self, bootstrap: str, first: int, rows_per_second: float) -> None:
        self.next = first
        self.acknowledged = 0
        self._rate = rows_per_second
        self._failed: KafkaError | None = None
        self._run = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._over = False
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.timeout.ms": 0,
                "log_level": 0,
                "on_delivery": self._delivered,
            }
        )
        threading.Thread(target=self._feed, daemon=True).start()

    def go(self) -> None:
        """Starts to send."""
        self._idle.clear()
        self._run.set()

    def rest(self) -> None:
        """Stops to send, and waits until all rows are acknowledged."""
        self._run.clear()
        self._idle.wait()
        left = self._producer.flush(_FLUSH_SECONDS)
        assert left == 0, f"{left} input rows were not acknowledged"
        assert self._failed is None, f"the input failed: {self._failed}"

    def close(self) -> None:
        """Ends the thread."""
        self._over = True
        self._run.set()

    def _feed(self) -> None:
        while True:
            if not self._run.is_set():
                self._idle.set()
                self._run.wait()
            if self._over:
                return
            began, sent = time.monotonic(), 0
            while self._run.is_set() and not self._over:
                while sent < (time.monotonic() - began) * self._rate and self._run.is_set():
                    self._send()
                    sent += 1
                self._producer.poll(0)
                time.sleep(_EVERY_SECONDS)  # the rate of the input

    def _send(self) -> None:
        number = self.next
        while True:
            try:
                self._producer.produce(SOURCE, value_of(number), key_of(number), partition_of(number))
                break
            except BufferError:  # the brokers are away for long
                self._producer.poll(0.1)
        self.next = number + 1

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self.acknowledged += 1
        else:
            self._failed = error

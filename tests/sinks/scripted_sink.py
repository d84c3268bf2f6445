"""A sink whose answers a test scripts, with what a commit needs around it."""

from __future__ import annotations

from typing import Any

from kafka_eos_source.protocol.token import PreparedSinks, Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    Outcome,
    SinkTxn,
    Staged,
)
from kafka_eos_source.sinks.memory import MemorySink
from kafka_eos_source.testing.sinks import ROWS, Given

NAMES = ("left", "right")


def token(sequence: int = 9, batch_id: int = 5, sinks: PreparedSinks | None = None, **more: Any) -> Token:
    return Token("app", "query", "run", sequence, batch_id, "", "", 1, sinks=sinks, **more)


def staged() -> dict[str, Staged]:
    return {name: Given(ROWS.schema, ROWS.num_rows, [ROWS.to_batches()]) for name in NAMES}


class Scripted(MemorySink):
    """Returns scripted outcomes from its first commits, and then commits normally."""

    def __init__(self, system: str, *outcomes: Outcome) -> None:
        super().__init__(system)
        self.outcomes = list(outcomes)
        self.commits = 0

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self.commits += 1
        return self.outcomes.pop(0) if self.outcomes else super().commit(txn, deadline)

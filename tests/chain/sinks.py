"""External two-phase systems for the chain model. Their content outlives every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kafka_eos_source import option_values as values
from kafka_eos_source.sinks.contract import OK, Fatal, Ok, Outcome, Retryable, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.sink_options import SinkOption
from tests.chain.cluster import Killed, Process
from tests.chain.product import Deadline


@dataclass
class System:
    """One external system. Two sinks may share it, as two sinks can share a folder.

    Attributes:
        answers: outcomes of the next calls, by name of the call; such a call has no effect.
    """

    process: Callable[[], Process]
    prepared: dict[str, tuple[SinkTxn, list[str]]] = field(default_factory=dict)
    committed: dict[str, list[str]] = field(default_factory=dict)
    answers: dict[str, list[Outcome]] = field(default_factory=dict)

    def decide(self, sink: str, is_written: Callable[[str], bool]) -> None:
        """Commits or aborts what a sink has prepared, as a person decides who has seen the output."""
        for key, (_, rows) in list(self.prepared.items()):
            if all(row.startswith(f"{sink}:") for row in rows):
                del self.prepared[key]
                if all(is_written(row.partition(":")[2]) for row in rows):
                    self.committed[key] = rows

    def visible(self) -> Counter[str]:
        return Counter(row for rows in self.committed.values() for row in rows)


SYSTEMS: dict[str, System] = {}


class ModelSink(TwoPhaseSink):
    """A sink that follows the table of the contract. It tags rows with its name."""

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("system", values.text, "a", "text", "Which of the model's systems."),
    )

    def __init__(self, system: str = "a") -> None:
        self.system = system

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        system = self._reach("prepare")
        if answer := self._scripted("prepare"):
            return answer
        rows = [row["value"] for batch in staged.batches() for row in batch.to_pylist()]
        if self._key(txn) not in system.committed:
            tagged = [f"{self.context.name}:{row.decode()}" for row in rows if row is not None]
            system.prepared[self._key(txn)] = (txn, tagged)
        self._reach("prepare:after")
        return Ok(f"{txn.sink}-{txn.sequence}")

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        system = self._reach("sink_commit")
        if answer := self._scripted("commit"):
            return answer
        key = self._key(txn)
        if key in system.committed:
            return OK
        if key not in system.prepared:
            return Fatal(f"nothing is prepared under {txn}")
        if txn.digest != f"{txn.sink}-{txn.sequence}":
            return Fatal(f"the token did not pass on what prepare returned, but {txn.digest!r}")
        system.committed[key] = system.prepared.pop(key)[1]
        self._reach("sink_commit:after")
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        system = SYSTEMS[self.system]
        if system.process().dead:
            raise Killed
        if answer := self._scripted("abort"):
            return answer
        system.prepared.pop(self._key(txn), None)
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        system = self._reach("recover")
        if self._scripted("recover") is not None:
            raise ConnectionError("the system does not answer")
        return sorted(txn for txn, _ in system.prepared.values() if self.context.owns(txn))

    def _key(self, txn: SinkTxn) -> str:
        return str(txn)

    def _reach(self, call: str) -> System:
        system = SYSTEMS[self.system]
        system.process().reach(call)
        return system

    def _scripted(self, call: str) -> Outcome | None:
        waiting = SYSTEMS[self.system].answers.get(call)
        return waiting.pop(0) if waiting else None


DOWN = Retryable("the system is down")
BROKEN = Fatal("the system refuses")

"""A sink in the memory of this process, for tests. As in an external system, rows outlive the sink object.

Only this process can change what it has prepared, so it needs no digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.sink_options import SinkOption


@dataclass
class Memory:
    """Content of one external system in memory.

    It has no lock, because a test that "kills" a call would never release it; dicts change atomically.

    Attributes:
        prepared: prepared batches by id.
        committed: committed batches by id, in the order of the commits.
    """

    prepared: dict[SinkTxn, pa.Table] = field(default_factory=dict)
    committed: dict[SinkTxn, pa.Table] = field(default_factory=dict)

    def visible(self) -> pa.Table | None:
        """Returns the rows that readers see; None if nothing was ever committed."""
        return pa.concat_tables(self.committed.values()) if self.committed else None


#: All systems of this process, by name.
SYSTEMS: dict[str, Memory] = {}


class MemorySink(TwoPhaseSink):
    """``type=memory``. Only for tests in one process, because Spark's processes do not share memory."""

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("system", values.text, "default", "text", "Name of the in-memory system."),
    )

    def __init__(self, system: str = "default") -> None:
        self.system = system

    @property
    def memory(self) -> Memory:
        """The system that this sink writes to."""
        return SYSTEMS.setdefault(self.system, Memory())

    def target(self) -> str | None:
        return f"memory {self.system!r}"

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        rows = pa.Table.from_batches(staged.batches(), staged.schema)
        if txn not in self.memory.committed:
            self.memory.prepared[txn] = rows
        return OK

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        memory = self.memory
        rows = memory.prepared.get(txn)
        if rows is not None:
            memory.committed.setdefault(txn, rows)
        memory.prepared.pop(txn, None)
        return OK if txn in memory.committed else Fatal(f"nothing is prepared under {txn}")

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self.memory.prepared.pop(txn, None)
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        memory = self.memory
        return sorted(
            txn for txn in list(memory.prepared) if self.context.owns(txn) and txn not in memory.committed
        )

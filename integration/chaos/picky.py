"""A sink that refuses rows: some by a rule that tasks check, others only when it prepares the batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import Outcome, Refused, RowRefusal, SinkTxn, Staged
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.sql import SqlSink

#: Values that end so break a rule of the sink.
RULE = "5"
#: Values that end so are refused when the sink prepares the batch.
LATE = re.compile(rb"[39]$")


@dataclass(frozen=True, kw_only=True)
class NotEnding(RowRule):
    end: str

    @property
    def what(self) -> str:
        return f"ends with {self.end}"

    def wrong(self, values: pa.Array) -> pa.Array:
        return pc.ends_with(values, self.end.encode())


class Picky(SqlSink):
    """Writes to a database, and takes no row whose value ends with 3, 5 or 9."""

    @property
    def refuses_rows(self) -> bool:
        return True

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        return (NotEnding(column="value", end=RULE),)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        values = [value for batch in staged.batches() for value in batch["value"].to_pylist()]
        bad = {
            number: RowRefusal("bad luck", "value") for number, each in enumerate(values) if LATE.search(each)
        }
        return Refused(bad) if bad else super().prepare(txn, staged, deadline)

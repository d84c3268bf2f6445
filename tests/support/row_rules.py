"""Applies the rules of a sink for rows, as the tasks of a query do."""

from __future__ import annotations

import pyarrow as pa

from kafka_eos_source.sinks.contract import TwoPhaseSink
from kafka_eos_source.testing.sinks import ROWS, deadline

#: Rows with the schema of `ROWS` that no file and no table holds: a text that is not UTF-8.
NOT_UTF8 = pa.table(
    [pa.array([100, 101]), pa.array([b"a\xff", b"\xc3"]).view(pa.string()), pa.array([1.5, None])],
    schema=ROWS.schema,
)


def broken_rules(sink: TwoPhaseSink, rows: pa.Table) -> dict[int, str]:
    """Returns the message of the first rule that each row breaks, by the number of the row."""
    found: dict[int, str] = {}
    for rule in sink.row_rules(rows.schema, deadline()):
        column = pa.concat_arrays(rows[rule.column].chunks)
        for row, is_broken in enumerate(rule.broken(column).to_pylist()):
            if is_broken:
                found.setdefault(row, rule.message(column.type))
    return found

"""A step in the read that cannot decode some records, and sets them aside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.in_read.bad_records import DEAD_LETTER
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import ReadColumn, ReadColumns

ROWS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])


@dataclass(frozen=True)
class Checked:
    """Passes records on; those whose value matches a pattern are bad."""

    pattern: str
    rows: StructType = ROWS

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        found = pc.match_substring_regex(batch["value"].cast(pa.string()), self.pattern).to_pylist()
        yield batch, {row: "it matches" for row, bad in enumerate(found) if bad}


def set_aside(pattern: str) -> dict[str, str]:
    """Returns the option of a source whose tasks set records aside if their value matches a pattern."""
    columns = ReadColumns(tuple(ReadColumn(name, name) for name in ROWS.names))
    step = RowsInRead.of(Checked(pattern), columns, "checks values", on_bad=DEAD_LETTER)
    return {"step.in.read": step.to_option()}

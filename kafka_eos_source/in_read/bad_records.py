"""What becomes of records that a read cannot decode: the argument ``on_bad`` of a read.

===============  ========================================================================================
``on_bad``       a record that cannot be decoded
===============  ========================================================================================
``fail``         fails the task with an error that names the record
``null``         becomes a row; fields that do not fit are null
``dead-letter``  goes around all further steps to the sink, whose option ``onInvalidRecord`` decides
===============  ========================================================================================

Around the steps, bad records travel in packets (`protocol.packing.BadRecords`), because no row of the query
can hold them: a filter would drop the row, and a projection its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.option_values import invalid
from kafka_eos_source.protocol.records import UNDECODABLE
from kafka_eos_source.spark.arrow import BAD_RECORDS, arrow_schema
from kafka_eos_source.spark.schema import ORIGIN_TYPE

OnBad = Literal["fail", "null", "dead-letter"]
FAIL: OnBad = "fail"
NULL: OnBad = "null"
DEAD_LETTER: OnBad = "dead-letter"

#: Columns of the source that name a record in an error.
PLACE = ("topic", "partition", "offset")

#: So many bad records of a topic, and no good one, are no accident.
LEAST_OF_TOPIC = 1000

_LONGEST_MESSAGE, _LONGEST_VALUE = 1000, 200

#: What to do about a bad record where ``on_bad`` is "fail".
FIX = (
    "correct the producer, the schema or the SQL text; on_bad='dead-letter' passes such records to the sink, "
    "which with onInvalidRecord=dead-letter keeps them in deadLetter.topic, and on_bad='null' makes nulls of "
    "what does not fit."
)

#: Likewise, where SQL runs on the columns of the source: the read decodes nothing, and has no ``on_bad``.
FIX_OF_SQL = (
    "correct the producer or the SQL text, or let it return null: TRY_CAST(… AS …), TRY(…). To set such "
    "records aside, decode the values in the read: app.read(schema=…, on_bad='dead-letter')."
)


def check_on_bad(value: str, argument: str = "on_bad") -> OnBad:
    """Returns the value of the argument.

    Raises:
        InvalidOptionError: if there is no such value.
    """
    for each in get_args(OnBad):
        if value == each:
            known: OnBad = each
            return known
    raise invalid(argument, value, " or ".join(map(repr, get_args(OnBad))))


def columns_to_read(on_bad: OnBad) -> tuple[str, ...]:
    """Returns the columns of the source that are needed to name a bad record, or to set it aside."""
    if on_bad != DEAD_LETTER:
        return PLACE
    return ("key", "value", *ORIGIN_TYPE.names, "headers")


@dataclass(frozen=True)
class Records:
    """The records from which rows were made. Nothing is copied until some of them turn out to be bad.

    Attributes:
        batches: batches of the source.
        numbers: positions of the records in these batches, in order.
    """

    batches: Sequence[pa.RecordBatch]
    numbers: range | npt.NDArray[np.int64]

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch]) -> Records:
        """Returns all records of some batches of the source."""
        return cls(batches, range(sum(each.num_rows for each in batches)))

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """Returns the records of several parts, of which there is at least one, one after the other."""
        if len(parts) == 1:
            return parts[0]
        batches: list[pa.RecordBatch] = []
        numbers: list[npt.NDArray[np.int64]] = []
        rows = 0
        for each in parts:
            own = each.numbers
            if isinstance(own, range):  # np.asarray takes a Python object for each number
                own = np.arange(own.start, own.stop, dtype=np.int64)
            numbers.append(own + rows)
            batches += each.batches
            rows += sum(batch.num_rows for batch in each.batches)
        return cls(batches, np.concatenate(numbers))

    def __len__(self) -> int:
        return len(self.numbers)

    def slice(self, start: int, count: int) -> Records:
        """Returns consecutive records."""
        return Records(self.batches, self.numbers[start : start + count])

    def without(self, rows: Sequence[int]) -> Records:
        """Returns the records except those at some positions."""
        return Records(self.batches, np.delete(np.asarray(self.numbers, np.int64), rows))

    def origins(self) -> pa.StructArray:
        """Returns the places and times of the records (`schema.ORIGIN_TYPE`), as the batches have them.

        Nothing is copied if the records are consecutive ones of one batch, as they are until one is bad.
        """
        schema = arrow_schema(ORIGIN_TYPE)
        if not len(self):
            return pa.array([], pa.struct(list(schema)))
        if isinstance(self.numbers, range) and len(self.batches) == 1:
            found = self.batches[0].slice(self.numbers.start, len(self))
        else:
            whole = pa.Table.from_batches([each.select(schema.names) for each in self.batches])
            at = pa.array(np.asarray(self.numbers, np.int64))
            (found,) = whole.take(at).combine_chunks().to_batches()
        return pa.StructArray.from_arrays([found.column(name) for name in schema.names], fields=list(schema))

    def take(self, rows: Sequence[int]) -> pa.RecordBatch:
        """Returns the records at some positions, of which there is at least one, as one batch."""
        at = pa.array([int(self.numbers[row]) for row in rows], pa.int64())
        (found,) = pa.Table.from_batches(self.batches).take(at).combine_chunks().to_batches()
        return found


def bad_records(records: Records, errors: Mapping[int, str], error: str = UNDECODABLE) -> pa.RecordBatch:
    """Returns some records as `BAD_RECORDS`; columns that were not read, or have another type, are null.

    Args:
        records: the records.
        errors: why a record is bad, by its position; at least one.
        error: class of the error.
    """
    rows = sorted(errors)
    bad = records.take(rows)
    given = {
        "error": pa.array([error] * len(rows), pa.string()),
        "message": pa.array([_shortened(errors[row]) for row in rows], pa.string()),
        **{field.name: bad.column(field.name) for field in bad.schema if field in BAD_RECORDS},
    }
    columns = [
        given[field.name] if field.name in given else pa.nulls(len(rows), field.type) for field in BAD_RECORDS
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BAD_RECORDS)


def bad_record(bad: pa.RecordBatch, fix: str = FIX, *, has_value: bool = True) -> InvalidRecordError:
    """Returns the error for the first of some bad records, with the schema `BAD_RECORDS`.

    Args:
        bad: the records.
        fix: what to do.
        has_value: whether their values were read.
    """
    row = {name: bad.column(name)[0].as_py() for name in (*PLACE, "message", "value")}
    more = f" ({bad.num_rows - 1} more like it in this batch)" if bad.num_rows > 1 else ""
    place = "a record"
    if row["topic"] is not None:
        place = "the record of " + place_of(row)
    value = f" The value is {_beginning(row['value'])}." if has_value else ""
    return InvalidRecordError(f"{place} cannot be decoded{more}: {row['message']}.{value}", fix=fix)


def place_of(row: Mapping[str, object]) -> str:
    """Returns where a record is, in words."""
    return f"topic {row['topic']}, partition {row['partition']}, offset {row['offset']}"


def _beginning(value: bytes | None) -> str:
    if value is None:
        return "null"
    text = repr(value[:_LONGEST_VALUE].decode(errors="replace"))
    return text if len(value) <= _LONGEST_VALUE else f"{text}… ({len(value):,} bytes)"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"

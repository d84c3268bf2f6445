"""Statistics of a Parquet file for its add action (PROTOCOL.md, Per-file Statistics).

A bound that is too narrow makes readers skip rows. Therefore only types whose bounds are certain have bounds:
integers, dates, timestamps (widened to whole milliseconds, as Spark reads them) and short strings. Floats
have none, because bounds do not cover NaN.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

#: Longest string bound, as in Delta for Spark (``DataSkippingReader.MAX_STRING_PREFIX_LENGTH``).
_MAX_CHARACTERS = 32
#: Number of columns that have statistics; the default of ``delta.dataSkippingNumIndexedCols``.
_MAX_COLUMNS = 32


def statistics(metadata: pq.FileMetaData, schema: pa.Schema) -> str:
    """Returns the statistics of a file as JSON.

    Args:
        metadata: metadata of the file.
        schema: schema of the file.
    """
    lower: dict[str, Any] = {}
    upper: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    chunks = _chunks(metadata)
    for field in list(schema)[:_MAX_COLUMNS]:
        found = chunks.get(field.name)
        if found is None or not all(each is not None and each.has_null_count for each in found):
            continue
        nulls[field.name] = sum(each.null_count for each in found)
        filled = [each for each in found if each.num_values]
        if filled and _bounded(field.type) and all(each.has_min_max for each in filled):
            low = _lower(min(each.min for each in filled))
            high = _upper(max(each.max for each in filled))
            if low is not None:
                lower[field.name] = low
            if high is not None:
                upper[field.name] = high
    return json.dumps(
        {"numRecords": metadata.num_rows, "minValues": lower, "maxValues": upper, "nullCount": nulls},
        ensure_ascii=False,
    )


def _chunks(metadata: pq.FileMetaData) -> dict[str, list[Any]]:
    """Returns the statistics of all row groups, by column path."""
    found: dict[str, list[Any]] = {}
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for at in range(row_group.num_columns):
            chunk = row_group.column(at)
            found.setdefault(chunk.path_in_schema, []).append(chunk.statistics)
    return found


def _bounded(kind: pa.DataType) -> bool:
    known = (pa.types.is_signed_integer, pa.types.is_date32, pa.types.is_timestamp, pa.types.is_string)
    return any(each(kind) for each in known)


def _lower(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return _millis(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    return value[:_MAX_CHARACTERS] if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        try:
            return _millis(value + datetime.timedelta(microseconds=-value.microsecond % 1000))
        except OverflowError:
            return None
    if isinstance(value, datetime.date):
        return value.isoformat()
    return None if isinstance(value, str) and len(value) > _MAX_CHARACTERS else value


def _millis(value: datetime.datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return text if value.tzinfo is None else f"{text}Z"

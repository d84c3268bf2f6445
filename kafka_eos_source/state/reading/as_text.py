"""Rows of a store as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any


def text(value: Any) -> str:
    """Returns a value as text for a person."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (datetime, date, Decimal)):
        return str(value)
    return value if isinstance(value, str) else json.dumps(value, default=text, ensure_ascii=False)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with the fields of key and value as columns of their own.

    A field of the value that has the name of a field of the key becomes ``value.<name>``.
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("key", "value") and isinstance(value, Mapping):
            for field, each in value.items():
                found[f"{name}.{field}" if field in found else field] = each
        else:
            found[f"column.{name}" if name in found else name] = value
    return found

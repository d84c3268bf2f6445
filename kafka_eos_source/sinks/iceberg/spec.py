"""Parser of the option ``partition.by``: Spark's partition transforms, translated to Iceberg's names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kafka_eos_source import option_values as values

_COLUMN = r"[^\s(),`]+"
_FORMS = re.compile(
    rf"(?P<time>years?|months?|days?|hours?)\(\s*(?P<of>{_COLUMN})\s*\)"
    rf"|(?P<cut>bucket|truncate)\(\s*(?P<width>[1-9][0-9]{{0,8}})\s*,\s*(?P<what>{_COLUMN})\s*\)"
    rf"|(?P<identity>{_COLUMN})"
)
_COMMAS = re.compile(r",(?![^()]*\))")


@dataclass(frozen=True)
class PartitionBy:
    """One field of a partition spec.

    Attributes:
        column: source column in the table; dots separate the fields of structs.
        transform: transform in Iceberg's notation: ``identity``, ``day``, ``bucket[16]``.
        name: name of the partition field, as Iceberg's Java library would choose it.
    """

    column: str
    transform: str
    name: str


def partition_by(name: str, value: str) -> tuple[PartitionBy, ...]:
    """Parses a list such as ``days(ts), bucket(16, id), country``.

    Raises:
        InvalidOptionError: if an entry is malformed or repeated.
    """
    found = tuple(_one(name, value, each.strip()) for each in _COMMAS.split(value))
    if len({each.name for each in found}) < len(found):
        raise values.invalid(name, value, "each column and transform only once")
    return found


def _one(name: str, value: str, text: str) -> PartitionBy:
    form = _FORMS.fullmatch(text)
    if form is None:
        raise values.invalid(
            name,
            value,
            "a comma-separated list of columns and transforms: years(c), months(c), days(c), hours(c), "
            f"bucket(n, c), truncate(n, c); {text!r} is neither",
        )
    if form["time"]:
        transform = form["time"].removesuffix("s")
        return PartitionBy(form["of"], transform, f"{form['of']}_{transform}")
    if form["cut"]:
        ending = "bucket" if form["cut"] == "bucket" else "trunc"
        return PartitionBy(form["what"], f"{form['cut']}[{form['width']}]", f"{form['what']}_{ending}")
    return PartitionBy(form["identity"], "identity", form["identity"])

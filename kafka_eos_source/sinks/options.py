"""How a sink declares its options: `sink.<name>.<option>`, checked on the driver before the first batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafka_eos_source import option_values as values


@dataclass(frozen=True)
class SinkOption:
    """One option of a type of sink.

    Attributes:
        name: lower case, as after ``sink.<name>.``: Spark hands every name on in lower case. One that ends in
            ``.*`` stands for all names that begin so, and its value is a mapping of what comes after.
        parse: from (full name, text) to value (`option_values`).
        default: when it is not set.
        kind: type and unit, for people.
        meaning: for people.
        shown_default: for people, where ``default`` does not say it.
        required: whether it must be set.
        secret: its value, or the password in it if it is a URL, is never shown.
    """

    name: str
    parse: values.Parse[Any]
    default: Any
    kind: str
    meaning: str
    shown_default: str = ""
    required: bool = False
    secret: bool = False

    @property
    def prefix(self) -> str:
        """What the names it stands for begin with; "" = it stands for itself."""
        return self.name.removesuffix("*") if self.name.endswith(".*") else ""


def columns(name: str, value: str) -> tuple[str, ...]:
    """A comma list of column names, each once."""
    found = tuple(each.strip() for each in value.split(",") if each.strip())
    if not found or len(set(found)) != len(found):
        raise values.invalid(name, value, "one column name or several, with commas between, each once")
    return found


#: What every sink takes beside its own.
COMMON: tuple[SinkOption, ...] = (
    SinkOption(
        "type",
        values.text,
        None,
        "text",
        "Which sink: one of the types below, or the import path of a class of yours, `package.module:Class`.",
        required=True,
    ),
    SinkOption(
        "columns",
        columns,
        None,
        "columns, comma list",
        "The columns of the frame that go there.",
        "all but `sink` and the changelog",
    ),
)

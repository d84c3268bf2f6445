"""Declaration of a sink's options: ``sink.<name>.<option>``, checked on the driver before the first batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafka_eos_source import option_values as values
from kafka_eos_source.secrets import ALLOW_HTTP


@dataclass(frozen=True)
class SinkOption:
    """One option of a type of sink.

    Attributes:
        name: the part after ``sink.<name>.``, in lower case because Spark passes all option names on in lower
            case. A name that ends in ``.*`` covers every option with that prefix; its value is a mapping
            from the rest of each name to its value.
        parse: function from the full option name and the user's text to the value; see `option_values`.
        default: value if the user does not set the option.
        kind: type and unit, for documentation and errors.
        meaning: description, for documentation.
        shown_default: default as the documentation shows it, if ``default`` itself is not clear.
        required: whether the user must set the option.
        secret: whether the value is never shown. Of a URL, only the password is hidden.
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
        """Prefix of the names that the option covers; empty if it covers only its own name."""
        return self.name.removesuffix("*") if self.name.endswith(".*") else ""


def columns(name: str, value: str) -> tuple[str, ...]:
    """Parses a comma-separated list of distinct column names.

    Raises:
        InvalidOptionError: if the list is empty or names a column twice.
    """
    found = tuple(each.strip() for each in value.split(",") if each.strip())
    if not found or len(set(found)) != len(found):
        raise values.invalid(name, value, "a comma-separated list of column names without duplicates")
    return found


#: An option of the sinks that send credentials to a URL. Delta's library has `storage.allow_http`.
ALLOW_HTTP_OPTION = SinkOption(
    ALLOW_HTTP,
    values.boolean,
    False,
    "boolean",
    "Whether credentials may be sent over plain http to another host. They may always be to this host.",
)

#: Options that every type of sink has in addition to its own.
COMMON: tuple[SinkOption, ...] = (
    SinkOption(
        "type",
        values.text,
        None,
        "text",
        "Type of the sink: one of the types below, or the import path of your class, `package.module:Class`.",
        required=True,
    ),
    SinkOption(
        "columns",
        columns,
        None,
        "comma-separated columns",
        "Columns of the frame that the sink receives.",
        "all except `sink` and the changelog's",
    ),
)

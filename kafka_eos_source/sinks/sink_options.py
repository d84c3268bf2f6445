"""How a type of sink declares its options, and how errors name these: ``sink.<name>.<option>``.

A sink knows its options by their short names, such as ``url``; the user set ``sink.warehouse.url``. A sink
does not know its own name before it is opened, so `SinkNaming` puts it into the texts, for all sinks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import KafkaEosError
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


# -- names in error messages ---------------------------------------------------------------------

#: Prefix of the options of all sinks.
PREFIX = "sink."

#: "option 'url'", "options 'url', 'table' and 'keys'".
_NAMED = re.compile(r"\boptions? '[^']+'(?:(?:, | and | or )'[^']+')*")
_QUOTED = re.compile(r"'([^']+)'")
#: The name of the sink, in a text that cannot know it.
_PLACEHOLDER = f"{PREFIX}<name>."


@dataclass(frozen=True)
class SinkNaming:
    """The full names of one sink's options. Picklable.

    Attributes:
        sink: name of the sink in the query.
        options: short names of the options that the user may set; empty if the user passed the sink as an
            object, whose arguments have no longer names.
    """

    sink: str
    options: Collection[str] = ()

    def full(self, text: str) -> str:
        """Returns the text with the full names of the sink's options."""
        text = _NAMED.sub(lambda options: _QUOTED.sub(self._quoted, options[0]), text)
        return text.replace(_PLACEHOLDER, f"{PREFIX}{self.sink}.")

    def rename(self, error: KafkaEosError) -> None:
        """Puts the full names of options into the error's texts."""
        _change(error, self.full(error.message), self.full(error.fix))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Lets errors that are raised in the block name the sink, and its options in full."""
        try:
            yield
        except KafkaEosError as error:
            self.rename(error)
            if repr(self.sink) not in error.message and f"{PREFIX}{self.sink}." not in error.message:
                _change(error, f"sink {self.sink!r}: {error.message}", error.fix)
            raise

    def _quoted(self, name: re.Match[str]) -> str:
        short = name[1]
        known = short in self.options or any(
            each.endswith(".*") and short.startswith(each[:-1]) for each in self.options
        )
        return f"'{PREFIX}{self.sink}.{short}'" if known else name[0]


def _change(error: KafkaEosError, message: str, fix: str) -> None:
    error.message, error.fix = message, fix
    error.args = (message, fix)

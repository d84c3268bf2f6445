"""Names a sink and its options in full in error messages.

A sink knows its options by their short names, such as ``url``; the user set ``sink.warehouse.url``. A sink
does not know its own name before it is opened, so this module puts it into the texts, for all sinks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kafka_eos_source.errors import KafkaEosError

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
        return f"'{PREFIX}{self.sink}.{short}'" if short in self.options else name[0]


def _change(error: KafkaEosError, message: str, fix: str) -> None:
    error.message, error.fix = message, fix
    error.args = (message, fix)

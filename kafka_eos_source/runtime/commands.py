"""What all commands share: ``--json``, how they print JSON and errors, default brokers, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from kafka_eos_source.errors import KafkaEosError

#: Key in click's context under which a command notes that ``--json`` is set.
_AS_JSON = "kafka_eos_source.as_json"

#: The environment variable with the brokers of commands whose arguments name none.
BROKERS_VARIABLE = "KAFKA_EOS_BOOTSTRAP_SERVERS"
#: The brokers if nothing names any: where ``kafka-eos broker`` listens.
DEFAULT_BROKERS = "127.0.0.1:9092"

_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def _note(ctx: click.Context, _parameter: click.Parameter, value: bool) -> bool:
    ctx.meta[_AS_JSON] = value
    return value


JSON = click.option("--json", "as_json", is_flag=True, callback=_note, help="Print JSON, for programs.")


def brokers_of_environment() -> str | None:
    """Returns the brokers that `BROKERS_VARIABLE` names; None if it is not set, or empty."""
    return os.environ.get(BROKERS_VARIABLE) or None


def wants_json(ctx: click.Context) -> bool:
    """Returns whether ``--json`` is set on the command that this context invoked."""
    return bool(ctx.meta.get(_AS_JSON))


def json_text(
    value: object, *, indent: int | None = None, default: Callable[[Any], object] | None = None
) -> str:
    """Returns JSON that a terminal shows as it is: other control characters than Python's are escaped too.

    They are DEL, the control characters of ISO 8859 (a terminal takes U+009B for ESC [), separators of
    lines, and those that change the direction of text.
    """
    text = json.dumps(value, indent=indent, default=default, ensure_ascii=False)
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_json(value: object) -> None:
    """Prints one JSON document; docs/command-line.md documents its shape."""
    click.echo(json_text(value, indent=2))


def print_error(error: KafkaEosError, *, as_json: bool) -> None:
    """Prints an error: as JSON on standard output, otherwise as text on standard error."""
    if as_json:
        said = {"condition": error.condition, "message": error.message, "fix": error.fix or None}
        print_json({"error": said})
    else:
        click.echo(str(error), err=True)


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Installs a handler for the block, and restores the previous handlers afterwards.

    A command may run inside another program, such as a test runner, whose Ctrl-C must work again afterwards.

    Args:
        numbers: the signals. Only the main thread may handle signals.
        handler: receives the number of the signal and the interrupted frame.
    """
    before: dict[signal.Signals, signal._HANDLER] = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            # None stands for a handler that was not installed from Python, and cannot be restored from it
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

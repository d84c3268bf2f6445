"""The option ``--json`` of all commands, and how they print JSON."""

from __future__ import annotations

import json

import click

from kafka_eos_source.errors import KafkaEosError

#: Key in click's context under which a command notes that ``--json`` is set.
_AS_JSON = "kafka_eos_source.as_json"


def _note(ctx: click.Context, _parameter: click.Parameter, value: bool) -> bool:
    ctx.meta[_AS_JSON] = value
    return value


JSON = click.option("--json", "as_json", is_flag=True, callback=_note, help="Print JSON, for programs.")


def wants_json(ctx: click.Context) -> bool:
    """Returns whether ``--json`` is set on the command that this context invoked."""
    return bool(ctx.meta.get(_AS_JSON))


def print_json(value: object) -> None:
    """Prints one JSON document; docs/command-line.md documents its shape."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_error(error: KafkaEosError, *, as_json: bool) -> None:
    """Prints an error: as JSON on standard output, otherwise as text on standard error."""
    if as_json:
        said = {"condition": error.condition, "message": error.message, "fix": error.fix or None}
        print_json({"error": said})
    else:
        click.echo(str(error), err=True)

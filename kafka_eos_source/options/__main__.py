"""Writes the pages in ``docs/`` that list options: ``python -m kafka_eos_source.options``.

``docs/options.md`` follows from the option tables of the package and of the external sinks.
"""

from __future__ import annotations

from pathlib import Path

from kafka_eos_source.kafka import properties
from kafka_eos_source.options.table import OPTIONS, READ, STATE, STATE_READ, WRITE
from kafka_eos_source.sinks import specs
from kafka_eos_source.sinks.sink_options import COMMON, SinkOption


def documentation() -> str:
    """Returns the text of ``docs/options.md``."""
    lines = [
        "# Options",
        "",
        "For people who look up an option of a source, a sink or a stateful operator.",
        "",
        "`./dev docs` generates this page from `kafka_eos_source/options/table.py`. Do not edit it. Option "
        "names are not case-sensitive. An unknown option is an error that suggests similar names.",
        "",
        "Options `kafka.*` have the names of librdkafka's and Java's properties; [Kafka "
        "properties](kafka-properties.md) says what each does. `kafka.bootstrap.servers` is required; "
        "`kafka.group.id` names the consumer group.",
    ]
    for title, where in (
        ("Source", READ),
        ("Sink", WRITE),
        ("Stateful operator", STATE),
        ("Reading state", (STATE_READ,)),
    ):
        lines += ["", f"## {title}", "", *_table(where)]
        for each in where:
            ignored = ", ".join(f"`{option.name}`" for option in OPTIONS if each in option.idle)
            lines += ["", f"A {each} accepts but ignores: {ignored}."] if ignored else []
    return "\n".join([*lines, *_sinks(), ""])


def _table(where: tuple[str, ...]) -> list[str]:
    """Returns the table of the options that these reads, or these writes, take."""
    heads = ["option", *(["used by"] if len(where) > 1 else []), "value", "default", "meaning"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for option in OPTIONS:
        users = [each.split()[0] for each in option.where if each in where]
        if users:
            default = option.shown_default or ("none" if option.default is None else f"`{option.default}`")
            meaning = option.meaning + (f" Requires PySpark {option.since} or newer." if option.since else "")
            cells = [f"`{option.name}`", option.kind, _as_text(default), meaning]
            if len(where) > 1:
                cells.insert(1, "both" if len(users) == len(where) else users[0])
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _sinks() -> list[str]:
    """Returns the option tables of the external sink types."""
    lines = [
        "",
        "## Sinks outside Kafka",
        "",
        "Set these as `sink.<name>.<option>` for each name in `sinks`. All types have:",
        *_sink_table(COMMON),
    ]
    for name, kind in sorted(specs.TYPES.items()):
        extra = f" `pip install 'kafka-eos-source[{kind.extra}]'`." if kind.extra else ""
        lines += [
            "",
            f"### `type={name}`",
            "",
            kind.summary + extra,
            *_sink_table(specs.sink_class("x", name).OPTIONS),
        ]
    return lines


def _sink_table(options: tuple[SinkOption, ...]) -> list[str]:
    if not options:
        return []
    lines = ["", "| option | value | default | meaning |", "|---|---|---|---|"]
    for option in options:
        default = option.shown_default or ("" if option.default is None else f"`{option.default}`")
        default = "required" if option.required else _as_text(default)
        lines.append(f"| `{option.name}` | {option.kind} | {default} | {option.meaning} |")
    return lines


def _as_text(default: str) -> str:
    """Returns a default as users write it: booleans in lower case."""
    return default.replace("`True`", "`true`").replace("`False`", "`false`")


if __name__ == "__main__":
    folder = Path(__file__).parents[2] / "docs"
    (folder / "options.md").write_text(documentation(), encoding="utf-8")
    (folder / "kafka-properties.md").write_text(properties.documentation(), encoding="utf-8")

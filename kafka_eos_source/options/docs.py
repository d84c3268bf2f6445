"""``docs/options.md``, made from the table of options."""

from __future__ import annotations

from kafka_eos_source.kafka import config
from kafka_eos_source.options.option import READ, STATE, STATE_READ, WRITE
from kafka_eos_source.options.table import OPTIONS
from kafka_eos_source.sinks import registry
from kafka_eos_source.sinks.options import COMMON, SinkOption


def documentation() -> str:
    """``docs/options.md``."""
    lines = [
        "# Options",
        "",
        "Made from `kafka_eos_source/options/table.py` by `./dev docs`; do not edit. Names are matched in "
        "any letter case. An unknown option is refused, with the nearest names.",
        "",
        "Every `kafka.*` option goes to librdkafka without its prefix; `kafka.bootstrap.servers` is "
        "required, `kafka.group.id` names the consumer group. Names that only Java's client has are "
        "translated or refused, with librdkafka's way named.",
    ]
    for title, where in (
        ("Source", READ),
        ("Sink", WRITE),
        ("Stateful operator", STATE),
        ("State, read", (STATE_READ,)),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            "| option | for | value | default | meaning |",
            "|---|---|---|---|---|",
        ]
        for option in OPTIONS:
            here = [each for each in option.where if each in where]
            if here:
                default = option.shown_default or ("" if option.default is None else f"`{option.default}`")
                which = "both" if len(here) == len(where) else here[0].split()[0]
                default = default.replace("`True`", "`true`").replace("`False`", "`false`")
                meaning = option.meaning + (f" PySpark {option.since} or newer." if option.since else "")
                lines.append(f"| `{option.name}` | {which} | {option.kind} | {default} | {meaning} |")
        idle = [f"`{option.name}`" for option in OPTIONS if set(option.idle) & set(where)]
        lines += ["", f"Accepted where they have no effect: {', '.join(idle)}."] if idle else []
    return "\n".join([*lines, *_sinks(), "", *config.documentation(), ""])


def _sinks() -> list[str]:
    """Tables of the options that each type of sink outside Kafka has."""
    lines = [
        "",
        "## Sinks outside Kafka",
        "",
        "For each name in `sinks`, as `sink.<name>.<option>`. Every type takes:",
        *_sink_table(COMMON),
    ]
    for name, kind in sorted(registry.TYPES.items()):
        extra = f" `pip install 'kafka-eos-source[{kind.extra}]'`." if kind.extra else ""
        lines += [
            "",
            f"### `type={name}`",
            "",
            kind.summary + extra,
            *_sink_table(registry.sink_class("x", name).OPTIONS),
        ]
    return lines


def _sink_table(options: tuple[SinkOption, ...]) -> list[str]:
    if not options:
        return []
    lines = ["", "| option | value | default | meaning |", "|---|---|---|---|"]
    for option in options:
        default = option.shown_default or ("" if option.default is None else f"`{option.default}`")
        default = (
            "required"
            if option.required
            else default.replace("`True`", "`true`").replace("`False`", "`false`")
        )
        lines.append(f"| `{option.name}` | {option.kind} | {default} | {option.meaning} |")
    return lines

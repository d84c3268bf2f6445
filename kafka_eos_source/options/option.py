"""Record that declares one option, and the kinds of reads and writes that take options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafka_eos_source import option_values as values

STREAM_READ, BATCH_READ = "stream read", "batch read"
STREAM_WRITE, BATCH_WRITE = "stream write", "batch write"
READ, WRITE = (STREAM_READ, BATCH_READ), (STREAM_WRITE, BATCH_WRITE)
OPERATOR = "stateful operator"
STATE = (OPERATOR,)
STATE_READ = "state read"

#: Options that carry a query step for the read tasks to run, and what sets each of them.
STEPS_IN_READ = {
    "aggregate.in.read": "aggregate_with_changelog_state",
    "map.in.read": "map_in_read",
    "operator.in.read": "a stateful operator with shards='partitions'",
}

#: Prefix of options of a source that carry the options of the sink (``write=`` of `map_in_read`). Each is an
#: option of its own, so that Spark masks their secrets by name, as it does for the sink.
SINK_IN_READ = "map.in.read.write."
#: Prefix of options of a source that carry the options of a stateful operator (``shards="partitions"``).
OPERATOR_IN_READ = "operator.in.read.options."


@dataclass(frozen=True)
class Option:
    """Declaration of one option.

    Attributes:
        name: the documented name; not case-sensitive.
        where: kinds of reads and writes that take the option.
        parse: turns the text of the option into its value.
        default: value if the option is not set.
        kind: type and unit, for the documentation.
        meaning: description, for the documentation.
        shown_default: the default for the documentation; empty if ``default`` can be shown as it is.
        instead: what to do if the option is set on another kind of read or write.
        since: first PySpark version with the interfaces that it needs; empty if all supported versions have
            them.
        idle: kinds of reads and writes that check the option and then ignore it.
    """

    name: str
    where: tuple[str, ...]
    parse: values.Parse[Any]
    default: Any
    kind: str
    meaning: str
    shown_default: str = ""
    instead: str = ""
    since: str = ""
    idle: tuple[str, ...] = ()

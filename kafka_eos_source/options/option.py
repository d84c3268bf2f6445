"""What an option is, and the reads and writes that one may belong to."""

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

#: Options that have a step of a query which its reads do, and the function of ours that sets each.
STEPS_IN_READ = {"aggregate.in.read": "aggregate_with_changelog_state", "map.in.read": "map_in_read"}


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: as documented; matched in any letter case.
        where: which reads and writes take it.
        parse: from text to value.
        default: when it is not set.
        kind: type and unit, for people.
        meaning: for people.
        shown_default: for people, where ``default`` does not say it.
        instead: what to do where it may not stand.
        since: first PySpark in which it can work; "" = any that is supported.
        idle: reads and writes that accept it, checked and without effect.
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

"""Parses options as the table declares them: each by itself, for one kind of read or write.

What options mean together is checked in `options.parse`, and in `state` for the options of operators.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pyspark

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import config
from kafka_eos_source.options.option import (
    OPERATOR_IN_READ,
    READ,
    SINK_IN_READ,
    STREAM_READ,
    STREAM_WRITE,
    WRITE,
    Option,
)
from kafka_eos_source.options.table import BY_NAME, OPTIONS
from kafka_eos_source.sinks import sink_options

_log = logging.getLogger(__name__)


#: Options that Spark adds for every format; they have no meaning here.
_SPARK_OPTIONS = frozenset({"path", "paths"})


#: Prefixes of the options of asynchronous progress tracking. With it, a repeated batch may read other
#: offsets.
_ASYNCHRONOUS = ("asyncprogresstracking", "_asyncprogresstracking")


def check_pyspark(option: Option, running: str) -> None:
    """Checks that the running PySpark has the interfaces that an option needs.

    Raises:
        InvalidOptionError: if it is too old.
    """
    have, need = (tuple(int(n) for n in re.findall("[0-9]+", each)[:2]) for each in (running, option.since))
    if have < need:
        raise InvalidOptionError(
            f"option {option.name!r} requires PySpark {option.since} or newer; this is PySpark {running}.",
            fix=f"upgrade PySpark, or remove {option.name!r}.",
        )


def is_for_stream_only(options: Iterable[str]) -> bool:
    """Returns whether one of these option names has an effect only on a stream read."""
    return any(BY_NAME[name.lower()].where == (STREAM_READ,) for name in options if name.lower() in BY_NAME)


def parse_table(
    options: Mapping[str, str],
    where: str,
    pyspark_version: str = pyspark.__version__,
    *,
    needs_brokers: bool = True,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Parses all options.

    Args:
        options: as Spark passes them.
        where: kind of read or write, such as `option.STREAM_READ`.
        pyspark_version: version of the running PySpark.
        needs_brokers: whether ``kafka.bootstrap.servers`` is required.

    Returns:
        The value of every option in the table, by name, and the ``kafka.*`` options without that prefix.

    Raises:
        InvalidOptionError: if an option is unknown, malformed, missing, not for this kind of read or write,
            or needs a newer PySpark.
    """
    found = {option.name: option.default for option in OPTIONS}
    keys: dict[str, str] = {}  # the spelling in `options` of each name in lower case
    kafka: dict[str, str] = {}
    for key, value in options.items():
        name = key.lower()
        if options[keys.get(name, key)] != value:
            raise InvalidOptionError(
                f"options {keys[name]!r} and {key!r} are the same option with two different values: option "
                "names are not case-sensitive.",
                fix="keep one of them.",
            )
        keys[name] = key
        if name.startswith("kafka.") and name != "kafka.":
            kafka[name.removeprefix("kafka.")] = str(value)
        elif name.startswith(sink_options.PREFIX) and where == STREAM_WRITE:
            continue  # `registry.parse` checks it
        elif name.startswith(SINK_IN_READ) and where == STREAM_READ:
            continue  # `parse_sink_in_read` checks it
        elif name.startswith(OPERATOR_IN_READ) and where == STREAM_READ:
            continue  # `parse_state` checks it
        elif name in BY_NAME:
            option = BY_NAME[name]
            parsed = _parse_where_allowed(option, str(value), where)
            if option.since and parsed != option.default:
                check_pyspark(option, pyspark_version)
            if where in option.where:
                found[option.name] = parsed
            elif option.where == (STREAM_READ,):
                _log.warning("option %r has no effect on a %s (as in Spark)", option.name, where)
        elif not _is_ignored(name, str(value)):
            raise _unknown(key, str(value), where)
    if needs_brokers and not has_brokers(kafka):
        raise InvalidOptionError(
            "option 'kafka.bootstrap.servers' is missing; expected host:port, or several separated by "
            "commas.",
            fix="set .option('kafka.bootstrap.servers', 'host:9092').",
        )
    return found, kafka


def has_brokers(kafka: Mapping[str, str]) -> bool:
    """Returns whether the ``kafka.*`` options (without prefix) name at least one broker."""
    return any(kafka.get(name, "").strip() for name in ("bootstrap.servers", "metadata.broker.list"))


def _parse_where_allowed(option: Option, value: str, where: str) -> Any:
    """Returns the value of an option that this kind of read or write accepts.

    Raises:
        InvalidOptionError: if it does not accept the option, or the value is malformed.
    """
    if where not in (*option.where, *option.idle):
        raise InvalidOptionError(
            f"option {option.name!r} (value {value!r}) cannot be used for a {where}, only for a "
            f"{' or '.join(option.where)}.",
            fix=f"{option.instead or _other_place(option, where)}.",
        )
    return option.parse(option.name, value)


def _other_place(option: Option, where: str) -> str:
    if set(option.where) <= set(WRITE) and where in READ:
        return "set it on the sink (df.writeStream or df.write)"
    if set(option.where) <= set(READ) and where in WRITE:
        return "set it on the source (spark.readStream or spark.read)"
    return "remove it"


def _is_ignored(name: str, value: str) -> bool:
    """Returns whether this is an option of Spark that has no meaning here.

    Raises:
        InvalidOptionError: if it is an option of Spark that breaks exactly-once.
    """
    if name.startswith(_ASYNCHRONOUS):
        if name.endswith("enabled") and value.strip().lower() == "false":
            return True
        raise InvalidOptionError(
            f"option {name!r} (value {value!r}) cannot be used: with asynchronous progress tracking, a "
            "repeated batch may read other offsets, which breaks exactly-once.",
            fix="remove it.",
        )
    return name in _SPARK_OPTIONS or name.startswith("__")


def _unknown(key: str, value: str, where: str) -> InvalidOptionError:
    """Returns the error for an unknown option, with similar names.

    It shows the value only if all similar names are options of this package. Otherwise the value may be a
    password.
    """
    name = key.lower()
    bare = name.partition(".")[2]
    if config.is_known(name):
        near = [f"kafka.{name}"]
    elif config.is_known(bare):
        near = [f"kafka.{bare}"]
    else:
        here = {option.name.lower(): option.name for option in OPTIONS if where in option.where}
        here["kafka.bootstrap.servers"] = "kafka.bootstrap.servers"
        near = [here[each] for each in difflib.get_close_matches(name, here, n=2, cutoff=0.6)]
    showable = bool(near) and all(each.lower() in BY_NAME for each in near) and not config.is_secret(name)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return InvalidOptionError(
        f"unknown option {key!r}{f' (value {value!r})' if showable else ''}.{hint}",
        fix="correct the name, or remove the option; docs/options.md lists all options.",
    )


def take_group_id(kafka: dict[str, str]) -> str | None:
    """Removes ``group.id`` from the ``kafka.*`` options and returns it; None if it is not set.

    The package passes the group to its clients itself, so it is not one of the user's client properties.
    """
    value = kafka.pop("group.id", None)
    return None if value is None else values.text("kafka.group.id", value)

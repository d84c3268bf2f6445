"""Runs the checks before the start of a query where Spark's driver runs, for a client of Spark Connect.

The client may not reach the brokers, so the server checks: the parts of a query travel as options of a read
whose `schema` runs the check. Each option of a part stays an option of its own, so that Spark masks its
secrets by name, as it does for the part itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql.types import StringType, StructField, StructType

from kafka_eos_source import errors
from kafka_eos_source.datasource.start_checks import RunningQuery, check_query
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.options.table import CHECK
from kafka_eos_source.runtime.json_input import parse_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Field of the read's schema whose metadata hold the warnings.
_WARNINGS = "warnings"
#: An error of this package as Python prints it, and what Spark adds.
_QUOTED = re.compile(
    rf"{re.escape(errors.__name__)}\.(\w+): \[[\w.]+\] (.+?)\s*(?:SQLSTATE: \w+|\Z)", re.DOTALL
)


def check_on_server(
    session: SparkSession,
    sources: Sequence[Mapping[str, str]],
    operators: Mapping[str, Mapping[str, str]],
    sink: Mapping[str, str],
    schema: StructType,
    running: Iterable[RunningQuery] = (),
) -> list[str]:
    """Runs `check_query` where Spark's driver runs, which for Spark Connect is the server.

    Raises:
        KafkaEosError: as `check_query`. Spark passes the error on as text, with a traceback around it, and
            this function makes an error of it again.
        PySparkException: if the check itself cannot run.
    """
    options = options_of_check(sources, operators, sink, schema, running)
    try:
        found = session.read.format(FORMAT_NAME).options(**options).load().schema
    except PySparkException as failure:
        error = error_in(str(failure))
        if error is None:
            raise
        raise error from None
    return [str(each) for each in found[_WARNINGS].metadata[_WARNINGS]]


def error_in(text: str) -> KafkaEosError | None:
    """Returns the error of this package that Spark quotes in a text; None if there is none."""
    found = _QUOTED.search(text)
    kind = getattr(errors, found[1], None) if found is not None else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, KafkaEosError)):
        return None
    message, has_fix, fix = found[2].rpartition(" Fix: ")
    made: KafkaEosError = kind(message, fix) if has_fix else kind(found[2])
    return made


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises an error of this package that Spark quotes instead of the error of Spark."""
    try:
        yield
    except PySparkException as failure:
        error = error_in(str(failure))
        if error is None:
            raise
        raise error from None


def options_of_check(
    sources: Sequence[Mapping[str, str]],
    operators: Mapping[str, Mapping[str, str]],
    sink: Mapping[str, str],
    schema: StructType,
    running: Iterable[RunningQuery] = (),
) -> dict[str, str]:
    """Returns the options of a read whose schema is computed by `schema_of_check`, for these parts."""
    found = {f"{CHECK}schema": schema.json()}
    for number, source in enumerate(sources):
        found |= {f"{CHECK}source.{number}.{name}": str(value) for name, value in source.items()}
    for number, (store, options) in enumerate(operators.items()):
        found[f"{CHECK}store.{number}"] = store
        found |= {f"{CHECK}operator.{number}.{name}": str(value) for name, value in options.items()}
    found |= {f"{CHECK}sink.{name}": str(value) for name, value in sink.items()}
    for number, query in enumerate(running):
        found[f"{CHECK}running.{number}"] = query.query_id
        if query.name is not None:
            found[f"{CHECK}name.{number}"] = query.name
    return found


def schema_of_check(options: Mapping[str, str]) -> StructType:
    """Runs `check_query` with what `options_of_check` returned; the schema's metadata hold the warnings.

    Args:
        options: as Spark passes them, with names in lower case.

    Raises:
        InvalidOptionError: if there are other options, or these are incomplete.
        KafkaEosError: as `check_query`.
    """
    parts: dict[str, dict[int, dict[str, str]]] = {}
    sink: dict[str, str] = {}
    single: dict[str, str] = {}
    for name, value in options.items():
        kind, _, rest = name[len(CHECK) :].partition(".")
        number, _, option = rest.partition(".")
        if not name.lower().startswith(CHECK):
            raise InvalidOptionError(
                f"option {name!r} is set together with {CHECK}*; expected only the latter.",
                fix=f"remove it: options that begin with {CHECK!r} are internal.",
            )
        if kind == "sink":
            sink[rest] = value
        elif number.isdecimal():
            parts.setdefault(kind, {}).setdefault(int(number), {})[option] = value
        else:
            single[kind] = value
    if "schema" not in single:
        raise InvalidOptionError(
            f"option '{CHECK}schema' is not set.",
            fix=f"remove the options that begin with {CHECK!r}: they are internal.",
        )
    names = {number: each[""] for number, each in parts.get("name", {}).items()}
    warnings = check_query(
        [each for _, each in sorted(parts.get("source", {}).items())],
        {
            store[""]: parts.get("operator", {}).get(number, {})
            for number, store in sorted(parts.get("store", {}).items())
        },
        sink,
        StructType.fromJson(parse_json(single["schema"])),
        [RunningQuery(each[""], names.get(number)) for number, each in parts.get("running", {}).items()],
    )
    return StructType([StructField(_WARNINGS, StringType(), True, {_WARNINGS: warnings})])

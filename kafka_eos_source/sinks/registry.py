"""Which types of sinks there are, and from the options of a query to its sinks."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import secrets
from kafka_eos_source.sinks.contract import TwoPhaseSink
from kafka_eos_source.sinks.options import COMMON, SinkOption
from kafka_eos_source.spark.pickled import from_option

#: Rows with this in the column `sink` go to Kafka alone, so no sink may have the name.
KAFKA = "kafka"
PREFIX = "sink."
#: A sink given as an object (`with_two_phase_sinks`).
OBJECT = "object"

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MOST_SINKS = 16
#: Names of secrets, as stores and catalogs have them: ``s3.session-token``, ``azure_storage_account_key``.
_HANDED_ON = re.compile(r"(^|[._-])(token|key|sas|authorization|connection[_-]string)([._-]|$)")


@dataclass(frozen=True)
class SinkType:
    """One type.

    Attributes:
        path: of its class, ``module:Class``. The module imports without the extra.
        summary: one line, for people.
        extra: of this package, which brings what the sink needs; "" = nothing.
    """

    path: str
    summary: str
    extra: str = ""


#: By name. A type is one line here, a module, and a page in docs/.
TYPES: dict[str, SinkType] = {
    "delta": SinkType(
        "kafka_eos_source.sinks.delta:DeltaSink",
        "A Delta Lake table, a version for each batch ([sink-delta.md](sink-delta.md)).",
        "delta",
    ),
    "filesystem": SinkType(
        "kafka_eos_source.sinks.filesystem:FilesystemSink",
        "Files in a folder: Parquet, JSON lines or CSV ([sink-filesystem.md](sink-filesystem.md)).",
    ),
    "iceberg": SinkType(
        "kafka_eos_source.sinks.iceberg:IcebergSink",
        "An Apache Iceberg table, a snapshot for each batch ([sink-iceberg.md](sink-iceberg.md)).",
        "iceberg",
    ),
    "sql": SinkType(
        "kafka_eos_source.sinks.sql:SqlSink",
        "A table of Postgres, MySQL, MariaDB, SQLite or another database ([sink-sql.md](sink-sql.md)).",
        "sql",
    ),
    "http": SinkType(
        "kafka_eos_source.sinks.http:HttpSink",
        "A web service: prepare, commit and abort endpoints, or a POST under an idempotency key "
        "([sink-http.md](sink-http.md)).",
    ),
    "memory": SinkType("kafka_eos_source.sinks.memory:MemorySink", "This process's memory, for tests."),
    "s3": SinkType(
        "kafka_eos_source.sinks.s3:S3Sink",
        "Objects in S3 or a store like it: Parquet, JSON lines or CSV ([sink-s3.md](sink-s3.md)).",
        extra="s3",
    ),
}


@dataclass(frozen=True)
class SinkSpec:
    """One sink of a query, as its options name it. Picklable; may hold passwords, so not printed.

    Attributes:
        name: in the query.
        type: as the user gave it.
        columns: of the frame that go there; None = all.
        options: values by name, those of `TwoPhaseSink.OPTIONS`.
        pickled: a sink that was given as an object.
        secret_values: what may not be shown.
    """

    name: str
    type: str
    columns: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    pickled: str | None = field(default=None, repr=False)
    secret_values: tuple[str, ...] = field(default=(), repr=False)

    @property
    def key(self) -> str:
        """The same for the same sink. Holds its secrets: not to be shown."""
        return repr((self.name, self.type, self.columns, sorted(self.options.items()), self.pickled))

    def build(self) -> TwoPhaseSink:
        """A new, closed sink. From now on this process hides its secrets.

        Raises:
            InvalidOptionError: the class cannot be loaded, or refuses its options.
        """
        secrets.register_secret_values(self.secret_values)
        if self.pickled is not None:
            # made by `with_two_phase_sinks`, from the user's own object
            given = _checked(from_option(self.pickled), self.name)
            secrets.register_secret_values(_secrets_of(given))
            return given
        return _checked(sink_class(self.name, self.type).from_options(self.options), self.name)


def parse(names: Sequence[str], stated: Mapping[str, str]) -> tuple[SinkSpec, ...]:
    """The sinks of a query.

    Args:
        names: option ``sinks``.
        stated: every option that begins with ``sink.``, by its name in lower case.

    Raises:
        InvalidOptionError: an option is unknown, malformed or missing, or its class cannot be loaded.
    """
    for full in stated:
        name = full.removeprefix(PREFIX).partition(".")[0]
        if name not in names:
            raise InvalidOptionError(
                f"option {full!r} belongs to no sink: the option 'sinks' names "
                f"{', '.join(map(repr, names)) or 'none'}.",
                fix=f"add {name!r} to 'sinks', or remove the option.",
            )
    return tuple(_spec(name, _own(name, stated)) for name in names)


def sink_names(name: str, value: str) -> tuple[str, ...]:
    """Value of the option ``sinks``: a comma list."""
    found = tuple(each.strip() for each in value.split(",") if each.strip())
    wrong = [each for each in found if not _NAME.fullmatch(each) or each == KAFKA]
    if not found or wrong or len(set(found)) != len(found) or len(found) > _MOST_SINKS:
        raise values.invalid(
            name,
            value,
            f"1 to {_MOST_SINKS} names with commas between, each once: a lower-case letter (Spark hands "
            "option names on in lower case), then letters, digits and underscores, 32 at most; not 'kafka'",
        )
    return found


def sink_class(name: str, type_name: str) -> type[TwoPhaseSink]:
    """The class of a type, or of an import path.

    Raises:
        InvalidOptionError: there is none.
    """
    known = TYPES.get(type_name)
    path = known.path if known is not None else type_name
    module_name, _, class_name = path.partition(":") if ":" in path else path.rpartition(".")
    option = f"{PREFIX}{name}.type"
    if not module_name or not class_name:
        near = difflib.get_close_matches(type_name, TYPES, n=1)
        raise InvalidOptionError(
            f"option {option!r} has the value {type_name!r}; there is no such type of sink. Types: "
            f"{', '.join(sorted(TYPES))}.{f' Did you mean {near[0]!r}?' if near else ''}",
            fix="correct it, or give the import path of a class of yours, package.module:Class.",
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise InvalidOptionError(
            f"option {option!r}: {path!r} cannot be imported: {error}.",
            fix="correct the path; driver and executors need the module.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, TwoPhaseSink)):
        raise InvalidOptionError(
            f"option {option!r}: {path!r} is no subclass of kafka_eos_source.sinks.TwoPhaseSink.",
            fix="derive it from that class.",
        )
    return found


def require(module: str, extra: str) -> ModuleType:
    """Imports what an extra brings, where it is first needed.

    Raises:
        InvalidOptionError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidOptionError(
            f"the module {module!r} is not installed: {error}.",
            fix=f"pip install 'kafka-eos-source[{extra}]', for driver and executors.",
        ) from error


def _own(name: str, stated: Mapping[str, str]) -> dict[str, str]:
    prefix = f"{PREFIX}{name}."
    return {full.removeprefix(prefix): text for full, text in stated.items() if full.startswith(prefix)}


def _spec(name: str, stated: dict[str, str]) -> SinkSpec:
    as_object = stated.pop(OBJECT, None)
    if as_object is not None:
        common = _values(name, stated, COMMON[1:])
        return SinkSpec(name, OBJECT, common["columns"], pickled=as_object)
    if "type" not in stated:
        raise InvalidOptionError(
            f"option '{PREFIX}{name}.type' is missing; expected a type of sink: {', '.join(sorted(TYPES))}.",
            fix="set it, or the import path of a class of yours.",
        )
    type_name = values.text(f"{PREFIX}{name}.type", stated["type"])
    declared = sink_class(name, type_name).OPTIONS
    found = _values(name, stated, (*COMMON, *declared))
    secret = _secrets(stated, declared)
    spec = SinkSpec(
        name,
        type_name,
        found.pop("columns"),
        {option.name: found[option.name] for option in declared},
        secret_values=secret,
    )
    spec.build()  # so that what does not go together is said on the driver
    return spec


def _values(name: str, stated: Mapping[str, str], declared: Sequence[SinkOption]) -> dict[str, Any]:
    known = {option.name: option for option in declared}
    for given in stated:
        if _declared(given, declared) is None:
            near = difflib.get_close_matches(given, known, n=2, cutoff=0.6)
            said = (
                f" Did you mean {' or '.join(repr(f'{PREFIX}{name}.{each}') for each in near)}?"
                if near
                else ""
            )
            # its value may be a password under a wrong name
            raise InvalidOptionError(
                f"unknown option '{PREFIX}{name}.{given}'.{said}",
                fix=f"correct or remove it; this sink takes: {', '.join(sorted(known))}.",
            )
    found: dict[str, Any] = {}
    for option in declared:
        full = f"{PREFIX}{name}.{option.name}"
        if option.prefix:
            found[option.name] = {
                given.removeprefix(option.prefix): _parsed(option, f"{PREFIX}{name}.{given}", text)
                for given, text in stated.items()
                if _declared(given, declared) is option
            }
        elif option.name in stated:
            found[option.name] = _parsed(option, full, stated[option.name])
        elif option.required:
            raise InvalidOptionError(f"option {full!r} is missing; expected {option.kind}.", fix="set it.")
        else:
            found[option.name] = option.default
    return found


def _declared(given: str, declared: Sequence[SinkOption]) -> SinkOption | None:
    """The option that a name is of: its own, else the one with the longest prefix."""
    for option in declared:
        if option.name == given:
            return option
    open_ended = [each for each in declared if each.prefix and each.prefix != given]
    fitting = [each for each in open_ended if given.startswith(each.prefix)]
    return max(fitting, key=lambda each: len(each.prefix), default=None)


def _parsed(option: SinkOption, full: str, text: str) -> Any:
    try:
        return option.parse(full, text)
    except InvalidOptionError as error:
        if option.secret:
            raise InvalidOptionError(f"option {full!r} is not {option.kind}.", fix=error.fix) from None
        raise


def _secrets(stated: Mapping[str, str], declared: Sequence[SinkOption]) -> tuple[str, ...]:
    hidden: list[str] = []
    for given, text in stated.items():
        option, text = _declared(given, declared), text.strip()
        if option is None or not text:
            continue
        # what is handed on to a library is named by it: any URL there may hold a password
        if option.secret or secrets.is_secret(given) or (option.prefix and _HANDED_ON.search(given)):
            hidden += _of_url(text) if "://" in text else [text]
        elif option.prefix and "://" in text:
            hidden += _of_url(text)
    return tuple(hidden)


def _secrets_of(sink: TwoPhaseSink) -> tuple[str, ...]:
    """Of an object: attributes have the names of the options."""
    stated = {each.name: getattr(sink, each.name.replace(".", "_"), None) for each in sink.OPTIONS}
    return _secrets({name: text for name, text in stated.items() if isinstance(text, str)}, sink.OPTIONS)


def _of_url(url: str) -> list[str]:
    """The password in a URL, as it stands there and as it is meant."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return [url]
    return list({password, unquote(password)}) if password else []


def _checked(found: object, name: str) -> TwoPhaseSink:
    if not isinstance(found, TwoPhaseSink):
        raise InvalidOptionError(
            f"sink {name!r} is a {type(found).__name__}; expected a kafka_eos_source.sinks.TwoPhaseSink.",
            fix="derive its class from that one.",
        )
    return found

"""The sinks that a query's options name (``sink.<name>.<option>``), checked before the first batch.

Each type of sink declares its options (`SinkOption`). `parse` turns the options of a query into one
`SinkSpec` for each sink, which creates it. A sink knows its options by their short names, such as ``url``;
the user set ``sink.warehouse.url``. `SinkNaming` puts the full names into the texts of errors.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.secrets import Secrets, is_secret, secrets_of_urls
from kafka_eos_source.sinks.sink_options import COMMON, PREFIX, SinkNaming, SinkOption
from kafka_eos_source.spark.pickled import from_option

if TYPE_CHECKING:
    from kafka_eos_source.sinks.contract import TwoPhaseSink


#: Rows with this value in the column `sink` go to Kafka only, so no sink may have this name.
KAFKA = "kafka"
#: Option and type of a sink that the user passed as an object (`constructors.custom`).
OBJECT = "object"

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MOST_SINKS = 16
#: Names that object stores and catalogs use for secrets: ``s3.session-token``, ``azure_storage_account_key``.
SECRET_NAME = re.compile(r"(^|[._-])(token|key|sas|authorization|connection[_-]string)([._-]|$)")


@dataclass(frozen=True)
class SinkType:
    """One type of sink.

    Attributes:
        path: import path of its class, ``module:Class``. The module must import without the extra.
        summary: one line for the documentation.
        extra: pip extra of this package that installs what the sink needs; empty if it needs nothing.
        library: package that the extra installs.
    """

    path: str
    summary: str
    extra: str = ""
    library: str = ""


#: Types of sinks by name. A new type needs an entry here, a package, and a page in docs/.
TYPES: dict[str, SinkType] = {
    "delta": SinkType(
        "kafka_eos_source.sinks.delta:DeltaSink",
        "A Delta Lake table, a version for each batch ([sink-delta.md](sink-delta.md)).",
        "delta",
        "deltalake",
    ),
    "filesystem": SinkType(
        "kafka_eos_source.sinks.filesystem:FilesystemSink",
        "Files in a folder: Parquet, JSON lines or CSV ([sink-filesystem.md](sink-filesystem.md)).",
    ),
    "iceberg": SinkType(
        "kafka_eos_source.sinks.iceberg:IcebergSink",
        "An Apache Iceberg table, a snapshot for each batch ([sink-iceberg.md](sink-iceberg.md)).",
        "iceberg",
        "pyiceberg",
    ),
    "sql": SinkType(
        "kafka_eos_source.sinks.sql:SqlSink",
        "A table of Postgres, MySQL, MariaDB, SQLite or another database ([sink-sql.md](sink-sql.md)).",
        "database",
        "sqlalchemy",
    ),
    "http": SinkType(
        "kafka_eos_source.sinks.http:HttpSink",
        "A web service: prepare, commit and abort endpoints, or a POST under an idempotency key "
        "([sink-http.md](sink-http.md)).",
    ),
    "memory": SinkType("kafka_eos_source.sinks.memory:MemorySink", "Memory of this process, for tests."),
    "s3": SinkType(
        "kafka_eos_source.sinks.s3:S3Sink",
        "Objects in S3 or a compatible store: Parquet, JSON lines or CSV ([sink-s3.md](sink-s3.md)).",
        "s3",
        "boto3",
    ),
}


@dataclass(frozen=True)
class SinkSpec:
    """One sink of a query, parsed from its options.

    Picklable. Its repr omits the options, because they may contain passwords.

    Attributes:
        name: name of the sink in the query.
        type: type or import path, as the user wrote it.
        columns: columns of the frame that the sink receives; None for all.
        options: parsed values of `TwoPhaseSink.OPTIONS`, by name.
        pickled: the pickled sink, if the user passed an object.
        secret_values: texts that must never be shown.
        secret_options: names of the options that the user set whose values contain secrets; those of options
            with a prefix are complete, as ``storage.account_key``.
    """

    name: str
    type: str
    columns: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    pickled: str | None = field(default=None, repr=False)
    secret_values: tuple[str, ...] = field(default=(), repr=False)
    secret_options: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """Key that is equal for equal sinks. Contains secrets, so it must never be shown."""
        return repr((self.name, self.type, self.columns, sorted(self.options.items()), self.pickled))

    @property
    def naming(self) -> SinkNaming:
        """The names of the sink and its options in error messages."""
        return SinkNaming(self.name, () if self.pickled is not None else (*self.options, "columns"))

    def build(self) -> TwoPhaseSink:
        """Creates the sink, not yet opened.

        Raises:
            InvalidOptionError: if the class cannot be loaded or rejects its options.
        """
        if self.pickled is not None:
            return checked(from_option(self.pickled), self.name)
        with self.naming.errors():
            return checked(sink_class(self.name, self.type).from_options(self.options), self.name)

    def secrets(self, sink: TwoPhaseSink) -> Secrets:
        """Returns the secrets of a sink that `build` returned."""
        return Secrets(frozenset(self.secret_values if self.pickled is None else _secrets_of(sink)))

    def target(self) -> str:
        """Describes where the sink's rows go: the same text however the options spell it.

        The text contains no credentials. If the sink does not know its target (`TwoPhaseSink.target`), the
        text consists of the type and all options that are not secret, so it also changes with options that do
        not decide where rows go. Of a sink that the user passed as an object, only the class is known then.

        Raises:
            InvalidOptionError: as `build`.
        """
        from kafka_eos_source.runtime.file_systems import without_secrets  # imports pyarrow, for 0.1 s

        sink = self.build()
        with self.naming.errors():
            known = sink.target()
        if known is not None:
            return known
        if self.pickled is not None:
            return f"{type(sink).__module__}:{type(sink).__qualname__}"
        stated = {
            name: without_secrets(value) if isinstance(value, str) else value
            for name, value in sorted(self.options.items())
            if name not in self.secret_options and not isinstance(value, Mapping)
        }
        return f"{self.type} {stated}"


def targets(specs: Sequence[SinkSpec]) -> dict[str, str]:
    """Returns where the rows of each sink go (`SinkSpec.target`), by name of the sink.

    Raises:
        InvalidOptionError: if the class of a sink cannot be loaded or rejects its options.
    """
    return {spec.name: spec.target() for spec in specs}


def parse(names: Sequence[str], stated: Mapping[str, str]) -> tuple[SinkSpec, ...]:
    """Parses the sinks of a query from its options.

    Args:
        names: names in the option ``sinks``.
        stated: text of every option that begins with ``sink.``, by its name in lower case.

    Raises:
        InvalidOptionError: if an option is unknown, malformed or missing, or what a type needs is not
            installed.
    """
    for full in stated:
        name = full.removeprefix(PREFIX).partition(".")[0]
        if name not in names:
            raise InvalidOptionError(
                f"option {full!r} belongs to no sink: the option 'sinks' lists "
                f"{', '.join(map(repr, names)) or 'no names'}.",
                fix=f"add {name!r} to 'sinks', or remove the option.",
            )
    found = tuple(parsed(name, _options_of(name, stated)) for name in names)
    for spec in found:
        known = TYPES.get(spec.type)
        if known is not None and known.library and importlib.util.find_spec(known.library) is None:
            with spec.naming.errors():
                raise _not_installed(known.library, known.extra, "")
    return found


def parsed(name: str, stated: dict[str, str]) -> SinkSpec:
    """Parses the options of one sink. What its type needs may be missing here (`parse` refuses that).

    Args:
        name: name of the sink, for errors.
        stated: text of each option, by its name without ``sink.<name>.``.

    Raises:
        InvalidOptionError: if an option is unknown, malformed or missing, if two contradict each other, or if
            the class cannot be loaded.
    """
    stated = dict(stated)
    as_object = stated.pop(OBJECT, None)
    if as_object is not None:
        common = _values(name, stated, COMMON[1:])
        return SinkSpec(name, OBJECT, common["columns"], pickled=as_object)
    if "type" not in stated:
        raise InvalidOptionError(
            f"option '{PREFIX}{name}.type' is missing; expected a type of sink: {', '.join(sorted(TYPES))}.",
            fix="set it to one of these types, or to the import path of your own class.",
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
        secret_options=frozenset(each for each in stated if _is_secret(each, option_of(each, declared))),
    )
    spec.build()  # raises on the driver if options contradict each other
    return spec


def sink_names(name: str, value: str) -> tuple[str, ...]:
    """Parses the option ``sinks``: a comma-separated list of names.

    Raises:
        InvalidOptionError: if the list is empty or too long, or a name is malformed or repeated.
    """
    found = tuple(each.strip() for each in value.split(",") if each.strip())
    wrong = [each for each in found if not _NAME.fullmatch(each) or each == KAFKA]
    if not found or wrong or len(set(found)) != len(found) or len(found) > _MOST_SINKS:
        raise values.invalid(
            name,
            value,
            f"a comma-separated list of 1 to {_MOST_SINKS} names, each once. A name has at most 32 "
            "characters, starts with a lower-case letter (Spark passes option names on in lower case), "
            "continues with lower-case letters, digits and underscores, and is not 'kafka'",
        )
    return found


def sink_class(name: str, type_name: str) -> type[TwoPhaseSink]:
    """Returns the class of a type of sink, or the class at an import path.

    Raises:
        InvalidOptionError: if the type is unknown, or the import path does not lead to a sink class.
    """
    known = TYPES.get(type_name)
    path = known.path if known is not None else type_name
    module_name, _, class_name = path.partition(":") if ":" in path else path.rpartition(".")
    option = f"{PREFIX}{name}.type"
    if not module_name or not class_name:
        near = difflib.get_close_matches(type_name, TYPES, n=1)
        raise InvalidOptionError(
            f"option {option!r} has the value {type_name!r}, which is not a type of sink; expected one of: "
            f"{', '.join(sorted(TYPES))}.{f' Did you mean {near[0]!r}?' if near else ''}",
            fix="correct the type, or give the import path of your own class, package.module:Class.",
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise InvalidOptionError(
            f"option {option!r} has the value {path!r}, which cannot be imported: {error}.",
            fix="correct the import path, and make the module available on the driver and all executors.",
        ) from error
    from kafka_eos_source.sinks.contract import TwoPhaseSink

    if not (isinstance(found, type) and issubclass(found, TwoPhaseSink)):
        raise InvalidOptionError(
            f"option {option!r} has the value {path!r}, which is no subclass of "
            "kafka_eos_source.sinks.TwoPhaseSink.",
            fix="derive the class from TwoPhaseSink.",
        )
    return found


def require(module: str, extra: str) -> ModuleType:
    """Imports a module that a pip extra of this package installs.

    Raises:
        InvalidOptionError: if the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _not_installed(module, extra, f": {error}") from error


def _not_installed(module: str, extra: str, why: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"the module {module!r} is not installed{why}.",
        fix=f"run pip install 'kafka-eos-source[{extra}]' on the driver and all executors.",
    )


def _options_of(name: str, stated: Mapping[str, str]) -> dict[str, str]:
    prefix = f"{PREFIX}{name}."
    return {full.removeprefix(prefix): text for full, text in stated.items() if full.startswith(prefix)}


def _values(name: str, stated: Mapping[str, str], declared: Sequence[SinkOption]) -> dict[str, Any]:
    known = {option.name: option for option in declared}
    for own_name in stated:
        if option_of(own_name, declared) is None:
            near = difflib.get_close_matches(own_name, known, n=2, cutoff=0.6)
            hint = (
                f" Did you mean {' or '.join(repr(f'{PREFIX}{name}.{each}') for each in near)}?"
                if near
                else ""
            )
            # without the value: it may be a password under a misspelled name
            raise InvalidOptionError(
                f"unknown option '{PREFIX}{name}.{own_name}'.{hint}",
                fix=f"correct or remove it. Options of this sink: {', '.join(sorted(known))}.",
            )
    found: dict[str, Any] = {}
    for option in declared:
        full = f"{PREFIX}{name}.{option.name}"
        if option.prefix:
            found[option.name] = {
                own_name.removeprefix(option.prefix): parsed_value(option, f"{PREFIX}{name}.{own_name}", text)
                for own_name, text in stated.items()
                if option_of(own_name, declared) is option
            }
        elif option.name in stated:
            found[option.name] = parsed_value(option, full, stated[option.name])
        elif option.required:
            raise InvalidOptionError(
                f"option {full!r} is missing; expected {option.kind}.", fix="set the option."
            )
        else:
            found[option.name] = option.default
    return found


def option_of(name: str, declared: Sequence[SinkOption]) -> SinkOption | None:
    """Returns the option declared by this name, else by its longest declared prefix."""
    for option in declared:
        if option.name == name:
            return option
    open_ended = [each for each in declared if each.prefix and each.prefix != name]
    fitting = [each for each in open_ended if name.startswith(each.prefix)]
    return max(fitting, key=lambda each: len(each.prefix), default=None)


def parsed_value(option: SinkOption, full: str, text: str) -> Any:
    """Parses the value of an option.

    Raises:
        InvalidOptionError: if it is not valid. The message shows no secret.
    """
    try:
        return option.parse(full, text)
    except InvalidOptionError as error:
        if option.secret:
            raise InvalidOptionError(
                f"option {full!r} has a value (not shown) that is not valid; expected {option.kind}.",
                fix=error.fix,
            ) from None
        raise


def _secrets(stated: Mapping[str, str], declared: Sequence[SinkOption]) -> tuple[str, ...]:
    """Returns the parts of option values that must never be shown."""
    hidden: list[str] = []
    for name, text in stated.items():
        option, text = option_of(name, declared), text.strip()
        if option is None or not text:
            continue
        if "://" in text:
            hidden += secrets_of_urls([text])
        elif _is_secret(name, option):
            hidden.append(text)
    return tuple(hidden)


def _is_secret(name: str, option: SinkOption | None) -> bool:
    """Whether an option of a sink is secret: it is declared so, or has the name of one."""
    if option is None:
        return False
    return bool(option.secret or is_secret(name) or (option.prefix and SECRET_NAME.search(name)))


def _secrets_of(sink: TwoPhaseSink) -> tuple[str, ...]:
    """Returns the secrets of a sink that the user passed as an object.

    Reads the attributes that are named like the options.
    """
    stated = {each.name: getattr(sink, each.name.replace(".", "_"), None) for each in sink.OPTIONS}
    return _secrets({name: text for name, text in stated.items() if isinstance(text, str)}, sink.OPTIONS)


def checked(found: object, name: str) -> TwoPhaseSink:
    """Returns the sink that a user passed as an object. Raises InvalidOptionError if it is none."""
    from kafka_eos_source.sinks.contract import TwoPhaseSink

    if not isinstance(found, TwoPhaseSink):
        raise InvalidOptionError(
            f"sink {name!r} is a {type(found).__name__}; expected a kafka_eos_source.sinks.TwoPhaseSink.",
            fix="derive the class of the sink from TwoPhaseSink.",
        )
    return found

"""Sinks outside Kafka as Python calls: ``delta("lake/revenue")``, ``sql(url, "revenue")``, ``custom(My())``.

Each call returns a `Sink`: the options of the sink, checked, under whatever name the query gives it. So the
Python form and the option form (``sink.<name>.<option>``) are the same thing, and `Sink.options` shows it.
The arguments follow one rule: they are the options of the type, with underscores for dots. An option that
ends in ``.*`` is an argument that takes a dict of what the star stands for.

`SinkOption`s declare the options. Tests compare the arguments, defaults, choices and descriptions below with
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.secrets import MASK, shown_url
from kafka_eos_source.sinks import specs
from kafka_eos_source.sinks.sink_options import COMMON, PREFIX, SinkOption
from kafka_eos_source.sinks.sink_options import columns as column_list
from kafka_eos_source.spark.pickled import to_option

if TYPE_CHECKING:
    from kafka_eos_source.sinks.contract import TwoPhaseSink

#: Columns, as a list or as one text with commas.
Columns = str | Sequence[str]

#: Stands for the name that the query will give to a sink, in errors.
_NAME = "<name>"


@dataclass(frozen=True, repr=False)
class Sink:
    """A sink outside Kafka, as `delta`, `sql`, `custom` and the others return it. The query gives it a name.

    Its repr contains no secrets. Its options and its pickle do, because a query needs them.

    Attributes:
        stated: The options that differ from their defaults, as text, by their names without ``sink.<name>.``.
    """

    stated: tuple[tuple[str, str], ...]

    @property
    def type(self) -> str:
        """The value of the option ``sink.<name>.type``; "object" for a sink that `custom` pickled."""
        return dict(self.stated).get("type", specs.OBJECT)

    def options(self, name: str) -> dict[str, str]:
        """Returns the options of this sink under a name, for ``writeStream.options(…)``.

        Args:
            name: name of the sink in the query. The option ``sinks`` must list it; see `sink_options`.

        Raises:
            InvalidOptionError: if the name is not one for a sink.
        """
        if specs.sink_names("sinks", name) != (name,):
            raise values.invalid("sinks", name, "one name for each sink, without commas and blanks")
        return {f"{PREFIX}{name}.{own}": text for own, text in self.stated}

    def build(self) -> TwoPhaseSink:
        """Returns the sink itself, not yet opened, as a query would create it."""
        return specs.parsed(_NAME, dict(self.stated)).build()

    def __repr__(self) -> str:
        spec = specs.parsed(_NAME, dict(self.stated))
        if self.type == specs.OBJECT:
            kind = type(spec.build())
            return f"Sink(custom, {kind.__module__}:{kind.__qualname__})"
        shown = (
            f"{own}={_shown(text, is_secret=own in spec.secret_options)}"
            for own, text in self.stated
            if own != "type"
        )
        return f"Sink({', '.join([self.type, *shown])})"


def _shown(text: str, *, is_secret: bool) -> str:
    if "://" in text:
        return repr(shown_url(text))
    return MASK if is_secret else repr(text)


def sink_options(sinks: Mapping[str, Sink]) -> dict[str, str]:
    """Returns the options that add sinks to a ``writeStream.format("kafka-eos")``.

    Use it as ``writer.options(**sink_options({"lake": delta("lake/revenue"), "db": sql(url, "revenue")}))``.

    Args:
        sinks: sinks by name. The name is part of the ids under which a sink prepares batches, so it must stay
            the same for as long as the query lives.

    Returns:
        The option ``sinks``, and the options ``sink.<name>.<option>`` of each sink.

    Raises:
        InvalidOptionError: if a name is not one for a sink, or a value is no `Sink`.
    """
    names = specs.sink_names("sinks", ",".join(sinks))
    found = {"sinks": ",".join(names)}
    for name, sink in sinks.items():
        if not isinstance(sink, Sink):
            raise InvalidOptionError(
                f"sink {name!r} is of the class {type(sink).__name__}; expected what delta(), iceberg(), "
                "sql(), files(), s3(), http() or custom() returns.",
                fix="pass a sink of your own as custom(MySink(…)).",
            )
        found.update(sink.options(name))
    return found


# -- the constructors --------------------------------------------------------------------------------


def delta(
    path: str | os.PathLike[str],
    *,
    storage: Mapping[str, str] | None = None,
    create: bool = True,
    partition_by: Columns = (),
    properties: Mapping[str, str] | None = None,
    schema_evolution: Literal["fail", "add"] = "fail",
    compression: Literal["snappy", "zstd", "gzip", "none"] = "snappy",
    buffer_bytes: int = 134_217_728,
    columns: Columns | None = None,
) -> Sink:
    """Writes to a Delta Lake table: each micro-batch becomes one version of it.

    Args:
        path: URI of the table's folder.
        storage: Storage options of delta-rs: `aws_region`, `aws_secret_access_key` and so on.
        create: Whether to create the table if it does not exist.
        partition_by: Partition columns of a table that the sink creates.
        properties: Properties of a table that the sink creates: `{"delta.appendOnly":"true"}`.
        schema_evolution: What to do if the frame has columns that the table lacks: fail the query, or add the
            columns.
        compression: Compression of Parquet's pages.
        buffer_bytes: Size of the rows that a task buffers in memory before it writes a file.
        columns: Columns of the frame that the sink receives; None = all except `sink` and the changelog's.

    Raises:
        InvalidOptionError: if a value is not valid.
    """
    given = locals()
    if isinstance(
        storage, Mapping
    ):  # delta-rs reads them in any case, and its documentation writes AWS_REGION
        given["storage"] = {name.lower(): value for name, value in storage.items()}
    return _sink("delta", "delta", given)


def iceberg(
    table: str,
    *,
    catalog_name: str = "default",
    catalog: Mapping[str, str] | None = None,
    create: bool = True,
    partition_by: Columns = (),
    properties: Mapping[str, str] | None = None,
    schema_evolution: Literal["fail", "add"] = "fail",
    buffer_bytes: int = 134_217_728,
    allow_http: bool = False,
    columns: Columns | None = None,
) -> Sink:
    """Writes to an Apache Iceberg table: each micro-batch becomes one snapshot of it.

    Args:
        table: Name of the table: `namespace.table`.
        catalog_name: Name of the catalog in pyiceberg.
        catalog: pyiceberg's properties of the catalog and its file system: `type`, `uri`, `warehouse`,
            `s3.region` and so on.
        create: Whether to create the table if it does not exist.
        partition_by: Partition fields of a table that the sink creates: `days(ts), bucket(16, id), country`.
        properties: Properties of a table that the sink creates.
        schema_evolution: What to do if the frame has columns that the table lacks, or wider types: fail the
            query, or change the table.
        buffer_bytes: Size of the rows that a task buffers in memory before it writes a file.
        allow_http: Whether credentials may be sent over plain http to another host. They may always be to
            this host.
        columns: Columns of the frame that the sink receives; None = all except `sink` and the changelog's.

    Raises:
        InvalidOptionError: if a value is not valid.
    """
    return _sink("iceberg", "iceberg", locals())


def sql(
    url: str,
    table: str,
    *,
    schema: str | None = None,
    mode: Literal["append", "upsert"] = "append",
    keys: Columns = (),
    create: bool = True,
    two_phase: Literal["auto", "require", "never"] = "auto",
    batch_rows: int = 10_000,
    ledger_table: str = "kafka_eos_ledger",
    columns: Columns | None = None,
) -> Sink:
    """Writes to a table of Postgres, MySQL, MariaDB, SQLite or another database.

    Args:
        url: Database and Python driver: `postgresql+psycopg://…`, `mysql+pymysql://…`, `sqlite:////path`.
        table: Table that receives the rows.
        schema: Schema of the table and the ledger; None = the connection's.
        mode: `upsert` replaces the row that has the same values in `keys`.
        keys: Key columns of an upsert. The table needs a primary key or unique constraint on them.
        create: Whether to create the table if it does not exist, with `keys` as its primary key.
        two_phase: Whether to use prepared transactions. `auto`: if the database supports them. Without them,
            the sink writes the rows in one transaction at commit.
        batch_rows: Most rows per INSERT statement.
        ledger_table: Table in which the sink records committed batches; created if it does not exist.
        columns: Columns of the frame that the sink receives; None = all except `sink` and the changelog's.

    Raises:
        InvalidOptionError: if a value is not valid, or `mode` and `keys` contradict each other.
    """
    return _sink("sql", "sql", locals())


def files(
    path: str | os.PathLike[str],
    *,
    format: Literal["parquet", "json", "csv"] = "parquet",
    compression: Literal["none", "snappy", "zstd", "gzip", "lz4"] = "snappy",
    columns: Columns | None = None,
) -> Sink:
    """Writes files to a folder: Parquet, JSON lines or CSV. Each micro-batch becomes one folder in it.

    This is the type ``filesystem`` of the option form.

    Args:
        path: Folder that driver and executors share: local, `hdfs://`, `s3://`, `gs://`, `abfs://`.
        format: Format of the files. `json` writes one JSON object per line.
        compression: Compression of Parquet's pages.
        columns: Columns of the frame that the sink receives; None = all except `sink` and the changelog's.

    Raises:
        InvalidOptionError: if a value is not valid.
    """
    return _sink("files", "filesystem", locals())


def s3(
    path: str,
    *,
    format: Literal["parquet", "json", "csv"] = "parquet",
    compression: Literal["none", "snappy", "zstd", "gzip", "lz4"] = "snappy",
    endpoint: str | None = None,
    allow_http: bool = False,
    region: str | None = None,
    path_style: bool = False,
    part_bytes: int = 8_388_608,
    upload_threads: int = 4,
    timeout: str | int = "30s",
    columns: Columns | None = None,
) -> Sink:
    """Writes objects to S3 or a compatible store: Parquet, JSON lines or CSV. boto3 finds the credentials.

    Args:
        path: Bucket and prefix: `s3://bucket/prefix`.
        format: Format of the files. `json` writes one JSON object per line.
        compression: Compression of Parquet's pages.
        endpoint: URL of a store other than AWS; None = boto3's configuration.
        allow_http: Whether credentials may be sent over plain http to another host. They may always be to
            this host.
        region: Region of the bucket; None = boto3's configuration.
        path_style: Whether the bucket is in the path of URLs instead of the host name.
        part_bytes: Size of each part of an upload except the last: 5 MiB or more. An object can have 10,000
            parts.
        upload_threads: Number of parts that one task uploads at the same time. These and one more are in its
            memory.
        timeout: Time limit for connecting, and for each wait for an answer. A text with a unit, or
            milliseconds.
        columns: Columns of the frame that the sink receives; None = all except `sink` and the changelog's.

    Raises:
        InvalidOptionError: if a value is not valid.
    """
    return _sink("s3", "s3", locals())


def http(
    url: str,
    *,
    mode: Literal["two-phase", "idempotency-key"] = "two-phase",
    format: Literal["json", "arrow"] = "json",
    auth: str | None = None,
    auth_env: str | None = None,
    auth_header: str = "Authorization",
    timeout: str | int = "30s",
    retries: int = 3,
    ca_file: str | os.PathLike[str] | None = None,
    allow_http: bool = False,
    key_header: str | None = None,
    status_url: str | None = None,
    on_conflict: Literal["done", "retry"] | None = None,
    columns: Columns | None = None,
) -> Sink:
    """Sends each micro-batch to a web service, by two-phase commit or under an idempotency key.

    Args:
        url: URL of the service. `two-phase`: its endpoints are below it. `idempotency-key`: it receives the
            rows.
        mode: `two-phase`: the service has endpoints to prepare, commit and abort. `idempotency-key`: it
            accepts one POST per batch and recognises a repetition by its key.
        format: Format of the body: one JSON object per line, or an Arrow IPC stream.
        auth: Value of the header that `auth_header` names, such as `Bearer …`. Never shown.
        auth_env: Environment variable of the driver that contains the value of that header.
        auth_header: Name of the header that authenticates the client.
        timeout: Time limit for connecting, and for each wait for an answer. After it, the sink reads the
            state of the id or repeats the request. A text with a unit, or milliseconds.
        retries: Number of retries of one call. After them, the driver retries the commit with its own
            back-off.
        ca_file: PEM file of certificates to trust; None = the system's.
        allow_http: Whether credentials may be sent over plain http to another host. They may always be to
            this host.
        key_header: `idempotency-key`: name of the header that carries the id; None = `Idempotency-Key`.
        status_url: `idempotency-key`: URL on the same host that reports the state of an id. Without it, the
            sink repeats the request.
        on_conflict: `idempotency-key`: meaning of status 409. `done`: an earlier request succeeded. `retry`:
            one is still in progress (as in the IETF draft). None = `done`.
        columns: Columns of the frame that the sink receives; None = all except `sink` and the changelog's.

    Raises:
        InvalidOptionError: if a value is not valid, or two of them contradict each other.
    """
    return _sink("http", "http", locals())


def custom(
    sink: TwoPhaseSink | type[TwoPhaseSink], *, columns: Columns | None = None, **options: object
) -> Sink:
    """Writes to a system of your own, through a class that derives from `TwoPhaseSink`.

    Args:
        sink: An object, which is pickled into the query's options, with any password in it; classes that a
            script or notebook defines work too. Or a class of a module that the driver and all executors can
            import; then `options` are passed to it as text, by the class's `OPTIONS`.
        columns: Columns of the frame that the sink receives; None = all except `sink` and the changelog's.
        options: Options of the class: underscores stand for dots, and an option that ends in ``.*`` takes
            a dict.

    Raises:
        TypeError: if an argument is no option of the class, or options were given with an object.
        InvalidOptionError: if the value is no sink, cannot be pickled, or an option is missing or not valid.
    """
    if not isinstance(sink, type):
        if options:
            raise TypeError(f"custom() got the options {', '.join(options)} with an object; set them in it")
        pickled = to_option(
            specs.checked(sink, "custom()"), "the sink", fix="connect in open(), not in __init__()."
        )
        return Sink(((specs.OBJECT, pickled), *_texts("custom", COMMON[1:], {"columns": columns})))
    path = f"{sink.__module__}:{sink.__qualname__}"
    if sink.__module__ == "__main__" or "<locals>" in path:
        raise InvalidOptionError(
            f"custom(): the class {path} cannot be imported by other processes.",
            fix=f"pass an object, custom({sink.__name__}(…)), or move the class to a module.",
        )
    declared = specs.sink_class(_NAME, path).OPTIONS
    unknown = set(options) - set(map(_argument, declared))
    missing = [each for each in declared if each.required and _argument(each) not in options]
    if unknown or missing:
        what, names = ("an unexpected", unknown) if unknown else ("no", set(map(_argument, missing)))
        raise TypeError(f"custom({sink.__name__}) got {what} argument {', '.join(map(repr, sorted(names)))}")
    defaults = {_argument(each): each.default for each in declared}
    return _sink("custom", path, {**defaults, **options, "columns": columns})


# -- from arguments to options -----------------------------------------------------------------------


def _argument(option: SinkOption) -> str:
    """Returns the name of the argument for an option."""
    return option.name.removesuffix(".*").replace(".", "_")


def _sink(function: str, type_name: str, given: Mapping[str, Any]) -> Sink:
    """Returns the sink with these arguments.

    Raises:
        InvalidOptionError: if a value is not valid; the message names the function, argument and option.
    """
    declared = (*specs.sink_class(_NAME, type_name).OPTIONS, *COMMON[1:])
    sink = Sink((("type", type_name), *_texts(function, declared, given)))
    try:
        specs.parsed(_NAME, dict(sink.stated))  # refuses options that contradict each other
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{function}(): {error.message}", fix=error.fix) from None
    return sink


def _texts(
    function: str, declared: Sequence[SinkOption], given: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Returns the options that arguments set to another value than the default, with their texts."""
    found: dict[str, str] = {}
    for option in declared:
        argument = _argument(option)
        value = given[argument]
        if value is None and not option.required:
            continue
        where = f"argument {argument!r} of {function}()"
        if option.prefix:
            found.update(_open_ended(option, declared, value, where))
            continue
        full = f"{PREFIX}{_NAME}.{option.name}"
        text = _text_of(option, value, where, full)
        if isinstance(option.default, tuple) and not text:
            continue
        try:
            parsed = specs.parsed_value(option, full, text)
        except InvalidOptionError as error:
            raise InvalidOptionError(f"{where}: {error.message}", fix=error.fix) from None
        if _is_list(option) and not isinstance(value, str) and len(parsed) != len(value):
            wrong = values.invalid(full, repr(list(value)), "a list in which no text contains a comma")
            raise InvalidOptionError(f"{where}: {wrong.message}", fix=wrong.fix)
        if option.required or parsed != option.default:
            found[option.name] = text
    return tuple(found.items())


def _open_ended(
    option: SinkOption, declared: Sequence[SinkOption], value: object, where: str
) -> dict[str, str]:
    """Returns the options with one prefix that a dict sets."""
    full = f"{PREFIX}{_NAME}.{option.name}"
    if not isinstance(value, Mapping):
        raise _refused(where, full, value, "a dict")
    found = {}
    for name, each in value.items():
        own = f"{option.prefix}{name}"
        if not isinstance(name, str) or not name or name != name.lower().strip():
            raise _refused(where, full, name, "names in lower case, as Spark passes option names on")
        if specs.option_of(own, declared) is not option:
            raise InvalidOptionError(
                f"{where} contains {name!r}, but '{PREFIX}{_NAME}.{own}' is an option of its own.",
                fix=f"use the argument {own.replace('.', '_')!r}.",
            )
        found[own] = _scalar(each, where, f"{PREFIX}{_NAME}.{own}")
        values.text(f"{PREFIX}{_NAME}.{own}", found[own])
    return found


def _text_of(option: SinkOption, value: object, where: str, full: str) -> str:
    """Returns the text of a value, as the option has it."""
    default = option.default
    if isinstance(default, bool):
        if isinstance(value, bool):
            return str(value).lower()
        raise _refused(where, full, value, "True or False")
    if isinstance(default, int):
        if (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, str) and option.kind == "time"
        ):
            return str(value)
        raise _refused(where, full, value, option.kind if option.kind == "time" else "an int")
    if _is_list(option) and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if all(isinstance(each, str) and each and each == each.strip() for each in value):
            return ",".join(value)
        raise _refused(where, full, value, "a list of texts without blanks around them")
    if isinstance(default, Mapping) and isinstance(value, Mapping):
        return json.dumps({str(name): _scalar(each, where, full) for name, each in value.items()})
    if isinstance(default, Mapping) or (_is_list(option) and not isinstance(value, str)):
        expected = "a dict" if isinstance(default, Mapping) else "a list of texts, or one text with commas"
        raise _refused(where, full, value, expected)
    if option.parse is not values.text or isinstance(value, str | os.PathLike):
        return _scalar(value, where, full)
    raise _refused(where, full, value, "a text")


def _scalar(value: object, where: str, full: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise _refused(where, full, value, "a text")


def _is_list(option: SinkOption) -> bool:
    return isinstance(option.default, tuple) or option.parse is column_list


def _refused(where: str, full: str, value: object, expected: str) -> InvalidOptionError:
    """The error for a value of a wrong type, which may be a secret, so only the type is shown."""
    return InvalidOptionError(
        f"{where} (option {full!r}) is of the type {type(value).__name__}; expected {expected}.",
        fix="correct the argument.",
    )

"""`App`: one exactly-once query, whose id, brokers, checkpoint and logins are said once.

An App is thin: it computes options, calls the functions that are public anyway, and returns ordinary frames
and a ``DataStreamWriter``. A query made with it has the same plan as one made with
``format("kafka-eos")`` and options, and continues the same checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from pyspark.sql.types import DataType, StructType

from kafka_eos_source import option_values as values
from kafka_eos_source.app.plan import QueryPlan, plan_query, writer_of
from kafka_eos_source.app.records import Records
from kafka_eos_source.app.sql import sql_frame
from kafka_eos_source.datasource.checks_on_server import check_on_server, own_errors
from kafka_eos_source.datasource.start_checks import RunningQuery, check_query
from kafka_eos_source.documents.decode import JsonDecoding
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.in_read.bad_records import FAIL, NULL, OnBad, check_on_bad
from kafka_eos_source.in_read.decode import ColumnDecoder, decoded_values
from kafka_eos_source.in_read.lineage import frame_of, is_of_source, source_options
from kafka_eos_source.in_read.staged import staged_frame
from kafka_eos_source.in_read.step import schema_of_packed_rows
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.options.parse import divide, parse_read
from kafka_eos_source.options.table import (
    KEYED,
    OPERATOR,
    STATIC_TABLES,
    STEP_IN_READ,
    STREAM_READ,
    STREAM_WRITE,
)
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.registry.columns import RegistrySchema, registry_schema
from kafka_eos_source.secrets import shown
from kafka_eos_source.sinks.constructors import Sink
from kafka_eos_source.spark.changelog_check import check_changelog
from kafka_eos_source.spark.operator_frame import senders_of
from kafka_eos_source.spark.quiet import quiet_by_default
from kafka_eos_source.spark.schema import TOPIC
from kafka_eos_source.spark.session import (
    local_checkpoints,
    recommended_settings,
    time_zone,
    use_this_python,
)
from kafka_eos_source.state.operator import transform as operators
from kafka_eos_source.state.operator.frame import Shards
from kafka_eos_source.state.processor.schema import as_struct

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from kafka_eos_source.registry.columns import Registry
    from kafka_eos_source.state.aggregates import Aggregate
    from kafka_eos_source.state.processor.handle import TimeMode
    from kafka_eos_source.state.processor.rows import RowStyle
    from kafka_eos_source.state.vector.function import Function
    from kafka_eos_source.state.vector.windows import Duration, Window

_log = logging.getLogger(__name__)

#: The parts of a query, and the kind of read or write whose options they take.
_PARTS = {"source": STREAM_READ, "operator": OPERATOR, "sink": STREAM_WRITE}
Part = Literal["source", "operator", "sink"]

_STARTING = "startingoffsets"
#: Folder of the checkpoints of further queries, below the checkpoint of their App.
_QUERIES = "queries"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class Options(dict[str, str]):
    """Options of one part of a query, for ``.options(**…)``. Its repr hides secrets."""

    def __repr__(self) -> str:
        return repr({name: shown(name, value) for name, value in self.items()})


class App:
    """One query from Kafka to Kafka, exactly once: its id, brokers, checkpoint and logins are said once.

    ::

        app = App("revenue", "host:9092", checkpoint="/data/checkpoints/revenue")
        orders = app.read("orders", schema="category STRING, amount DOUBLE")
        revenue = app.aggregate(orders.groupBy("category"), orders=F.count("*"), revenue=F.sum("amount"))
        app.write(revenue, topic="revenue", key="category").start()

    It returns ordinary frames and a ``DataStreamWriter``, and sets options that `options` shows. So a query
    can move between this form and ``format("kafka-eos")`` with its checkpoint. `query` returns an App for
    another query of the same program.

    Attributes:
        id: the query's ``application.id``: its transactional id, the prefix of its changelog topics, and,
            after ``kafka-eos.``, its consumer group.
        checkpoint: location of the query's checkpoint; None if something else, such as a pipeline, owns it.
    """

    def __init__(
        self,
        id: str,
        brokers: str | Sequence[str],
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        """Checks the arguments without contacting a broker.

        Args:
            id: the query's id, 1 to 200 letters, digits, dots, hyphens or underscores. Never change it: the
                query finds its offsets and its state in Kafka by it.
            brokers: ``host:port`` of one or more brokers, as a list or separated by commas.
            checkpoint: where Spark keeps the query's checkpoint, a path or URI that the driver and all
                executors share. Needed by `write`.
            options: options that all parts of the query have in common, or that only one of them takes, such
                as ``{"kafka.security.protocol": "SASL_SSL", "state.dir": "/data/state"}``. Each part gets
                those that ``docs/options.md`` lists for it.
            spark: the session, also of Spark Connect. By default the active session, or a new one with
                `recommended_settings`, `quiet_logs` and, for a checkpoint in a local folder,
                `local_checkpoints`.

        Raises:
            InvalidOptionError: if an argument or an option is malformed or unknown.
        """
        self.id = values.application_id("App(id)", id)
        servers = brokers if isinstance(brokers, str) else ",".join(brokers)
        if not servers.strip():
            raise InvalidOptionError(
                "App(brokers) is empty; expected host:port.", fix="name one or more brokers."
            )
        self.checkpoint = None if checkpoint is None else os.fspath(checkpoint)
        self._spark = spark
        given = {name: values.option_text(value) for name, value in (options or {}).items()}
        for name in given:
            if name.lower() in _OWN_OPTIONS:
                raise InvalidOptionError(
                    f"App(options) has {name!r}, which the argument {_OWN_OPTIONS[name.lower()]!r} sets.",
                    fix=f"remove {name!r} from options=.",
                )
        self._given = {**given, "kafka.bootstrap.servers": servers, "application.id": self.id}
        self._own = dict(zip(_PARTS, divide(self._given, *_PARTS.values()), strict=True))
        self._stores: dict[str, Options] = {}
        #: The digest of each static table of each SQL text. A notebook runs a text again with other tables.
        self._tables: dict[str, Mapping[str, str]] = {}
        self._topic: str | None = None  # of the last write(); "" for the column
        if self.checkpoint is not None:
            self._own["sink"]["checkpointLocation"] = self.checkpoint

    def __repr__(self) -> str:
        return f"App({self.id!r}, {self._given['kafka.bootstrap.servers']!r}, checkpoint={self.checkpoint!r})"

    @property
    def spark(self) -> SparkSession:
        """The session in which this App reads: the given one, the active one, or a new one."""
        if self._spark is None:
            self._spark = _session(self.id, self.checkpoint)
        return self._spark

    def query(self, name: str) -> App:
        """Returns an App for another query of the same program, with brokers and options in common.

        Its id is ``<id>-<name>`` and its checkpoint ``<checkpoint>/queries/<name>``. If ``kafka.group.id`` is
        among the options, its group is ``<group>-<name>``, because two queries cannot share one.

        Args:
            name: name of the query, 1 to 100 letters, digits, dots, hyphens or underscores.

        Raises:
            InvalidOptionError: if the name is malformed.
        """
        if not _NAME.fullmatch(name) or name.strip(".") == "":
            raise values.invalid(
                "query(name)", name, "1 to 100 letters, digits, dots, hyphens or underscores"
            )
        checkpoint = None if self.checkpoint is None else f"{self.checkpoint.rstrip('/')}/{_QUERIES}/{name}"
        shared = {
            key: f"{value}-{name}" if key.lower() == "kafka.group.id" else value
            for key, value in self._given.items()
            if key.lower() not in _OWN_OPTIONS
        }
        other = App(
            f"{self.id}-{name}",
            self._given["kafka.bootstrap.servers"],
            checkpoint=checkpoint,
            options=shared,
            spark=self._spark,
        )
        other._tables = self._tables  # it may write frames of this App
        return other

    @overload
    def options(self) -> dict[str, Options]: ...

    @overload
    def options(self, part: Part) -> Options: ...

    def options(self, part: Part | None = None) -> Options | dict[str, Options]:
        """Returns the options that this App sets, as ``format("kafka-eos")`` and the operators take them.

        Use them to write a step of the query with options, or a query in a pipeline::

            spark.readStream.format("kafka-eos").options(**app.options("source"), subscribe="orders").load()

        The topics and what else `read` and `write` are told is not among them.

        Args:
            part: ``"source"``, ``"operator"`` or ``"sink"``; None for all three, by name.
        """
        if part is None:
            return {each: self._options(each) for each in _PARTS}
        if part not in _PARTS:
            raise values.invalid("options(part)", part, f"one of {', '.join(_PARTS)}")
        return self._options(part)

    def _options(self, part: str, more: Mapping[str, Any] | None = None) -> Options:
        """Returns the options of a part, and those of a call, which take precedence.

        Raises:
            InvalidOptionError: if an option of the call is unknown or belongs to another part.
        """
        given = {name: values.option_text(value) for name, value in (more or {}).items()}
        for name in given:
            if name.lower() in _OWN_OPTIONS:
                raise InvalidOptionError(
                    f"the options of a {part} have {name!r}, which the App sets.",
                    fix=f"set {_OWN_OPTIONS[name.lower()]!r} of App(…), or use query() for another query.",
                )
        own = dict(self._own[part])
        if part == "sink" and any(self._tables.values()):
            own[STATIC_TABLES] = json.dumps(_by_name(self._tables.values()), sort_keys=True)
        return Options(_replaced(own, given))

    # -- reading -----------------------------------------------------------------------------

    def read(
        self,
        topics: str | Sequence[str],
        *,
        schema: StructType | str | None = None,
        registry: Registry | RegistrySchema | None = None,
        keep: Sequence[str] | str = (),
        on_bad: OnBad = "fail",
        starting: str | None = None,
        keyed: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> DataFrame:
        """Reads topics as a stream.

        With ``schema``, the values are JSON objects and their fields become columns; with ``registry``, they
        are Avro, Protobuf or JSON with a schema registry. With neither, the columns are those of
        ``format("kafka-eos")``: ``key``, ``value``, ``topic``, ``partition``, ``offset``, ``timestamp``,
        ``timestampType``. In a record without a value, all fields are null.

        Args:
            topics: name of a topic, or several names.
            schema: fields of the JSON objects, as DDL (``"id BIGINT, ts TIMESTAMP"``) or as `StructType`.
            registry: URL or options of the registry, which has the schema under the subject
                ``<topic>-value``; or what `registry_schema` returned.
            keep: columns of the record to keep beside the fields, such as ``("key", "timestamp")``.
            on_bad: what becomes of a record whose value cannot be decoded with ``schema`` or ``registry``, or
                for which a following `sql` fails. ``"fail"`` stops the query with an error that names the
                record. ``"null"`` makes nulls of what does not fit; a failing `sql` still stops the query.
                ``"dead-letter"`` passes the record around all further steps to the sink, whose option
                ``onInvalidRecord`` decides (``docs/bad-records.md``); the frame then refuses steps that would
                lose it, such as a join with another stream.
            starting: where a query without a checkpoint starts: ``"earliest"``, ``"latest"``, ``"group"``, or
                JSON as in the option ``startingOffsets``. By default what that option says, else
                ``"earliest"``.
            keyed: states that all producers of these topics choose the partition by the record's key. An
                operator that groups by the key then needs no shuffle (``docs/state.md``). State that exists
                keeps the kind of shards that it has, so decide before the first start.
            options: further options of the source.

        Raises:
            InvalidOptionError: if an argument or an option is wrong.
            InvalidSchemaError: if the schema is malformed, or two columns would have one name.
            UnavailableError, AuthorizationError: if the brokers do not answer, refuse the login, or do not
                have a topic.
            SchemaNotFoundError, RegistryUnavailableError: as `registry_schema`.
        """
        names = [topics] if isinstance(topics, str) else list(topics)
        kept = [keep] if isinstance(keep, str) else list(keep)
        if schema is not None and registry is not None:
            raise InvalidOptionError(
                "schema= and registry= are both set; expected one of them.",
                fix="leave out schema= to use the registry's; a reader schema is an argument of "
                "registry_schema().",
            )
        subscribed = {"subscribe": ",".join(names)}
        if starting is not None or not any(each.lower() == _STARTING for each in self._own["source"]):
            subscribed["startingOffsets"] = starting or "earliest"
        if keyed:
            subscribed[KEYED] = "true"
        if {"subscribepattern", "assign"}.intersection(name.lower() for name in options or ()):
            del subscribed["subscribe"]
        source = self._options("source", _replaced(subscribed, options or {}))
        fields = None if schema is None else as_struct(schema, "the values")
        if registry is None or isinstance(registry, RegistrySchema):
            selected = registry
        else:
            if len(names) != 1:
                raise InvalidOptionError(
                    f"registry= is set for {len(names)} topics, whose schemas may differ.",
                    fix="read each topic by itself; or pass what registry_schema() returned as registry=.",
                )
            selected = registry_schema(registry, topic=names[0])
        check_on_bad(on_bad)
        if on_bad != FAIL and fields is None and selected is None:
            raise InvalidOptionError(
                f"on_bad={on_bad!r} is set, but neither schema= nor registry=, so nothing is decoded.",
                fix="leave out on_bad=.",
            )
        parse_read(source, streaming=True)
        given: tuple[ColumnDecoder, DataType, str] | None = None
        if fields is not None:
            of_json = JsonDecoding(fields, time_zone(self.spark), partial=on_bad == NULL)
            given = of_json, of_json.rows, "decodes JSON"
        elif selected is not None:
            given = selected.decoding(), selected.spark_type, "decodes with a registry"
        elif kept:
            raise InvalidOptionError(
                "keep= is set, but neither schema= nor registry=, so all columns of the record stay anyway.",
                fix="leave out keep=, and choose columns with .select(…).",
            )
        step = None
        if given is not None:
            decoder, type_, does = given
            step = decoded_values(decoder, type_, kept, does, on_bad=on_bad)
            source[STEP_IN_READ] = step.to_option()
        with own_errors():
            frame: DataFrame = self.spark.readStream.format(FORMAT_NAME).options(**source).load()
        return frame if step is None else frame_of(step, frame)

    # -- SQL ---------------------------------------------------------------------------------

    def sql(self, text: str, /, **frames: Any) -> DataFrame:
        """Returns the result of a SQL text over a stream, such as a filter, as a stream.

        The form is that of ``spark.sql``::

            late = app.sql("SELECT key, dest FROM {flights} WHERE dep_delay > 60", flights=flights)

        The text runs in an embedded engine, and not in Spark: in the tasks that read if only SQL, `read` and
        selected or renamed columns are before it, and otherwise after Spark's steps. It sees one batch of
        rows at a time, so it has no aggregates and no windows over rows; the operators have them. The extra
        ``sql`` of the package installs the engine.

        Args:
            text: one SELECT; ``{name}`` stands for the frame in the argument of this name.
            **frames: exactly one stream; and static tables to join it with: batch frames, pandas frames or
                ``pyarrow.Table``. They are read now, and stay the same until the query is started again.

        Raises:
            InvalidOptionError: if the frames are not what the text names, or the engine is missing.
            InvalidSchemaError: if the text does not parse, or names a column, a function or a type that there
                is not.
        """
        frame, self._tables[text] = sql_frame(text, frames)
        return frame

    # -- state -------------------------------------------------------------------------------

    def aggregate(
        self,
        rows: DataFrame | GroupedData,
        aggregates: Mapping[str, Aggregate | Column | str] | None = None,
        /,
        *,
        key: str | Sequence[str] | None = None,
        store: str = "aggregates",
        shards: Shards = None,
        window: Window | None = None,
        emit: str = "on_update",
        removed: str | None = None,
        at_most_every: Duration | None = None,
        combine: bool | Literal["after_read"] = True,
        options: Mapping[str, Any] | None = None,
        **results: Aggregate | Column | str,
    ) -> DataFrame:
        """Aggregates rows by key, and optionally by window; see `kafka_eos_source.state.aggregate`.

        Args:
            rows: ``frame.groupBy(columns)``, or the frame together with ``key``.
            aggregates: aggregates by the name of their result column, if a name is that of an argument.
            key, store, window, emit, removed, at_most_every, combine: as there.
            shards: as there; None takes a shard for each partition where that needs no shuffle (see ``keyed``
                of `read`), and else 4.
            options: further options of the operator.
            **results: aggregates by the name of their result column: ``orders=F.count("*")``.

        Raises:
            KafkaEosError: as `kafka_eos_source.state.aggregate`.
        """
        both = sorted(set(aggregates or ()) & set(results))
        if both:
            raise InvalidOptionError(
                f"the result {both[0]!r} is given twice: in the mapping, and as a keyword.", fix="remove one."
            )
        return operators.aggregate(
            rows,
            {**(aggregates or {}), **results},
            options=self._operator(store, options),
            key=key,
            store=store,
            shards=shards,
            window=window,
            emit=emit,
            removed=removed,
            at_most_every=at_most_every,
            combine=combine,
        )

    def deduplicate(
        self,
        rows: DataFrame | GroupedData,
        *,
        key: str | Sequence[str] | None = None,
        store: str = "duplicates",
        shards: Shards = None,
        within: Duration | None = None,
        on: str | None = None,
        grace: Duration = "0s",
        combine: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> DataFrame:
        """Passes the first row of each key and drops its duplicates.

        See `kafka_eos_source.state.deduplicate`.

        Args:
            rows, key, store, within, on, grace, combine: as there.
            shards, options: as in `aggregate`.
        """
        return operators.deduplicate(
            rows,
            options=self._operator(store, options),
            key=key,
            store=store,
            shards=shards,
            within=within,
            on=on,
            grace=grace,
            combine=combine,
        )

    def apply(
        self,
        rows: DataFrame | GroupedData,
        function: Function,
        output_schema: StructType | str,
        state_schema: StructType | str,
        *,
        key: str | Sequence[str] | None = None,
        store: str = "state",
        shards: Shards = None,
        on: str | None = None,
        version: str = "1",
        options: Mapping[str, Any] | None = None,
    ) -> DataFrame:
        """Applies a function to Arrow batches and the state of their keys.

        See `kafka_eos_source.state.apply`.

        Args:
            rows, function, output_schema, state_schema, key, store, on, version: as there.
            shards, options: as in `aggregate`.
        """
        return operators.apply(
            rows,
            function,
            output_schema,
            state_schema,
            options=self._operator(store, options),
            key=key,
            store=store,
            shards=shards,
            on=on,
            version=version,
        )

    def transform(
        self,
        rows: DataFrame | GroupedData,
        processor: StatefulProcessor,
        output_schema: StructType | str,
        *,
        key: str | Sequence[str] | None = None,
        store: str = "state",
        shards: Shards = None,
        time_mode: TimeMode = "None",
        on: str | None = None,
        grace: Duration = "0s",
        style: RowStyle = "rows",
        initial_state: DataFrame | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> DataFrame:
        """Runs a `StatefulProcessor` of Spark; see `kafka_eos_source.state.transform`.

        Args:
            rows, processor, output_schema, key, store, time_mode, on, grace, style, initial_state: as there.
            shards, options: as in `aggregate`.
        """
        return operators.transform(
            rows,
            processor,
            output_schema,
            options=self._operator(store, options),
            key=key,
            store=store,
            shards=shards,
            time_mode=time_mode,
            on=on,
            grace=grace,
            style=style,
            initial_state=initial_state,
        )

    def _operator(self, store: str, more: Mapping[str, Any] | None) -> Options:
        """Returns the options of an operator, and notes its store for the checks of `write`."""
        self._stores[store] = self._options("operator", more)
        return self._stores[store]

    # -- writing -----------------------------------------------------------------------------

    def write(
        self,
        frame: DataFrame,
        topic: str | None = None,
        *,
        key: str | Sequence[str] | Column | None = None,
        value: str | Column | None = None,
        registry: Registry | RegistrySchema | None = None,
        removed: str | None = None,
        sinks: Mapping[str, Sink] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> DataStreamWriter:
        """Returns the writer of the query, after checking everything that can be known before it starts.

        A frame that has only columns of Kafka records (``key``, ``value``, ``headers``, …) is written as it
        is. Otherwise, the columns that are not the key become a JSON object, unless ``value`` or ``registry``
        says otherwise. The checks contact the brokers and the sinks, and change nothing there.

        Args:
            frame: the rows to write.
            topic: topic of all records; None for the topic that the column ``topic`` names, or if the rows go
                only to ``sinks``.
            key: column of the record's key, as text unless it is string or binary; several columns, as a JSON
                object; or an expression. None for no key.
            value: string or binary column of the record's value; or an expression.
            registry: URL or options of a schema registry that has the schema of the value under the subject
                ``<topic>-value``; or what `registry_schema` returned. It encodes all columns but the key.
            removed: boolean column; a row in which it is true becomes a record without a value (a tombstone),
                as ``"removed"`` of an aggregation.
            sinks: systems that receive all columns of each batch too, exactly once, by name:
                ``{"lake": delta("lake/revenue")}``.
            options: further options of the sink.

        Returns:
            A ``DataStreamWriter`` with format, name and options, on which a trigger may be set, and which
            ``start()`` starts.

        Raises:
            InvalidOptionError: if an option is wrong, or the App has no checkpoint.
            InvalidSchemaError: if a column is missing or has the wrong type, or a step lost state changes.
            KafkaEosError: if a check fails; the class says what to do.
        """
        plan = self._plan(frame, topic, key, value, registry, removed, sinks, options)
        self._check(frame, plan)
        _log.info("%s", plan.text(self.id))
        self._note_target(plan.sink)
        return writer_of(frame, plan.frame, self.id, plan.sink)

    def explain(
        self,
        frame: DataFrame,
        topic: str | None = None,
        *,
        key: str | Sequence[str] | Column | None = None,
        value: str | Column | None = None,
        registry: Registry | RegistrySchema | None = None,
        removed: str | None = None,
        sinks: Mapping[str, Sink] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Prints how the query runs that `write` makes of the same arguments.

        It says which steps run in the tasks that read Kafka, whether these stage the records too, and else
        which step or argument keeps the query from this faster way, and what to do about it.

        Args:
            frame, topic, key, value, registry, removed, sinks, options: as in `write`.

        Raises:
            KafkaEosError: as `write`, whose checks of brokers and sinks are left out.
        """
        plan = self._plan(frame, topic, key, value, registry, removed, sinks, options)
        print(plan.text(self.id))

    def _plan(
        self,
        frame: DataFrame,
        topic: str | None,
        key: str | Sequence[str] | Column | None,
        value: str | Column | None,
        registry: Registry | RegistrySchema | None,
        removed: str | None,
        sinks: Mapping[str, Sink] | None,
        options: Mapping[str, Any] | None,
    ) -> QueryPlan:
        if self.checkpoint is None:
            raise InvalidOptionError(
                f"the query {self.id!r} has no checkpoint: App(checkpoint) is not set.",
                fix="set checkpoint= of App(…) to a location that the driver and all executors share.",
            )
        if not frame.isStreaming:
            raise InvalidOptionError(
                "the frame is a batch read; an App writes streams.",
                fix="read with app.read(…); or write the batch with frame.write.format('kafka-eos').",
            )
        own = {} if topic is None else {TOPIC: topic}
        stated = self._options("sink", _replaced(options or {}, own))
        by_name = {name.lower(): value for name, value in stated.items()}
        topic = by_name.get(TOPIC)
        if topic is None and is_of_source(frame, TOPIC):
            raise InvalidOptionError(
                f"topic= is not set, so the column {TOPIC!r} names the topic of each record. It is the topic "
                "that the record was read from: each record would be written there again, and be read again.",
                fix=f"set topic=; or, if the rows go only to sinks=, rename the column: "
                f".withColumnRenamed({TOPIC!r}, 'source_topic').",
            )
        records = Records(topic, key, value, registry, removed)
        has_timestamp = by_name.get("includetimestamp", "").lower() == "true"
        return plan_query(frame, records, sinks or {}, stated, has_timestamp=has_timestamp)

    def _check(self, frame: DataFrame, plan: QueryPlan) -> None:
        """Checks everything about the query of a frame that can be known before it starts; logs warnings."""
        rows = plan.frame
        check_changelog(rows)
        session = rows.sparkSession
        arguments = (
            source_options(rows),
            self._used_stores(frame),
            {**plan.sink, "queryName": self.id},
            rows.schema,
            [RunningQuery(each.id, each.name) for each in session.streams.active],
        )
        if hasattr(rows, "_jdf"):
            check_query(*arguments)
            return
        for warning in check_on_server(session, *arguments):
            _log.warning("%s", warning)

    def _note_target(self, sink: Mapping[str, str]) -> None:
        """Logs a warning if the query of this App was written to another topic before."""
        topic = {name.lower(): value for name, value in sink.items()}.get(TOPIC, "")
        if self._topic is not None and self._topic != topic:
            former, now = (repr(each) if each else "the column 'topic'" for each in (self._topic, topic))
            _log.warning(
                "App(%r) is written to %s, and was written to %s before. An App is one query, and its "
                "checkpoint passes each record to one run: what the former run has read does not come to "
                "this one. For two queries, use app.query(name); for more systems, sinks=.",
                self.id,
                now,
                former,
            )
        self._topic = topic

    def _used_stores(self, rows: DataFrame) -> dict[str, Options]:
        """Returns the options of the operators in a frame, after `check_changelog`, by the name of the store.

        Of a frame from SQL or `map_in_read`, these are all operators of this App.
        """
        senders = senders_of(rows)
        used = senders.stores
        if senders.reads and not used:
            return {}
        if not used and hasattr(rows, "_jdf") and CHANGELOG not in rows.columns:
            schema = rows.schema
            if schema_of_packed_rows(schema) is None and staged_frame(schema) is None:
                return {}
        return {store: each for store, each in self._stores.items() if not used or store in used}


#: Options that the arguments of `App` set, in lower case, and the argument.
_OWN_OPTIONS = {
    "kafka.bootstrap.servers": "brokers",
    "application.id": "id",
    "checkpointlocation": "checkpoint",
}


def _by_name(tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Returns the digests of static tables by name; several, if texts join different tables of one name."""
    found: dict[str, set[str]] = {}
    for each in tables:
        for name, digest in each.items():
            found.setdefault(name, set()).add(digest)
    return {name: " ".join(sorted(digests)) for name, digests in found.items()}


def _session(name: str, checkpoint: str | None) -> SparkSession:
    """Returns the active session, or a new, quiet one with the settings that make this package faster."""
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(name)
    if not is_remote():
        quiet_by_default()
        use_this_python()
        is_local = checkpoint is None or "://" not in checkpoint.replace("file://", "")
        builder = builder.config(map={**recommended_settings(), **(local_checkpoints() if is_local else {})})
    return builder.getOrCreate()


def _replaced(options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both; others replace options of the same name, whose case does not matter."""
    names = {name.lower() for name in others}
    return {**{name: value for name, value in options.items() if name.lower() not in names}, **others}

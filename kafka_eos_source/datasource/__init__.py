"""The formats ``kafka-eos`` and ``kafka-eos-state``: create the readers and writers that Spark asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from kafka_eos_source import native
from kafka_eos_source.datasource.short_errors import short_errors, with_short_errors
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import FORMAT_NAME, STATE_FORMAT_NAME

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.state.reading.frames import ShardRead, StateReadOptions


class KafkaEosDataSource(DataSource):
    """The Spark data source ``format("kafka-eos")``: Kafka, exactly once.

    Spark discovers it through the module ``pyspark_kafka_eos``.
    ``spark.dataSource.register(KafkaEosDataSource)`` works too. ``docs/options.md`` lists the options.

    The methods import what they use, because Spark loads this class in each of its Python processes and most
    of them need only the reader or only the writer.
    """

    @short_errors
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        native.check()  # not on import: Spark only logs that, and then says that there is no such format

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    @short_errors
    def schema(self) -> StructType:
        """Returns the schema for ``load()``, after checking the options, the brokers and the topics.

        Spark does not tell whether this is a stream or a batch read, so the options must be valid for one of
        them.
        """
        from kafka_eos_source.options.parse import is_for_stream_only, parse_read
        from kafka_eos_source.options.table import CHECK
        from kafka_eos_source.read.settings import schema_of

        if any(name.lower().startswith(CHECK) for name in self.options):
            from kafka_eos_source.datasource.checks_on_server import schema_of_check

            return schema_of_check(self.options)
        try:
            options = parse_read(self.options, streaming=True)
        except InvalidOptionError as stream_error:
            try:
                options = parse_read(self.options, streaming=False)
            except InvalidOptionError as batch_error:
                raise (stream_error if is_for_stream_only(self.options) else batch_error) from None
        if options.sink is not None:
            from kafka_eos_source.datasource.sink import StagingPlan

            StagingPlan.of(options).check()
        _look_for_topics(options)
        return schema_of(options)

    @short_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        from kafka_eos_source.datasource.reader import batch_reader

        return batch_reader(self._read_options(schema, streaming=False))

    @short_errors
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from kafka_eos_source.datasource.reader import stream_reader

        return stream_reader(self._read_options(schema, streaming=True))

    @short_errors
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from kafka_eos_source.datasource.writer import batch_writer
        from kafka_eos_source.options.parse import parse_write

        if overwrite:
            raise InvalidOptionError(
                "save mode 'overwrite' is not supported, because a write cannot replace the records of a "
                "topic; expected 'append'.",
                fix="use .mode('append').",
            )
        return batch_writer(parse_write(self.options, streaming=False), schema)

    @short_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Returns the sink. In output mode *complete*, Spark sets ``overwrite``; the sink appends anyway."""
        from kafka_eos_source.datasource.writer import stream_writer
        from kafka_eos_source.options.parse import parse_write

        return stream_writer(parse_write(self.options, streaming=True), schema)

    def _read_options(self, schema: StructType, *, streaming: bool) -> ReadOptions:
        """Returns the checked options of a read whose schema is the one that they define.

        Raises:
            InvalidOptionError: if an option is wrong, or the user set another schema with ``.schema(…)``.
                Spark passes such a schema on without calling `schema`.
        """
        from kafka_eos_source.options.parse import parse_read
        from kafka_eos_source.read.settings import schema_of

        options = parse_read(self.options, streaming=streaming)
        expected = schema_of(options)
        if [(f.name, f.dataType) for f in schema.fields] != [(f.name, f.dataType) for f in expected.fields]:
            raise InvalidOptionError(
                f"the schema is {schema.simpleString()}; this source always has the schema "
                f"{expected.simpleString()}.",
                fix="remove .schema(…), choose columns with the option 'columns', and cast them after "
                ".load().",
            )
        return options


#: What `_look_for_topics` has found in this process: properties of the connection, and topics.
_found: set[str] = set()


def _look_for_topics(options: ReadOptions) -> None:
    """Asks the brokers for the topics of a read, once per process, so that ``load()`` reports a mistake.

    Brokers that are reachable and do not answer in time are left to the first batch.

    Raises:
        UnavailableError: if no address can be reached, or a topic does not exist.
        AuthorizationError: if brokers refuse the login, or the principal may not describe a topic.
    """
    from kafka_eos_source.kafka.config import admin_config

    what, config = options.subscription, admin_config(options.kafka)
    topics = what.topics or tuple(sorted({tp.topic for tp in what.partitions}))
    key = repr((topics, sorted(config.items())))
    if key in _found:
        return
    from kafka_eos_source.kafka.first_contact import contact

    seconds = options.fetch_num_retries * options.fetch_retry_interval_ms / 1000
    doing = f"looking up the topics {', '.join(topics)}"
    if not contact(config, dict.fromkeys(topics, doing), missing_seconds=seconds).silence:
        _found.add(key)


class KafkaEosStateDataSource(DataSource):
    """The Spark data source ``format("kafka-eos-state")``, with the columns of Spark's ``statestore`` reader.

    It reads state while the query runs and after it has stopped. Spark discovers it through the module
    ``pyspark_kafka_eos_state``. ``spark.dataSource.register(KafkaEosStateDataSource)`` works too.
    ``docs/options.md`` lists the options; ``docs/reading-state.md`` describes what is read and how up to date
    it is.
    """

    @short_errors
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        native.check()  # not on import: Spark only logs that, and then says that there is no such format

    @classmethod
    def name(cls) -> str:
        return STATE_FORMAT_NAME

    @short_errors
    def schema(self) -> StructType:
        """Returns the schema for ``load()``. Opens the store to find it, unless the option ``raw`` is set."""
        from pyspark.sql.pandas.types import from_arrow_schema

        from kafka_eos_source.state.reading.frames import columns, parse_state_read

        return from_arrow_schema(columns(parse_state_read(self.options)))

    @short_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        from kafka_eos_source.state.reading.frames import parse_state_read

        return _StateReader(parse_state_read(self.options), schema)


class _ShardPartition(InputPartition):
    """One shard, read by one task."""

    def __init__(self, shard: ShardRead) -> None:
        super().__init__(None)
        self.shard = shard


class _StateReader(DataSourceReader):
    def __init__(self, options: StateReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @short_errors
    def partitions(self) -> Sequence[InputPartition]:
        from kafka_eos_source.state.reading.frames import plan

        return [_ShardPartition(shard) for shard in plan(self._options)]

    @short_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyspark.sql.pandas.types import to_arrow_schema

        from kafka_eos_source.state.reading.frames import read

        assert isinstance(partition, _ShardPartition)
        return with_short_errors(read(self._options, partition.shard, to_arrow_schema(self._schema)))

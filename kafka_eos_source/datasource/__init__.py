"""The front door: names the format, gives its schema, readers and writers. Runs on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import FORMAT_NAME

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class KafkaEosDataSource(DataSource):
    """``format("kafka-eos")``: Kafka for Spark, exactly once.

    Spark finds it by itself through the module ``pyspark_kafka_eos``;
    ``spark.dataSource.register(KafkaEosDataSource)`` works too. Options: ``docs/options.md``.

    Imports are made inside the methods: Spark loads this class in each of its Python processes, and
    most of them need only one side.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    def schema(self) -> StructType:
        """Called by ``load()``: bad options are refused there. Spark does not say which read it will be."""
        from kafka_eos_source.datasource.reader import rows_of
        from kafka_eos_source.options.parse import is_for_stream_only, parse_read

        try:
            options = parse_read(self.options, streaming=True)
        except InvalidOptionError as as_stream:
            try:
                options = parse_read(self.options, streaming=False)
            except InvalidOptionError as as_batch:
                raise (as_stream if is_for_stream_only(self.options) else as_batch) from None
        return rows_of(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from kafka_eos_source.datasource.reader import batch_reader, rows_of
        from kafka_eos_source.options.parse import parse_read

        options = parse_read(self.options, streaming=False)
        _refuse_other_schema(schema, rows_of(options))
        return batch_reader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from kafka_eos_source.datasource.reader import rows_of, stream_reader
        from kafka_eos_source.options.parse import parse_read

        options = parse_read(self.options, streaming=True)
        _refuse_other_schema(schema, rows_of(options))
        return stream_reader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from kafka_eos_source.datasource.writer import batch_writer
        from kafka_eos_source.options.parse import parse_write

        if overwrite:
            raise InvalidOptionError(
                "save mode 'overwrite' cannot be used: records of a topic are never replaced.",
                fix="use .mode('append').",
            )
        return batch_writer(parse_write(self.options, streaming=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """``overwrite`` is Spark's word for output mode *complete*: the whole result is sent each time."""
        from kafka_eos_source.datasource.writer import stream_writer
        from kafka_eos_source.options.parse import parse_write

        return stream_writer(parse_write(self.options, streaming=True), schema)


def _refuse_other_schema(schema: StructType, ours: StructType) -> None:
    """A user's ``.schema(…)`` reaches us as it is (Spark does not ask for ours then)."""
    if [(f.name, f.dataType) for f in schema.fields] != [(f.name, f.dataType) for f in ours.fields]:
        raise InvalidOptionError(
            f"the schema of this source is fixed: {ours.simpleString()}; got {schema.simpleString()}.",
            fix="remove .schema(…), name columns by the option 'columns', and cast after .load().",
        )

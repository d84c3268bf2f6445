"""``spark.read.format("kafka-eos-state")``: the state of a stateful operator as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from kafka_eos_source import native
from kafka_eos_source.datasource.short_errors import short_errors, with_short_errors
from kafka_eos_source.model import STATE_FORMAT_NAME

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafka_eos_source.state.reading.frames import Part
    from kafka_eos_source.state.reading.options import StateReadOptions


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

        from kafka_eos_source.state.reading.frames import columns
        from kafka_eos_source.state.reading.options import parse_state_read

        return from_arrow_schema(columns(parse_state_read(self.options)))

    @short_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        from kafka_eos_source.state.reading.options import parse_state_read

        return _Reader(parse_state_read(self.options), schema)


class _Partition(InputPartition):
    """One shard, read by one task."""

    def __init__(self, part: Part) -> None:
        super().__init__(None)
        self.part = part


class _Reader(DataSourceReader):
    def __init__(self, options: StateReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @short_errors
    def partitions(self) -> Sequence[InputPartition]:
        from kafka_eos_source.state.reading.frames import plan

        return [_Partition(part) for part in plan(self._options)]

    @short_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyspark.sql.pandas.types import to_arrow_schema

        from kafka_eos_source.state.reading.frames import read

        assert isinstance(partition, _Partition)
        return with_short_errors(read(self._options, partition.part, to_arrow_schema(self._schema)))

"""The read as the options have it, made on the driver: its schema, and what its tasks need."""

from __future__ import annotations

from pyspark.sql.types import StructType

from kafka_eos_source.kafka.config import consumer_config
from kafka_eos_source.options.checked import ReadOptions
from kafka_eos_source.read.fetch import ReadSettings
from kafka_eos_source.read.steps import step
from kafka_eos_source.read.task import TaskRead
from kafka_eos_source.spark.schema import read_schema


def schema_of(options: ReadOptions) -> StructType:
    """The schema of what is read. Raises: InvalidOptionError: of a step that is none."""
    if options.step_in_read is None:
        return read_schema(options.include_headers, options.columns)
    return step(*options.step_in_read).schema


def task_read(options: ReadOptions) -> TaskRead:
    """The group is never joined: librdkafka wants a name, and ACLs may ask for the user's.

    No random part, unlike Spark's: workers find their open consumers again by their configuration.

    Raises:
        InvalidOptionError: of a step that is none.
    """
    group_id = options.group_id or f"{options.group_id_prefix}-read"
    left = options.step_in_read
    settings = ReadSettings(
        conf=consumer_config(options.kafka, group_id, options.isolation_level),
        include_headers=options.include_headers,
        columns=options.columns if left is None else step(*left).columns.of_source,
        fail_on_data_loss=options.fail_on_data_loss,
        poll_timeout_ms=options.poll_timeout_ms,
    )
    return TaskRead(settings, left)

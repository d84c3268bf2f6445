"""The read as the options have it, made on the driver: its schema, and what its tasks need."""

from __future__ import annotations

from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kafka_eos_source.checked_options import ReadOptions
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.kafka.config import consumer_config
from kafka_eos_source.option_values import invalid
from kafka_eos_source.read.fetch import ReadSettings
from kafka_eos_source.read.task import TaskRead
from kafka_eos_source.schema import read_schema


def schema_of(options: ReadOptions) -> StructType:
    """The schema of what is read. Raises: InvalidOptionError: of an aggregate that is none."""
    if options.aggregate_in_read is None:
        return read_schema(options.include_headers, options.columns)
    from kafka_eos_source.state.parcels import PARCELS  # few reads need it

    _columns_of(options.aggregate_in_read)
    return from_arrow_schema(PARCELS)


def task_read(options: ReadOptions) -> TaskRead:
    """The group is never joined: librdkafka wants a name, and ACLs may ask for the user's.

    No random part, unlike Spark's: workers find their open consumers again by their configuration.

    Raises:
        InvalidOptionError: of an aggregate that is none.
    """
    group_id = options.group_id or f"{options.group_id_prefix}-read"
    aggregate = options.aggregate_in_read
    settings = ReadSettings(
        conf=consumer_config(options.kafka, group_id, options.isolation_level),
        include_headers=options.include_headers,
        columns=options.columns if aggregate is None else _columns_of(aggregate),
        fail_on_data_loss=options.fail_on_data_loss,
        poll_timeout_ms=options.poll_timeout_ms,
    )
    return TaskRead(settings, aggregate)


def _columns_of(aggregate: str) -> tuple[str, ...]:
    from kafka_eos_source.state.vector.in_read import AggregateInRead  # few reads need it

    try:
        found = AggregateInRead.from_json(aggregate)
        _ = found.partial_schema  # made now, so that it is refused now
    except (ValueError, TypeError, KeyError, InvalidSchemaError) as error:
        raise invalid(
            "aggregate.in.read", aggregate, "what aggregate_with_changelog_state sets there"
        ) from error
    return found.source_columns

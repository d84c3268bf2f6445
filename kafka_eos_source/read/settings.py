"""Derives the schema of a read, and the settings of its tasks, from the options, on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_eos_source.spark.schema import HEADERS, read_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.read.task import TaskRead


def schema_of(options: ReadOptions) -> StructType:
    """Returns the schema that Spark gets.

    Raises:
        InvalidOptionError: if the option with a step for the read is malformed.
    """
    if options.step_in_read is None:
        return read_schema(options.include_headers, options.columns)
    from kafka_eos_source.in_read.step import MapInRead, step_in_read

    step = step_in_read(options)
    if options.sink is not None:
        from kafka_eos_source.in_read.staged import staged_frame_schema

        assert isinstance(step, MapInRead)
        return staged_frame_schema(step.rows, options.sink, step.by)
    assert step is not None
    return step.schema


def task_read(options: ReadOptions) -> TaskRead:
    """Returns the callable that the tasks of this read run.

    Raises:
        InvalidOptionError: if the option with a step for the read is malformed.
    """
    from kafka_eos_source.protocol.records import MOST_DECOMPRESSED
    from kafka_eos_source.read.fetch import ReadSettings
    from kafka_eos_source.read.task import TaskRead

    step = None
    if options.step_in_read is not None:  # most reads do not need the module
        from kafka_eos_source.in_read.step import step_in_read

        step = step_in_read(options)
    settings = ReadSettings(
        conf={
            **options.kafka,
            "isolation.level": options.isolation_level,
            MOST_DECOMPRESSED: str(options.most_decompressed_bytes),
        },
        include_headers=options.include_headers if step is None else HEADERS in step.of_source,
        columns=options.columns if step is None else step.of_source,
        fail_on_data_loss=options.fail_on_data_loss,
        poll_timeout_ms=options.poll_timeout_ms,
        header_names=options.header_names,
        skip_damaged=options.skip_damaged,
    )
    operator = None
    if options.operator is not None:
        from kafka_eos_source.state.options import parse_state

        operator = parse_state(options.operator)
    return TaskRead(settings, step, operator)

"""Sinks as Python objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.sinks.contract import TwoPhaseSink
from kafka_eos_source.sinks.registry import OBJECT, PREFIX, sink_names
from kafka_eos_source.spark.pickled import to_option

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def with_two_phase_sinks(
    writer: DataStreamWriter,
    sinks: Mapping[str, TwoPhaseSink] | Sequence[TwoPhaseSink],
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> DataStreamWriter:
    """Gives a ``writeStream.format("kafka-eos")`` sinks beside Kafka, as objects in place of options.

    The objects are pickled into options of the query (cloudpickle, so that classes of a script travel too),
    passwords in them included: who may see the query's options may see these.

    Args:
        writer: of the stream.
        sinks: by name, or in order: then they are called ``sink0``, ``sink1``, ….
        columns: the columns of the frame that go to a sink, by its name; all if it is not named.

    Raises:
        InvalidOptionError: a name is none, an object is no sink, or it cannot be pickled.
    """
    named = dict(sinks) if isinstance(sinks, Mapping) else {f"sink{n}": each for n, each in enumerate(sinks)}
    sink_names("sinks", ",".join(named))
    writer = writer.option("sinks", ",".join(named))
    for name, sink in named.items():
        if not isinstance(sink, TwoPhaseSink):
            raise InvalidOptionError(
                f"sink {name!r} is a {type(sink).__name__}; expected a kafka_eos_source.sinks.TwoPhaseSink.",
                fix="derive its class from that one.",
            )
        pickled = to_option(sink, f"sink {name!r}", fix="connect in open(), not in __init__().")
        writer = writer.option(f"{PREFIX}{name}.{OBJECT}", pickled)
        if columns is not None and name in columns:
            writer = writer.option(f"{PREFIX}{name}.columns", ",".join(columns[name]))
    return writer

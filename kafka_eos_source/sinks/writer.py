"""`with_two_phase_sinks`: adds sinks to a stream as Python objects instead of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.sinks.contract import TwoPhaseSink
from kafka_eos_source.sinks.specs import OBJECT, PREFIX, sink_names
from kafka_eos_source.spark.pickled import to_option

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def with_two_phase_sinks(
    writer: DataStreamWriter,
    sinks: Mapping[str, TwoPhaseSink] | Sequence[TwoPhaseSink],
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> DataStreamWriter:
    """Adds sinks to a ``writeStream.format("kafka-eos")``, as objects instead of options.

    The objects are pickled into options of the query. cloudpickle is used, so classes defined in a script
    work too. The pickles include passwords: whoever can read the query's options can read these as well.

    Args:
        writer: writer of the stream.
        sinks: sinks by name; or a sequence, whose sinks are named ``sink0``, ``sink1``, ….
        columns: columns of the frame that each sink receives, by name of the sink; a sink that is not
            listed receives all columns.

    Raises:
        InvalidOptionError: if a name is malformed, or an object is not a sink or cannot be pickled.
    """
    named = dict(sinks) if isinstance(sinks, Mapping) else {f"sink{n}": each for n, each in enumerate(sinks)}
    sink_names("sinks", ",".join(named))
    writer = writer.option("sinks", ",".join(named))
    for name, sink in named.items():
        if not isinstance(sink, TwoPhaseSink):
            raise InvalidOptionError(
                f"sink {name!r} is a {type(sink).__name__}; expected a kafka_eos_source.sinks.TwoPhaseSink.",
                fix="derive the class of the sink from TwoPhaseSink.",
            )
        pickled = to_option(sink, f"sink {name!r}", fix="connect in open(), not in __init__().")
        writer = writer.option(f"{PREFIX}{name}.{OBJECT}", pickled)
        if columns is not None and name in columns:
            writer = writer.option(f"{PREFIX}{name}.columns", ",".join(columns[name]))
    return writer

"""Chooses the decoder for a table of a store, by the kind of operator that wrote the store."""

from __future__ import annotations

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.state.encoding.describe import Description
from kafka_eos_source.state.reading.decode import Choice, Decoder, choose_table, is_data


def decoder(description: Description, choice: Choice) -> Decoder:
    """Returns the decoder of the chosen table.

    The modules of the two kinds are imported here, because each loads libraries that the other does not need.

    Raises:
        InvalidOptionError: if the store has no such variable; or it has several, and none was named.
        StateFormatError, StateMismatchError: if another version of kafka-eos wrote the store.
    """
    if description.kind == "stateful-processor":
        from kafka_eos_source.state.reading.decode_processor import processor_decoder

        return processor_decoder(description, choice)
    if choice.timers:
        raise InvalidOptionError(
            f"readRegisteredTimers is set, but a store of kind {description.kind!r} has no timers.",
            fix="remove the option.",
        )
    table = choose_table(description, choice, {k: t for k, t in description.tables.items() if is_data(t)})
    from kafka_eos_source.state.reading.decode_vector import VectorDecoder

    return VectorDecoder(description, table)

"""Where every client is made, so that no error of its making shows a secret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaException, libversion

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.failure import kafka_error
from kafka_eos_source.kafka.secrets import redact, remember

T = TypeVar("T")


def make(kind: Callable[..., T], config: Mapping[str, Any], **more: Any) -> T:
    """A client; no broker is asked.

    Its secrets are remembered, so that `failure.classify` shows none of them whatever the client or a broker
    says later.

    Args:
        kind: confluent-kafka's class.
        config: librdkafka properties and callbacks.
        more: further arguments of the class.

    Raises:
        InvalidOptionError: librdkafka refuses a property, or two of them together.
    """
    remember(config)
    try:
        return kind(dict(config), **more)
    except KafkaException as error:
        said = redact(kafka_error(error).str(), config)
    # raised outside the block: a traceback shows the client's own text of a cause or context
    raise InvalidOptionError(
        f"librdkafka refuses the kafka.* options: {said}.", fix="change the option it names."
    )


def librdkafka_version() -> str:
    """The version of the loaded librdkafka, such as ``2.13.0``."""
    return str(libversion()[0])

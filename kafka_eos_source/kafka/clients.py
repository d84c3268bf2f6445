"""Creates every Kafka client, so that no error message of librdkafka reveals a secret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaException, libversion

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.failure import kafka_error
from kafka_eos_source.kafka.login import mechanism
from kafka_eos_source.kafka.properties import for_librdkafka
from kafka_eos_source.kafka.secrets import Secrets
from kafka_eos_source.kafka.tokens import for_confluent
from kafka_eos_source.runtime.client_log import with_log_level

T = TypeVar("T")


def make(kind: Callable[..., T], config: Mapping[str, Any], **more: Any) -> T:
    """Creates a client without contacting a broker.

    Args:
        kind: a client class of confluent-kafka.
        config: librdkafka properties and callbacks.
        more: further arguments of the class.

    Raises:
        InvalidOptionError: if librdkafka rejects a property, or a combination of properties.
        AuthorizationError, UnavailableError: if OAUTHBEARER gets no token.
    """
    if mechanism(config) == "GSSAPI":
        raise InvalidOptionError(
            f"kafka.sasl.mechanism=GSSAPI cannot be used for this request: it needs a {kind.__name__} of "
            "confluent-kafka, whose wheels are built without Kerberos.",
            fix="use another login for it, such as SCRAM-SHA-512.",
        )
    login = for_confluent(config)
    try:
        return kind(for_librdkafka(with_log_level(login)), **more)
    except KafkaException as error:
        reason = Secrets.of(config).hide(kafka_error(error).str())
    # raised outside the block: a cause or context would show librdkafka's unredacted text in the traceback
    newer = "; newer versions of confluent-kafka may have it" if "No such configuration" in reason else ""
    raise InvalidOptionError(
        f"librdkafka {librdkafka_version()} refuses the kafka.* options: {reason}.",
        fix=f"correct or remove the option that this message names{newer}.",
    )


def librdkafka_version() -> str:
    """Returns the version of the loaded librdkafka, such as ``2.13.0``."""
    return str(libversion()[0])

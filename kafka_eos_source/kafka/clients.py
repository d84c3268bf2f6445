"""Creates the clients for admin requests: confluent-kafka's, or the package's own for some logins.

- Kerberos: the wheels of confluent-kafka are built without it.
- OAUTHBEARER: librdkafka asks for the first token of a client one second after the client was created, and
  confluent-kafka waits for that. This package creates several clients while a query starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaException, libversion
from confluent_kafka.admin import AdminClient

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.failure import kafka_error, mechanism
from kafka_eos_source.kafka.properties import for_librdkafka
from kafka_eos_source.runtime.client_log import ClientLog, with_log_level
from kafka_eos_source.secrets import Secrets

Made = TypeVar("Made")


def admin_client(config: Mapping[str, Any]) -> Any:
    """Creates a client for admin requests without contacting a broker; raises as `make`.

    Args:
        config: librdkafka properties and callbacks.
    """
    if mechanism(config) in ("GSSAPI", "OAUTHBEARER"):
        from kafka_eos_source.kafka.wire.admin import WireAdmin  # imports kafka-python

        return WireAdmin(config)
    return make(AdminClient, config)


def make(kind: Callable[..., Made], config: Mapping[str, Any]) -> Made:
    """Creates a client of confluent-kafka, whose errors reveal no secret, without contacting a broker.

    What the client logs appears when its ``poll`` is called.

    Args:
        kind: a client class of confluent-kafka.
        config: librdkafka properties and callbacks.

    Raises:
        InvalidOptionError: if librdkafka rejects a property, or a combination of properties.
    """
    secrets = Secrets.of(config)
    try:
        return kind(for_librdkafka(with_log_level(config)), logger=ClientLog(secrets.hide))
    except KafkaException as error:
        reason = secrets.hide(kafka_error(error).str())
    # raised outside the block: a cause or context would show librdkafka's unredacted text in the traceback
    newer = "; newer versions of confluent-kafka may have it" if "No such configuration" in reason else ""
    raise InvalidOptionError(
        f"librdkafka {librdkafka_version()} refuses the kafka.* options: {reason}.",
        fix=f"correct or remove the option that this message names{newer}.",
    )


def librdkafka_version() -> str:
    """Returns the version of the loaded librdkafka, such as ``2.13.0``."""
    return str(libversion()[0])

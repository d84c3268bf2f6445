"""Chooses the client that writes transactions: librdkafka, or this package's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.transactional import TransactionalProducer

if TYPE_CHECKING:
    from kafka_eos_source.kafka.wire.producer import WireProducer

LIBRDKAFKA, NATIVE = "librdkafka", "native"

#: The environment variable that chooses the client where no option does. The tests use it.
VARIABLE = "KAFKA_EOS_TRANSACTION_CLIENT"

_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_PARTITIONER = "murmur2_random"
#: Properties that only librdkafka supports.
_ONLY_LIBRDKAFKA = (
    "sasl.oauthbearer.",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.crl.",
    "ssl.curves.list",
    "ssl.engine.",
    "ssl.key.pem",
    "ssl.keystore.",
    "ssl.providers",
    "ssl.sigalgs.list",
)


def transactional_producer(
    config: Mapping[str, Any], client: str = ""
) -> TransactionalProducer | WireProducer:
    """Returns a new producer for transactions, which is not yet initialised.

    Args:
        config: librdkafka properties, including ``transactional.id``.
        client: `LIBRDKAFKA`, `NATIVE`, or "" for the value of the environment variable.

    Raises:
        InvalidOptionError: if the native client is chosen and cannot be used, or a property is not valid.
    """
    if (client or os.environ.get(VARIABLE, LIBRDKAFKA)) != NATIVE:
        return TransactionalProducer(config)
    check_native(config)
    kernel = choice().kernel
    assert kernel is not None, "it was checked"
    from kafka_eos_source.kafka.wire.producer import WireProducer  # takes 0.1 s

    return WireProducer(config, kernel)


def writes_sealed_batches(config: Mapping[str, Any], client: str = "") -> bool:
    """Returns whether `transactional_producer` returns a client for batches that tasks have encoded.

    Args:
        config: librdkafka properties.
        client: as for `transactional_producer`.
    """
    return (client or os.environ.get(VARIABLE, LIBRDKAFKA)) == NATIVE and not _why_not(config)


def check_native(config: Mapping[str, Any]) -> None:
    """Checks that the native client can be used with these properties.

    Args:
        config: librdkafka properties, from `config.check_producer` or `config.producer_config`.

    Raises:
        InvalidOptionError: if it cannot; names the reason.
    """
    reason = _why_not(config)
    if reason:
        raise InvalidOptionError(
            f"option 'transaction.client' has the value 'native', which does not work here: {reason}.",
            fix="remove the option; librdkafka then writes the transactions.",
        )


def _why_not(config: Mapping[str, Any]) -> str:
    if choice().kernel is None:
        return f"the C kernel is not available ({choice().why_not})"
    protocol = str(config.get("security.protocol", "plaintext")).lower()
    mechanism = str(config.get("sasl.mechanisms", "GSSAPI")).upper()
    if protocol.startswith("sasl") and mechanism not in _MECHANISMS:
        return f"it does not support kafka.sasl.mechanism={mechanism}, only {', '.join(_MECHANISMS)}"
    partitioner = config.get("partitioner", _PARTITIONER)
    if partitioner != _PARTITIONER:
        return f"it does not support kafka.partitioner={partitioner}, only {_PARTITIONER}"
    only = next((name for name in config if name.startswith(_ONLY_LIBRDKAFKA)), None)
    return "" if only is None else f"it does not support kafka.{only}"

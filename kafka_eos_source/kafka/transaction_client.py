"""Chooses the client that writes transactions: librdkafka, or this package's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.native_support import mechanism, missing
from kafka_eos_source.kafka.transactional import TransactionalProducer

if TYPE_CHECKING:
    from kafka_eos_source.kafka.wire.producer import WireProducer

AUTO, LIBRDKAFKA, NATIVE = "auto", "librdkafka", "native"

#: The environment variable that chooses the client where no option does. The tests use it.
VARIABLE = "KAFKA_EOS_TRANSACTION_CLIENT"

_PARTITIONER = "murmur2_random"

_log = logging.getLogger(__name__)

#: The choices that this process has logged.
_logged: set[Chosen] = set()


class Chosen(NamedTuple):
    """The client that writes transactions.

    Attributes:
        client: `LIBRDKAFKA` or `NATIVE`.
        reason: why, as the end of a sentence.
    """

    client: str
    reason: str

    def __str__(self) -> str:
        return f"{self.client}: {self.reason}"


def transactional_producer(
    config: Mapping[str, Any], client: str = ""
) -> TransactionalProducer | WireProducer:
    """Returns a new producer for transactions, which is not yet initialised.

    The first producer of a process, and each one that is chosen for another reason, logs the choice.

    Args:
        config: librdkafka properties, including ``transactional.id``.
        client: the option ``transaction.client``; "" = it is not set.

    Raises:
        InvalidOptionError: if the native client is chosen and cannot be used, or a property is not valid.
    """
    chosen = choose(config, client)
    if chosen not in _logged:
        _logged.add(chosen)
        _log.info("transactions are written by %s", chosen)
    if chosen.client == LIBRDKAFKA:
        return TransactionalProducer(config)
    kernel = choice().kernel
    assert kernel is not None, "it was checked"
    from kafka_eos_source.kafka.wire.producer import WireProducer  # takes 0.1 s

    return WireProducer(config, kernel)


def choose(config: Mapping[str, Any], client: str = "") -> Chosen:
    """Chooses the client that writes transactions with these properties.

    Args:
        config: librdkafka properties, from `config.check_producer` or `config.producer_config`.
        client: the option ``transaction.client``; "" = the environment variable decides, or else `AUTO`.

    Raises:
        InvalidOptionError: if the native client is asked for and cannot be used; names the reason.
    """
    origin = "transaction.client" if client else VARIABLE
    wanted = client or os.environ.get(VARIABLE) or AUTO
    if wanted == LIBRDKAFKA:
        return Chosen(LIBRDKAFKA, f"{origin}={wanted}")
    missing = _missing(config)
    if wanted == NATIVE:
        if missing:
            raise InvalidOptionError(
                f"option {origin!r} has the value 'native', which does not work here: {missing}.",
                fix="remove the option; librdkafka then writes the transactions.",
            )
        return Chosen(NATIVE, f"{origin}={wanted}")
    if missing or mechanism(config) == "GSSAPI":
        # librdkafka renews Kerberos tickets by itself; the native client relies on others for that
        return Chosen(LIBRDKAFKA, missing or "it renews Kerberos tickets")
    return Chosen(NATIVE, "it supports all options of this sink")


def _missing(config: Mapping[str, Any]) -> str:
    """Returns what the native client lacks for these properties; "" if nothing."""
    partitioner = config.get("partitioner", _PARTITIONER)
    if partitioner != _PARTITIONER:
        return f"the native client does not support kafka.partitioner={partitioner}, only {_PARTITIONER}"
    # a rack matters only to readers
    return missing({name: value for name, value in config.items() if name != "client.rack"})

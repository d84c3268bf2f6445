"""Chooses the client that writes transactions: librdkafka, or this package's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.native_support import LIBRDKAFKA, ClientOption, missing
from kafka_eos_source.kafka.transactional import TransactionalProducer

if TYPE_CHECKING:
    from kafka_eos_source.kafka.wire.producer import WireProducer

_PARTITIONER = "murmur2_random"


def _missing(config: Mapping[str, Any]) -> str:
    """Returns what the native client lacks for these properties; "" if nothing."""
    partitioner = config.get("partitioner", _PARTITIONER)
    if partitioner != _PARTITIONER:
        return f"the native client does not support kafka.partitioner={partitioner}, only {_PARTITIONER}"
    # a rack matters only to readers
    return missing({name: value for name, value in config.items() if name != "client.rack"})


TRANSACTION_CLIENT = ClientOption(
    "transaction.client", "KAFKA_EOS_TRANSACTION_CLIENT", "transactions are written", "sink", _missing
)


def transactional_producer(
    config: Mapping[str, Any], client: str = ""
) -> TransactionalProducer | WireProducer:
    """Returns a new producer for transactions, which is not yet initialised.

    Args:
        config: librdkafka properties, including ``transactional.id``.
        client: the option ``transaction.client``; "" = it is not set.

    Raises:
        InvalidOptionError: if the native client is chosen and cannot be used, or a property is not valid.
    """
    if TRANSACTION_CLIENT.choose_and_log(config, client) == LIBRDKAFKA:
        return TransactionalProducer(config)
    kernel = choice().kernel
    assert kernel is not None, "it was checked"
    from kafka_eos_source.kafka.wire.producer import WireProducer  # takes 0.1 s

    return WireProducer(config, kernel)

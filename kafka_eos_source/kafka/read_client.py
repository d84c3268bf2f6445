"""Chooses the client with which tasks read: librdkafka, or this package's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka_eos_source.kafka.kernel_consumer import range_consumer
from kafka_eos_source.kafka.native_support import LIBRDKAFKA, ClientOption

READ_CLIENT = ClientOption("read.client", "KAFKA_EOS_READ_CLIENT", "topics are read", "source")


def reading_consumer(conf: Mapping[str, Any], client: str = "") -> type[Any]:
    """Returns the class of consumer that reads ranges with these properties.

    Args:
        conf: properties from `kafka.config.consumer_config`.
        client: the option ``read.client``; "" = it is not set.

    Raises:
        InvalidOptionError: if the native client is chosen and cannot be used.
    """
    if READ_CLIENT.choose_and_log(conf, client) == LIBRDKAFKA:
        return range_consumer()
    # the import takes 0.1 s, and more if nobody has imported kafka-python
    from kafka_eos_source.kafka.wire.consumer import WireConsumer

    return WireConsumer

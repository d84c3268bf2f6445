"""Chooses the client with which tasks read: librdkafka, or this package's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.kernel_consumer import range_consumer
from kafka_eos_source.kafka.native_support import mechanism, missing

AUTO, LIBRDKAFKA, NATIVE = "auto", "librdkafka", "native"

#: The environment variable that chooses the client where no option does. The tests use it.
VARIABLE = "KAFKA_EOS_READ_CLIENT"

_log = logging.getLogger(__name__)

#: The choices that this process has logged.
_logged: set[Chosen] = set()


class Chosen(NamedTuple):
    """The client that reads.

    Attributes:
        client: `LIBRDKAFKA` or `NATIVE`.
        reason: why, as the end of a sentence.
    """

    client: str
    reason: str


def reading_consumer(conf: Mapping[str, Any], client: str = "") -> type[Any]:
    """Returns the class of consumer that reads ranges with these properties.

    Args:
        conf: properties from `kafka.config.consumer_config`.
        client: the option ``read.client``; "" = it is not set.

    Raises:
        InvalidOptionError: if the native client is chosen and cannot be used.
    """
    chosen = choose(conf, client)
    if chosen not in _logged:
        _logged.add(chosen)
        _log.info("topics are read by %s: %s", *chosen)
    if chosen.client == LIBRDKAFKA:
        return range_consumer()
    from kafka_eos_source.kafka.wire.consumer import (
        WireConsumer,  # takes 0.1 s, and more if nobody has imported kafka-python
    )

    return WireConsumer


def choose(conf: Mapping[str, Any], client: str = "") -> Chosen:
    """Chooses the client that reads with these properties.

    Args:
        conf: librdkafka properties, from `config.check_consumer` or `config.consumer_config`.
        client: the option ``read.client``; "" = the environment variable decides, or else `AUTO`.

    Raises:
        InvalidOptionError: if the native client is asked for and cannot be used; names the reason.
    """
    origin = "read.client" if client else VARIABLE
    wanted = client or os.environ.get(VARIABLE) or AUTO
    if wanted == LIBRDKAFKA:
        return Chosen(LIBRDKAFKA, f"{origin}={wanted}")
    lacking = missing(conf)
    if wanted == NATIVE:
        if lacking:
            raise InvalidOptionError(
                f"option {origin!r} has the value 'native', which does not work here: {lacking}.",
                fix="remove the option; librdkafka then reads.",
            )
        return Chosen(NATIVE, f"{origin}={wanted}")
    if lacking or mechanism(conf) == "GSSAPI":
        # librdkafka renews Kerberos tickets by itself; the native client relies on others for that
        return Chosen(LIBRDKAFKA, lacking or "it renews Kerberos tickets")
    return Chosen(NATIVE, "it supports all options of this source")

"""Counts failed deliveries of records that a producer without transactions enqueued in bulk.

confluent-kafka's delivery callback runs only for records of its own ``produce()``. For other records, the C
kernel counts failures: it is also a plugin of librdkafka that intercepts acknowledgements (kernel.c). Where
that is not possible, such a producer sends its records one by one. In a transaction no count is needed,
because the transaction fails if a record does.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int32
from functools import lru_cache
from typing import Any

from confluent_kafka import KafkaError

from kafka_eos_source.kafka.kernel import Kernel, choice
from kafka_eos_source.kafka.native import client_pointer
from kafka_eos_source.native.loader import library_path

_PLUGINS = "plugin.library.paths"


class Deliveries:
    """The failed deliveries of one client since `reset`. Do not use it after the client has ended."""

    def __init__(self, kernel: Kernel, counter: int) -> None:
        self._kernel = kernel
        self._counter = counter

    def reset(self) -> None:
        """Sets the count to 0."""
        self._kernel.reset(self._counter)

    def error(self) -> KafkaError | None:
        """Returns the error of the first failed delivery; None = no delivery failed."""
        first = c_int32()
        failed = self._kernel.failed(self._counter, first)
        return KafkaError(first.value) if failed else None


def with_counter(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties with the counting plugin added, where the plugin can be used."""
    path = str(library_path())
    if choice().kernel is None or not _has_plugins() or ";" in path:
        return dict(config)
    others = config.get(_PLUGINS)
    return {**config, _PLUGINS: f"{others};{path}" if others else path}


def counter_of(client: Any) -> Deliveries | None:
    """Returns the counter of a `Producer`; None if the producer was created without the plugin."""
    kernel = choice().kernel
    counter = kernel.deliveries(client_pointer(client)) if kernel is not None else None
    return Deliveries(kernel, counter) if kernel is not None and counter else None


@lru_cache(maxsize=1)
def _has_plugins() -> bool:
    """Returns whether this librdkafka was built with support for plugins."""
    return True  # every wheel of confluent-kafka for systems that have the kernel

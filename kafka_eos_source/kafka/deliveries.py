"""Failed deliveries of records that were enqueued in bulk, without a transaction that would fail with them.

confluent-kafka's delivery callback runs for records of its own ``produce()``. For others the C kernel counts,
as a plugin of librdkafka that intercepts acknowledgements (kernel.c). Where it cannot, such a producer sends
its records one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int32
from functools import lru_cache
from typing import Any

from confluent_kafka import KafkaError

from kafka_eos_source.kafka.kernel import Kernel, choice
from kafka_eos_source.kafka.native import client_pointer
from kafka_eos_source.kafka.properties import Properties
from kafka_eos_source.native.loader import library_path

_PLUGINS = "plugin.library.paths"


class Deliveries:
    """Those of one client that failed since `reset`. Not to be used after the client has ended."""

    def __init__(self, kernel: Kernel, counter: int) -> None:
        self._kernel = kernel
        self._counter = counter

    def reset(self) -> None:
        self._kernel.reset(self._counter)

    def error(self) -> KafkaError | None:
        """Why the first one failed, if one did."""
        first = c_int32()
        failed = self._kernel.failed(self._counter, first)
        return KafkaError(first.value) if failed else None


def counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of a producer whose failed deliveries are to be counted; the same ones if that cannot be."""
    path = str(library_path())
    if choice().kernel is None or not _has_plugins() or ";" in path:
        return dict(config)
    others = config.get(_PLUGINS)
    return {**config, _PLUGINS: f"{others};{path}" if others else path}


def of(client: Any) -> Deliveries | None:
    """Those of a `Producer`; None = nobody counts them."""
    kernel = choice().kernel
    counter = kernel.deliveries(client_pointer(client)) if kernel is not None else None
    return Deliveries(kernel, counter) if kernel is not None and counter else None


@lru_cache(maxsize=1)
def _has_plugins() -> bool:
    """Whether this librdkafka was built with them."""
    with Properties() as conf:
        return "plugins" in conf.get("builtin.features").split(",")

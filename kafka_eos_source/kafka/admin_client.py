"""Chooses the client for admin requests: confluent-kafka's, or the package's own where Kerberos is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka.admin import AdminClient

from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.login import mechanism


def admin_client(config: Mapping[str, Any]) -> Any:
    """Creates a client for admin requests without contacting a broker; raises as `clients.make`.

    Args:
        config: librdkafka properties and callbacks.
    """
    if mechanism(config) == "GSSAPI":
        from kafka_eos_source.kafka.wire.admin import WireAdmin  # imports kafka-python

        return WireAdmin(config)
    return make(AdminClient, config)

"""Chooses the client for admin requests: confluent-kafka's, or the package's own for some logins.

- Kerberos: the wheels of confluent-kafka are built without it.
- OAUTHBEARER: librdkafka asks for the first token of a client one second after the client was created, and
  confluent-kafka waits for that. This package creates several clients while a query starts.
"""

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
    if mechanism(config) in ("GSSAPI", "OAUTHBEARER"):
        from kafka_eos_source.kafka.wire.admin import WireAdmin  # imports kafka-python

        return WireAdmin(config)
    return make(AdminClient, config)

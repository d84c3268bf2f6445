"""Decides how long a refused login is retried, and names what to check.

A refusal is permanent if the credentials are wrong, and temporary while credentials are rotated or one broker
has not learned of them yet. What distinguishes the two is whether these credentials ever worked:

- As long as no request of this process succeeded with them, a refusal is raised at once. Nothing runs that it
  could interrupt.
- After that, a refused request is retried until its deadline, like any other failure of the network.

The memory covers the process and not a single client, because many requests use a client of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError

from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.kafka.failure import refused_login
from kafka_eos_source.kafka.secrets import Secrets

_CREDENTIALS = ("bootstrap.servers", "security.protocol", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")

#: The SASL mechanisms of both clients.
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")

#: Digests of the credentials with which a request of this process has succeeded.
_worked: set[bytes] = set()


class LoginRefusedError(Exception):
    """The broker, or a service that gives credentials, refused the login."""


def mechanism(config: Mapping[str, Any]) -> str:
    """Returns the SASL mechanism of librdkafka properties; "" if the connection does not use SASL."""
    if not str(config.get("security.protocol", "plaintext")).lower().startswith("sasl"):
        return ""
    return str(config.get("sasl.mechanisms", config.get("sasl.mechanism", "GSSAPI"))).upper()


class Login:
    """The brokers and credentials of a client.

    Args:
        config: librdkafka properties of the client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        used = {name: str(value) for name, value in config.items() if name.startswith(_CREDENTIALS)}
        self._secrets = Secrets.of(used)
        self._brokers = used.get("bootstrap.servers", "")
        self._protocol = used.get("security.protocol", "PLAINTEXT").upper()
        self._mechanism = mechanism(config) or None
        # a digest, so that the memory keeps no password
        self._digest = hashlib.sha256(repr(sorted(used.items())).encode()).digest()

    @property
    def has_worked(self) -> bool:
        """Whether a request of this process has succeeded with these credentials."""
        return self._digest in _worked

    def record_success(self) -> None:
        """Records that a request succeeded."""
        _worked.add(self._digest)

    def error(self, refusal: KafkaError, doing: str) -> AuthorizationError:
        """Returns the error to raise for a refused login.

        Args:
            refusal: what the client reported.
            doing: what was attempted.
        """
        return refused_login(
            refusal,
            doing,
            self._brokers,
            self._protocol,
            self._mechanism,
            self._secrets,
            worked_before=self.has_worked,
        )

"""Tells what the native clients lack for given properties of librdkafka."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from kafka_eos_source.kafka.kernel import choice

_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")
#: Properties that only librdkafka supports.
_ONLY_LIBRDKAFKA = (
    "broker.address.",
    "client.dns.",
    "client.rack",
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


def mechanism(config: Mapping[str, Any]) -> str:
    """Returns the SASL mechanism; "" if the connection does not use SASL."""
    if not str(config.get("security.protocol", "plaintext")).lower().startswith("sasl"):
        return ""
    return str(config.get("sasl.mechanisms", "GSSAPI")).upper()


def missing(config: Mapping[str, Any]) -> str:
    """Returns what the native clients lack for these properties, as a clause; "" if nothing."""
    if choice().kernel is None:
        return f"the C kernel is not available ({choice().why_not})"
    wanted = mechanism(config)
    if wanted and wanted not in _MECHANISMS:
        return (
            f"the native client does not support kafka.sasl.mechanism={wanted}, only {', '.join(_MECHANISMS)}"
        )
    if wanted == "GSSAPI" and importlib.util.find_spec("gssapi") is None:
        return "kafka.sasl.mechanism=GSSAPI needs the Python package 'gssapi' in the native client"
    if wanted == "OAUTHBEARER":
        from kafka_eos_source.kafka.wire.tokens import unsupported

        lacking = unsupported({name: str(value) for name, value in config.items()})
        if lacking:
            return f"the native client does not support {lacking}"
    only = next((name for name in sorted(config) if name.startswith(_ONLY_LIBRDKAFKA)), None)
    return "" if only is None else f"the native client does not support kafka.{only}"

"""Reads the TLS settings of librdkafka properties."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping


def tls_context(kafka: Mapping[str, str]) -> ssl.SSLContext:
    """Returns the TLS settings of librdkafka properties."""
    authorities: str | None = kafka.get("ssl.ca.location")
    if authorities == "probe":  # librdkafka's word for the system's authorities
        authorities = None
    is_folder = authorities is not None and os.path.isdir(authorities)
    context = ssl.create_default_context(
        cafile=None if is_folder else authorities,
        capath=authorities if is_folder else None,
        cadata=kafka.get("ssl.ca.pem") or None,
    )
    if kafka.get("enable.ssl.certificate.verification", "true").lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif kafka.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
        context.check_hostname = False
    if "ssl.certificate.location" in kafka:
        context.load_cert_chain(
            kafka["ssl.certificate.location"],
            kafka.get("ssl.key.location"),
            kafka.get("ssl.key.password", ""),  # without one, OpenSSL would ask for it on the terminal
        )
    return context

"""Translates values that only Java's Kafka clients have, such as stores of keys and certificates.

`kafka.properties` has the names; this module has the values that need more than another name, and
`kafka.login_options` those of logins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

from kafka_eos_source.kafka.properties import refused

_TRUST, _KEYS = "ssl.truststore.", "ssl.keystore."


def translated(kafka: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields the option that the user set, a property, and its value. Most options keep their value.

    Args:
        kafka: option → value, without the prefix ``kafka.``.

    Raises:
        InvalidOptionError: if a value cannot be translated.
    """
    for name, value in kafka.items():
        if name == "ssl.endpoint.identification.algorithm" and not value.strip():
            yield name, name, "none"  # in Java, an empty text turns off the verification of host names
        elif name.startswith("ssl.") and not value.strip():
            continue  # for librdkafka, an empty text means that the option is not set
        elif name == f"{_TRUST}location":
            yield name, "ssl.ca.location", _pem_truststore(kafka, value)
        elif name == f"{_KEYS}location" and _type_of(kafka, _KEYS, value) != "PKCS12":
            for ours in ("ssl.certificate.location", "ssl.key.location"):
                yield name, ours, _pem_keystore(kafka, value)
        elif name in (f"{_TRUST}type", f"{_KEYS}type"):
            continue  # belongs to the location
        elif name == "connections.max.idle.ms" and value.strip() == "-1":
            yield name, name, "0"  # never
        elif name in ("receive.buffer.bytes", "send.buffer.bytes") and value.strip() == "-1":
            yield name, name, "0"  # the system decides
        else:
            yield name, name, value


def _type_of(kafka: Mapping[str, str], store: str, location: str) -> str:
    """Returns the type of a store: as declared, or as its name ends, or PKCS12."""
    declared = kafka.get(f"{store}type", "").strip().upper()
    if declared:
        return "PKCS12" if declared == "PKCS#12" else declared
    return {".jks": "JKS", ".pem": "PEM"}.get(PurePath(location).suffix.lower(), "PKCS12")


def _pem_truststore(kafka: Mapping[str, str], location: str) -> str:
    kind = _type_of(kafka, _TRUST, location)
    if kind == "PEM":
        return location
    command = f"keytool -exportcert -rfc -keystore {location} -alias ALIAS -file ca.pem"
    if kind == "PKCS12":
        command = f"openssl pkcs12 -in {location} -nokeys -out ca.pem"
    raise refused(
        f"{_TRUST}location",
        location,
        "authorities are read from PEM files",
        f"export them ({command}) and set kafka.ssl.ca.location to that file; if the store is a PEM file, "
        f"set kafka.{_TRUST}type=PEM",
    )


def _pem_keystore(kafka: Mapping[str, str], location: str) -> str:
    kind = _type_of(kafka, _KEYS, location)
    if kind == "PEM":
        return location
    declared = f", and remove kafka.{_KEYS}type" if kafka.get(f"{_KEYS}type") else ""
    raise refused(
        f"{_KEYS}location",
        location,
        f"keys are read from PKCS#12 and PEM files, not {kind}",
        f"convert it (keytool -importkeystore -srckeystore {location} -destkeystore keys.p12 -deststoretype "
        f"PKCS12) and set the option to the new file{declared}; or set kafka.ssl.certificate.location and "
        "kafka.ssl.key.location to PEM files",
    )

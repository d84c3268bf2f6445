"""TLS of the package's own connections, from the same properties as librdkafka's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.secrets import is_secret

#: Names of curves that OpenSSL's own functions know, and Python's do not.
_CURVES = {"P-256": "prime256v1", "P-384": "secp384r1", "P-521": "secp521r1"}
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


def uses_tls(kafka: Mapping[str, str]) -> bool:
    """Returns whether connections use TLS."""
    return kafka.get("security.protocol", "plaintext").lower().endswith("ssl")


def check(kafka: Mapping[str, str]) -> None:
    """Checks what can be checked before there is a connection, and without the files.

    Args:
        kafka: from `properties.canonical`.

    Raises:
        InvalidOptionError: if connections of this Python cannot obey an option.
    """
    if not uses_tls(kafka):
        return
    _limit(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), kafka)
    store, key = kafka.get("ssl.keystore.location"), _given(kafka, "ssl.key")
    certificate = _given(kafka, "ssl.certificate")
    if store is not None and importlib.util.find_spec("cryptography") is None:
        raise InvalidOptionError(
            f"option 'kafka.ssl.keystore.location' has the value {store!r}, but the Python package "
            "'cryptography', which reads PKCS#12 files, is not installed.",
            fix="pip install 'kafka-eos-source[pkcs12]' on the driver and all executors; or convert the file "
            f"(openssl pkcs12 -in {store} -out client.pem) and set kafka.ssl.certificate.location, "
            "kafka.ssl.key.location and kafka.ssl.key.password.",
        )
    if key and not certificate:
        raise InvalidOptionError(
            f"option 'kafka.{key[0]}' is set, but no certificate.",
            fix="set kafka.ssl.certificate.location or kafka.ssl.certificate.pem too.",
        )


def context(kafka: Mapping[str, str]) -> ssl.SSLContext:
    """Returns the TLS settings of librdkafka properties.

    Raises:
        InvalidOptionError: if a certificate or key cannot be used.
    """
    with _using(kafka, *_given(kafka, "ssl.ca")):
        made = _with_authorities(kafka.get("ssl.ca.location"), kafka.get("ssl.ca.pem"))
    if kafka.get("enable.ssl.certificate.verification", "true").lower() == "false":
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    elif kafka.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
        made.check_hostname = False
    if "ssl.crl.location" in kafka:
        with _using(kafka, "ssl.crl.location"):
            made.load_verify_locations(cafile=kafka["ssl.crl.location"])
        made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    _limit(made, kafka)
    if "ssl.keystore.location" in kafka:
        with _using(kafka, "ssl.keystore.location", "ssl.keystore.password"):
            _load_keystore(made, kafka["ssl.keystore.location"], kafka.get("ssl.keystore.password"))
    elif certificate := _given(kafka, "ssl.certificate"):
        with _using(kafka, *certificate, *_given(kafka, "ssl.key"), "ssl.key.password"):
            _load_pem(made, kafka)
    return made


def _with_authorities(location: str | None, pem: str | None) -> ssl.SSLContext:
    if location == "probe":  # librdkafka's word for the system's authorities
        location = None
    is_folder = location is not None and os.path.isdir(location)
    made = ssl.create_default_context(
        cafile=None if is_folder else location, capath=location if is_folder else None, cadata=pem or None
    )
    # Python 3.13 would refuse certificates that Kafka's other clients accept, such as keytool's own
    made.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return made


def _limit(made: ssl.SSLContext, kafka: Mapping[str, str]) -> None:
    """Limits versions, ciphers and curves to those that the options name."""
    wanted = sorted(_VERSIONS[each] for each in kafka.get("ssl.enabled.protocols", "").split(",") if each)
    newest = [*wanted[-1:], *filter(None, [_VERSIONS.get(kafka.get("ssl.protocol", ""))])]
    if wanted and min(newest) < wanted[0]:
        raise InvalidOptionError(
            f"options 'kafka.ssl.protocol' and 'kafka.ssl.enabled.protocols' have the values "
            f"{kafka['ssl.protocol']!r} and {kafka['ssl.enabled.protocols']!r}; expected a common version.",
            fix="remove kafka.ssl.protocol.",
        )
    if wanted:
        made.minimum_version = wanted[0]
    if newest:
        made.maximum_version = min(newest)
    if "ssl.cipher.suites" in kafka:
        try:
            made.set_ciphers(kafka["ssl.cipher.suites"])
        except ssl.SSLError:
            raise InvalidOptionError(
                f"option 'kafka.ssl.cipher.suites' has the value {kafka['ssl.cipher.suites']!r}; expected "
                f"ciphers of {ssl.OPENSSL_VERSION} up to TLS 1.2, separated by colons.",
                fix="use OpenSSL's names, such as ECDHE-RSA-AES256-GCM-SHA384; 'openssl ciphers' lists them. "
                "Java's names differ. Or remove the option: those of TLS 1.3 need none.",
            ) from None
    if "ssl.curves.list" in kafka:
        _set_curves(made, kafka["ssl.curves.list"])


def _set_curves(made: Any, listed: str) -> None:
    curves = [_CURVES.get(each.strip(), each.strip()) for each in listed.split(":") if each.strip()]
    try:
        if len(curves) == 1:
            made.set_ecdh_curve(curves[0])
            return
        if hasattr(made, "set_groups"):  # Python 3.15
            made.set_groups(":".join(curves))
            return
        problem = "this Python can set only one curve"
    except ValueError:
        problem = "OpenSSL does not know it"
    raise InvalidOptionError(
        f"option 'kafka.ssl.curves.list' has the value {listed!r}: {problem}.",
        fix="name one curve, such as X25519 or P-256; 'openssl ecparam -list_curves' lists them.",
    )


def _load_pem(made: ssl.SSLContext, kafka: Mapping[str, str]) -> None:
    with contextlib.ExitStack() as files:

        def path(name: str) -> str | None:
            if f"{name}.pem" in kafka:
                return files.enter_context(_as_file(kafka[f"{name}.pem"].encode()))
            return kafka.get(f"{name}.location")

        certificate = path("ssl.certificate")
        assert certificate is not None, "the caller has looked"
        # without a password, OpenSSL would ask for it on the terminal
        made.load_cert_chain(certificate, path("ssl.key"), kafka.get("ssl.key.password", ""))


def _load_keystore(made: ssl.SSLContext, location: str, password: str | None) -> None:
    from cryptography.hazmat.primitives.serialization import (  # optional
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        pkcs12,
    )

    data = Path(location).read_bytes()
    key, certificate, others = pkcs12.load_key_and_certificates(data, password.encode() if password else None)
    if key is None or certificate is None:
        raise ValueError("it has no private key with a certificate")
    passphrase = secrets.token_hex(16)
    chain = b"".join(each.public_bytes(Encoding.PEM) for each in (certificate, *others))
    secret = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(passphrase.encode())
    )
    with _as_file(chain + secret) as path:
        made.load_cert_chain(path, password=passphrase)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Gives the path of a file with this content, which no other user can read and which ends with the block.

    Python's ``ssl`` reads keys from files only. On Linux, the file is in memory.
    """
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("kafka-eos-tls", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(prefix="kafka-eos-tls-") as file:  # has mode 0600
        file.write(content)
        file.flush()
        yield file.name


def _given(kafka: Mapping[str, str], name: str) -> list[str]:
    """Returns the options that give something as a file or as text."""
    return [each for each in (f"{name}.location", f"{name}.pem") if kafka.get(each)]


@contextlib.contextmanager
def _using(kafka: Mapping[str, str], *names: str) -> Iterator[None]:
    """Turns errors of the block into one that names these options, and their values unless they are secret.

    Raises:
        InvalidOptionError: if the block fails.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = str(error)
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
            reason = error.strerror or reason  # without the path, which the option shows
        listed = [
            f"kafka.{name}" if is_secret(name) else f"kafka.{name}={kafka[name]}"
            for name in names
            if name in kafka
        ]
        raise InvalidOptionError(
            f"cannot use the certificates or keys of {' and '.join(listed) or 'this system'}: {reason}.",
            fix="correct the paths or the password; the files have the format PEM, a key store PKCS#12.",
        ) from None

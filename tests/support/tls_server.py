"""Certificates, and a server that speaks TLS, for tests of the client's connections."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)

_VALID = datetime.timedelta(days=1)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


@dataclass
class Pair:
    """A private key and its certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def key_pem(self, password: str = "") -> str:
        encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption).decode()

    def pkcs12(self, password: str, *others: Pair) -> bytes:
        return pkcs12.serialize_key_and_certificates(
            b"client",
            self.key,
            self.certificate,
            [each.certificate for each in others],
            BestAvailableEncryption(password.encode()),
        )


class Authority(Pair):
    """Signs certificates, and revokes them."""

    def __init__(self, name: str, signer: Pair | None = None) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        super().__init__(key, _signed(name, key, signer.key if signer else key, signer, is_authority=True))

    def sign(self, name: str, *hosts: str) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        return Pair(key, _signed(name, key, self.key, self, hosts=hosts))

    def revocations(self, *revoked: Pair) -> str:
        made = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        made = made.last_update(_now() - _VALID).next_update(_now() + _VALID)
        for each in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(each.certificate.serial_number)
            made = made.add_revoked_certificate(entry.revocation_date(_now() - _VALID).build())
        return made.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signing: ec.EllipticCurvePrivateKey,
    signer: Pair | None,
    *,
    hosts: tuple[str, ...] = (),
    is_authority: bool = False,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.certificate.subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _VALID)
        .not_valid_after(_now() + _VALID)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if hosts:
        names = [
            x509.IPAddress(ipaddress.ip_address(each)) if each[0].isdigit() else x509.DNSName(each)
            for each in hosts
        ]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return made.sign(signing, hashes.SHA256())


@dataclass
class Server:
    """A TLS server that greets each client whose certificate it accepts.

    Attributes:
        port: its port.
        seen: protocol, cipher, and the common name of the client's certificate, by connection.
    """

    port: int
    seen: list[tuple[str, str, str]] = field(default_factory=list)


GREETING = b"hello"


@contextmanager
def tls_server(folder: Path, pair: Pair, clients: Pair | None = None, **settings: Any) -> Iterator[Server]:
    """Runs a server at 127.0.0.1.

    Args:
        folder: for the server's key.
        pair: its key and certificate.
        clients: the authority of clients' certificates, which are then required.
        settings: attributes of the ``SSLContext``; ``ciphers`` and ``curve`` call its methods.
    """
    file = folder / "server.pem"
    file.write_text(pair.pem + pair.key_pem())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    if clients is not None:
        context.load_verify_locations(cadata=clients.pem)
        context.verify_mode = ssl.CERT_REQUIRED
    for name, value in settings.items():
        if name == "ciphers":
            context.set_ciphers(value)
        elif name == "curve":
            context.set_ecdh_curve(value)
        else:
            setattr(context, name, value)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(listener.getsockname()[1])

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:  # closed
                return
            try:
                with context.wrap_socket(plain, server_side=True) as encrypted:
                    peer: Any = encrypted.getpeercert() or {}
                    names = dict(each[0] for each in peer.get("subject", ()))
                    cipher = encrypted.cipher()
                    assert cipher is not None
                    server.seen.append((str(encrypted.version()), cipher[0], names.get("commonName", "")))
                    encrypted.sendall(GREETING)
            except (ssl.SSLError, OSError):
                plain.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

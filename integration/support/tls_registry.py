"""Puts real TLS and basic authentication in front of a schema registry, as its operators do."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import http.client
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

USER, PASSWORD = "flights", "p@ss:word/of?the#test"
_HOST = "127.0.0.1"


@dataclass
class TlsRegistry:
    """The proxy.

    Attributes:
        url: URL of the registry behind TLS.
        ca: PEM file of the authority that signed the certificate.
        other_ca: PEM file of another authority.
        accepted, refused: paths of the requests with and without the right login.
    """

    url: str
    ca: Path
    other_ca: Path
    accepted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@contextlib.contextmanager
def tls_registry(folder: Path, port: int, path: str) -> Iterator[TlsRegistry]:
    """Runs the proxy in threads of this process.

    Args:
        folder: an empty folder for keys and certificates.
        port: the registry's port.
        path: the path of its URL.
    """
    authorities = {name: _authority(folder, name) for name in ("ca", "other")}
    chain = _certificate(folder, *authorities["ca"])
    state = TlsRegistry("", folder / "ca.pem", folder / "other.pem")
    login = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != login:
                state.refused.append(self.path)
                self._answer(401, b'{"error_code": 401, "message": "unauthorized"}')
                return
            state.accepted.append(self.path)
            headers = {
                name: self.headers[name] for name in ("Content-Type", "Accept") if name in self.headers
            }
            with contextlib.closing(http.client.HTTPConnection(_HOST, port, timeout=30)) as onward:
                onward.request(self.command, self.path, body, headers)
                answer = onward.getresponse()
                self._answer(answer.status, answer.read())

        do_GET = do_POST = do_PUT = do_DELETE = pass_on  # noqa: N815 - names that http.server calls

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Suppresses the request log."""

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignores clients that do not trust the certificate."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    with Server((_HOST, 0), Handler) as server:
        # the handshake belongs to the thread of its connection, because a client may refuse it
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        state.url = f"https://{_HOST}:{server.server_port}{path}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - dt.timedelta(hours=1)).not_valid_after(now + dt.timedelta(days=2))


def _authority(folder: Path, name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Makes an authority, and writes its certificate to a file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(f"test authority {name}")
    builder = _builder(subject, subject, key.public_key())
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    made = builder.sign(key, hashes.SHA256())
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return key, made


def _certificate(folder: Path, signer: ec.EllipticCurvePrivateKey, authority: x509.Certificate) -> Path:
    """Makes the server's key and certificate; returns the file that contains both."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named("registry"), authority.subject, key.public_key())
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(_HOST))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(names, critical=False).add_extension(issuer, critical=False)
    made = builder.sign(signer, hashes.SHA256())
    file = folder / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.touch(mode=0o600)
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file

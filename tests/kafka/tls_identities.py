"""Identities for TLS: the ways in which a key store may hold them."""

from __future__ import annotations

from pathlib import Path

from tests.support.tls_server import Authority, Pair

PASSWORD = "key-pass-7d3"


def file(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def identities(folder: Path, authority: Authority, client: Pair) -> dict[str, dict[str, str]]:
    """Returns each way to give the client's key and certificate."""
    certificate = file(folder, "client.pem", client.pem)
    one_line = client.key_pem().replace("\n", " ")
    return {
        "files": {
            "ssl.certificate.location": certificate,
            "ssl.key.location": file(folder, "client.key", client.key_pem()),
        },
        "encrypted file": {
            "ssl.certificate.location": certificate,
            "ssl.key.location": file(folder, "encrypted.key", client.key_pem(PASSWORD)),
            "ssl.key.password": PASSWORD,
        },
        "text": {"ssl.certificate.pem": client.pem, "ssl.key.pem": client.key_pem()},
        "encrypted text": {
            "ssl.certificate.pem": client.pem,
            "ssl.key.pem": client.key_pem(PASSWORD),
            "ssl.key.password": PASSWORD,
        },
        "text of Java": {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": client.pem + authority.pem,
            "ssl.keystore.key": one_line,
        },
        "store": {
            "ssl.keystore.location": file(folder, "client.p12", client.pkcs12(PASSWORD, authority)),
            "ssl.keystore.password": PASSWORD,
        },
        "PEM store": {
            "ssl.keystore.location": file(folder, "both.pem", client.pem + client.key_pem()),
            "ssl.keystore.type": "PEM",
        },
    }


WAYS = ("files", "encrypted file", "text", "encrypted text", "text of Java", "store", "PEM store")

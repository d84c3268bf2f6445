"""Clusters whose clients authenticate, and whose ACLs limit what they may do."""

from __future__ import annotations

import base64
import logging
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from integration.support.kafka import TIMEOUT_SECONDS, Admin
from kafka_eos_source.embedded import EmbeddedKafka, java
from kafka_eos_source.embedded.cluster import HOST, free_ports
from kafka_eos_source.errors import KafkaEosError

#: Users and passwords for SASL/PLAIN. The first user may do everything.
PASSWORDS = {"admin": "admin-pass-7f", "alice": "alice-pass-9c"}
#: Users and passwords for SCRAM, on the TLS listener.
SCRAM_PASSWORDS = {
    "reader": "reader-pass-3b",
    "writer": "writer-pass-5d",
    "operator": "operator-pass-1c",
    "person": "person-pass-2a",
}


#: Secret options that this login does not need, each with a value that nothing else has.
UNUSED_SECRETS = {"ssl.key.password": "key-pass-6e", "sasl.oauthbearer.client.secret": "client-secret-8d"}


class Said(logging.Handler):
    """Collects all that this process says while it is installed: each log line, and each error's texts."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(_FORMAT.format(record))

    @contextmanager
    def installed(self) -> Iterator[None]:
        made, logger = KafkaEosError.__init__, logging.getLogger("kafka_eos_source")
        level = logger.level

        def init(error: KafkaEosError, message: str, fix: str = "") -> None:
            made(error, message, fix)
            self.texts.append(f"{message} {fix}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KafkaEosError, "__init__", init)
            logging.getLogger().addHandler(self)
            logger.setLevel(logging.DEBUG)
            try:
                yield
            finally:
                logger.setLevel(level)
                logging.getLogger().removeHandler(self)

    def secrets(self, secrets: Iterable[str]) -> list[str]:
        """Returns the texts that contain a secret, plain or in base64."""
        forms = [form for each in secrets for form in (each, base64.b64encode(each.encode()).decode())]
        return [text for text in self.texts if any(form in text for form in forms)]


_FORMAT = logging.Formatter("%(name)s %(message)s")


class Acls:
    """Grants and revokes rights on one cluster; ``admin`` may do everything."""

    def __init__(self, admin: Admin) -> None:
        self.admin = admin

    def allow(self, user: str, kind: str, name: str, *operations: str) -> None:
        """Grants a user ``operations`` (``"READ"``, ...) on a ``kind`` (``"topic"``, ``"group"``, ...).

        ``name*`` stands for every name that begins with ``name``.
        """
        acls = [_acl(user, kind, name, operation) for operation in operations]
        for future in self.admin.client.create_acls(acls).values():
            future.result(TIMEOUT_SECONDS)

    def forbid(self, user: str, kind: str, name: str, operation: str) -> None:
        """Revokes a right that `allow` granted."""
        given = _acl(user, kind, name, operation, AclBindingFilter)
        for future in self.admin.client.delete_acls([given]).values():
            assert len(future.result(TIMEOUT_SECONDS)) == 1


class SecuredCluster(Acls):
    """A running cluster whose users, those of `PASSWORDS`, authenticate with SASL/PLAIN."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.kafka = kafka
        self.bootstrap_servers = kafka.bootstrap_servers
        super().__init__(Admin(self.bootstrap_servers, **self.login("admin")))

    def login(self, user: str, password: str | None = None) -> dict[str, str]:
        """Returns a user's login as librdkafka properties."""
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": PASSWORDS[user] if password is None else password,
        }

    def options(self, user: str, password: str | None = None) -> dict[str, str]:
        """Returns a user's login and the bootstrap servers as options of the source and the sink."""
        return as_options(self.bootstrap_servers, self.login(user, password))


class TlsCluster(Acls):
    """A running cluster with a second listener: TLS and SCRAM-SHA-512, for the users of `SCRAM_PASSWORDS`.

    Attributes:
        bootstrap_servers: address of that listener, whose certificate names only 127.0.0.1.
        by_host_name: the same listener under the name ``localhost``.
        without_login: a third listener without TLS and login, for helpers of tests; it may do everything.
        kafka: the cluster.
        ca, other_ca: PEM files of the authority that signed the certificate, and of one that did not.
    """

    def __init__(self, kafka: EmbeddedKafka, keys: Keys, secure: int, open_port: int) -> None:
        self._plain = SecuredCluster(kafka)
        self._keys = keys
        self.kafka = kafka
        self.bootstrap_servers, self.by_host_name = f"{HOST}:{secure}", f"localhost:{secure}"
        self.without_login = f"{HOST}:{open_port}"
        self.ca, self.other_ca = keys.pem("ca"), keys.pem("other")
        super().__init__(self._plain.admin)
        self._set_passwords(SCRAM_PASSWORDS)

    def set_password(self, user: str, password: str) -> None:
        """Creates a user, or changes the password."""
        self._set_passwords({user: password})

    def replace_certificate(self, authority: str) -> None:
        """Restarts the broker with a new certificate of an authority, ``ca`` or ``other``."""
        self._keys.sign(authority)
        for node in self.kafka.nodes:
            self.kafka.kill_node(node)
            self.kafka.start_node(node)

    def _set_passwords(self, passwords: Mapping[str, str]) -> None:
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        users = [
            UserScramCredentialUpsertion(user, scram, password.encode())
            for user, password in passwords.items()
        ]
        for future in self.admin.client.alter_user_scram_credentials(users).values():
            future.result(TIMEOUT_SECONDS)

    @property
    def admins(self) -> tuple[str, dict[str, str]]:
        """Returns address and login of ``admin``, for helpers that check results."""
        return self._plain.bootstrap_servers, self._plain.login("admin")

    def options(self, user: str, **changed: str) -> dict[str, str]:
        """Returns a user's options of the source and the sink; ``changed`` overrides some, ``_`` for dots."""
        login = {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": SCRAM_PASSWORDS[user],
            **UNUSED_SECRETS,
            **{name.replace("_", "."): value for name, value in changed.items()},
        }
        return as_options(login.pop("bootstrap.servers", self.bootstrap_servers), login)


@contextmanager
def tls_cluster(
    folder: Path, config: Mapping[str, str] | None = None, **arguments: Any
) -> Iterator[TlsCluster]:
    """Runs a TLS cluster of one broker; the arguments are those of `EmbeddedKafka`."""
    keys = Keys(folder)
    plain, secure, open_port, controller = free_ports([0, 0, 0, 0])
    config = {
        "listeners": ",".join(
            f"{name}://{HOST}:{port}"
            for name, port in {
                "SASL_PLAINTEXT": plain,
                "SECURE": secure,
                "OPEN": open_port,
                "CONTROLLER": controller,
            }.items()
        ),
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "listener.security.protocol.map": (
            "CONTROLLER:SASL_PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SECURE:SASL_SSL,OPEN:PLAINTEXT"
        ),
        "super.users": "User:admin;User:ANONYMOUS",  # ANONYMOUS is whoever uses the listener OPEN
        "listener.name.secure.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.secure.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "listener.name.secure.ssl.keystore.type": "PKCS12",
        "listener.name.secure.ssl.keystore.location": str(keys.store),
        "listener.name.secure.ssl.keystore.password": _STORE_PASSWORD,
        **(config or {}),
    }
    with EmbeddedKafka(port=plain, config=config, users=PASSWORDS, **arguments) as kafka:
        yield TlsCluster(kafka, keys, secure, open_port)


_STORE_PASSWORD = "store-pass-1e"
_STORE = ("-storetype", "PKCS12", "-storepass", _STORE_PASSWORD, "-noprompt")
_KEYS = ("-keyalg", "EC", "-groupname", "secp256r1", "-validity", "2")


class Keys:
    """Two certificate authorities, and the broker's key store with a certificate of one of them.

    Attributes:
        store: the broker's key store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authorities = folder / "authorities.p12"
        self.store = folder / "keys.p12"
        for alias in ("ca", "other"):
            name = f"CN=test authority {alias}"
            _keytool(
                self._authorities,
                "-genkeypair",
                "-alias",
                alias,
                "-dname",
                name,
                "-ext",
                "bc:c=ca:true",
                *_KEYS,
            )
            _keytool(self._authorities, "-exportcert", "-rfc", "-alias", alias, "-file", str(self.pem(alias)))
        self.sign("ca")

    def pem(self, authority: str) -> Path:
        """Returns the file with an authority's certificate."""
        return self._folder / f"{authority}.pem"

    def sign(self, authority: str) -> None:
        """Replaces the broker's key and certificate by new ones, signed by an authority."""
        new = self._folder / "new.p12"
        shutil.copy(self._authorities, new)
        _keytool(
            new, "-genkeypair", "-alias", "broker", "-dname", "CN=broker", "-signer", authority,
            "-ext", f"san=ip:{HOST}", *_KEYS,
        )  # fmt: skip
        # the broker needs no private keys of the authorities
        for alias in ("ca", "other"):
            _keytool(new, "-delete", "-alias", alias)
        new.replace(self.store)


def _keytool(store: Path, *command: str) -> None:
    """Runs Java's keytool, which is available wherever PySpark runs."""
    program = os.path.join(os.path.dirname(java.find()), "keytool")
    subprocess.run(
        [program, "-J-XX:TieredStopAtLevel=1", *command, *_STORE, "-keystore", str(store)],
        check=True,
        capture_output=True,
    )


def as_options(bootstrap_servers: str, login: Mapping[str, str]) -> dict[str, str]:
    """Returns a login as options of the source and the sink, with Spark's prefix ``kafka.``."""
    return {
        "kafka.bootstrap.servers": bootstrap_servers,
        **{f"kafka.{name}": value for name, value in login.items()},
    }


def _acl(user: str, kind: str, name: str, operation: str, made: Any = AclBinding) -> Any:
    return made(
        ResourceType[kind.upper()],
        name.removesuffix("*"),
        ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        AclOperation[operation.upper()],
        AclPermissionType.ALLOW,
    )

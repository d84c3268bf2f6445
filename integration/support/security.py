"""A cluster where clients log in and may do what ACLs allow them."""

from __future__ import annotations

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from integration.support.kafka import TIMEOUT_SECONDS, Admin
from kafka_eos_source.embedded import EmbeddedKafka

#: The first one may do everything.
PASSWORDS = {"admin": "admin-pass-7f", "alice": "alice-pass-9c"}


class SecuredCluster:
    """A running cluster with the users of `PASSWORDS`."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.bootstrap_servers = kafka.bootstrap_servers
        self.admin = Admin(self.bootstrap_servers, **self.login("admin"))

    def login(self, user: str, password: str | None = None) -> dict[str, str]:
        """As librdkafka takes it."""
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": PASSWORDS[user] if password is None else password,
        }

    def options(self, user: str, password: str | None = None) -> dict[str, str]:
        """As the source and the sink take it, the servers included."""
        login = {f"kafka.{name}": value for name, value in self.login(user, password).items()}
        return {"kafka.bootstrap.servers": self.bootstrap_servers, **login}

    def allow(self, user: str, kind: str, name: str, *operations: str) -> None:
        """Lets the user do ``operations`` (``"READ"``, ...) to a ``kind`` (``"topic"``, ``"group"``, ...)."""
        acls = [_acl(user, kind, name, operation) for operation in operations]
        for future in self.admin.client.create_acls(acls).values():
            future.result(TIMEOUT_SECONDS)


def _acl(user: str, kind: str, name: str, operation: str) -> AclBinding:
    return AclBinding(
        ResourceType[kind.upper()],
        name,
        ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        AclOperation[operation.upper()],
        AclPermissionType.ALLOW,
    )

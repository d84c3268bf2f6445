"""Builds the ``server.properties`` of a broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    """The ports of one node.

    Attributes:
        client: port for clients and other brokers.
        controller: port for KRaft.
    """

    client: int
    controller: int


def server_properties(
    node_id: int, nodes: Mapping[int, Ports], data: Path, users: Mapping[str, str]
) -> dict[str, str]:
    """Returns the properties of one node of a cluster.

    Args:
        node_id: the node.
        nodes: ports of all nodes.
        data: folder of the node's log.
        users: passwords by user name, see `EmbeddedKafka`.
    """
    copies = str(min(3, len(nodes)))
    in_sync = str(min(2, len(nodes)))
    listener = "SASL_PLAINTEXT" if users else "PLAINTEXT"
    ports = nodes[node_id]
    return {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.quorum.voters": ",".join(f"{id_}@{HOST}:{at.controller}" for id_, at in nodes.items()),
        "listeners": f"{listener}://{HOST}:{ports.client},CONTROLLER://{HOST}:{ports.controller}",
        "inter.broker.listener.name": listener,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": f"CONTROLLER:{listener},{listener}:{listener}",
        "log.dirs": str(data),
        # Internal topics have few partitions, and as many replicas as the number of brokers allows.
        "offsets.topic.num.partitions": "5",
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.num.partitions": "5",
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "group.initial.rebalance.delay.ms": "0",  # consumers of a test need not wait for others
        "controlled.shutdown.max.retries": "1",
        **(_security(users) if users else {}),
    }


def _security(users: Mapping[str, str]) -> dict[str, str]:
    """Returns properties for SASL/PLAIN and ACLs.

    The controllers' ports need a login too: whoever may send requests there as a super user may grant
    themselves any right. Brokers and controllers log in to each other as the first user.
    """
    first = next(iter(users))
    logins = " ".join(f"user_{name}={_quoted(password)}" for name, password in users.items())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    jaas = f"{module} username={_quoted(first)} password={_quoted(users[first])} {logins};"
    return {
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": jaas,
        "listener.name.controller.plain.sasl.jaas.config": jaas,
        "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{first}",
    }


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def render(properties: Mapping[str, str]) -> str:
    """Returns the text of a ``.properties`` file, with backslashes escaped."""
    return "".join(
        "{}={}\n".format(name, value.replace("\\", "\\\\").replace("\n", "\\n"))
        for name, value in properties.items()
    )

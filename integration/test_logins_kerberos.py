"""Logins with Kerberos: a real KDC, tickets of keytabs that are renewed, and admin requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from integration.chaos.loop import Run
from integration.support import broker as brokers
from integration.support import kerberos
from integration.support.kafka import produce, read_back, values
from integration.support.kerberos import REALM, Realm
from integration.support.security import PASSWORDS, SecuredCluster, as_options
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import HOST, free_ports
from kafka_eos_source.errors import AuthorizationError, KafkaEosError
from kafka_eos_source.kafka.access import KerberosExchange
from kafka_eos_source.kafka.admin import ClusterReader, SourceAdmin
from kafka_eos_source.kafka.cluster import Cluster
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.health import Rights
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry

pytest.importorskip("gssapi", reason="the extra 'kerberos' is not installed")
pytestmark = pytest.mark.skipif(not kerberos.is_installed(), reason="no KDC is installed (krb5-kdc)")

BRIEF_SECONDS = 5


class Kerberized(SecuredCluster):
    """A cluster with a second listener that has GSSAPI only.

    Attributes:
        realm: its realm.
        kerberos: address of that listener.
        keytabs: by principal: ``client``; ``brief``, whose tickets last `BRIEF_SECONDS`.
    """

    def __init__(self, kafka: EmbeddedKafka, realm: Realm, port: int, keytabs: Mapping[str, Path]) -> None:
        super().__init__(kafka)
        self.realm, self.kerberos, self.keytabs = realm, f"localhost:{port}", keytabs

    def properties(self, principal: str = "client", **more: str) -> dict[str, str]:
        """Returns the user's options, checked and translated."""
        return check_consumer(
            {
                "bootstrap.servers": self.kerberos,
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "GSSAPI",
                "sasl.jaas.config": (
                    "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true "
                    f'serviceName="kafka" keyTab="{self.keytabs[principal]}" principal="{principal}@{REALM}";'
                ),
                **more,
            }
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kerberized]:
    folder = tmp_path_factory.mktemp("kerberos")
    with kerberos.realm(folder) as realm, pytest.MonkeyPatch.context() as patch:
        for name, value in realm.environment.items():
            patch.setenv(name, value)
        service = realm.keytab("kafka/localhost")
        keytabs = {"client": realm.keytab("client"), "brief": realm.keytab("brief", f"{BRIEF_SECONDS}s")}
        plain, secure, controller = free_ports([0, 0, 0])
        config = {
            "listeners": f"SASL_PLAINTEXT://{HOST}:{plain},KERBEROS://localhost:{secure},"
            f"CONTROLLER://{HOST}:{controller}",
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listener.security.protocol.map": (
                "CONTROLLER:SASL_PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,KERBEROS:SASL_PLAINTEXT"
            ),
            "listener.name.kerberos.sasl.enabled.mechanisms": "GSSAPI",
            "listener.name.kerberos.sasl.kerberos.service.name": "kafka",
            "listener.name.kerberos.gssapi.sasl.jaas.config": (
                "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true "
                f'keyTab="{service}" principal="kafka/localhost@{REALM}";'
            ),
        }
        options = (*brokers.JAVA_OPTIONS, f"-Djava.security.krb5.conf={realm.config}")
        with EmbeddedKafka(port=plain, config=config, users=PASSWORDS, java_options=options) as kafka:
            yield Kerberized(kafka, realm, secure, keytabs)


def soon(seconds: float = 60) -> Deadline:
    return Deadline.after_seconds(seconds)


def test_topics_are_created_and_deleted_with_the_rights_of_the_principal(cluster: Kerberized) -> None:
    kafka = cluster.properties()
    with TopicAdmin(kafka) as admin:
        with pytest.raises(AuthorizationError, match="creating topic 'made'") as caught:
            admin.create("made", 2, -1, {"cleanup.policy": "compact"}, soon())
        assert "Create on topic 'made'" in caught.value.fix
        cluster.allow("client", "topic", "made", "CREATE", "DESCRIBE", "DESCRIBE_CONFIGS", "DELETE")
        assert admin.create("made", 2, -1, {"cleanup.policy": "compact"}, soon())
        assert not admin.create("made", 2, -1, {}, soon())
        assert admin.await_led("made", soon()).partitions == 2
        assert admin.config("made", soon())["cleanup.policy"] == "compact"
        assert admin.creation_settings("made", soon()) == (1, {"cleanup.policy": "compact"})
        admin.delete("made", soon())
        assert admin.shape("made", soon()) is None
        assert admin.cluster_id(soon()) == cluster.admin.client.describe_cluster().result().cluster_id


def test_what_the_source_asks(cluster: Kerberized) -> None:
    topic = cluster.admin.create("source", 2)
    produce(cluster.bootstrap_servers, topic, ["a", "b", "c"], config=cluster.login("admin"))
    cluster.allow("client", "topic", topic, "DESCRIBE")
    cluster.allow("client", "topic", "gone", "DESCRIBE")
    partitions = [TopicPartition(topic, number) for number in range(2)]
    admin = SourceAdmin(cluster.properties(), "read_committed", 3, 100)
    assert list(admin.named([topic]).partitions) == partitions
    assert list(admin.matching("^sour").partitions) == partitions
    assert set(admin.existing_topic_ids([topic, "gone"])) == {topic}
    assert sum(each.offset for each in admin.latest(partitions).values()) == 3
    assert sum(admin.earliest(partitions).values()) == 0
    assert set(admin.epoch_ends(dict.fromkeys(partitions, 0)).values()) <= {0, 1, 2, 3}
    admin.close()
    with ClusterReader(cluster.properties()) as reader:
        assert reader.topics(soon())[1][topic] == 2
        assert sum(each.end for each in reader.logs(partitions).values()) == 3


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_of_both_protocols_are_found_and_empty_groups_deleted(
    cluster: Kerberized, protocol: str
) -> None:
    topic, group = cluster.admin.create(f"of-{protocol}"), f"group-{protocol}"
    cluster.allow("client", "topic", topic, "DESCRIBE")
    cluster.allow("client", "group", group, "READ", "DELETE")
    offsets = GroupOffsets(cluster.properties())
    assert offsets.members(group, soon()) == []
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            **cluster.login("admin"),
            "group.id": group,
            "group.protocol": protocol,
            "client.id": "somebody",
        }
    )
    consumer.subscribe([topic])
    limit = soon()
    while not consumer.assignment():
        consumer.poll(0.1)
        assert not limit.expired
    (member,) = offsets.members(group, soon())
    assert "client.id='somebody'" in member
    consumer.close()
    retry(lambda: offsets.delete_group(group, soon()), KafkaEosError, Pauses(soon(), 0.1))
    assert group not in cluster.admin.groups()


def test_rights_are_looked_up(cluster: Kerberized) -> None:
    cluster.admin.create("rights")
    cluster.allow("client", "topic", "rights", "WRITE")
    cluster.allow("client", "transactional_id", "mine", "WRITE")
    rights = Rights(cluster.properties(), soon())
    assert rights.of_topics(["rights"]) == {"rights": {"WRITE", "DESCRIBE"}}
    assert rights.may_write_transactional_id("mine") is True
    assert rights.may_write_transactional_id("of somebody else") is False


def test_a_query_from_topic_to_topic_is_exactly_once(cluster: Kerberized, tmp_path: Path) -> None:
    """Source, commit and tasks log in with tickets of the keytab."""
    rows = ["a", "b", "c"]
    for topic in ("kerberos-in", "kerberos-out"):
        cluster.admin.create(topic)
        cluster.allow("client", "topic", topic, "READ", "WRITE")
    cluster.allow("client", "transactional_id", "kerberos-app", "WRITE")
    cluster.allow("client", "group", group_of("kerberos-app"), "READ")
    produce(cluster.bootstrap_servers, "kerberos-in", rows, config=cluster.login("admin"))
    kafka = cluster.properties()
    options = as_options(kafka.pop("bootstrap.servers"), kafka)
    checkpoint = str(tmp_path / "checkpoint")
    spec = {
        "source": {**options, "subscribe": "kerberos-in", "startingOffsets": "earliest"},
        "sink": {
            **options,
            "topic": "kerberos-out",
            "application.id": "kerberos-app",
            "checkpointLocation": checkpoint,
        },
        "checkpoint": checkpoint,
    }
    for _ in range(2):  # the second time, from the checkpoint
        Run(spec, threading.Event()).to_the_end()
        found = read_back(cluster.bootstrap_servers, "kerberos-out", config=cluster.login("admin"))
        assert values(found) == rows


def log_in(kafka: Mapping[str, str]) -> None:
    """Opens one new connection."""
    cluster = Cluster(kafka)
    try:
        cluster.retried("logging in", soon(20), lambda: cluster.metadata([], soon(20)))
    finally:
        cluster.close()


def test_tickets_of_a_keytab_are_renewed(cluster: Kerberized) -> None:
    """Without kinit: logins go on for longer than a ticket lasts."""
    kafka, until = cluster.properties("brief"), time.monotonic() + 2 * BRIEF_SECONDS
    logins = 0
    while time.monotonic() < until:
        log_in(kafka)
        logins += 1
    assert logins > 2


def test_a_ticket_cache_that_others_renew_is_used(
    cluster: Kerberized, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = cluster.properties()
    del kafka["sasl.kerberos.keytab"], kafka["sasl.kerberos.principal"]
    with pytest.raises(
        AuthorizationError, match="with the ticket cache, for the service kafka@localhost"
    ) as caught:
        log_in({**kafka, "sasl.kerberos.service.name": "kafka"})
    assert "kafka.sasl.kerberos.*" in caught.value.fix
    for name, value in cluster.realm.log_in("client", cluster.keytabs["client"]).items():
        monkeypatch.setenv(name, value)
    log_in(kafka)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sasl.kerberos.principal": f"nobody@{REALM}"}, "nobody"),
        ({"sasl.kerberos.keytab": "/nowhere.keytab"}, "nowhere.keytab, for the service kafka@localhost"),
        ({"sasl.kerberos.service.name": "other"}, "other@localhost"),
    ],
)
def test_credentials_that_kerberos_refuses_are_named(
    cluster: Kerberized, changed: dict[str, str], said: str
) -> None:
    with pytest.raises(AuthorizationError, match=said):
        log_in({**cluster.properties(), **changed})


def test_a_kdc_that_does_not_answer_may_answer_later(cluster: Kerberized) -> None:
    keytab = cluster.realm.keytab("late")
    kafka = {
        **cluster.properties(),
        "sasl.kerberos.keytab": str(keytab),
        "sasl.kerberos.principal": f"late@{REALM}",
    }
    cluster.realm.stop()
    try:
        with pytest.raises(ConnectionError, match=r"late@KAFKA\.TEST of .*, for the service kafka@localhost"):
            KerberosExchange(kafka, "localhost")
        log_in(cluster.properties())  # with the ticket that there is
    finally:
        cluster.realm.start()
    log_in(kafka)

"""Logins with tokens of AWS and of a user's function; the broker checks AWS's as Amazon MSK does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
from pyspark.sql import SparkSession

from integration.support import broker as brokers
from integration.support import msk
from integration.support.kafka import produce, read_back, values
from integration.support.security import PASSWORDS, SecuredCluster, as_options
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import HOST, free_ports
from kafka_eos_source.errors import AuthorizationError, UnavailableError
from kafka_eos_source.kafka import tokens
from kafka_eos_source.kafka.cluster import Cluster
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.runtime.deadline import Deadline

KEY, SECRET = "AKIDTESTOFMSK", "secret-of-aws-6e"
REGION = "eu-central-1"
#: Lifetime of tokens where a test waits for their end, and how long it goes on.
BRIEF_SECONDS, LONG_SECONDS = 4, 10
PROVIDER = "integration.support.token_provider"


class TokenCluster(SecuredCluster):
    """A cluster with two more listeners for OAUTHBEARER.

    Attributes:
        msk: the address whose tokens are checked as in MSK; the principal is the access key.
        unsecured: the address that accepts tokens without a signature.
    """

    def __init__(self, kafka: EmbeddedKafka, msk: int, unsecured: int) -> None:
        super().__init__(kafka)
        self.msk, self.unsecured = f"{HOST}:{msk}", f"{HOST}:{unsecured}"

    def aws(self, **more: str) -> dict[str, str]:
        return {
            "bootstrap.servers": self.msk,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.jaas.config": "software.amazon.msk.auth.iam.IAMLoginModule required;",
            "sasl.client.callback.handler.class": "software.amazon.msk.auth.iam.IAMClientCallbackHandler",
            **more,
        }

    def provided(self, function: str, config: str) -> dict[str, str]:
        return {
            "bootstrap.servers": self.unsecured,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.provider": f"{PROVIDER}:{function}",
            "sasl.oauthbearer.config": config,
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenCluster]:
    if msk.compiler() is None:
        pytest.skip("there is no Java compiler for the validator of MSK's tokens")
    jar = msk.validator_jar(tmp_path_factory.mktemp("validator"))
    plain, of_msk, unsecured, controller = free_ports([0, 0, 0, 0])
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
    config = {
        "listeners": f"SASL_PLAINTEXT://{HOST}:{plain},MSK://{HOST}:{of_msk},UNSECURED://{HOST}:{unsecured},"
        f"CONTROLLER://{HOST}:{controller}",
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "listener.security.protocol.map": "CONTROLLER:SASL_PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,"
        "MSK:SASL_PLAINTEXT,UNSECURED:SASL_PLAINTEXT",
        "listener.name.msk.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.msk.oauthbearer.sasl.jaas.config": (
            f'{module} unsecuredLoginStringClaim_sub="admin" region="{REGION}" {KEY}="{SECRET}";'
        ),
        "listener.name.msk.oauthbearer.sasl.server.callback.handler.class": msk.CLASS,
        # sessions end with the token
        "listener.name.msk.oauthbearer.connections.max.reauth.ms": "3600000",
        "listener.name.unsecured.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.unsecured.oauthbearer.sasl.jaas.config": (
            f'{module} unsecuredLoginStringClaim_sub="admin";'
        ),
        "listener.name.unsecured.oauthbearer.connections.max.reauth.ms": "3600000",
    }
    options = (*brokers.JAVA_OPTIONS, f"-javaagent:{jar}")
    with EmbeddedKafka(port=plain, config=config, users=PASSWORDS, java_options=options) as kafka:
        yield TokenCluster(kafka, of_msk, unsecured)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", REGION)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    tokens._tokens.cache_clear()  # other credentials in the environment make other tokens
    yield
    tokens._tokens.cache_clear()


def soon(seconds: float = 30) -> Deadline:
    return Deadline.after_seconds(seconds)


def by_the_own_client(kafka: dict[str, str], topic: str) -> int:
    cluster = Cluster(kafka)
    try:
        return cluster.retried("asking", soon(), lambda: cluster.partition_count(topic, soon()))
    finally:
        cluster.close()


def by_topic_admin(kafka: dict[str, str], topic: str) -> int:
    with TopicAdmin(kafka) as admin:
        found = admin.shape(topic, soon())
    assert found is not None
    return found.partitions


BOTH = pytest.mark.parametrize("ask", [by_the_own_client, by_topic_admin])
Ask = Callable[[dict[str, str], str], int]


@BOTH
def test_a_broker_accepts_tokens_of_aws_as_msk_does(cluster: TokenCluster, ask: Ask) -> None:
    topic = cluster.admin.create(f"aws-{ask.__name__}", 3)
    kafka = check_consumer(cluster.aws())
    with pytest.raises(AuthorizationError, match="TOPIC_AUTHORIZATION_FAILED"):
        ask(kafka, topic)
    cluster.allow(KEY, "topic", topic, "DESCRIBE")  # the principal is the access key
    assert ask(kafka, topic) == 3


@BOTH
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AWS_SECRET_ACCESS_KEY", "another-secret", "wrong signature"),
        ("AWS_REGION", "us-east-1", "wrong host"),
        ("AWS_ACCESS_KEY_ID", "AKIDUNKNOWN", "wrong access key"),
    ],
)
def test_a_token_with_something_wrong_is_refused(
    cluster: TokenCluster, ask: Ask, variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    # a property without effect: no other test's success counts for these credentials
    kafka = check_consumer(cluster.aws()) | {"sasl.kerberos.keytab": f"{variable} {ask.__name__}"}
    with pytest.raises(AuthorizationError, match="OAUTHBEARER") as caught:
        ask(kafka, "any")
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "another-secret" not in str(caught.value)


def test_connections_outlive_a_token_of_aws(cluster: TokenCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker ends a session with its token. All clients go on, with new tokens."""
    monkeypatch.setattr(MSKAuthTokenProvider, "DEFAULT_TOKEN_EXPIRY_SECONDS", BRIEF_SECONDS)
    topic = cluster.admin.create("brief", 1)
    cluster.allow(KEY, "topic", topic, "DESCRIBE")
    kafka = check_consumer(cluster.aws())
    own, until = Cluster(kafka), time.monotonic() + LONG_SECONDS
    given: set[str] = set()
    with TopicAdmin(kafka) as admin:
        while time.monotonic() < until:
            assert own.retried("asking", soon(), lambda: own.partition_count(topic, soon())) == 1
            assert admin.shape(topic, soon()) is not None
            given.add(tokens.Tokens.of(kafka).current(soon()).token)
    own.close()
    assert len(given) >= 3


@BOTH
def test_a_function_of_the_user_logs_in(cluster: TokenCluster, ask: Ask) -> None:
    topic = cluster.admin.create(f"provided-{ask.__name__}", 2)
    assert ask(check_consumer(cluster.provided("provide", "admin 600")), topic) == 2


@BOTH
@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        ("now", AuthorizationError, "raised ValueError: no identity is assigned"),
        ("later", UnavailableError, "raised ConnectionError: busy"),
    ],
)
def test_a_function_that_raises_is_named(
    cluster: TokenCluster,
    ask: Ask,
    config: str,
    kind: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.soon", lambda: Deadline.after_seconds(1))
    with pytest.raises(kind, match=f"the token provider '{PROVIDER}:refuse' {said}"):
        ask(check_consumer(cluster.provided("refuse", config)), "any")


def test_a_query_logs_in_on_driver_and_executors(cluster: TokenCluster, spark: SparkSession) -> None:
    for topic in ("from-provided", "to-provided"):
        cluster.admin.create(topic, 2)
    rows = ["a", "b", "c"]
    produce(cluster.bootstrap_servers, "from-provided", rows, config=cluster.login("admin"))
    kafka = cluster.provided("provide", "admin 600")
    options: dict[str, Any] = as_options(kafka.pop("bootstrap.servers"), kafka)
    frame = spark.read.format("kafka-eos").options(**options, subscribe="from-provided").load()
    frame.select("value").write.format("kafka-eos").options(**options, topic="to-provided").mode(
        "append"
    ).save()
    found = read_back(cluster.bootstrap_servers, "to-provided", config=cluster.login("admin"))
    assert sorted(values(found)) == rows

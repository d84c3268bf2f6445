"""``kafka.*`` options are checked, translated or refused with a fix, and secrets stay hidden."""

from __future__ import annotations

import importlib.util
import json
import logging

import pytest
from confluent_kafka import Producer

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import config, tls
from kafka_eos_source.kafka.config import (
    admin_config,
    check_consumer,
    check_producer,
    is_known,
    producer_config,
)
from kafka_eos_source.kafka.tokens import PROVIDER
from kafka_eos_source.secrets import MASK, Secrets, shown

SERVERS = {"bootstrap.servers": "127.0.0.1:1"}
SECRET = "hunter2-is-secret"
PEM = "-----BEGIN A-----\nYWJjZGVm\n-----END A-----\n"


@pytest.mark.parametrize(
    ("java", "value", "ours"),
    [
        ("fetch.max.wait.ms", "100", "fetch.wait.max.ms"),
        ("receive.buffer.bytes", "65536", "socket.receive.buffer.bytes"),
        ("max.request.size", "2000000", "message.max.bytes"),
        ("sasl.mechanism", "PLAIN", "sasl.mechanisms"),
    ],
)
def test_java_properties_with_an_equivalent_are_translated(java: str, value: str, ours: str) -> None:
    assert check_consumer({java: value}) == {ours: value}


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("key.serializer", "org.apache.kafka.StringSerializer", "cast the column 'key'"),
        ("value.deserializer", "x", "cast the column 'value'"),
        ("ssl.truststore.location", "/s.jks", "kafka.ssl.ca.location"),
        ("ssl.truststore.password", SECRET, "kafka.ssl.ca.location"),
        ("ssl.keystore.location", "/k.JKS", "keytool -importkeystore"),
        ("interceptor.classes", "", "transform the DataFrame"),
        ("partitioner.class", "x", "kafka.partitioner"),
        ("buffer.memory", "1", "needs no memory"),
        ("auto.offset.reset", "earliest", "startingOffsets"),
        ("enable.auto.commit", "false", "committed with the batch"),
        ("max.poll.records", "5", "maxOffsetsPerTrigger"),
    ],
)
def test_a_java_property_without_an_equivalent_is_refused_with_a_fix(
    name: str, value: str, instead: str
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        check_consumer({name: value})
    assert instead in caught.value.fix
    assert f"'kafka.{name}'" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_jaas_lines_of_plain_and_scram_are_translated() -> None:
    line = (
        "org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="alice" password="{SECRET}";'
    )
    assert check_consumer({"sasl.jaas.config": line}) == {
        "sasl.username": "alice",
        "sasl.password": SECRET,
    }


def test_an_unknown_property_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidOptionError, match=r"Did you mean 'kafka\.security\.protocol'"):
        check_consumer({"security.protocl": "SSL"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("security.protocol", "SSLL"),
        ("partitioner", "java"),
        ("acks", "2"),
        ("linger.ms", "abc"),
        ("message.max.bytes", "-1"),
    ],
)
def test_values_are_checked(name: str, value: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"'kafka.{name}' has the value '{value}'; expected "):
        check_producer({name: value}, exactly_once=True)


def test_secrets_are_masked() -> None:
    kafka = {"sasl.password": SECRET, "sasl.username": "alice", "ssl.key.password": SECRET}
    assert [shown(name, value) for name, value in kafka.items()] == [MASK, "alice", MASK]
    assert SECRET not in Secrets.of(kafka).hide(f"login with {SECRET} failed")


@pytest.mark.parametrize("idempotence", ["TRUE", "1", "t"])
@pytest.mark.parametrize("acks", [{"acks": "-1"}, {"request.required.acks": "all"}])
def test_a_property_that_exactly_once_requires_may_be_set_and_is_not_passed_twice(
    idempotence: str, acks: dict[str, str]
) -> None:
    assert check_producer({**acks, "enable.idempotence": idempotence}, exactly_once=True) == {}


@pytest.mark.parametrize(
    "name",
    [
        "sasl.password",
        "ssl.key.password",
        "ssl.keystore.password",
        "ssl.key.pem",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.jaas.config",
        "ssl.truststore.password",
        "ssl.keystore.key",
        "ssl_key",
    ],
)
def test_no_secret_is_ever_shown(name: str) -> None:
    """A secret is shown neither in the error that refuses it nor anywhere it is logged."""
    assert shown(name, SECRET) == MASK
    try:
        check_consumer({name: SECRET})
    except InvalidOptionError as refused:
        message = str(refused)
    else:
        message = f"'kafka.{name}'"
    assert SECRET not in message
    assert f"'kafka.{name}'" in message


def test_the_value_of_a_misspelled_property_is_never_shown() -> None:
    with pytest.raises(
        InvalidOptionError, match=r"'kafka\.sasl\.pasword'.*'kafka\.sasl\.password'"
    ) as caught:
        check_consumer({"sasl.pasword": SECRET})
    assert SECRET not in str(caught.value)


def test_secrets_are_masked_in_every_form_of_quoting() -> None:
    kafka = {"sasl.password": "a\"b c'", "ssl.key.password": "a\"b c'd"}
    for text in (repr("a\"b c'"), json.dumps("a\"b c'"), "https://a%22b%20c%27d@h", "a\"b c'd"):
        assert "b" not in Secrets.of(kafka).hide(text.replace("https://", ""))
    assert Secrets.of({"sasl.password": ""}).hide("nothing") == "nothing"


@pytest.mark.parametrize(
    ("options", "password"),
    [
        ('username="u" password="it\'s; a \\"b\\" = \\\\"', 'it\'s; a "b" = \\'),
        ("password='a\"b' username='u'", 'a"b'),
        ('serviceName="kafka" username=u password=plain-1.word', "plain-1.word"),
        ('username="u"\n  password="a\\tb\\101"', "a\tbA"),
    ],
)
def test_jaas_passwords_are_read_as_java_reads_them(options: str, password: str) -> None:
    line = f"org.apache.kafka.common.security.plain.PlainLoginModule required {options};"
    assert check_consumer({"sasl.jaas.config": line}) == {"sasl.username": "u", "sasl.password": password}


@pytest.mark.parametrize(
    "line",
    [
        f'a.PlainLoginModule required username="u" password="{SECRET}"',
        f'a.PlainLoginModule required username="u" password="{SECRET};',
        f'a.PlainLoginModule required password="{SECRET}";',
        f'a.ScramLoginModule required username="u" password="{SECRET}" tokenauth="true";',
        f'a.PlainLoginModule required username="u" password="{SECRET}"; b.PlainLoginModule required;',
        f'a.OtherLoginModule required user="u" password="{SECRET}";',
        SECRET,
        "",
    ],
)
def test_an_ambiguous_jaas_line_is_refused(line: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"'kafka\.sasl\.jaas\.config'") as caught:
        check_consumer({"sasl.jaas.config": line})
    assert SECRET not in str(caught.value)
    assert "kafka.sasl.username" in caught.value.fix


def test_one_property_under_two_names_is_refused() -> None:
    assert check_consumer({"sasl.mechanism": "PLAIN", "sasl.mechanisms": "PLAIN"}) == {
        "sasl.mechanisms": "PLAIN"
    }
    with pytest.raises(
        InvalidOptionError, match=r"'kafka\.fetch\.max\.wait\.ms' and 'kafka\.fetch\.wait\.max"
    ):
        check_consumer({"fetch.max.wait.ms": "1", "fetch.wait.max.ms": "2"})
    with pytest.raises(InvalidOptionError) as caught:
        check_consumer(
            {
                "sasl.password": "x",
                "sasl.jaas.config": f'PlainLoginModule required username="u" password="{SECRET}";',
            }
        )
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("kafka", "message"),
    [
        ({"acks": "1"}, "'kafka.acks' has the value '1'; expected all"),
        ({"request.required.acks": "0"}, "'kafka.request.required.acks' has the value '0'; expected all"),
        ({"enable.idempotence": "f"}, "expected true"),
        ({"retries": "0"}, "expected 1 or more"),
        ({"max.in.flight": "6"}, "'kafka.max.in.flight' has the value '6'; expected 5 or less"),
        ({"queuing.strategy": "lifo"}, "expected fifo"),
        ({"allow.auto.create.topics": "true"}, "expected false"),
        (
            {"request.timeout.ms": "120000"},
            "'kafka.request.timeout.ms' has the value '120000'; expected 60000",
        ),
        (
            {"transaction.timeout.ms": "5000", "socket.timeout.ms": "6000"},
            "'kafka.transaction.timeout.ms' is 5000",
        ),
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "u"},
            "'kafka.sasl.password' is missing",
        ),
    ],
)
def test_a_property_that_breaks_exactly_once_is_refused(kafka: dict[str, str], message: str) -> None:
    """The product refuses it at the start; librdkafka would fail later, or never."""
    with pytest.raises(InvalidOptionError) as caught:
        check_producer(kafka, exactly_once=True)
    assert message in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    ("kafka", "message"),
    [
        ({"allow.auto.create.topics": "true"}, "expected false"),
        ({"security.protocol": "sasl_plaintext", "sasl.mechanism": "SCRAM-SHA-512"}, "'kafka.sasl.username'"),
    ],
)
def test_a_property_that_breaks_reads_is_refused(kafka: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        check_consumer(kafka)
    assert message in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    ("kafka", "acks", "idempotence"),
    [
        ({}, None, "true"),
        ({"acks": "all"}, "-1", "true"),
        ({"acks": "1"}, "1", "false"),
        ({"request.required.acks": "1"}, "1", "false"),
        ({"acks": "1", "enable.idempotence": "false"}, "1", "false"),
        ({"enable.idempotence": "f"}, None, "false"),
    ],
)
def test_at_least_once_is_idempotent_unless_the_users_properties_forbid_it(
    kafka: dict[str, str], acks: str | None, idempotence: str
) -> None:
    made = producer_config(check_producer({**SERVERS, **kafka}, exactly_once=False))
    assert (made.get("acks"), made["enable.idempotence"]) == (acks, idempotence)
    Producer(made).close()


@pytest.mark.parametrize("exactly_once", [False, True])
def test_a_write_without_acknowledgements_is_refused(exactly_once: bool) -> None:
    with pytest.raises(InvalidOptionError, match=r"'kafka\.acks' has the value '0'; expected all"):
        check_producer({"acks": "0"}, exactly_once=exactly_once)


def test_idempotence_that_the_user_requires_is_never_switched_off() -> None:
    with pytest.raises(InvalidOptionError, match=r"'kafka\.acks'.*kafka\.enable\.idempotence=true"):
        check_producer({"acks": "1", "enable.idempotence": "true"}, exactly_once=False)


@pytest.mark.parametrize(
    "kafka", [{"retries": "0"}, {"max.in.flight": "100"}, {"delivery.timeout.ms": "120000"}]
)
def test_the_log_says_once_what_has_no_effect(
    kafka: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_said", set())
    with caplog.at_level(logging.INFO, config.__name__):
        checked = [check_producer({**SERVERS, **kafka}, exactly_once=False) for _ in range(2)]
    assert checked == [SERVERS, SERVERS]
    (line,) = caplog.messages
    assert f"'kafka.{next(iter(kafka))}' has no effect" in line


def test_group_membership_has_no_effect_on_a_read() -> None:
    """They are ignored, as in Spark, because consumers use assigned partitions."""
    java_s = {
        "session.timeout.ms": "400000",
        "max.poll.interval.ms": "1000",
        "partition.assignment.strategy": "org.apache.kafka.clients.consumer.RangeAssignor",
    }
    assert check_consumer({**SERVERS, **java_s}) == SERVERS
    with pytest.raises(InvalidOptionError, match=r"'kafka\.session\.timeout\.ms' has the value 'soon'"):
        check_consumer({"session.timeout.ms": "soon"})


def test_properties_are_known() -> None:
    assert is_known("sasl.password")
    assert is_known("ssl.truststore.location")
    assert not is_known("ssl.truststore.locations")


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_a_value_that_c_cannot_represent_is_refused(value: str) -> None:
    with pytest.raises(InvalidOptionError, match="no C text"):
        check_consumer({"client.id": value})


@pytest.mark.parametrize("timeout", [None, "2000", "900000"])
def test_every_kind_of_client_can_be_created(timeout: str | None) -> None:
    kafka = {**SERVERS, "batch.size": "7000", **({"transaction.timeout.ms": timeout} if timeout else {})}
    checked = check_producer(kafka, exactly_once=True)
    made = producer_config(checked, transactional_id="t")
    assert made["batch.size"] == "7000"
    assert made["partitioner"] == "murmur2_random"
    Producer(made).close()
    Producer(producer_config(SERVERS)).close()
    assert admin_config({**kafka, "sasl.mechanism": "PLAIN"}) == {**SERVERS, "sasl.mechanism": "PLAIN"}


@pytest.mark.parametrize(
    ("name", "value", "canonical"),
    [
        ("batch.size", "0x10000", "65536"),
        ("batch.size", " 70 ", "70"),
        ("check.crcs", "T", "true"),
        ("security.protocol", "SASL_SSL", "sasl_ssl"),
        ("sasl.mechanism", "scram-sha-256", "SCRAM-SHA-256"),
        ("debug", "Broker, security", "broker,security"),
        ("ssl.endpoint.identification.algorithm", "", "none"),
        ("receive.buffer.bytes", "-1", "0"),
        ("connections.max.idle.ms", "-1", "0"),
        ("ssl.truststore.certificates", "-----BEGIN A----- YWJj ZGVm -----END A-----", PEM),
        ("ssl.ca.pem", r"-----BEGIN A-----\nYWJj\nZGVm\n-----END A-----", PEM),
    ],
)
def test_clients_get_values_in_one_form(name: str, value: str, canonical: str) -> None:
    login = {"sasl.username": "u", "sasl.password": "p"} if name == "security.protocol" else {}
    login |= {"sasl.mechanism": "PLAIN"} if login else {}
    assert canonical in check_consumer({name: value, **login}).values()


def test_stores_of_java_are_translated_or_refused_with_the_command_that_converts_them() -> None:
    assert check_consumer({"ssl.truststore.location": "/ca.pem", "ssl.truststore.type": "PEM"}) == {
        "ssl.ca.location": "/ca.pem"
    }
    assert check_consumer({"ssl.keystore.location": "/k.pem", "ssl.keystore.type": "PEM"}) == {
        "ssl.certificate.location": "/k.pem",
        "ssl.key.location": "/k.pem",
    }
    p12 = {"ssl.keystore.location": "/k.p12", "ssl.keystore.password": SECRET}
    assert check_consumer({**p12, "ssl.keystore.type": "PKCS12"}) == p12
    for options, command in (
        ({"ssl.truststore.location": "/t.p12", "ssl.truststore.type": "PKCS12"}, "openssl pkcs12 -in /t.p12"),
        ({"ssl.truststore.location": "/t.jks"}, "keytool -exportcert -rfc -keystore /t.jks"),
        ({"ssl.keystore.location": "/k", "ssl.keystore.type": "JKS"}, "keytool -importkeystore"),
        ({"ssl.keystore.location": "/k", "ssl.keystore.type": "JKS"}, "remove kafka.ssl.keystore.type"),
    ):
        with pytest.raises(InvalidOptionError) as caught:
            check_consumer(options)
        assert command in caught.value.fix


@pytest.mark.parametrize(
    "name",
    [
        *("ssl.cipher.suites", "ssl.curves.list", "ssl.crl.location", "ssl.ca.location", "ssl.ca.pem"),
        *(
            "ssl.keystore.location",
            "ssl.keystore.type",
            "ssl.truststore.location",
            "ssl.certificate.location",
        ),
    ],
)
@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_option_of_tls_is_not_set(name: str, blank: str) -> None:
    """As in librdkafka. Configurations are often made from templates."""
    checked = check_consumer({"security.protocol": "ssl", name: blank})
    assert checked == {"security.protocol": "ssl"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl.cipher.suites": "TLS_RSA_JAVA"}, "expected ciphers of OpenSSL"),
        ({"ssl.curves.list": "P-1"}, "OpenSSL does not know it"),
        ({"ssl.enabled.protocols": "TLSv1.1"}, "expected a comma-separated list of TLSv1.2, TLSv1.3"),
        ({"ssl.enabled.protocols": "TLSv1.3", "ssl.protocol": "TLSv1.2"}, "expected a common version"),
        ({"ssl.key.location": "/k"}, "no certificate"),
        ({"ssl.key.pem": SECRET}, "expected PEM text"),
        ({"ssl.sigalgs.list": "RSA"}, "cannot be used"),
    ],
)
def test_tls_that_the_client_cannot_do_is_refused_at_the_start(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message) as caught:
        check_consumer({"security.protocol": "SSL", **options})
    assert SECRET not in str(caught.value)


def test_key_stores_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidOptionError, match="'cryptography'") as caught:
        check_consumer({"security.protocol": "SSL", "ssl.keystore.location": "/k.p12"})
    assert "openssl pkcs12 -in /k.p12" in caught.value.fix


# -- logins

SASL = {"security.protocol": "sasl_ssl"}
MSK = "b-1.sales.a1b2c3.c2.kafka.eu-central-1.amazonaws.com:9098"
IAM = "software.amazon.msk.auth.iam"
AWS_HANDLER = f"{IAM}.IAMClientCallbackHandler"
OLD_OAUTH_HANDLER = "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler"
OAUTH_HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
KERBEROS = "com.sun.security.auth.module.Krb5LoginModule"


@pytest.fixture(autouse=True)
def no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def is_installed(monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> None:
    """Makes every optional package appear installed, except one."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == without else found("json" if name == "gssapi" else name, *more),
    )


@pytest.mark.parametrize(
    "handler", [OAUTH_HANDLER, OAUTH_HANDLER.replace("oauthbearer.O", "oauthbearer.secured.O")]
)
@pytest.mark.parametrize("package", ["", "kafkashaded."])  # Databricks has its own
def test_kip_768_becomes_client_credentials(handler: str, package: str) -> None:
    assert check_consumer(
        {
            **SASL,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.login.callback.handler.class": package + handler,
            "sasl.oauthbearer.token.endpoint.url": "https://login.example.com/token",
            "sasl.jaas.config": f'{package}{OAUTH} required clientId="me" clientSecret="{SECRET}" '
            'scope="kafka" extension_logicalCluster="lkc-1" extension_identityPoolId="pool-2";',
        }
    ) == {
        **SASL,
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://login.example.com/token",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-2",
    }


def test_unsecured_tokens_of_java_are_translated() -> None:
    assert check_consumer(
        {
            **SASL,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_sub="alice";',
        }
    ) == {
        **SASL,
        "sasl.mechanisms": "OAUTHBEARER",
        "enable.sasl.oauthbearer.unsecure.jwt": "true",
        "sasl.oauthbearer.config": "principal=alice lifeSeconds=3600",
    }


def test_kerberos_of_java_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    is_installed(monkeypatch)
    assert check_consumer(
        {
            **SASL,
            "sasl.mechanism": "GSSAPI",
            "sasl.kerberos.service.name": "kafka",
            "sasl.jaas.config": f"{KERBEROS} required useKeyTab=true storeKey=true serviceName=kafka "
            'keyTab="/etc/me.keytab" principal="me@EXAMPLE.COM";',
        }
    ) == {
        **SASL,
        "sasl.mechanisms": "GSSAPI",
        "sasl.kerberos.service.name": "kafka",
        "sasl.kerberos.keytab": "/etc/me.keytab",
        "sasl.kerberos.principal": "me@EXAMPLE.COM",
    }


@pytest.mark.parametrize(
    "kafka",
    [
        {"sasl.mechanism": "AWS_MSK_IAM"},
        {
            "sasl.mechanisms": "aws_msk_iam",
            "sasl.jaas.config": f"{IAM}.IAMLoginModule required;",
        },
        {
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.jaas.config": "shadedmskiam.software.amazon.msk.auth.iam.IAMLoginModule required;",
            "sasl.client.callback.handler.class": "shadedmskiam." + AWS_HANDLER,
        },
        {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f"{OAUTH} required;",
            "sasl.login.callback.handler.class": f"{IAM}.IAMOAuthBearerLoginCallbackHandler",
            "sasl.client.callback.handler.class": "org.apache.kafka.common.security.oauthbearer.internals."
            "OAuthBearerSaslClientCallbackHandler",
        },
        {  # as in the README of aws-msk-iam-auth
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f"{OAUTH} Required;",
            "sasl.login.callback.handler.class": f"{IAM}.IAMOAuthBearerLoginCallbackHandler",
            "sasl.client.callback.handler.class": f"{IAM}.IAMOAuthBearerLoginCallbackHandler",
        },
    ],
)
def test_each_form_of_aws_becomes_tokens_of_its_signer(kafka: dict[str, str]) -> None:
    assert check_consumer({**SASL, "bootstrap.servers": MSK, **kafka}) == {
        **SASL,
        "bootstrap.servers": MSK,
        "sasl.mechanisms": "OAUTHBEARER",
        PROVIDER: "kafka_eos_source.kafka.tokens:aws_token",
        "sasl.oauthbearer.config": "awsRegion=eu-central-1",
    }


@pytest.mark.parametrize("is_jaas", [True, False])
def test_profiles_and_roles_of_aws_are_kept(is_jaas: bool) -> None:
    options = {
        "awsProfileName": "prod",
        "awsRoleArn": "arn:aws:iam::123456789012:role/kafka",
        "awsRoleSessionName": "spark",
        "awsStsRegion": "eu-west-1",
    }
    line = " ".join(f'{name}="{value}"' if is_jaas else f"{name}={value}" for name, value in options.items())
    kafka = (
        {"sasl.jaas.config": f"{IAM}.IAMLoginModule required {line} awsDebugCreds=true;"}
        if is_jaas
        else {"sasl.oauthbearer.config": line}
    )
    found = check_consumer({**SASL, "bootstrap.servers": MSK, "sasl.mechanism": "AWS_MSK_IAM", **kafka})
    given = dict(each.split("=", 1) for each in found["sasl.oauthbearer.config"].split())
    assert given == {**options, "awsRegion": "eu-central-1"}


@pytest.mark.parametrize(
    ("servers", "environment", "config", "region"),
    [
        (MSK, {"AWS_REGION": "us-east-1"}, "", "eu-central-1"),
        ("boot-x1.c1.kafka-serverless.us-west-2.amazonaws.com:9098", {}, "", "us-west-2"),
        ("b-1.n.abc.c2.kafka.cn-north-1.amazonaws.com.cn:9098", {}, "", "cn-north-1"),
        (MSK, {}, "awsRegion=us-gov-west-1", "us-gov-west-1"),
        ("kafka.internal:9098", {"AWS_REGION": "us-east-1"}, "", "us-east-1"),
        ("kafka.internal:9098", {"AWS_DEFAULT_REGION": "us-east-2"}, "", "us-east-2"),
    ],
)
def test_the_region_is_that_of_the_cluster(
    servers: str, environment: dict[str, str], config: str, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    more = {"sasl.oauthbearer.config": config} if config else {}
    kafka = {**SASL, "bootstrap.servers": servers, "sasl.mechanism": "AWS_MSK_IAM", **more}
    assert check_consumer(kafka)["sasl.oauthbearer.config"] == f"awsRegion={region}"


_REFUSED: list[tuple[dict[str, str], str]] = [
    ({"sasl.mechanism": "CRAM-MD5"}, "'CRAM-MD5'"),
    ({}, "'kafka.sasl.mechanism' is missing"),
    ({"sasl.mechanism": "PLAIN", "sasl.username": "u"}, "'kafka.sasl.password' is missing"),
    ({"sasl.mechanism": "OAUTHBEARER"}, "where tokens come from"),
    ({"sasl.mechanism": "AWS_MSK_IAM", "bootstrap.servers": "k:9098"}, "region of the cluster is unknown"),
    ({"sasl.mechanism": "AWS_MSK_IAM", "sasl.oauthbearer.config": "region=x"}, "has no option 'region'"),
    (
        {"sasl.mechanism": "AWS_MSK_IAM", "sasl.jaas.config": f'{OAUTH} required clientSecret="{SECRET}";'},
        "names OAuthBearerLoginModule, but 'kafka.sasl.mechanism'",
    ),
    (
        {"sasl.mechanism": "PLAIN", "sasl.jaas.config": f"{IAM}.IAMLoginModule required;"},
        "has the value 'PLAIN', but 'kafka.sasl.jaas.config'",
    ),
    (
        {
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.jaas.config": "a.IAMLoginModule required awsProfileName=p;",
            "sasl.oauthbearer.config": "awsRegion=eu-west-1",
        },
        "are both set for a login at AWS",
    ),
    ({"sasl.mechanism": "AWS_MSK_IAM", PROVIDER: "a:b"}, "are both set"),
    (
        {"sasl.mechanism": "OAUTHBEARER", "sasl.login.callback.handler.class": "com.example.Handler"},
        "'com.example.Handler': only Java's clients",
    ),
    (
        {
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.client.callback.handler.class": "com.example.Handler",
        },
        "'com.example.Handler'",
    ),
    (
        {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.client.secret": "other",
            "sasl.jaas.config": f'{OAUTH} required clientId="me" clientSecret="{SECRET}";',
        },
        "'kafka.sasl.oauthbearer.client.secret' and 'kafka.sasl.jaas.config'",
    ),
    ({"sasl.jaas.config": f'{OAUTH} required clientSecret="{SECRET}"'}, "one entry"),
    ({"sasl.jaas.config": f'a.b.OtherLoginModule required p="{SECRET}";'}, "OtherLoginModule cannot"),
    ({"sasl.jaas.config": f"{KERBEROS} required useKeyTab=true;"}, "keyTab with useKeyTab"),
    (
        {"sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_team="{SECRET}";'},
        "unsecuredLoginStringClaim_sub",
    ),
    ({"sasl.mechanism": "GSSAPI", "sasl.kerberos.kinit.cmd": "kinit me"}, "kinit.cmd' .* cannot be used"),
]  # fmt: skip


def test_a_handler_of_java_is_refused_with_each_way_to_get_tokens() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        check_consumer(
            {
                **SASL,
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.login.callback.handler.class": "io.strimzi.kafka.oauth.client."
                "JaasClientOauthLoginCallbackHandler",
            }
        )
    assert "kafka.sasl.oauthbearer.token.endpoint.url" in caught.value.fix
    assert PROVIDER in caught.value.fix


@pytest.mark.parametrize(("kafka", "said"), _REFUSED)
def test_what_cannot_log_in_is_refused_before_a_query_starts(
    kafka: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_installed(monkeypatch)
    with pytest.raises(InvalidOptionError, match=said) as caught:
        check_consumer({**SASL, "bootstrap.servers": MSK, **kafka})
    assert caught.value.fix
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "extra", "kafka"),
    [
        ("gssapi", "kerberos", {"sasl.mechanism": "GSSAPI"}),
        ("aws_msk_iam_sasl_signer", "aws", {"sasl.mechanism": "AWS_MSK_IAM", "bootstrap.servers": MSK}),
    ],
)
def test_a_missing_package_is_named_with_the_command(
    package: str, extra: str, kafka: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_installed(monkeypatch, without=package)
    with pytest.raises(InvalidOptionError, match="is not installed") as caught:
        check_consumer({**SASL, **kafka})
    assert f"pip install 'kafka-eos-source[{extra}]'" in caught.value.fix


def test_options_without_sasl_are_not_checked() -> None:
    assert check_consumer({"security.protocol": "SSL", "sasl.mechanism": "OAUTHBEARER"}) != {}


@pytest.mark.parametrize("name", [PROVIDER, "sasl.jaas.config", "sasl.client.callback.handler.class"])
def test_options_of_logins_are_known(name: str) -> None:
    assert is_known(name)
